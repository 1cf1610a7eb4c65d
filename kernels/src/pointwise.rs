//! The operations between matrix products: embedding gather, norms, gated activation, rotary embedding with the KV write.
//! Checks buffers, launches; owns nothing.

use cudarc::driver::{CudaView, CudaViewMut};
use half::bf16;

use crate::{
    KernelError, Kernels,
    cache::LayerCache,
    check_len, check_room,
    launch::{self, Heads, NormWeight, Residual, RotaryForm, Rows},
};

/// `out[r] = scale * table[tokens[r]]`: embeddings, or the rows of a batch whose logits are wanted (then `tokens` are row indices).
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
    /// Factor on what is gathered, if the family has one.
    pub scale: Option<f32>,
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

/// What families do with norms around the residual stream, each step where it is asked for, by rows of `width`:
/// `x = rms_norm(x) * after; x = residual += x; out = rms_norm(x) * weight`.
#[derive(Debug)]
pub struct NormChain<'a> {
    /// Rows; not changed.
    pub x: CudaView<'a, bf16>,
    /// Weight of a norm of `x` itself.
    pub after: Option<CudaView<'a, bf16>>,
    /// Rows that `x` is added to.
    pub residual: Option<CudaViewMut<'a, bf16>>,
    /// Rows for the norm of the result, and its weight.
    pub norm: Option<(CudaViewMut<'a, bf16>, CudaView<'a, bf16>)>,
    /// Values of a row.
    pub width: usize,
    /// How both weights are stored.
    pub weight: NormWeight,
    /// Added to the mean squares.
    pub eps: f32,
}

/// `x = rms_norm(x) * weight` in place, over the `weight.len()` values from `first` on of each row: queries or keys of a fused row.
#[derive(Debug)]
pub struct NormPart<'a> {
    /// Rows of `stride`.
    pub rows: CudaViewMut<'a, bf16>,
    /// Values from one row to the next.
    pub stride: usize,
    /// The first value that is normed, a multiple of 8.
    pub first: usize,
    /// One value a column.
    pub weight: CudaView<'a, bf16>,
    /// Added to the mean square.
    pub eps: f32,
}

/// `x += bias` by rows, in place.
#[derive(Debug)]
pub struct AddBias<'a> {
    /// Rows of `bias.len()`.
    pub x: CudaViewMut<'a, bf16>,
    /// One value a column.
    pub bias: CudaView<'a, bf16>,
}

/// `logits = cap * tanh(logits / cap)`, in place.
#[derive(Debug)]
pub struct Softcap<'a> {
    /// Any number of them.
    pub logits: CudaViewMut<'a, f32>,
    /// The bound.
    pub cap: f32,
}

/// `out = gelu(gate) * up`, by the tanh approximation.
#[derive(Debug)]
pub struct GeluMul<'a> {
    /// Rows of `width`.
    pub out: CudaViewMut<'a, bf16>,
    /// As in [`SiluMul`].
    pub gate_up: CudaView<'a, bf16>,
    /// Values of a row of `out`.
    pub width: usize,
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

/// RMSNorm of each query and key head before rotation, as Qwen3 and Gemma 3 have it.
#[derive(Debug)]
pub struct QkNorm<'a> {
    /// `heads.dim` values for query heads.
    pub q_weight: CudaView<'a, bf16>,
    /// `heads.dim` values for key heads.
    pub k_weight: CudaView<'a, bf16>,
    /// How both are stored.
    pub weight: NormWeight,
    /// Added to the mean square.
    pub eps: f32,
}

/// The angles that heads turn by.
#[derive(Debug)]
pub struct Rotary<'a> {
    /// `angle_table`: positions x `2 * n_pairs`. Positions must lie inside; the engine bounds them by the context length.
    pub angles: CudaView<'a, f32>,
    /// Pairs of a head that turn: its first `2 * n_pairs` numbers.
    pub n_pairs: usize,
}

/// Bias, qk-norm, rotary embedding of fused QKV rows in place, and the write of K and V into the cache.
#[derive(Debug)]
pub struct RopeKv<'a> {
    /// `positions.len()` rows of `heads.qkv_width()`; the query part is rotated in place. Before a cache of e4m3 it becomes f16 in the place
    /// of bf16: what codes are multiplied with.
    pub qkv: CudaViewMut<'a, bf16>,
    /// The layer's cache.
    pub cache: &'a mut LayerCache,
    /// `heads.qkv_width()` values, if the model has them.
    pub bias: Option<CudaView<'a, bf16>>,
    /// If the model has it.
    pub norm: Option<QkNorm<'a>>,
    /// Angles, if the layer turns its heads.
    pub rotary: Option<Rotary<'a>>,
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
        let launch = launch.write(&mut op.out).read(&op.table).read(&op.tokens).int(vocab).int(rows.width / 8);
        launch.float(op.scale.unwrap_or(1.0)).start()
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

    /// The same with GELU.
    pub fn gelu_mul(&self, mut op: GeluMul<'_>) -> Result<(), KernelError> {
        let rows = rows_of("gelu_mul", op.out.len(), op.width)?;
        let config = launch::gelu_mul(rows)?;
        check_len("gelu_mul", "gate_up", op.gate_up.len(), 2 * op.out.len())?;
        let launch = self.functions.launch("gelu_mul", config);
        launch.write(&mut op.out).read(&op.gate_up).int(rows.width / 8).start()
    }

    /// Norms, adds, norms, as asked.
    pub fn norm_chain(&self, op: NormChain<'_>) -> Result<(), KernelError> {
        const OP: &str = "norm_chain";
        let rows = rows_of(OP, op.x.len(), op.width)?;
        let config = launch::any_norm(rows)?;
        let NormChain { x, after, mut residual, norm, weight, eps, .. } = op;
        let (mut out, next) = norm.unzip();
        for weight in after.iter().chain(&next) {
            check_len(OP, "a weight", weight.len(), rows.width)?;
        }
        for written in out.iter().chain(&residual) {
            check_len(OP, "out or residual", written.len(), x.len())?;
        }
        let launch = self.functions.launch(OP, config).write_optional(out.as_mut()).write_optional(residual.as_mut());
        let launch = launch.read(&x).read_optional(after.as_ref()).read_optional(next.as_ref());
        let n_vecs = rows.width / 8;
        launch.int(n_vecs).int(n_vecs).int(n_vecs).float(eps).float(weight.offset()).start()
    }

    /// Norms a part of each row.
    pub fn norm_part(&self, mut op: NormPart<'_>) -> Result<(), KernelError> {
        const OP: &str = "norm_part";
        let Rows { n_rows, .. } = rows_of(OP, op.rows.len(), op.stride)?;
        let width = op.weight.len();
        let config = launch::any_norm(Rows { n_rows, width })?;
        check_room(OP, "a row", op.stride, op.first + width)?;
        if !op.first.is_multiple_of(8) || !op.stride.is_multiple_of(8) {
            let problem = format!("rows of {} that begin at {} are not multiples of 8", op.stride, op.first);
            return Err(launch::refused(OP, problem));
        }
        // The kernel reads a value before it writes it, and nobody else does either.
        let launch = self.functions.launch(OP, config).write_at(&mut op.rows, op.first).write_optional::<bf16>(None);
        let launch = launch.write_at(&mut op.rows, op.first).read_optional::<bf16>(None).read(&op.weight);
        let stride = op.stride / 8;
        let launch = launch.int(width / 8).int(stride).int(stride).float(op.eps);
        launch.float(NormWeight::Factor.offset()).start()
    }

    /// Adds a bias to rows.
    pub fn add_bias(&self, mut op: AddBias<'_>) -> Result<(), KernelError> {
        let rows = rows_of("add_bias", op.x.len(), op.bias.len())?;
        let launch = self.functions.launch("add_bias", launch::add_bias(rows)?);
        launch.write(&mut op.x).read(&op.bias).int(rows.width / 8).start()
    }

    /// Bounds logits.
    pub fn softcap(&self, mut op: Softcap<'_>) -> Result<(), KernelError> {
        let n = op.logits.len();
        let launch = self.functions.launch("softcap", launch::softcap(n)?);
        launch.write(&mut op.logits).int(n).float(op.cap).start()
    }

    /// Finishes QKV rows and writes K and V into the cache.
    pub fn rope_kv(&self, mut op: RopeKv<'_>) -> Result<(), KernelError> {
        const OP: &str = "rope_kv";
        let heads = op.heads;
        let (norm, rotary) = (op.norm.as_ref(), op.rotary.as_ref());
        let norm_weight = norm.map_or(NormWeight::Factor, |norm| norm.weight);
        let form = RotaryForm { heads, n_pairs: rotary.map_or(0, |rotary| rotary.n_pairs), norm_weight };
        let config = launch::rope_kv(op.positions.len(), form, op.cache.format())?;
        check_rope_kv(&op)?;
        let launch = self.functions.launch(OP, config).write(&mut op.qkv);
        let launch = op.cache.written_by(launch).read_optional(op.bias.as_ref());
        let launch =
            launch.read_optional(norm.map(|norm| &norm.q_weight)).read_optional(norm.map(|norm| &norm.k_weight));
        let launch = launch.read_optional(rotary.map(|rotary| &rotary.angles)).read(&op.positions).read(&op.slots);
        let launch = launch.int(heads.n_q).int(heads.n_kv).float(norm.map_or(0.0, |norm| norm.eps));
        launch.int(heads.dim).int(form.n_pairs).float(norm_weight.offset()).start()
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
    op.cache.check(OP, heads)?;
    if let Some(rotary) = &op.rotary {
        check_room(OP, "angles", rotary.angles.len(), 2 * rotary.n_pairs)?;
    }
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
