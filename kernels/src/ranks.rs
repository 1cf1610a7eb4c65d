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
    quantise::{QuantisedMut, QuantisedRows},
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
    lent: Lent,
    peers: Peers,
}

/// Where the norms of all rows go on this rank, by address; 0 where nothing was lent.
#[derive(Clone, Copy, Debug, Default)]
struct Lent {
    normed: u64,
    codes: u64,
    scales: u64,
}

/// The memory of all ranks.
#[derive(Clone, Copy, Debug, Default)]
struct Peers {
    partials: [Addresses; 2],
    normed: Addresses,
    codes: Addresses,
    scales: Addresses,
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
            lent: Lent::default(),
            peers: Peers::default(),
            size,
            rank,
        })
    }

    /// Lets the other ranks write norms of rows that ranks share out: `normed`, or `quantised` where a product of e4m3 is next. Before it
    /// is connected; both must stay where they are, and outlive every launch of each.
    pub fn lend(&mut self, normed: &CudaSlice<bf16>, quantised: &QuantisedRows) {
        let [codes, scales] = [address(quantised.values()), address(quantised.scales())];
        self.lent = Lent { normed: address(normed), codes, scales };
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
            let Lent { normed, codes, scales } = rank.lent;
            (peers.normed[at], peers.codes[at], peers.scales[at]) = (normed, codes, scales);
        }
        group.iter_mut().for_each(|rank| rank.peers = peers);
    }

    /// Where this rank's rows for a sum go.
    pub fn partial_mut(&mut self, half: Half) -> &mut CudaSlice<bf16> {
        &mut self.partials[half as usize]
    }

    /// What this rank gave for a sum; the residual of all rows, where a sum over shares of them left its copy.
    pub fn partial(&self, half: Half) -> &CudaSlice<bf16> {
        &self.partials[half as usize]
    }

    /// This rank's rows of `n_rows` that ranks share out.
    fn share(&self, n_rows: usize) -> Range<usize> {
        let n_own = n_rows.div_ceil(self.size.n_ranks);
        let first = (self.rank * n_own).min(n_rows);
        first..(first + n_own).min(n_rows)
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

/// A sum of rows that ranks share out, with what stands behind it: `residual += sum; norm(residual)` goes to all ranks.
#[derive(Debug)]
pub struct SharesSum<'a> {
    /// Of all rows; those of this rank are updated, the others are nobody's here.
    pub residual: CudaViewMut<'a, bf16>,
    /// The norm's.
    pub norm: NormOf<'a>,
    /// The norm goes to what was lent for e4m3, not to what was lent for bf16.
    pub quantises: bool,
    /// The residual of all rows is wanted everywhere: a copy is left in the place of what was summed.
    pub copies_residual: bool,
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
        let size = exchange.size;
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
            self.meet(exchange)?;
        }
        let Exchange { rank, partials, counts, peers, .. } = exchange;
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

    /// Adds up what all ranks gave in `n_rows`, each rank its share of the rows; the same bits as [`reduce`](Self::reduce) gives. Ranks
    /// meet in front of it and behind it.
    pub fn reduce_shares(
        &self,
        exchange: &mut Exchange,
        half: Half,
        n_rows: usize,
        op: SharesSum<'_>,
    ) -> Result<(), KernelError> {
        const OP: &str = "reduce_shares";
        let SharesSum { mut residual, norm: NormOf { weight, eps }, quantises, copies_residual } = op;
        let (size, peers, own) = (exchange.size, exchange.peers, exchange.share(n_rows));
        let width = size.width;
        check_room(OP, "what ranks share", size.max_rows, n_rows)?;
        check_len(OP, "residual", residual.len(), n_rows * width)?;
        check_len(OP, "weight", weight.len(), width)?;
        let lent = if quantises { peers.codes } else { peers.normed };
        if lent[..size.n_ranks].contains(&0) {
            return Err(refused(OP, "nothing was lent for norms".to_owned()));
        }
        self.meet(exchange)?;
        if !own.is_empty() {
            // From this rank's first row on.
            let from = |addresses: Addresses, row_bytes: usize| addresses.map(|at| at + (own.start * row_bytes) as u64);
            let outs = match quantises {
                false => vec![from(peers.normed, 2 * width)],
                true => vec![from(peers.codes, width), from(peers.scales, size_of::<f32>())],
            };
            let rows = from(peers.partials[half as usize], 2 * width);
            let config = launch::reduce_shares(Rows { n_rows: own.len(), width }, quantises)?;
            let launch = outs.iter().fold(self.functions.launch(OP, config), |launch, out| launch.addresses(out));
            let launch = launch.write_at(&mut residual, own.start * width).int(usize::from(copies_residual));
            let launch = launch.read(&weight).float(eps).addresses(&rows).int(exchange.rank).int(size.n_ranks);
            launch.int(width / 8).start()?;
        }
        self.meet(exchange)
    }

    /// Waits until all ranks have come here, and what each had written is seen by all.
    fn meet(&self, exchange: &mut Exchange) -> Result<(), KernelError> {
        let Exchange { size, rank, counts, peers, .. } = exchange;
        let launch = self.functions.launch("meet_ranks", launch::meet_ranks()).addresses(&peers.flags);
        let launch = launch.write_at(&mut counts.as_view_mut(), size.first_count(Counted::Pulled));
        launch.int(*rank).int(size.n_ranks).int(size.max_rows).start()
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
