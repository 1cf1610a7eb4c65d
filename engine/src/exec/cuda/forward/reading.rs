//! Rows of prompts that are read beside the draws of a step: what the last norm gives for them, or how likely the token behind each was.
//! Such a step is launched operation by operation, and the host waits for what was read: embeddings and scores of prompts are few beside
//! tokens, and need no memory of their own this way.
//!
//! ```text
//! body, all rows -> attention of the last layer, all rows -> the residual is kept where Q, K and V were
//!     -> for as many rows as may be drawn at once: gathered, the rest of the tail, read   (again and again)
//!     -> drawn rows: gathered, the rest of the tail, drawn
//! ```

use stoker_kernels::{
    CudaView, KernelError,
    pointwise::Embed,
    reads::{SCORE_WORDS, ScoreTokens, SumRows, TokenScore},
};

use super::{Forward, StepInputs};
use crate::exec::cuda::{
    layout::Sampled,
    program::{Adds, Between, Norm, Op},
    reads::{Read, RowReads},
};

impl Forward {
    /// Whether rows can be read: alone on its GPU, and with room for the residual.
    pub(in super::super) fn reads_rows(&self) -> bool {
        self.exchange.is_none() && self.shape.heads.qkv_width() >= self.shape.hidden
    }

    /// Launches a whole step, its plain draws included, and reads rows of it. Waits for these.
    pub(in super::super) fn launch_and_read(
        &mut self,
        step: StepInputs<'_>,
        wanted: &RowReads,
    ) -> Result<Read, KernelError> {
        let body = self.programs.body(step.shape.n_rows);
        self.run(step, &body.ops, step.shape.n_rows)?;
        self.attend(step, self.shape.n_layers() - 1)?;
        self.keep_residual(step.shape.n_rows)?;
        let n_at_once = self.rows.max_sampled;
        let mut read = Read { sums: self.sums_of(step, wanted)?, ..Read::default() };
        for (rows, tokens) in wanted.scored.chunks(n_at_once).zip(wanted.tokens.chunks(n_at_once)) {
            read.scores.extend(self.scores_of(step, rows, (tokens, wanted.n_top))?);
        }
        let drawn = step.shape.n_sampled;
        if drawn > 0 {
            self.gather_kept(step.packed.view(step.layout.listed), step.shape.n_rows)?;
            let tail = self.programs.tail(drawn, Sampled::Listed);
            self.run(step, of_gathered(&tail), drawn)?;
        }
        Ok(read)
    }

    /// Behind attention nobody reads Q, K and V any more, and the tail writes the residual.
    fn keep_residual(&mut self, n_rows: usize) -> Result<(), KernelError> {
        let Self { kernels, buffers: b, shape, .. } = self;
        let size = n_rows * shape.hidden;
        let (from, mut to) = (b.stream.residual.slice(..size), b.qkv.slice_mut(..size));
        let copied = kernels.device().stream().memcpy_dtod(&from, &mut to);
        copied.map_err(KernelError::driver("keep the residual of a step"))
    }

    /// These rows of what attention gave, and of the residual that was kept, come to the front.
    fn gather_kept(&mut self, rows: CudaView<'_, u32>, n_rows: usize) -> Result<(), KernelError> {
        let Self { kernels, buffers: b, shape, .. } = self;
        let m = rows.len();
        let tables =
            [(&mut b.gathered, &b.attended, shape.attended_width()), (&mut b.stream.residual, &b.qkv, shape.hidden)];
        for (out, table, width) in tables {
            kernels.embed(Embed {
                out: out.slice_mut(..m * width),
                table: table.slice(..n_rows * width),
                tokens: rows.slice(..),
                width,
                scale: None,
            })?;
        }
        Ok(())
    }

    /// Brings rows to the front and through the last layer; then what is behind it, up to the draw.
    fn pass(&mut self, step: StepInputs<'_>, rows: &[u32], ends: impl Fn(&Op) -> bool) -> Result<(), KernelError> {
        let on_device = self.device().holding(rows)?;
        self.gather_kept(on_device.as_view(), step.shape.n_rows)?;
        let tail = self.programs.tail(rows.len(), Sampled::Listed);
        let ops = of_gathered(&tail);
        let n_ops = ops.iter().position(ends).expect("a tail multiplies by the head and draws");
        self.run(step, &ops[..n_ops], rows.len())
    }

    /// The last norms of rows, added up for each who wants some.
    fn sums_of(&mut self, step: StepInputs<'_>, wanted: &RowReads) -> Result<Vec<f64>, KernelError> {
        if wanted.outputs.is_empty() {
            return Ok(Vec::new());
        }
        let width = self.shape.hidden;
        let mut sums = self.device().zeros::<f64>(wanted.output_ends.len() * width)?;
        for (idx, rows) in wanted.outputs.chunks(self.rows.max_sampled).enumerate() {
            self.pass(step, rows, |op| op.gemm().is_some_and(|gemm| gemm.layer.is_none()))?;
            // Some heads norm what they read themselves: the residual has all that there is to norm.
            let of_residual = Between { adds: Adds::Nothing, next: Some(Norm::Final), quantises: None };
            self.norm(of_residual, rows.len())?;
            let first = idx * self.rows.max_sampled;
            let segments = self.device().holding(&wanted.segments(first..first + rows.len()))?;
            self.kernels.sum_rows(SumRows {
                sums: sums.as_view_mut(),
                rows: self.buffers.stream.normed.slice(..rows.len() * width),
                segments: segments.as_view(),
                width,
            })?;
        }
        self.device().held(&sums.as_view())
    }

    /// How likely each token is after its row, and the likeliest.
    fn scores_of(
        &mut self,
        step: StepInputs<'_>,
        rows: &[u32],
        (tokens, n_top): (&[u32], usize),
    ) -> Result<Vec<TokenScore>, KernelError> {
        self.pass(step, rows, |op| matches!(op, Op::Draw))?;
        let (device, vocab) = (self.device(), self.shape.vocab);
        let tokens = device.holding(tokens)?;
        let mut words = device.zeros::<u32>(rows.len() * SCORE_WORDS)?;
        self.kernels.score_tokens(ScoreTokens {
            out: words.as_view_mut(),
            logits: self.buffers.logits.slice(..rows.len() * vocab),
            tokens: tokens.as_view(),
            vocab,
            n_top,
        })?;
        Ok(device.held(&words.as_view())?.chunks_exact(SCORE_WORDS).map(TokenScore::of).collect())
    }
}

/// What a tail does behind its gathered rows.
fn of_gathered(tail: &[Op]) -> &[Op] {
    let gathers = tail.iter().position(|op| *op == Op::KeepDrawn).expect("rows of this tail are listed");
    &tail[gathers + 1..]
}
