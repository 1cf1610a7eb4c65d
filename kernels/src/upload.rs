//! Weights on their way to the device: several threads copy from mapped files into pinned memory, two buffers each, and
//! from there to the GPU on streams of their own. Numbers other than bf16 are rounded to it on the way.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
    thread,
};

use cudarc::driver::{CudaEvent, CudaSlice, CudaStream, DevicePtrMut, PinnedHostSlice, result};
use half::{bf16, f16};

use crate::{Device, KernelError};

/// Values of one pinned buffer: 8 MiB, enough that a copy's start costs nothing, few enough to begin early.
const PIECE_VALUES: usize = 4 << 20;
/// Beyond this many threads the link, not the host, sets the pace.
const THREADS_MAX: usize = 8;

/// Numbers as a file holds them, little-endian.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Stored<'a> {
    /// Copied as they are.
    Bf16(&'a [u8]),
    /// Rounded.
    F16(&'a [u8]),
    /// Rounded.
    F32(&'a [u8]),
}

/// One tensor on the device, and what it is made of.
#[derive(Debug)]
pub struct Upload<'a> {
    /// Where to.
    pub target: &'a mut CudaSlice<bf16>,
    /// One behind the other; together exactly as many values as the target has.
    pub parts: Vec<Stored<'a>>,
}

/// What one copy takes.
#[derive(Debug)]
struct Piece<'a> {
    /// Device address of its first value.
    target: u64,
    /// One behind the other.
    sources: Vec<Stored<'a>>,
    n_values: usize,
}

impl Piece<'_> {
    fn write_to(&self, mut target: &mut [bf16]) {
        for source in &self.sources {
            let (own, rest) = target.split_at_mut(source.len());
            source.write_to(own);
            target = rest;
        }
    }
}

impl<'a> Stored<'a> {
    /// Numbers in it.
    pub fn len(&self) -> usize {
        match self {
            Self::Bf16(bytes) | Self::F16(bytes) => bytes.len() / 2,
            Self::F32(bytes) => bytes.len() / 4,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The same numbers, `n` at a time.
    pub fn chunks(self, n: usize) -> Vec<Self> {
        match self {
            Self::Bf16(bytes) => bytes.chunks(2 * n).map(Self::Bf16).collect(),
            Self::F16(bytes) => bytes.chunks(2 * n).map(Self::F16).collect(),
            Self::F32(bytes) => bytes.chunks(4 * n).map(Self::F32).collect(),
        }
    }

    fn write_to(self, target: &mut [bf16]) {
        match self {
            Self::Bf16(bytes) => bytemuck::cast_slice_mut(target).copy_from_slice(bytes),
            Self::F16(bytes) => round(bytes, target, |bytes| f16::from_le_bytes(bytes).to_f32()),
            Self::F32(bytes) => round(bytes, target, f32::from_le_bytes),
        }
    }
}

fn round<const N: usize>(bytes: &[u8], target: &mut [bf16], number: impl Fn([u8; N]) -> f32) {
    for (target, stored) in target.iter_mut().zip(bytes.as_chunks::<N>().0) {
        *target = bf16::from_f32(number(*stored));
    }
}

/// Makes all copies and waits for them; `progress` hears the share done.
pub fn upload(device: &Device, uploads: Vec<Upload<'_>>, progress: &(dyn Fn(f32) + Sync)) -> Result<(), KernelError> {
    // The targets' memory is the device's stream's until what it did there is over.
    device.stream().synchronize().map_err(KernelError::driver("wait for the device"))?;
    let pieces: VecDeque<Piece<'_>> = uploads.into_iter().flat_map(|upload| cut(device, upload)).collect();
    let n_values: usize = pieces.iter().map(|piece| piece.n_values).sum();
    let n_threads = thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX).min(pieces.len().max(1));
    let queue = Mutex::new(Queue { pieces, n_taken: 0 });
    let work = || {
        let mut lane = Lane::new(device)?;
        while let Some((piece, n_taken)) = take(&queue) {
            lane.copy(&piece)?;
            progress(n_taken as f32 / n_values as f32);
        }
        lane.stream.synchronize().map_err(KernelError::driver("wait for weights to arrive"))
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..n_threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().expect("copying does not panic"))
    })
}

#[derive(Debug)]
struct Queue<'a> {
    pieces: VecDeque<Piece<'a>>,
    n_taken: usize,
}

/// The next piece, and the values taken so far with it.
fn take<'a>(queue: &Mutex<Queue<'a>>) -> Option<(Piece<'a>, usize)> {
    let mut queue = queue.lock().expect("no holder of this lock panics");
    let piece = queue.pieces.pop_front()?;
    queue.n_taken += piece.n_values;
    Some((piece, queue.n_taken))
}

/// The parts of a tensor in pieces that fit a pinned buffer. The upload's borrow of its target ends with the whole call.
fn cut<'a>(device: &Device, upload: Upload<'a>) -> Vec<Piece<'a>> {
    let Upload { target, parts } = upload;
    let n_values: usize = parts.iter().map(Stored::len).sum();
    assert_eq!(target.len(), n_values, "a tensor's size was checked against its shape");
    pieces(target.device_ptr_mut(device.stream()).0, parts, PIECE_VALUES)
}

/// Pieces of at most `most` values from the device address `first` on. Small parts share one: each copy has a price.
fn pieces(first: u64, parts: Vec<Stored<'_>>, most: usize) -> Vec<Piece<'_>> {
    let mut pieces: Vec<Piece<'_>> = Vec::new();
    let mut at = first;
    for source in parts.into_iter().flat_map(|part| part.chunks(most)) {
        let n = source.len();
        match pieces.last_mut().filter(|piece| piece.n_values + n <= most) {
            Some(piece) => {
                piece.sources.push(source);
                piece.n_values += n;
            }
            None => pieces.push(Piece { target: at, sources: vec![source], n_values: n }),
        }
        at += (n * size_of::<bf16>()) as u64;
    }
    pieces
}

/// One thread's stream and pinned buffers.
#[derive(Debug)]
struct Lane {
    stream: Arc<CudaStream>,
    buffers: [(PinnedHostSlice<bf16>, CudaEvent); 2],
    next: usize,
}

impl Lane {
    fn new(device: &Device) -> Result<Self, KernelError> {
        let failed = KernelError::driver("allocate pinned memory");
        let context = device.context();
        let buffer = || -> Result<_, KernelError> {
            // SAFETY: every value is written before it is copied. Without write-combining: rounding writes odd widths.
            let host = unsafe { context.alloc_pinned_with_flags::<bf16>(PIECE_VALUES, 0) }.map_err(&failed)?;
            Ok((host, context.new_event(None).map_err(&failed)?))
        };
        let stream = context.new_stream().map_err(KernelError::driver("create a stream"))?;
        Ok(Self { stream, buffers: [buffer()?, buffer()?], next: 0 })
    }

    fn copy(&mut self, piece: &Piece<'_>) -> Result<(), KernelError> {
        let failed = KernelError::driver("copy weights to the device");
        let (host, copied) = &mut self.buffers[self.next];
        self.next = 1 - self.next;
        copied.synchronize().map_err(&failed)?;
        let values = &mut host.as_mut_slice().map_err(&failed)?[..piece.n_values];
        piece.write_to(values);
        // SAFETY: `cut` keeps the piece inside its target, which `upload` borrows; no other piece covers it; the pinned
        // values stay until `copied` has happened.
        unsafe { result::memcpy_htod_async(piece.target, &*values, self.stream.cu_stream()) }.map_err(&failed)?;
        copied.record(&self.stream).map_err(&failed)
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // The device must not read buffers that are gone. A failure means that it reads nothing any more.
        let _ = self.stream.synchronize();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_arrives_as_the_nearest_bf16() {
        let values = [1.0f32, -0.099_976, 3.140_625, 65280.0];
        let f32_bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let f16_bytes: Vec<u8> = values[..3].iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect();
        let bf16_bytes: Vec<u8> = values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect();
        let written = |stored: Stored<'_>| {
            let mut target = vec![bf16::NAN; stored.len()];
            stored.write_to(&mut target);
            target
        };
        let expected: Vec<bf16> = values.iter().map(|x| bf16::from_f32(*x)).collect();
        assert_eq!(written(Stored::F32(&f32_bytes)), expected);
        assert_eq!(written(Stored::Bf16(&bf16_bytes)), expected);
        assert_eq!(written(Stored::F16(&f16_bytes)), expected[..3]);
    }

    #[test]
    fn pieces_hold_every_value_once_in_order() {
        let bytes: Vec<u8> = (1..=26).flat_map(|i| bf16::from_f32(i as f32).to_le_bytes()).collect();
        let parts: Vec<_> = [&bytes[..20], &bytes[20..26], &bytes[26..28], &bytes[28..]].map(Stored::Bf16).into();
        let pieces = pieces(1000, parts, 4);
        // 10 values cut in 4, 4, 2; 3 and 1 together; 12 cut in 4, 4, 4.
        assert_eq!(pieces.iter().map(|piece| piece.n_values).collect::<Vec<_>>(), [4, 4, 2, 4, 4, 4, 4]);
        let mut next = 1;
        for piece in &pieces {
            let mut values = vec![bf16::NAN; piece.n_values];
            piece.write_to(&mut values);
            assert_eq!(piece.target, 1000 + 2 * (next - 1) as u64);
            let expected = (next..next + piece.n_values).map(|i| bf16::from_f32(i as f32));
            assert_eq!(values, expected.collect::<Vec<_>>());
            next += piece.n_values;
        }
        assert_eq!(next, 27);
    }
}
