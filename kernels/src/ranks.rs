//! What the GPUs of a tensor-parallel group share: memory that each of them reads and writes, and the sums of what they gave. Every
//! rank launches the same operations in the same order, or all of them wait until they are taken for lost (`csrc/reduce.cuh`).

use std::ops::Range;

use cudarc::driver::{CudaSlice, CudaView, CudaViewMut, DevicePtr};
use half::bf16;
use stoker_fit::gpu::Counted;
pub use stoker_fit::gpu::ExchangeSize;

use crate::{
    Device, KernelError, Kernels, check_len, check_room,
    launch::{self, Entry, LOGIT_CHUNKS, LaunchConfig, Reduced, Rows, Way, refused},
    quantise::QuantisedMut,
    sampling::{SampleRow, SampleScratch},
};

/// Ranks of a group at most; the same constant as in `csrc/reduce.cuh`.
pub const RANKS_MAX: usize = 8;

/// The same memory of each rank, by its address.
pub(crate) type Addresses = [u64; RANKS_MAX];

/// Which half of a layer gave what is summed. What one gave stays untouched until the sum of the other is over.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Half {
    /// Attention.
    Attention,
    /// The feed-forward.
    FeedForward,
}

/// A rank's part of the shared memory, and where the others' is.
#[derive(Debug)]
pub struct Exchange {
    size: ExchangeSize,
    rank: usize,
    /// What the rank gives, by half.
    partials: [CudaSlice<bf16>; 2],
    inbox: CudaSlice<u8>,
    /// Best tokens, four words each.
    bests: CudaSlice<u32>,
    flags: CudaSlice<u32>,
    logits: CudaSlice<f32>,
    logit_flags: CudaSlice<u32>,
    /// Sums and draws so far.
    counts: CudaSlice<u32>,
    peers: Peers,
}

/// The memory of all ranks.
#[derive(Clone, Copy, Debug, Default)]
struct Peers {
    partials: [Addresses; 2],
    inbox: Addresses,
    bests: Addresses,
    flags: Addresses,
    logits: Addresses,
    logit_flags: Addresses,
}

impl Exchange {
    /// Allocates a rank's part. Nothing is summed before it is [connected](Self::connect), also where it is the only one.
    pub fn new(device: &Device, size: ExchangeSize, rank: usize) -> Result<Self, KernelError> {
        let rows = || device.zeros(size.max_rows * size.width);
        Ok(Self {
            partials: [rows()?, rows()?],
            inbox: device.zeros(size.inbox_bytes())?,
            bests: device.zeros(4 * size.n_bests())?,
            flags: device.zeros(size.n_ranks * size.max_rows)?,
            logits: device.zeros(size.max_logit_rows * size.logit_share)?,
            logit_flags: device.zeros(size.n_ranks * size.max_logit_rows * LOGIT_CHUNKS)?,
            counts: device.zeros(size.n_counts())?,
            peers: Peers::default(),
            size,
            rank,
        })
    }

    /// Tells each rank of a group where the others' memory is. All of it must outlive every launch of each.
    pub fn connect(group: &mut [&mut Self]) {
        let mut peers = Peers::default();
        for rank in group.iter() {
            let at = rank.rank;
            peers.partials[0][at] = address(&rank.partials[0]);
            peers.partials[1][at] = address(&rank.partials[1]);
            peers.inbox[at] = address(&rank.inbox);
            peers.bests[at] = address(&rank.bests);
            peers.flags[at] = address(&rank.flags);
            peers.logits[at] = address(&rank.logits);
            peers.logit_flags[at] = address(&rank.logit_flags);
        }
        group.iter_mut().for_each(|rank| rank.peers = peers);
    }

    /// Where this rank's rows for a sum go.
    pub fn partial_mut(&mut self, half: Half) -> &mut CudaSlice<bf16> {
        &mut self.partials[half as usize]
    }

    /// Where this rank's logits go.
    pub fn logits_mut(&mut self) -> &mut CudaSlice<f32> {
        &mut self.logits
    }
}

fn address<T>(buffer: &CudaSlice<T>) -> u64 {
    buffer.device_ptr(buffer.stream()).0
}

/// Where a sum goes.
#[derive(Debug)]
pub enum Sum<'a> {
    /// Rows of bf16: `out = sum`.
    Plain(CudaViewMut<'a, bf16>),
    /// `residual += sum; out = rms_norm(residual) * weight`.
    Normed {
        /// Rows of bf16.
        out: CudaViewMut<'a, bf16>,
        /// Updated.
        residual: CudaViewMut<'a, bf16>,
        /// The norm's.
        norm: NormOf<'a>,
    },
    /// The same, and the norm leaves in e4m3.
    Quantised {
        /// Rows of e4m3.
        out: QuantisedMut<'a>,
        /// Updated.
        residual: CudaViewMut<'a, bf16>,
        /// The norm's.
        norm: NormOf<'a>,
    },
}

/// The draw of one token for each row without options, where ranks have shares of the vocabulary.
#[derive(Debug)]
pub struct SampleShared<'a> {
    /// One a row; those of other rows stay.
    pub tokens: CudaViewMut<'a, u32>,
    /// One a row.
    pub rows: CudaView<'a, SampleRow>,
    /// This rank's tokens.
    pub own: Range<usize>,
    /// Shared by all steps.
    pub scratch: &'a mut SampleScratch,
}

/// What a norm needs.
#[derive(Debug)]
pub struct NormOf<'a> {
    /// One value a column.
    pub weight: CudaView<'a, bf16>,
    /// Added to the mean square.
    pub eps: f32,
}

impl Kernels {
    /// Adds up what all ranks gave in `n_rows`, in the order of ranks.
    pub fn reduce(&self, exchange: &mut Exchange, half: Half, n_rows: usize, sum: Sum<'_>) -> Result<(), KernelError> {
        const OP: &str = "reduce";
        let Exchange { size, rank, partials, counts, peers, .. } = exchange;
        let rows = Rows { n_rows, width: size.width };
        let (n_values, way) = (n_rows * size.width, Way::of(n_rows, size.push));
        if n_rows > size.max_rows {
            return Err(refused(OP, format!("{n_rows} rows are more than {}", size.max_rows)));
        }
        let gives = match &sum {
            Sum::Plain(_) => Reduced::Sum,
            Sum::Normed { .. } => Reduced::Norm,
            Sum::Quantised { .. } => Reduced::QuantisedNorm,
        };
        if way == Way::PulledBehindMeeting {
            let launch = self.functions.launch("meet_ranks", launch::meet_ranks()).addresses(&peers.flags);
            let first = size.first_count(Counted::Pulled);
            let launch = launch.write_at(&mut counts.as_view_mut(), first).int(*rank).int(size.n_ranks);
            launch.int(size.max_rows).start()?;
        }
        let launch = self.functions.launch(OP, launch::reduce(rows, way, gives)?);
        let (launch, norm) = match sum {
            Sum::Plain(mut out) => {
                check_len(OP, "out", out.len(), n_values)?;
                (launch.write(&mut out), None)
            }
            Sum::Normed { mut out, mut residual, norm } => {
                check_len(OP, "out", out.len(), n_values)?;
                check_len(OP, "residual", residual.len(), n_values)?;
                (launch.write(&mut out).write(&mut residual), Some(norm))
            }
            Sum::Quantised { mut out, mut residual, norm } => {
                check_len(OP, "out", out.values.len(), n_values)?;
                check_len(OP, "scales", out.scales.len(), n_rows)?;
                check_len(OP, "residual", residual.len(), n_values)?;
                (launch.write(&mut out.values).write(&mut out.scales).write(&mut residual), Some(norm))
            }
        };
        let launch = match norm {
            Some(NormOf { weight, eps }) => {
                check_len(OP, "weight", weight.len(), size.width)?;
                launch.read(&weight).float(eps)
            }
            None => launch,
        };
        let at = half as usize;
        let (launch, counted, max_rows) = match way {
            Way::Pushed(push) => {
                let launch = launch.read(&partials[at].as_view()).addresses(&peers.inbox);
                (launch, Counted::Pushed, push.max_rows())
            }
            Way::Pulled | Way::PulledBehindMeeting => {
                let launch = launch.addresses(&peers.partials[at]).addresses(&peers.flags);
                (launch, Counted::Pulled, size.max_rows)
            }
        };
        let launch = launch.write_at(&mut counts.as_view_mut(), size.first_count(counted)).int(*rank).int(size.n_ranks);
        let launch = launch.int(max_rows).int(size.width / 8);
        match way {
            Way::Pushed(_) => launch.start(),
            Way::Pulled | Way::PulledBehindMeeting => launch.int(usize::from(way == Way::PulledBehindMeeting)).start(),
        }
    }

    /// Draws the tokens of rows without options: each rank from its share of the logits, and everywhere the best of all.
    pub fn sample_shared(&self, exchange: &mut Exchange, op: SampleShared<'_>) -> Result<(), KernelError> {
        const OP: &str = "sample_shared";
        let SampleShared { mut tokens, rows, own, scratch } = op;
        let Exchange { size, rank, logits, counts, peers, .. } = exchange;
        let shape = Rows { n_rows: tokens.len(), width: own.len() };
        check_len(OP, "rows", rows.len(), shape.n_rows)?;
        check_room(OP, "the scratch", scratch.tickets.len(), shape.n_rows)?;
        check_room(OP, "logits", logits.len(), shape.n_rows * shape.width)?;
        check_room(OP, "what ranks share", size.max_logit_rows, shape.n_rows)?;
        let config = LaunchConfig { entry: Entry::SampleShared, ..launch::sample(shape)? };
        let launch = self.functions.launch(OP, config).write(&mut tokens).read(&logits.as_view()).read(&rows);
        let launch = launch.write(&mut scratch.pieces.as_view_mut()).write(&mut scratch.tickets.as_view_mut());
        let launch = launch.int(own.len()).int(own.start).addresses(&peers.bests);
        let launch = launch.write_at(&mut counts.as_view_mut(), size.first_count(Counted::Draws)).int(*rank);
        launch.int(size.n_ranks).int(size.max_logit_rows).start()
    }

    /// Brings the logits of `n_rows` from all ranks together: `out` has rows of `vocab`.
    pub fn gather_logits(
        &self,
        exchange: &mut Exchange,
        n_rows: usize,
        vocab: usize,
        mut out: CudaViewMut<'_, f32>,
    ) -> Result<(), KernelError> {
        const OP: &str = "gather_logits";
        let Exchange { size, rank, counts, peers, .. } = exchange;
        check_len(OP, "out", out.len(), n_rows * vocab)?;
        if n_rows > size.max_logit_rows || vocab > size.logit_share * size.n_ranks {
            return Err(refused(OP, format!("{n_rows} rows of {vocab} are more than there is room for: {size:?}")));
        }
        let launch = self.functions.launch(OP, launch::gather_logits(n_rows)?).write(&mut out);
        let launch = launch.addresses(&peers.logits).addresses(&peers.logit_flags);
        let launch = launch.write_at(&mut counts.as_view_mut(), size.first_count(Counted::Logits));
        let launch = launch.int(*rank).int(size.n_ranks).int(size.max_logit_rows * LOGIT_CHUNKS);
        launch.int(vocab).int(size.logit_share).start()
    }
}
