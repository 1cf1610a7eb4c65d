//! Every family on a GPU beside Hugging Face transformers: tiny models of transformers' own classes with heads that the kernels take,
//! and inputs that cross windows and the length at which LongRoPE switches. The goldens are made by
//! `tests/tools/make_gpu_goldens.py`, which explains their fields. Skipped where there is no GPU.

use std::{fs, path::PathBuf};

use stoker_engine::{
    DeviceChoice, Engine, EngineConfig, EngineLimits, KvCacheDtype, StartError, TokenId, exec::cuda::CudaModel,
};
use tempfile::TempDir;

use crate::{
    common, cuda, cuda_pipeline,
    families::{self, Stored},
    goldens::Golden,
};

/// Rows of a chunk at most: as many as their logits have room.
const CHUNK: usize = 512;
/// Tokens of the input that are decoded one by one, too: windows end among them.
const N_DECODED: usize = 400;
/// Context of greedy answers: LongRoPE's short one.
const SHORT_CONTEXT: u32 = 512;

/// What a cache in fp8 may move logits by, of the largest: in the mean what one number may be rounded by, a sixteenth, at the worst four
/// times that. Measured on one H200: 0.028 to 0.048 in the mean and 0.064 to 0.143 at the worst, bf16 there 0.009 to 0.013.
const CODES_MEAN: f64 = 0.0625;
const CODES_WORST: f64 = 0.25;

fn limits(context: u32) -> EngineLimits {
    EngineLimits {
        max_model_len: Some(context),
        kv_cache_tokens: Some(8192),
        max_num_seqs: Some(CHUNK as u32),
        ..EngineLimits::default()
    }
}

struct Family {
    name: &'static str,
    golden: Golden,
    checkpoint: TempDir,
}

/// How far rows are from the golden's, relative to their largest logit.
#[derive(Debug)]
struct Distances {
    mean: f64,
    p99: f64,
    worst: f64,
}

impl Distances {
    fn of(mut rows: Vec<f64>) -> Self {
        assert!(!rows.is_empty());
        rows.sort_by(f64::total_cmp);
        let mean = rows.iter().sum::<f64>() / rows.len() as f64;
        Self { mean, p99: rows[(rows.len() - 1) * 99 / 100], worst: rows[rows.len() - 1] }
    }

    fn are_within_twice(&self, noise: &Self) -> bool {
        self.mean <= 2.0 * noise.mean && self.p99 <= 2.0 * noise.p99 && self.worst <= 2.0 * noise.worst
    }
}

impl Family {
    fn new(name: &'static str) -> Self {
        let directory: PathBuf = common::checkpoint("../gpu-families").join(name);
        let (golden, checkpoint) = (Golden::read(&directory), tempfile::tempdir().unwrap());
        fs::copy(directory.join("config.json"), checkpoint.path().join("config.json")).unwrap();
        let tokenizer = common::checkpoint("gqa-f32").join("tokenizer.json");
        fs::copy(tokenizer, checkpoint.path().join("tokenizer.json")).unwrap();
        let weights = families::weights(&golden.0, Stored::Bf16);
        fs::write(checkpoint.path().join("model.safetensors"), weights).unwrap();
        Self { name, golden, checkpoint }
    }

    fn config(&self, device: DeviceChoice, limits: EngineLimits) -> EngineConfig {
        EngineConfig { device, ..common::config(self.checkpoint.path(), limits) }
    }

    fn open(&self, limits: EngineLimits) -> CudaModel {
        let config = self.config(DeviceChoice::Cuda(0), limits);
        CudaModel::open(&config, 0, &|_| {}).unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }

    /// The input's first `n` tokens, by the formula of the goldens.
    fn tokens(&self, n: usize) -> Vec<TokenId> {
        families::random_bits("tokens").take(n).map(|bits| (bits % 272) as TokenId).collect()
    }

    fn number(&self, field: &str) -> usize {
        self.golden.0[field].as_u64().unwrap() as usize
    }

    fn numbers(&self, field: &str) -> Vec<f64> {
        self.golden.0[field].as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
    }

    /// Of the golden's rows among the first `n`: how far `found` is from them, and transformers in bf16.
    fn distances(&self, found: &[Vec<f32>]) -> (Distances, Distances) {
        let ids = self.golden.tokens("/ids");
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for (row, noise) in self.golden.0["rows"].as_array().unwrap().iter().zip(self.numbers("noise")) {
            let Some(found) = found.get(row["position"].as_u64().unwrap() as usize) else { break };
            let wanted: Vec<f64> = row["logits"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
            let scale = wanted.iter().fold(0.0f64, |max, x| max.max(x.abs()));
            let differences = ids.iter().zip(&wanted).map(|(id, x)| (f64::from(found[*id as usize]) - x).abs());
            // A NaN is lost in a maximum.
            ours.push(differences.fold(0.0, |max: f64, x| if x.is_nan() { f64::INFINITY } else { max.max(x) }) / scale);
            theirs.push(noise);
        }
        (Distances::of(ours), Distances::of(theirs))
    }

    fn check_rows(&self, what: &str, found: &[Vec<f32>]) {
        let (ours, noise) = self.distances(found);
        let Distances { mean, p99, worst } = ours;
        println!(
            "{}, {what}: mean {mean:.2e}, p99 {p99:.2e}, worst {worst:.2e}; bf16 of transformers {:.2e}, {:.2e}, {:.2e}",
            self.name, noise.mean, noise.p99, noise.worst
        );
        assert!(ours.are_within_twice(&noise), "{}, {what}: {ours:?}, noise {noise:?}", self.name);
    }

    /// With keys and values in e4m3, which round each by up to a sixteenth: a wrong layout, scale or mask would be far beyond that.
    fn check_cache_of_codes(&self, tokens: &[TokenId]) {
        let limits = |context| EngineLimits { kv_cache_dtype: Some(KvCacheDtype::Fp8), ..limits(context) };
        let mut gpu = self.open(limits(8192));
        for (tokens, chunk_len) in [(tokens, CHUNK), (&tokens[..N_DECODED], 1)] {
            let found = gpu.executor.teacher_forced_logits(tokens, chunk_len).unwrap();
            let (ours, noise) = self.distances(&found);
            println!("{}, cache in fp8, chunks of {chunk_len}: {ours:?}; bf16 of transformers: {noise:?}", self.name);
            assert!(ours.mean <= CODES_MEAN && ours.worst <= CODES_WORST, "{}: {ours:?}", self.name);
        }
        drop(gpu);
        self.check_answer("its own answer with a cache in fp8", &self.answer(DeviceChoice::Cuda(0), limits), limits);
    }

    /// In the batch-invariant mode a row is the same bits in chunks of any size.
    fn check_invariance(&self, tokens: &[TokenId]) {
        if !cuda::has_hopper(&format!("{}, batch-invariant", self.name)) {
            return;
        }
        for kv_cache_dtype in [None, Some(KvCacheDtype::Fp8)] {
            self.check_invariance_of(tokens, EngineLimits { batch_invariant: true, kv_cache_dtype, ..limits(8192) });
        }
    }

    fn check_invariance_of(&self, tokens: &[TokenId], limits: EngineLimits) {
        let mut gpu = self.open(limits);
        let mut bits = |chunk_len| {
            let rows = gpu.executor.teacher_forced_logits(tokens, chunk_len).unwrap();
            rows.into_iter().map(|row| row.into_iter().map(f32::to_bits).collect()).collect::<Vec<Vec<u32>>>()
        };
        let whole = bits(tokens.len());
        for chunk_len in [128, 37, 1] {
            let found = bits(chunk_len);
            let odd = (0..tokens.len()).find(|&row| found[row] != whole[row]);
            assert_eq!(odd, None, "{}: the first row that differs in chunks of {chunk_len}", self.name);
        }
    }

    /// Behind each prefix of an answer its next token is the GPU's best or, within the noise, as good.
    fn check_answer(&self, whose: &str, answer: &[TokenId], limits: impl Fn(u32) -> EngineLimits) {
        let prompt = self.tokens(self.number("n_prompt"));
        let tokens = [&prompt[..], &answer[..answer.len() - 1]].concat();
        let rows = self.open(limits(SHORT_CONTEXT)).executor.teacher_forced_logits(&tokens, 64).unwrap();
        let below_best = rows[prompt.len() - 1..].iter().zip(answer).map(|(row, token)| {
            let best = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let scale = row.iter().fold(0.0f32, |max, logit| max.max(logit.abs()));
            f64::from((best - row[*token as usize]) / scale)
        });
        let below_best: Vec<f64> = below_best.collect();
        let worst = below_best.iter().copied().fold(0.0, f64::max);
        let n_best = below_best.iter().filter(|gap| **gap == 0.0).count();
        let noise = 2.0 * Distances::of(self.numbers("noise")).worst;
        println!(
            "{}, {whose}: {n_best} of {} tokens are the GPU's best, {worst:.1e} below it",
            self.name,
            answer.len()
        );
        assert!(worst <= noise, "{}, {whose}: {worst:.1e} below the best, noise {noise:.1e}", self.name);
    }

    fn answer(&self, device: DeviceChoice, limits: impl Fn(u32) -> EngineLimits) -> Vec<TokenId> {
        let engine = Engine::start(self.config(device, limits(SHORT_CONTEXT)), |_| {}).unwrap();
        let prompt = self.tokens(self.number("n_prompt"));
        common::read_all(engine.submit(common::greedy(prompt, 64)).unwrap()).0
    }
}

/// A family that so many GPUs share.
pub(crate) fn open_shared(name: &'static str, n_ranks: usize) -> Result<CudaModel, StartError> {
    let limits = EngineLimits { tensor_parallel: n_ranks, ..limits(8192) };
    CudaModel::open(&Family::new(name).config(DeviceChoice::Auto, limits), 0, &|_| {})
}

/// Logits of the input on GPUs that share the model.
pub(crate) fn check_shared(name: &'static str, n_ranks: usize) {
    check_on_several("ranks", name, open_shared(name, n_ranks));
}

/// The same of stages.
pub(crate) fn check_staged(name: &'static str, n_stages: usize) {
    let limits = EngineLimits { pipeline_parallel: n_stages, memory_fraction: 0.2, ..limits(8192) };
    let opened = cuda_pipeline::open_staged(&Family::new(name).config(DeviceChoice::Auto, limits));
    check_on_several("stages", name, opened);
}

fn check_on_several(what: &str, name: &'static str, opened: Result<CudaModel, StartError>) {
    let family = Family::new(name);
    let tokens = family.tokens(family.number("n_tokens"));
    let mut gpus = opened.unwrap_or_else(|error| panic!("{name}: {error}"));
    family.check_rows(&format!("{what}, in chunks"), &gpus.executor.teacher_forced_logits(&tokens, CHUNK).unwrap());
    let begin = &tokens[..N_DECODED];
    let found = gpus.executor.teacher_forced_logits(begin, 1).unwrap();
    family.check_rows(&format!("{what}, token by token"), &found);
}

/// Logits of the whole input in chunks, and of its beginning token by token; answers of transformers, of our CPU, and the GPU's own.
fn check(name: &'static str) {
    if !cuda::has_gpu(&format!("{name} on a GPU")) {
        return;
    }
    let family = Family::new(name);
    let tokens = family.tokens(family.number("n_tokens"));
    let mut gpu = family.open(limits(8192));
    family.check_rows("in chunks", &gpu.executor.teacher_forced_logits(&tokens, CHUNK).unwrap());
    let begin = &tokens[..N_DECODED];
    family.check_rows("token by token", &gpu.executor.teacher_forced_logits(begin, 1).unwrap());
    drop(gpu);
    family.check_invariance(begin);
    family.check_answer("transformers' answer", &family.golden.tokens("/greedy"), limits);
    family.check_answer("the CPU's answer", &family.answer(DeviceChoice::Cpu, limits), limits);
    family.check_answer("its own answer", &family.answer(DeviceChoice::Cuda(0), limits), limits);
    family.check_cache_of_codes(&tokens);
}

#[test]
fn llama_with_heads_of_80_on_a_gpu() {
    check("llama-heads-of-80");
}

#[test]
fn llama_with_biases_everywhere_on_a_gpu() {
    check("llama-biases-everywhere");
}

#[test]
fn mistral_with_its_sliding_window_on_a_gpu() {
    check("mistral-window");
}

#[test]
fn qwen2_with_windows_in_upper_layers_and_yarn_on_a_gpu() {
    check("qwen2-windows-yarn");
}

#[test]
fn qwen3_with_normed_heads_on_a_gpu() {
    check("qwen3");
}

#[test]
fn smollm3_with_layers_that_do_not_turn_on_a_gpu() {
    check("smollm3");
}

#[test]
fn olmo2_with_norms_behind_attention_and_feed_forward_on_a_gpu() {
    check("olmo2");
}

#[test]
fn phi3_with_heads_of_96_on_a_gpu() {
    check("phi3-heads-of-96");
}

#[test]
fn phi4_with_longrope_on_a_part_of_each_head_on_a_gpu() {
    check("phi4-longrope");
}

#[test]
fn gemma2_with_soft_caps_and_alternating_windows_on_a_gpu() {
    check("gemma2");
}

#[test]
fn gemma3_with_angles_of_their_own_in_windows_on_a_gpu() {
    check("gemma3");
}
