//! A square wave whose quiet half is longer than a higher number is kept for: its first three edges are met too late, the fourth is not.

use stoker_scaling::ScalingSpec;
use stoker_sim::{ReplicaModel, Setting, Slo, World, run_ours};
use stoker_workload::{HashIds, Request, Rng, Trace};

const PERIOD_SECONDS: f64 = 3000.0;
const EDGES: usize = 5;

#[test]
fn from_the_fourth_edge_on_replicas_are_there_before_it() {
    let mut rng = Rng::seeded(1);
    let (mut requests, mut arrived) = (Vec::new(), 0.0);
    while arrived < (EDGES as f64 + 0.4) * PERIOD_SECONDS {
        requests.push(Request {
            arrived,
            prompt_tokens: 1 + rng.log_normal(2000.0, 0.5) as u32,
            cached_tokens: 0,
            completion_tokens: 1 + rng.log_normal(200.0, 0.5) as u32,
            hash_ids: HashIds::default(),
        });
        let is_on = arrived >= PERIOD_SECONDS && arrived % PERIOD_SECONDS < 0.4 * PERIOD_SECONDS;
        arrived += rng.exponential() / if is_on { 16.0 } else { 4.0 };
    }
    let trace = Trace::of("square", requests).expect("it has requests");
    let replica = ReplicaModel { start_seconds: 120.0, ..ReplicaModel::default() }.times_as_fast(0.25);
    let world = World::of(trace, replica).expect("requests fit");
    let setting = Setting { min: 1, max: 12, seed: 1, slo: Slo::default() };
    let (outcomes, _) = run_ours(&world, &ScalingSpec::between(1, 12), &setting);
    let mut late = [0; EDGES + 1];
    for sample in &outcomes.samples {
        late[((sample.at / PERIOD_SECONDS) as usize).min(EDGES)] += sample.misses;
    }
    let [_, one, two, three, four, five] = late;
    let least = one.min(two).min(three);
    assert!(least > 40 && four.max(five) < least / 10, "{late:?}");
}
