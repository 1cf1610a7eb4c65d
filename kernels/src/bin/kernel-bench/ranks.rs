//! Sums over two and more GPUs, with the addition and the norm that stand behind them in a step: recorded on every rank, one behind the
//! other. Skipped where there is one GPU.

use anyhow::Result;
use cudarc::driver::sys;
use stoker_kernels::{
    CudaSlice, Device, KernelError, bf16,
    checks::Gpu,
    graph::Graph,
    launch::Push,
    quantise::QuantisedRows,
    ranks::{Exchange, ExchangeSize, Half, NormOf, SharesSum, Sum},
};

use crate::{
    cases::HIDDEN,
    figures::{Report, Work},
};

/// Sums of a graph: starting ranks one behind the other is little beside them.
const N_SUMS: usize = 200;
const REPLAYS: usize = 15;
const WARM: usize = 2;
const EPS: f32 = 1e-5;

pub(crate) fn run(report: &mut Report) -> Result<()> {
    let n_gpus = Device::count()?;
    if n_gpus < 2 {
        println!("skipped: kernel_reduce_norm: one GPU");
    }
    for n_ranks in [2, 4, 8].into_iter().filter(|n| *n <= n_gpus) {
        for (n_rows, push) in
            [1, 8, 32, 64, 128, 256, 1024, 8192].into_iter().flat_map(|n| [(n, Push::Words), (n, Push::Lines)])
        {
            let words = if push == Push::Words { "_words" } else { "" };
            let name = format!("kernel_reduce_norm_m{n_rows}_ranks{n_ranks}{words}");
            if report.wants(&name) && (push == Push::Lines || n_rows <= push.max_rows()) {
                let us = time(n_ranks, n_rows, push)?;
                // What a rank gets from the others at least.
                report.add(&name, "stoker", Work::Bytes((2 * n_rows * HIDDEN * (n_ranks - 1)) as f64), us);
            }
        }
        for (n_rows, quantises) in [128, 256, 512, 1024, 2048, 8192].into_iter().flat_map(|n| [(n, false), (n, true)]) {
            let e4m3 = if quantises { "_e4m3" } else { "" };
            let name = format!("kernel_reduce_shares{e4m3}_m{n_rows}_ranks{n_ranks}");
            if report.wants(&name) {
                let us = time_shares(n_ranks, n_rows, quantises)?;
                let value_bytes = if quantises { 3 } else { 4 };
                let bytes = value_bytes * n_rows * HIDDEN * (n_ranks - 1) / n_ranks;
                report.add(&name, "stoker", Work::Bytes(bytes as f64), us);
            }
        }
    }
    Ok(())
}

fn time(n_ranks: usize, n_rows: usize, push: Push) -> Result<Vec<f64>> {
    time_sums((n_ranks, n_rows, push), |gpu, exchange, half, rows| {
        let Rows { out, residual, weight, .. } = rows;
        let norm = NormOf { weight: weight.as_view(), eps: EPS };
        let sum = Sum::Normed { out: out.as_view_mut(), residual: residual.as_view_mut(), norm };
        gpu.kernels.reduce(exchange, half, n_rows, sum)
    })
}

fn time_shares(n_ranks: usize, n_rows: usize, quantises: bool) -> Result<Vec<f64>> {
    time_sums((n_ranks, n_rows, Push::Lines), |gpu, exchange, half, rows| {
        let Rows { residual, weight, .. } = rows;
        let norm = NormOf { weight: weight.as_view(), eps: EPS };
        let sum = SharesSum { residual: residual.as_view_mut(), norm, quantises, copies_residual: false };
        gpu.kernels.reduce_shares(exchange, half, n_rows, sum)
    })
}

/// What a rank sums into.
struct Rows {
    out: CudaSlice<bf16>,
    residual: CudaSlice<bf16>,
    weight: CudaSlice<bf16>,
}

fn time_sums(
    (n_ranks, n_rows, push): (usize, usize, Push),
    add: impl Fn(&Gpu, &mut Exchange, Half, &mut Rows) -> Result<(), KernelError>,
) -> Result<Vec<f64>> {
    let (devices, _) = Device::open_group(&(0..n_ranks).collect::<Vec<_>>())?;
    let mut gpus = devices.iter().map(Gpu::new).collect::<Result<Vec<_>, _>>()?;
    let size = ExchangeSize { n_ranks, push, max_rows: n_rows, width: HIDDEN, max_logit_rows: 1, logit_share: 16 };
    let exchange = |(rank, device): (usize, &Device)| Exchange::new(device, size, rank);
    let mut exchanges = devices.iter().enumerate().map(exchange).collect::<Result<Vec<_>, _>>()?;
    let (mut rows, mut lent) = (Vec::new(), Vec::new());
    for (gpu, exchange) in gpus.iter_mut().zip(&mut exchanges) {
        let codes = QuantisedRows::zeros(gpu.kernels.device(), n_rows * HIDDEN, n_rows)?;
        let [out, residual] = [gpu.random(n_rows * HIDDEN)?, gpu.random(n_rows * HIDDEN)?];
        exchange.lend(&out, &codes);
        rows.push(Rows { out, residual, weight: gpu.random(HIDDEN)? });
        lent.push(codes);
    }
    devices.iter().try_for_each(Device::synchronize)?;
    Exchange::connect(&mut exchanges.iter_mut().collect::<Vec<_>>());
    let mut graphs = Vec::new();
    for ((gpu, exchange), rows) in gpus.iter().zip(&mut exchanges).zip(&mut rows) {
        let mut sums = || -> Result<(), KernelError> {
            (0..N_SUMS).try_for_each(|idx| add(gpu, exchange, [Half::Attention, Half::FeedForward][idx % 2], rows))
        };
        graphs.push(gpu.kernels.device().capture(&mut sums)?);
    }
    let mut samples = Vec::with_capacity(REPLAYS);
    for round in 0..WARM + REPLAYS {
        let ms = replay(&devices, &mut graphs)?;
        if round >= WARM {
            samples.push(f64::from(ms) * 1e3 / N_SUMS as f64);
        }
    }
    Ok(samples)
}

fn replay(devices: &[Device], graphs: &mut [Graph]) -> Result<f32> {
    let event = || devices[0].context().new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT));
    let (begin, end) = (event()?, event()?);
    // The first rank begins last: it waits for nobody who has not begun.
    graphs[1..].iter_mut().try_for_each(Graph::launch)?;
    begin.record(devices[0].stream())?;
    graphs[0].launch()?;
    end.record(devices[0].stream())?;
    devices.iter().try_for_each(Device::synchronize)?;
    Ok(begin.elapsed_ms(&end)?)
}
