//! The verbs a forward pass is written in. One trait, one implementation a back end; models know nothing else.
//!
//! Activations are f32 matrices, one row a token. Weights keep the back end's own form.

mod cpu;

use std::fmt::Debug;

pub use cpu::{CpuCache, CpuMatrix, CpuOps, CpuTensor, CpuVector};

use crate::{
    exec::BatchInputs,
    kv::KvLayout,
    model::{Activation, AttentionSpec, RopeTable, Tensor},
};

/// A back end.
pub trait Ops: Debug {
    /// Activations: rows of f32.
    type Activations: Debug;
    /// A weight matrix, `outputs x inputs`.
    type Matrix: Debug;
    /// A weight vector.
    type Vector: Debug;
    /// The KV cache of all layers.
    type Cache: Debug;
    /// Cosines and sines of all positions.
    type Rope: Debug;
    /// A step's inputs where the back end needs them.
    type Batch: Debug;

    /// Takes a weight matrix over from its file.
    fn matrix(&mut self, tensor: &Tensor) -> Self::Matrix;
    /// Takes a weight vector over from its file.
    fn vector(&self, tensor: &Tensor) -> Self::Vector;
    /// Takes the rotary angles over.
    fn rope_table(&self, table: RopeTable) -> Self::Rope;
    /// Makes an empty KV cache.
    fn kv_cache(&self, layout: KvLayout) -> Self::Cache;
    /// Takes a step's inputs over.
    fn bind(&mut self, inputs: &BatchInputs) -> Self::Batch;

    /// Rows of `table`, one a token of the batch.
    fn embed(&mut self, table: &Self::Matrix, batch: &Self::Batch) -> Self::Activations;
    /// `x / sqrt(mean(x^2) + eps) * weight` over every run of a row that is as long as `weight`: the row itself, or
    /// each of its heads.
    fn rms_norm(&mut self, x: &Self::Activations, weight: &Self::Vector, eps: f32) -> Self::Activations;
    /// `x * weight^T + bias` for each part: all of them at once, since they read the same rows.
    fn linear<const N: usize>(
        &mut self,
        x: &Self::Activations,
        parts: [(&Self::Matrix, Option<&Self::Vector>); N],
    ) -> [Self::Activations; N];
    /// Turns every head of every row by the angles of its position; numbers beyond the pairs stay.
    fn rope(&mut self, x: &mut Self::Activations, rope: &Self::Rope, batch: &Self::Batch);
    /// Writes one layer's keys and values of the batch into their slots.
    fn store_kv(
        &mut self,
        cache: &mut Self::Cache,
        layer: usize,
        keys: &Self::Activations,
        values: &Self::Activations,
        batch: &Self::Batch,
    );
    /// Causal attention of the batch's queries over one layer's cache, read through the block tables.
    fn attention(
        &mut self,
        cache: &Self::Cache,
        layer: usize,
        queries: &Self::Activations,
        spec: AttentionSpec,
        batch: &Self::Batch,
    ) -> Self::Activations;
    /// `activation(gate) * up`.
    fn activate_mul(
        &mut self,
        gate: Self::Activations,
        up: &Self::Activations,
        activation: Activation,
    ) -> Self::Activations;
    /// `x += y`.
    fn add(&mut self, x: &mut Self::Activations, y: &Self::Activations);
    /// `x *= factor`.
    fn scale(&mut self, x: &mut Self::Activations, factor: f32);
    /// `x = cap * tanh(x / cap)`.
    fn softcap(&mut self, x: &mut Self::Activations, cap: f32);
    /// The rows whose next token is sampled; only they go through the output matrix.
    fn sampled_rows(&mut self, x: &Self::Activations, batch: &Self::Batch) -> Self::Activations;
    /// Brings activations to the host, row by row.
    fn read(&mut self, x: Self::Activations) -> Vec<f32>;
}
