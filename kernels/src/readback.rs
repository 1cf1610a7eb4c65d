//! Results on their way to the host: pinned memory that the device writes, and the moment from which it may be read.

use bytemuck::Pod;
use cudarc::driver::{CudaEvent, CudaView, DeviceRepr, PinnedHostSlice, ValidAsZeroBits};

use crate::{Device, KernelError};

/// Room for one step's results.
#[derive(Debug)]
pub struct Readback<T> {
    host: PinnedHostSlice<T>,
    len: usize,
    done: CudaEvent,
    device: Device,
}

impl<T: Pod + DeviceRepr + ValidAsZeroBits> Readback<T> {
    /// Allocates for up to `len` values.
    pub fn new(device: &Device, len: usize) -> Result<Self, KernelError> {
        let failed = KernelError::driver("allocate pinned memory");
        // SAFETY: zeroed below before anyone reads it.
        let mut host = unsafe { device.context().alloc_pinned_with_flags::<T>(len, 0) }.map_err(&failed)?;
        host.as_mut_slice().map_err(&failed)?.fill(T::zeroed());
        let done = device.context().new_event(None).map_err(&failed)?;
        Ok(Self { host, len: 0, done, device: device.clone() })
    }

    /// Asks for `source` as the launches before this call leave it; of an empty one, when they are over. Returns at once.
    pub fn request(&mut self, source: &CudaView<'_, T>) -> Result<(), KernelError> {
        let failed = KernelError::driver("copy results from the device");
        self.len = source.len();
        if self.len > 0 {
            let target = &mut self.host.as_mut_slice().map_err(&failed)?[..self.len];
            self.device.stream().memcpy_dtoh(source, target).map_err(&failed)?;
        }
        self.done.record(self.device.stream()).map_err(&failed)
    }

    /// Whether what was asked last is there. An error may be that of any launch before.
    pub fn is_done(&self) -> Result<bool, KernelError> {
        self.done.try_is_complete().map_err(KernelError::driver("look whether results of the device are there"))
    }

    /// Waits for what was asked last. The wait spins: a sleeping thread wakes up tens of microseconds late. An error may be
    /// that of any launch before.
    pub fn wait(&self) -> Result<&[T], KernelError> {
        let failed = KernelError::driver("wait for results of the device");
        self.done.synchronize().map_err(&failed)?;
        Ok(&self.host.as_slice().map_err(&failed)?[..self.len])
    }
}

impl<T> Drop for Readback<T> {
    fn drop(&mut self) {
        // The device must not write memory that is gone. A failure means that it writes nothing any more.
        let _ = self.done.synchronize();
    }
}
