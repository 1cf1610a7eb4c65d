//! What comparisons and benchmarks stand on: kernels and cuBLASLt on one device, repeatable noise, buffers that go up and
//! come back. Copies synchronously; not for serving.

use std::sync::Arc;

use cudarc::driver::{CudaGraph, CudaSlice, CudaStream, DeviceRepr, sys};
use half::bf16;

use crate::{Device, KernelError, Kernels, blas::Blas};

/// Values after the end of every output, which must stay poisoned.
const GUARD: usize = 64;

/// One device ready for use.
#[derive(Debug)]
pub struct Gpu {
    /// Our kernels.
    pub kernels: Kernels,
    /// NVIDIA's products.
    pub blas: Blas,
    /// The same stream of numbers in every run.
    pub noise: Noise,
}

/// An output full of NaN, with a guard behind it.
#[derive(Debug)]
pub struct Poisoned<T> {
    buffer: CudaSlice<T>,
    len: usize,
}

impl Gpu {
    /// Loads everything.
    pub fn new(device: &Device) -> Result<Self, KernelError> {
        Ok(Self { kernels: Kernels::load(device)?, blas: Blas::new(device)?, noise: Noise(1) })
    }

    /// The device's stream.
    pub fn stream(&self) -> &Arc<CudaStream> {
        self.kernels.device().stream()
    }

    /// A copy on the device.
    pub fn upload<T: DeviceRepr>(&self, values: &[T]) -> Result<CudaSlice<T>, KernelError> {
        self.stream().clone_htod(values).map_err(KernelError::driver("copy to the device"))
    }

    /// A copy on the device, rounded.
    pub fn upload_bf16(&self, values: &[f32]) -> Result<CudaSlice<bf16>, KernelError> {
        self.upload(&values.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<_>>())
    }

    /// What the device holds, after everything before has run.
    pub fn download<T: DeviceRepr + Clone + Default>(&self, buffer: &CudaSlice<T>) -> Result<Vec<T>, KernelError> {
        let values = self.stream().clone_dtoh(buffer).map_err(KernelError::driver("copy from the device"))?;
        self.stream().synchronize().map_err(KernelError::driver("wait for the device"))?;
        Ok(values)
    }

    /// Random bf16 on the device: one piece made here, repeated there at a length that no tile divides.
    pub fn random(&mut self, n: usize) -> Result<CudaSlice<bf16>, KernelError> {
        const PIECE: usize = (1 << 20) - 24;
        let failed = KernelError::driver("fill with random numbers");
        let piece = self.noise.normals(PIECE.min(n));
        let piece = self.upload_bf16(&piece)?;
        let mut all = self.stream().alloc_zeros::<bf16>(n).map_err(&failed)?;
        for begin in (0..n).step_by(PIECE) {
            let len = PIECE.min(n - begin);
            let mut target = all.slice_mut(begin..begin + len);
            self.stream().memcpy_dtod(&piece.slice(..len), &mut target).map_err(&failed)?;
        }
        Ok(all)
    }

    /// Writes to what is on the device already.
    pub fn overwrite<T: DeviceRepr>(&self, target: &mut CudaSlice<T>, values: &[T]) -> Result<(), KernelError> {
        self.stream().memcpy_htod(values, target).map_err(KernelError::driver("copy to the device"))
    }

    /// What `launch` launches, as a graph. Launched once outside the capture first: cuBLASLt looks up its algorithms then.
    pub fn capture(&self, mut launch: impl FnMut(&Self) -> Result<(), KernelError>) -> Result<CudaGraph, KernelError> {
        let failed = KernelError::driver("capture a graph");
        launch(self)?;
        self.stream().synchronize().map_err(&failed)?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.stream().begin_capture(mode).map_err(&failed)?;
        let launched = launch(self);
        let graph = self.stream().end_capture(sys::CUgraphInstantiate_flags_enum(0));
        launched?;
        let graph = graph.map_err(&failed)?;
        Ok(graph.expect("a stream that was capturing ends with a graph"))
    }

    /// An output that nobody has written.
    pub fn poisoned<T: DeviceRepr + Clone + Poison>(&self, len: usize) -> Result<Poisoned<T>, KernelError> {
        Ok(Poisoned { buffer: self.upload(&vec![T::POISON; len + GUARD])?, len })
    }

    /// What a kernel wrote; `None` if it left a hole or wrote behind the end.
    pub fn written<T>(&self, output: &Poisoned<T>) -> Result<Option<Vec<T>>, KernelError>
    where
        T: DeviceRepr + Clone + Default + Poison,
    {
        let mut values = self.download(&output.buffer)?;
        let guard = values.split_off(output.len);
        let whole = !values.iter().any(T::is_poison) && guard.iter().all(T::is_poison);
        Ok(whole.then_some(values))
    }
}

impl<T> Poisoned<T> {
    /// The part that a kernel may write.
    pub fn view(&mut self) -> cudarc::driver::CudaViewMut<'_, T> {
        self.buffer.slice_mut(..self.len)
    }
}

/// A value that no kernel writes.
pub trait Poison {
    /// The value.
    const POISON: Self;
    /// Whether this is it.
    fn is_poison(&self) -> bool;
}

impl Poison for bf16 {
    const POISON: Self = bf16::NAN;
    fn is_poison(&self) -> bool {
        self.is_nan()
    }
}

impl Poison for f32 {
    const POISON: Self = f32::NAN;
    fn is_poison(&self) -> bool {
        self.is_nan()
    }
}

impl Poison for u32 {
    // Not the sampler's mark for a row of NaN.
    const POISON: Self = 0xdead_beef;
    fn is_poison(&self) -> bool {
        *self == Self::POISON
    }
}

/// As f32.
pub(super) fn widened(values: &[bf16]) -> Vec<f32> {
    values.iter().map(|x| x.to_f32()).collect()
}

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
