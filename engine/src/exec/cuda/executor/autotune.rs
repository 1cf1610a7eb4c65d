//! Which kernel is the fastest for every GEMM of a model: each candidate in its place in a recorded step, since one by itself is
//! misjudged: what stands in front of it and behind overlaps with it. Layers' weights in turn are more than the L2 cache holds.
//! Only for an executor that serves nobody.

use stoker_kernels::{
    KernelError,
    choose::GemmDesc,
    graph::Graph,
    launch::Epilogue,
    table::{ChipTable, Entry},
    timing,
};

use super::{
    super::{
        batch::decode_shape,
        layout::{Sampled, buckets},
        program::{Gemm, Matrix, Op},
    },
    CudaRank, Decodes,
};
use crate::exec::ExecError;

/// Tokens of each sequence: attention is as short as it can be.
const CONTEXT: usize = 16;
/// Rounds that all candidates are timed for, and those that come near to the fastest.
const ROUNDS: [usize; 2] = [3, 15];
/// Times the fastest step, up to which a candidate is timed again; and how many are at most.
const NEAR: f64 = 1.01;
const FINALISTS_MAX: usize = 6;
/// Times the fastest step, up to which ways count as alike: noise that is left must not decide.
const ALIKE: f64 = 1.002;

/// One row takes what was measured by hand, up to eight lie in the same tiles.
const ROWS_MIN: usize = 8;

/// A candidate in a recorded step.
struct Way {
    entry: Entry,
    graph: Graph,
}

impl CudaRank {
    /// Measures every recorded step of [`ROWS_MIN`] sequences and more, where `wants` says so, as if nothing had been measured before. `said`
    /// hears a line for each GEMM.
    pub fn autotune(
        &mut self,
        wants: &dyn Fn(usize) -> bool,
        said: &mut dyn FnMut(&str),
    ) -> Result<ChipTable, ExecError> {
        self.forward.forget_measured();
        for m in buckets(self.limits.max_num_seqs).filter(|m| *m >= ROWS_MIN && wants(*m)) {
            let tuned = self.tune_rows(m, said);
            tuned.map_err(|error| self.failed(&decode_shape(m, &self.limits), &error))?;
        }
        Ok(self.forward.table().clone())
    }

    fn tune_rows(&mut self, m: usize, said: &mut dyn FnMut(&str)) -> Result<(), KernelError> {
        let gate_up = self.layer_gemms(m).into_iter().find(|gemm| gemm.matrix == Matrix::GateUp);
        let gated = GemmDesc { epilogue: Epilogue::Gated, ..gate_up.expect("every layer has gate and up").desc };
        let may_be_apart = self.forward.candidates(gated).contains(&Entry::Apart);
        if may_be_apart {
            // So that the GEMM that stands alone is measured too.
            self.forward.set_measured(gated, Entry::Apart);
        }
        for gemm in self.layer_gemms(m) {
            self.tune(gemm.desc, said)?;
        }
        if may_be_apart {
            self.tune(gated, said)?;
        }
        let head = self.head(m);
        self.tune(head, said)
    }

    fn tune(&mut self, desc: GemmDesc, said: &mut dyn FnMut(&str)) -> Result<(), KernelError> {
        let mut ways = Vec::new();
        for entry in self.forward.candidates(desc) {
            self.forward.set_measured(desc, entry);
            ways.push(Way { entry, graph: self.record_company(desc)? });
        }
        if ways.is_empty() {
            return Ok(());
        }
        let firsts = self.time(&mut ways, ROUNDS[0])?;
        let mut finalists = finalists(ways, &firsts);
        let us = self.time(&mut finalists, ROUNDS[1])?;
        let entries: Vec<Entry> = finalists.iter().map(|way| way.entry).collect();
        let winner = fastest(&entries, &us);
        self.forward.set_measured(desc, entries[winner]);
        let listed: Vec<_> = entries.iter().zip(&us).map(|(entry, us)| format!("{entry} {us:.1}")).collect();
        said(&format!("{:?} {:?}: {}; {}", desc.shape, desc.epilogue, entries[winner], listed.join(", ")));
        Ok(())
    }

    /// A step of the layers, or of what is behind them for logits.
    fn record_company(&mut self, desc: GemmDesc) -> Result<Graph, KernelError> {
        let m = desc.shape.m;
        let ops = match desc.epilogue {
            Epilogue::F32 => self.forward.programs().tail(m, Sampled::Every).to_vec(),
            _ => self.forward.programs().body(m).layers().to_vec(),
        };
        self.record_ops(Decodes { n: m, context: CONTEXT }, &ops)
    }

    fn time(&self, ways: &mut [Way], n_rounds: usize) -> Result<Vec<f64>, KernelError> {
        let mut graphs: Vec<&mut Graph> = ways.iter_mut().map(|way| &mut way.graph).collect();
        timing::in_turns(self.forward.device(), &mut graphs, n_rounds)
    }

    /// Those of a layer behind another one.
    fn layer_gemms(&self, m: usize) -> Vec<Gemm> {
        let body = self.forward.programs().body(m);
        body.layers().iter().filter_map(Op::gemm).filter(|gemm| gemm.layer == Some(1)).copied().collect()
    }

    fn head(&self, m: usize) -> GemmDesc {
        let tail = self.forward.programs().tail(m, Sampled::Every);
        tail.iter().filter_map(Op::gemm).next_back().expect("logits are multiplied").desc
    }
}

/// Those that come near to the fastest, in the order of preference.
fn finalists(ways: Vec<Way>, us: &[f64]) -> Vec<Way> {
    let mut sorted = us.to_vec();
    sorted.sort_by(f64::total_cmp);
    let most = sorted[sorted.len().min(FINALISTS_MAX) - 1].min(NEAR * sorted[0]);
    ways.into_iter().zip(us).filter(|(_, us)| **us <= most).map(|(way, _)| way).collect()
}

/// The fastest of ours if it is as fast as any, else the library's best guess that is.
fn fastest(entries: &[Entry], us: &[f64]) -> usize {
    let least = us.iter().copied().fold(f64::INFINITY, f64::min);
    let alike = (0..us.len()).filter(|idx| us[*idx] <= ALIKE * least);
    let (theirs, ours): (Vec<usize>, Vec<usize>) = alike.partition(|idx| matches!(entries[*idx], Entry::CublasLt(_)));
    let best = ours.into_iter().min_by(|a, b| us[*a].total_cmp(&us[*b]));
    best.unwrap_or_else(|| theirs[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_own_kernel_or_the_librarys_best_guess_is_taken_where_it_is_as_fast() {
        let entries = [Entry::Tile("1x64/32".parse().unwrap()), Entry::CublasLt(0), Entry::CublasLt(1)];
        assert_eq!(fastest(&entries, &[500.9, 500.5, 500.0]), 0);
        assert_eq!(fastest(&entries, &[502.0, 500.9, 500.0]), 1);
        assert_eq!(fastest(&entries, &[502.0, 502.0, 500.0]), 2);
    }
}
