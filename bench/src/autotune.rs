//! Measures a chip's table of GEMMs: for the sizes of published models, a few layers of each with random weights, which kernel is the
//! fastest in a step of every recorded row count. The engine measures; this names the models and writes the file.

use std::{fs, path::Path};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use stoker_engine::{
    DeviceChoice, EngineConfig, EngineLimits, ModelFiles,
    exec::cuda::{ChipTable, CudaModel},
};

use crate::{checkpoint, quantised::Quantised};

/// Of layers that are timed, more than any L2 cache holds.
const LAYERS_BYTES: usize = 300 << 20;
/// Sequences of the largest step.
const MAX_NUM_SEQS: u32 = 512;

/// Sizes of a model as its GEMMs have them.
#[derive(Clone, Copy, Debug)]
pub struct Widths {
    /// The model.
    pub name: &'static str,
    hidden: usize,
    /// Query heads, KV heads and their width; of models whose heads are wider or narrower, as many of 128 as make the same widths.
    heads: [usize; 3],
    inner: usize,
    vocab: usize,
}

const fn widths(name: &'static str, hidden: usize, heads: [usize; 3], inner: usize, vocab: usize) -> Widths {
    Widths { name, hidden, heads, inner, vocab }
}

/// Those that are measured.
pub const MODELS: [Widths; 12] = [
    widths("llama-3.1-8b", 4096, [32, 8, 128], 14336, 128_256),
    widths("qwen3-8b", 4096, [32, 8, 128], 12288, 151_936),
    widths("llama-3.2-1b", 2048, [32, 8, 64], 8192, 128_256),
    widths("qwen2.5-0.5b", 896, [14, 2, 64], 4864, 151_936),
    widths("gemma-2-9b", 3584, [32, 16, 128], 14336, 256_000),
    widths("phi-4", 5120, [40, 10, 128], 17920, 100_352),
    widths("qwen2.5-7b", 3584, [28, 4, 128], 18944, 152_064),
    widths("llama-3.2-3b", 3072, [24, 8, 128], 8192, 128_256),
    widths("qwen3-4b", 2560, [32, 8, 128], 9728, 151_936),
    widths("olmo-2-7b", 4096, [32, 32, 128], 11008, 100_352),
    widths("tinyllama-1.1b", 2048, [32, 4, 64], 5632, 32_000),
    widths("llama-3.1-70b", 8192, [64, 8, 128], 28672, 128_256),
];

impl Widths {
    fn config(&self, quantised: Option<Quantised>) -> Value {
        let [n_q, n_kv, dim] = self.heads;
        let layer = self.hidden * (2 * (n_q + n_kv) * dim + 3 * self.inner);
        // The last layer is not timed.
        let n_layers = (LAYERS_BYTES / (2 * layer)).clamp(1, 8) + 2;
        let mut config = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_act": "silu",
            "hidden_size": self.hidden, "intermediate_size": self.inner, "num_hidden_layers": n_layers,
            "num_attention_heads": n_q, "num_key_value_heads": n_kv, "head_dim": dim, "vocab_size": self.vocab,
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "tie_word_embeddings": true,
            "bos_token_id": 1, "eos_token_id": 2,
        });
        quantised.inspect(|kind| kind.describe(&mut config));
        config
    }
}

/// What is measured.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// Whose GEMMs.
    pub models: &'a [Widths],
    /// How their weights are quantised.
    pub quantised: Option<Quantised>,
    /// GPUs that share a model: GEMMs are those of one.
    pub tensor_parallel: usize,
}

/// Measures models on the first GPU, and writes the table to `out` after each.
pub fn autotune(
    Wanted { models, quantised, tensor_parallel }: Wanted<'_>,
    cache: &Path,
    out: &Path,
    said: &mut dyn FnMut(&str),
) -> Result<()> {
    let mut table: Option<ChipTable> = None;
    for model in models {
        for batch_invariant in [false, true] {
            said(&format!("{}{}", model.name, if batch_invariant { ", batch-invariant" } else { "" }));
            let quantization = quantised.and_then(Quantised::at_start);
            let limits = EngineLimits { batch_invariant, quantization, tensor_parallel, ..EngineLimits::default() };
            let found = measure(model, quantised, cache, limits, said)?;
            match &mut table {
                Some(table) => table.merge(found),
                None => table = Some(found),
            }
        }
        let table = table.as_ref().expect("a model was measured");
        fs::write(out, format!("{table}\n")).with_context(|| format!("write {}", out.display()))?;
    }
    Ok(())
}

fn measure(
    model: &Widths,
    quantised: Option<Quantised>,
    cache: &Path,
    limits: EngineLimits,
    said: &mut dyn FnMut(&str),
) -> Result<ChipTable> {
    let directory = checkpoint::described(cache, &format!("{}-layers", model.name), &model.config(quantised))?;
    let files = ModelFiles::Random { directory, seed: 1 };
    let limits = EngineLimits {
        max_model_len: Some(256),
        max_num_seqs: Some(MAX_NUM_SEQS),
        max_batched_tokens: Some(MAX_NUM_SEQS),
        kv_cache_tokens: Some(16 * 1024),
        ..limits
    };
    let batch_invariant = limits.batch_invariant;
    let config = EngineConfig { model: files, limits, device: DeviceChoice::Cuda(0) };
    let mut opened = CudaModel::open_share(&config, 0, &|_| ()).with_context(|| format!("open {}", model.name))?;
    // The mode has tiles of ours alone: what is between takes the next larger one's.
    let wants = |m: usize| !batch_invariant || m.is_power_of_two() || m.is_multiple_of(64);
    Ok(opened.executor.first().autotune(&wants, said)?)
}
