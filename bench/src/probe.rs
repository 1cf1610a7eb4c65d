//! How fast this machine reads memory and multiplies at this moment: on shared machines both halve and double within seconds, and
//! a speed without them says nothing.

use std::{hint::black_box, io, thread, time::Instant};

use stoker_engine::{
    model::WeightFormat,
    ops::{CpuOps, Isa},
};
use stoker_figures::median;

/// Far beyond any last-level cache this is run on.
const BYTES_PER_THREAD: usize = 128 << 20;
const LANES: usize = 16;
const PASSES: usize = 3;

/// What the machine does at best, now.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speeds {
    /// Memory read, GB/s of all threads.
    pub gb_s: f64,
    /// Multiply-adds as products with weights of the model's format have them, in 10^9 operations a second of all threads; `None`
    /// where weights are blocks of integers.
    pub gflop_s: Option<f64>,
}

/// Memory that is read again and again, one part a thread, and threads that multiply.
#[derive(Debug)]
pub struct Probe {
    parts: Vec<Vec<u64>>,
    ops: CpuOps,
    format: WeightFormat,
}

impl Probe {
    /// For as many threads as compute, with the instructions and the format of weights that they compute with.
    ///
    /// # Errors
    /// The system starts no threads.
    pub fn new(threads: usize, isa: Isa, format: WeightFormat) -> io::Result<Self> {
        // Pages of zeros may share one frame, so every word differs.
        let part = |idx: usize| (0..BYTES_PER_THREAD / 8).map(|word| (word ^ (idx << 40)) as u64).collect();
        Ok(Self { parts: (0..threads).map(part).collect(), ops: CpuOps::new(threads, isa)?, format })
    }

    /// The medians of a few passes of some milliseconds.
    pub fn speeds(&mut self) -> Speeds {
        let read: Vec<f64> = (0..PASSES).map(|_| self.read()).collect();
        let multiplied: Option<Vec<f64>> = (0..PASSES).map(|_| self.ops.peak_flop_s(self.format)).collect();
        Speeds { gb_s: median(&read), gflop_s: multiplied.map(|passes| median(&passes) / 1e9) }
    }

    fn read(&self) -> f64 {
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
    fn memory_is_read_and_numbers_are_multiplied_at_a_plausible_speed() {
        let speeds = |format| Probe::new(1, Isa::best(), format).unwrap().speeds();
        let Speeds { gb_s, gflop_s: Some(gflop_s) } = speeds(WeightFormat::F32) else { panic!("f32 is multiplied") };
        assert!((0.05..5000.0).contains(&gb_s) && (0.05..5000.0).contains(&gflop_s), "{gb_s} GB/s, {gflop_s} GFLOP/s");
        assert_eq!(speeds(WeightFormat::Q8_0).gflop_s, None);
    }
}
