//! The speed and size of one simulated replica, and what its users were promised.
//!
//! Owns the constants and where each was measured. No state.

use serde::{Deserialize, Serialize};
use stoker_cost::StepCost;
use stoker_crds::contract::KV_BLOCK_TOKENS;
use stoker_workload::Request;

/// One replica: Llama-3.1-8B in BF16 on one H200 under vLLM 0.24.0, from measurements of that pair:
///
/// | measured | value | modelled |
/// |---|---|---|
/// | decode step at batch 1, 8, 32, 64, 128, 256, context 640 | 4.90, 5.15, 5.89, 6.82, 8.97, 14.40 ms | within 5 % |
/// | time to first token of 128, 2048, 8192 prompt tokens | 8.8, 50.1, 213 ms | 7.3, 47, 209 ms |
/// | KV capacity at 0.88 of the memory | 868,496 tokens | as is |
/// | batched tokens and sequences at most, server defaults on this GPU | 8192, 1024 | as is |
///
/// Nothing was fitted to the outcome of a comparison.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ReplicaModel {
    /// Seconds of a step that does nothing: weights are read, kernels launched.
    pub step_seconds: f64,
    /// Seconds each decoding sequence adds.
    pub sequence_seconds: f64,
    /// Seconds each token of context adds to decoding: 128 KiB of KV at 3.6 TB/s.
    pub context_token_seconds: f64,
    /// Seconds each prefill token takes, apart from attention.
    pub prefill_token_seconds: f64,
    /// Seconds each pair of a prefill token and a token before it takes.
    pub prefill_pair_seconds: f64,
    /// KV blocks of 16 tokens.
    pub blocks: u32,
    /// Tokens computed in one step at most.
    pub max_batched_tokens: u32,
    /// Sequences in one step at most.
    pub max_num_seqs: u32,
    /// Median seconds from creation to serving. 41 s of import, compilation and graph capture were measured; image and
    /// 16 GB of weights from a warm node add the rest.
    pub start_seconds: f64,
    /// The same on a node that has the model in memory; `None`: nobody said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warm_start_seconds: Option<f64>,
    /// Standard deviation of the logarithm of the start time.
    pub start_sigma: f64,
    /// Seconds a draining replica waits for its last requests.
    pub drain_seconds: f64,
}

impl Default for ReplicaModel {
    fn default() -> Self {
        Self {
            step_seconds: 4.87e-3,
            sequence_seconds: 12e-6,
            context_token_seconds: 0.036e-6,
            prefill_token_seconds: 19.1e-6,
            prefill_pair_seconds: 1.43e-9,
            blocks: 868_496 / 16,
            max_batched_tokens: 8192,
            max_num_seqs: 1024,
            start_seconds: 50.0,
            warm_start_seconds: None,
            start_sigma: 0.15,
            drain_seconds: 600.0,
        }
    }
}

impl ReplicaModel {
    /// Seconds to prefill `tokens` after `before` tokens are present.
    pub fn prefill_seconds(&self, tokens: u32, before: u32) -> f64 {
        let pairs = f64::from(tokens) * (f64::from(before) + f64::from(tokens) / 2.0);
        f64::from(tokens) * self.prefill_token_seconds + pairs * self.prefill_pair_seconds
    }

    /// Seconds a replica works for this request, shared steps apart: what ten of them take together grows by ten times it.
    pub fn work_seconds(&self, request: &Request) -> f64 {
        let cached = request.cached_tokens.min(request.prompt_tokens.saturating_sub(1));
        let context = f64::from(request.prompt_tokens) + f64::from(request.completion_tokens) / 2.0;
        let per_token = self.sequence_seconds + self.context_token_seconds * context;
        self.prefill_seconds(request.prompt_tokens - cached, cached) + f64::from(request.completion_tokens) * per_token
    }

    /// KV blocks this request references on average while it runs.
    pub fn blocks(&self, request: &Request) -> f64 {
        (f64::from(request.prompt_tokens) + f64::from(request.completion_tokens) / 2.0) / f64::from(KV_BLOCK_TOKENS)
    }

    /// Steps that cost what an engine says of its own.
    #[must_use]
    pub fn with_cost(self, cost: &StepCost) -> Self {
        let StepCost {
            step_seconds,
            decode_seconds,
            context_token_seconds,
            prefill_token_seconds,
            prefill_pair_seconds,
        } = *cost;
        Self {
            step_seconds,
            sequence_seconds: decode_seconds,
            context_token_seconds,
            prefill_token_seconds,
            prefill_pair_seconds,
            ..self
        }
    }

    /// This many times as fast in everything.
    #[must_use]
    pub fn times_as_fast(self, times: f64) -> Self {
        Self {
            step_seconds: self.step_seconds / times,
            sequence_seconds: self.sequence_seconds / times,
            context_token_seconds: self.context_token_seconds / times,
            prefill_token_seconds: self.prefill_token_seconds / times,
            prefill_pair_seconds: self.prefill_pair_seconds / times,
            ..self
        }
    }

    /// What is wrong with it, if anything: the field and what to change.
    pub fn error(&self) -> Option<String> {
        let seconds = [
            ("stepSeconds", self.step_seconds, true),
            ("sequenceSeconds", self.sequence_seconds, false),
            ("contextTokenSeconds", self.context_token_seconds, false),
            ("prefillTokenSeconds", self.prefill_token_seconds, false),
            ("prefillPairSeconds", self.prefill_pair_seconds, false),
            ("startSeconds", self.start_seconds, false),
            ("warmStartSeconds", self.warm_start_seconds.unwrap_or(0.0), false),
            ("startSigma", self.start_sigma, false),
            ("drainSeconds", self.drain_seconds, false),
        ];
        let is_wrong = |value: f64, above_zero: bool| !value.is_finite() || value < 0.0 || (above_zero && value == 0.0);
        let wrong = seconds.into_iter().find(|(_, value, above_zero)| is_wrong(*value, *above_zero));
        if let Some((field, value, above_zero)) = wrong {
            let least = if above_zero { "above 0" } else { "of at least 0" };
            return Some(format!("{field} is {value}: use a number {least}"));
        }
        let counts =
            [("blocks", self.blocks), ("maxBatchedTokens", self.max_batched_tokens), ("maxNumSeqs", self.max_num_seqs)];
        let zero = counts.into_iter().find(|(_, value)| *value == 0)?;
        Some(format!("{} is 0: use at least 1", zero.0))
    }

    /// Seconds of a step that decodes `sequences` with `context` tokens in all.
    pub fn decode_seconds(&self, sequences: u32, context: u64) -> f64 {
        self.step_seconds + f64::from(sequences) * self.sequence_seconds + context as f64 * self.context_token_seconds
    }
}

/// What users were promised, for every request.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Slo {
    /// Seconds to the first token beyond the time that the prompt takes on an idle replica.
    pub ttft_seconds: f64,
    /// Seconds for each further token: 20 tokens per second, faster than people read.
    pub itl_seconds: f64,
    /// Seconds the further tokens may be late in all: one prefill step of a long prompt takes about as long, and a
    /// short answer is not bad because one fell into it.
    pub stall_seconds: f64,
}

impl Default for Slo {
    fn default() -> Self {
        Self { ttft_seconds: 1.0, itl_seconds: 0.05, stall_seconds: 0.25 }
    }
}

#[cfg(test)]
mod tests {
    use stoker_cost::StepWork;

    use super::*;

    fn close(modelled: f64, measured: f64, share: f64) {
        let off = (modelled - measured).abs() / measured;
        assert!(off <= share, "modelled {modelled}, measured {measured}: off by {:.1} %", off * 100.0);
    }

    #[test]
    fn decode_steps_are_within_five_percent_of_the_measured_ones() {
        let model = ReplicaModel::default();
        let measured = [(8, 5.15e-3), (32, 5.89e-3), (64, 6.82e-3), (128, 8.97e-3), (256, 14.40e-3)];
        for (batch, seconds) in measured {
            close(model.decode_seconds(batch, u64::from(batch) * 640), seconds, 0.05);
        }
    }

    #[test]
    fn a_step_takes_what_its_engine_says_it_costs() {
        let cost = StepCost {
            step_seconds: 4e-3,
            decode_seconds: 20e-6,
            context_token_seconds: 0.1e-6,
            prefill_token_seconds: 30e-6,
            prefill_pair_seconds: 2e-9,
        };
        let model = ReplicaModel::default().with_cost(&cost);
        let decode = StepWork { decodes: 8.0, context_tokens: 800.0, ..StepWork::default() };
        close(model.decode_seconds(8, 800), cost.step(decode), 1e-9);
        close(model.prefill_seconds(500, 100), cost.work_seconds(StepWork::prefill(500.0, 100.0)), 1e-9);
    }

    #[test]
    fn first_tokens_are_within_two_milliseconds_or_a_sixteenth_of_the_measured_ones() {
        let model = ReplicaModel::default();
        for (prompt, seconds) in [(128, 8.8e-3), (2048, 50.1e-3), (8192, 213e-3)] {
            let modelled = model.step_seconds + model.prefill_seconds(prompt, 0);
            assert!((modelled - seconds).abs() <= f64::max(0.002, seconds / 16.0), "{prompt}: {modelled}");
        }
    }
}
