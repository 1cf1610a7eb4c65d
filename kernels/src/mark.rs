//! A place in the stream that a thread can wait for: everything launched before it has run. Has no clock, unlike a `Span`.

use cudarc::driver::CudaEvent;

use crate::{Device, KernelError};

/// One place; setting it again moves it.
#[derive(Debug)]
pub struct Mark {
    reached: CudaEvent,
}

impl Mark {
    /// A mark that was not set: nothing is waited for.
    pub fn new(device: &Device) -> Result<Self, KernelError> {
        let reached = device.context().new_event(None).map_err(KernelError::driver("create an event"))?;
        Ok(Self { reached })
    }

    pub(crate) fn event(&self) -> &CudaEvent {
        &self.reached
    }

    /// Behind everything launched so far.
    pub fn set(&self, device: &Device) -> Result<(), KernelError> {
        self.reached.record(device.stream()).map_err(KernelError::driver("mark a place in the stream"))
    }

    /// Waits until the device is there; spins. An error may be that of any launch before.
    pub fn wait(&self) -> Result<(), KernelError> {
        self.reached.synchronize().map_err(KernelError::driver("wait for a place in the stream"))
    }
}
