//! What timing at start has found of our product for any number of rows: its fastest cut for a shape, and whether that beats
//! what else the shape could take. Every cut gives the same bits, so the batch-invariant mode is timed too. A row count that was
//! not timed takes what the next larger one found.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Mutex, MutexGuard},
};

use cudarc::driver::CudaView;
use half::bf16;

use crate::{
    KernelError, Kernels,
    gemm::{self, Depth, GemmPlan},
    launch::{GemmShape, OutputType},
    linear::Linear,
    timing::Contest,
};

pub(crate) type Key = (GemmShape, OutputType);

/// By columns, depth and output, then by rows.
type ByRows = HashMap<(usize, usize, OutputType), BTreeMap<usize, Found>>;

/// What was found, by shape and output.
#[derive(Debug, Default)]
pub(crate) struct Tuned(Mutex<ByRows>);

#[derive(Clone, Copy, Debug)]
struct Found {
    plan: GemmPlan,
    /// Against what else the shape could take, if there is a choice.
    is_faster: Option<bool>,
}

impl Tuned {
    /// The fastest cut, if it was looked for; it may be of the next larger row count.
    pub(crate) fn plan(&self, key: Key) -> Option<GemmPlan> {
        self.found(key).map(|found| found.plan)
    }

    /// Whether our product is the fastest way, if it was compared.
    pub(crate) fn is_faster(&self, key: Key) -> Option<bool> {
        self.found(key)?.is_faster
    }

    /// Whether these rows themselves were compared.
    pub(crate) fn was_compared(&self, (shape, output): Key) -> bool {
        let by_rows = self.by_rows();
        let found = by_rows.get(&(shape.n, shape.k, output)).and_then(|by_rows| by_rows.get(&shape.m));
        found.is_some_and(|found| found.is_faster.is_some())
    }

    /// Keeps what a comparison has found, of a shape whose cuts were timed.
    pub(crate) fn compared(&self, (shape, output): Key, is_faster: bool) {
        let mut by_rows = self.by_rows();
        let found = by_rows.get_mut(&(shape.n, shape.k, output)).and_then(|by_rows| by_rows.get_mut(&shape.m));
        if let Some(found) = found {
            found.is_faster = Some(is_faster);
        }
    }

    fn keep(&self, (shape, output): Key, plan: GemmPlan) {
        let found = Found { plan, is_faster: None };
        self.by_rows().entry((shape.n, shape.k, output)).or_default().insert(shape.m, found);
    }

    /// That of the next larger row count.
    fn found(&self, (shape, output): Key) -> Option<Found> {
        let by_rows = self.by_rows();
        by_rows.get(&(shape.n, shape.k, output))?.range(shape.m..).next().map(|(_, found)| *found)
    }

    fn by_rows(&self) -> MutexGuard<'_, ByRows> {
        self.0.lock().expect("no holder of this lock panics")
    }
}

impl Kernels {
    /// The cut of our product that timing has chosen for a shape, if it was the fastest way there or the only one.
    pub fn chosen(&self, shape: GemmShape, output: OutputType) -> Option<GemmPlan> {
        self.tuned.plan((shape, output)).filter(|_| self.tuned.is_faster((shape, output)) != Some(false))
    }

    /// Whether the loaded code has the product for any number of rows.
    pub(crate) fn has_gemm(&self) -> bool {
        self.properties().capability == (9, 0)
    }

    /// Times cuts of the product for `op` over its weights and `others` in turn, keeps the fastest; returns its microseconds.
    pub(crate) fn tune_gemm(
        &self,
        mut op: Linear<'_>,
        others: &[CudaView<'_, bf16>],
        depth: Depth,
    ) -> Result<f64, KernelError> {
        let key = (op.shape, op.y.output_type());
        let weights: Vec<_> = std::iter::once(op.w.slice(..)).chain(others.iter().map(|w| w.slice(..))).collect();
        self.fastest_cut((key, depth), weights.len(), |idx, plan| self.gemm_by_plan(op.with(&weights[idx]), plan))
    }

    /// Times the cuts for `key` over `n` launches of each, which `launch` starts by their index; keeps the fastest.
    pub(crate) fn fastest_cut(
        &self,
        ((shape, output), depth): (Key, Depth),
        n: usize,
        mut launch: impl FnMut(usize, &GemmPlan) -> Result<(), KernelError>,
    ) -> Result<f64, KernelError> {
        let plans = gemm::candidates(shape, output, depth, self.properties().n_multiprocessors)?;
        let contest = Contest { n_ways: plans.len(), n_launches: n };
        let winner = contest.run(self.device(), |way, idx| launch(idx, &plans[way]))?;
        self.tuned.keep((shape, output), plans[winner.way]);
        Ok(winner.us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: GemmShape = GemmShape { m: 32, n: 4096, k: 4096 };

    #[test]
    fn a_shape_is_neither_faster_nor_slower_until_it_was_compared() {
        let (key, tuned) = ((SHAPE, OutputType::Bf16), Tuned::default());
        let plan = GemmPlan::new(SHAPE, OutputType::Bf16, 132).unwrap();
        tuned.compared(key, true);
        assert_eq!((tuned.plan(key), tuned.is_faster(key)), (None, None));
        tuned.keep(key, plan);
        assert_eq!((tuned.plan(key), tuned.is_faster(key)), (Some(plan), None));
        tuned.compared(key, true);
        assert_eq!(tuned.is_faster(key), Some(true));
        assert_eq!(tuned.is_faster((SHAPE, OutputType::Activated)), None);
    }

    #[test]
    fn rows_that_were_not_timed_take_what_the_next_larger_count_found() {
        let tuned = Tuned::default();
        let plan = GemmPlan::new(SHAPE, OutputType::Bf16, 132).unwrap();
        tuned.keep((SHAPE, OutputType::Bf16), plan);
        tuned.compared((SHAPE, OutputType::Bf16), true);
        let of = |m| (GemmShape { m, ..SHAPE }, OutputType::Bf16);
        assert_eq!([24, 32, 33].map(|m| tuned.plan(of(m))), [Some(plan), Some(plan), None]);
        assert_eq!([24, 32].map(|m| tuned.is_faster(of(m))), [Some(true); 2]);
        assert_eq!([24, 32].map(|m| tuned.was_compared(of(m))), [false, true]);
    }
}
