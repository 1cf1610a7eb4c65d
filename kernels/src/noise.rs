//! Repeatable random numbers, on the host and on the device: for comparisons, benchmarks and models without weights.

use cudarc::driver::CudaSlice;
use half::bf16;

use crate::{Device, KernelError};

/// Numbers made on the host for one piece; no tile divides it, so repeated pieces never line up with rows.
const PIECE: usize = (1 << 20) - 24;

/// Repeatable numbers: SplitMix64.
#[derive(Clone, Debug)]
pub struct Noise(pub u64);

impl Noise {
    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A whole number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// Nearly normal, mean 0, deviation 1: the sum of four uniform numbers.
    pub fn normal(&mut self) -> f32 {
        let bits = self.bits();
        let sum: u64 = (0..4).map(|part| bits >> (16 * part) & 0xffff).sum();
        (sum as f32 / 65536.0 - 2.0) * 3f32.sqrt()
    }

    /// `n` normal numbers that bf16 holds exactly.
    pub fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| bf16::from_f32(self.normal()).to_f32()).collect()
    }

    /// 0 to n - 1 in any order.
    pub fn permutation(&mut self, n: usize) -> Vec<i32> {
        let mut order: Vec<i32> = (0..n as i32).collect();
        for i in (1..n).rev() {
            order.swap(i, self.below(i + 1));
        }
        order
    }
}

/// Up to `PIECE` normal numbers of deviation `scale` on the device, for [`repeated`].
pub fn piece(device: &Device, noise: &mut Noise, n: usize, scale: f32) -> Result<CudaSlice<bf16>, KernelError> {
    let numbers: Vec<bf16> = (0..PIECE.min(n)).map(|_| bf16::from_f32(noise.normal() * scale)).collect();
    device.stream().clone_htod(&numbers).map_err(KernelError::driver("copy random numbers to the device"))
}

/// `n` numbers on the device: the piece, again and again.
pub fn repeated(device: &Device, piece: &CudaSlice<bf16>, n: usize) -> Result<CudaSlice<bf16>, KernelError> {
    let failed = KernelError::driver("fill with random numbers");
    let mut all = device.stream().alloc_zeros::<bf16>(n).map_err(&failed)?;
    for begin in (0..n).step_by(piece.len()) {
        let len = piece.len().min(n - begin);
        let mut target = all.slice_mut(begin..begin + len);
        device.stream().memcpy_dtod(&piece.slice(..len), &mut target).map_err(&failed)?;
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_is_repeatable_and_about_normal() {
        let values = Noise(7).normals(10_000);
        assert_eq!(values, Noise(7).normals(10_000));
        let mean = values.iter().sum::<f32>() / 1e4;
        let variance = values.iter().map(|x| x * x).sum::<f32>() / 1e4;
        assert!(mean.abs() < 0.05 && (variance - 1.0).abs() < 0.05, "{mean} {variance}");
    }

    #[test]
    fn a_permutation_holds_every_number_once() {
        let mut order = Noise(3).permutation(100);
        order.sort_unstable();
        assert_eq!(order, (0..100).collect::<Vec<_>>());
    }
}
