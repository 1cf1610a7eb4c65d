//! Quantised weights on a GPU. Checkpoints in every format: a row alone gets what the CPU computes with the same numbers, and where they
//! are e4m3 they stay so. FP8 at load: a row alone is what the CPU computes with the weights that the numbers and scales stand for, ember's answers
//! are as right as in bf16, and the batch-invariant mode keeps its promise; the same with a cache in FP8. Skipped where there is no GPU
//! that has it.

use std::{fs, path::Path};

use safetensors::{Dtype, SafeTensors, serialize_to_file, tensor::TensorView};
use stoker_engine::{
    DeviceChoice, Engine, EngineConfig, EngineHandle, EngineLimits, KvCacheDtype, LoadedModel, Quantization,
    SamplingParams, exec::cuda::CudaModel,
};
use stoker_fit::gpu::WIDENED_ROWS_MIN;
use stoker_kernels::{bf16, reference};

use crate::{common, cuda, goldens::difference, quantised};

/// Rows of a step in which weights of four bits are widened, by norms and by launches of their own, and that no tile divides.
const N_ROWS: usize = 2 * WIDENED_ROWS_MIN - 64;

fn config(quantization: Option<Quantization>) -> EngineConfig {
    let limits = EngineLimits { kv_cache_tokens: Some(64 * 1024), quantization, ..EngineLimits::default() };
    EngineConfig { device: DeviceChoice::Cuda(0), ..common::config(&common::ember(), limits) }
}

/// Ember in f32 with every projection of its layers as FP8 would have it.
fn write_dequantised(directory: &Path) {
    for file in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(common::ember().join(file), directory.join(file)).expect("a file of ember is copied");
    }
    let bytes = fs::read(common::ember().join("model.safetensors")).expect("ember has weights");
    let stored = SafeTensors::deserialize(&bytes).expect("ember's weights are a safetensors file");
    let widened = |view: &TensorView<'_>| -> Vec<f32> {
        assert_eq!(view.dtype(), Dtype::BF16);
        view.data().chunks_exact(2).map(|two| bf16::from_le_bytes([two[0], two[1]]).to_f32()).collect()
    };
    let dequantised = |values: Vec<f32>, width: usize| -> Vec<f32> {
        let (numbers, scales) = reference::quantise_rows(&values, width);
        numbers.chunks(width).zip(scales).flat_map(|(row, scale)| row.iter().map(move |x| x * scale)).collect()
    };
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = stored
        .tensors()
        .into_iter()
        .map(|(name, view)| {
            let values = widened(&view);
            let is_projection = name.ends_with("_proj.weight");
            let values = if is_projection { dequantised(values, view.shape()[1]) } else { values };
            (name, view.shape().to_vec(), values.into_iter().flat_map(f32::to_le_bytes).collect())
        })
        .collect();
    assert_eq!(tensors.iter().filter(|(name, ..)| name.ends_with("_proj.weight")).count(), 8 * 7);
    let views = tensors.iter().map(|(name, shape, bytes)| {
        (name.clone(), TensorView::new(Dtype::F32, shape.clone(), bytes).expect("a tensor is as long as its shape"))
    });
    serialize_to_file(views, None, &directory.join("model.safetensors")).expect("the weights are written");
}

#[test]
fn a_row_alone_is_what_the_cpu_computes_with_the_weights_that_fp8_stands_for() {
    if !cuda::has_hopper("a_row_alone_is_what_the_cpu_computes_with_the_weights_that_fp8_stands_for") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    write_dequantised(directory.path());
    let tokens = cuda::golden().0;
    let expected = common::open(directory.path()).unwrap().executor.teacher_forced_logits(&tokens, tokens.len());
    let mut gpu = CudaModel::open(&config(Some(Quantization::Fp8)), 0, &|_| {}).unwrap();
    let found = gpu.executor.teacher_forced_logits(&tokens, 1).unwrap();
    cuda::check_noise("fp8, a row alone", &found, &expected);
    // Rows that are quantised too: by how much that moves logits, for a person; what it costs in answers is the next test's.
    for chunk_len in [8, 64] {
        let found = gpu.executor.teacher_forced_logits(&tokens, chunk_len).unwrap();
        let mean = found.iter().zip(&expected).map(|(a, b)| cuda::difference(a, b)).sum::<f64>() / found.len() as f64;
        println!("fp8, {chunk_len} rows at once: mean {mean:.2e} of the largest logit");
        assert!(mean < 0.1, "{mean}");
    }
}

/// Checkpoints whose projections are multiplied in four bits. Of the others of four bits one leaves modules alone, one has groups of 16,
/// one scales of f32, and two have their inputs in any order.
const FOUR_BITS: [&str; 4] = ["awq-g32", "ct-w4a16", "gptq-asym", "gptq-g32"];

/// Where a chip takes e4m3 and numbers are stored so, by rows, rows that are multiplied together are quantised too.
#[test]
fn checkpoints_of_every_format_give_a_row_alone_what_the_cpu_gives_it() {
    if !cuda::has_gpu("checkpoints_of_every_format_give_a_row_alone_what_the_cpu_gives_it") {
        return;
    }
    let names = fs::read_dir(quantised::directory("")).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names.len(), 25);
    for name in names {
        let checkpoint = quantised::Checkpoint::of(&name);
        let tokens = checkpoint.golden.tokens("/tokens");
        let limits = EngineLimits { max_model_len: Some(tokens.len() as u32), ..EngineLimits::default() };
        let config = common::config(checkpoint.path(), limits);
        let expected =
            LoadedModel::open(&config, &|_| {}).unwrap().executor.teacher_forced_logits(&tokens, tokens.len());
        let config = EngineConfig { device: DeviceChoice::Cuda(0), ..config };
        let mut gpu = CudaModel::open(&config, 0, &|_| {}).unwrap_or_else(|error| panic!("{name}: {error}"));
        let alone = gpu.executor.teacher_forced_logits(&tokens, 1).unwrap();
        match checkpoint.golden.0["noise_floor_8_bits"].is_null() {
            true => cuda::check_noise(&name, &alone, &expected),
            // There the CPU rounds rows to eight bits, which costs more than bf16: transformers do not.
            false => {
                let found = difference(&alone, &checkpoint.golden.0["rows"], &checkpoint.golden.tokens("/ids"));
                println!("{name}: {found:.2e} from transformers in f32");
                assert!(found < 2.0 * cuda::golden().1, "{name}: {found}");
            }
        }
        let together = gpu.executor.teacher_forced_logits(&tokens, 64).unwrap();
        let mean =
            together.iter().zip(&expected).map(|(a, b)| cuda::difference(a, b)).sum::<f64>() / expected.len() as f64;
        let (weights, n_params) = (gpu.parts.model.memory.weights_bytes, gpu.parts.model.n_params);
        println!("{name}, {}: {mean:.2e} together, {weights} bytes of {n_params}", gpu.parts.model.dtype);
        if FOUR_BITS.contains(&&*name) {
            assert!(cuda::is_hopper() == (weights < 2 * n_params), "{name}: {weights} bytes");
        }
        assert!(mean < 0.1, "{name}: {mean}");
    }
}

#[test]
fn four_bits_that_are_widened_for_many_rows_stay_near() {
    if !cuda::has_hopper("four_bits_that_are_widened_for_many_rows_stay_near") {
        return;
    }
    for name in FOUR_BITS {
        let checkpoint = quantised::Checkpoint::of(name);
        let seen = checkpoint.golden.tokens("/tokens");
        let tokens: Vec<_> = seen.iter().copied().cycle().take(N_ROWS).collect();
        let limits = EngineLimits {
            max_model_len: Some(N_ROWS as u32),
            max_num_seqs: Some(N_ROWS as u32),
            max_batched_tokens: Some(N_ROWS as u32),
            ..EngineLimits::default()
        };
        let config = common::config(checkpoint.path(), limits);
        let expected = LoadedModel::open(&config, &|_| {}).unwrap().executor.teacher_forced_logits(&tokens, N_ROWS);
        let mut gpu = CudaModel::open(&EngineConfig { device: DeviceChoice::Cuda(0), ..config }, 0, &|_| {}).unwrap();
        let mut mean = |chunk_len| {
            let found = gpu.executor.teacher_forced_logits(&tokens, chunk_len).unwrap();
            found.iter().zip(&expected).map(|(a, b)| cuda::difference(a, b)).sum::<f64>() / found.len() as f64
        };
        let (few, many) = (mean(64), mean(N_ROWS));
        println!("{name}: {few:.2e} of the largest logit by codes, {many:.2e} widened");
        // Both operands have three digits behind the first, then.
        assert!(few < 0.04 && many > few && many < 0.2, "{name}: {few:.2e} {many:.2e}");
    }
}

#[test]
fn embers_answers_are_as_right_in_fp8() {
    if !cuda::has_hopper("embers_answers_are_as_right_in_fp8") {
        return;
    }
    let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let start = |(quantization, kv_cache_dtype)| -> EngineHandle {
        let config = config(quantization);
        let limits = EngineLimits { kv_cache_dtype, ..config.limits };
        Engine::start(EngineConfig { limits, ..config }, |_| {}).expect("the model starts")
    };
    let (weights, cache) = (Some(Quantization::Fp8), Some(KvCacheDtype::Fp8));
    let formats = [(None, None), (weights, None), (None, cache), (weights, cache)];
    let [plain, others @ ..] = formats.map(|formats| {
        let engine = start(formats);
        let (prompts, expected) = cuda::questions(&engine);
        let answers = cuda::answers(&engine, &prompts, &greedy);
        let alone: Vec<_> = prompts[..100]
            .iter()
            .flat_map(|prompt| cuda::answers(&engine, std::slice::from_ref(prompt), &greedy))
            .collect();
        let score = cuda::score(&engine, &answers, &expected);
        (answers, score, cuda::score(&engine, &alone, &expected[..100]))
    });
    for ((answers, right, right_alone), formats) in others.into_iter().zip(&formats[1..]) {
        println!(
            "{formats:?}: answers equal {:.1} %, right {:.1} % (bf16 {:.1} %), of a hundred alone {:.1} % ({:.1} %)",
            100.0 * cuda::share_equal(&plain.0, &answers),
            100.0 * right,
            100.0 * plain.1,
            100.0 * right_alone,
            100.0 * plain.2
        );
        // Five hundred answers: one is 0.2 points.
        assert!(right >= plain.1 - 0.003 && right_alone >= plain.2 - 0.01, "{formats:?}: {} {right}", plain.1);
    }
}

#[test]
fn fp8_is_refused_where_nothing_multiplies_it() {
    let on_cpu = EngineConfig { device: DeviceChoice::Cpu, ..config(Some(Quantization::Fp8)) };
    let refusal = Engine::start(on_cpu, |_| {}).unwrap_err().to_string();
    assert_eq!(
        refusal,
        "quantization fp8 needs a GPU of compute capability 9.0, and the model would run on the CPU: leave it out"
    );
    let limits = EngineLimits { kv_cache_dtype: Some(KvCacheDtype::Fp8), ..config(None).limits };
    let on_cpu = EngineConfig { device: DeviceChoice::Cpu, limits, ..config(None) };
    let refusal = Engine::start(on_cpu, |_| {}).unwrap_err().to_string();
    assert_eq!(refusal, "a KV cache in fp8 needs a GPU, and the model would run on the CPU: leave kv_cache_dtype out");
    assert_eq!("int8".parse::<KvCacheDtype>().unwrap_err(), "\"int8\" is not known: take fp8");
    assert_eq!("fp9".parse::<Quantization>().unwrap_err(), "\"fp9\" is not known: take fp8");
}
