//! What the decisions of a real run say: the load that a deployment met, for trying other settings on it, and what its replicas
//! are like.
//!
//! Records hold rates, blocks and stays, not requests. So requests are drawn anew: as many as arrived, with the blocks
//! they took; and the replica is made so that they stay as long as the service law says they did. Prefill is part of the
//! stay, and prompts are told from completions by the recorded inter-token latency, where there is one.

use stoker_crds::contract::KV_BLOCK_TOKENS;
use stoker_scaling::{DecisionRecord, Line, Signals};
use stoker_workload::{HashIds, Request, Rng, Trace};
use thiserror::Error;

use crate::{
    model::ReplicaModel,
    world::{Mishaps, Router, World},
};

/// Records with fewer running say nothing about the blocks of a request, so that few do not speak for all.
const RUNNING_MIN: f64 = 1.0;

/// Why records are no trace.
#[derive(Debug, Error, PartialEq)]
pub enum RecordedError {
    /// Not enough of them.
    #[error("{0} records are no run: record for some minutes (`kubectl stoker explain NAME --watch --record FILE`)")]
    TooFew(usize),
    /// Out of order.
    #[error("record {idx} was made before the one above it: one file holds one deployment, oldest first")]
    Order {
        /// Its number, from 1.
        idx: usize,
    },
    /// Nothing was served.
    #[error("no record says how long a request stays: too few were served while it was recorded")]
    NoLoad,
    /// No engine said what its steps cost.
    #[error(
        "none of the {0} records says what a step costs (`signals.work.cost`): record while requests are served by engines that \
         report it, for some minutes (`kubectl stoker explain NAME --watch --record FILE`), or measure one with `stoker-bench curve`"
    )]
    NoCost(usize),
    /// What a record says is no replica.
    #[error("record {idx} is no replica: {error}, or leave the record out")]
    Replica {
        /// Its number, from 1.
        idx: usize,
        /// The field and what to change.
        error: String,
    },
}

/// The replicas of a deployment as the last record says that knows what their steps cost: their steps, KV blocks and start times.
/// What no record knows is as in [`ReplicaModel::default`].
pub fn recorded_replica(records: &[DecisionRecord]) -> Result<ReplicaModel, RecordedError> {
    let telling =
        records.iter().enumerate().rev().find_map(|(idx, record)| Some((idx + 1, record, record.signals.work?)));
    let (idx, record, work) = telling.ok_or(RecordedError::NoCost(records.len()))?;
    let Signals { blocks_per_replica, start_seconds, .. } = record.signals;
    let model = ReplicaModel {
        blocks: blocks_per_replica as u32,
        start_seconds,
        warm_start_seconds: warm_start_seconds(record),
        ..ReplicaModel::default()
    };
    let model = model.with_cost(&work.cost);
    model.error().map_or(Ok(model), |error| Err(RecordedError::Replica { idx, error }))
}

/// Makes a world of records of one deployment, oldest first.
pub fn recorded_world(name: &str, records: &[DecisionRecord], seed: u64) -> Result<World, RecordedError> {
    let [first, .., last] = records else { return Err(RecordedError::TooFew(records.len())) };
    if let Some(idx) = records.windows(2).position(|pair| pair[1].at_ms <= pair[0].at_ms) {
        return Err(RecordedError::Order { idx: idx + 2 });
    }
    let served = Served::of(records).ok_or(RecordedError::NoLoad)?;
    let mut rng = Rng::seeded(seed);
    let mut blocks = served.blocks_per_request;
    let mut requests = Vec::new();
    for pair in records.windows(2) {
        blocks = blocks_per_request(&pair[0]).unwrap_or(blocks);
        let seconds = |record: &DecisionRecord| (record.at_ms - first.at_ms) as f64 / 1000.0;
        let (begin, end, rate) = (seconds(&pair[0]), seconds(&pair[1]), pair[0].signals.arrivals.panic_rate);
        let mut at = begin + rng.exponential() / rate;
        while at < end {
            requests.push(served.request(at, blocks));
            at += rng.exponential() / rate;
        }
    }
    let seconds = (last.at_ms - first.at_ms) as f64 / 1000.0;
    Ok(World {
        trace: Trace { name: name.to_owned(), seconds, requests },
        replica: served.model(last),
        initial: first.signals.coverage.serving.max(1),
        router: Router::default(),
        mishaps: Mishaps::default(),
        standby: 0,
    })
}

/// What the records say about serving a request.
struct Served {
    law: Line,
    blocks_per_replica: f64,
    blocks_per_request: f64,
    completion_tokens: f64,
}

impl Served {
    fn of(records: &[DecisionRecord]) -> Option<Self> {
        let telling = records.iter().rev().find(|record| blocks_per_request(record).is_some())?;
        let law = telling.after.law.line()?;
        // One moment's mix would make every request of the run too long or too short.
        let sum = |of: fn(&DecisionRecord) -> f64| records.iter().map(of).sum::<f64>();
        let blocks_per_request =
            sum(|record| record.signals.panic.referenced) / sum(|record| record.signals.panic.running);
        let step_seconds = telling.signals.itl_p95_ms.map_or(ReplicaModel::default().step_seconds, |ms| ms / 1000.0);
        // A prompt has at least one block, and the completion is held by half on average.
        let most = 2.0 * (blocks_per_request - 1.0).max(0.5) * f64::from(KV_BLOCK_TOKENS);
        let completion_tokens = (law.alone / step_seconds).clamp(1.0, most);
        Some(Self {
            law,
            blocks_per_replica: telling.signals.blocks_per_replica,
            blocks_per_request,
            completion_tokens,
        })
    }

    fn request(&self, arrived: f64, blocks: f64) -> Request {
        let held = blocks * f64::from(KV_BLOCK_TOKENS);
        // Another mix keeps its shape: longer requests have longer prompts and longer completions.
        let completion = self.completion_tokens * blocks / self.blocks_per_request;
        let prompt = (held - completion / 2.0).max(1.0);
        Request {
            arrived,
            prompt_tokens: prompt as u32,
            cached_tokens: prompt as u32,
            completion_tokens: (completion as u32).max(1),
            hash_ids: HashIds::default(),
        }
    }

    /// A step takes `alone / completion tokens`, and longer with the KV it reads, as the law's line rises.
    fn model(&self, last: &DecisionRecord) -> ReplicaModel {
        let tokens = self.blocks_per_replica * f64::from(KV_BLOCK_TOKENS);
        ReplicaModel {
            step_seconds: self.law.alone / self.completion_tokens,
            sequence_seconds: 0.0,
            context_token_seconds: self.law.slope / self.completion_tokens / tokens,
            blocks: self.blocks_per_replica as u32,
            start_seconds: last.signals.start_seconds,
            warm_start_seconds: warm_start_seconds(last),
            ..ReplicaModel::default()
        }
    }
}

fn warm_start_seconds(record: &DecisionRecord) -> Option<f64> {
    record.signals.standby?.start_seconds
}

fn blocks_per_request(record: &DecisionRecord) -> Option<f64> {
    let flow = record.signals.panic;
    (flow.running >= RUNNING_MIN && flow.referenced > 0.0).then(|| flow.referenced / flow.running)
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use stoker_cost::StepCost;
    use stoker_scaling::ScalingSpec;

    use super::*;
    use crate::{Outcomes, Setting, Slo, named_world, run_ours};

    const SETTING: Setting =
        Setting { min: 1, max: 24, seed: 1, slo: Slo { ttft_seconds: 1.0, itl_seconds: 0.05, stall_seconds: 0.25 } };

    /// Twelve replicas all the time: what is compared is the load, and not what the rule makes of it.
    fn run(world: &World) -> (Outcomes, Vec<DecisionRecord>) {
        run_ours(world, &ScalingSpec::between(12, 12), &SETTING)
    }

    fn mean_kv(outcomes: &Outcomes) -> f64 {
        outcomes.samples.iter().map(|sample| sample.kv).sum::<f64>() / outcomes.samples.len() as f64
    }

    #[test]
    fn a_recorded_run_meets_the_same_load_again() {
        let original = named_world("ramp", 1).unwrap();
        let (before, records) = run(&original);
        let again = recorded_world("ramp", &records, 2).unwrap();
        let (after, _) = run(&again);
        let ratio = |after: f64, before: f64| after / before;
        // Two percent of 250,000 arrivals is forty times their chance; KV also carries the estimate of lengths.
        let requests = ratio(again.trace.requests.len() as f64, original.trace.requests.len() as f64);
        assert!((0.98..1.02).contains(&requests), "{requests}");
        let kv = ratio(mean_kv(&after), mean_kv(&before));
        assert!((0.8..1.25).contains(&kv), "{kv}");
    }

    /// A run of replicas that are three times as slow as usual and hold less.
    static SLOW_RUN: LazyLock<(ReplicaModel, Vec<DecisionRecord>)> = LazyLock::new(|| {
        let slow = ReplicaModel::default().times_as_fast(1.0 / 3.0);
        let replica = ReplicaModel { blocks: 20_000, start_seconds: 80.0, ..slow };
        let named = named_world("step", 1).unwrap();
        let (_, records) = run(&World { replica: replica.clone(), ..named });
        (replica, records)
    });

    #[test]
    fn a_deployment_writes_its_own_replica() {
        let (original, records) = &*SLOW_RUN;
        let found = recorded_replica(records).unwrap();
        // About as many as ran at once.
        for (sequences, context) in [(4, 4 * 640), (16, 16 * 640)] {
            let off = found.decode_seconds(sequences, context) / original.decode_seconds(sequences, context) - 1.0;
            assert!(off.abs() < 0.05, "{sequences}: off by {off}: {found:?}");
        }
        assert_eq!(found.blocks, original.blocks);
        assert_eq!(found.start_seconds, records.last().unwrap().signals.start_seconds);
    }

    #[test]
    fn a_record_that_is_no_replica_says_what_to_change() {
        let (_, records) = &*SLOW_RUN;
        let last = records.iter().rposition(|record| record.signals.work.is_some()).unwrap();
        let refusal = |change: &dyn Fn(&mut Signals)| {
            let mut records = records[..=last].to_vec();
            change(&mut records[last].signals);
            recorded_replica(&records).unwrap_err().to_string()
        };
        let cost =
            |change: fn(&mut StepCost)| refusal(&move |signals| change(&mut signals.work.as_mut().unwrap().cost));
        for (refusal, wanted) in [
            (cost(|cost| cost.step_seconds = 0.0), "stepSeconds is 0: use a number above 0"),
            (cost(|cost| cost.decode_seconds = -1.0), "sequenceSeconds is -1: use a number of at least 0"),
            (
                cost(|cost| cost.prefill_pair_seconds = f64::NAN),
                "prefillPairSeconds is NaN: use a number of at least 0",
            ),
            (refusal(&|signals| signals.blocks_per_replica = -5.0), "blocks is 0: use at least 1"),
            (
                refusal(&|signals| signals.start_seconds = f64::INFINITY),
                "startSeconds is inf: use a number of at least 0",
            ),
        ] {
            assert_eq!(refusal, format!("record {} is no replica: {wanted}, or leave the record out", last + 1));
        }
    }

    #[test]
    fn records_without_any_cost_say_where_to_get_one() {
        let mut records = SLOW_RUN.1.clone();
        records.iter_mut().for_each(|record| record.signals.work = None);
        assert_eq!(recorded_replica(&records), Err(RecordedError::NoCost(records.len())));
        assert!(recorded_replica(&[]).unwrap_err().to_string().contains("stoker-bench curve"));
    }

    #[test]
    fn what_is_no_run_says_why() {
        let (_, records) = run(&named_world("step", 1).unwrap());
        assert_eq!(recorded_world("x", &records[..1], 1), Err(RecordedError::TooFew(1)));
        let turned: Vec<_> = records[..3].iter().rev().cloned().collect();
        assert_eq!(recorded_world("x", &turned, 1), Err(RecordedError::Order { idx: 2 }));
        let mut idle = records[..3].to_vec();
        idle.iter_mut().for_each(|record| record.signals.panic.running = 0.0);
        assert_eq!(recorded_world("x", &idle, 1), Err(RecordedError::NoLoad));
    }
}
