//! The inputs of a step: arrays of different types, packed into one buffer so that one copy from pinned memory brings all
//! of them to the device. Owns the buffers; what the arrays mean is the caller's.
//!
//! ```text
//! words of 8 bytes:  [ field a ][ pad ][ field b ][ pad ] ...        every field begins at a multiple of 16 bytes
//! ```
//! Two pinned copies alternate, so the next step is packed while the last one's copy may still wait for its turn.

use std::marker::PhantomData;

use bytemuck::Pod;
use cudarc::driver::{CudaEvent, CudaSlice, CudaView, PinnedHostSlice};

use crate::{Device, KernelError};

/// Words between the beginnings of fields are even: kernels read 16 bytes at once.
const ALIGN_WORDS: usize = 2;

/// Where an array lies.
#[derive(Debug)]
pub struct Field<T> {
    begin: usize,
    len: usize,
    marker: PhantomData<T>,
}

impl<T> Clone for Field<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Field<T> {}

impl<T> Field<T> {
    /// Values of the array.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn n_words(&self) -> usize {
        (self.len * size_of::<T>()).div_ceil(size_of::<u64>())
    }
}

/// Puts arrays one behind the other.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Layout {
    n_words: usize,
}

impl Layout {
    /// Room for `len` values behind everything so far.
    pub fn field<T: Pod>(&mut self, len: usize) -> Field<T> {
        let field = Field { begin: self.n_words, len, marker: PhantomData };
        self.n_words = (field.begin + field.n_words()).next_multiple_of(ALIGN_WORDS);
        field
    }

    /// 8-byte words of all arrays.
    pub fn n_words(&self) -> usize {
        self.n_words
    }
}

/// One pinned copy.
#[derive(Debug)]
struct Slot {
    host: PinnedHostSlice<u64>,
    /// Recorded behind the copy to the device.
    copied: CudaEvent,
}

/// The buffers.
#[derive(Debug)]
pub struct Packed {
    slots: [Slot; 2],
    next: usize,
    words: CudaSlice<u64>,
    device: Device,
}

/// A pinned copy being filled.
#[derive(Debug)]
pub struct Filling<'a> {
    words: &'a mut [u64],
}

impl Filling<'_> {
    /// An array; holds what an earlier step left there.
    pub fn field<T: Pod>(&mut self, field: Field<T>) -> &mut [T] {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words[field.begin..][..field.n_words()]);
        bytemuck::cast_slice_mut(&mut bytes[..field.len * size_of::<T>()])
    }
}

impl Packed {
    /// Allocates for layouts of up to `n_words`.
    pub fn new(device: &Device, n_words: usize) -> Result<Self, KernelError> {
        let words = device.stream().alloc_zeros(n_words).map_err(KernelError::driver("allocate a step's inputs"))?;
        Ok(Self {
            slots: [Slot::new(device, n_words)?, Slot::new(device, n_words)?],
            next: 0,
            words,
            device: device.clone(),
        })
    }

    /// Lets `fill` write the next copy, then sends the first `n_words` to the device. Waits only if the step before the
    /// last one has not fetched its copy yet.
    pub fn upload(&mut self, layout: Layout, fill: impl FnOnce(&mut Filling<'_>)) -> Result<(), KernelError> {
        let failed = KernelError::driver("copy a step's inputs to the device");
        let slot = &mut self.slots[self.next];
        self.next = 1 - self.next;
        slot.copied.synchronize().map_err(&failed)?;
        let words = &mut slot.host.as_mut_slice().map_err(&failed)?[..layout.n_words];
        fill(&mut Filling { words: &mut *words });
        self.device.stream().memcpy_htod(&*words, &mut self.words).map_err(&failed)?;
        slot.copied.record(self.device.stream()).map_err(&failed)
    }

    /// An array on the device, as launches after the last upload find it.
    pub fn view<T: Pod>(&self, field: Field<T>) -> CudaView<'_, T> {
        let words = self.words.slice(field.begin..field.begin + field.n_words());
        // SAFETY: the field lies inside these words, which are aligned for any T of up to 16 bytes; `Pod` says that any
        // bits are a T.
        let view = unsafe { words.transmute::<T>(field.len) };
        view.expect("a field has the words that its values need")
    }
}

impl Slot {
    fn new(device: &Device, n_words: usize) -> Result<Self, KernelError> {
        let failed = KernelError::driver("allocate pinned memory");
        // SAFETY: zeroed below before anyone reads it.
        let mut host = unsafe { device.context().alloc_pinned_with_flags::<u64>(n_words, 0) }.map_err(&failed)?;
        host.as_mut_slice().map_err(&failed)?.fill(0);
        Ok(Self { host, copied: device.context().new_event(None).map_err(&failed)? })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // The device must not read memory that is gone. A failure means that it reads nothing any more.
        let _ = self.copied.synchronize();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{plan::DecodeReader, sampling::SampleRow};

    #[test]
    fn fields_neither_overlap_nor_begin_between_vectors() {
        let mut layout = Layout::default();
        let (a, b, c) = (layout.field::<u32>(3), layout.field::<SampleRow>(2), layout.field::<i32>(1));
        assert_eq!([a.begin, b.begin, c.begin], [0, 2, 10]);
        assert_eq!(layout.n_words(), 12);
    }

    #[test]
    fn a_field_is_filled_without_touching_its_neighbours() {
        let mut layout = Layout::default();
        let (a, b, c) = (layout.field::<u32>(3), layout.field::<i32>(2), layout.field::<DecodeReader>(1));
        let mut words = vec![0u64; layout.n_words()];
        let mut filling = Filling { words: &mut words };
        filling.field(a).fill(u32::MAX);
        assert_eq!(filling.field(b), [0, 0]);
        filling.field(b).copy_from_slice(&[-1, 7]);
        // 12 bytes a value: no whole number of them fills the words.
        assert_eq!(filling.field(c).len(), 1);
        assert_eq!(filling.field(a), [u32::MAX; 3]);
    }
}
