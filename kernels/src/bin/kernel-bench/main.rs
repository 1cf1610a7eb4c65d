//! Times every kernel at the shapes of Llama-3.1-8B on the first GPU: microseconds, GB/s or TFLOP/s, and the share of the
//! ceilings measured in the same run. Prints a table; `--out` appends the figures as JSON lines. Compares nothing with
//! references: `kernel-check` does.

mod attention;
mod cases;
mod clock;
mod figures;
mod int4;
mod ranks;
mod residual;

use std::path::PathBuf;

use anyhow::Result;
use clap::Parser;
use stoker_kernels::{Device, KernelError, checks::Gpu};

use crate::figures::{Report, RunName};

/// Times the kernels.
#[derive(Debug, Parser)]
struct Arguments {
    /// File that the figures are appended to.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Name of this run of measuring, e.g. `2026-11-21T04:00-h200-a1`.
    #[arg(long, default_value = "unnamed")]
    run: String,
    /// Commit that this program was built from.
    #[arg(long, default_value = "unknown")]
    commit: String,
    /// Only cases whose name contains this.
    #[arg(long, default_value = "")]
    only: String,
    /// Products of weights of four bits by every tile.
    #[arg(long)]
    tiles: bool,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let device = match Device::open(0) {
        Ok(device) => device,
        Err(absent @ (KernelError::NoDriver | KernelError::NoDevice { .. })) => {
            println!("skipped: kernel-bench: {absent}");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    let mut gpu = Gpu::new(&device)?;
    println!("{}, kernels for {:?}", device.name()?, gpu.kernels.properties());
    let mut report = Report::new(cases::ceilings(&mut gpu)?, arguments.only);
    cases::pointwise(&mut gpu, &mut report)?;
    cases::linear(&mut gpu, &mut report)?;
    cases::gated(&mut gpu, &mut report)?;
    residual::run(&mut gpu, &mut report)?;
    ranks::run(&mut report)?;
    int4::run(&mut gpu, &mut report, arguments.tiles)?;
    attention::decode(&mut gpu, &mut report)?;
    attention::prefill(&mut gpu, &mut report)?;
    cases::sampling(&mut gpu, &mut report)?;
    let Some(out) = arguments.out else { return Ok(()) };
    let name = RunName { run: arguments.run, commit: arguments.commit, machine: format!("1x {}", device.name()?) };
    report.append(&out, &name)
}
