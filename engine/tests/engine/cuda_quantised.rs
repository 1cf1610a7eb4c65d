//! Quantised weights on a GPU. Checkpoints in every format: a row alone gets what the CPU computes with the same numbers, and where they
//! are e4m3 they stay so. FP8 at load: a row alone is what the CPU computes with the weights that the numbers and scales stand for, ember's answers
//! are as right as in bf16, and the batch-invariant mode keeps its promise; the same with a cache in FP8. Skipped where there is no GPU
//! that has it.

use std::{fs, path::Path};

use safetensors::{Dtype, SafeTensors, serialize_to_file, tensor::TensorView};
use serde_json::{Value, json};
use stoker_engine::{
    DeviceChoice, Engine, EngineConfig, EngineHandle, EngineLimits, KvCacheDtype, LoadedModel, Quantization,
    SamplingParams, TokenId, exec::cuda::CudaModel,
};
use stoker_fit::gpu::{BESIDE_E4M3_ROWS, WIDENED_ROWS_MIN};
use stoker_kernels::{bf16, quantise::E4M3_MAX, reference};

use crate::{common, cuda, goldens::difference, quantised};

/// Rows of a step in which weights of four bits are widened, in groups of 128 too, and that no tile divides.
pub(crate) const N_ROWS: usize = 1000;

fn config(quantization: Option<Quantization>) -> EngineConfig {
    let limits = EngineLimits { kv_cache_tokens: Some(64 * 1024), quantization, ..EngineLimits::default() };
    EngineConfig { device: DeviceChoice::Cuda(0), ..common::config(&common::ember(), limits) }
}

/// Ember in f32 with every projection of its layers as FP8 would have it.
fn write_dequantised(directory: &Path) {
    copy_descriptions(directory);
    let dequantised = |values: Vec<f32>, width: usize| -> Vec<f32> {
        let (numbers, scales) = reference::quantise_rows(&values, width, E4M3_MAX);
        numbers.chunks(width).zip(scales).flat_map(|(row, scale)| row.iter().map(move |x| x * scale)).collect()
    };
    let tensors = embers_tensors().into_iter().map(|(name, shape, values)| {
        let values = if is_projection(&name) { dequantised(values, shape[1]) } else { values };
        (name, Dtype::F32, shape, of_f32(values))
    });
    write_tensors(directory, tensors.collect());
}

/// Ember with every projection of its layers in four bits, a scale a group of 128: the form of compressed-tensors, rounded to the
/// nearest.
pub(crate) fn write_four_bits(directory: &Path) {
    copy_descriptions(directory);
    let path = directory.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).expect("it was copied")).expect("it is JSON");
    let weights = json!({"num_bits": 4, "type": "int", "symmetric": true, "strategy": "group", "group_size": GROUP});
    config["quantization_config"] = json!({
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    });
    fs::write(&path, config.to_string()).expect("the description is written");
    let mut tensors = Vec::new();
    for (name, shape, values) in embers_tensors() {
        if !is_projection(&name) {
            tensors.push((name, Dtype::BF16, shape, of_bf16(values)));
            continue;
        }
        let (codes, scales): (Vec<_>, Vec<_>) = values.chunks(GROUP).map(four_bits).unzip();
        let codes: Vec<u32> = codes.concat();
        // The first of eight codes is the lowest of a word.
        let word = |eight: &[u32]| eight.iter().rev().fold(0, |word, code| word << 4 | code);
        let packed = codes.chunks(8).flat_map(|eight| word(eight).to_le_bytes()).collect();
        let sizes = shape.iter().flat_map(|size| (*size as i64).to_le_bytes()).collect();
        tensors.push((format!("{name}_packed"), Dtype::I32, vec![shape[0], shape[1] / 8], packed));
        tensors.push((format!("{name}_scale"), Dtype::BF16, vec![shape[0], shape[1] / GROUP], of_bf16(scales)));
        tensors.push((format!("{name}_shape"), Dtype::I64, vec![2], sizes));
    }
    write_tensors(directory, tensors);
}

/// The same in e4m3 in blocks of 128 x 128, each with what its largest number asks for: the form of DeepSeek and Qwen.
fn write_blocks(directory: &Path) {
    const BLOCK: usize = 128;
    copy_descriptions(directory);
    let path = directory.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).expect("it was copied")).expect("it is JSON");
    config["quantization_config"] =
        json!({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]});
    fs::write(&path, config.to_string()).expect("the description is written");
    let mut tensors = Vec::new();
    for (name, shape, values) in embers_tensors() {
        if !is_projection(&name) {
            tensors.push((name, Dtype::BF16, shape, of_bf16(values)));
            continue;
        }
        let (n_columns, width) = (shape[1].div_ceil(BLOCK), shape[1]);
        let block_of = |at: usize| at / width / BLOCK * n_columns + at % width / BLOCK;
        let mut scales = vec![0.0f32; shape[0].div_ceil(BLOCK) * n_columns];
        for (at, value) in values.iter().enumerate() {
            let scale = &mut scales[block_of(at)];
            *scale = scale.max(value.abs() / E4M3_MAX);
        }
        let code = |(at, value): (usize, &f32)| reference::bits_of_e4m3(reference::e4m3(value / scales[block_of(at)]));
        let codes = values.iter().enumerate().map(code).collect();
        let sizes = vec![shape[0].div_ceil(BLOCK), n_columns];
        tensors.push((format!("{name}_scale_inv"), Dtype::F32, sizes, of_f32(scales)));
        tensors.push((name, Dtype::F8_E4M3, shape, codes));
    }
    write_tensors(directory, tensors);
}

/// Inputs that share a scale.
const GROUP: usize = 128;

/// Codes from 0 to 15 that stand for -8 to 7 times the scale, which is a number of bf16.
fn four_bits(group: &[f32]) -> (Vec<u32>, f32) {
    let largest = group.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    let scale = bf16::from_f32(largest / 7.0).to_f32();
    (group.iter().map(|value| ((value / scale).round().clamp(-8.0, 7.0) + 8.0) as u32).collect(), scale)
}

fn copy_descriptions(directory: &Path) {
    for file in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(common::ember().join(file), directory.join(file)).expect("a file of ember is copied");
    }
}

fn is_projection(name: &str) -> bool {
    name.ends_with("_proj.weight")
}

fn of_f32(values: Vec<f32>) -> Vec<u8> {
    values.into_iter().flat_map(f32::to_le_bytes).collect()
}

fn of_bf16(values: Vec<f32>) -> Vec<u8> {
    values.into_iter().flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect()
}

/// Name, shape and values of each.
fn embers_tensors() -> Vec<(String, Vec<usize>, Vec<f32>)> {
    let bytes = fs::read(common::ember().join("model.safetensors")).expect("ember has weights");
    let stored = SafeTensors::deserialize(&bytes).expect("ember's weights are a safetensors file");
    let widened = |view: &TensorView<'_>| -> Vec<f32> {
        assert_eq!(view.dtype(), Dtype::BF16);
        view.data().chunks_exact(2).map(|two| bf16::from_le_bytes([two[0], two[1]]).to_f32()).collect()
    };
    let tensors: Vec<_> =
        stored.tensors().into_iter().map(|(name, view)| (name, view.shape().to_vec(), widened(&view))).collect();
    assert_eq!(tensors.iter().filter(|(name, ..)| is_projection(name)).count(), 8 * 7);
    tensors
}

fn write_tensors(directory: &Path, tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)>) {
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).expect("a tensor is as long as its shape"))
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

/// Checkpoints whose projections are multiplied in four bits. Of the others of four bits one has groups of 16, one scales of f32, and two
/// have their inputs in any order.
const FOUR_BITS: [&str; 4] = ["awq-g32", "ct-w4a16", "gptq-asym", "gptq-g32"];

/// Those that leave a projection alone, and one whose attention is in e4m3 beside that.
const MIXTURES: [&str; 2] = ["awq-channel", "ct-mixed"];

/// The same in e4m3, with every projection in blocks of 128 x 128 or with a scale a row.
const E4M3: [&str; 2] = ["ct-fp8-channel", "fp8-block-128"];

/// Where a chip takes e4m3 and numbers are stored so, by rows or blocks, rows that are multiplied together are quantised too.
#[test]
fn checkpoints_of_every_format_give_a_row_alone_what_the_cpu_gives_it() {
    if !cuda::has_gpu("checkpoints_of_every_format_give_a_row_alone_what_the_cpu_gives_it") {
        return;
    }
    let names = fs::read_dir(quantised::directory("")).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    assert!(names.len() > 20, "{names:?}");
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
        let mean = |found: &[Vec<f32>]| {
            found.iter().zip(&expected).map(|(a, b)| cuda::difference(a, b)).sum::<f64>() / expected.len() as f64
        };
        let (mean_alone, mean) = (mean(&alone), mean(&together));
        let (weights, n_params) = (gpu.parts.model.memory.weights_bytes, gpu.parts.model.n_params);
        println!("{name}, {}: {mean:.2e} together, {weights} bytes of {n_params}", gpu.parts.model.dtype);
        if [&FOUR_BITS[..], &MIXTURES, &E4M3].concat().contains(&&*name) {
            assert!(cuda::is_hopper() == (weights < 2 * n_params), "{name}: {weights} bytes");
        }
        // Of most a row alone is a hundredth away; what moves one further by bf16 does by e4m3, which rounds 16 times as coarsely.
        assert!(mean < 8.0 * mean_alone.max(0.0125), "{name}: {mean}, alone {mean_alone}");
    }
}

#[test]
fn four_bits_that_are_widened_for_many_rows_stay_near() {
    if !cuda::has_hopper("four_bits_that_are_widened_for_many_rows_stay_near") {
        return;
    }
    // Groups of 32, of checkpoints with 512 positions.
    const N_WIDENED: usize = 2 * WIDENED_ROWS_MIN - 64;
    for name in FOUR_BITS {
        let checkpoint = quantised::Checkpoint::of(name);
        let seen = checkpoint.golden.tokens("/tokens");
        let tokens: Vec<_> = seen.iter().copied().cycle().take(N_WIDENED).collect();
        let limits = EngineLimits {
            max_model_len: Some(N_WIDENED as u32),
            max_num_seqs: Some(N_WIDENED as u32),
            max_batched_tokens: Some(N_WIDENED as u32),
            ..EngineLimits::default()
        };
        let config = common::config(checkpoint.path(), limits);
        let expected = LoadedModel::open(&config, &|_| {}).unwrap().executor.teacher_forced_logits(&tokens, N_WIDENED);
        let mut gpu = CudaModel::open(&EngineConfig { device: DeviceChoice::Cuda(0), ..config }, 0, &|_| {}).unwrap();
        let mut mean = |chunk_len| {
            let found = gpu.executor.teacher_forced_logits(&tokens, chunk_len).unwrap();
            found.iter().zip(&expected).map(|(a, b)| cuda::difference(a, b)).sum::<f64>() / found.len() as f64
        };
        let (few, many) = (mean(64), mean(N_WIDENED));
        println!("{name}: {few:.2e} of the largest logit by codes, {many:.2e} widened");
        // Both operands have three digits behind the first, then.
        assert!(few < 0.04 && many > few && many < 0.2, "{name}: {few:.2e} {many:.2e}");
    }
}

/// Rows in e4m3 with the codes as they are: nearer than with weights in e4m3, too, and answers are as right as one by one, where rows stay
/// bf16.
#[test]
fn four_bits_beside_rows_of_e4m3_stay_near_and_answer_as_right() {
    if !cuda::has_hopper("four_bits_beside_rows_of_e4m3_stay_near_and_answer_as_right") {
        return;
    }
    const ROWS: usize = 64;
    assert!(BESIDE_E4M3_ROWS.contains(&ROWS) && N_ROWS >= BESIDE_E4M3_ROWS.end);
    let directory = tempfile::tempdir().unwrap();
    write_four_bits(directory.path());
    let rows = Some(N_ROWS as u32);
    let limits =
        EngineLimits { max_model_len: rows, max_num_seqs: rows, max_batched_tokens: rows, ..EngineLimits::default() };
    let config = common::config(directory.path(), limits);
    let tokens: Vec<TokenId> = cuda::golden().0.into_iter().cycle().take(N_ROWS).collect();
    let expected = LoadedModel::open(&config, &|_| {}).unwrap().executor.teacher_forced_logits(&tokens, N_ROWS);
    let config = EngineConfig { device: DeviceChoice::Cuda(0), ..config };
    let mut gpu = CudaModel::open(&config, 0, &|_| {}).unwrap();
    let [few, some, many] = [8, ROWS, N_ROWS].map(|chunk_len| {
        let found = gpu.executor.teacher_forced_logits(&tokens, chunk_len).unwrap();
        found.iter().zip(&expected).map(|(a, b)| cuda::difference(a, b)).sum::<f64>() / found.len() as f64
    });
    println!("of the largest logit: {few:.2e} beside bf16, {some:.2e} beside e4m3, {many:.2e} widened");
    assert!(few < 2.0 * cuda::golden().1 && some > few && some < many && many < 0.1, "{few:.2e} {some:.2e} {many:.2e}");
    drop(gpu);

    let limits =
        |batch_invariant| EngineLimits { max_num_seqs: Some(ROWS as u32), batch_invariant, ..EngineLimits::default() };
    let start = |batch_invariant| {
        let config = EngineConfig { limits: limits(batch_invariant), ..config.clone() };
        Engine::start(config, |_| {}).expect("the model starts")
    };
    let engine = start(false);
    let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let (prompts, expected) = cuda::questions(&engine);
    let together = cuda::answers(&engine, &prompts, &greedy);
    let alone: Vec<_> =
        prompts.iter().flat_map(|prompt| cuda::answers(&engine, std::slice::from_ref(prompt), &greedy)).collect();
    let [right, right_alone] = [&together, &alone].map(|answers| cuda::score(&engine, answers, &expected));
    drop(engine);
    // Where bits count all rows are so, also one: who is asked beside whom tells nothing.
    let invariant = start(true);
    let right_invariant = cuda::score(&invariant, &cuda::answers(&invariant, &prompts, &greedy), &expected);
    let percent = [right, right_alone, right_invariant].map(|right| format!("{:.1} %", 100.0 * right));
    println!("right {} together, {} one by one, {} in the batch-invariant mode", percent[0], percent[1], percent[2]);
    assert!(right.min(right_invariant) >= right_alone - 0.01, "{percent:?}");
}

/// What the tests on several GPUs read.
#[test]
fn ember_in_four_bits_is_read_as_what_was_written() {
    let directory = tempfile::tempdir().unwrap();
    write_four_bits(directory.path());
    let tokens = cuda::golden().0;
    let [plain, four] = [&common::ember(), directory.path()].map(|path| common::open(path).unwrap());
    let (plain_bytes, four_bytes) = (plain.parts.model.memory.weights_bytes, four.parts.model.memory.weights_bytes);
    let [expected, found] = [plain, four].map(|mut model| model.executor.teacher_forced_logits(&tokens, tokens.len()));
    let mean = found.iter().zip(&expected).map(|(a, b)| cuda::difference(a, b)).sum::<f64>() / found.len() as f64;
    println!("{mean:.2e} of the largest logit, {four_bytes} bytes of {plain_bytes}");
    assert!(mean < 0.2, "{mean}");
    assert!(2 * four_bytes < plain_bytes, "{four_bytes} {plain_bytes}");
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

/// A byte a number, as it is stored, whether fp8 is asked for or not.
#[test]
fn embers_answers_are_as_right_in_blocks_of_fp8() {
    if !cuda::has_hopper("embers_answers_are_as_right_in_blocks_of_fp8") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    write_blocks(directory.path());
    let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let in_blocks = |quantization, batch_invariant| {
        let limits = EngineLimits { batch_invariant, ..config(quantization).limits };
        EngineConfig { device: DeviceChoice::Cuda(0), ..common::config(directory.path(), limits) }
    };
    let formats =
        [config(None), in_blocks(None, false), in_blocks(Some(Quantization::Fp8), false), in_blocks(None, true)];
    let [plain, others @ ..] = formats.map(|config| {
        let engine = Engine::start(config, |_| {}).expect("the model starts");
        let (prompts, expected) = cuda::questions(&engine);
        let answers = cuda::answers(&engine, &prompts, &greedy);
        let right = cuda::score(&engine, &answers, &expected);
        (right, engine.model().memory.weights_bytes)
    });
    for (right, weights_bytes) in others {
        println!("right {:.1} % (bf16 {:.1} %), {weights_bytes} bytes of {}", 100.0 * right, 100.0 * plain.0, plain.1);
        assert!(right >= plain.0 - 0.003, "{right} {}", plain.0);
        assert!(weights_bytes < plain.1 * 2 / 3, "{weights_bytes} of {}", plain.1);
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
