//! Products of the CPU back end by themselves, in the shapes of some models' layers: operations a second, and what
//! share that is of the multiply-adds that the same instructions do in registers. The best of some runs, so that a machine
//! that others use too says something.
//!
//! ```text
//! cargo run --release -p stoker-engine --example cpu_products -- avx2 bf16 2               # instructions, weights, threads
//! cargo run --release -p stoker-engine --example cpu_products -- avx2 bf16 2 8 896 9216    # rows, inputs, outputs
//! ```

use std::{env, time::Instant};

use stoker_engine::{
    model::WeightFormat,
    ops::{CpuMatrix, CpuOps, CpuTensor, Isa},
};

/// Rows, inputs, outputs: a prompt through layers of Qwen2.5-0.5B and TinyLlama-1.1B, some at once, one alone.
const SHAPES: [[usize; 3]; 9] = [
    [512, 896, 1152],
    [512, 896, 4864],
    [512, 4864, 896],
    [512, 2048, 1408],
    [512, 5632, 2048],
    [8, 896, 9216],
    [8, 4864, 896],
    [3, 896, 9216],
    [1, 4864, 7168],
];
const RUNS: usize = 30;
/// Weights that share a scale.
const BLOCK: usize = 32;

fn main() {
    let mut args = env::args().skip(1);
    let isa = args.next().map_or_else(Isa::best, |name| name.parse().unwrap_or_else(|refusal| panic!("{refusal}")));
    let format = match args.next().as_deref() {
        Some("f32") => WeightFormat::F32,
        None | Some("bf16") => WeightFormat::Bf16,
        Some("f16") => WeightFormat::F16,
        Some("q8_0") => WeightFormat::Q8_0,
        Some("q4_0") => WeightFormat::Q4_0,
        Some(other) => panic!("{other} is not measured: take bf16, f32, f16, q8_0 or q4_0"),
    };
    let threads = args.next().map_or(1, |threads| threads.parse().expect("a number of threads"));
    let asked: Vec<usize> = args.map(|number| number.parse().expect("rows, inputs, outputs")).collect();
    let shapes = asked.as_chunks().0;
    let shapes = if shapes.is_empty() { &SHAPES } else { shapes };
    let mut ops = CpuOps::new(threads, isa).expect("threads start");
    println!("{:>4} {:>6} {:>7}  {isa} {}", "rows", "inputs", "outputs", format.name());
    for &[rows, inputs, outputs] in shapes {
        let matrix = CpuMatrix::in_memory(format, [outputs, inputs], numbers(format, outputs * inputs));
        let x =
            CpuTensor { width: inputs, values: (0..rows * inputs).map(|i| (i % 251) as f32 / 251.0 - 0.5).collect() };
        let (mut seconds, mut peak) = (f64::INFINITY, 0.0_f64);
        for _ in 0..RUNS {
            let begun = Instant::now();
            let [y] = ops.linear(&x, [(&matrix, None)]);
            seconds = seconds.min(begun.elapsed().as_secs_f64());
            // Blocks have none.
            peak = peak.max(ops.peak_flop_s(format).unwrap_or(0.0));
            assert!(y.values[0].is_finite());
        }
        let flop_s = 2.0 * (rows * inputs * outputs) as f64 / seconds;
        let gb_s = format.bytes_of(inputs * outputs) as f64 / seconds / 1e9;
        let share = if peak > 0.0 { format!("  {:>5.1} %", flop_s / peak * 100.0) } else { String::new() };
        println!("{rows:>4} {inputs:>6} {outputs:>7}  {:>6.1} GFLOP/s{share}  {gb_s:>5.1} GB/s", flop_s / 1e9);
    }
}

/// As many weights, of all signs and some sizes.
fn numbers(format: WeightFormat, n: usize) -> Vec<u8> {
    let value = |i: usize| (i.wrapping_mul(2_654_435_761) % 1009) as f32 / 1009.0 - 0.5;
    match format {
        WeightFormat::F32 => (0..n).flat_map(|i| value(i).to_le_bytes()).collect(),
        WeightFormat::F16 => (0..n).flat_map(|i| half::f16::from_f32(value(i)).to_le_bytes()).collect(),
        WeightFormat::Bf16 => (0..n).flat_map(|i| half::bf16::from_f32(value(i)).to_le_bytes()).collect(),
        _ => (0..n / BLOCK).flat_map(|block| blocks(format, block)).collect(),
    }
}

/// A block as GGUF has it: a scale, and any integers.
fn blocks(format: WeightFormat, block: usize) -> impl Iterator<Item = u8> {
    let integers =
        (0..format.bytes_of(BLOCK) - 2).map(move |i| ((block * BLOCK + i).wrapping_mul(2_654_435_761) >> 7) as u8);
    half::f16::from_f32(1.0 / 1024.0).to_le_bytes().into_iter().chain(integers)
}
