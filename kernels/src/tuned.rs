//! What timing at start has found of our product for any number of rows: its fastest cut for a shape, and whether that beats
//! what else the shape could take. Every cut gives the same bits, so the batch-invariant mode is timed too.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard},
};

use cudarc::driver::CudaView;
use half::bf16;

use crate::{
    KernelError, Kernels,
    gemm::{self, GemmPlan},
    launch::{GemmShape, OutputType},
    linear::Linear,
    timing::fastest_us,
};

type Key = (GemmShape, OutputType);

/// By shape and output.
#[derive(Debug, Default)]
pub(crate) struct Tuned(Mutex<HashMap<Key, Found>>);

#[derive(Clone, Copy, Debug)]
struct Found {
    plan: GemmPlan,
    /// Against what else the shape could take, if there is a choice.
    is_faster: Option<bool>,
}

impl Tuned {
    /// The fastest cut, if it was looked for.
    pub(crate) fn plan(&self, key: Key) -> Option<GemmPlan> {
        self.found().get(&key).map(|found| found.plan)
    }

    /// Whether our product is the fastest way, if it was compared.
    pub(crate) fn is_faster(&self, key: Key) -> Option<bool> {
        self.found().get(&key)?.is_faster
    }

    /// Keeps what a comparison has found, of a shape whose cuts were timed.
    pub(crate) fn compared(&self, key: Key, is_faster: bool) {
        if let Some(found) = self.found().get_mut(&key) {
            found.is_faster = Some(is_faster);
        }
    }

    fn found(&self) -> MutexGuard<'_, HashMap<Key, Found>> {
        self.0.lock().expect("no holder of this lock panics")
    }
}

impl Kernels {
    /// Whether the loaded code has the product for any number of rows.
    pub(crate) fn has_gemm(&self) -> bool {
        self.properties().capability == (9, 0)
    }

    /// Times cuts of the product for `op` over its weights and `others` in turn, keeps the fastest; returns its microseconds.
    pub(crate) fn tune_gemm(&self, mut op: Linear<'_>, others: &[CudaView<'_, bf16>]) -> Result<f64, KernelError> {
        let key = (op.shape, op.y.output_type());
        let weights: Vec<_> = std::iter::once(op.w.slice(..)).chain(others.iter().map(|w| w.slice(..))).collect();
        let mut best = (f64::INFINITY, None);
        for plan in gemm::candidates(op.shape, key.1, self.properties().n_multiprocessors)? {
            let launch = |idx: usize| self.invariant_gemm_by(op.with(&weights[idx]), &plan);
            let us = fastest_us(self.device(), weights.len(), launch)?;
            if us < best.0 {
                best = (us, Some(plan));
            }
        }
        if let (_, Some(plan)) = best {
            self.tuned.found().insert(key, Found { plan, is_faster: None });
        }
        Ok(best.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_is_neither_faster_nor_slower_until_it_was_compared() {
        let shape = GemmShape { m: 32, n: 4096, k: 4096 };
        let (key, tuned) = ((shape, OutputType::Bf16), Tuned::default());
        let plan = GemmPlan::new(shape, OutputType::Bf16, 132).unwrap();
        tuned.compared(key, true);
        assert_eq!((tuned.plan(key), tuned.is_faster(key)), (None, None));
        tuned.found().insert(key, Found { plan, is_faster: None });
        assert_eq!((tuned.plan(key), tuned.is_faster(key)), (Some(plan), None));
        tuned.compared(key, true);
        assert_eq!(tuned.is_faster(key), Some(true));
        assert_eq!(tuned.is_faster((shape, OutputType::Activated)), None);
    }
}
