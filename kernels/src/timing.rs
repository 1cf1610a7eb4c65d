//! Times of recorded launches, several in turns: the chip's clock wanders with its power, so what is compared is measured beside each
//! other. Not for serving: waits for the device.

use cudarc::driver::{CudaEvent, sys::CUevent_flags};

use crate::{Device, KernelError, graph::Graph};

/// Microseconds of one replay of each graph, the middle one of `n_rounds`. Waits for the device at the end only: so it never waits for
/// the host.
pub fn in_turns(device: &Device, graphs: &mut [&mut Graph], n_rounds: usize) -> Result<Vec<f64>, KernelError> {
    let mut spans = Vec::with_capacity(n_rounds * graphs.len());
    for _ in 0..n_rounds {
        for graph in graphs.iter_mut() {
            let begin = recorded(device)?;
            graph.launch()?;
            spans.push((begin, recorded(device)?));
        }
    }
    let mut us = vec![Vec::with_capacity(n_rounds); graphs.len()];
    for (idx, (begin, end)) in spans.iter().enumerate() {
        let ms = begin.elapsed_ms(end).map_err(KernelError::driver("time a replay"))?;
        us[idx % graphs.len()].push(f64::from(ms) * 1e3);
    }
    Ok(us.into_iter().map(middle).collect())
}

/// An event behind everything launched so far.
fn recorded(device: &Device) -> Result<CudaEvent, KernelError> {
    let event = device.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
    let event = event.map_err(KernelError::driver("create an event"))?;
    event.record(device.stream()).map_err(KernelError::driver("record an event"))?;
    Ok(event)
}

fn middle(mut us: Vec<f64>) -> f64 {
    us.sort_by(f64::total_cmp);
    us[us.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_round_that_was_disturbed_does_not_count() {
        assert_eq!(middle(vec![10.0, 90.0, 10.2, 10.1, 9.0]), 10.1);
    }
}
