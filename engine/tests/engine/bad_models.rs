//! Models that must be refused: each with a message that names the file and what is wrong, none with a panic.

use std::{fs, path::Path};

use proptest::prelude::*;
use serde_json::{Value, json};
use stoker_engine::{EngineLimits, FinishReason, RejectReason, RequestEvent};
use tempfile::TempDir;

use crate::common;

/// A private copy of a checkpoint to break.
struct Copy(TempDir);

impl Copy {
    fn of(name: &str) -> Self {
        let copy = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(common::checkpoint(name)).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
        }
        Self(copy)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn edit_json(&self, file: &str, edit: impl Fn(&mut Value)) {
        let path = self.path().join(file);
        let mut value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        edit(&mut value);
        fs::write(path, value.to_string()).unwrap();
    }

    fn edit_bytes(&self, file: &str, edit: impl Fn(&mut Vec<u8>)) {
        let path = self.path().join(file);
        let mut bytes = fs::read(&path).unwrap();
        edit(&mut bytes);
        fs::write(path, bytes).unwrap();
    }

    /// Rewrites the header of `model.safetensors`.
    fn edit_header(&self, edit: impl Fn(&mut Value)) {
        self.edit_bytes("model.safetensors", |bytes| {
            let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let mut header = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
            edit(&mut header);
            let header = header.to_string();
            let mut edited = (header.len() as u64).to_le_bytes().to_vec();
            edited.extend_from_slice(header.as_bytes());
            edited.extend_from_slice(&bytes[8 + len..]);
            *bytes = edited;
        });
    }

    /// The refusal, which must contain every part.
    fn refused_with(&self, parts: &[&str]) {
        common::refused_with(self.path(), parts);
    }
}

const NORM: &str = "model.norm.weight";

#[test]
fn a_directory_that_is_not_there() {
    let message = common::open(Path::new("no/such/model")).unwrap_err().to_string();
    assert!(message.contains("no/such/model/config.json"), "{message}");
}

#[test]
fn missing_files_are_named() {
    for file in ["config.json", "tokenizer.json", "model.safetensors"] {
        let copy = Copy::of("gqa-f32");
        fs::remove_file(copy.path().join(file)).unwrap();
        copy.refused_with(&[file, "No such file"]);
    }
    let copy = Copy::of("sharded-bf16");
    fs::remove_file(copy.path().join("model-00002-of-00003.safetensors")).unwrap();
    copy.refused_with(&["model-00002-of-00003.safetensors", "No such file"]);
}

#[test]
fn another_architecture_names_what_is_supported() {
    let copy = Copy::of("gqa-f32");
    copy.edit_json("config.json", |config| config["architectures"] = json!(["GPT2LMHeadModel"]));
    copy.refused_with(&["config.json", "GPT2LMHeadModel is not supported", "LlamaForCausalLM"]);
}

#[test]
fn a_config_that_is_not_json() {
    let copy = Copy::of("gqa-f32");
    copy.edit_bytes("config.json", |bytes| bytes.truncate(40));
    copy.refused_with(&["config.json", "not JSON", "line"]);
}

#[test]
fn weights_cut_short_name_the_tensor_that_is_not_whole() {
    let copy = Copy::of("gqa-f32");
    copy.edit_bytes("model.safetensors", |bytes| bytes.truncate(bytes.len() - 1));
    copy.refused_with(&["model.safetensors is truncated", "tensor "]);
    copy.edit_bytes("model.safetensors", |bytes| bytes.truncate(100));
    copy.refused_with(&["model.safetensors", "header claims", "the file has 100"]);
    copy.edit_bytes("model.safetensors", |bytes| bytes.truncate(3));
    copy.refused_with(&["model.safetensors", "3 bytes"]);
    copy.edit_bytes("model.safetensors", |bytes| bytes.clear());
    copy.refused_with(&["model.safetensors", "0 bytes"]);
}

#[test]
fn a_header_that_claims_more_than_any_file_has() {
    let copy = Copy::of("gqa-f32");
    copy.edit_bytes("model.safetensors", |bytes| bytes[..8].fill(0xFF));
    copy.refused_with(&["model.safetensors", "header claims 18446744073709551615 bytes"]);
}

#[test]
fn a_header_that_is_not_json() {
    let copy = Copy::of("gqa-f32");
    copy.edit_bytes("model.safetensors", |bytes| bytes[8..40].fill(b'x'));
    copy.refused_with(&["model.safetensors is not a safetensors file"]);
}

#[test]
fn offsets_that_lie() {
    let beyond = Copy::of("gqa-f32");
    beyond.edit_header(|header| header[NORM]["data_offsets"] = json!([1_000_000_000, 1_000_000_256]));
    beyond.refused_with(&["model.safetensors is truncated", NORM]);
    let short = Copy::of("gqa-f32");
    short.edit_header(|header| header[NORM]["data_offsets"] = json!([0, 8]));
    short.refused_with(&["model.safetensors", NORM, "has 8 bytes", "needs 256"]);
    let backwards = Copy::of("gqa-f32");
    backwards.edit_header(|header| header[NORM]["data_offsets"] = json!([256, 0]));
    backwards.refused_with(&["model.safetensors", NORM]);
    let enormous = Copy::of("gqa-f32");
    enormous.edit_header(|header| header[NORM]["shape"] = json!([u64::MAX, u64::MAX]));
    enormous.refused_with(&["model.safetensors", NORM, "more than any machine has"]);
    let overlapping = Copy::of("gqa-f32");
    overlapping.edit_header(|header| header["another"] = header[NORM].clone());
    overlapping.refused_with(&["model.safetensors", "its tensors describe", "its data has"]);
}

#[test]
fn a_missing_tensor_names_its_shape() {
    let copy = Copy::of("gqa-f32");
    copy.edit_header(|header| {
        let described = header.as_object_mut().unwrap().remove(NORM).unwrap();
        header["model.norm.scale"] = described;
    });
    copy.refused_with(&["model.safetensors", "tensor model.norm.weight is missing", "[64]"]);
}

#[test]
fn a_tensor_nobody_uses_is_refused_since_the_answer_would_be_wrong() {
    let copy = Copy::of("yarn-biases-f32");
    copy.edit_json("config.json", |config| config["mlp_bias"] = json!(false));
    copy.refused_with(&["model.safetensors", "bias is not part of LlamaForCausalLM"]);
}

#[test]
fn a_shape_that_config_json_does_not_say() {
    let copy = Copy::of("gqa-f32");
    copy.edit_json("config.json", |config| config["num_key_value_heads"] = json!(1));
    copy.refused_with(&["model.safetensors", "k_proj.weight has shape [32, 64]", "says [16, 64]"]);
}

#[test]
fn an_output_matrix_beside_tied_embeddings_is_refused_unless_it_is_their_copy() {
    let copy = Copy::of("gqa-f32");
    copy.edit_json("config.json", |config| config["tie_word_embeddings"] = json!(true));
    let parts = ["model.safetensors", "lm_head.weight is another matrix than model.embed_tokens.weight"];
    copy.refused_with(&[parts[0], parts[1], "set `tie_word_embeddings` to false"]);
    copy.edit_bytes("model.safetensors", |bytes| {
        let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
        let range = |name: &str| {
            let offset = |at: usize| 8 + len + header[name]["data_offsets"][at].as_u64().unwrap() as usize;
            offset(0)..offset(1)
        };
        bytes.copy_within(range("model.embed_tokens.weight"), range("lm_head.weight").start);
    });
    assert!(common::open(copy.path()).is_ok(), "some checkpoints carry the tied matrix a second time");
}

#[test]
fn weights_that_are_only_there_as_pickles_are_named() {
    let copy = Copy::of("gqa-f32");
    fs::rename(copy.path().join("model.safetensors"), copy.path().join("pytorch_model.bin")).unwrap();
    copy.refused_with(&["has weights in .bin files only", "convert them to safetensors"]);
}

#[test]
fn an_unsupported_number_format() {
    let copy = Copy::of("gqa-f32");
    copy.edit_header(|header| header[NORM]["dtype"] = json!("I32"));
    copy.refused_with(&["tensor model.norm.weight is I32; supported: F32, BF16, F16"]);
}

#[test]
fn an_index_that_leads_out_of_the_directory() {
    let copy = Copy::of("sharded-bf16");
    copy.edit_json("model.safetensors.index.json", |index| {
        index["weight_map"][NORM] = json!("../../etc/passwd");
    });
    copy.refused_with(&["model.safetensors.index.json", "weight_map", "../../etc/passwd"]);
}

#[test]
fn added_tokens_may_lie_beyond_the_vocabulary() {
    let copy = Copy::of("gqa-f32");
    copy.edit_json("tokenizer.json", |tokenizer| {
        let added = tokenizer["added_tokens"].as_array_mut().unwrap();
        let token = added[0].clone();
        added.extend((258..=272).map(|id| {
            let mut token = token.clone();
            (token["id"], token["content"]) = (json!(id), json!(format!("<image_{id}>")));
            token
        }));
    });
    let engine = common::start(copy.path(), EngineLimits::default());
    let prompt = engine.tokenizer().encode("<image_271><image_272>", false).unwrap();
    assert_eq!(prompt, [271, 272]);
    let refused = engine.submit(common::greedy(prompt, 1)).unwrap_err();
    assert_eq!(refused, RejectReason::BadToken { token: 272, vocab_size: 272 }, "Gemma 3 1B is shipped so");
}

#[test]
fn a_tokenizer_of_another_model() {
    let copy = Copy::of("gqa-f32");
    copy.edit_json("tokenizer.json", |tokenizer| {
        let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
        vocab.extend((0..20).map(|n| (format!("other{n}"), json!(300 + n))));
    });
    copy.refused_with(&["tokenizer.json has 276 tokens", "vocabulary is 272"]);
    copy.edit_bytes("tokenizer.json", |bytes| bytes.truncate(100));
    copy.refused_with(&["tokenizer.json", "not a tokenizer"]);
}

#[test]
fn sizes_that_do_not_fit_name_the_setting_that_would() {
    let directory = common::checkpoint("gqa-f32");
    let refused = |limits| {
        let config = common::config(&directory, limits);
        stoker_engine::LoadedModel::open(&config, &|_| {}).unwrap_err().to_string()
    };
    let message = refused(EngineLimits { memory_limit_bytes: Some(1 << 20), ..EngineLimits::default() });
    assert!(message.contains("raise the memory limit to at least"), "{message}");
    let message = refused(EngineLimits { max_model_len: Some(4096), ..EngineLimits::default() });
    assert!(message.contains("max_model_len 4096") && message.contains("256 tokens"), "{message}");
    let message = refused(EngineLimits { kv_cache_tokens: Some(100), ..EngineLimits::default() });
    assert!(message.contains("raise kv_cache_tokens to at least 256"), "{message}");
}

#[test]
fn absurd_sizes_in_config_json_are_refused_without_allocating_them() {
    const ABSURD: u64 = (1 << 31) - 2;
    let fields = ["num_hidden_layers", "head_dim", "hidden_size", "intermediate_size", "vocab_size"];
    for field in fields.into_iter().chain(["max_position_embeddings", "num_key_value_heads"]) {
        let copy = Copy::of("gqa-f32");
        copy.edit_json("config.json", |config| config[field] = json!(ABSURD));
        copy.refused_with(&[]);
    }
    // More layers than any model has are refused before anything is counted.
    let all = Copy::of("gqa-f32");
    all.edit_json("config.json", |config| fields.iter().for_each(|field| config[*field] = json!(ABSURD)));
    all.refused_with(&["num_hidden_layers", "more than any model has"]);
    let wide = Copy::of("gqa-f32");
    wide.edit_json("config.json", |config| fields[1..].iter().for_each(|field| config[*field] = json!(ABSURD)));
    wide.refused_with(&["raise the memory limit"]);
}

/// A file of the model, where in it to write, and what.
fn damage() -> impl Strategy<Value = (&'static str, usize, Vec<u8>)> {
    let files = vec!["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"];
    (prop::sample::select(files), 0usize..3000, prop::collection::vec(any::<u8>(), 1..12))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn files_damaged_anywhere_are_refused_or_read_but_never_panic(damages in prop::collection::vec(damage(), 1..4)) {
        let copy = Copy::of("gqa-f32");
        for (file, at, written) in damages {
            copy.edit_bytes(file, |bytes| {
                let at = at % bytes.len();
                let end = bytes.len().min(at + written.len());
                bytes[at..end].copy_from_slice(&written[..end - at]);
            });
        }
        let _ = common::open(copy.path());
    }
}

#[test]
fn a_request_that_meets_a_nan_ends_with_an_error_and_its_neighbour_does_not() {
    let (copy, broken, hidden_bytes) = (Copy::of("gqa-f32"), 7, hidden_size("gqa-f32") * size_of::<f32>());
    copy.edit_bytes("model.safetensors", |bytes| {
        let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
        let table = header["model.embed_tokens.weight"]["data_offsets"][0].as_u64().unwrap() as usize;
        let row = 8 + len + table + broken * hidden_bytes;
        bytes[row..row + size_of::<f32>()].copy_from_slice(&f32::NAN.to_le_bytes());
    });
    let engine = common::start(copy.path(), EngineLimits::default());
    let streams = [vec![1, 2, broken as u32, 3], vec![1, 2, 3]].map(|prompt| {
        let request = common::greedy(prompt, 5);
        engine.submit(request).unwrap()
    });
    let [mut broken, whole] = streams;
    let terminal = broken.blocking_next();
    let Some(RequestEvent::Finished { reason: FinishReason::Error(text), .. }) = terminal else {
        panic!("{terminal:?} is not an error")
    };
    assert!(text.contains("not a number"), "{text}");
    common::read_all(whole);
}

fn hidden_size(name: &str) -> usize {
    let config: Value =
        serde_json::from_slice(&fs::read(common::checkpoint(name).join("config.json")).unwrap()).unwrap();
    config["hidden_size"].as_u64().unwrap() as usize
}
