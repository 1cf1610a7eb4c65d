//! Time of a launch inside a captured graph: what it costs where it will run. Launches rotate over buffers larger than
//! the L2 cache (the caller's `launch` picks by index).

use anyhow::Result;
use cudarc::driver::sys;
use stoker_kernels::{KernelError, checks::Gpu};

/// Replays that are timed, after `WARM` that are not.
const REPLAYS: usize = 15;
const WARM: usize = 2;

/// Microseconds of one launch, one sample a replay of a graph of `n_launches`.
pub(crate) fn time(
    gpu: &Gpu,
    n_launches: usize,
    mut launch: impl FnMut(usize) -> Result<(), KernelError>,
) -> Result<Vec<f64>> {
    let mut graph = gpu.capture(|_| (0..n_launches).try_for_each(&mut launch))?;
    let replayed = time_eagerly(gpu, |_| graph.launch())?;
    Ok(replayed.into_iter().map(|us| us / n_launches as f64).collect())
}

/// Microseconds of `launch`, one sample a call.
pub(crate) fn time_eagerly(gpu: &Gpu, mut launch: impl FnMut(usize) -> Result<(), KernelError>) -> Result<Vec<f64>> {
    let (stream, context) = (gpu.stream(), gpu.kernels.device().context());
    let event = || context.new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT));
    let mut samples = Vec::with_capacity(REPLAYS);
    for round in 0..WARM + REPLAYS {
        let (begin, end) = (event()?, event()?);
        begin.record(stream)?;
        launch(round)?;
        end.record(stream)?;
        let us = f64::from(begin.elapsed_ms(&end)?) * 1e3;
        if round >= WARM {
            samples.push(us);
        }
    }
    Ok(samples)
}
