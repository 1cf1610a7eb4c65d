//! Weights on their way to the device: several threads copy bytes from mapped files into pinned memory, two buffers each,
//! and from there to the GPU on streams of their own. Formats other than bf16 are unpacked there, and codes of four bits put in the
//! order of the kernels: the host computes nothing and holds no more of a model than these buffers.

use std::{
    collections::VecDeque,
    fmt::Debug,
    ops::Range,
    sync::{Arc, Mutex},
    thread,
};

use cudarc::driver::{CudaEvent, CudaSlice, CudaStream, CudaViewMut, DevicePtr, DevicePtrMut, result};
use half::bf16;
use stoker_fit::format::WeightFormat;

use crate::{
    Device, KernelError, Kernels,
    code_words::{CodeWords, WORD_BYTES},
    int4::Int4Layout,
    launch,
    pinned::Pinned,
};

/// Bytes of one pinned buffer: enough that a copy's start costs nothing, few enough to begin early and to stay in the host's caches.
const PIECE_BYTES: usize = 2 << 20;
/// Beyond this many threads a GPU's link, or memory, sets the pace.
const THREADS_MAX: usize = 12;

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
pub enum Upload<'a> {
    /// Numbers, which become bf16.
    Numbers {
        /// Where to.
        target: CudaViewMut<'a, bf16>,
        /// One behind the other; together exactly as many values as the target has.
        parts: Vec<Stored<'a>>,
    },
    /// Words that the host makes where they are copied from.
    Words {
        /// Where to.
        target: CudaViewMut<'a, u32>,
        /// Those that are made together.
        unit_words: usize,
        /// What makes them.
        maker: &'a dyn MakeWords,
    },
    /// Codes of four bits.
    Codes {
        /// Where to: zeros, as many words as the layout has.
        target: CudaViewMut<'a, u32>,
        /// How they lie there.
        layout: Int4Layout,
        /// The matrices that share it.
        parts: Vec<PlacedCodes<'a>>,
    },
}

/// Makes words of a tensor, some units of it at a time.
pub trait MakeWords: Debug + Sync {
    /// Writes all words of these units.
    fn make(&self, units: Range<usize>, words: &mut [u32]);
}

/// A matrix of codes, and its rows among those of others.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlacedCodes<'a> {
    /// As it is stored.
    pub words: CodeWords<'a>,
    /// Where its outputs go.
    pub rows: RowPlaces,
}

/// Which rows the outputs of one of several matrices are: the first `turn` from `first` on, the next ones a period behind these.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RowPlaces {
    /// Of output 0.
    pub first: usize,
    /// Outputs that lie together.
    pub turn: usize,
    /// Rows from a turn to the next.
    pub period: usize,
}

impl RowPlaces {
    /// Which output a row is of, were there outputs without end.
    pub fn output_of(self, row: usize) -> Option<usize> {
        let at = row.checked_sub(self.first)?;
        let (turn, in_turn) = (at / self.period, at % self.period);
        (in_turn < self.turn).then_some(turn * self.turn + in_turn)
    }
}

/// What one copy takes.
#[derive(Debug)]
struct Piece<'a> {
    /// Device address of its first value, or of the matrix that its codes are of.
    target: u64,
    contents: Contents,
    /// One behind the other.
    sources: Vec<Source<'a>>,
    n_bytes: usize,
}

/// Where bytes come from.
#[derive(Clone, Debug)]
enum Source<'a> {
    Stored(&'a [u8]),
    Made { maker: &'a dyn MakeWords, units: Range<usize>, n_bytes: usize },
}

/// What the bytes of a piece are.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Contents {
    Numbers(WeightFormat),
    Words,
    Codes(CodeLines),
}

/// Some lines of a matrix of codes.
#[derive(Clone, Copy, Debug, PartialEq)]
struct CodeLines {
    shape: launch::CodeLines,
    /// Codes in front of the share's in a line's first word, or in the first line.
    n_skipped: usize,
    line_words: usize,
    rows: RowPlaces,
    /// Of the matrix that they go to.
    n_chunks: usize,
}

impl Source<'_> {
    fn n_bytes(&self) -> usize {
        match self {
            Self::Stored(bytes) => bytes.len(),
            Self::Made { n_bytes, .. } => *n_bytes,
        }
    }

    fn write(&self, out: &mut [u8]) {
        match self {
            Self::Stored(bytes) => out.copy_from_slice(bytes),
            Self::Made { maker, units, .. } => maker.make(units.clone(), bytemuck::cast_slice_mut(out)),
        }
    }
}

impl Contents {
    /// Whether they are on the device what they are here.
    fn stay(self) -> bool {
        matches!(self, Self::Numbers(WeightFormat::Bf16) | Self::Words)
    }
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
    match upload {
        Upload::Numbers { mut target, parts } => {
            let n_values: usize = parts.iter().map(Stored::n_values).sum();
            assert_eq!(target.len(), n_values, "a tensor's size was checked against its shape");
            pieces(target.device_ptr_mut(device.stream()).0, parts, PIECE_BYTES)
        }
        Upload::Words { mut target, unit_words, maker } => {
            let n_words = target.len();
            pieces_of_words(target.device_ptr_mut(device.stream()).0, n_words, unit_words, maker)
        }
        Upload::Codes { mut target, layout, parts } => {
            assert_eq!(target.len(), layout.n_code_words(), "the buffer was made by its layout");
            let n_outputs: usize = parts.iter().map(|part| part.words.shape[0]).sum();
            assert_eq!(n_outputs, layout.n, "parts fill the matrix");
            let target = target.device_ptr_mut(device.stream()).0;
            parts.iter().flat_map(|part| pieces_of_codes(target, part, layout, PIECE_BYTES)).collect()
        }
    }
}

/// Pieces of whole units, of `n_words` words from the device address `first` on.
fn pieces_of_words(first: u64, n_words: usize, unit_words: usize, maker: &dyn MakeWords) -> Vec<Piece<'_>> {
    let unit_bytes = unit_words * size_of::<u32>();
    assert!((1..=PIECE_BYTES).contains(&unit_bytes), "a unit of {unit_bytes} bytes is of no model's width");
    assert!(n_words.is_multiple_of(unit_words), "units fill their target");
    let (n_units, n_at_once) = (n_words / unit_words, PIECE_BYTES / unit_bytes);
    let piece = |begin: usize| {
        let units = begin..(begin + n_at_once).min(n_units);
        let n_bytes = units.len() * unit_bytes;
        let target = first + (begin * unit_bytes) as u64;
        Piece { target, contents: Contents::Words, sources: vec![Source::Made { maker, units, n_bytes }], n_bytes }
    };
    (0..n_units).step_by(n_at_once).map(piece).collect()
}

/// Pieces of whole lines, of at most `most` bytes, for the matrix at the device address `target`.
fn pieces_of_codes<'a>(target: u64, part: &PlacedCodes<'a>, layout: Int4Layout, most: usize) -> Vec<Piece<'a>> {
    let PlacedCodes { words, rows } = *part;
    let line_bytes = words.line_words * WORD_BYTES;
    assert!((1..=most).contains(&line_bytes), "a line of {line_bytes} bytes is of no model's width");
    let n_at_once = most / line_bytes;
    let piece = |first: usize| {
        let lines = first..(first + n_at_once).min(words.n_lines);
        let shape = launch::CodeLines { order: words.order, share: words.shape, first, n_lines: lines.len() };
        let CodeWords { n_skipped, line_words, .. } = words;
        let contents = CodeLines { shape, n_skipped, line_words, rows, n_chunks: layout.n_chunks() };
        let n_bytes = lines.len() * line_bytes;
        let sources = words.runs(lines).into_iter().map(Source::Stored).collect();
        Piece { target, contents: Contents::Codes(contents), sources, n_bytes }
    };
    (0..words.n_lines).step_by(n_at_once).map(piece).collect()
}

/// Pieces of at most `most` bytes from the device address `first` on, each of one format. Small parts share one: each copy
/// has a price.
fn pieces(first: u64, parts: Vec<Stored<'_>>, most: usize) -> Vec<Piece<'_>> {
    let mut pieces: Vec<Piece<'_>> = Vec::new();
    let mut target = first;
    for Stored { format, bytes } in parts {
        let most = most / format.block_bytes() * format.block_bytes();
        let contents = Contents::Numbers(format);
        for source in bytes.chunks(most) {
            match pieces.last_mut().filter(|piece| piece.contents == contents && piece.n_bytes + source.len() <= most) {
                Some(piece) => {
                    piece.sources.push(Source::Stored(source));
                    piece.n_bytes += source.len();
                }
                None => {
                    let sources = vec![Source::Stored(source)];
                    pieces.push(Piece { target, contents, sources, n_bytes: source.len() });
                }
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
    pinned: Pinned,
    /// What was pinned has left.
    copied: CudaEvent,
    /// On the device, for what is unpacked there; made when it is needed.
    packed: Option<CudaSlice<u8>>,
}

impl<'a> Lane<'a> {
    fn new(kernels: &'a Kernels) -> Result<Self, KernelError> {
        let context = kernels.device().context();
        let buffer = || -> Result<_, KernelError> {
            let copied = context.new_event(None).map_err(KernelError::driver("create an event"))?;
            Ok(Buffer { pinned: Pinned::new(context, PIECE_BYTES)?, copied, packed: None })
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
        let mut rest = &mut pinned.bytes_mut()[..piece.n_bytes];
        for source in &piece.sources {
            let (own, behind) = rest.split_at_mut(source.n_bytes());
            source.write(own);
            rest = behind;
        }
        let target = match piece.contents.stay() {
            true => piece.target,
            false => device_address(packed, stream)?,
        };
        let bytes = &pinned.bytes()[..piece.n_bytes];
        // SAFETY: `cut` keeps the piece inside its target, which `upload` borrows, and no other piece covers it; a buffer
        // for packed bytes holds a whole piece, and what was there was unpacked earlier on the same stream. The pinned
        // bytes stay until `copied` has happened.
        unsafe { result::memcpy_htod_async(target, bytes, stream.cu_stream()) }.map_err(&failed)?;
        copied.record(stream).map_err(&failed)?;
        match piece.contents {
            Contents::Numbers(WeightFormat::Bf16) | Contents::Words => Ok(()),
            Contents::Numbers(format) => {
                let n_values = format.values_in(piece.n_bytes);
                let config = launch::unpack_blocks(format, n_values)?;
                // The kernel writes as many values as the piece has, from its first on, and reads as many blocks as were copied.
                let launch = kernels.functions.launch("unpack_blocks", config).on(stream);
                launch.address(piece.target).address(target).int(n_values).start()
            }
            Contents::Codes(lines) => repack(kernels, stream, lines, [piece.target, target]),
        }
    }
}

/// Puts lines of words, which were copied to the second address, into the matrix at the first.
fn repack(kernels: &Kernels, stream: &CudaStream, lines: CodeLines, at: [u64; 2]) -> Result<(), KernelError> {
    let CodeLines { shape, n_skipped, line_words, rows, n_chunks } = lines;
    let [n_outputs, n_inputs] = shape.share;
    // The kernel reads as many lines as were copied and writes to rows and inputs of the share, which `cut` saw to be the matrix's.
    let launch = kernels.functions.launch("repack_int4", launch::repack_int4(shape, n_skipped)?).on(stream);
    let launch = launch.address(at[0]).address(at[1]).int(shape.first).int(shape.n_lines).int(line_words);
    let launch = launch.int(n_skipped).int(n_outputs).int(n_inputs);
    launch.int(rows.first).int(rows.turn).int(rows.period).int(n_chunks).start()
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
    use crate::{
        code_words::CodeOrder,
        int4::{GroupSize, ScaleFormat},
    };

    fn stored(format: WeightFormat, bytes: &[u8]) -> Stored<'_> {
        Stored { format, bytes }
    }

    fn written(piece: &Piece<'_>) -> Vec<u8> {
        let bytes = |source: &Source<'_>| {
            let mut words = vec![0u32; source.n_bytes().div_ceil(4)];
            let bytes: &mut [u8] = &mut bytemuck::cast_slice_mut(&mut words)[..source.n_bytes()];
            source.write(bytes);
            bytes.to_vec()
        };
        piece.sources.iter().flat_map(bytes).collect()
    }

    /// Each unit's words are its number.
    #[derive(Debug)]
    struct Numbered {
        unit_words: usize,
    }

    impl MakeWords for Numbered {
        fn make(&self, units: Range<usize>, words: &mut [u32]) {
            let numbers = units.flat_map(|unit| [unit as u32].repeat(self.unit_words));
            words.iter_mut().zip(numbers).for_each(|(word, number)| *word = number);
        }
    }

    #[test]
    fn words_are_made_in_whole_units_each_once() {
        let (unit_words, n_units) = (100 << 10, 12);
        let maker = Numbered { unit_words };
        let pieces = pieces_of_words(64, n_units * unit_words, unit_words, &maker);
        assert_eq!(pieces.iter().map(|piece| piece.n_bytes / (4 * unit_words)).collect::<Vec<_>>(), [5, 5, 2]);
        let bytes: Vec<u8> = pieces.iter().flat_map(written).collect();
        let expected = (0..n_units as u32).flat_map(|unit| unit.to_le_bytes().repeat(unit_words));
        assert!(bytes.into_iter().eq(expected));
        let targets = [0, 5, 10].map(|unit| 64 + 4 * (unit * unit_words) as u64);
        assert_eq!(pieces.iter().map(|piece| piece.target).collect::<Vec<_>>(), targets);
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
            assert_eq!(written(piece), bytes[next..next + piece.n_bytes]);
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
        let found: Vec<_> = pieces.iter().map(|piece| (piece.contents, piece.target, piece.n_bytes)).collect();
        let expected =
            [(WeightFormat::Q8_0, 0, 68), (WeightFormat::F16, 2 * 64, 10), (WeightFormat::Q8_0, 2 * (64 + 5), 34)];
        assert_eq!(found, expected.map(|(format, target, n_bytes)| (Contents::Numbers(format), target, n_bytes)));
    }

    #[test]
    fn pieces_of_codes_are_whole_lines_each_once() {
        let bytes: Vec<u8> = (0..96).collect();
        // Seven inputs, 11 outputs from the third on of the second word: two words of three a line.
        let words = CodeWords::of(CodeOrder::Awq, &bytes, [24, 8], [10..21, 0..7]);
        let part = PlacedCodes { words, rows: RowPlaces { first: 8, turn: 8, period: 16 } };
        let layout = Int4Layout { n: 22, k: 7, group: GroupSize::G128, scales: ScaleFormat::F16 };
        let pieces = pieces_of_codes(64, &part, layout, 30);
        let lines_of = |piece: &Piece<'_>| match piece.contents {
            Contents::Codes(lines) => (lines.shape.first, lines.shape.n_lines),
            Contents::Numbers(_) | Contents::Words => panic!("they are codes"),
        };
        assert_eq!(pieces.iter().map(lines_of).collect::<Vec<_>>(), [(0, 3), (3, 3), (6, 1)]);
        let sources: Vec<u8> = pieces.iter().flat_map(written).collect();
        assert_eq!(sources, (0..7).flat_map(|line| bytes[4 + 12 * line..][..8].to_vec()).collect::<Vec<_>>());
        assert!(pieces.iter().all(|piece| piece.target == 64 && piece.n_bytes <= 30));
    }
}
