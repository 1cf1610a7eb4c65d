//! Weights on their way to the device: several threads copy bytes from mapped files into pinned memory, two buffers each,
//! and from there to the GPU on streams of their own. Formats other than bf16 are unpacked there: the host computes nothing
//! and holds no more of a model than these buffers.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
    thread,
};

use cudarc::driver::{CudaEvent, CudaSlice, CudaStream, CudaViewMut, DevicePtr, DevicePtrMut, PinnedHostSlice, result};
use half::bf16;

use crate::{Device, KernelError, Kernels, format::WeightFormat, launch};

/// Bytes of one pinned buffer: enough that a copy's start costs nothing, few enough to begin early and to weigh little.
const PIECE_BYTES: usize = 4 << 20;
/// Beyond this many threads the link, not the host, sets the pace.
const THREADS_MAX: usize = 8;

/// Whole blocks of numbers as a file holds them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stored<'a> {
    /// How.
    pub format: WeightFormat,
    /// One block behind the other.
    pub bytes: &'a [u8],
}

/// One tensor on the device, and what it is made of.
#[derive(Debug)]
pub struct Upload<'a> {
    /// Where to.
    pub target: CudaViewMut<'a, bf16>,
    /// One behind the other; together exactly as many values as the target has.
    pub parts: Vec<Stored<'a>>,
}

/// What one copy takes.
#[derive(Debug)]
struct Piece<'a> {
    /// Device address of its first value.
    target: u64,
    format: WeightFormat,
    /// One behind the other.
    sources: Vec<&'a [u8]>,
    n_bytes: usize,
}

impl Stored<'_> {
    /// Numbers in it.
    fn n_values(&self) -> usize {
        self.format.values_in(self.bytes.len())
    }
}

/// Makes all copies and waits for them; `progress` hears the share done.
pub fn upload(kernels: &Kernels, uploads: Vec<Upload<'_>>, progress: &(dyn Fn(f32) + Sync)) -> Result<(), KernelError> {
    let device = kernels.device();
    // The targets' memory is the device's stream's until what it did there is over.
    device.stream().synchronize().map_err(KernelError::driver("wait for the device"))?;
    let pieces: VecDeque<Piece<'_>> = uploads.into_iter().flat_map(|upload| cut(device, upload)).collect();
    let n_bytes: usize = pieces.iter().map(|piece| piece.n_bytes).sum();
    let n_threads = thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX).min(pieces.len().max(1));
    let queue = Mutex::new(Queue { pieces, n_taken: 0 });
    let work = || {
        let mut lane = Lane::new(kernels)?;
        while let Some((piece, n_taken)) = take(&queue) {
            lane.copy(&piece)?;
            progress(n_taken as f32 / n_bytes as f32);
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

/// The next piece, and the bytes taken so far with it.
fn take<'a>(queue: &Mutex<Queue<'a>>) -> Option<(Piece<'a>, usize)> {
    let mut queue = queue.lock().expect("no holder of this lock panics");
    let piece = queue.pieces.pop_front()?;
    queue.n_taken += piece.n_bytes;
    Some((piece, queue.n_taken))
}

/// The parts of a tensor in pieces that fit a pinned buffer. The upload's borrow of its target ends with the whole call.
fn cut<'a>(device: &Device, upload: Upload<'a>) -> Vec<Piece<'a>> {
    let Upload { mut target, parts } = upload;
    let n_values: usize = parts.iter().map(Stored::n_values).sum();
    assert_eq!(target.len(), n_values, "a tensor's size was checked against its shape");
    pieces(target.device_ptr_mut(device.stream()).0, parts, PIECE_BYTES)
}

/// Pieces of at most `most` bytes from the device address `first` on, each of one format. Small parts share one: each copy
/// has a price.
fn pieces(first: u64, parts: Vec<Stored<'_>>, most: usize) -> Vec<Piece<'_>> {
    let mut pieces: Vec<Piece<'_>> = Vec::new();
    let mut target = first;
    for Stored { format, bytes } in parts {
        let most = most / format.block_bytes() * format.block_bytes();
        for source in bytes.chunks(most) {
            match pieces.last_mut().filter(|piece| piece.format == format && piece.n_bytes + source.len() <= most) {
                Some(piece) => {
                    piece.sources.push(source);
                    piece.n_bytes += source.len();
                }
                None => pieces.push(Piece { target, format, sources: vec![source], n_bytes: source.len() }),
            }
            target += (format.values_in(source.len()) * size_of::<bf16>()) as u64;
        }
    }
    pieces
}

/// One thread's stream, and its buffers in turn.
#[derive(Debug)]
struct Lane<'a> {
    kernels: &'a Kernels,
    stream: Arc<CudaStream>,
    buffers: [Buffer; 2],
    next: usize,
}

#[derive(Debug)]
struct Buffer {
    pinned: PinnedHostSlice<u8>,
    /// What was pinned has left.
    copied: CudaEvent,
    /// On the device, for what is unpacked there; made when it is needed.
    packed: Option<CudaSlice<u8>>,
}

impl<'a> Lane<'a> {
    fn new(kernels: &'a Kernels) -> Result<Self, KernelError> {
        let failed = KernelError::driver("allocate pinned memory");
        let context = kernels.device().context();
        let buffer = || -> Result<_, KernelError> {
            // SAFETY: every byte is written before it is copied.
            let pinned = unsafe { context.alloc_pinned_with_flags::<u8>(PIECE_BYTES, 0) }.map_err(&failed)?;
            Ok(Buffer { pinned, copied: context.new_event(None).map_err(&failed)?, packed: None })
        };
        let stream = context.new_stream().map_err(KernelError::driver("create a stream"))?;
        Ok(Self { kernels, stream, buffers: [buffer()?, buffer()?], next: 0 })
    }

    fn copy(&mut self, piece: &Piece<'_>) -> Result<(), KernelError> {
        let failed = KernelError::driver("copy weights to the device");
        let Self { kernels, stream, buffers, next } = self;
        let Buffer { pinned, copied, packed } = &mut buffers[*next];
        *next = 1 - *next;
        copied.synchronize().map_err(&failed)?;
        let mut rest = &mut pinned.as_mut_slice().map_err(&failed)?[..piece.n_bytes];
        for source in &piece.sources {
            let (own, behind) = rest.split_at_mut(source.len());
            own.copy_from_slice(source);
            rest = behind;
        }
        let is_packed = piece.format != WeightFormat::Bf16;
        let target = match is_packed {
            true => device_address(packed, stream)?,
            false => piece.target,
        };
        let bytes = &pinned.as_slice().map_err(&failed)?[..piece.n_bytes];
        // SAFETY: `cut` keeps the piece inside its target, which `upload` borrows, and no other piece covers it; a buffer
        // for packed bytes holds a whole piece, and what was there was unpacked earlier on the same stream. The pinned
        // bytes stay until `copied` has happened.
        unsafe { result::memcpy_htod_async(target, bytes, stream.cu_stream()) }.map_err(&failed)?;
        copied.record(stream).map_err(&failed)?;
        if !is_packed {
            return Ok(());
        }
        let n_values = piece.format.values_in(piece.n_bytes);
        let config = launch::unpack_blocks(piece.format, n_values)?;
        // The kernel writes as many values as the piece has, from its first on, and reads as many blocks as were copied.
        let launch = kernels.functions.launch("unpack_blocks", config).on(stream);
        launch.address(piece.target).address(target).int(n_values).start()
    }
}

/// Room for the packed bytes of a piece.
fn device_address(packed: &mut Option<CudaSlice<u8>>, stream: &Arc<CudaStream>) -> Result<u64, KernelError> {
    if packed.is_none() {
        let failed = KernelError::driver("allocate device memory");
        // SAFETY: every byte is written before it is read.
        *packed = Some(unsafe { stream.alloc::<u8>(PIECE_BYTES) }.map_err(failed)?);
    }
    Ok(packed.as_ref().map_or(0, |packed| packed.device_ptr(stream).0))
}

impl Drop for Lane<'_> {
    fn drop(&mut self) {
        // The device must not read buffers that are gone. A failure means that it reads nothing any more.
        let _ = self.stream.synchronize();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(format: WeightFormat, bytes: &[u8]) -> Stored<'_> {
        Stored { format, bytes }
    }

    #[test]
    fn pieces_hold_every_block_once_in_order() {
        let bytes: Vec<u8> = (0..52).collect();
        let parts = [&bytes[..40], &bytes[40..46], &bytes[46..48], &bytes[48..]];
        let parts = parts.map(|bytes| stored(WeightFormat::Bf16, bytes)).into();
        let pieces = pieces(1000, parts, 9);
        // Blocks of 2 bytes, at most 4 of them: 20 cut in 4, 4, 4, 4, 4; then 3 and 1 together; then 2.
        assert_eq!(pieces.iter().map(|piece| piece.n_bytes).collect::<Vec<_>>(), [8, 8, 8, 8, 8, 8, 4]);
        let mut next = 0;
        for piece in &pieces {
            assert_eq!(piece.target, 1000 + next as u64);
            assert_eq!(piece.sources.concat(), bytes[next..next + piece.n_bytes]);
            next += piece.n_bytes;
        }
        assert_eq!(next, 52);
    }

    #[test]
    fn a_piece_has_one_format_and_its_values_follow_those_in_front() {
        let bytes = [0; 3 * 34];
        let parts = vec![
            stored(WeightFormat::Q8_0, &bytes[..68]),
            stored(WeightFormat::F16, &bytes[..10]),
            stored(WeightFormat::Q8_0, &bytes[..34]),
        ];
        let pieces = pieces(0, parts, 100);
        let found: Vec<_> = pieces.iter().map(|piece| (piece.format, piece.target, piece.n_bytes)).collect();
        let expected =
            [(WeightFormat::Q8_0, 0, 68), (WeightFormat::F16, 2 * 64, 10), (WeightFormat::Q8_0, 2 * (64 + 5), 34)];
        assert_eq!(found, expected);
    }
}
