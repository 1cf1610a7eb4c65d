//! GGUF on the GPU: blocks that are unpacked there are the numbers that the CPU unpacks. A model of every format gives the
//! same logits, bit by bit, as the same numbers in safetensors. Skipped where there is no GPU.

use std::{fs, path::Path};

use half::f16;
use safetensors::{Dtype, serialize_to_file, tensor::TensorView};
use serde_json::json;
use stoker_engine::{EngineLimits, TokenId, exec::cuda::CudaModel, model::WeightFormat};

use crate::{common, cuda, families, gguf, skip::skip};

const HIDDEN: usize = 256;
const INNER: usize = 512;
const VOCAB: usize = 1024;
const HEAD_DIM: usize = 64;
const N_LAYERS: usize = 6;
/// ggml's numbers of the formats, one for each projection in turn.
const FORMATS: [(WeightFormat, u32); 10] = [
    (WeightFormat::Q8_0, 8),
    (WeightFormat::Q4_0, 2),
    (WeightFormat::Q4_1, 3),
    (WeightFormat::Q5_0, 6),
    (WeightFormat::Q5_1, 7),
    (WeightFormat::Q4K, 12),
    (WeightFormat::Q5K, 13),
    (WeightFormat::Q6K, 14),
    (WeightFormat::F16, 1),
    (WeightFormat::Bf16, 30),
];

/// A tensor as both files have it.
struct Tensor {
    gguf: String,
    hugging_face: String,
    shape: Vec<usize>,
    ggml_format: u32,
    /// As the GGUF file has them.
    bytes: Vec<u8>,
    /// In the order of safetensors.
    values: Vec<f32>,
}

/// Random blocks of small numbers.
fn random_blocks(format: WeightFormat, name: &str, n_values: usize) -> Vec<u8> {
    let values = families::values_of(name, n_values as u64, if name.contains("norm") { 1.0 } else { 0.0 });
    match format {
        WeightFormat::F32 => values.flat_map(|value| value.to_f32().to_le_bytes()).collect(),
        WeightFormat::Bf16 => values.flat_map(|value| value.to_le_bytes()).collect(),
        WeightFormat::F16 => values.flat_map(|value| f16::from_f32(value.to_f32()).to_le_bytes()).collect(),
        _ => gguf::block_bytes(name, &format.name().to_uppercase(), format.bytes_of(n_values) as u64),
    }
}

fn tensors() -> Vec<Tensor> {
    let mut formats = FORMATS.into_iter().cycle();
    let mut all = Vec::new();
    let mut push = |names: [String; 2], shape: &[usize], heads: Option<usize>| {
        let (format, ggml_format) = if shape.len() == 1 { (WeightFormat::F32, 0) } else { formats.next().unwrap() };
        let bytes = random_blocks(format, &names[0], shape.iter().product());
        let stored = format.unpack(&bytes);
        let values = heads.map_or_else(|| stored.clone(), |heads| unpaired(&stored, shape[1], shape[0] / heads));
        let [gguf, hugging_face] = names.map(|name| format!("{name}.weight"));
        all.push(Tensor { gguf, hugging_face, shape: shape.to_vec(), ggml_format, bytes, values });
    };
    push(["token_embd".into(), "model.embed_tokens".into()], &[VOCAB, HIDDEN], None);
    for layer in 0..N_LAYERS {
        let mut push = |gguf: &str, ours: &str, shape: &[usize], heads| {
            push([format!("blk.{layer}.{gguf}"), format!("model.layers.{layer}.{ours}")], shape, heads);
        };
        push("attn_norm", "input_layernorm", &[HIDDEN], None);
        push("attn_q", "self_attn.q_proj", &[HIDDEN, HIDDEN], Some(4));
        push("attn_k", "self_attn.k_proj", &[2 * HEAD_DIM, HIDDEN], Some(2));
        push("attn_v", "self_attn.v_proj", &[2 * HEAD_DIM, HIDDEN], None);
        push("attn_output", "self_attn.o_proj", &[HIDDEN, HIDDEN], None);
        push("ffn_norm", "post_attention_layernorm", &[HIDDEN], None);
        push("ffn_gate", "mlp.gate_proj", &[INNER, HIDDEN], None);
        push("ffn_up", "mlp.up_proj", &[INNER, HIDDEN], None);
        push("ffn_down", "mlp.down_proj", &[HIDDEN, INNER], None);
    }
    push(["output_norm".into(), "model.norm".into()], &[HIDDEN], None);
    push(["output".into(), "lm_head".into()], &[VOCAB, HIDDEN], None);
    all
}

/// Rows of heads that are stored pair by pair, halves of heads behind each other.
fn unpaired(values: &[f32], width: usize, head_dim: usize) -> Vec<f32> {
    let head = |head: &[f32]| {
        let half = |first: usize| head.chunks(width).skip(first).step_by(2).flatten().copied().collect::<Vec<_>>();
        [half(0), half(1)].concat()
    };
    values.chunks(width * head_dim).flat_map(head).collect()
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

fn key(name: &str, kind: u32, value: &[u8]) -> Vec<u8> {
    [&text(name)[..], &kind.to_le_bytes(), value].concat()
}

fn texts(name: &str, values: &[String]) -> Vec<u8> {
    let (kind, len) = (8u32.to_le_bytes(), (values.len() as u64).to_le_bytes());
    key(name, 9, &[&kind[..], &len, &values.iter().flat_map(|value| text(value)).collect::<Vec<_>>()].concat())
}

/// A GGUF file of the tensors.
fn write_gguf(path: &Path, tensors: &[Tensor]) {
    let number = |name: &str, value: usize| key(&format!("llama.{name}"), 4, &(value as u32).to_le_bytes());
    let keys = [
        key("general.architecture", 8, &text("llama")),
        number("embedding_length", HIDDEN),
        number("feed_forward_length", INNER),
        number("block_count", N_LAYERS),
        number("attention.head_count", HIDDEN / HEAD_DIM),
        number("attention.head_count_kv", 2),
        number("context_length", 512),
        key("llama.attention.layer_norm_rms_epsilon", 6, &1e-5f32.to_le_bytes()),
        key("tokenizer.ggml.model", 8, &text("gpt2")),
        texts("tokenizer.ggml.tokens", &(0..64).map(|id| format!("t{id}")).collect::<Vec<_>>()),
        texts("tokenizer.ggml.merges", &[]),
    ];
    let counts = [(tensors.len() as u64).to_le_bytes(), (keys.len() as u64).to_le_bytes()].concat();
    let mut file = [&b"GGUF"[..], &3u32.to_le_bytes(), &counts, &keys.concat()].concat();
    let mut offset = 0;
    for tensor in tensors {
        let sizes = tensor.shape.iter().rev().flat_map(|size| (*size as u64).to_le_bytes());
        file.extend(text(&tensor.gguf));
        file.extend((tensor.shape.len() as u32).to_le_bytes());
        file.extend(sizes);
        file.extend(tensor.ggml_format.to_le_bytes());
        file.extend((offset as u64).to_le_bytes());
        offset += tensor.bytes.len().next_multiple_of(32);
    }
    for tensor in tensors {
        file.resize(file.len().next_multiple_of(32), 0);
        file.extend(&tensor.bytes);
    }
    fs::write(path, file).unwrap();
}

/// The same numbers as Hugging Face has them, in f32.
fn write_safetensors(directory: &Path, tensors: &[Tensor]) {
    let config = json!({"architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": N_LAYERS, "num_attention_heads": HIDDEN / HEAD_DIM, "num_key_value_heads": 2,
        "vocab_size": VOCAB, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "eos_token_id": 3});
    fs::write(directory.join("config.json"), config.to_string()).unwrap();
    fs::copy(common::checkpoint("gqa-f32").join("tokenizer.json"), directory.join("tokenizer.json")).unwrap();
    let data: Vec<(&Tensor, Vec<u8>)> = tensors
        .iter()
        .map(|tensor| (tensor, tensor.values.iter().flat_map(|value| value.to_le_bytes()).collect()))
        .collect();
    let views = data.iter().map(|(tensor, bytes)| {
        (&tensor.hugging_face, TensorView::new(Dtype::F32, tensor.shape.clone(), bytes).unwrap())
    });
    serialize_to_file(views, None, &directory.join("model.safetensors")).unwrap();
}

fn logits(path: &Path, tokens: &[TokenId]) -> Vec<Vec<f32>> {
    let config = common::config(path, EngineLimits { kv_cache_tokens: Some(4096), ..EngineLimits::default() });
    CudaModel::open(&config, 0, &|_| {}).unwrap().executor.teacher_forced_logits(tokens, 50).unwrap()
}

#[test]
fn blocks_unpacked_on_the_gpu_give_the_bits_of_the_numbers_they_stand_for() {
    if !cuda::has_hopper("blocks_unpacked_on_the_gpu_give_the_bits_of_the_numbers_they_stand_for") {
        return;
    }
    let (directory, tensors) = (tempfile::tempdir().unwrap(), tensors());
    write_gguf(&directory.path().join("model.gguf"), &tensors);
    write_safetensors(directory.path(), &tensors);
    let tokens: Vec<TokenId> = (0..150).map(|i| (i * i * 31 + 7) % VOCAB as u32).collect();
    let in_blocks = logits(&directory.path().join("model.gguf"), &tokens);
    let as_numbers = logits(directory.path(), &tokens);
    assert!(in_blocks.iter().flatten().all(|logit| logit.is_finite()));
    let differing =
        in_blocks.iter().flatten().zip(as_numbers.iter().flatten()).filter(|(a, b)| a.to_bits() != b.to_bits());
    assert_eq!(differing.count(), 0);
    assert_ne!(in_blocks[0], in_blocks[149], "the rows are not all alike");
}

/// On the CPU, whose products round what enters blocks to eight bits: the file is what it is meant to be.
#[test]
fn the_same_file_on_the_cpu_gives_nearly_the_same_logits() {
    let (directory, tensors) = (tempfile::tempdir().unwrap(), tensors());
    write_gguf(&directory.path().join("model.gguf"), &tensors);
    write_safetensors(directory.path(), &tensors);
    let tokens: Vec<TokenId> = (0..40).map(|i| (i * i * 31 + 7) % VOCAB as u32).collect();
    let logits = |path: &Path| common::open(path).unwrap().executor.teacher_forced_logits(&tokens, 40);
    let (in_blocks, as_numbers) = (logits(&directory.path().join("model.gguf")), logits(directory.path()));
    let difference = |(a, b): (&Vec<f32>, &Vec<f32>)| {
        let largest = b.iter().fold(0.0f32, |max, logit| max.max(logit.abs()));
        a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / largest
    };
    let mean = in_blocks.iter().zip(&as_numbers).map(difference).sum::<f32>() / 40.0;
    println!("mean of the largest differences: {mean:.1e} of the largest logit");
    // Rows in another order, or blocks read as another format, differ by as much as the logits are large.
    assert!(mean < 0.1, "{mean}");
}

/// Host memory of this process that no file is behind, in MiB.
fn anonymous_mib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).expect("Linux tells");
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() >> 10
}

/// The file that `STOKER_GGUF` names, which should be a large one: what loading it takes of the host beside its pages.
#[test]
fn a_file_is_uploaded_without_a_copy_in_host_memory() {
    const TEST: &str = "a_file_is_uploaded_without_a_copy_in_host_memory";
    const LIMIT_MIB: u64 = 1024;
    let Some(file) = std::env::var_os("STOKER_GGUF") else { return skip(TEST, "STOKER_GGUF names no file") };
    if !cuda::has_hopper(TEST) {
        return;
    }
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let watch = std::thread::spawn(move || {
        let mut peak = anonymous_mib();
        while stopped.recv_timeout(std::time::Duration::from_millis(10)).is_err() {
            peak = peak.max(anonymous_mib());
        }
        peak
    });
    let (before, began) = (anonymous_mib(), std::time::Instant::now());
    let loaded_at = std::sync::Mutex::new(0.0);
    let limits = EngineLimits { kv_cache_tokens: Some(16384), max_model_len: Some(4096), ..EngineLimits::default() };
    let mut model = CudaModel::open(&common::config(Path::new(&file), limits), 0, &|_| {
        *loaded_at.lock().unwrap() = began.elapsed().as_secs_f64();
    })
    .unwrap();
    let (loaded, ready) = (*loaded_at.lock().unwrap(), began.elapsed().as_secs_f64());
    let logits = model.executor.teacher_forced_logits(&[1, 2, 3], 3).unwrap();
    stop.send(()).unwrap();
    let peak = watch.join().unwrap();
    println!("weights there after {loaded:.2} s, ready after {ready:.2} s; {before} MiB before, {peak} MiB at most");
    assert!(logits.iter().flatten().all(|logit| logit.is_finite()));
    assert!(peak - before < LIMIT_MIB, "{peak} MiB");
}
