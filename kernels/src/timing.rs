//! How long launches take on the device, for choices at start. Not while capturing.

use cudarc::driver::sys::CUevent_flags;

use crate::{Device, KernelError};

/// Timed rounds; the fastest counts.
const ROUNDS: usize = 2;
/// Times the best so far, from which a second round will not make up for the first.
const HOPELESS: f64 = 1.1;

/// Microseconds of one of `n` launches behind each other, which `launch` starts by their index. One before loads what has to be.
/// What is far from `best_us` is timed once only: a start times some thousand launches.
pub(crate) fn fastest_us(
    device: &Device,
    n: usize,
    best_us: f64,
    mut launch: impl FnMut(usize) -> Result<(), KernelError>,
) -> Result<f64, KernelError> {
    let event = || {
        let event = device.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        event.map_err(KernelError::driver("create an event"))
    };
    launch(0)?;
    let mut fastest_us = f64::INFINITY;
    for _ in 0..ROUNDS {
        let (begin, end) = (event()?, event()?);
        begin.record(device.stream()).map_err(KernelError::driver("record an event"))?;
        (0..n).try_for_each(&mut launch)?;
        end.record(device.stream()).map_err(KernelError::driver("record an event"))?;
        let ms = begin.elapsed_ms(&end).map_err(KernelError::driver("time a launch"))?;
        fastest_us = fastest_us.min(f64::from(ms) * 1e3 / n as f64);
        if fastest_us > HOPELESS * best_us {
            break;
        }
    }
    Ok(fastest_us)
}
