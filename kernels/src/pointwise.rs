//! The operations between matrix products: embedding gather, norms, gated activation, rotary embedding with the KV write.
//! Checks buffers, launches; owns nothing.

use cudarc::driver::{CudaView, CudaViewMut};
use half::bf16;

use crate::{
    KernelError, Kernels, check_len, check_room,
    launch::{self, Heads, Residual, Rows},
};

/// `out[r] = table[tokens[r]]`: embeddings, or the rows of a batch whose logits are wanted (then `tokens` are row indices).
#[derive(Debug)]
pub struct Embed<'a> {
    /// `tokens.len()` rows of `width`.
    pub out: CudaViewMut<'a, bf16>,
    /// Vocabulary rows of `width`.
    pub table: CudaView<'a, bf16>,
    /// Tokens; one outside the vocabulary gives zeros.
    pub tokens: CudaView<'a, u32>,
    /// Values of a row.
    pub width: usize,
}

/// A step's tokens, from the host or from the step before.
#[derive(Debug)]
pub struct FeedTokens<'a> {
    /// One a row.
    pub out: CudaViewMut<'a, u32>,
    /// A token, or `-1 - i` for the token that the step before drew as its number `i`.
    pub sources: CudaView<'a, i32>,
    /// What the step before drew; every `i` must lie inside.
    pub sampled: CudaView<'a, u32>,
}

/// `out = rms_norm(x) * weight` by rows.
#[derive(Debug)]
pub struct RmsNorm<'a> {
    /// Rows of `weight.len()`.
    pub out: CudaViewMut<'a, bf16>,
    /// Rows of `weight.len()`.
    pub x: CudaView<'a, bf16>,
    /// One value a column.
    pub weight: CudaView<'a, bf16>,
    /// Added to the mean square.
    pub eps: f32,
}

/// `residual += x; out = rms_norm(residual) * weight` by rows.
#[derive(Debug)]
pub struct AddRmsNorm<'a> {
    /// Rows of `weight.len()`.
    pub out: CudaViewMut<'a, bf16>,
    /// Rows of `weight.len()`, updated.
    pub residual: CudaViewMut<'a, bf16>,
    /// Rows of `weight.len()`.
    pub x: CudaView<'a, bf16>,
    /// One value a column.
    pub weight: CudaView<'a, bf16>,
    /// Added to the mean square.
    pub eps: f32,
}

/// `out = silu(gate) * up`.
#[derive(Debug)]
pub struct SiluMul<'a> {
    /// Rows of `width`.
    pub out: CudaViewMut<'a, bf16>,
    /// Rows of `2 * width`: [`launch::GATE_UP_GROUP`] values of gate and as many of up in turn.
    pub gate_up: CudaView<'a, bf16>,
    /// Values of a row of `out`.
    pub width: usize,
}

/// RMSNorm of each query and key head before rotation, as Qwen3 has it.
#[derive(Debug)]
pub struct QkNorm<'a> {
    /// `heads.dim` values for query heads.
    pub q_weight: CudaView<'a, bf16>,
    /// `heads.dim` values for key heads.
    pub k_weight: CudaView<'a, bf16>,
    /// Added to the mean square.
    pub eps: f32,
}

/// Bias, qk-norm, rotary embedding of fused QKV rows in place, and the write of K and V into the cache.
#[derive(Debug)]
pub struct RopeKv<'a> {
    /// `positions.len()` rows of `heads.qkv_width()`; the query part is rotated in place.
    pub qkv: CudaViewMut<'a, bf16>,
    /// One layer's keys: blocks x KV heads x 16 x dim.
    pub k_cache: CudaViewMut<'a, bf16>,
    /// One layer's values, the same shape.
    pub v_cache: CudaViewMut<'a, bf16>,
    /// `heads.qkv_width()` values, if the model has them.
    pub bias: Option<CudaView<'a, bf16>>,
    /// If the model has it.
    pub norm: Option<QkNorm<'a>>,
    /// `angle_table`: positions x dim. Positions must lie inside; the engine bounds them by the context length.
    pub angles: CudaView<'a, f32>,
    /// Each row's position.
    pub positions: CudaView<'a, i32>,
    /// Each row's slot, block * 16 + offset, inside the caches; -1 writes nothing.
    pub slots: CudaView<'a, i32>,
    /// The rank's heads.
    pub heads: Heads,
}

impl Kernels {
    /// Gathers rows of the embedding table.
    pub fn embed(&self, mut op: Embed<'_>) -> Result<(), KernelError> {
        let rows = Rows { n_rows: op.tokens.len(), width: op.width };
        let config = launch::embed(rows)?;
        check_len("embed", "out", op.out.len(), rows.n_rows * rows.width)?;
        let vocab = op.table.len() / rows.width;
        check_len("embed", "table", op.table.len(), vocab * rows.width)?;
        let launch = self.functions.launch("embed", config);
        launch.write(&mut op.out).read(&op.table).read(&op.tokens).int(vocab).int(rows.width / 8).start()
    }

    /// Completes a step's tokens by those that the step before drew.
    pub fn feed_tokens(&self, mut op: FeedTokens<'_>) -> Result<(), KernelError> {
        let n_rows = op.sources.len();
        let config = launch::feed_tokens(n_rows)?;
        check_len("feed_tokens", "out", op.out.len(), n_rows)?;
        let launch = self.functions.launch("feed_tokens", config).write(&mut op.out).read(&op.sources);
        launch.read(&op.sampled).int(n_rows).start()
    }

    /// Normalises rows.
    pub fn rms_norm(&self, mut op: RmsNorm<'_>) -> Result<(), KernelError> {
        let rows = rows_of("rms_norm", op.x.len(), op.weight.len())?;
        let config = launch::rms_norm(rows, Residual::None)?;
        check_len("rms_norm", "out", op.out.len(), op.x.len())?;
        let launch = self.functions.launch("rms_norm", config).write(&mut op.out).read(&op.x).read(&op.weight);
        launch.int(rows.width / 8).float(op.eps).start()
    }

    /// Adds to the residual and normalises the sum.
    pub fn add_rms_norm(&self, mut op: AddRmsNorm<'_>) -> Result<(), KernelError> {
        let rows = rows_of("add_rms_norm", op.x.len(), op.weight.len())?;
        let config = launch::rms_norm(rows, Residual::Added)?;
        check_len("add_rms_norm", "out", op.out.len(), op.x.len())?;
        check_len("add_rms_norm", "residual", op.residual.len(), op.x.len())?;
        let launch = self.functions.launch("add_rms_norm", config).write(&mut op.out).write(&mut op.residual);
        launch.read(&op.x).read(&op.weight).int(rows.width / 8).float(op.eps).start()
    }

    /// Gated activation of the MLP.
    pub fn silu_mul(&self, mut op: SiluMul<'_>) -> Result<(), KernelError> {
        let rows = rows_of("silu_mul", op.out.len(), op.width)?;
        let config = launch::silu_mul(rows)?;
        check_len("silu_mul", "gate_up", op.gate_up.len(), 2 * op.out.len())?;
        let launch = self.functions.launch("silu_mul", config);
        launch.write(&mut op.out).read(&op.gate_up).int(rows.width / 8).start()
    }

    /// Finishes QKV rows and writes K and V into the cache.
    pub fn rope_kv(&self, mut op: RopeKv<'_>) -> Result<(), KernelError> {
        const OP: &str = "rope_kv";
        let heads = op.heads;
        let config = launch::rope_kv(op.positions.len(), heads)?;
        check_rope_kv(&op)?;
        let norm = op.norm.as_ref();
        let launch = self.functions.launch(OP, config).write(&mut op.qkv);
        let launch = launch.write(&mut op.k_cache).write(&mut op.v_cache).read_optional(op.bias.as_ref());
        let launch =
            launch.read_optional(norm.map(|norm| &norm.q_weight)).read_optional(norm.map(|norm| &norm.k_weight));
        let launch = launch.read(&op.angles).read(&op.positions).read(&op.slots);
        launch.int(heads.n_q).int(heads.n_kv).float(norm.map_or(0.0, |norm| norm.eps)).start()
    }
}

/// Cosines and sines of every position and frequency, `n_positions` x `2 * inv_freq.len()`, for [`RopeKv::angles`].
/// In f64: at position 100 000 an f32 product is off by a hundredth of a radian. `scale` is the attention factor of yarn.
pub fn angle_table(n_positions: usize, inv_freq: &[f64], scale: f64) -> Vec<f32> {
    let row = |position: usize| {
        let angles = inv_freq.iter().map(move |freq| position as f64 * freq);
        let cosines = angles.clone().map(move |angle| (angle.cos() * scale) as f32);
        cosines.chain(angles.map(move |angle| (angle.sin() * scale) as f32))
    };
    (0..n_positions).flat_map(row).collect()
}

fn rows_of(op: &'static str, len: usize, width: usize) -> Result<Rows, KernelError> {
    let n_rows = len.checked_div(width).unwrap_or(0);
    check_len(op, "a buffer of rows", len, n_rows * width)?;
    Ok(Rows { n_rows, width })
}

fn check_rope_kv(op: &RopeKv<'_>) -> Result<(), KernelError> {
    const OP: &str = "rope_kv";
    let (n_rows, heads) = (op.positions.len(), op.heads);
    check_len(OP, "qkv", op.qkv.len(), n_rows * heads.qkv_width())?;
    check_len(OP, "slots", op.slots.len(), n_rows)?;
    check_room(OP, "k_cache", op.k_cache.len(), heads.block_values())?;
    check_len(OP, "v_cache", op.v_cache.len(), op.k_cache.len())?;
    check_room(OP, "angles", op.angles.len(), heads.dim)?;
    if let Some(bias) = &op.bias {
        check_len(OP, "bias", bias.len(), heads.qkv_width())?;
    }
    if let Some(norm) = &op.norm {
        check_len(OP, "q_weight", norm.q_weight.len(), heads.dim)?;
        check_len(OP, "k_weight", norm.k_weight.len(), heads.dim)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn angles_are_cosines_then_sines_of_position_times_frequency() {
        let table = angle_table(3, &[1.0, 0.5], 1.0);
        assert_eq!(table.len(), 12);
        assert_eq!(table[..4], [1.0, 1.0, 0.0, 0.0]);
        assert_eq!(table[8..], [2f64.cos() as f32, 1f64.cos() as f32, 2f64.sin() as f32, 1f64.sin() as f32]);
    }
}
