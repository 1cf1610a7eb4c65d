//! The forward pass of a decoder on the GPU, launch by launch. The same function runs a step eagerly and is recorded into
//! a graph.
//!
//! ```text
//! residual = embed(tokens)
//! for each layer:  qkv = norm(residual) Wqkv;  bias, head norms, rope;  write K and V;  a = attention(q);  residual += a Wo
//!                  g = norm(residual) Wgate_up;  residual += (silu(gate) * up) Wdown
//! logits = norm(residual) Whead;  sampled = draw(logits)
//!
//! In the last layer only the drawn rows go on behind K and V: nobody reads the others.
//! ```
//!
//! Norms and additions are inside the products or launches of their own: `product.rs` knows.

use stoker_kernels::{
    CudaSlice, Device, KernelError, Kernels,
    attention::{PagedDecode, PagedKv, PagedPrefill},
    bf16,
    launch::{AttentionSpec, GemmShape, Left, NormWeight},
    linear::{Linear, Output, Products},
    packed::{Field, Packed},
    plan::{PrefillTile, SplitPolicy},
    pointwise::{Embed, FeedTokens, QkNorm, RopeKv, Rotary},
    sampling::{MarkTokens, Sample, SampleOptions, Selection, Turn},
};

use super::{
    buffers::Buffers,
    layout::{Sampled, StepLayout, StepShape},
    memory::{Capacity, kv_layout},
    product::{Norm, Product},
    shape::ModelShape,
    slots::EntryLayout,
    weights::{Layer, Weights},
};
use crate::model::RopeTable;

/// Products are timed over the weights of this many layers in turn: more than the L2 cache holds.
const TUNED_LAYERS: usize = 3;

/// A model on the GPU with its cache and everything that a step writes.
#[derive(Debug)]
pub(super) struct Forward {
    kernels: Kernels,
    products: Products,
    shape: ModelShape,
    weights: Weights,
    /// Positions x head width: cosines, then sines.
    angles: CudaSlice<f32>,
    /// Per layer: keys, values.
    cache: Vec<(CudaSlice<bf16>, CudaSlice<bf16>)>,
    buffers: Buffers,
}

/// A step's inputs on the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepInputs<'a> {
    pub(super) shape: &'a StepShape,
    pub(super) layout: &'a StepLayout,
    pub(super) packed: &'a Packed,
    /// How decode attention was cut.
    pub(super) policy: SplitPolicy,
}

/// A part of a step's launches, in this order.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Part {
    /// Up to where it is about to end.
    Most,
    /// The last layers, and the draw.
    Rest,
}

/// What a model on the GPU is made of.
#[derive(Debug)]
pub(super) struct ForwardParts {
    pub(super) kernels: Kernels,
    pub(super) products: Products,
    pub(super) shape: ModelShape,
    pub(super) weights: Weights,
    pub(super) rope: RopeTable,
    pub(super) n_blocks: usize,
}

impl Forward {
    /// Allocates cache and buffers.
    pub(super) fn new(parts: ForwardParts, capacity: &Capacity) -> Result<Self, KernelError> {
        let ForwardParts { kernels, products, shape, weights, rope, n_blocks } = parts;
        let device = kernels.device().clone();
        let layer_values = kv_layout(&shape, n_blocks).layer_values();
        let layer_cache = |_| Ok((device.zeros(layer_values)?, device.zeros(layer_values)?));
        Ok(Self {
            kernels,
            products,
            weights,
            angles: device.holding(&angles(&rope))?,
            cache: (0..shape.n_layers).map(layer_cache).collect::<Result<_, KernelError>>()?,
            buffers: Buffers::new(&device, &shape, capacity)?,
            shape,
        })
    }

    /// The device it runs on.
    pub(super) fn device(&self) -> &Device {
        self.kernels.device()
    }

    /// The logits of drawn row `row`, copied to the host after everything launched so far has run.
    pub(super) fn logits(&self, row: usize) -> Result<Vec<f32>, KernelError> {
        let vocab = self.shape.vocab;
        let stream = self.device().stream();
        let copied = stream.clone_dtoh(&self.buffers.logits.slice(row * vocab..(row + 1) * vocab));
        let row = copied.map_err(KernelError::driver("copy logits from the device"))?;
        self.device().synchronize()?;
        Ok(row)
    }

    /// What the last step drew, on the device: tokens, then log-probabilities behind all tokens that there may be.
    pub(super) fn results(&self, n: usize) -> stoker_kernels::CudaView<'_, u32> {
        self.buffers.sampled.slice(..n)
    }

    /// Chooses the algorithms of all products of `m` rows, of which `m_head` are drawn. Overwrites the buffers.
    pub(super) fn tune(&mut self, m: usize, m_head: usize) -> Result<(), KernelError> {
        let Self { kernels, products, weights, buffers: b, shape, .. } = self;
        let (product, layers) =
            (Product { kernels, products, m }, &weights.layers[..TUNED_LAYERS.min(weights.layers.len())]);
        let of_layers = |part: fn(&Layer) -> &CudaSlice<bf16>| layers.iter().map(part).collect::<Vec<_>>();
        product.tune(&mut b.qkv, &b.stream.normed, &of_layers(|layer| &layer.qkv), shape.hidden)?;
        let norm = &weights.norm;
        product.tune_update(&mut b.stream, &b.attended, &of_layers(|layer| &layer.o), norm)?;
        let gated = (&mut b.activated, &mut b.gate_up);
        product.tune_gated(gated, &b.stream.normed, &of_layers(|layer| &layer.gate_up), shape.hidden)?;
        product.tune_update(&mut b.stream, &b.activated, &of_layers(|layer| &layer.down), norm)?;
        let head = Linear {
            y: Output::F32(b.logits.slice_mut(..m_head * shape.vocab)),
            x: b.stream.normed.slice(..m_head * shape.hidden),
            w: weights.lm_head.as_ref().unwrap_or(&weights.embed).as_view(),
            shape: GemmShape { m: m_head, n: shape.vocab, k: shape.hidden },
        };
        products.tune(kernels, head, &[])
    }

    /// Launches a whole step.
    pub(super) fn launch(&mut self, step: StepInputs<'_>) -> Result<(), KernelError> {
        self.launch_part(step, Part::Most)?;
        self.launch_part(step, Part::Rest)
    }

    /// Launches a part of it.
    pub(super) fn launch_part(&mut self, step: StepInputs<'_>, part: Part) -> Result<(), KernelError> {
        let n_most = self.shape.n_layers - self.shape.n_layers_near_the_end(step.shape.n_rows);
        match part {
            Part::Most => {
                self.embed(step)?;
                (0..n_most).try_for_each(|idx| self.layer(step, idx))
            }
            Part::Rest => {
                (n_most..self.shape.n_layers).try_for_each(|idx| self.layer(step, idx))?;
                self.head(step)?;
                self.draw(step)
            }
        }
    }

    fn layer(&mut self, step: StepInputs<'_>, idx: usize) -> Result<(), KernelError> {
        self.project(step, idx)?;
        if self.rows_behind_attention(step, idx) == 0 {
            return Ok(());
        }
        self.attend(step, idx)?;
        self.update(step, idx)?;
        self.feed_forward(step, idx)
    }

    fn rows_behind_attention(&self, step: StepInputs<'_>, layer: usize) -> usize {
        if self.is_last(layer) { step.shape.n_sampled } else { step.shape.n_rows }
    }

    fn is_last(&self, layer: usize) -> bool {
        layer + 1 == self.shape.n_layers
    }

    fn embed(&mut self, step: StepInputs<'_>) -> Result<(), KernelError> {
        let Self { kernels, weights, buffers: b, shape, .. } = self;
        let n = step.shape.n_rows;
        kernels.feed_tokens(FeedTokens {
            out: b.tokens.slice_mut(..n),
            sources: step.packed.view(step.layout.sources),
            sampled: b.sampled.as_view(),
        })?;
        b.stream.left = Left::Residual;
        kernels.embed(Embed {
            out: b.stream.residual.slice_mut(..n * shape.hidden),
            table: weights.embed.as_view(),
            tokens: b.tokens.slice(..n),
            width: shape.hidden,
            scale: None,
        })
    }

    /// Queries, and K and V into the cache.
    fn project(&mut self, step: StepInputs<'_>, idx: usize) -> Result<(), KernelError> {
        let (n, shape) = (step.shape.n_rows, self.shape);
        let Self { kernels, products, weights, angles, cache, buffers: b, .. } = self;
        let (layer, (k_cache, v_cache)) = (&weights.layers[idx], &mut cache[idx]);
        let product = Product { kernels, products, m: n };
        let norm = Norm { weight: &layer.attention_norm, eps: shape.eps };
        let qkv = Output::Bf16(b.qkv.slice_mut(..n * shape.heads.qkv_width()));
        product.normed(qkv, &mut b.stream, norm, &layer.qkv)?;
        kernels.rope_kv(RopeKv {
            qkv: b.qkv.slice_mut(..n * shape.heads.qkv_width()),
            k_cache: k_cache.as_view_mut(),
            v_cache: v_cache.as_view_mut(),
            bias: layer.qkv_bias.as_ref().map(CudaSlice::as_view),
            norm: layer.qk_norm.as_ref().map(|(q, k)| QkNorm {
                q_weight: q.as_view(),
                k_weight: k.as_view(),
                weight: NormWeight::Factor,
                eps: shape.eps,
            }),
            rotary: Some(Rotary { angles: angles.as_view(), n_pairs: shape.heads.dim / 2 }),
            positions: step.packed.view(step.layout.positions),
            slots: step.packed.view(step.layout.slots),
            heads: shape.heads,
        })
    }

    fn attend(&mut self, step: StepInputs<'_>, idx: usize) -> Result<(), KernelError> {
        self.attend_decodes(step, idx)?;
        if !self.is_last(idx) {
            return self.attend_prefills(step, step.layout.tiles, idx);
        }
        self.attend_prefills(step, step.layout.drawn_tiles, idx)?;
        self.keep_drawn_rows(step)
    }

    /// Drawn rows of the residual and of what attention gave come to the front, where they are not all.
    fn keep_drawn_rows(&mut self, step: StepInputs<'_>) -> Result<(), KernelError> {
        if step.shape.sampled == Sampled::Every {
            return Ok(());
        }
        let (n, m, shape) = (step.shape.n_rows, step.shape.n_sampled, self.shape);
        let Self { kernels, buffers: b, .. } = self;
        let gather = |out: &mut CudaSlice<bf16>, table: &CudaSlice<bf16>, width: usize| {
            kernels.embed(Embed {
                out: out.slice_mut(..m * width),
                table: table.slice(..n * width),
                tokens: step.packed.view(step.layout.listed),
                width,
                scale: None,
            })
        };
        gather(&mut b.gathered, &b.attended, shape.attended_width())?;
        gather(&mut b.stream.normed, &b.stream.residual, shape.hidden)?;
        // Both hold nothing yet that outlives a step, and both have room for the largest.
        std::mem::swap(&mut b.stream.residual, &mut b.stream.normed);
        Ok(())
    }

    /// What attention gave is added to the residual.
    fn update(&mut self, step: StepInputs<'_>, idx: usize) -> Result<(), KernelError> {
        let n = self.rows_behind_attention(step, idx);
        let is_gathered = self.is_last(idx) && step.shape.sampled == Sampled::Listed;
        let Self { kernels, products, weights, buffers: b, .. } = self;
        let (layer, product) = (&weights.layers[idx], Product { kernels, products, m: n });
        let attended = if is_gathered { &b.gathered } else { &b.attended };
        product.update(&mut b.stream, attended, &layer.o, &layer.mlp_norm)
    }

    fn attend_decodes(&mut self, step: StepInputs<'_>, idx: usize) -> Result<(), KernelError> {
        if step.layout.items.is_empty() {
            return Ok(());
        }
        let (n, shape) = (step.shape.n_decode, self.shape);
        let Self { kernels, cache, buffers: b, .. } = self;
        kernels.paged_decode(PagedDecode {
            out: b.attended.slice_mut(..n * shape.attended_width()),
            q: b.qkv.slice(..n * shape.heads.qkv_width()),
            q_stride: shape.heads.qkv_width(),
            kv: paged_kv(&cache[idx], step),
            items: step.packed.view(step.layout.items),
            readers: step.packed.view(step.layout.readers),
            scratch: &mut b.decode_scratch,
            policy: step.policy,
            spec: AttentionSpec::plain(shape.heads, shape.attention_scale),
        })
    }

    fn attend_prefills(
        &mut self,
        step: StepInputs<'_>,
        tiles: Field<PrefillTile>,
        idx: usize,
    ) -> Result<(), KernelError> {
        if tiles.is_empty() {
            return Ok(());
        }
        let (n, shape) = (step.shape.n_rows, self.shape);
        let Self { kernels, cache, buffers: b, .. } = self;
        kernels.paged_prefill(PagedPrefill {
            out: b.attended.slice_mut(..n * shape.attended_width()),
            q: b.qkv.slice(..n * shape.heads.qkv_width()),
            q_stride: shape.heads.qkv_width(),
            kv: paged_kv(&cache[idx], step),
            tiles: step.packed.view(tiles),
            scratch: &mut b.prefill_scratch,
            spec: AttentionSpec::plain(shape.heads, shape.attention_scale),
        })
    }

    fn feed_forward(&mut self, step: StepInputs<'_>, idx: usize) -> Result<(), KernelError> {
        let (n, shape) = (self.rows_behind_attention(step, idx), self.shape);
        let Self { kernels, products, weights, buffers: b, .. } = self;
        let layer = &weights.layers[idx];
        let product = Product { kernels, products, m: n };
        let norm = Norm { weight: &layer.mlp_norm, eps: shape.eps };
        product.gated((&mut b.activated, &mut b.gate_up), &mut b.stream, norm, &layer.gate_up)?;
        let next = weights.layers.get(idx + 1).map_or(&weights.norm, |next| &next.attention_norm);
        product.update(&mut b.stream, &b.activated, &layer.down, next)
    }

    fn head(&mut self, step: StepInputs<'_>) -> Result<(), KernelError> {
        let (m, shape) = (step.shape.n_sampled, self.shape);
        let Self { kernels, products, weights, buffers: b, .. } = self;
        if m == 0 {
            return Ok(());
        }
        let product = Product { kernels, products, m };
        let norm = Norm { weight: &weights.norm, eps: shape.eps };
        let logits = Output::F32(b.logits.slice_mut(..m * shape.vocab));
        product.normed(logits, &mut b.stream, norm, weights.lm_head.as_ref().unwrap_or(&weights.embed))
    }

    /// Takes newcomers into their slots.
    pub(super) fn enter_slots(&mut self, packed: &Packed, layout: EntryLayout) -> Result<(), KernelError> {
        self.kernels.mark_tokens(MarkTokens {
            marks: &mut self.buffers.marks,
            entries: packed.view(layout.entries),
            histories: packed.view(layout.histories),
            edits: packed.view(layout.edits),
        })
    }

    /// Draws a token for each row without options.
    fn draw(&mut self, step: StepInputs<'_>) -> Result<(), KernelError> {
        let m = step.shape.n_sampled;
        if m == 0 {
            return Ok(());
        }
        let Self { kernels, buffers: b, shape, .. } = self;
        kernels.sample(Sample {
            tokens: b.sampled.slice_mut(..m),
            logits: b.logits.slice(..m * shape.vocab),
            rows: step.packed.view(step.layout.rows),
            scratch: &mut b.sample_scratch,
            vocab: shape.vocab,
        })
    }

    /// Draws a token for each row with options whose turn it is.
    pub(super) fn draw_options(
        &mut self,
        step: StepInputs<'_>,
        turn: Turn<'_>,
        selection: Selection,
    ) -> Result<(), KernelError> {
        let (m, b) = (step.shape.n_sampled, &mut self.buffers);
        let (mut tokens, logprobs) = b.sampled.split_at_mut(b.max_sampled);
        self.kernels.sample_options(SampleOptions {
            tokens: tokens.slice_mut(..m),
            logprobs,
            logits: b.logits.slice(..m * self.shape.vocab),
            rows: step.packed.view(step.layout.rows),
            marks: &mut b.marks,
            turn,
            selection,
            scratch: &mut b.sample_scratch,
        })
    }
}

fn paged_kv<'a>(cache: &'a (CudaSlice<bf16>, CudaSlice<bf16>), step: StepInputs<'a>) -> PagedKv<'a> {
    PagedKv {
        k_cache: cache.0.as_view(),
        v_cache: cache.1.as_view(),
        block_table: step.packed.view(step.layout.table),
        blocks_per_row: step.shape.blocks_per_row,
    }
}

/// Per position: the cosines, then the sines.
fn angles(rope: &RopeTable) -> Vec<f32> {
    let rows = rope.cos.chunks_exact(rope.n_pairs).zip(rope.sin.chunks_exact(rope.n_pairs));
    rows.flat_map(|(cos, sin)| cos.iter().chain(sin)).copied().collect()
}
