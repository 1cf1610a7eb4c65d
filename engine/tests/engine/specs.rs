//! The description of each family: of published configurations as readable text, with the parameters that their
//! publishers count; of the tiny models of `tests/goldens/families`, every tensor that transformers' own class has.
//!
//! `tests/goldens/specs/NAME.json` holds the fields of a published `config.json`, `NAME.txt` the description. The texts are
//! written anew with `STOKER_WRITE_GOLDENS=1`.

use std::{collections::BTreeMap, fs, path::PathBuf};

use serde_json::Value;
use stoker_engine::model::{CheckpointFormat, ModelConfig, ModelSpec};

use crate::{common, families, goldens::Golden};

/// Configurations, and the parameters of their checkpoints by the publishers' own count.
const PUBLISHED: [(&str, u64); 9] = [
    ("llama-3.1-8b", 8_030_261_248),
    ("mistral-7b-v0.1", 7_241_732_096),
    ("qwen2.5-7b", 7_615_616_512),
    ("qwen3-8b", 8_190_735_360),
    ("smollm3-3b", 3_075_098_624),
    ("olmo2-7b", 7_298_617_344),
    ("phi-4", 14_659_507_200),
    ("gemma-2-9b", 9_241_705_984),
    ("gemma-3-1b", 999_885_952),
];

fn golden(file: &str) -> PathBuf {
    common::checkpoint("../specs").join(file)
}

fn spec(config: &Value, format: CheckpointFormat) -> ModelSpec {
    ModelSpec::new(&ModelConfig::from_json(config, "config.json").unwrap(), format).unwrap()
}

fn published(name: &str) -> Value {
    serde_json::from_str(&fs::read_to_string(golden(&format!("{name}.json"))).unwrap()).unwrap()
}

fn check(file: &str, text: &str) {
    let path = golden(file);
    if std::env::var_os("STOKER_WRITE_GOLDENS").is_some() {
        fs::write(&path, text).unwrap();
    }
    assert_eq!(text, fs::read_to_string(&path).unwrap_or_default(), "{}", path.display());
}

#[test]
fn published_models_are_described_as_their_publishers_count_them() {
    for (name, n_params) in PUBLISHED {
        let spec = spec(&published(name), CheckpointFormat::HuggingFace);
        assert_eq!(spec.n_params(), n_params, "{name}");
        check(&format!("{name}.txt"), &spec.to_string());
    }
}

#[test]
fn a_gguf_file_has_names_and_an_order_of_its_own() {
    check("llama-3.1-8b.gguf.txt", &spec(&published("llama-3.1-8b"), CheckpointFormat::Gguf).to_string());
}

#[test]
fn every_tensor_of_transformers_own_classes_is_described_with_its_shape() {
    for name in families::names() {
        let directory = families::directory(&name);
        let config = serde_json::from_str(&fs::read_to_string(directory.join("config.json")).unwrap()).unwrap();
        let spec = spec(&config, CheckpointFormat::HuggingFace);
        let mut described: BTreeMap<String, (Vec<usize>, usize)> = BTreeMap::new();
        for weight in spec.weights() {
            let entry = described.entry(weight.tensor.clone()).or_insert((weight.tensor_shape.clone(), 0));
            assert_eq!(weight.rows.start, entry.1, "{name}: rows of {} follow each other", weight.tensor);
            entry.1 = weight.rows.end;
        }
        let described: BTreeMap<_, _> = described
            .into_iter()
            .map(|(tensor, (shape, rows))| {
                assert_eq!(rows, shape[0], "{name}: all rows of {tensor} belong to a weight");
                (tensor, shape)
            })
            .collect();
        let of_transformers = Golden::read(&directory).0["tensors"]
            .as_array()
            .unwrap()
            .iter()
            .map(|tensor| {
                let shape = tensor[1].as_array().unwrap().iter().map(|size| size.as_u64().unwrap() as usize).collect();
                (tensor[0].as_str().unwrap().to_owned(), shape)
            })
            .collect();
        assert_eq!(described, of_transformers, "{name}");
    }
}
