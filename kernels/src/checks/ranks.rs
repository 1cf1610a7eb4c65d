//! Comparisons of sums over ranks, on as many GPUs as there are: kernels that wait for each other need one each.

use super::{
    Gpu, Outcome, TWO_ROUNDINGS,
    fixture::{Poisoned, widened},
    relative_error,
};
use crate::{
    Device, KernelError, bf16,
    device::Link,
    launch::Push,
    quantise::{QuantiseRows, QuantisedRows},
    ranks::{Exchange, ExchangeSize, Half, NormOf, SampleShared, SharesSum, Sum},
    reference,
    sampling::{Sample, SampleRow, SampleScratch},
};

const EPS: f32 = 1e-5;
/// Sums of one case, one behind the other: more than there are inboxes.
const ROUNDS: usize = 5;

pub(super) fn run(first: &mut Gpu) -> Result<Vec<Outcome>, KernelError> {
    let n_gpus = Device::count()?;
    let mut outcomes = Vec::new();
    for n_ranks in [1, 2, 3, 4, 8].into_iter().filter(|n_ranks| *n_ranks <= n_gpus) {
        let mut group = Group::open(n_ranks, first.noise.bits())?;
        let pushes: &[Push] = if group.link == Link::NvLink { &[Push::Words, Push::Lines] } else { &[Push::Words] };
        let shapes =
            [(1, 8), (3, 320), (17, 4096), (32, 8192), (33, 4096), (100, 1024), (5, 16384), (257, 4096), (700, 2880)];
        for (&push, (n_rows, width)) in pushes.iter().flat_map(|push| shapes.map(|shape| (push, shape))) {
            outcomes.extend(group.sums(n_rows, width, push)?);
            outcomes.push(group.quantised(n_rows, width, push)?);
        }
        for (n_rows, width) in [(1, 8), (7, 320), (129, 4096), (300, 8192), (257, 16384)] {
            outcomes.push(group.shares(n_rows, width)?);
        }
        for (n_rows, vocab) in [(1, 16 * n_ranks), (3, 1003), (9, 128_256)] {
            outcomes.push(group.logits(n_rows, vocab)?);
            outcomes.push(group.draws(n_rows, vocab)?);
        }
    }
    Ok(outcomes)
}

struct Group {
    gpus: Vec<Gpu>,
    link: Link,
}

impl Group {
    fn open(n_ranks: usize, seed: u64) -> Result<Self, KernelError> {
        let (gpus, link) = Device::open_group(&(0..n_ranks).collect::<Vec<_>>())?;
        let mut gpus = gpus.iter().map(Gpu::new).collect::<Result<Vec<_>, _>>()?;
        gpus.iter_mut().for_each(|gpu| gpu.noise.0 ^= seed);
        Ok(Self { gpus, link })
    }

    fn exchanges(&self, size: ExchangeSize) -> Result<Vec<Exchange>, KernelError> {
        let ranks = self.gpus.iter().enumerate();
        let exchange = |(rank, gpu): (usize, &Gpu)| Exchange::new(gpu.kernels.device(), size, rank);
        let mut exchanges = ranks.map(exchange).collect::<Result<Vec<_>, _>>()?;
        self.connect(&mut exchanges)?;
        Ok(exchanges)
    }

    fn connect(&self, exchanges: &mut [Exchange]) -> Result<(), KernelError> {
        self.synchronize()?;
        Exchange::connect(&mut exchanges.iter_mut().collect::<Vec<_>>());
        Ok(())
    }

    fn size(&self, max_rows: usize, width: usize, push: Push) -> ExchangeSize {
        ExchangeSize { n_ranks: self.gpus.len(), push, max_rows, width, max_logit_rows: 1, logit_share: 16 }
    }

    fn synchronize(&self) -> Result<(), KernelError> {
        self.gpus.iter().try_for_each(|gpu| gpu.kernels.device().synchronize())
    }

    /// What every rank gives, on its way to be summed, and the sum.
    fn give(&mut self, exchanges: &mut [Exchange], half: Half, n_values: usize) -> Result<Vec<f32>, KernelError> {
        let mut sum = vec![0.0; n_values];
        for (gpu, exchange) in self.gpus.iter_mut().zip(exchanges) {
            let given: Vec<bf16> = gpu.noise.normals(n_values).into_iter().map(bf16::from_f32).collect();
            sum.iter_mut().zip(&given).for_each(|(sum, x)| *sum += x.to_f32());
            let mut target = exchange.partial_mut(half).slice_mut(..n_values);
            gpu.stream().memcpy_htod(&given, &mut target).map_err(KernelError::driver("copy to the device"))?;
        }
        self.synchronize()?;
        Ok(sum)
    }

    /// Sums, plain and with what stands behind them.
    fn sums(&mut self, n_rows: usize, width: usize, push: Push) -> Result<Vec<Outcome>, KernelError> {
        let n = n_rows * width;
        let mut exchanges = self.exchanges(self.size(n_rows.max(2), width, push))?;
        let residual = self.gpus[0].noise.normals(n);
        let weight = self.gpus[0].noise.normals(width);
        let upload =
            |values: &[f32]| self.gpus.iter().map(|gpu| gpu.upload_bf16(values)).collect::<Result<Vec<_>, _>>();
        let (mut residuals, weights) = (upload(&residual)?, upload(&weight)?);
        let (mut plain, mut carried) = (Vec::new(), residual);
        let (mut error, mut normed_error) = (0f64, 0f64);
        for round in 0..ROUNDS {
            let half = if round % 2 == 0 { Half::Attention } else { Half::FeedForward };
            let sum = self.give(&mut exchanges, half, n)?;
            let mut outs = self.poisoned(n)?;
            for ((gpu, exchange), out) in self.gpus.iter().zip(&mut exchanges).zip(&mut outs) {
                gpu.kernels.reduce(exchange, half, n_rows, Sum::Plain(out.view()))?;
            }
            error = error.max(self.worst(&outs, &sum)?);
            plain.push(sum);
            let half = if half == Half::Attention { Half::FeedForward } else { Half::Attention };
            let sum = self.give(&mut exchanges, half, n)?;
            carried = reference::add(&sum, &carried);
            let mut outs = self.poisoned(n)?;
            let ranks = self.gpus.iter().zip(&mut exchanges).zip(&mut outs).zip(&mut residuals).zip(&weights);
            for ((((gpu, exchange), out), residual), weight) in ranks {
                let norm = NormOf { weight: weight.as_view(), eps: EPS };
                let sum = Sum::Normed { out: out.view(), residual: residual.as_view_mut(), norm };
                gpu.kernels.reduce(exchange, half, n_rows, sum)?;
            }
            normed_error = normed_error.max(self.worst(&outs, &reference::rms_norm(&carried, &weight, EPS))?);
            for (gpu, residual) in self.gpus.iter().zip(&residuals) {
                let found = widened(&gpu.download(residual)?);
                if found != carried {
                    normed_error = f64::INFINITY;
                }
            }
        }
        let case = format!("{n_rows} x {width} of {} ranks, {push:?}", self.gpus.len());
        Ok(vec![
            Outcome { op: "reduce", case: case.clone(), error, limit: TWO_ROUNDINGS },
            Outcome { op: "reduce_norm", case, error: normed_error, limit: TWO_ROUNDINGS },
        ])
    }

    /// The norm that leaves quantised is the norm, quantised.
    fn quantised(&mut self, n_rows: usize, width: usize, push: Push) -> Result<Outcome, KernelError> {
        let n = n_rows * width;
        let mut exchanges = self.exchanges(self.size(n_rows.max(2), width, push))?;
        let (residual, weight) = (self.gpus[0].noise.normals(n), self.gpus[0].noise.normals(width));
        self.give(&mut exchanges, Half::Attention, n)?;
        // Nothing is allocated while a rank waits: memory that others see is made known to them when they are idle.
        let prepare = |gpu: &Gpu| -> Result<_, KernelError> {
            let normed = gpu.poisoned::<bf16>(n)?;
            let rows = QuantisedRows::zeros(gpu.kernels.device(), n, n_rows)?;
            Ok((normed, rows, [gpu.upload_bf16(&residual)?, gpu.upload_bf16(&residual)?], gpu.upload_bf16(&weight)?))
        };
        let mut ranks = self.gpus.iter().map(prepare).collect::<Result<Vec<_>, _>>()?;
        self.synchronize()?;
        for quantises in [false, true] {
            for ((gpu, exchange), rank) in self.gpus.iter().zip(&mut exchanges).zip(&mut ranks) {
                let (normed, rows, residuals, weight) = rank;
                let norm = NormOf { weight: weight.as_view(), eps: EPS };
                let residual = residuals[usize::from(quantises)].as_view_mut();
                let sum = match quantises {
                    false => Sum::Normed { out: normed.view(), residual, norm },
                    true => Sum::Quantised { out: rows.rows_mut(n_rows, width), residual, norm },
                };
                gpu.kernels.reduce(exchange, Half::Attention, n_rows, sum)?;
            }
            self.synchronize()?;
        }
        let mut error = 0.0;
        for (gpu, (normed, rows, ..)) in self.gpus.iter().zip(&mut ranks) {
            let mut apart = QuantisedRows::zeros(gpu.kernels.device(), n, n_rows)?;
            let x = normed.view();
            gpu.kernels.quantise_rows(QuantiseRows { out: apart.rows_mut(n_rows, width), x: x.as_view(), width })?;
            let is_same = gpu.download(rows.values())? == gpu.download(apart.values())?
                && gpu.download(rows.scales())? == gpu.download(apart.scales())?;
            if !is_same {
                error = f64::INFINITY;
            }
        }
        let case = format!("{n_rows} x {width} of {} ranks, {push:?}", self.gpus.len());
        Ok(Outcome { op: "reduce_norm_e4m3", case, error, limit: 0.0 })
    }

    /// The same bits as where each rank adds up all rows, on all ranks, and no row of another rank's residual touched.
    fn shares(&mut self, n_rows: usize, width: usize) -> Result<Outcome, KernelError> {
        let n = n_rows * width;
        let mut exchanges = self.exchanges(self.size(n_rows.max(2), width, Push::Words))?;
        let (residual, weight) = (self.gpus[0].noise.normals(n), self.gpus[0].noise.normals(width));
        let prepare = |gpu: &Gpu| -> Result<_, KernelError> {
            let rows = || QuantisedRows::zeros(gpu.kernels.device(), n, n_rows);
            let bf16s = [&vec![f32::NAN; n], &vec![f32::NAN; n], &residual, &residual].map(|x| gpu.upload_bf16(x));
            let [expected, normed, all, own] = bf16s;
            Ok(([expected?, normed?], [all?, own?], [rows()?, rows()?], gpu.upload_bf16(&weight)?))
        };
        let mut ranks = self.gpus.iter().map(prepare).collect::<Result<Vec<_>, _>>()?;
        for (exchange, ([_, normed], _, [_, codes], _)) in exchanges.iter_mut().zip(&ranks) {
            exchange.lend(normed, codes);
        }
        self.connect(&mut exchanges)?;
        let mut copied = Vec::new();
        for (half, quantises) in [(Half::FeedForward, false), (Half::Attention, true)] {
            self.give(&mut exchanges, half, n)?;
            for is_shared in [false, true] {
                for ((gpu, exchange), rank) in self.gpus.iter().zip(&mut exchanges).zip(&mut ranks) {
                    let ([expected, _], [all, own], [codes, _], weight) = rank;
                    let norm = NormOf { weight: weight.as_view(), eps: EPS };
                    if is_shared {
                        let (residual, copies_residual) = (own.as_view_mut(), !quantises);
                        let sum = SharesSum { residual, norm, quantises, copies_residual };
                        gpu.kernels.reduce_shares(exchange, half, n_rows, sum)?;
                        continue;
                    }
                    let residual = all.as_view_mut();
                    let sum = match quantises {
                        false => Sum::Normed { out: expected.as_view_mut(), residual, norm },
                        true => Sum::Quantised { out: codes.rows_mut(n_rows, width), residual, norm },
                    };
                    gpu.kernels.reduce(exchange, half, n_rows, sum)?;
                }
                self.synchronize()?;
            }
            if !quantises {
                copied = self.gpus[0].download(&ranks[0].1[0])?;
            }
        }
        let n_own = n_rows.div_ceil(self.gpus.len()) * width;
        let mut is_same = true;
        for (rank, (gpu, exchange)) in self.gpus.iter().zip(&exchanges).enumerate() {
            let ([expected, normed], [all, own], [codes, own_codes], _) = &ranks[rank];
            is_same &= gpu.download(expected)? == gpu.download(normed)?;
            is_same &= gpu.download(codes.values())? == gpu.download(own_codes.values())?;
            is_same &= gpu.download(codes.scales())? == gpu.download(own_codes.scales())?;
            let (all, own) = (gpu.download(all)?, gpu.download(own)?);
            let (first, end) = ((rank * n_own).min(n), ((rank + 1) * n_own).min(n));
            is_same &= own[first..end] == all[first..end];
            is_same &= widened(&own[..first]) == residual[..first] && widened(&own[end..]) == residual[end..];
            is_same &= gpu.download(exchange.partial(Half::FeedForward))?[..n] == copied;
        }
        let case = format!("{n_rows} x {width} of {} ranks", self.gpus.len());
        Ok(Outcome { op: "reduce_shares", case, error: if is_same { 0.0 } else { f64::INFINITY }, limit: 0.0 })
    }

    /// Shares of rows of logits, the last one smaller.
    fn logits(&mut self, n_rows: usize, vocab: usize) -> Result<Outcome, KernelError> {
        let n_ranks = self.gpus.len();
        let share = vocab.div_ceil(n_ranks).next_multiple_of(16);
        let size = ExchangeSize { max_logit_rows: n_rows + 1, logit_share: share, ..self.size(2, 8, Push::Words) };
        let mut exchanges = self.exchanges(size)?;
        let mut error = 0.0;
        for _ in 0..3 {
            let logits = self.gpus[0].noise.normals(n_rows * vocab);
            for (rank, (gpu, exchange)) in self.gpus.iter().zip(&mut exchanges).enumerate() {
                let (first, last) = ((rank * share).min(vocab), ((rank + 1) * share).min(vocab));
                let part: Vec<f32> = logits.chunks(vocab).flat_map(|row| row[first..last].to_vec()).collect();
                let mut target = exchange.logits_mut().slice_mut(..part.len());
                gpu.stream().memcpy_htod(&part, &mut target).map_err(KernelError::driver("copy to the device"))?;
            }
            self.synchronize()?;
            let mut outs = self.poisoned::<f32>(n_rows * vocab)?;
            for ((gpu, exchange), out) in self.gpus.iter().zip(&mut exchanges).zip(&mut outs) {
                gpu.kernels.gather_logits(exchange, n_rows, vocab, out.view())?;
            }
            for (gpu, out) in self.gpus.iter().zip(&outs) {
                if gpu.written(out)?.as_deref() != Some(&logits[..]) {
                    error = f64::INFINITY;
                }
            }
        }
        let case = format!("{n_rows} x {vocab} of {n_ranks} ranks");
        Ok(Outcome { op: "gather_logits", case, error, limit: 0.0 })
    }

    /// Draws by shares are the draws of one GPU that has all logits, greedy and with noise, ties and what is not a number included.
    fn draws(&mut self, n_rows: usize, vocab: usize) -> Result<Outcome, KernelError> {
        let n_ranks = self.gpus.len();
        let share = vocab.div_ceil(n_ranks).next_multiple_of(16);
        let size = ExchangeSize { max_logit_rows: n_rows + 1, logit_share: share, ..self.size(2, 8, Push::Words) };
        let mut exchanges = self.exchanges(size)?;
        let own = |rank: usize| (rank * share).min(vocab)..((rank + 1) * share).min(vocab);
        let mut error = 0.0;
        for round in 0..4u64 {
            let mut logits = self.gpus[0].noise.normals(n_rows * vocab);
            match round {
                // The best token twice, of different ranks' shares.
                1 => (logits[1], logits[vocab - 1]) = (50.0, 50.0),
                2 => logits[vocab - 1] = f32::NAN,
                _ => {}
            }
            let temperature = if round == 3 { 0.7 } else { 0.0 };
            let row = |position| SampleRow { seed: 11, position, temperature, ..SampleRow::GREEDY };
            let rows: Vec<SampleRow> = (0..n_rows as u64).map(row).collect();
            for (rank, (gpu, exchange)) in self.gpus.iter().zip(&mut exchanges).enumerate() {
                let part: Vec<f32> = logits.chunks(vocab).flat_map(|row| row[own(rank)].to_vec()).collect();
                let mut target = exchange.logits_mut().slice_mut(..part.len());
                gpu.stream().memcpy_htod(&part, &mut target).map_err(KernelError::driver("copy to the device"))?;
            }
            let prepare = |gpu: &Gpu| -> Result<_, KernelError> {
                Ok((gpu.upload(&rows)?, SampleScratch::new(gpu.kernels.device(), n_rows)?))
            };
            let mut inputs = self.gpus.iter().map(prepare).collect::<Result<Vec<_>, _>>()?;
            let mut outs = self.poisoned::<u32>(n_rows)?;
            let wanted = {
                let (gpu, (rows, scratch)) = (&self.gpus[0], &mut inputs[0]);
                let (logits, mut tokens) = (gpu.upload(&logits)?, gpu.poisoned::<u32>(n_rows)?);
                let (tokens_view, logits) = (tokens.view(), logits.as_view());
                gpu.kernels.sample(Sample { tokens: tokens_view, logits, rows: rows.as_view(), scratch, vocab })?;
                gpu.written(&tokens)?
            };
            for (rank, (gpu, exchange)) in self.gpus.iter().zip(&mut exchanges).enumerate() {
                let (rows, scratch) = &mut inputs[rank];
                let (tokens, rows, own) = (outs[rank].view(), rows.as_view(), own(rank));
                gpu.kernels.sample_shared(exchange, SampleShared { tokens, rows, own, scratch })?;
            }
            for (gpu, out) in self.gpus.iter().zip(&outs) {
                if wanted.is_none() || gpu.written(out)? != wanted {
                    error = f64::INFINITY;
                }
            }
        }
        let case = format!("{n_rows} x {vocab} of {n_ranks} ranks");
        Ok(Outcome { op: "sample_shared", case, error, limit: 0.0 })
    }

    fn poisoned<T>(&self, n: usize) -> Result<Vec<Poisoned<T>>, KernelError>
    where
        T: cudarc::driver::DeviceRepr + Clone + super::fixture::Poison,
    {
        let outs = self.gpus.iter().map(|gpu| gpu.poisoned(n)).collect::<Result<_, _>>()?;
        self.synchronize()?;
        Ok(outs)
    }

    /// The largest error of a rank; infinite where ranks have not the same bits.
    fn worst(&self, outs: &[Poisoned<bf16>], wanted: &[f32]) -> Result<f64, KernelError> {
        let held = |(gpu, out): (&Gpu, &Poisoned<bf16>)| gpu.written(out);
        let found = self.gpus.iter().zip(outs).map(held).collect::<Result<Vec<_>, _>>()?;
        let first = found.first().cloned().flatten();
        let are_alike = found.iter().all(|rank| rank.is_some() && *rank == first);
        Ok(match first.filter(|_| are_alike) {
            Some(first) => relative_error(&widened(&first), wanted),
            None => f64::INFINITY,
        })
    }
}
