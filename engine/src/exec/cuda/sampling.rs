//! From a request's sampling parameters to what the GPU draws by. Pure.

use std::collections::BTreeMap;

use stoker_kernels::sampling::{LogitEdit, Penalties, SampleRow};

use crate::{
    constraint::allows,
    request::{SamplingParams, TokenId},
    sched::SampleSpec,
};

/// How a row is drawn.
pub(super) fn sample_row(spec: &SampleSpec<'_>) -> SampleRow {
    let SamplingParams { temperature, top_p, top_k, min_p, seed, .. } = spec.request.sampling;
    let ln_min_p = if min_p > 0.0 { min_p.ln() } else { f32::NEG_INFINITY };
    SampleRow { seed, position: spec.position as u64, temperature, top_p, ln_min_p, top_k }
}

/// What changes single logits of one row before the draw.
pub(super) fn edits(row: u32, spec: &SampleSpec<'_>) -> Vec<LogitEdit> {
    let params = &spec.request.sampling;
    let mut edits: BTreeMap<TokenId, LogitEdit> = BTreeMap::new();
    let untouched = |token| LogitEdit { row, token, n_generated: -1, bias: 0.0 };
    for (position, &token) in spec.history.iter().enumerate() {
        let edit = edits.entry(token).or_insert_with(|| untouched(token));
        edit.n_generated = edit.n_generated.max(0) + i32::from(position >= spec.request.prompt.len());
    }
    for (&token, &bias) in &params.logit_bias {
        edits.entry(token).or_insert_with(|| untouched(token)).bias = bias;
    }
    for &token in spec.banned {
        edits.entry(token).or_insert_with(|| untouched(token)).bias = f32::NEG_INFINITY;
    }
    edits.into_values().collect()
}

/// Penalties that change nothing.
pub(super) const NO_PENALTIES: Penalties = Penalties { presence: 0.0, frequency: 0.0, repetition: 1.0 };

/// Bans of everything that a mask does not allow.
pub(super) fn bans(row: u32, mask: &[u32], vocab_size: TokenId) -> impl Iterator<Item = LogitEdit> {
    let forbidden = (0..vocab_size).filter(|token| !allows(mask, *token));
    forbidden.map(move |token| LogitEdit { row, token, n_generated: -1, bias: f32::NEG_INFINITY })
}

/// A row's penalties.
pub(super) fn penalties(spec: &SampleSpec<'_>) -> Penalties {
    let SamplingParams { presence_penalty, frequency_penalty, repetition_penalty, .. } = spec.request.sampling;
    Penalties { presence: presence_penalty, frequency: frequency_penalty, repetition: repetition_penalty }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::request::{Request, StopParams};

    fn request(sampling: SamplingParams) -> Arc<Request> {
        Arc::new(Request { prompt: vec![5, 6], sampling, stop: StopParams::default(), logprobs: None })
    }

    #[test]
    fn filters_that_are_off_leave_the_row_unfiltered() {
        let is_filtered = |sampling| {
            let request = request(sampling);
            sample_row(&SampleSpec { request: &request, position: 2, banned: &[], history: &[] }).is_filtered()
        };
        assert!(!is_filtered(SamplingParams::default()));
        assert!(is_filtered(SamplingParams { min_p: 0.1, ..SamplingParams::default() }));
    }

    #[test]
    fn history_bias_and_bans_of_one_token_are_one_edit() {
        let request = request(SamplingParams { logit_bias: [(7, 2.0), (9, 1.0)].into(), ..SamplingParams::default() });
        let spec = SampleSpec { request: &request, position: 4, banned: &[9], history: &[5, 6, 7, 7] };
        let found: Vec<_> = edits(3, &spec).iter().map(|e| (e.row, e.token, e.n_generated, e.bias)).collect();
        let expected = [(3, 5, 0, 0.0), (3, 6, 0, 0.0), (3, 7, 2, 2.0), (3, 9, -1, f32::NEG_INFINITY)];
        assert_eq!(found, expected);
    }
}
