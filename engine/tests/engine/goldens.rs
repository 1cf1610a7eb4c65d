//! Logits and greedy tokens agree with Hugging Face transformers. The goldens are made by
//! `tests/tools/make_engine_goldens.py`, which explains their fields.

use std::{fs, path::Path};

use serde_json::Value;
use sha2::{Digest, Sha256};
use stoker_engine::{EngineConfig, EngineLimits, LoadedModel, ModelFiles, TokenId};

use crate::common;

/// Largest difference of a row relative to its largest logit, both computed in f32: the order of sums is all that
/// differs. Measured: at most 2e-6 over the checkpoints here.
pub(crate) const F32_TOLERANCE: f64 = 1e-4;

pub(crate) struct Golden(pub(crate) Value);

impl Golden {
    fn of(name: &str) -> Self {
        Self::read(&common::checkpoint(name))
    }

    pub(crate) fn read(directory: &Path) -> Self {
        Self::read_file(&directory.join("golden.json"))
    }

    pub(crate) fn read_file(file: &Path) -> Self {
        let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        Self(serde_json::from_str(&text).unwrap())
    }

    pub(crate) fn tokens(&self, pointer: &str) -> Vec<TokenId> {
        let list = self.0.pointer(pointer).and_then(Value::as_array).unwrap();
        list.iter().map(|token| token.as_u64().unwrap() as TokenId).collect()
    }
}

/// The largest relative difference between our rows and the golden's.
pub(crate) fn difference(ours: &[Vec<f32>], rows: &Value, ids: &[TokenId]) -> f64 {
    let of_row = |row: &Value| {
        let ours = &ours[row["position"].as_u64().unwrap() as usize];
        let scale = ours.iter().fold(0.0f64, |max, logit| max.max(f64::from(logit.abs())));
        let theirs = row["logits"].as_array().unwrap().iter().map(|logit| logit.as_f64().unwrap());
        let pairs = ids.iter().zip(theirs).map(|(id, theirs)| (f64::from(ours[*id as usize]), theirs));
        let largest = pairs.map(|(ours, theirs)| (ours - theirs).abs()).fold(0.0, f64::max);
        let sum: f64 = ours.iter().map(|logit| f64::from(*logit).exp()).sum();
        largest.max((sum.ln() - row["log_sum_exp"].as_f64().unwrap()).abs()) / scale
    };
    rows.as_array().unwrap().iter().map(of_row).fold(0.0, f64::max)
}

fn check_logits(name: &str, directory: &Path) {
    let golden = Golden::of(name);
    let (tokens, ids) = (golden.tokens("/tokens"), golden.tokens("/ids"));
    let logits_in_chunks = |chunk_len| {
        let mut model = common::open(directory).unwrap();
        model.executor.teacher_forced_logits(&tokens, chunk_len)
    };
    let ours = logits_in_chunks(tokens.len());
    let f32_difference = difference(&ours, &golden.0["rows"], &ids);
    println!("{name}: {f32_difference:.1e} from transformers in f32");
    match golden.0["noise_floor"].as_f64() {
        None => assert!(f32_difference < F32_TOLERANCE, "{name}: {f32_difference}"),
        Some(noise_floor) => {
            let bf16_difference = difference(&ours, &golden.0["rows_bf16"], &ids);
            println!("{name}: {bf16_difference:.1e} from transformers in bf16, noise floor {noise_floor:.1e}");
            assert!(f32_difference < noise_floor, "{name}: {f32_difference}");
            assert!(bf16_difference < noise_floor + F32_TOLERANCE, "{name}: {bf16_difference}");
        }
    }
    for chunk_len in [1, 16, 37] {
        assert_eq!(logits_in_chunks(chunk_len), ours, "{name}: chunks of {chunk_len} give the same bits");
    }
}

/// The engine writes the golden's tokens. In bf16 only up to the first of them that rounding could have decided
/// otherwise: from there on the two write different texts. Beyond it, `check_choices` compares.
fn check_greedy(name: &str, directory: &Path) {
    let golden = Golden::of(name);
    let expected = golden.tokens("/greedy/tokens");
    let n_certain = check_choices(&golden, name, directory);
    let engine = common::start(directory, EngineLimits::default());
    let request = common::greedy(golden.tokens("/greedy/prompt"), expected.len() as u32);
    assert_eq!(common::read_all(engine.submit(request).unwrap()).0[..n_certain], expected[..n_certain], "{name}");
}

/// After each prefix of the golden's text the golden's next token is our best one or, in bf16, within the noise of the
/// best: both computations may be off by the floor. Returns how many tokens come before the first that is not the best.
fn check_choices(golden: &Golden, name: &str, directory: &Path) -> usize {
    let (prompt, expected) = (golden.tokens("/greedy/prompt"), golden.tokens("/greedy/tokens"));
    let noise = 2.0 * golden.0["noise_floor"].as_f64().unwrap_or(0.0);
    let tokens = [&prompt[..], &expected[..expected.len() - 1]].concat();
    let rows = common::open(directory).unwrap().executor.teacher_forced_logits(&tokens, tokens.len());
    let below_best = rows[prompt.len() - 1..].iter().zip(&expected).map(|(row, token)| {
        let best = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let scale = row.iter().fold(0.0f32, |max, logit| max.max(logit.abs()));
        f64::from((best - row[*token as usize]) / scale)
    });
    let below_best: Vec<f64> = below_best.collect();
    let worst = below_best.iter().copied().fold(0.0, f64::max);
    assert!(worst <= noise, "{name}: a token is {worst:.1e} below the best, noise {noise:.1e}");
    below_best.iter().position(|gap| *gap > 0.0).unwrap_or(expected.len())
}

/// A model that was trained anew needs a new golden.
fn check_weights(name: &str, directory: &Path) {
    let mut files: Vec<_> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "safetensors"));
    files.sort();
    let mut digest = Sha256::new();
    files.iter().for_each(|file| digest.update(fs::read(file).unwrap()));
    let found: String = digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    let made_from = Golden::of(name).0["weights_sha256"].as_str().unwrap().to_owned();
    assert_eq!(found, made_from, "{name}: the golden is of other weights: run tests/tools/make_engine_goldens.py");
}

fn check_model(name: &str, directory: &Path) {
    check_weights(name, directory);
    check_logits(name, directory);
    check_greedy(name, directory);
}

fn check(name: &str) {
    check_model(name, &common::checkpoint(name));
}

#[test]
fn the_built_in_model_in_bf16() {
    check_model("ember", &common::ember());
}

#[test]
fn grouped_query_attention_in_f32() {
    check("gqa-f32");
}

#[test]
fn llama3_rope_tied_embeddings_and_wide_heads_in_bf16() {
    check("llama3-rope-tied-bf16");
}

#[test]
fn yarn_and_biases_in_f32() {
    check("yarn-biases-f32");
}

#[test]
fn a_sharded_checkpoint_in_bf16() {
    check("sharded-bf16");
}

#[test]
fn multi_query_attention_in_f16() {
    check("mqa-f16");
}

/// The files of a checkpoint as they lie in a binary.
fn built_in(name: &'static str) -> ModelFiles {
    let leak = |entry: std::io::Result<fs::DirEntry>| {
        let entry = entry.unwrap();
        let file: &'static str = entry.file_name().into_string().unwrap().leak();
        let bytes: &'static [u8] = fs::read(entry.path()).unwrap().leak();
        (file, bytes)
    };
    let files: Vec<_> = fs::read_dir(common::checkpoint(name)).unwrap().map(leak).collect();
    ModelFiles::Builtin { name, files: files.leak() }
}

#[test]
fn a_model_inside_the_binary_is_the_same_model() {
    for name in ["gqa-f32", "sharded-bf16"] {
        let config = common::config(&common::checkpoint(name), EngineLimits::default());
        let config = EngineConfig { model: built_in(name), ..config };
        let golden = Golden::of(name);
        let mut inside = LoadedModel::open(&config, &|_| {}).unwrap();
        let mut outside = common::open(&common::checkpoint(name)).unwrap();
        let tokens = golden.tokens("/greedy/prompt");
        let logits = |model: &mut LoadedModel| model.executor.teacher_forced_logits(&tokens, 16);
        assert_eq!(logits(&mut inside), logits(&mut outside), "{name}");
    }
}
