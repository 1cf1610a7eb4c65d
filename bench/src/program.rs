//! Prints the program of a step: every operation with its shape, its kernel and its time, predicted and, where the GPU is, measured.

use std::path::Path;

use anyhow::{Context, Result, anyhow};
use stoker_engine::{
    DeviceChoice, EngineConfig, EngineLimits, ModelFiles, Quantization,
    exec::cuda::{Ceilings, CudaModel, Decodes, Line, list_program},
    model::{CheckpointFormat, ModelConfig, ModelSpec},
};

/// What an H200 does at its best, as `kernel-bench` measures it.
const H200: Ceilings = Ceilings { gb_s: 4280.0, tflop_s: 780.0 };

/// As a chip with a built-in table takes it; without that chip.
pub fn list(
    directory: &Path,
    chip: &str,
    rows: &[usize],
    (quantization, tensor_parallel): (Option<Quantization>, usize),
) -> Result<()> {
    let path = directory.join("config.json");
    let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let config = ModelConfig::from_json(&serde_json::from_str(&text)?, "config.json")?;
    let spec = ModelSpec::new(&config, CheckpointFormat::HuggingFace)?;
    for &n in rows {
        let lines =
            list_program(&spec, (chip, tensor_parallel), n, quantization, H200).map_err(|problem| anyhow!(problem))?;
        print(&format!("a step of {n} sequences on {chip}"), &lines);
    }
    Ok(())
}

/// As the first GPU takes it, measured with random weights over contexts of so many tokens.
pub fn measure(
    directory: &Path,
    rows: &[usize],
    context: usize,
    (quantization, tensor_parallel): (Option<Quantization>, usize),
) -> Result<()> {
    let files = ModelFiles::Random { directory: directory.to_owned(), seed: 1 };
    let most = rows.iter().copied().max().unwrap_or(1) as u32;
    let limits = EngineLimits {
        max_model_len: Some(context as u32),
        max_num_seqs: Some(most),
        kv_cache_tokens: Some(most * (context as u32).next_multiple_of(16)),
        quantization,
        tensor_parallel,
        ..EngineLimits::default()
    };
    let config = EngineConfig { model: files, limits, device: DeviceChoice::Cuda(0) };
    let mut opened = CudaModel::open(&config, 0, &|_| ()).context("open the model on the GPU")?;
    for &n in rows {
        let measured = opened.executor.measure(|rank| rank.measure_program(Decodes { n, context }, H200))?;
        let title = format!("a step of {n} sequences of {context} tokens: {:.0} us recorded", measured.step_us);
        print(&title, &measured.lines);
    }
    Ok(())
}

fn print(title: &str, lines: &[Line]) {
    println!("{title}");
    println!("{:22} {:22} {:20} {:>4} {:>9} {:>9}", "operation", "shape", "kernel", "n", "predicted", "measured");
    lines.iter().for_each(|line| println!("{line}"));
    let sum =
        |of: fn(&Line) -> Option<f64>| lines.iter().filter_map(|line| Some(of(line)? * line.n as f64)).sum::<f64>();
    println!("{:71} {:9.0} {:9.0}\n", "all, us", sum(|line| line.predicted_us), sum(|line| line.measured_us));
}
