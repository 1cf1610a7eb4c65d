//! What of a layer is quantised, by its description: its projections as tensors, what enters each, and whose outputs can be made smaller
//! where inputs are made larger. Pure.

use std::ops::Range;

use stoker_engine::{
    exec::ProjectionInput,
    model::{
        ModelSpec, NormWeight,
        spec::{LayerSpec, LinearSpec, NormSpec, WeightSpec},
    },
};

/// A tensor of projections that the same rows enter.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Projection {
    /// Its name in the checkpoint, `.weight` at its end.
    pub(crate) tensor: String,
    /// Columns.
    pub(crate) n_inputs: usize,
    /// What enters.
    pub(crate) input: ProjectionInput,
}

/// Where inputs of projections come from: its outputs are divided by what the projections' columns are multiplied with.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Source {
    /// What it feeds.
    pub(crate) input: ProjectionInput,
    /// Its numbers.
    pub(crate) from: From,
}

/// See [`Source`].
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum From {
    /// A norm's weight.
    Norm(String, NormWeight),
    /// Rows of a projection, and its bias.
    Rows { tensor: String, rows: Range<usize>, bias: Option<(String, Range<usize>)> },
}

/// A layer to be quantised.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Layer {
    /// Each tensor once.
    pub(crate) projections: Vec<Projection>,
    /// Where inputs can be made larger.
    pub(crate) sources: Vec<Source>,
    /// Every tensor of the layer.
    pub(crate) tensors: Vec<String>,
}

/// The layers of a model.
pub(crate) fn layers(spec: &ModelSpec) -> Vec<Layer> {
    spec.layers.iter().map(Layer::of).collect()
}

impl Layer {
    fn of(spec: &LayerSpec) -> Self {
        let (attention, feed) = (&spec.attention, &spec.feed_forward);
        let mut layer = Self::default();
        for linear in [&attention.q, &attention.k, &attention.v] {
            layer.add(linear, ProjectionInput::Qkv);
        }
        layer.add(&attention.o, ProjectionInput::O);
        layer.add(&feed.gate, ProjectionInput::GateUp);
        layer.add(&feed.up, ProjectionInput::GateUp);
        layer.add(&feed.down, ProjectionInput::Down);
        let heads = attention.attention.heads;
        // Where heads share values, one of them feeds several inputs.
        let values = (heads.n_heads == heads.n_kv_heads).then(|| rows(&attention.v));
        let sources = [
            (ProjectionInput::Qkv, attention.before.as_ref().map(norm)),
            (ProjectionInput::O, values),
            (ProjectionInput::GateUp, feed.before.as_ref().map(norm)),
            (ProjectionInput::Down, Some(rows(&feed.up))),
        ];
        layer.sources = sources.into_iter().filter_map(|(input, from)| Some(Source { input, from: from? })).collect();
        for weight in spec.weights() {
            if !layer.tensors.contains(&weight.tensor) {
                layer.tensors.push(weight.tensor.clone());
            }
        }
        layer
    }

    fn add(&mut self, linear: &LinearSpec, input: ProjectionInput) {
        let WeightSpec { tensor, tensor_shape, .. } = &linear.weight;
        if !self.projections.iter().any(|known| known.tensor == *tensor) {
            self.projections.push(Projection { tensor: tensor.clone(), n_inputs: tensor_shape[1], input });
        }
    }
}

fn norm(spec: &NormSpec) -> From {
    From::Norm(spec.weight.tensor.clone(), spec.stored)
}

fn rows(linear: &LinearSpec) -> From {
    let bias = linear.bias.as_ref().map(|bias| (bias.tensor.clone(), bias.rows.clone()));
    From::Rows { tensor: linear.weight.tensor.clone(), rows: linear.weight.rows.clone(), bias }
}

impl Projection {
    /// The module that holds it.
    pub(crate) fn module(&self) -> &str {
        self.tensor.strip_suffix(".weight").unwrap_or(&self.tensor)
    }
}
