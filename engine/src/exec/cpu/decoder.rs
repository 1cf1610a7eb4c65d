//! The forward pass on the CPU, of every family: the weights of a [`ModelSpec`] in the order in which it draws them.

use crate::{
    model::{
        BoundWeights, RopeTable,
        spec::{AttentionLayer, FeedForwardLayer, LayerSpec, LinearSpec, ModelSpec, NormSpec, WeightSpec},
    },
    ops::{BatchInputs, CpuCache, CpuMatrix, CpuOps, CpuTensor, CpuVector},
};

/// A model on the CPU.
#[derive(Debug)]
pub struct Decoder {
    spec: ModelSpec,
    rope_tables: Vec<RopeTable>,
    embedding: CpuMatrix,
    layers: Vec<Layer>,
    norm: CpuVector,
    /// `None`: the embedding table is the output matrix too.
    head: Option<CpuMatrix>,
}

/// The weights of one layer.
#[derive(Debug)]
struct Layer {
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
    pub fn load(
        ops: &mut CpuOps,
        spec: ModelSpec,
        weights: &BoundWeights,
        n_positions: usize,
        progress: &dyn Fn(f32),
    ) -> Self {
        let n_layers = spec.layers.len();
        let mut loader = Loader { ops, weights };
        let layer = |(idx, layer)| {
            let layer = loader.layer(layer);
            progress((idx + 1) as f32 / n_layers as f32);
            layer
        };
        let layers = spec.layers.iter().enumerate().map(layer).collect();
        let head_dim = spec.layers.first().map_or(0, |layer| layer.attention.attention.heads.head_dim);
        let table = |settings| RopeTable::new(settings, head_dim, n_positions);
        Self {
            rope_tables: spec.rope_sets.iter().map(table).collect(),
            embedding: loader.matrix(&spec.embedding.weight),
            layers,
            norm: loader.norm(&spec.norm),
            head: spec.head.weight.as_ref().map(|head| loader.matrix(head)),
            spec,
        }
    }

    /// What the last layer gives for every row of the batch.
    pub fn hidden(&self, ops: &mut CpuOps, cache: &mut CpuCache, batch: &BatchInputs) -> CpuTensor {
        let mut hidden = ops.embed(&self.embedding, batch);
        if let Some(factor) = self.spec.embedding.scale {
            ops.scale(&mut hidden, factor);
        }
        for idx in 0..self.layers.len() {
            let attended = self.attend(ops, cache, idx, &hidden, batch);
            ops.add(&mut hidden, &attended);
            let fed = self.feed_forward(ops, idx, &hidden);
            ops.add(&mut hidden, &fed);
        }
        hidden
    }

    fn attend(
        &self,
        ops: &mut CpuOps,
        cache: &mut CpuCache,
        idx: usize,
        hidden: &CpuTensor,
        batch: &BatchInputs,
    ) -> CpuTensor {
        let (layer, spec) = (&self.layers[idx], &self.spec.layers[idx].attention);
        let normed = norm_if(ops, hidden, &layer.before_attention, &spec.before);
        let input = normed.as_ref().unwrap_or(hidden);
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
        let attended = ops.attention(cache, idx, &queries, spec.attention, batch);
        let [output] = ops.linear(&attended, [layer.o.parts()]);
        norm_if(ops, &output, &layer.after_attention, &spec.after).unwrap_or(output)
    }

    fn feed_forward(&self, ops: &mut CpuOps, idx: usize, hidden: &CpuTensor) -> CpuTensor {
        let (layer, spec) = (&self.layers[idx], &self.spec.layers[idx].feed_forward);
        let normed = norm_if(ops, hidden, &layer.before_feed_forward, &spec.before);
        let input = normed.as_ref().unwrap_or(hidden);
        let [gate, up] = ops.linear(input, [layer.gate.parts(), layer.up.parts()]);
        let activated = ops.activate_mul(gate, &up, spec.activation);
        let [output] = ops.linear(&activated, [layer.down.parts()]);
        norm_if(ops, &output, &layer.after_feed_forward, &spec.after).unwrap_or(output)
    }

    /// The logits of some of those rows.
    pub fn logits(&self, ops: &mut CpuOps, hidden: &CpuTensor, rows: &[u32]) -> CpuTensor {
        let normed = ops.rms_norm(&ops.rows(hidden, rows), &self.norm, self.spec.norm.eps);
        let [mut logits] = ops.linear(&normed, [(self.head.as_ref().unwrap_or(&self.embedding), None)]);
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
}

impl Loader<'_> {
    fn layer(&mut self, spec: &LayerSpec) -> Layer {
        let AttentionLayer { before, q, k, v, qk_norm, o, after, .. } = &spec.attention;
        let feed: &FeedForwardLayer = &spec.feed_forward;
        Layer {
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
        let bias = spec.bias.as_ref().map(|bias| CpuVector::new(&self.weights.get(bias)));
        Linear { weight: self.matrix(&spec.weight), bias }
    }

    fn matrix(&mut self, spec: &WeightSpec) -> CpuMatrix {
        self.ops.matrix(&self.weights.matrix(spec), self.weights.plain_format())
    }

    fn norm(&self, spec: &NormSpec) -> CpuVector {
        CpuVector::of_norm(&self.weights.get(&spec.weight), spec.stored)
    }
}
