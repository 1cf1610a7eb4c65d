//! Weights on the GPU, in bf16, as the kernels want them: Q, K and V are one matrix, gate and up are one matrix, some rows
//! of each in turn. From a checkpoint, or random numbers from a seed for benchmarks.

use safetensors::Dtype;
use stoker_kernels::{
    CudaSlice, Device, KernelError, bf16,
    launch::GATE_UP_GROUP,
    noise::{self, Noise},
    upload::{Stored, Upload, upload},
};

use super::{open::CudaError, shape::ModelShape};
use crate::model::{ModelError, Projections, Tensor, WeightStore};

/// Deviation of random weights: with it, logits of the common shapes are of a trained model's size.
const RANDOM_SCALE: f32 = 0.02;

/// One decoder layer.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) attention_norm: CudaSlice<bf16>,
    pub(super) qkv: CudaSlice<bf16>,
    pub(super) qkv_bias: Option<CudaSlice<bf16>>,
    /// Weights for heads of queries, and of keys.
    pub(super) qk_norm: Option<(CudaSlice<bf16>, CudaSlice<bf16>)>,
    pub(super) o: CudaSlice<bf16>,
    pub(super) mlp_norm: CudaSlice<bf16>,
    /// [`GATE_UP_GROUP`] rows of each in turn.
    pub(super) gate_up: CudaSlice<bf16>,
    pub(super) down: CudaSlice<bf16>,
}

/// All weights.
#[derive(Debug)]
pub(super) struct Weights {
    pub(super) embed: CudaSlice<bf16>,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: CudaSlice<bf16>,
    /// `None`: the embedding table is the output matrix too.
    pub(super) lm_head: Option<CudaSlice<bf16>>,
}

/// One buffer on the GPU and the tensors that it holds, one behind the other unless its kind says how.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Slot {
    kind: Kind,
    parts: Vec<(String, Vec<usize>)>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Matrix,
    /// Two halves of as many rows, some of each in turn.
    GateUp,
    Norm,
    Bias,
}

impl Slot {
    pub(super) fn len(&self) -> usize {
        self.parts.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum()
    }
}

/// All buffers, in the order in which `assemble` takes them.
pub(super) fn slots(shape: &ModelShape) -> Vec<Slot> {
    let ModelShape { hidden, vocab, .. } = *shape;
    let mut slots = vec![matrix(vec![("model.embed_tokens.weight".into(), vec![vocab, hidden])])];
    for layer in 0..shape.n_layers {
        slots.extend(layer_slots(shape, layer));
    }
    slots.push(norm("model.norm.weight".into(), hidden));
    if !shape.extras.tied_head {
        slots.push(matrix(vec![("lm_head.weight".into(), vec![vocab, hidden])]));
    }
    slots
}

fn layer_slots(shape: &ModelShape, layer: usize) -> Vec<Slot> {
    let ModelShape { hidden, inner, heads, extras, .. } = *shape;
    let (q_width, kv_width) = (shape.attended_width(), heads.n_kv * heads.dim);
    let name = |part: &str| format!("model.layers.{layer}.{part}");
    let weight = |part: &str, rows: usize| (name(&format!("{part}.weight")), vec![rows, hidden]);
    let bias = |part: &str, rows: usize| (name(&format!("{part}.bias")), vec![rows]);
    let separate = [("self_attn.q_proj", q_width), ("self_attn.k_proj", kv_width), ("self_attn.v_proj", kv_width)];
    let (qkv, gate_up) = match shape.projections {
        Projections::Separate => (
            separate.map(|(part, rows)| weight(part, rows)).to_vec(),
            ["mlp.gate_proj", "mlp.up_proj"].map(|part| weight(part, inner)).to_vec(),
        ),
        Projections::Fused => {
            (vec![weight("self_attn.qkv_proj", heads.qkv_width())], vec![weight("mlp.gate_up_proj", 2 * inner)])
        }
    };
    let mut slots = vec![norm(name("input_layernorm.weight"), hidden), matrix(qkv)];
    if extras.qkv_bias {
        slots.push(Slot { kind: Kind::Bias, parts: separate.map(|(part, rows)| bias(part, rows)).to_vec() });
    }
    if extras.qk_norm {
        slots.extend(["q_norm", "k_norm"].map(|part| norm(name(&format!("self_attn.{part}.weight")), heads.dim)));
    }
    slots.extend([
        matrix(vec![(name("self_attn.o_proj.weight"), vec![hidden, q_width])]),
        norm(name("post_attention_layernorm.weight"), hidden),
        Slot { kind: Kind::GateUp, parts: gate_up },
        matrix(vec![(name("mlp.down_proj.weight"), vec![hidden, inner])]),
    ]);
    slots
}

fn matrix(parts: Vec<(String, Vec<usize>)>) -> Slot {
    Slot { kind: Kind::Matrix, parts }
}

fn norm(name: String, width: usize) -> Slot {
    Slot { kind: Kind::Norm, parts: vec![(name, vec![width])] }
}

/// The tensors of a checkpoint, slot by slot, checked against the shape; what nobody took is refused.
pub(super) fn take(
    shape: &ModelShape,
    mut store: WeightStore,
    architecture: &str,
) -> Result<Vec<Vec<Tensor>>, ModelError> {
    let mut tensors = Vec::new();
    for slot in slots(shape) {
        let parts = slot.parts.iter().map(|(name, shape)| store.take(name, shape));
        tensors.push(parts.collect::<Result<_, _>>()?);
    }
    let is_tied = shape.extras.tied_head;
    store.ignore(|name| name.ends_with("rotary_emb.inv_freq") || (is_tied && name == "lm_head.weight"));
    store.finish(architecture)?;
    Ok(tensors)
}

/// Copies a checkpoint's tensors to the GPU; `progress` hears the share done.
pub(super) fn load(
    device: &Device,
    shape: &ModelShape,
    tensors: &[Vec<Tensor>],
    progress: &(dyn Fn(f32) + Sync),
) -> Result<Weights, CudaError> {
    let slots = slots(shape);
    let buffers: Result<Vec<_>, _> = slots.iter().map(|slot| device.zeros(slot.len())).collect();
    let mut buffers = buffers?;
    let uploads = buffers.iter_mut().zip(&slots).zip(tensors).map(|((target, slot), tensors)| {
        let parts = tensors.iter().map(stored).collect();
        let parts = if slot.kind == Kind::GateUp { in_turn(parts, GATE_UP_GROUP * shape.hidden) } else { parts };
        Upload { target, parts }
    });
    upload(device, uploads.collect(), progress)?;
    Ok(assemble(shape, buffers))
}

/// The first and the second half of all numbers, `n` of each in turn.
fn in_turn(parts: Vec<Stored<'_>>, n: usize) -> Vec<Stored<'_>> {
    let half = parts.iter().map(Stored::len).sum::<usize>() / 2;
    // One tensor of both, or one of each.
    let halves: Vec<Stored<'_>> = parts.into_iter().flat_map(|part| part.chunks(half)).collect();
    let [gate, up] = halves[..] else { panic!("a slot of gate and up has one tensor or two of equal size") };
    gate.chunks(n).into_iter().zip(up.chunks(n)).flat_map(|(gate, up)| [gate, up]).collect()
}

fn stored(tensor: &Tensor) -> Stored<'_> {
    match tensor.dtype {
        Dtype::BF16 => Stored::Bf16(tensor.bytes()),
        Dtype::F16 => Stored::F16(tensor.bytes()),
        Dtype::F32 => Stored::F32(tensor.bytes()),
        other => panic!("{other} was refused when the tensor was taken"),
    }
}

/// Random matrices, norms of one.
pub(super) fn random(device: &Device, shape: &ModelShape, seed: u64) -> Result<Weights, KernelError> {
    let largest = slots(shape).iter().map(Slot::len).max().unwrap_or_default();
    let piece = noise::piece(device, &mut Noise(seed), largest, RANDOM_SCALE)?;
    let buffer = |slot: Slot| match slot.kind {
        Kind::Matrix | Kind::GateUp => noise::repeated(device, &piece, slot.len()),
        Kind::Norm => device.holding(&vec![bf16::ONE; slot.len()]),
        Kind::Bias => device.zeros(slot.len()),
    };
    let buffers: Result<Vec<_>, _> = slots(shape).into_iter().map(buffer).collect();
    Ok(assemble(shape, buffers?))
}

fn assemble(shape: &ModelShape, buffers: Vec<CudaSlice<bf16>>) -> Weights {
    let mut buffers = buffers.into_iter();
    let mut next = || buffers.next().expect("there is a buffer for every slot");
    let embed = next();
    let layers = (0..shape.n_layers).map(|_| Layer {
        attention_norm: next(),
        qkv: next(),
        qkv_bias: shape.extras.qkv_bias.then(&mut next),
        qk_norm: shape.extras.qk_norm.then(|| (next(), next())),
        o: next(),
        mlp_norm: next(),
        gate_up: next(),
        down: next(),
    });
    let layers = layers.collect();
    Weights { embed, layers, norm: next(), lm_head: (!shape.extras.tied_head).then(next) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gate_and_up_lie_in_turn_whether_the_checkpoint_has_one_tensor_or_two() {
        let (gate, up) = ([1u8; 24], [2u8; 24]);
        let both = [gate, up].concat();
        let (gate, up) = (Stored::Bf16(&gate[..8]), Stored::Bf16(&up[..8]));
        let expected = [gate, up, gate, up, gate, up];
        assert_eq!(in_turn(vec![Stored::Bf16(&both[..24]), Stored::Bf16(&both[24..])], 4), expected);
        assert_eq!(in_turn(vec![Stored::Bf16(&both)], 4), expected);
    }
}
