//! The description of each family: of published configurations as readable text, with the parameters that their
//! publishers count; of the tiny models of `tests/goldens/families`, every tensor that transformers' own class has.
//!
//! `tests/goldens/specs/NAME.json` holds the fields of a published `config.json`, `NAME.txt` the description. The texts are
//! written anew with `STOKER_WRITE_GOLDENS=1`. `defaults.json` is what transformers assumes for fields that are left out:
//! `tests/tools/make_config_goldens.py`.

use std::{collections::BTreeMap, fs, path::PathBuf};

use serde_json::{Value, json};
use stoker_engine::{
    ModelFiles,
    model::{self, Activation, CheckpointFormat, ModelConfig, ModelSpec, spec::Rank},
};

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

/// What transformers assumes for fields that are left out, beside what our description has.
#[test]
fn fields_that_are_left_out_mean_what_they_mean_to_transformers() {
    let defaults = Golden::read_file(&golden("defaults.json")).0;
    for case in defaults["cases"].as_array().unwrap() {
        let spec = spec(&case["config"], CheckpointFormat::HuggingFace);
        let (first, expected) = (&spec.layers[0], &case["expected"]);
        let attention = first.attention.attention;
        let activation = match first.feed_forward.activation {
            Activation::Silu => "silu",
            Activation::GeluTanh => "gelu_pytorch_tanh",
        };
        let described = json!({
            "head_dim": attention.heads.head_dim,
            "num_key_value_heads": attention.heads.n_kv_heads,
            "windows": spec.layers.iter().map(|layer| layer.attention.attention.window).collect::<Vec<_>>(),
            "attention_softcap": attention.softcap,
            "logit_softcap": spec.head.softcap,
            "thetas": spec.rope_sets.iter().map(|rope| rope.theta).collect::<Vec<_>>(),
            "tied": spec.head.weight.is_none(),
            "activation": activation,
        });
        for (field, found) in described.as_object().unwrap() {
            assert_eq!(found, &expected[field], "{field} of {}", case["config"]);
        }
        let near = |found: f32, field: &str| (f64::from(found) / expected[field].as_f64().unwrap() - 1.0).abs() < 1e-6;
        assert!(near(attention.scale, "scale") && near(spec.norm.eps, "eps"), "{}", case["config"]);
    }
}

#[test]
fn a_checkpoint_is_described_with_the_formats_of_its_weights() {
    check("ember.txt", &model::describe(&ModelFiles::Directory(common::ember())).unwrap());
    let gguf = crate::gguf::File::of("llama-mixed").write();
    check("llama-mixed.gguf.txt", &model::describe(&ModelFiles::Directory(gguf.path().into())).unwrap());
}

#[test]
fn ranks_have_shares_of_every_weight_or_hear_which_does_not_divide() {
    for (name, _) in PUBLISHED {
        let spec = spec(&published(name), CheckpointFormat::HuggingFace);
        let shares =
            |idx, of| spec.weights().map(|weight| weight.slice(Rank { idx, of })).collect::<Result<Vec<_>, _>>();
        assert_ne!(shares(0, 2).unwrap(), shares(1, 2).unwrap(), "{name}");
        let kv_heads = spec.layers[0].attention.attention.heads.n_kv_heads;
        if name == "gemma-3-1b" {
            // Its only KV head is on every rank.
            assert_eq!(kv_heads, 1);
            let refusal = shares(0, 3).unwrap_err().to_string();
            assert!(refusal.contains("q_proj.weight: 3 ranks do not divide its 4 heads of 256"), "{refusal}");
        }
    }
}
