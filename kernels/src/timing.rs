//! Which of several ways is the fastest on the device: choices at start, made so that they are the same at every start. Not while
//! capturing.

use cudarc::driver::{CudaEvent, sys::CUevent_flags};

use crate::{Device, KernelError};

/// Times the fastest of one round, up to which a way is in the final: a round of three launches is off by a few percent.
const FINALIST: f64 = 1.05;
/// Microseconds that a way has in the final if its rounds are short: of long ones fewer say as much.
const FINAL_US: f64 = 450.0;
/// Times the fastest, up to which a way counts as no slower: what noise is left must not decide.
const ALIKE: f64 = 1.01;

/// Ways to do the same, the preferred one first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Contest {
    /// How many there are, at least one.
    pub n_ways: usize,
    /// Launches of a way behind each other that are timed together.
    pub n_launches: usize,
}

/// The first way that is no slower than any other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Winner {
    pub way: usize,
    /// Microseconds of one launch.
    pub us: f64,
}

/// Whether one time is not above another by more than what noise does.
pub(crate) fn is_no_slower(us: f64, than_us: f64) -> bool {
    us <= ALIKE * than_us
}

impl Contest {
    /// Times all ways once and those that come near to the fastest some rounds more, in turns. `launch` starts a way's launch by
    /// its index.
    pub(crate) fn run(
        self,
        device: &Device,
        mut launch: impl FnMut(usize, usize) -> Result<(), KernelError>,
    ) -> Result<Winner, KernelError> {
        let ways: Vec<usize> = (0..self.n_ways).collect();
        // Loads what has to be.
        ways.iter().try_for_each(|&way| launch(way, 0))?;
        let firsts: Vec<f64> = self.rounds(device, &ways, 1, &mut launch)?.into_iter().map(middle).collect();
        let finalists = finalists(&firsts);
        let n_rounds = final_rounds(least(&firsts) * self.n_launches as f64);
        let rounds = self.rounds(device, &finalists, n_rounds, &mut launch)?;
        let us: Vec<f64> = rounds.into_iter().map(middle).collect();
        let first = first_alike(&us);
        Ok(Winner { way: finalists[first], us: us[first] })
    }

    /// Microseconds of one launch, by way and round. Waits for the device at the end only: so it never waits for the host.
    fn rounds(
        self,
        device: &Device,
        ways: &[usize],
        n_rounds: usize,
        launch: &mut impl FnMut(usize, usize) -> Result<(), KernelError>,
    ) -> Result<Vec<Vec<f64>>, KernelError> {
        let mut spans = Vec::with_capacity(n_rounds * ways.len());
        for _ in 0..n_rounds {
            for &way in ways {
                let begin = recorded(device)?;
                (0..self.n_launches).try_for_each(|idx| launch(way, idx))?;
                spans.push((begin, recorded(device)?));
            }
        }
        let mut us = vec![Vec::with_capacity(n_rounds); ways.len()];
        for (idx, (begin, end)) in spans.iter().enumerate() {
            let ms = begin.elapsed_ms(end).map_err(KernelError::driver("time a launch"))?;
            us[idx % ways.len()].push(f64::from(ms) * 1e3 / self.n_launches as f64);
        }
        Ok(us)
    }
}

/// An event behind everything launched so far.
fn recorded(device: &Device) -> Result<CudaEvent, KernelError> {
    let event = device.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
    let event = event.map_err(KernelError::driver("create an event"))?;
    event.record(device.stream()).map_err(KernelError::driver("record an event"))?;
    Ok(event)
}

/// Indices of those that come near to the fastest.
fn finalists(us: &[f64]) -> Vec<usize> {
    let most = FINALIST * least(us);
    (0..us.len()).filter(|&idx| us[idx] <= most).collect()
}

/// Rounds of the final, an odd number: the middle one counts.
fn final_rounds(round_us: f64) -> usize {
    (FINAL_US / round_us).clamp(3.0, 9.0) as usize | 1
}

/// Index of the first that is no slower than any.
fn first_alike(us: &[f64]) -> usize {
    let least = least(us);
    us.iter().position(|us| is_no_slower(*us, least)).expect("a contest has at least one way")
}

fn least(us: &[f64]) -> f64 {
    us.iter().copied().fold(f64::INFINITY, f64::min)
}

fn middle(mut us: Vec<f64>) -> f64 {
    us.sort_by(f64::total_cmp);
    us[us.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_near_after_one_round_is_timed_again() {
        assert_eq!(finalists(&[10.7, 10.5, 10.0, 10.4, 30.0]), [1, 2, 3]);
        assert_eq!(finalists(&[3.0]), [0]);
    }

    #[test]
    fn of_ways_that_noise_could_swap_the_preferred_one_wins() {
        assert_eq!(first_alike(&[10.2, 10.09, 10.0, 10.05]), 1);
        assert_eq!(first_alike(&[10.0, 9.5]), 1);
        assert_eq!(first_alike(&[10.0, 9.95]), 0);
    }

    #[test]
    fn short_rounds_are_more_and_always_have_a_middle() {
        assert_eq!([1.0, 30.0, 75.0, 100.0, 1000.0].map(final_rounds), [9, 9, 7, 5, 3]);
    }

    #[test]
    fn one_round_that_was_disturbed_does_not_count() {
        assert_eq!(middle(vec![10.0, 90.0, 10.2, 10.1, 9.0]), 10.1);
    }
}
