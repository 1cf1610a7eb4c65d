//! GGUF files: read as the `gguf` package wrote them, computed as transformers does, refused when they lie. The goldens
//! are made by `tests/tools/make_gguf_goldens.py`, which explains their fields.

use std::{fs, path::PathBuf};

use proptest::prelude::*;
use serde_json::Value;
use sha2::{Digest, Sha256};
use stoker_engine::{EngineLimits, LoadedModel, ModelFiles, TokenId, model::planning_config};
use stoker_fit::plan::{Asked, Model, Place, plan};
use tempfile::TempDir;

use crate::{
    common,
    families::{self, random_bits},
    goldens::{F32_TOLERANCE, Golden, difference},
};

/// A GGUF file put together from its golden.
pub(crate) struct File {
    golden: Golden,
    bytes: Vec<u8>,
}

fn goldens() -> PathBuf {
    common::checkpoint("../gguf")
}

fn hex(digest: impl AsRef<[u8]>) -> String {
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

impl File {
    pub(crate) fn of(name: &str) -> Self {
        let golden = Golden::read_file(&goldens().join(format!("{name}.json")));
        let header = fs::read(goldens().join(format!("{name}.header"))).unwrap();
        let mut data = vec![0; golden.0["n_bytes"].as_u64().unwrap() as usize];
        for tensor in golden.0["tensors"].as_array().unwrap() {
            let offset = tensor[3].as_u64().unwrap() as usize;
            let bytes = tensor_bytes(tensor, &golden);
            data[offset..offset + bytes.len()].copy_from_slice(&bytes);
        }
        for constant in golden.0["constants"].as_array().unwrap() {
            let (offset, digits) = (constant[1].as_u64().unwrap() as usize, constant[2].as_str().unwrap());
            for (idx, byte) in digits.as_bytes().chunks(2).enumerate() {
                data[offset + idx] = u8::from_str_radix(std::str::from_utf8(byte).unwrap(), 16).unwrap();
            }
        }
        let bytes = [header, data].concat();
        assert_eq!(hex(Sha256::digest(&bytes)), golden.0["file_sha256"], "{name}: the file of the script");
        Self { golden, bytes }
    }

    pub(crate) fn write(&self) -> TempDir {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("model.gguf"), &self.bytes).unwrap();
        directory
    }
}

fn tensor_bytes(tensor: &Value, golden: &Golden) -> Vec<u8> {
    let (hf_name, kind) = (tensor[1].as_str().unwrap(), tensor[2].as_str().unwrap());
    let n_bytes = tensor[4].as_u64().unwrap();
    if kind != "F32" {
        return block_bytes(hf_name, kind, n_bytes);
    }
    let values = f32_values(hf_name, n_bytes / 4, golden);
    let values = match tensor[5].as_u64() {
        Some(n_heads) => in_pairs(&values, n_heads as usize),
        None => values,
    };
    values.into_iter().flat_map(f32::to_le_bytes).collect()
}

/// The numbers of a tensor; Gemma's norms are stored with the one that they lack elsewhere.
fn f32_values(hf_name: &str, n_values: u64, golden: &Golden) -> Vec<f32> {
    let Some(family) = golden.0["family"].as_str() else {
        return families::values_of(hf_name, n_values, 1.0).map(half::bf16::to_f32).collect();
    };
    let family_golden = Golden::read(&families::directory(family));
    let base =
        family_golden.0["tensors"].as_array().unwrap().iter().find(|tensor| tensor[0] == hf_name).unwrap()[2].as_f64();
    let extra = if family.starts_with("gemma") && hf_name.contains("norm") { 1.0 } else { 0.0 };
    families::values_of(hf_name, n_values, base.unwrap() as f32).map(|value| extra + value.to_f32()).collect()
}

/// Rows of all our tiny models are 64 wide.
fn in_pairs(values: &[f32], n_heads: usize) -> Vec<f32> {
    const WIDTH: usize = 64;
    let rows: Vec<&[f32]> = values.chunks(WIDTH).collect();
    let pairs = rows.len() / n_heads / 2;
    let order = (0..n_heads)
        .flat_map(|head| (0..pairs).flat_map(move |pair| [0, 1].map(|half| head * 2 * pairs + half * pairs + pair)));
    order.flat_map(|row| rows[row].iter().copied()).collect()
}

/// Bytes of a block; where it has scales in f16, and the exponents they get.
fn block_layout(kind: &str) -> (usize, &'static [(usize, u8)]) {
    match kind {
        "Q8_0" => (34, &[(0, 4)]),
        "Q4_0" => (18, &[(0, 9)]),
        "Q4_1" => (20, &[(0, 8), (2, 10)]),
        "Q5_0" => (22, &[(0, 8)]),
        "Q5_1" => (24, &[(0, 7), (2, 10)]),
        "Q4_K" => (144, &[(0, 2), (2, 5)]),
        "Q5_K" => (176, &[(0, 1), (2, 5)]),
        "Q6_K" => (210, &[(208, 1)]),
        other => panic!("{other}"),
    }
}

/// The formula's bytes, with the scales' exponents set as in the script.
pub(crate) fn block_bytes(name: &str, kind: &str, n_bytes: u64) -> Vec<u8> {
    let (size, scales) = block_layout(kind);
    let mut bytes: Vec<u8> = random_bits(name).take(n_bytes as usize).map(|z| (z >> 56) as u8).collect();
    for block in bytes.chunks_mut(size) {
        for (at, exponent) in scales {
            block[at + 1] = block[at + 1] & 3 | exponent << 2;
        }
    }
    bytes
}

/// Loads the file and compares logits with those of the golden, or of the family it belongs to. Those of a quantised model
/// may be as far from those of its dequantised weights as rounding to eight bits puts transformers' own, twice: it rounds
/// the same numbers after sums of another order.
fn check(name: &str) {
    let file = File::of(name);
    let directory = file.write();
    let family = file.golden.0["family"].as_str().filter(|_| file.golden.0["rows"].is_null());
    let family = family.map(|family| Golden::read(&families::directory(family)));
    let golden = family.as_ref().unwrap_or(&file.golden);
    let tokens = golden.tokens("/tokens");
    let limits = EngineLimits { max_model_len: Some(tokens.len() as u32), ..EngineLimits::default() };
    let mut model = LoadedModel::open(&common::config(directory.path(), limits), &|_| {}).unwrap();
    let ours = model.executor.teacher_forced_logits(&tokens, tokens.len());
    let found = difference(&ours, &golden.0["rows"], &golden.tokens("/ids"));
    println!("{name}: {found:.1e} from transformers");
    let tolerance = file.golden.0["noise_floor"].as_f64().map_or(F32_TOLERANCE, |noise_floor| 2.0 * noise_floor);
    assert!(found < tolerance, "{name}: {found}");
    for text in file.golden.0["texts"].as_array().unwrap() {
        let expected: Vec<TokenId> = serde_json::from_value(text[1].clone()).unwrap();
        let found = model.parts.tokenizer.encode(text[0].as_str().unwrap(), true).unwrap();
        assert_eq!(found, expected, "{name}: {text}");
    }
}

#[test]
fn llama_with_its_rows_in_pairs() {
    check("llama2");
}

#[test]
fn llama3_with_divisors_of_frequencies() {
    check("llama3");
}

#[test]
fn qwen2_and_qwen3() {
    check("qwen2");
    check("qwen3");
}

#[test]
fn phi3_with_fused_matrices() {
    check("phi3");
}

#[test]
fn gemma_2_and_3_with_norms_as_factors() {
    check("gemma2");
    check("gemma3");
}

#[test]
fn matrices_of_one_quantised_format() {
    check("llama-q8_0");
    check("llama-q4_0");
}

/// Most tokens that follow are those of the dequantised weights; where another one does, the two were as good as tied.
#[test]
fn quantised_models_write_what_their_weights_do() {
    for name in ["llama-q8_0", "llama-q4_0", "llama-mixed"] {
        let file = File::of(name);
        let (tokens, greedy) = (file.golden.tokens("/tokens"), file.golden.tokens("/greedy"));
        let directory = file.write();
        let all = [&tokens[..], &greedy].concat();
        let limits = EngineLimits { max_model_len: Some(all.len() as u32), ..EngineLimits::default() };
        let mut model = LoadedModel::open(&common::config(directory.path(), limits), &|_| {}).unwrap();
        let rows = model.executor.teacher_forced_logits(&all, all.len());
        let tie = 2.0 * file.golden.0["noise_floor"].as_f64().unwrap() as f32;
        let followed = rows[tokens.len() - 1..].iter().zip(&greedy).map(|(row, greedy)| {
            let (best, largest) = row.iter().fold((f32::MIN, 0.0f32), |(a, b), x| (a.max(*x), b.max(x.abs())));
            let lost = best - row[*greedy as usize];
            assert!(lost <= tie * largest, "{name}: {greedy} is {lost} from the best");
            lost == 0.0
        });
        let n_same = followed.filter(|same| *same).count();
        println!("{name}: {n_same} of {} tokens", greedy.len());
        assert!(4 * n_same >= 3 * greedy.len(), "{name}: {n_same} of {}", greedy.len());
    }
}

#[test]
fn every_quantised_format_in_one_model() {
    check("llama-mixed");
    let directory = File::of("llama-mixed").write();
    let model = common::open(&directory.path().join("model.gguf")).unwrap();
    assert_eq!(model.parts.model.dtype, "q6_k", "the format of the largest tensor is the one that is told");
}

/// What an agent tells of a file is enough for others to plan with: the same numbers as the engine's, which reads the weights.
#[test]
fn what_stands_for_a_config_json_plans_as_the_engine_does() {
    let names =
        ["llama2", "llama3", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "llama-q8_0", "llama-q4_0", "llama-mixed"];
    for name in names {
        let directory = File::of(name).write();
        let (max_model_len, kv_cache_tokens) = (Some(32), Some(256));
        let limits = EngineLimits { max_model_len, kv_cache_tokens, ..EngineLimits::default() };
        let engine = common::config(directory.path(), limits);
        let found = LoadedModel::open(&engine, &|_| {}).unwrap().parts.model.memory;
        let config = planning_config(&engine.model).unwrap().unwrap();
        let model = Model::from_json(&config, "model.gguf").unwrap();
        let asked = Asked { max_model_len, kv_cache_tokens, ..Asked::default() };
        let planned = plan(&model, &asked, Place::Host { limit_bytes: found.limit_bytes }).unwrap().memory;
        assert_eq!(planned, found, "{name}");
    }
    assert_eq!(planning_config(&ModelFiles::Directory(common::ember())).unwrap(), None, "it has a config.json");
}

#[test]
fn quantised_blocks_become_the_numbers_of_the_gguf_package_bit_by_bit() {
    let golden = Golden::read_file(&goldens().join("dequantised.json"));
    for format in golden.0["formats"].as_array().unwrap() {
        let kind = format[0].as_str().unwrap();
        let n_bytes = golden.0["n_blocks"].as_u64().unwrap() * block_layout(kind).0 as u64;
        let values =
            stoker_engine::model::WeightFormat::of_name(kind).unwrap().unpack(&block_bytes(kind, kind, n_bytes));
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        assert_eq!(hex(Sha256::digest(bytes)), format[1], "{kind}: {:?}, expected {}", &values[..4], format[2]);
    }
}

fn refusal(bytes: &[u8]) -> String {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("model.gguf"), bytes).unwrap();
    common::open(&directory.path().join("model.gguf")).unwrap_err().to_string()
}

/// The file with the first occurrence of some bytes replaced by as many others.
fn with(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let at = bytes.windows(from.len()).position(|window| window == from).expect("the bytes are in the file");
    let mut edited = bytes.to_vec();
    edited[at..at + to.len()].copy_from_slice(to);
    edited
}

fn check_refused(bytes: &[u8], parts: &[&str]) {
    let message = refusal(bytes);
    for part in ["model.gguf"].iter().chain(parts) {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}

#[test]
fn files_that_are_not_what_they_say_are_refused_with_the_reason() {
    let good = File::of("llama2").bytes;
    check_refused(&[], &["not a GGUF file", "0 left"]);
    check_refused(b"GGML and more", &["does not begin with \"GGUF\""]);
    check_refused(&with(&good, b"GGUF\x03", b"GGUF\x01"), &["its version is 1; supported: 2, 3"]);
    check_refused(&good[..40], &["its header ends early"]);
    check_refused(&good[..good.len() - 40], &["tensor ", "the file ends before: copy it again"]);
    let mut counts = good.clone();
    counts[8..16].fill(0xFF);
    check_refused(&counts, &["its header ends early"]);
    let mut keys = good.clone();
    keys[16..24].fill(0xFF);
    check_refused(&keys, &["not a GGUF file"]);
    check_refused(
        &with(&good, b"output_norm.weight", b"output_mode.weight"),
        &["model.norm.weight is missing", "[64]"],
    );
    check_refused(
        &with(&good, b"blk.1.ffn_down.weight", b"blk.1.ffn_dawn.weight"),
        &["tensor blk.1.ffn_down.weight = model.layers.1.mlp.down_proj.weight is missing"],
    );
    check_refused(&with(&good, b"llama.block_count", b"llama.block_cOunt"), &["`llama.block_count` is missing"]);
    check_refused(
        &with(&good, b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0grok1"),
        &["architecture grok1 is not supported", "llama, qwen2"],
    );
    check_refused(
        &with(&good, b"blk.0.attn_k.weight", b"blk.0.attn_q.weight"),
        &["blk.0.attn_q.weight is there twice"],
    );
}

#[test]
fn a_directory_with_two_files_asks_which() {
    let directory = File::of("llama2").write();
    fs::copy(directory.path().join("model.gguf"), directory.path().join("other.gguf")).unwrap();
    let message = common::open(directory.path()).unwrap_err().to_string();
    assert!(message.contains("2 .gguf files"), "{message}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn a_header_damaged_anywhere_is_refused_or_read_but_never_panics(
        damages in prop::collection::vec((0usize..8000, prop::collection::vec(any::<u8>(), 1..9)), 1..4),
        cut in prop::option::of(0usize..9000),
    ) {
        static GOOD: std::sync::LazyLock<Vec<u8>> = std::sync::LazyLock::new(|| File::of("llama2").bytes);
        let mut bytes = GOOD.clone();
        for (at, written) in damages {
            bytes[at..at + written.len()].copy_from_slice(&written);
        }
        bytes.truncate(cut.unwrap_or(bytes.len()));
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("model.gguf"), &bytes).unwrap();
        let _ = common::open(directory.path());
    }
}
