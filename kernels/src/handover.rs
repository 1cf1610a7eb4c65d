//! Rows on their way from one stage of a pipeline to the next, which is on another device: the one that has them copies them behind what it
//! has launched, the other one waits in its stream. No thread waits, and neither needs to reach the other's memory in kernels: where the link
//! between them does not let a copy through, the driver brings it by way of the host.

use cudarc::driver::{CudaEvent, CudaSlice, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceRepr, result};
use half::bf16;

use crate::{Device, KernelError};

/// Room for rows of one step on the device that they are for.
#[derive(Debug)]
pub struct Handover {
    rows: CudaSlice<bf16>,
    from: Device,
    to: Device,
    arrived: CudaEvent,
    taken: CudaEvent,
}

impl Handover {
    /// Room for so many values.
    pub fn new(from: &Device, to: &Device, n_values: usize) -> Result<Self, KernelError> {
        let event = |device: &Device| device.context().new_event(None).map_err(KernelError::driver("create an event"));
        Ok(Self {
            rows: to.zeros(n_values)?,
            arrived: event(from)?,
            taken: event(to)?,
            from: from.clone(),
            to: to.clone(),
        })
    }

    /// Sends these, as everything launched so far leaves them, once those before have been taken. Their sender may overwrite them in what it
    /// launches next.
    pub fn send(&mut self, rows: &CudaView<'_, bf16>) -> Result<(), KernelError> {
        let Self { rows: room, from, to, arrived, taken } = self;
        let failed = KernelError::driver("hand rows over to the next stage");
        from.stream().wait(taken).map_err(&failed)?;
        copy_between((from, rows), (to, &mut room.slice_mut(..rows.len())))?;
        arrived.record(from.stream()).map_err(&failed)
    }

    /// Takes what was sent last, which may be on its way.
    pub fn take(&mut self, rows: &mut CudaViewMut<'_, bf16>) -> Result<(), KernelError> {
        let failed = KernelError::driver("take rows of the stage before");
        self.to.stream().wait(&self.arrived).map_err(&failed)?;
        self.to.stream().memcpy_dtod(&self.rows.slice(..rows.len()), rows).map_err(&failed)?;
        self.taken.record(self.to.stream()).map_err(&failed)
    }
}

/// Copies values from one device to another, behind everything that was launched on the first.
pub fn copy_between<T: DeviceRepr>(
    (from, values): (&Device, &CudaView<'_, T>),
    (to, target): (&Device, &mut CudaViewMut<'_, T>),
) -> Result<(), KernelError> {
    assert_eq!(values.len(), target.len(), "as many values as there is room for");
    let failed = KernelError::driver("copy from one GPU to another");
    from.context().bind_to_thread().map_err(&failed)?;
    let (source, _reading) = values.device_ptr(from.stream());
    let (target, _writing) = target.device_ptr_mut(to.stream());
    // SAFETY: both hold so many bytes, on these devices; who frees them waits for both streams before.
    unsafe {
        result::memcpy_peer_async(
            to.context().cu_ctx(),
            target,
            from.context().cu_ctx(),
            source,
            size_of::<T>() * values.len(),
            from.stream().cu_stream(),
        )
    }
    .map_err(&failed)
}
