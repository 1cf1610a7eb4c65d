//! Where prompts begin alike, whoever sends them to the replica that has their beginning computes less; where they do not, nobody does.

use proptest::prelude::*;
use stoker_scaling::ScalingSpec;
use stoker_sim::{Outcomes, ReplicaModel, Router, Setting, Slo, World, run_ours};
use stoker_workload::{HASH_BLOCK_TOKENS, HashIds, Request, Rng, Trace};

const REPLICAS: u32 = 4;

/// What prompts share.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Sharing {
    /// Conversations in turn, each of which repeats all before it.
    Conversations,
    /// Every block has a name of its own.
    Nothing,
    /// The trace does not say.
    Unsaid,
}

fn trace(seed: u64, per_second: f64, sharing: Sharing) -> Trace {
    let mut rng = Rng::seeded(seed);
    let (mut requests, mut arrived) = (Vec::new(), 0.0);
    let mut turns = [0; 40];
    for nth in 0..600_u64 {
        arrived += rng.exponential() / per_second;
        let client = (rng.uniform() * turns.len() as f64) as usize;
        turns[client] = turns[client] % 12 + 1;
        let n_blocks = 2 * turns[client] as u64;
        let name = |block| match sharing {
            Sharing::Conversations => client as u64 * 1000 + block,
            Sharing::Nothing | Sharing::Unsaid => nth * 1000 + block,
        };
        let hash_ids: Vec<u64> = if sharing == Sharing::Unsaid { vec![] } else { (0..n_blocks).map(name).collect() };
        requests.push(Request {
            arrived,
            prompt_tokens: n_blocks as u32 * HASH_BLOCK_TOKENS - (rng.uniform() * 100.0) as u32,
            cached_tokens: 0,
            completion_tokens: 10 + (rng.uniform() * 200.0) as u32,
            hash_ids: HashIds::from(hash_ids),
        });
    }
    Trace::of("prefixes", requests).expect("it has requests")
}

fn outcomes(trace: &Trace, blocks: u32, router: Router) -> Outcomes {
    let replica = ReplicaModel { blocks, ..ReplicaModel::default() };
    let world = World::of(trace.clone(), replica).expect("prompts fit");
    let setting = Setting { min: REPLICAS, max: REPLICAS, seed: 1, slo: Slo::default() };
    run_ours(&World { router, ..world }, &ScalingSpec::between(REPLICAS, REPLICAS), &setting).0
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn prefix_computes_no_more_than_least_requests(seed in 0_u64..1 << 40, per_second in 0.5_f64..8.0, blocks in 8000_u32..54_000) {
        for sharing in [Sharing::Conversations, Sharing::Nothing, Sharing::Unsaid] {
            let trace = trace(seed, per_second, sharing);
            let [ours, theirs] = [Router::Prefix, Router::LeastRequests].map(|router| outcomes(&trace, blocks, router));
            let all: u64 = trace.requests.iter().map(|request| u64::from(request.prompt_tokens)).sum();
            prop_assert_eq!((ours.requests, ours.prompt_tokens), (600, all));
            prop_assert_eq!(theirs.prompt_tokens, all);
            prop_assert_eq!((ours.preemptions, theirs.preemptions), (0, 0));
            match sharing {
                Sharing::Conversations => prop_assert!(ours.prefill_tokens <= theirs.prefill_tokens),
                Sharing::Nothing | Sharing::Unsaid => {
                    prop_assert_eq!((ours.prefill_tokens, theirs.prefill_tokens), (all, all));
                }
            }
        }
    }
}

/// Names that share nothing change nothing: not when a token came, not what was decided.
#[test]
fn names_of_nothing_are_as_no_names_for_who_does_not_look_at_them() {
    let named = trace(3, 4.0, Sharing::Nothing);
    let unnamed = trace(3, 4.0, Sharing::Unsaid);
    for router in [Router::BestOfTwo, Router::Random, Router::LeastRequests] {
        let of = |trace| {
            let outcomes = outcomes(trace, 20_000, router);
            (outcomes.misses, outcomes.prefill_tokens, outcomes.gpu_seconds.to_bits(), outcomes.samples)
        };
        assert_eq!(of(&named), of(&unnamed), "{router:?}");
    }
}
