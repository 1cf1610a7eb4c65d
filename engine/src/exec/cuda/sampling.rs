//! From a request's sampling parameters to what the GPU draws by, and back from what it has written. Pure.

use std::collections::BTreeMap;

use stoker_kernels::sampling::{LOGPROB_WORDS, NO_TOKEN, SampleRow, Selection, TokenEdit};

use crate::{
    request::{Request, SamplingParams, TokenId},
    sched::{RawLogprobs, SampleSpec, Sampled},
};

/// How the drawn rows of a step are drawn.
#[derive(Clone, Debug)]
pub(super) struct Draws {
    /// One an entry.
    pub(super) rows: Vec<SampleRow>,
    /// Rows that want log-probabilities.
    pub(super) n_logprobs: usize,
    /// Rows that wait for a mask.
    pub(super) n_masked: usize,
    /// Whether rows without a mask have options.
    pub(super) has_free_options: bool,
    /// Whether any row needs more than its few largest logits.
    pub(super) selection: Selection,
}

impl Draws {
    /// Of these entries, over rows of `vocab` logits.
    pub(super) fn new(specs: &[SampleSpec<'_>], vocab: usize) -> Self {
        let (mut n_logprobs, mut n_masked) = (0, 0);
        let next = |count: &mut usize, wanted: bool| {
            *count += usize::from(wanted);
            if wanted { *count as i32 - 1 } else { -1 }
        };
        let row = |spec: &SampleSpec<'_>| {
            let logprobs = next(&mut n_logprobs, spec.request.logprobs.is_some());
            SampleRow { logprobs, mask: next(&mut n_masked, spec.is_constrained()), ..sample_row(spec) }.with_options()
        };
        let rows: Vec<SampleRow> = specs.iter().map(row).collect();
        let needs_selection = rows.iter().any(|row| row.needs_selection(vocab));
        Self {
            has_free_options: rows.iter().any(|row| row.options != 0 && row.mask < 0),
            selection: if needs_selection { Selection::Needed } else { Selection::NotNeeded },
            rows,
            n_logprobs,
            n_masked,
        }
    }

    /// Words that come back: tokens, then log-probabilities behind all `max_sampled` tokens there may be.
    pub(super) fn n_result_words(&self, max_sampled: usize) -> usize {
        if self.n_logprobs == 0 { self.rows.len() } else { max_sampled + self.n_logprobs * LOGPROB_WORDS }
    }

    /// What those words say.
    pub(super) fn outcomes(&self, words: &[u32], max_sampled: usize) -> Vec<Sampled> {
        let outcome = |(row, token): (&SampleRow, &TokenId)| match *token {
            NO_TOKEN => Sampled::NotANumber,
            token => {
                let idx = usize::try_from(row.logprobs).ok();
                let logprobs =
                    idx.map(|idx| raw_logprobs(&words[max_sampled + idx * LOGPROB_WORDS..][..LOGPROB_WORDS]));
                Sampled::Token { token, logprobs }
            }
        };
        self.rows.iter().zip(words).map(outcome).collect()
    }
}

fn raw_logprobs(words: &[u32]) -> RawLogprobs {
    let pairs = words[2..].chunks_exact(2).take(words[1] as usize);
    RawLogprobs {
        chosen: f32::from_bits(words[0]),
        top: pairs.map(|pair| (pair[0], f32::from_bits(pair[1]))).collect(),
    }
}

/// Whether draws of a request read the marks of its slot.
pub(super) fn uses_marks(request: &Request) -> bool {
    request.sampling.has_penalties() || !request.sampling.logit_bias.is_empty() || request.stop.min_tokens > 0
}

fn sample_row(spec: &SampleSpec<'_>) -> SampleRow {
    let SamplingParams { temperature, top_p, top_k, min_p, seed, .. } = spec.request.sampling;
    let SamplingParams { presence_penalty, frequency_penalty, repetition_penalty, .. } = spec.request.sampling;
    SampleRow {
        seed,
        position: spec.position as u64,
        temperature,
        top_p,
        ln_min_p: if min_p > 0.0 { min_p.ln() } else { f32::NEG_INFINITY },
        top_k,
        presence: presence_penalty,
        frequency: frequency_penalty,
        repetition: repetition_penalty,
        slot: if uses_marks(spec.request) { spec.slot as i32 } else { -1 },
        n_top: spec.request.logprobs.unwrap_or(0).into(),
        ..SampleRow::GREEDY
    }
}

/// What changes single logits of a sequence that enters its slot, beside penalties.
pub(super) fn token_edits(spec: &SampleSpec<'_>) -> Vec<TokenEdit> {
    let biases = &spec.request.sampling.logit_bias;
    let edit = |token, bias| (token, TokenEdit { token, bias, banned_until: 0 });
    let mut edits: BTreeMap<TokenId, TokenEdit> = biases.iter().map(|(token, bias)| edit(*token, *bias)).collect();
    let banned_until = spec.request.prompt.len() as u32 + spec.request.stop.min_tokens;
    for token in spec.banned {
        edits.entry(*token).or_insert(edit(*token, 0.0).1).banned_until = banned_until;
    }
    edits.into_values().collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::request::StopParams;

    fn request(sampling: SamplingParams) -> Arc<Request> {
        Arc::new(Request {
            prompt: vec![5, 6],
            sampling,
            stop: StopParams::default(),
            logprobs: None,
            ..Request::default()
        })
    }

    fn spec(request: &Arc<Request>) -> SampleSpec<'_> {
        SampleSpec { request, position: 2, banned: &[], history: &[5, 6], slot: 3, enters_slot: true }
    }

    #[test]
    fn a_row_without_options_is_none_of_the_options_kernels_business() {
        let draws = |sampling| Draws::new(&[spec(&request(sampling))], 100);
        let plain = draws(SamplingParams::default());
        assert_eq!((plain.rows[0].options, plain.rows[0].slot, plain.has_free_options), (0, -1, false));
        let penalised = draws(SamplingParams { repetition_penalty: 1.1, ..SamplingParams::default() });
        assert_eq!((penalised.rows[0].slot, penalised.has_free_options), (3, true));
        let nucleus = draws(SamplingParams { top_p: 0.9, ..SamplingParams::default() });
        assert_eq!((nucleus.rows[0].slot, nucleus.selection), (-1, Selection::Needed));
    }

    #[test]
    fn bias_and_ban_of_one_token_are_one_edit() {
        let sampling = SamplingParams { logit_bias: [(7, 2.0), (9, 1.0)].into(), ..SamplingParams::default() };
        let mut request = Request::clone(&request(sampling));
        request.stop.min_tokens = 4;
        let request = Arc::new(request);
        let edits = token_edits(&SampleSpec { banned: &[1, 9], ..spec(&request) });
        let found: Vec<_> = edits.iter().map(|e| (e.token, e.bias, e.banned_until)).collect();
        assert_eq!(found, [(1, 0.0, 6), (7, 2.0, 0), (9, 1.0, 6)]);
    }

    #[test]
    fn log_probabilities_are_found_behind_all_tokens() {
        let plain = request(SamplingParams::default());
        let wanting = Arc::new(Request { logprobs: Some(2), ..Request::clone(&plain) });
        let draws = Draws::new(&[spec(&plain), spec(&wanting), spec(&wanting)], 100);
        assert_eq!(draws.n_result_words(4), 4 + 2 * LOGPROB_WORDS);
        let mut words = vec![0; 4 + 2 * LOGPROB_WORDS];
        words[..3].copy_from_slice(&[11, 12, NO_TOKEN]);
        let logprob = (-1.5f32).to_bits();
        words[4..8].copy_from_slice(&[logprob, 1, 40, logprob]);
        let logprobs = RawLogprobs { chosen: -1.5, top: vec![(40, -1.5)] };
        let token = |token, logprobs| Sampled::Token { token, logprobs };
        let expected = [token(11, None), token(12, Some(logprobs)), Sampled::NotANumber];
        assert_eq!(draws.outcomes(&words, 4), expected);
    }
}
