//! The forward pass on the CPU, of every family: the weights of a [`ModelSpec`] in the order in which it draws them. Where ranks share a
//! model, each has a decoder of its share, and all of them compute every step.

use super::meeting::Meeting;
use crate::{
    model::{
        AttentionSpec, BoundWeights, RopeTable,
        spec::{
            AttentionLayer, FeedForwardLayer, LayerSpec, LinearSpec, ModelSpec, NormSpec, Rank, Sharding, WeightSpec,
        },
    },
    ops::{BatchInputs, CpuCache, CpuMatrix, CpuOps, CpuTensor, CpuVector},
};

/// Which projections of a layer some rows enter.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum ProjectionInput {
    /// Queries, keys and values.
    Qkv,
    /// The output of attention.
    O,
    /// Gate and up.
    GateUp,
    /// Down.
    Down,
}

/// Hears what enters the projections of a layer, one row a token.
pub(super) type Listener<'a> = &'a mut dyn FnMut(ProjectionInput, &CpuTensor);

/// A model on the CPU, or a stage of one.
#[derive(Debug)]
pub(super) struct Decoder {
    spec: ModelSpec,
    meeting: Meeting,
    rope_tables: Vec<RopeTable>,
    /// `None`: a stage behind the first one, and not the last of a model whose head it is.
    embedding: Option<CpuMatrix>,
    layers: Vec<Layer>,
    /// `None`: a stage before the last one.
    norm: Option<CpuVector>,
    /// `None`: the same, or the embedding table is the output matrix too, and all of it is this rank's.
    head: Option<CpuMatrix>,
}

/// The weights of one layer.
#[derive(Debug)]
struct Layer {
    /// Of this rank's heads.
    attention: AttentionSpec,
    before_attention: Option<CpuVector>,
    q: Linear,
    k: Linear,
    v: Linear,
    /// Of queries, of keys.
    qk_norm: Option<[CpuVector; 2]>,
    o: Linear,
    after_attention: Option<CpuVector>,
    before_feed_forward: Option<CpuVector>,
    gate: Linear,
    up: Linear,
    down: Linear,
    after_feed_forward: Option<CpuVector>,
}

#[derive(Debug)]
struct Linear {
    weight: CpuMatrix,
    bias: Option<CpuVector>,
}

impl Decoder {
    /// Takes the weights over; `progress` hears the share of layers done.
    pub(super) fn load(
        ops: &mut CpuOps,
        meeting: Meeting,
        spec: ModelSpec,
        weights: &BoundWeights,
        n_positions: usize,
        progress: &dyn Fn(f32),
    ) -> Self {
        let n_layers = spec.layers.len();
        let mut loader = Loader { ops, weights, rank: meeting.rank() };
        let layer = |(idx, layer)| {
            let layer = loader.layer(layer);
            progress((idx + 1) as f32 / n_layers as f32);
            layer
        };
        let layers = spec.layers.iter().enumerate().map(layer).collect();
        let head_dim = spec.layers.first().map_or(0, |layer| layer.attention.attention.heads.head_dim);
        let table = |settings| RopeTable::new(settings, head_dim, n_positions);
        let is_last = spec.stage.is_last();
        Self {
            rope_tables: spec.rope_sets.iter().map(table).collect(),
            embedding: spec.has_embedding().then(|| loader.matrix(&spec.embedding.weight)),
            layers,
            norm: is_last.then(|| loader.norm(&spec.norm)),
            head: is_last.then(|| loader.head(&spec)).flatten(),
            meeting,
            spec,
        }
    }

    /// What its last layer gives for every row of the batch; of a stage behind another one that one's rows arrive.
    pub(super) fn hidden(
        &self,
        ops: &mut CpuOps,
        cache: &mut CpuCache,
        batch: &BatchInputs,
        arriving: Option<CpuTensor>,
    ) -> CpuTensor {
        let mut hidden = arriving.unwrap_or_else(|| self.embed(ops, batch));
        for idx in 0..self.layers.len() {
            self.layer(ops, cache, idx, (&mut hidden, batch), &mut |_, _| {});
        }
        hidden
    }

    /// What enters the first layer.
    pub(super) fn embed(&self, ops: &mut CpuOps, batch: &BatchInputs) -> CpuTensor {
        let mut hidden = ops.embed(self.table(), batch);
        if let Some(factor) = self.spec.embedding.scale {
            ops.scale(&mut hidden, factor);
        }
        hidden
    }

    fn table(&self) -> &CpuMatrix {
        self.embedding.as_ref().expect("only stages that have the table look into it")
    }

    /// One layer, in place.
    pub(super) fn layer(
        &self,
        ops: &mut CpuOps,
        cache: &mut CpuCache,
        idx: usize,
        (hidden, batch): (&mut CpuTensor, &BatchInputs),
        heard: Listener<'_>,
    ) {
        let attended = self.attend(ops, cache, idx, (hidden, batch), heard);
        ops.add(hidden, &attended);
        let fed = self.feed_forward(ops, idx, hidden, heard);
        ops.add(hidden, &fed);
    }

    fn attend(
        &self,
        ops: &mut CpuOps,
        cache: &mut CpuCache,
        idx: usize,
        (hidden, batch): (&CpuTensor, &BatchInputs),
        heard: Listener<'_>,
    ) -> CpuTensor {
        let (layer, spec) = (&self.layers[idx], &self.spec.layers[idx].attention);
        let normed = norm_if(ops, hidden, &layer.before_attention, &spec.before);
        let input = normed.as_ref().unwrap_or(hidden);
        heard(ProjectionInput::Qkv, input);
        let [mut queries, mut keys, values] = ops.linear(input, [&layer.q, &layer.k, &layer.v].map(Linear::parts));
        if let (Some([q, k]), Some(norms)) = (&layer.qk_norm, &spec.qk_norm) {
            queries = ops.rms_norm(&queries, q, norms.q.eps);
            keys = ops.rms_norm(&keys, k, norms.k.eps);
        }
        if let Some(set) = spec.rope_set {
            ops.rope(&mut queries, &self.rope_tables[set], batch);
            ops.rope(&mut keys, &self.rope_tables[set], batch);
        }
        ops.store_kv(cache, idx, &keys, &values, batch);
        let attended = ops.attention(cache, idx, &queries, layer.attention, batch);
        heard(ProjectionInput::O, &attended);
        let [output] = ops.linear(&attended, [layer.o.parts()]);
        let output = self.meeting.sum(output);
        norm_if(ops, &output, &layer.after_attention, &spec.after).unwrap_or(output)
    }

    fn feed_forward(&self, ops: &mut CpuOps, idx: usize, hidden: &CpuTensor, heard: Listener<'_>) -> CpuTensor {
        let (layer, spec) = (&self.layers[idx], &self.spec.layers[idx].feed_forward);
        let normed = norm_if(ops, hidden, &layer.before_feed_forward, &spec.before);
        let input = normed.as_ref().unwrap_or(hidden);
        heard(ProjectionInput::GateUp, input);
        let [gate, up] = ops.linear(input, [layer.gate.parts(), layer.up.parts()]);
        let activated = ops.activate_mul(gate, &up, spec.activation);
        heard(ProjectionInput::Down, &activated);
        let [output] = ops.linear(&activated, [layer.down.parts()]);
        let output = self.meeting.sum(output);
        norm_if(ops, &output, &layer.after_feed_forward, &spec.after).unwrap_or(output)
    }

    /// What the last norm gives for some of those rows.
    pub(super) fn outputs(&self, ops: &mut CpuOps, hidden: &CpuTensor, rows: &[u32]) -> CpuTensor {
        let norm = self.norm.as_ref().expect("only the last stage gives outputs");
        ops.rms_norm(&ops.rows(hidden, rows), norm, self.spec.norm.eps)
    }

    /// The logits of some of those rows.
    pub(super) fn logits(&self, ops: &mut CpuOps, hidden: &CpuTensor, rows: &[u32]) -> CpuTensor {
        let normed = self.outputs(ops, hidden, rows);
        let [logits] = ops.linear(&normed, [(self.head.as_ref().unwrap_or_else(|| self.table()), None)]);
        let mut logits = self.meeting.join(logits);
        if let Some(cap) = self.spec.head.softcap {
            ops.softcap(&mut logits, cap);
        }
        logits
    }
}

/// The norm of `x`, where there is one.
fn norm_if(ops: &mut CpuOps, x: &CpuTensor, weight: &Option<CpuVector>, spec: &Option<NormSpec>) -> Option<CpuTensor> {
    Some(ops.rms_norm(x, weight.as_ref()?, spec.as_ref()?.eps))
}

impl Linear {
    fn parts(&self) -> (&CpuMatrix, Option<&CpuVector>) {
        (&self.weight, self.bias.as_ref())
    }
}

/// Takes weights over by their descriptions.
struct Loader<'a> {
    ops: &'a mut CpuOps,
    weights: &'a BoundWeights,
    rank: Rank,
}

impl Loader<'_> {
    fn layer(&mut self, spec: &LayerSpec) -> Layer {
        let AttentionLayer { before, q, k, v, qk_norm, o, after, .. } = &spec.attention;
        let feed: &FeedForwardLayer = &spec.feed_forward;
        Layer {
            attention: spec.attention.attention.of_rank(self.rank),
            before_attention: before.as_ref().map(|norm| self.norm(norm)),
            q: self.linear(q),
            k: self.linear(k),
            v: self.linear(v),
            qk_norm: qk_norm.as_ref().map(|norms| [&norms.q, &norms.k].map(|norm| self.norm(norm))),
            o: self.linear(o),
            after_attention: after.as_ref().map(|norm| self.norm(norm)),
            before_feed_forward: feed.before.as_ref().map(|norm| self.norm(norm)),
            gate: self.linear(&feed.gate),
            up: self.linear(&feed.up),
            down: self.linear(&feed.down),
            after_feed_forward: feed.after.as_ref().map(|norm| self.norm(norm)),
        }
    }

    fn linear(&mut self, spec: &LinearSpec) -> Linear {
        // What ranks give is added up: one of them adds the bias.
        let is_partial = matches!(spec.weight.sharding, Sharding::Inputs { .. }) && self.rank.idx > 0;
        let bias = spec.bias.as_ref().filter(|_| !is_partial);
        let bias = bias.map(|bias| CpuVector::new(&self.weights.get(bias)));
        Linear { weight: self.matrix(&spec.weight), bias }
    }

    /// The rank's part of a table that all of them read is a matrix of its own.
    fn head(&mut self, spec: &ModelSpec) -> Option<CpuMatrix> {
        let tied =
            (self.rank.of > 1).then(|| WeightSpec { sharding: Sharding::Vocabulary, ..spec.embedding.weight.clone() });
        spec.head.weight.as_ref().or(tied.as_ref()).map(|head| self.matrix(head))
    }

    fn matrix(&mut self, spec: &WeightSpec) -> CpuMatrix {
        self.ops.matrix(&self.weights.matrix(spec), self.weights.plain_format())
    }

    fn norm(&self, spec: &NormSpec) -> CpuVector {
        CpuVector::of_norm(&self.weights.get(&spec.weight), spec.stored)
    }
}
