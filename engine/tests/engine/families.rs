//! Every family of models agrees with Hugging Face transformers. The goldens are made by
//! `tests/tools/make_family_goldens.py`, which explains their fields; the weights follow from the tensors' names.

use std::{
    fs,
    path::{Path, PathBuf},
};

use half::{bf16, f16};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use stoker_engine::{EngineLimits, LoadedModel, TokenId};
use tempfile::TempDir;

use crate::{
    common,
    goldens::{F32_TOLERANCE, Golden, difference},
};

/// How the checkpoint of a test stores its weights. The numbers are the same, but for those too small for f16.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Stored {
    F32,
    F16,
    Bf16,
}

/// The golden of one model, and its checkpoint while a test runs.
pub(crate) struct Family {
    golden: Golden,
    checkpoint: TempDir,
}

pub(crate) fn directory(name: &str) -> PathBuf {
    common::checkpoint("../families").join(name)
}

/// Every model that there is a golden of.
pub(crate) fn names() -> Vec<String> {
    let entries = fs::read_dir(directory("")).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

impl Family {
    pub(crate) fn new(name: &str, stored: Stored) -> Self {
        let golden = Golden::read(&directory(name));
        let checkpoint = tempfile::tempdir().unwrap();
        fs::copy(directory(name).join("config.json"), checkpoint.path().join("config.json")).unwrap();
        let tokenizer = common::checkpoint("gqa-f32").join("tokenizer.json");
        fs::copy(tokenizer, checkpoint.path().join("tokenizer.json")).unwrap();
        fs::write(checkpoint.path().join("model.safetensors"), weights(&golden.0, stored)).unwrap();
        Self { golden, checkpoint }
    }

    pub(crate) fn path(&self) -> &Path {
        self.checkpoint.path()
    }

    fn edit_config(&self, edit: impl Fn(&mut Value)) {
        let path = self.path().join("config.json");
        let mut config = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        edit(&mut config);
        fs::write(path, config.to_string()).unwrap();
    }

    fn open(&self, context: u32) -> LoadedModel {
        let limits = EngineLimits { max_model_len: Some(context), ..EngineLimits::default() };
        LoadedModel::open(&common::config(self.path(), limits), &|_| {}).unwrap_or_else(|error| panic!("{error}"))
    }

    fn logits(&self, tokens: &[TokenId], chunk_len: usize) -> Vec<Vec<f32>> {
        self.open(tokens.len() as u32).executor.teacher_forced_logits(tokens, chunk_len)
    }

    fn difference(&self, rows: &str) -> f64 {
        let mut tokens = self.golden.tokens("/tokens");
        if rows == "short" {
            tokens.truncate(17);
        }
        difference(&self.logits(&tokens, tokens.len()), &self.golden.0[rows], &self.golden.tokens("/ids"))
    }
}

/// A safetensors file with the golden's tensors.
pub(crate) fn weights(golden: &Value, stored: Stored) -> Vec<u8> {
    let (mut header, mut data, mut digest) = (serde_json::Map::new(), Vec::new(), Sha256::new());
    for tensor in golden["tensors"].as_array().unwrap() {
        let (name, shape) = (tensor[0].as_str().unwrap(), tensor[1].as_array().unwrap());
        let n_values = shape.iter().map(|size| size.as_u64().unwrap()).product();
        // A power of two, or nothing: exact in bf16.
        let factor = tensor.get(3).map_or(1.0, |factor| factor.as_f64().unwrap() as f32);
        let values = values_of(name, n_values, tensor[2].as_f64().unwrap() as f32);
        let values = values.map(|value| bf16::from_f32(value.to_f32() * factor));
        let start = data.len();
        for value in values {
            digest.update(value.to_le_bytes());
            match stored {
                Stored::F32 => data.extend(value.to_f32().to_le_bytes()),
                Stored::F16 => data.extend(f16::from_f32(value.to_f32()).to_le_bytes()),
                Stored::Bf16 => data.extend(value.to_le_bytes()),
            }
        }
        let dtype = match stored {
            Stored::F32 => "F32",
            Stored::F16 => "F16",
            Stored::Bf16 => "BF16",
        };
        header.insert(name.into(), json!({"dtype": dtype, "shape": shape, "data_offsets": [start, data.len()]}));
    }
    let digest: String = digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(digest, golden["weights_sha256"], "the formula here is the one of the script");
    let mut header = Value::from(header).to_string();
    // The format pads its header, so that numbers are aligned.
    header.push_str(&" ".repeat((8 - header.len() % 8) % 8));
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
}

/// The formula of `make_family_goldens.py`.
pub(crate) fn values_of(name: &str, n_values: u64, base: f32) -> impl Iterator<Item = bf16> {
    random_bits(name).take(n_values as usize).map(move |z| {
        let unit = (z >> 40) as f32 / (1u32 << 24) as f32;
        bf16::from_f32(base + 0.2 * (2.0 * unit - 1.0))
    })
}

/// The bits that belong to a tensor's name.
pub(crate) fn random_bits(name: &str) -> impl Iterator<Item = u64> + use<> {
    let fnv1a = |digest: u64, byte: u8| (digest ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3);
    let seed = name.bytes().fold(0xCBF2_9CE4_8422_2325, fnv1a);
    (0..).map(move |index: u64| {
        let mut z = seed.wrapping_add(index.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    })
}

/// In f32: within 1e-4 of transformers after prompts of 1, 17 and 333 tokens, the same bits however the prompt is cut,
/// and the same 64 greedy tokens.
fn check_f32(name: &str) {
    let family = Family::new(name, Stored::F32);
    let found = family.difference("rows");
    println!("{name}: {found:.1e} from transformers in f32");
    assert!(found < F32_TOLERANCE, "{name}: {found}");
    if family.golden.0["short"].is_array() {
        let found = family.difference("short");
        assert!(found < F32_TOLERANCE, "{name}, 17 tokens: {found}");
    }
    let tokens = family.golden.tokens("/tokens");
    let whole = family.logits(&tokens, tokens.len());
    for chunk_len in [1, 37] {
        assert_eq!(family.logits(&tokens, chunk_len), whole, "{name}: chunks of {chunk_len} give the same bits");
    }
    check_greedy(name, &family);
}

fn check_greedy(name: &str, family: &Family) {
    let (prompt, expected) = (family.golden.tokens("/tokens")[..17].to_vec(), family.golden.tokens("/greedy"));
    let limits = EngineLimits { max_model_len: Some(128), ..EngineLimits::default() };
    let engine = common::start(family.path(), limits);
    let request = common::greedy(prompt, expected.len() as u32);
    assert_eq!(common::read_all(engine.submit(request).unwrap()).0, expected, "{name}");
}

/// In bf16: within twice what rounding to bf16 makes of transformers' own numbers.
fn check_bf16(name: &str) {
    let family = Family::new(name, Stored::Bf16);
    let noise_floor = family.golden.0["noise_floor"].as_f64().unwrap();
    let found = family.difference("rows_bf16");
    println!("{name}: {found:.1e} from transformers in bf16, noise floor {noise_floor:.1e}");
    assert!(found < 2.0 * noise_floor, "{name}: {found}");
}

fn check(name: &str) {
    check_f32(name);
    check_bf16(name);
}

/// Without the setting the golden is missed: it is not there by accident.
fn check_matters(name: &str, edit: impl Fn(&mut Value)) {
    let family = Family::new(name, Stored::F32);
    family.edit_config(edit);
    let found = family.difference("rows");
    assert!(found > 10.0 * F32_TOLERANCE, "{name}: {found} without the setting");
}

#[test]
fn llama_2_and_3() {
    check("llama2");
    check("llama3");
}

#[test]
fn linear_and_dynamic_rope_scaling() {
    check("llama-linear");
    check("llama-dynamic");
}

#[test]
fn mistral_with_its_sliding_window() {
    check("mistral");
    check_matters("mistral", |config| config["sliding_window"] = json!(25));
}

#[test]
fn qwen2_with_biases_on_queries_keys_and_values() {
    check("qwen2");
}

#[test]
fn qwen2_with_windows_in_upper_layers_and_yarn() {
    check("qwen2-windows-yarn");
    check_matters("qwen2-windows-yarn", |config| config["layer_types"] = json!(["full_attention", "full_attention"]));
    check_matters("qwen2-windows-yarn", |config| config["rope_parameters"]["rope_type"] = json!("default"));
}

#[test]
fn qwen3_with_normed_heads() {
    check("qwen3");
}

#[test]
fn smollm3_with_layers_that_do_not_turn() {
    check("smollm3");
    check_matters("smollm3", |config| config["no_rope_layers"] = json!([1, 1, 1, 1]));
}

#[test]
fn olmo2_with_norms_behind_attention_and_feed_forward() {
    check("olmo2");
}

#[test]
fn phi3_with_fused_projections() {
    check("phi3");
}

#[test]
fn phi4_with_longrope_on_a_part_of_each_head() {
    check("phi4-longrope");
    check_matters("phi4-longrope", |config| {
        config["rope_parameters"]["long_factor"] = config["rope_parameters"]["short_factor"].clone();
    });
}

#[test]
fn gemma2_with_soft_caps_and_alternating_windows() {
    check("gemma2");
    check_matters("gemma2", |config| config["attn_logit_softcapping"] = json!(null));
    check_matters("gemma2", |config| config["final_logit_softcapping"] = json!(null));
    check_matters("gemma2", |config| config["query_pre_attn_scalar"] = json!(16));
    check_matters("gemma2", |config| config["layer_types"] = json!(["full_attention", "sliding_attention"]));
}

#[test]
fn gemma3_with_angles_of_their_own_in_windows() {
    check("gemma3");
    check_matters("gemma3", |config| config["rope_parameters"]["sliding_attention"]["rope_theta"] = json!(1e6));
    check_matters("gemma3", |config| config["rope_parameters"]["full_attention"]["factor"] = json!(1.0));
}
