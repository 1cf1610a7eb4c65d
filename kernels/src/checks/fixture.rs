//! What comparisons and benchmarks stand on: kernels and cuBLASLt on one device, repeatable noise, buffers that go up and
//! come back. Copies synchronously; not for serving.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DeviceRepr};
use half::bf16;

use crate::{
    Device, KernelError, Kernels,
    blas::Blas,
    graph::Graph,
    noise::{self, Noise},
};

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

    /// Random bf16 on the device, normal.
    pub fn random(&mut self, n: usize) -> Result<CudaSlice<bf16>, KernelError> {
        let piece = noise::piece(self.kernels.device(), &mut self.noise, n, 1.0)?;
        noise::repeated(self.kernels.device(), &piece, n)
    }

    /// Writes to what is on the device already.
    pub fn overwrite<T: DeviceRepr>(&self, target: &mut CudaSlice<T>, values: &[T]) -> Result<(), KernelError> {
        self.stream().memcpy_htod(values, target).map_err(KernelError::driver("copy to the device"))
    }

    /// What `launch` launches, as a graph. Launched once outside the capture first: cuBLASLt looks up its algorithms then.
    pub fn capture(&self, mut launch: impl FnMut(&Self) -> Result<(), KernelError>) -> Result<Graph, KernelError> {
        launch(self)?;
        self.stream().synchronize().map_err(KernelError::driver("wait for the device"))?;
        self.kernels.device().capture(|| launch(self))
    }

    /// An output that nobody has written.
    pub fn poisoned<T: DeviceRepr + Clone + Poison>(&self, len: usize) -> Result<Poisoned<T>, KernelError> {
        self.guarded(vec![T::POISON; len])
    }

    /// An output that a kernel adds to, with a guard behind it.
    pub fn guarded<T: DeviceRepr + Clone + Poison>(&self, mut values: Vec<T>) -> Result<Poisoned<T>, KernelError> {
        let len = values.len();
        values.resize(len + GUARD, T::POISON);
        Ok(Poisoned { buffer: self.upload(&values)?, len })
    }

    /// What the output holds, poison included.
    pub fn held<T: DeviceRepr + Clone + Default>(&self, output: &Poisoned<T>) -> Result<Vec<T>, KernelError> {
        let mut values = self.download(&output.buffer)?;
        values.truncate(output.len);
        Ok(values)
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

impl Poison for u8 {
    // As e4m3 no number.
    const POISON: Self = 0x7f;
    fn is_poison(&self) -> bool {
        *self == Self::POISON
    }
}

/// As f32.
pub(super) fn widened(values: &[bf16]) -> Vec<f32> {
    values.iter().map(|x| x.to_f32()).collect()
}
