//! Compares every kernel with its reference on the first GPU and prints what differs. Exits 0 where there is no GPU: it
//! says so. Measures no time; `kernel-bench` does.

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use stoker_kernels::{Device, KernelError, checks};

/// Compares kernels with their references.
#[derive(Debug, Parser)]
struct Arguments {
    /// Only groups whose name contains this: packed, pointwise, linear, invariance, gated, residual, quantised, int4, ranks,
    /// attention-decode, attention-prefill, attention-other-decode, attention-other-prefill, sampling-small, sampling-large, unpack.
    #[arg(long, default_value = "")]
    only: String,
}

fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    let device = match Device::open(0) {
        Ok(device) => device,
        Err(absent @ (KernelError::NoDriver | KernelError::NoDevice { .. })) => {
            println!("skipped: kernel-check: {absent}");
            return Ok(ExitCode::SUCCESS);
        }
        Err(error) => return Err(error.into()),
    };
    println!("{}, code for {}", device.name()?, stoker_kernels::built_for());
    let outcomes = checks::run(&device, &arguments.only)?;
    for outcome in outcomes.iter().filter(|outcome| !outcome.passes()) {
        println!("WRONG {} {}: error {:.2e}, limit {:.2e}", outcome.op, outcome.case, outcome.error, outcome.limit);
    }
    for op in operations(&outcomes) {
        let own = outcomes.iter().filter(|outcome| outcome.op == op);
        let worst = own.clone().map(|outcome| outcome.error).fold(0.0, f64::max);
        let n_passed = own.clone().filter(|outcome| outcome.passes()).count();
        println!("{op:14} {n_passed:3} of {:3} agree, largest error {worst:.2e}", own.count());
    }
    if Device::count()? == 1 && outcomes.iter().any(|outcome| outcome.op == "reduce") {
        println!("skipped: sums over several GPUs: one is there");
    }
    let failed = outcomes.iter().any(|outcome| !outcome.passes());
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn operations(outcomes: &[checks::Outcome]) -> Vec<&'static str> {
    let mut ops: Vec<_> = outcomes.iter().map(|outcome| outcome.op).collect();
    ops.sort_unstable();
    ops.dedup();
    ops
}
