//! Products of the CPU back end by themselves, in the shapes of some models' layers: operations a second, and what
//! share that is of the multiply-adds that the same instructions do in registers. The best of some runs, so that a machine
//! that others use too says something.
//!
//! ```text
//! cargo run --release -p stoker-engine --example cpu_products -- avx2 bf16 2      # instructions, weights, threads
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

fn main() {
    let mut args = env::args().skip(1);
    let isa = args.next().map_or_else(Isa::best, |name| name.parse().unwrap_or_else(|refusal| panic!("{refusal}")));
    let format = match args.next().as_deref() {
        Some("f32") => WeightFormat::F32,
        None | Some("bf16") => WeightFormat::Bf16,
        Some("f16") => WeightFormat::F16,
        Some(other) => panic!("{other} is no format of plain numbers: take bf16, f32 or f16"),
    };
    let threads = args.next().map_or(1, |threads| threads.parse().expect("a number of threads"));
    let mut ops = CpuOps::new(threads, isa).expect("threads start");
    println!("{:>4} {:>6} {:>7}  {isa} {}", "rows", "inputs", "outputs", format.name());
    for [rows, inputs, outputs] in SHAPES {
        let matrix = CpuMatrix::in_memory(format, [outputs, inputs], numbers(format, outputs * inputs));
        let x =
            CpuTensor { width: inputs, values: (0..rows * inputs).map(|i| (i % 251) as f32 / 251.0 - 0.5).collect() };
        let (mut seconds, mut peak) = (f64::INFINITY, 0.0_f64);
        for _ in 0..RUNS {
            let begun = Instant::now();
            let [y] = ops.linear(&x, [(&matrix, None)]);
            seconds = seconds.min(begun.elapsed().as_secs_f64());
            peak = peak.max(ops.peak_flop_s(format).expect("plain numbers"));
            assert!(y.values[0].is_finite());
        }
        let flop_s = 2.0 * (rows * inputs * outputs) as f64 / seconds;
        let gb_s = format.bytes_of(inputs * outputs) as f64 / seconds / 1e9;
        println!(
            "{rows:>4} {inputs:>6} {outputs:>7}  {:>6.1} GFLOP/s  {:>5.1} %  {gb_s:>5.1} GB/s",
            flop_s / 1e9,
            flop_s / peak * 100.0
        );
    }
}

/// As many weights, of all signs and some sizes.
fn numbers(format: WeightFormat, n: usize) -> Vec<u8> {
    let value = |i: usize| (i.wrapping_mul(2_654_435_761) % 1009) as f32 / 1009.0 - 0.5;
    match format {
        WeightFormat::F32 => (0..n).flat_map(|i| value(i).to_le_bytes()).collect(),
        WeightFormat::F16 => (0..n).flat_map(|i| half::f16::from_f32(value(i)).to_le_bytes()).collect(),
        _ => (0..n).flat_map(|i| half::bf16::from_f32(value(i)).to_le_bytes()).collect(),
    }
}
