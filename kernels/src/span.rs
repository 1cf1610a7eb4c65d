//! When a piece of work on the device began and ended, by the device's own clock. Two marks in the stream; nothing waits for them
//! but whoever reads them.

use cudarc::driver::{CudaEvent, sys::CUevent_flags};

use crate::{Device, KernelError};

/// One piece of work.
#[derive(Debug)]
pub struct Span {
    begin: CudaEvent,
    end: CudaEvent,
}

impl Span {
    /// Marks that were not set yet.
    pub fn new(device: &Device) -> Result<Self, KernelError> {
        // Unlike a plain event, one with a clock.
        let flags = Some(CUevent_flags::CU_EVENT_DEFAULT);
        let event = || device.context().new_event(flags).map_err(KernelError::driver("create an event"));
        Ok(Self { begin: event()?, end: event()? })
    }

    /// The work begins behind everything launched so far.
    pub fn begin(&self, device: &Device) -> Result<(), KernelError> {
        self.begin.record(device.stream()).map_err(KernelError::driver("mark the beginning of a step"))
    }

    /// The work ends with what was launched last.
    pub fn end(&self, device: &Device) -> Result<(), KernelError> {
        self.end.record(device.stream()).map_err(KernelError::driver("mark the end of a step"))
    }

    /// Seconds from the end of `earlier` to this beginning. Waits for both.
    pub fn seconds_after(&self, earlier: &Self) -> Result<f64, KernelError> {
        let ms = earlier.end.elapsed_ms(&self.begin).map_err(KernelError::driver("read the device's clock"))?;
        Ok(f64::from(ms) / 1e3)
    }
}
