//! Weights on the GPU, in bf16 or quantised, as the kernels want them: Q, K and V are one matrix, gate and up are one matrix, some rows
//! of each in turn. Which they are the model's description says; from a checkpoint, or random numbers from a seed for
//! benchmarks.

mod order;

use std::{convert::Infallible, ops::Range};

use stoker_fit::gpu::{BLOCK_OUTPUTS, LayerFormats, WeightFormat, block_scales};
use stoker_kernels::{
    CudaSlice, Device, KernelError, Kernels, bf16,
    choose::ScaledBy,
    int4::{GroupSize, Int4Layout, Int4Matrix, ScaleFormat},
    launch::GATE_UP_GROUP,
    linear::Operand,
    noise::{self, Noise},
    quantise::{QuantiseRows, QuantisedRows},
    upload::{MakeWords, PlacedCodes, RowPlaces, Upload, upload},
};

use self::order::{Order, dequantised, in_order, row_places, runs};
use super::shape::{LayerShape, ModelShape};
use crate::{
    each::each,
    model::{
        BoundWeights, Int4Groups, ModelSpec, QuantisedWeight, StoredMatrix,
        spec::{
            AttentionLayer, FeedForwardLayer, LayerSpec, LinearSpec, NormSpec, Rank, WeightRole, WeightSlice,
            WeightSpec,
        },
    },
};

/// Numbers in bf16 that lie on the device at a time to be quantised, 2 GiB: all of a model may be more than the GPU has, and each pause
/// between them costs a start some ms.
const STAGED_VALUES_MAX: usize = 1 << 30;

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
    /// With a scale a block.
    E4m3Blocks(QuantisedRows),
    Int4(Int4Matrix),
}

/// All weights, or those of a stage.
#[derive(Debug)]
pub(super) struct Weights<T = CudaSlice<bf16>, P = Projection> {
    /// `None`: a stage behind the first one, and not the last of a model whose head it is.
    pub(super) embed: Option<T>,
    pub(super) layers: Vec<Layer<T, P>>,
    /// `None`: a stage before the last one.
    pub(super) norm: Option<T>,
    /// `None`: the same, or the embedding table is the output matrix too.
    pub(super) lm_head: Option<T>,
}

impl Projection {
    /// Row by row, `width` values each.
    fn quantised(kernels: &Kernels, matrix: CudaSlice<bf16>, width: usize) -> Result<Self, KernelError> {
        let n_rows = matrix.len() / width;
        let mut rows = QuantisedRows::unset(kernels.device(), matrix.len(), n_rows)?;
        kernels.quantise_rows(QuantiseRows { out: rows.rows_mut(n_rows, width), x: matrix.as_view(), width })?;
        Ok(Self::E4m3(rows))
    }

    /// Numbers of its rows in e4m3, with any scales that make them about as large as the matrix: for measuring.
    fn in_random_blocks(
        kernels: &Kernels,
        noise: &mut Noise,
        matrix: CudaSlice<bf16>,
        width: usize,
    ) -> Result<Self, KernelError> {
        let (n_values, n_rows) = (matrix.len(), matrix.len() / width);
        let scale = |noise: f32| RANDOM_SCALE * (1.0 + 0.1 * noise) / 128.0;
        let scales: Vec<f32> = noise.normals(block_scales(n_rows, width)).into_iter().map(scale).collect();
        let mut rows = QuantisedRows::unset(kernels.device(), n_values, n_rows)?;
        kernels.quantise_rows(QuantiseRows { out: rows.rows_mut(n_rows, width), x: matrix.as_view(), width })?;
        Ok(Self::E4m3Blocks(rows.scaled_by(kernels.device(), &scales)?))
    }

    /// What only projections of layers are not.
    fn plain(self) -> CudaSlice<bf16> {
        match self {
            Self::Bf16(values) => values,
            Self::E4m3(_) | Self::E4m3Blocks(_) | Self::Int4(_) => {
                unreachable!("only projections of layers are kept quantised")
            }
        }
    }

    /// To be multiplied with.
    pub(super) fn operand(&self) -> Operand<'_> {
        match self {
            Self::Bf16(matrix) => Operand::Bf16(matrix.as_view()),
            Self::E4m3(rows) => Operand::E4m3(rows.all()),
            Self::E4m3Blocks(rows) => Operand::E4m3Blocks(rows.blocks()),
            Self::Int4(matrix) => Operand::Int4(matrix.view()),
        }
    }
}

impl Weights<Projection, Projection> {
    /// With what is no projection as the bf16 that it is.
    fn with_plain(self) -> Weights {
        let plain = |vector: Option<Projection>| vector.map(Projection::plain);
        let layer = |layer: Layer<Projection, Projection>| Layer {
            qkv: layer.qkv,
            o: layer.o,
            gate_up: layer.gate_up,
            down: layer.down,
            before_attention: plain(layer.before_attention),
            qkv_bias: plain(layer.qkv_bias),
            qk_norm: layer.qk_norm.map(|(q, k)| (q.plain(), k.plain())),
            o_bias: plain(layer.o_bias),
            after_attention: plain(layer.after_attention),
            before_feed_forward: plain(layer.before_feed_forward),
            gate_up_bias: plain(layer.gate_up_bias),
            down_bias: plain(layer.down_bias),
            after_feed_forward: plain(layer.after_feed_forward),
        };
        let layers = self.layers.into_iter().map(layer).collect();
        Weights { embed: plain(self.embed), layers, norm: plain(self.norm), lm_head: plain(self.lm_head) }
    }
}

/// One buffer on the GPU and the weights that it holds.
#[derive(Debug)]
struct Slot<'a> {
    order: Order,
    parts: Vec<&'a WeightSpec>,
    /// Whose share of them.
    rank: Rank,
    /// How it lies there; only what a layer multiplies with is not bf16.
    format: WeightFormat,
}

impl Slot<'_> {
    fn stored_as(self, format: WeightFormat) -> Self {
        Self { format, ..self }
    }

    /// Inputs of its weights.
    fn width(&self) -> usize {
        self.shares().next().expect("a slot holds a weight").columns.len()
    }

    fn len(&self) -> usize {
        self.shares().map(|share| share.rows.len() * share.columns.len()).sum()
    }

    fn shares(&self) -> impl Iterator<Item = WeightSlice> {
        self.parts.iter().map(|weight| weight.slice(self.rank).expect("ranks divide every weight: that was seen"))
    }
}

/// What `buffer` gives for each slot of a model, asked in one order.
fn assemble<'a, T, E>(
    spec: &'a ModelSpec,
    shape: &ModelShape,
    mut buffer: impl FnMut(Slot<'a>) -> Result<T, E>,
) -> Result<Weights<T, T>, E> {
    let mut buffer = |slot: Slot<'a>| buffer(Slot { rank: shape.rank, ..slot });
    let embed = maybe(spec.has_embedding().then(|| one(&spec.embedding.weight)), &mut buffer)?;
    let layer = |(layer, shape): (&'a LayerSpec, &LayerShape)| assemble_layer(layer, shape.formats, &mut buffer);
    let layers = spec.layers.iter().zip(&shape.layers).map(layer).collect::<Result<_, E>>()?;
    let is_last = spec.stage.is_last();
    Ok(Weights {
        embed,
        layers,
        norm: maybe(is_last.then(|| one(&spec.norm.weight)), &mut buffer)?,
        lm_head: maybe(spec.head.weight.as_ref().filter(|_| is_last).map(one), &mut buffer)?,
    })
}

fn assemble_layer<'a, T, E>(
    spec: &'a LayerSpec,
    formats: LayerFormats,
    buffer: &mut impl FnMut(Slot<'a>) -> Result<T, E>,
) -> Result<Layer<T, T>, E> {
    let AttentionLayer { before, q, k, v, qk_norm, o, after, .. } = &spec.attention;
    let FeedForwardLayer { before: before_feed, gate, up, down, after: after_feed, .. } = &spec.feed_forward;
    Ok(Layer {
        before_attention: maybe(norm(before), buffer)?,
        qkv: buffer(behind([q, k, v].map(|linear: &LinearSpec| &linear.weight)).stored_as(formats.qkv))?,
        qkv_bias: maybe(biases([q, k, v]).map(behind), buffer)?,
        qk_norm: match qk_norm {
            Some(norms) => Some((buffer(one(&norms.q.weight))?, buffer(one(&norms.k.weight))?)),
            None => None,
        },
        o: buffer(one(&o.weight).stored_as(formats.o))?,
        o_bias: maybe(biases([o]).map(behind), buffer)?,
        after_attention: maybe(norm(after), buffer)?,
        before_feed_forward: maybe(norm(before_feed), buffer)?,
        gate_up: buffer(in_turn([&gate.weight, &up.weight]).stored_as(formats.gate_up))?,
        gate_up_bias: maybe(biases([gate, up]).map(in_turn), buffer)?,
        down: buffer(one(&down.weight).stored_as(formats.down))?,
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
    Slot { order: Order::InTurn(GATE_UP_GROUP), parts: parts.into(), rank: Rank::ALONE, format: WeightFormat::Bf16 }
}

fn behind<'a>(parts: impl Into<Vec<&'a WeightSpec>>) -> Slot<'a> {
    Slot { order: Order::Behind, parts: parts.into(), rank: Rank::ALONE, format: WeightFormat::Bf16 }
}

fn one(weight: &WeightSpec) -> Slot<'_> {
    behind([weight])
}

fn norm(norm: &Option<NormSpec>) -> Option<Slot<'_>> {
    norm.as_ref().map(|norm| one(&norm.weight))
}

/// How a slot comes to the device.
enum Way<'a> {
    /// As it lies in the file, unpacked there.
    Stored,
    /// Numbers of e4m3 as they lie in the file, and the scale of each row, or of each block.
    Codes(Vec<f32>, ScaledBy),
    /// In four bits: words as they lie in the file, put in the order of the kernels there, and groups that the host puts in order where
    /// they are copied from.
    FourBits(PlacedGroups<'a>),
    /// As bf16, which the host makes of codes and scales.
    Dequantised,
}

/// Copies the weights of a model to the GPU as they lie in their files, and unpacks them there; `progress` hears the share
/// done. Numbers of e4m3 that share a scale by rows or blocks stay what they are where products take them so; other quantised ones are
/// made numbers on the way, slot by slot.
pub(super) fn load(
    kernels: &Kernels,
    shape: &ModelShape,
    spec: &ModelSpec,
    weights: &BoundWeights,
    progress: &(dyn Fn(f32) + Sync),
) -> Result<Weights, KernelError> {
    let slots = slots(spec, shape);
    let stored = |slot: &Slot<'_>| slot.parts.iter().map(|part| weights.matrix(part)).collect::<Vec<_>>();
    let stored = each(&slots, stored);
    let found: Vec<_> = slots.iter().zip(&stored).collect();
    let ways = each(&found, |(slot, parts)| way(slot, parts));
    let comings: Vec<_> =
        slots.iter().zip(&stored).zip(&ways).map(|((slot, parts), way)| Coming { slot, parts, way }).collect();
    let n_values: usize = slots.iter().map(Slot::len).sum();
    let mut buffers = Vec::with_capacity(slots.len());
    let mut n_done = 0;
    for together in batches(&comings, Coming::staged_values, STAGED_VALUES_MAX) {
        let done = |n: usize| n as f32 / n_values as f32;
        let n_now: usize = together.iter().map(|coming| coming.slot.len()).sum();
        let report = |share: f32| progress(done(n_done) + share * done(n_now));
        buffers.extend(brought(kernels, together, &report)?);
        n_done += n_now;
    }
    Ok(in_place(spec, shape, buffers).with_plain())
}

/// All slots of a model, in the order in which they are asked for.
fn slots<'a>(spec: &'a ModelSpec, shape: &ModelShape) -> Vec<Slot<'a>> {
    let mut slots = Vec::new();
    let Ok(_) = assemble(spec, shape, |slot| -> Result<(), Infallible> {
        slots.push(slot);
        Ok(())
    });
    slots
}

/// What was made of each slot, where it belongs.
fn in_place<T>(spec: &ModelSpec, shape: &ModelShape, made: Vec<T>) -> Weights<T, T> {
    let mut made = made.into_iter();
    let Ok(weights) =
        assemble(spec, shape, |_| Ok::<_, Infallible>(made.next().expect("something was made of every slot")));
    weights
}

/// A slot, what is stored of it, and how it comes.
struct Coming<'a> {
    slot: &'a Slot<'a>,
    parts: &'a [StoredMatrix],
    way: &'a Way<'a>,
}

impl Coming<'_> {
    /// It comes as bf16 and stays as e4m3.
    fn is_quantised_on_arrival(&self) -> bool {
        self.slot.format == WeightFormat::E4m3 && matches!(self.way, Way::Stored | Way::Dequantised)
    }

    /// Numbers that lie on the device while it comes, and not afterwards.
    fn staged_values(&self) -> usize {
        if self.is_quantised_on_arrival() { self.slot.len() } else { 0 }
    }

    fn buffer(&self, device: &Device) -> Result<Projection, KernelError> {
        let len = self.slot.len();
        Ok(match self.way {
            Way::FourBits(groups) => Projection::Int4(Int4Matrix::awaited(device, groups.layout)?),
            Way::Codes(scales, by) => {
                let rows = QuantisedRows::with_scales(device, len, scales)?;
                if *by == ScaledBy::Rows { Projection::E4m3(rows) } else { Projection::E4m3Blocks(rows) }
            }
            Way::Dequantised => Projection::Bf16(device.holding(&dequantised(self.slot.order, self.parts))?),
            // Of the pool, which has it for the next one as soon as it is freed.
            Way::Stored if self.is_quantised_on_arrival() => Projection::Bf16(device.unset(len)?),
            Way::Stored => Projection::Bf16(device.own_unset(len)?),
        })
    }
}

/// The buffers of some slots with what is stored of them.
fn brought(
    kernels: &Kernels,
    comings: &[Coming<'_>],
    progress: &(dyn Fn(f32) + Sync),
) -> Result<Vec<Projection>, KernelError> {
    let is_made = |coming: &Coming<'_>| matches!(coming.way, Way::Dequantised);
    let n_values: usize = comings.iter().map(|coming| coming.slot.len()).sum();
    let mut made = 0.0;
    let mut buffers = Vec::with_capacity(comings.len());
    for coming in comings {
        buffers.push(coming.buffer(kernels.device())?);
        if is_made(coming) {
            made += coming.slot.len() as f32 / n_values as f32;
            progress(made);
        }
    }
    let uploads = buffers.iter_mut().zip(comings).flat_map(|(buffer, coming)| uploads_of(buffer, coming));
    upload(kernels, uploads.collect(), &|share| progress(made + share * (1.0 - made)))?;
    let stays = |(buffer, coming): (Projection, &Coming<'_>)| match buffer {
        Projection::Bf16(matrix) if coming.is_quantised_on_arrival() => {
            Projection::quantised(kernels, matrix, coming.slot.width())
        }
        buffer => Ok(buffer),
    };
    buffers.into_iter().zip(comings).map(stays).collect()
}

/// Items one behind the other, as many together as weigh no more than `most`; what weighs more by itself is alone.
fn batches<T>(items: &[T], weight: impl Fn(&T) -> usize, most: usize) -> impl Iterator<Item = &[T]> {
    let mut rest = items;
    std::iter::from_fn(move || {
        let mut sum = 0;
        let fits = |item: &&T| {
            sum += weight(item);
            sum <= most
        };
        let n = rest.iter().take_while(fits).count().max(1).min(rest.len());
        let (now, later) = rest.split_at(n);
        rest = later;
        (!now.is_empty()).then_some(now)
    })
}

/// What is copied to a slot's buffer.
fn uploads_of<'a>(buffer: &'a mut Projection, coming: &Coming<'a>) -> Vec<Upload<'a>> {
    let Coming { slot, parts, way } = *coming;
    let order = slot.order;
    let target = match (buffer, way) {
        (_, Way::Dequantised) => return vec![],
        (Projection::Int4(matrix), Way::FourBits(maker)) => {
            let layout = matrix.layout();
            let [codes, groups] = matrix.words_mut();
            return vec![
                Upload::Codes { target: codes, layout, parts: placed(order, parts) },
                Upload::Words { target: groups, unit_words: layout.n_tile_group_words(), maker },
            ];
        }
        (Projection::Int4(_), _) => unreachable!("such a buffer was made for four bits"),
        (Projection::Bf16(values), _) => values.as_view_mut(),
        (Projection::E4m3(rows) | Projection::E4m3Blocks(rows), _) => rows.pairs_mut(),
    };
    vec![Upload::Numbers { target, parts: in_order(order, parts) }]
}

fn way<'a>(slot: &Slot<'_>, parts: &'a [StoredMatrix]) -> Way<'a> {
    let quantised: Vec<&QuantisedWeight> = parts.iter().filter_map(StoredMatrix::quantised).collect();
    if quantised.is_empty() {
        return Way::Stored;
    }
    let codes = match slot.format {
        WeightFormat::Bf16 => None,
        WeightFormat::E4m3 => row_scales(slot.order, parts, &quantised),
        WeightFormat::E4m3Blocks => block_scales_of(slot.order, parts, &quantised),
        WeightFormat::Int4(_) => {
            let layout = stored_int4_layout(parts).expect("every slot was asked before the shape was said");
            Some(Way::FourBits(PlacedGroups::new(slot.order, parts, layout)))
        }
    };
    codes.unwrap_or(Way::Dequantised)
}

fn row_scales<'a>(order: Order, parts: &'a [StoredMatrix], weights: &[&QuantisedWeight]) -> Option<Way<'a>> {
    let scales: Vec<Vec<f32>> = weights.iter().map(|weight| weight.row_scales()).collect::<Option<_>>()?;
    let in_order = runs(order, parts).flat_map(|(part, rows)| scales[part][rows].to_vec());
    Some(Way::Codes(in_order.collect(), ScaledBy::Rows))
}

/// A row of scales for each [`BLOCK_OUTPUTS`] rows of the slot: those of gate and up lie in turn by as many.
fn block_scales_of<'a>(order: Order, parts: &'a [StoredMatrix], weights: &[&QuantisedWeight]) -> Option<Way<'a>> {
    const { assert!(GATE_UP_GROUP.is_multiple_of(BLOCK_OUTPUTS)) };
    let of = |(part, rows): (usize, Range<usize>)| {
        rows.step_by(BLOCK_OUTPUTS).map(move |row| (part, row)).collect::<Vec<_>>()
    };
    let rows = runs(order, parts).flat_map(of);
    let scales: Vec<Vec<f32>> = rows.map(|(part, row)| weights[part].block_scales(row)).collect::<Option<_>>()?;
    Some(Way::Codes(scales.concat(), ScaledBy::Blocks))
}

/// The shape by what is stored: in bf16 what is of four bits by its description and cannot be kept so, and that is said once.
pub(super) fn as_stored(shape: ModelShape, spec: &ModelSpec, weights: &BoundWeights) -> ModelShape {
    let slots = slots(spec, &shape);
    let format = |slot: &Slot<'_>| {
        if !slot.format.is_int4() {
            return Ok(slot.format);
        }
        let parts: Vec<_> = slot.parts.iter().map(|part| weights.matrix(part)).collect();
        stored_int4_layout(&parts).map(|layout| WeightFormat::Int4(layout.group))
    };
    let found = each(&slots, format);
    if let Some((slot, reason)) = slots.iter().zip(&found).find_map(|(slot, found)| Some((slot, found.as_ref().err()?)))
    {
        tracing::warn!(reason, first = slot.parts[0].name, "weights of four bits are made bf16");
    }
    let formats = found.into_iter().map(|found| found.unwrap_or(WeightFormat::Bf16)).collect();
    let of_layer = |Layer { qkv, o, gate_up, down, .. }: Layer<_, WeightFormat>| LayerFormats { qkv, o, gate_up, down };
    let layers = in_place(spec, &shape, formats).layers;
    shape.stored_as(layers.into_iter().map(of_layer).collect())
}

/// Weights that are quantised and lie in bf16.
pub(super) fn made_bf16<'a>(spec: &'a ModelSpec, shape: &ModelShape) -> Vec<&'a WeightSpec> {
    let of_bf16 = slots(spec, shape).into_iter().filter(|slot| slot.format == WeightFormat::Bf16);
    of_bf16.flat_map(|slot| slot.parts).filter(|weight| weight.scheme.is_some()).collect()
}

/// Of a slot whose weights are all of four bits; the groups of one may be those of another in pieces.
fn stored_int4_layout(parts: &[StoredMatrix]) -> Result<Int4Layout, String> {
    let weights: Option<Vec<&QuantisedWeight>> = parts.iter().map(StoredMatrix::quantised).collect();
    let weights = weights.ok_or("a projection is not quantised")?;
    let groups: Vec<GroupSize> = weights.iter().map(|weight| weight.int4_group()).collect::<Result<_, _>>()?;
    let fits = |format: &ScaleFormat| weights.iter().all(|weight| weight.scales_fit(*format));
    let are_stored_so = |format: &ScaleFormat| weights.iter().all(|weight| weight.scales_are(*format));
    let scales = ScaleFormat::ALL.into_iter().find(are_stored_so);
    let scales =
        scales.or_else(|| ScaleFormat::ALL.into_iter().find(fits)).ok_or("scales have more digits than f16 or bf16")?;
    let n = weights.iter().map(|weight| weight.n_outputs()).sum();
    Ok(Int4Layout { n, k: weights[0].n_inputs(), group: GroupSize::smallest(&groups), scales })
}

/// Scales and zero points of a slot's weights, in the order of its rows.
#[derive(Debug)]
struct PlacedGroups<'a> {
    layout: Int4Layout,
    parts: Vec<(Int4Groups<'a>, RowPlaces)>,
}

impl<'a> PlacedGroups<'a> {
    fn new(order: Order, parts: &'a [StoredMatrix], layout: Int4Layout) -> Self {
        let groups = parts.iter().map(|part| four_bits(part).int4_groups(layout.group, layout.scales));
        Self { layout, parts: groups.zip(row_places(order, parts)).collect() }
    }

    /// What makes the words of a row's groups.
    fn of_row(&self, row: usize) -> impl Fn(usize) -> u32 {
        let output = |(groups, places): &(Int4Groups<'a>, RowPlaces)| {
            places.output_of(row).filter(|output| *output < groups.n_outputs())
        };
        let holder = self.parts.iter().find_map(|part| Some((&part.0, output(part)?)));
        let (groups, output) = holder.expect("parts fill the matrix");
        groups.of_output(output)
    }
}

impl MakeWords for PlacedGroups<'_> {
    fn make(&self, tiles: Range<usize>, words: &mut [u32]) {
        self.layout.write_groups(tiles, words, |row| self.of_row(row));
    }
}

/// The words of a slot's weights, and where their outputs go.
fn placed(order: Order, parts: &[StoredMatrix]) -> Vec<PlacedCodes<'_>> {
    let rows = row_places(order, parts);
    parts.iter().zip(rows).map(|(part, rows)| PlacedCodes { words: four_bits(part).code_words(), rows }).collect()
}

fn four_bits(part: &StoredMatrix) -> &QuantisedWeight {
    part.quantised().expect("the layout is of quantised weights")
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
    let mut noise = Noise(seed);
    let weights = assemble(spec, shape, |slot| match slot.parts[0].role {
        WeightRole::Embedding | WeightRole::Projection => match slot.format {
            WeightFormat::Bf16 => noise::repeated(device, &piece, slot.len()).map(Projection::Bf16),
            // Matrix by matrix: all of them in bf16 may be more than the GPU has.
            WeightFormat::E4m3 => {
                let matrix = noise::repeated(device, &piece, slot.len())?;
                Projection::quantised(kernels, matrix, slot.width())
            }
            WeightFormat::E4m3Blocks => {
                let matrix = noise::repeated(device, &piece, slot.len())?;
                Projection::in_random_blocks(kernels, &mut noise, matrix, slot.width())
            }
            WeightFormat::Int4(group) => {
                let (n, k) = (slot.len() / slot.width(), slot.width());
                let layout = Int4Layout { n, k, group, scales: ScaleFormat::F16 };
                Int4Matrix::random(device, layout, &mut noise, RANDOM_SCALE).map(Projection::Int4)
            }
        },
        WeightRole::Norm => device.holding(&vec![bf16::ONE; slot.len()]).map(Projection::Bf16),
        WeightRole::Bias => device.zeros(slot.len()).map(Projection::Bf16),
    })?;
    Ok(weights.with_plain())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_come_together_as_may_be_staged_at_a_time() {
        let together =
            |weights: &[usize]| batches(weights, |weight| *weight, 10).map(<[usize]>::to_vec).collect::<Vec<_>>();
        assert_eq!(together(&[4, 6, 1, 0, 30, 2, 0]), [vec![4, 6], vec![1, 0], vec![30], vec![2, 0]]);
        assert_eq!(together(&[0; 5]), [vec![0; 5]]);
        assert!(together(&[]).is_empty());
    }
}
