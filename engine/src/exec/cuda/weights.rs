//! Weights on the GPU, in bf16 or quantised, as the kernels want them: Q, K and V are one matrix, gate and up are one matrix, some rows
//! of each in turn. Which they are the model's description says; from a checkpoint, or random numbers from a seed for
//! benchmarks.

use std::{convert::Infallible, ops::Range};

use stoker_kernels::{
    CudaSlice, KernelError, Kernels, bf16,
    choose::WeightFormat,
    launch::GATE_UP_GROUP,
    linear::Operand,
    noise::{self, Noise},
    quantise::{QuantiseRows, QuantisedRows},
    upload::{Stored, Upload, upload},
};

use super::shape::ModelShape;
use crate::model::{
    BoundWeights, ModelSpec, StoredWeight,
    spec::{AttentionLayer, FeedForwardLayer, LayerSpec, LinearSpec, NormSpec, WeightRole, WeightSpec},
};

/// Deviation of random weights: with it, logits of the common shapes are of a trained model's size.
const RANDOM_SCALE: f32 = 0.02;

/// One decoder layer.
#[derive(Debug)]
pub(super) struct Layer<T = CudaSlice<bf16>, P = Projection> {
    pub(super) before_attention: Option<T>,
    pub(super) qkv: P,
    pub(super) qkv_bias: Option<T>,
    /// Weights for queries, and for keys.
    pub(super) qk_norm: Option<(T, T)>,
    pub(super) o: P,
    pub(super) o_bias: Option<T>,
    pub(super) after_attention: Option<T>,
    pub(super) before_feed_forward: Option<T>,
    /// [`GATE_UP_GROUP`] rows of each in turn.
    pub(super) gate_up: P,
    /// The same of biases.
    pub(super) gate_up_bias: Option<T>,
    pub(super) down: P,
    pub(super) down_bias: Option<T>,
    pub(super) after_feed_forward: Option<T>,
}

/// What a layer multiplies with.
#[derive(Debug)]
pub(super) enum Projection {
    Bf16(CudaSlice<bf16>),
    E4m3(QuantisedRows),
}

/// All weights.
#[derive(Debug)]
pub(super) struct Weights<T = CudaSlice<bf16>, P = Projection> {
    pub(super) embed: T,
    pub(super) layers: Vec<Layer<T, P>>,
    pub(super) norm: T,
    /// `None`: the embedding table is the output matrix too.
    pub(super) lm_head: Option<T>,
}

impl Projection {
    /// Row by row, `width` values each.
    fn quantised(kernels: &Kernels, matrix: CudaSlice<bf16>, width: usize) -> Result<Self, KernelError> {
        let n_rows = matrix.len() / width;
        let mut rows = QuantisedRows::zeros(kernels.device(), matrix.len(), n_rows)?;
        kernels.quantise_rows(QuantiseRows { out: rows.rows_mut(n_rows, width), x: matrix.as_view(), width })?;
        Ok(Self::E4m3(rows))
    }

    /// To be multiplied with.
    pub(super) fn operand(&self) -> Operand<'_> {
        match self {
            Self::Bf16(matrix) => Operand::Bf16(matrix.as_view()),
            Self::E4m3(rows) => Operand::E4m3(rows.all()),
        }
    }
}

impl Weights<CudaSlice<bf16>, CudaSlice<bf16>> {
    /// As the shape says that projections lie there; what they were made of is freed matrix by matrix.
    fn stored_as(self, kernels: &Kernels, shape: &ModelShape) -> Result<Weights, KernelError> {
        let project = |matrix: CudaSlice<bf16>, width: usize| match shape.projections {
            WeightFormat::Bf16 => Ok(Projection::Bf16(matrix)),
            WeightFormat::E4m3 => Projection::quantised(kernels, matrix, width),
        };
        let layer = |layer: Layer<CudaSlice<bf16>, CudaSlice<bf16>>| {
            Ok(Layer {
                qkv: project(layer.qkv, shape.hidden)?,
                o: project(layer.o, shape.attended_width())?,
                gate_up: project(layer.gate_up, shape.hidden)?,
                down: project(layer.down, shape.inner)?,
                before_attention: layer.before_attention,
                qkv_bias: layer.qkv_bias,
                qk_norm: layer.qk_norm,
                o_bias: layer.o_bias,
                after_attention: layer.after_attention,
                before_feed_forward: layer.before_feed_forward,
                gate_up_bias: layer.gate_up_bias,
                down_bias: layer.down_bias,
                after_feed_forward: layer.after_feed_forward,
            })
        };
        let layers = self.layers.into_iter().map(layer).collect::<Result<_, KernelError>>()?;
        Ok(Weights { embed: self.embed, layers, norm: self.norm, lm_head: self.lm_head })
    }
}

/// One buffer on the GPU and the weights that it holds.
#[derive(Debug)]
struct Slot<'a> {
    order: Order,
    parts: Vec<&'a WeightSpec>,
}

/// How the rows of a slot's weights lie in it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Order {
    /// One weight behind the other.
    Behind,
    /// So many of each in turn.
    InTurn(usize),
}

impl Slot<'_> {
    fn len(&self) -> usize {
        self.parts.iter().map(|weight| weight.n_values() as usize).sum()
    }
}

/// What `buffer` gives for each slot of a model, asked in one order.
fn assemble<'a, T, E>(
    spec: &'a ModelSpec,
    mut buffer: impl FnMut(Slot<'a>) -> Result<T, E>,
) -> Result<Weights<T, T>, E> {
    Ok(Weights {
        embed: buffer(one(&spec.embedding.weight))?,
        layers: spec.layers.iter().map(|layer| assemble_layer(layer, &mut buffer)).collect::<Result<_, E>>()?,
        norm: buffer(one(&spec.norm.weight))?,
        lm_head: spec.head.weight.as_ref().map(|head| buffer(one(head))).transpose()?,
    })
}

fn assemble_layer<'a, T, E>(
    spec: &'a LayerSpec,
    buffer: &mut impl FnMut(Slot<'a>) -> Result<T, E>,
) -> Result<Layer<T, T>, E> {
    let AttentionLayer { before, q, k, v, qk_norm, o, after, .. } = &spec.attention;
    let FeedForwardLayer { before: before_feed, gate, up, down, after: after_feed, .. } = &spec.feed_forward;
    Ok(Layer {
        before_attention: maybe(norm(before), buffer)?,
        qkv: buffer(behind([q, k, v].map(|linear: &LinearSpec| &linear.weight)))?,
        qkv_bias: maybe(biases([q, k, v]).map(behind), buffer)?,
        qk_norm: match qk_norm {
            Some(norms) => Some((buffer(one(&norms.q.weight))?, buffer(one(&norms.k.weight))?)),
            None => None,
        },
        o: buffer(one(&o.weight))?,
        o_bias: maybe(biases([o]).map(behind), buffer)?,
        after_attention: maybe(norm(after), buffer)?,
        before_feed_forward: maybe(norm(before_feed), buffer)?,
        gate_up: buffer(in_turn([&gate.weight, &up.weight]))?,
        gate_up_bias: maybe(biases([gate, up]).map(in_turn), buffer)?,
        down: buffer(one(&down.weight))?,
        down_bias: maybe(biases([down]).map(behind), buffer)?,
        after_feed_forward: maybe(norm(after_feed), buffer)?,
    })
}

/// A buffer for what a model may not have.
fn maybe<'a, T, E>(slot: Option<Slot<'a>>, buffer: &mut impl FnMut(Slot<'a>) -> Result<T, E>) -> Result<Option<T>, E> {
    slot.map(buffer).transpose()
}

/// Of projections that all have one, or none.
fn biases<const N: usize>(linears: [&LinearSpec; N]) -> Option<Vec<&WeightSpec>> {
    linears.into_iter().map(|linear| linear.bias.as_ref()).collect()
}

fn in_turn<'a>(parts: impl Into<Vec<&'a WeightSpec>>) -> Slot<'a> {
    Slot { order: Order::InTurn(GATE_UP_GROUP), parts: parts.into() }
}

fn behind<'a>(parts: impl Into<Vec<&'a WeightSpec>>) -> Slot<'a> {
    Slot { order: Order::Behind, parts: parts.into() }
}

fn one(weight: &WeightSpec) -> Slot<'_> {
    behind([weight])
}

fn norm(norm: &Option<NormSpec>) -> Option<Slot<'_>> {
    norm.as_ref().map(|norm| one(&norm.weight))
}

/// Copies the weights of a model to the GPU as they lie in their files, and unpacks them there; `progress` hears the share
/// done.
pub(super) fn load(
    kernels: &Kernels,
    shape: &ModelShape,
    spec: &ModelSpec,
    weights: &BoundWeights,
    progress: &(dyn Fn(f32) + Sync),
) -> Result<Weights, KernelError> {
    let mut slots = Vec::new();
    let Ok(_) = assemble(spec, |slot| -> Result<(), Infallible> {
        slots.push(slot);
        Ok(())
    });
    let stored = |slot: &Slot<'_>| slot.parts.iter().map(|part| weights.get(part)).collect::<Vec<_>>();
    let stored: Vec<_> = slots.iter().map(stored).collect();
    let mut buffers =
        slots.iter().map(|slot| kernels.device().zeros(slot.len())).collect::<Result<Vec<_>, KernelError>>()?;
    let uploads = buffers.iter_mut().zip(slots.iter().zip(&stored));
    let uploads = uploads.map(|(target, (slot, parts))| Upload { target, parts: in_order(slot.order, parts) });
    upload(kernels, uploads.collect(), progress)?;
    let mut buffers = buffers.into_iter();
    let Ok(loaded) = assemble(spec, |_| Ok::<_, Infallible>(buffers.next().expect("there is a buffer for every slot")));
    loaded.stored_as(kernels, shape)
}

/// The bytes of a slot's weights in the order in which it holds them.
fn in_order(order: Order, parts: &[StoredWeight]) -> Vec<Stored<'_>> {
    match order {
        Order::Behind => parts.iter().flat_map(|weight| stored(weight, 0..weight.n_outputs())).collect(),
        Order::InTurn(n) => (0..parts[0].n_outputs())
            .step_by(n)
            .flat_map(|first| parts.iter().flat_map(move |weight| stored(weight, first..first + n)))
            .collect(),
    }
}

fn stored(weight: &StoredWeight, rows: Range<usize>) -> Vec<Stored<'_>> {
    let format = weight.format();
    weight.runs(rows).into_iter().map(|bytes| Stored { format, bytes }).collect()
}

/// Random matrices, norms of one.
pub(super) fn random(
    kernels: &Kernels,
    shape: &ModelShape,
    spec: &ModelSpec,
    seed: u64,
) -> Result<Weights, KernelError> {
    let device = kernels.device();
    let largest = spec.weights().map(|weight| weight.n_values() as usize).max().unwrap_or_default();
    let piece = noise::piece(device, &mut Noise(seed), largest, RANDOM_SCALE)?;
    let weights = assemble(spec, |slot| match slot.parts[0].role {
        WeightRole::Embedding | WeightRole::Projection => noise::repeated(device, &piece, slot.len()),
        WeightRole::Norm => device.holding(&vec![bf16::ONE; slot.len()]),
        WeightRole::Bias => device.zeros(slot.len()),
    })?;
    weights.stored_as(kernels, shape)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::WeightFormat as Stored;

    #[test]
    fn gate_and_up_lie_in_turn_and_others_behind_each_other() {
        let weight = |byte: u8| StoredWeight::in_memory(Stored::Bf16, [6, 2], vec![byte; 24]);
        let parts = [weight(1), weight(2)];
        let lies = |order| in_order(order, &parts).into_iter().map(|part| (part.bytes[0], part.bytes.len())).collect();
        let (in_turn, behind): (Vec<_>, Vec<_>) = (lies(Order::InTurn(2)), lies(Order::Behind));
        assert_eq!(in_turn, [(1, 8), (2, 8), (1, 8), (2, 8), (1, 8), (2, 8)]);
        assert_eq!(behind, [(1, 24), (2, 24)]);
    }
}
