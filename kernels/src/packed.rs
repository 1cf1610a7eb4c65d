//! The inputs of a step: arrays of different types, packed into one buffer so that one copy from pinned memory brings all
//! of them to the device. Owns the buffers; what the arrays mean is the caller's.
//!
//! ```text
//! words of 8 bytes:  [ field a ][ pad ][ field b ][ pad ] ...        every field begins at a multiple of 16 bytes
//! ```
//! The last field may be a large table of which little is used: then only the beginnings of its rows are sent. A block table for 256
//! sequences of 131072 tokens has 8 MiB, 0.17 ms of the link, between two steps.
//! Several pinned copies take turns, so the next step is packed while the last one's copy may still wait for its own.

use std::{marker::PhantomData, ptr};

use bytemuck::Pod;
use cudarc::driver::{CudaEvent, CudaSlice, CudaStream, CudaView, DevicePtr, PinnedHostSlice, sys};
use stoker_fit::gpu::end_of_field;

use crate::{Device, KernelError};

/// A table up to this size is sent whole: a copy of its own costs as much.
const WHOLE_TABLE_BYTES: usize = 64 << 10;

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
        self.n_words = end_of_field(field.begin, len * size_of::<T>());
        field
    }

    /// 8-byte words of all arrays.
    pub fn n_words(&self) -> usize {
        self.n_words
    }
}

/// The part of a table that holds something: the beginnings of its first rows.
#[derive(Clone, Copy, Debug)]
pub struct Corner<T> {
    /// The last field of its layout.
    pub table: Field<T>,
    /// Values of a row.
    pub row_values: usize,
    /// Rows with something in them.
    pub n_rows: usize,
    /// Values at their beginnings; at most `row_values`.
    pub n_columns: usize,
}

/// What is sent of a layout.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Sent {
    /// Words from the beginning, in one copy.
    n_words: usize,
    /// Then these.
    rows: Option<SentRows>,
}

/// Beginnings of rows.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct SentRows {
    /// From the beginning of the layout to the first one.
    first_byte: usize,
    /// From one to the next.
    pitch_bytes: usize,
    width_bytes: usize,
    n_rows: usize,
}

impl Sent {
    fn new<T>(layout: Layout, corner: Corner<T>) -> Self {
        let Corner { table, row_values, n_rows, n_columns } = corner;
        if table.len * size_of::<T>() <= WHOLE_TABLE_BYTES {
            return Self { n_words: layout.n_words, rows: None };
        }
        let first_byte = table.begin * size_of::<u64>();
        let rows = SentRows {
            first_byte,
            pitch_bytes: row_values * size_of::<T>(),
            width_bytes: n_columns * size_of::<T>(),
            n_rows,
        };
        Self { n_words: table.begin, rows: (n_rows * n_columns > 0).then_some(rows) }
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
    slots: Vec<Slot>,
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
    /// Allocates for layouts of up to `n_words`, of which so many may be on their way.
    pub fn new(device: &Device, n_words: usize, n_copies: usize) -> Result<Self, KernelError> {
        let words = device.stream().alloc_zeros(n_words).map_err(KernelError::driver("allocate a step's inputs"))?;
        Ok(Self {
            slots: (0..n_copies).map(|_| Slot::new(device, n_words)).collect::<Result<_, _>>()?,
            next: 0,
            words,
            device: device.clone(),
        })
    }

    /// Lets `fill` write the next copy, then sends it to the device, of a large table at its end only the used corner. Waits
    /// only if the device has not fetched the oldest copy yet.
    pub fn upload<T>(
        &mut self,
        layout: Layout,
        used: Corner<T>,
        fill: impl FnOnce(&mut Filling<'_>),
    ) -> Result<(), KernelError> {
        let sent = Sent::new(layout, used);
        let failed = KernelError::driver("copy a step's inputs to the device");
        let n_copies = self.slots.len();
        let slot = &mut self.slots[self.next];
        self.next = (self.next + 1) % n_copies;
        slot.copied.synchronize().map_err(&failed)?;
        let words = &mut slot.host.as_mut_slice().map_err(&failed)?[..layout.n_words];
        fill(&mut Filling { words: &mut *words });
        self.device.stream().memcpy_htod(&words[..sent.n_words], &mut self.words).map_err(&failed)?;
        if let Some(rows) = sent.rows {
            send_rows(words, &self.words, rows, self.device.stream())?;
        }
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

/// Copies the same rows of `host` to `device`, behind everything in the stream.
fn send_rows(host: &[u64], device: &CudaSlice<u64>, rows: SentRows, stream: &CudaStream) -> Result<(), KernelError> {
    let SentRows { first_byte, pitch_bytes, width_bytes, n_rows } = rows;
    let end = first_byte + (n_rows - 1) * pitch_bytes + width_bytes;
    assert!(width_bytes <= pitch_bytes && end <= size_of_val(host), "the rows lie inside their table");
    let copy = sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_HOST,
        srcHost: host.as_ptr().wrapping_byte_add(first_byte).cast(),
        srcDevice: 0,
        srcArray: ptr::null_mut(),
        srcPitch: pitch_bytes,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstHost: ptr::null_mut(),
        dstDevice: device.device_ptr(stream).0 + first_byte as u64,
        dstArray: ptr::null_mut(),
        dstPitch: pitch_bytes,
        WidthInBytes: width_bytes,
        Height: n_rows,
    };
    // SAFETY: both sides hold the layout that the rows were checked against; the pinned one is neither written nor freed before
    // the event behind this copy.
    unsafe { sys::cuMemcpy2DAsync_v2(&raw const copy, stream.cu_stream()) }
        .result()
        .map_err(KernelError::driver("copy a step's block table to the device"))
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
        assert_eq!([a.begin, b.begin, c.begin], [0, 2, 18]);
        assert_eq!(layout.n_words(), 20);
    }

    fn corner(table: Field<i32>, row_values: usize, n_columns: usize) -> Corner<i32> {
        Corner { table, row_values, n_rows: 3, n_columns }
    }

    #[test]
    fn a_small_table_is_sent_whole_and_of_a_large_one_the_used_beginnings_of_rows() {
        let mut layout = Layout::default();
        layout.field::<u64>(10);
        let small = layout.field(4 * 8);
        assert_eq!(Sent::new(layout, corner(small, 8, 2)), Sent { n_words: layout.n_words(), rows: None });
        let mut layout = Layout::default();
        layout.field::<u64>(10);
        let large = layout.field(4 * 8192);
        let rows = SentRows { first_byte: 80, pitch_bytes: 4 * 8192, width_bytes: 20, n_rows: 3 };
        assert_eq!(Sent::new(layout, corner(large, 8192, 5)), Sent { n_words: 10, rows: Some(rows) });
        assert_eq!(Sent::new(layout, corner(large, 8192, 0)), Sent { n_words: 10, rows: None });
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
