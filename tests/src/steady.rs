//! Constant load on real agents under the real operator: how many replicas it takes, how many there were each minute, and whether
//! a roll in the middle changes the number.
//!
//! Owns the run of one rate and what was seen. The rates follow from what the engine of this machine says its steps cost, so that the
//! same loads need the same replicas anywhere. Decides nothing and writes no figures.

use std::{
    collections::BTreeSet,
    process::{Child, Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use stoker_cluster::Audit;
use stoker_scaling::{DecisionRecord, Regime, WorkTerm};

use crate::{
    agent,
    operator::{Rig, revision_of, serves},
    process,
};

const IMAGE: &str = "real/agent:1";
const NAME: &str = "steady";
const SOON: Duration = Duration::from_secs(180);
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// A replica is full with two requests, so that blocks run out long before the cores of a small machine: replicas that share cores
/// would make each other slower, and more of them would be no answer.
const KV_CACHE_TOKENS: u32 = 384;
const PROMPT_TOKENS: u32 = 64;
const COMPLETION_TOKENS: u32 = 128;
/// An answer is late whose first token takes longer, or whose others do on average.
const TTFT_MS: u32 = 1000;
const ITL_MS: u32 = 50;
/// Load while costs are learned, requests a second for so many seconds.
const LEARNING: (f64, u32) = (1.0, 60);

/// Constant load of one rate.
#[derive(Clone, Copy, Debug)]
pub struct Constant {
    /// Requests a second.
    pub rate: f64,
    /// Minutes, with a roll when half of them are over.
    pub minutes: u32,
    /// Of arrivals and prompts.
    pub seed: u64,
}

/// What was seen of one rate.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Replicas that the load takes by the costs learned last, spare ones not counted.
    pub needed: u32,
    /// Replicas wanted at the end of each minute.
    pub wanted: Vec<u32>,
    /// Replicas that served then.
    pub serving: Vec<usize>,
    /// See [`Changes`].
    pub changes: Changes,
    /// Requests that were planned, and those without a whole answer in time.
    pub planned: usize,
    /// See `planned`.
    pub late: usize,
}

/// How often another number was wanted than just before.
#[derive(Clone, Copy, Debug, Default)]
pub struct Changes {
    /// In the second half of the time before the roll.
    pub settled: usize,
    /// Since the roll.
    pub since_roll: usize,
}

/// A cluster whose node has the real agent.
pub struct Bench {
    rig: Rig,
}

impl Bench {
    /// Starts everything.
    pub fn start() -> Result<Self> {
        let rig = Rig::start(Audit::Off)?;
        rig.cluster.node.add_image(IMAGE, agent::binary()?);
        Ok(Self { rig })
    }

    /// Requests a second of which so many are in flight in the mean, at the pace of a replica that is hardly used.
    pub fn rates(&self, in_flight: &[f64]) -> Result<Vec<f64>> {
        self.start_replica()?;
        let (rate, seconds) = LEARNING;
        load(&self.url()?, rate, seconds, 0)?.wait_with_output()?;
        let records = self.rig.operator.records(NAME, 0)?;
        let work = records.iter().rev().find_map(|record| record.signals.work);
        let work = work.context("after a minute of load the agent does not say what its steps cost")?;
        self.remove()?;
        let stay = work.answer_tokens * work.cost.step_seconds;
        Ok(in_flight.iter().map(|in_flight| in_flight / stay).collect())
    }

    /// Constant load on a new deployment.
    pub fn run(&self, constant: Constant) -> Result<Seen> {
        self.start_replica()?;
        let seconds = constant.minutes * 60;
        let load = load(&self.url()?, constant.rate, seconds, constant.seed)?;
        let seen = self.watch(constant.minutes);
        let (planned, late) = told(load)?;
        self.remove()?;
        Ok(Seen { planned, late, ..seen? })
    }

    /// Looks until the time is over; rolls when half of it is.
    fn watch(&self, minutes: u32) -> Result<Seen> {
        let (begun, minute) = (Instant::now(), Duration::from_secs(60));
        let (mut seen, mut revisions) = (Seen::default(), BTreeSet::new());
        let mut records: Vec<DecisionRecord> = Vec::new();
        let mut rolled_ms = None;
        for ended in 1..=minutes {
            while begun.elapsed() < minute * ended {
                if rolled_ms.is_none() && begun.elapsed() >= minute * minutes / 2 {
                    rolled_ms = records.last().map(|record| record.at_ms);
                    self.deploy(1)?;
                }
                let pods = self.rig.pods(NAME)?;
                revisions.extend(pods.iter().filter(|pod| serves(pod)).map(revision_of));
                let after_ms = records.last().map_or(0, |record| record.at_ms);
                records.extend(self.rig.operator.records(NAME, after_ms)?);
                sleep(LOOK_EVERY);
            }
            let last = records.last().context("nothing was decided within a minute")?;
            seen.wanted.push(last.decision.desired);
            seen.serving.push(self.rig.pods(NAME)?.iter().filter(|pod| serves(pod)).count());
            println!(
                "  minute {ended}: {} wanted, {} serve",
                last.decision.desired,
                seen.serving[seen.serving.len() - 1]
            );
        }
        seen.needed = needed(&records).context("the agents never said what their steps cost")?;
        seen.changes = changes(&records, rolled_ms.context("nothing was decided before the roll")?);
        ensure!(revisions.len() == 2, "the roll was not seen to end: {} revisions served", revisions.len());
        Ok(seen)
    }

    fn start_replica(&self) -> Result<()> {
        self.deploy(0)?;
        self.rig.wait_ready(NAME, SOON)?;
        Ok(())
    }

    /// Everything about scaling is as in an object that says nothing of it but `max`.
    fn deploy(&self, roll: u32) -> Result<()> {
        let spec: Value = json!({
            "model": {"source": "builtin://ember"},
            "pod": {"image": IMAGE, "env": [{"name": "ROLL", "value": roll.to_string()}]},
            "engine": {"maxModelLen": KV_CACHE_TOKENS, "kvCacheTokens": KV_CACHE_TOKENS, "threads": 1},
            "drain": {"withdrawSeconds": 3, "deadlineSeconds": 60},
            "scaling": {"max": 6},
        });
        self.rig.apply(NAME, spec)
    }

    fn remove(&self) -> Result<()> {
        self.rig.delete(NAME)?;
        self.rig.wait("all are gone", SOON, |rig| Ok(rig.children(NAME)? == 0))?;
        Ok(())
    }

    fn url(&self) -> Result<String> {
        let address =
            self.rig.service(NAME)?.spec.and_then(|spec| spec.cluster_ip).context("a Service without address")?;
        Ok(format!("http://{address}:8000"))
    }
}

/// Replicas for the mean of what came lately and its chance, as the last decision that knew costs reckoned.
fn needed(records: &[DecisionRecord]) -> Option<u32> {
    let term =
        records.iter().rev().find_map(|record| WorkTerm::of(&record.signals, &record.spec, Regime::AfterJump))?;
    Some(term.busy_replicas().max(term.holding_replicas()).ceil() as u32)
}

fn changes(records: &[DecisionRecord], rolled_ms: u64) -> Changes {
    let begun_ms = records.first().map_or(rolled_ms, |record| record.at_ms);
    let changed = records.iter().filter(|record| record.decision.desired != record.decision.previous);
    let at_ms: Vec<u64> = changed.map(|record| record.at_ms).collect();
    let within = |from_ms, to_ms| at_ms.iter().filter(|at_ms| (from_ms..to_ms).contains(*at_ms)).count();
    Changes { settled: within(begun_ms.midpoint(rolled_ms), rolled_ms), since_roll: within(rolled_ms, u64::MAX) }
}

fn load(url: &str, rate: f64, seconds: u32, seed: u64) -> Result<Child> {
    let mut command = Command::new(process::binary("stoker-load")?);
    command.args(["--url", url, "--model", NAME, "--json", "--ignore-eos", "--seed", &seed.to_string()]);
    command.args(["--step", &format!("{seconds}s:{rate}")]);
    command.args(["--prompt-tokens", &PROMPT_TOKENS.to_string(), "--max-tokens", &COMPLETION_TOKENS.to_string()]);
    command.args(["--slo", &format!("ttft={TTFT_MS}ms,itl={ITL_MS}ms")]);
    command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().context("start stoker-load")
}

/// Planned requests, and those without a whole answer in time, by the summary of `stoker-load`.
fn told(load: Child) -> Result<(usize, usize)> {
    let output = load.wait_with_output()?;
    ensure!(output.status.success(), "stoker-load answered nothing");
    let summary: Value = serde_json::from_slice(&output.stdout).context("read the summary of stoker-load")?;
    let count = |at: &str| summary.pointer(at).and_then(Value::as_u64).with_context(|| format!("no {at} in {summary}"));
    let (planned, good) = (count("/planned")?, count("/goodput/0/count")?);
    Ok((usize::try_from(planned)?, usize::try_from(planned - good)?))
}
