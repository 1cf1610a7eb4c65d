//! How fast this machine reads memory at this moment: on shared machines it halves and doubles within seconds, and a speed
//! without it says nothing.

use std::{hint::black_box, thread, time::Instant};

use stoker_figures::median;

/// Far beyond any last-level cache this is run on.
const BYTES_PER_THREAD: usize = 128 << 20;
const LANES: usize = 16;
const PASSES: usize = 3;

/// Memory that is read again and again, one part a thread.
#[derive(Debug)]
pub struct Probe {
    parts: Vec<Vec<u64>>,
}

impl Probe {
    /// For as many threads as compute. Pages of zeros may share one frame, so every word differs.
    pub fn new(threads: usize) -> Self {
        let part = |idx: usize| (0..BYTES_PER_THREAD / 8).map(|word| (word ^ (idx << 40)) as u64).collect();
        Self { parts: (0..threads).map(part).collect() }
    }

    /// GB/s of all threads together, the median of a few passes of some milliseconds.
    pub fn gb_s(&self) -> f64 {
        let passes: Vec<f64> = (0..PASSES).map(|_| self.pass()).collect();
        median(&passes)
    }

    fn pass(&self) -> f64 {
        let begun = Instant::now();
        thread::scope(|scope| {
            self.parts.iter().for_each(|part| drop(scope.spawn(|| black_box(sum(part)))));
        });
        (self.parts.len() * BYTES_PER_THREAD) as f64 / begun.elapsed().as_secs_f64() / 1e9
    }
}

/// Independent sums, so that nothing but memory is waited for.
fn sum(words: &[u64]) -> [u64; LANES] {
    words.chunks_exact(LANES).fold([0; LANES], |mut sums, chunk| {
        sums.iter_mut().zip(chunk).for_each(|(sum, word)| *sum = sum.wrapping_add(*word));
        sums
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_is_read() {
        let words: Vec<u64> = (0..64).collect();
        assert_eq!(sum(&words).iter().sum::<u64>(), 63 * 64 / 2);
    }

    #[test]
    fn memory_is_read_at_a_plausible_speed() {
        let gb_s = Probe::new(1).gb_s();
        assert!((0.05..5000.0).contains(&gb_s), "{gb_s}");
    }
}
