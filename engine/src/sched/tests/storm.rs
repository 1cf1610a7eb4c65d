//! More load than the cache holds, in virtual time: what is computed again, and what comes out.

use std::{collections::BTreeMap, sync::Arc};

use super::limits;
use crate::{
    request::{Request, RequestId, SamplingParams, StopParams, TokenId},
    sched::{Sampled, SchedLimits, SchedState, StepOutput, StepPlan, resolve, schedule},
};

const EOS: TokenId = 0;
const SECONDS: f64 = 60.0;
/// Of the cache; about 45 sequences at their average.
const N_BLOCKS: usize = 2000;

/// What a storm led to.
#[derive(Debug)]
struct Outcome {
    /// Tokens of completions that ended, a second.
    goodput: f64,
    /// Of all tokens computed, those computed before.
    recomputed: f64,
}

/// Prompt and completion of a request, spread as chats are: half of the completions are short, few are long.
fn lengths(id: u64) -> (usize, usize) {
    let unit = |salt: u64| {
        let hash = (id ^ salt << 40).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        ((hash ^ hash >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 11) as f64 / (1u64 << 53) as f64
    };
    let prompt = 50.0 + 700.0 * unit(1);
    // Twelve uniform numbers are nearly normal; their exponential is skewed as lengths are.
    let normal = (2..14).map(unit).sum::<f64>() - 6.0;
    (prompt as usize, ((180.0 * (0.8 * normal).exp()) as usize).clamp(4, 1900))
}

/// A step of an 8-billion-parameter model on one GPU.
fn seconds(plan: &StepPlan) -> f64 {
    let n_prefill = plan.n_prefill_tokens();
    0.006 + n_prefill as f64 * 25e-6 + (plan.n_tokens() - n_prefill) as f64 * 20e-6
}

fn request(id: u64) -> Arc<Request> {
    let prompt = (0..lengths(id).0 as TokenId).map(|position| position + 1000 * id as TokenId).collect();
    // Nobody says how long the answer becomes.
    let stop = StopParams { max_tokens: 2000, ..StopParams::default() };
    Arc::new(Request { prompt, sampling: SamplingParams::default(), stop, ..Request::default() })
}

/// A minute of so many requests a second.
fn storm(per_second: f64, expected_completion: Option<usize>) -> Outcome {
    let sizes = SchedLimits { max_num_seqs: 256, max_batched_tokens: 8192, max_model_len: 4096, ..limits() };
    let limits = SchedLimits { expected_completion, prefill_share: 2048, eos: vec![EOS], ..sizes };
    let mut state = SchedState::new(N_BLOCKS);
    let (mut now, mut submitted, mut ended_tokens) = (0.0, 0, 0);
    let (mut computed, mut again, mut reached) = (0, 0, BTreeMap::<RequestId, usize>::new());
    while now < SECONDS {
        while (submitted as f64) < now * per_second {
            state.submit(RequestId(submitted), request(submitted));
            submitted += 1;
        }
        let plan = schedule(&mut state, &limits);
        now += if plan.chunks.is_empty() { 0.001 } else { seconds(&plan) };
        for chunk in &plan.chunks {
            let (before, end) = (reached.entry(chunk.id).or_default(), chunk.start + chunk.n_tokens);
            computed += chunk.n_tokens;
            again += (*before).min(end).saturating_sub(chunk.start);
            *before = end.max(*before);
        }
        let samples = plan.chunks.iter().filter(|chunk| chunk.samples);
        let sampled = samples.map(|chunk| {
            let (prompt, completion) = lengths(chunk.id.0);
            let is_last = chunk.start + chunk.n_tokens + 1 >= prompt + completion;
            Sampled::Token { token: if is_last { EOS } else { 1 }, logprobs: None }
        });
        let output = StepOutput { sampled: sampled.collect() };
        let effects = resolve(&mut state, plan, output, &limits);
        ended_tokens += effects.ended.iter().map(|ended| lengths(ended.id.0).1).sum::<usize>();
    }
    Outcome { goodput: ended_tokens as f64 / SECONDS, recomputed: f64::from(again as u32) / f64::from(computed as u32) }
}

#[test]
fn at_four_times_what_the_cache_holds_nothing_is_lost_to_preemption() {
    // About twelve requests a second fill it.
    let peak = [14.0, 20.0].map(|load| storm(load, Some(256)).goodput).into_iter().fold(0.0, f64::max);
    let stormy = storm(56.0, Some(256));
    assert!(stormy.recomputed <= 0.01, "{stormy:?}, peak {peak:.0}");
    assert!(stormy.goodput >= 0.95 * peak, "{stormy:?}, peak {peak:.0}");
    let unforeseen = storm(56.0, None);
    assert!(unforeseen.recomputed > 0.01, "the storm is one: without a forecast {unforeseen:?}");
}
