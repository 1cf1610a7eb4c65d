//! Sessions whose prompts share beginnings, or do not, through the gateway and by others' rules before the same number of replicas.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::Result;
use clap::ValueEnum;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use stoker_figures::System;
use stoker_loadgen::prompt::words;
use stoker_sim::routing::{Cache, Prompt, RuleName};
use stoker_tests::{
    live::{Asker, Live},
    rival::{KV_BLOCKS, KV_TOKENS, Rival},
};
use tokio::task::JoinSet;

use crate::{Bench, percentile};

/// Those that are compared with ours.
const RIVALS: [RuleName; 6] = [
    RuleName::RoundRobin,
    RuleName::Random,
    RuleName::LeastRequests,
    RuleName::ConsistentHash,
    RuleName::LlmD,
    RuleName::Dynamo,
];
const METRICS: [&str; 5] = ["ttft_p50_ms", "ttft_p99_ms", "hits", "hits_of_oracle", "imbalance"];
/// Completion tokens of each answer.
const ANSWER_TOKENS: u32 = 8;

/// What is asked: as in the simulation, and a sixteenth as long, since ember reads 2,048 tokens.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Kind {
    /// Seven of ten requests begin with one of four instructions.
    Shared,
    /// Turns of people, each behind all before it.
    Chat,
    /// Agents that call again and again behind one of four long instructions and a task of their own.
    Agents,
    /// Nothing is shared.
    Unshared,
}

impl Kind {
    fn word(self) -> &'static str {
        match self {
            Self::Shared => "shared",
            Self::Chat => "chat",
            Self::Agents => "agents",
            Self::Unshared => "unshared",
        }
    }

    /// Sessions that begin in a second for each replica, at a pace of 1.
    fn rate(self) -> f64 {
        match self {
            Self::Shared | Self::Unshared => 5.0,
            Self::Chat => 0.8,
            Self::Agents => 0.6,
        }
    }

    fn session(self, random: &mut StdRng) -> Session {
        let instructions = |random: &mut StdRng| words(1 + random.random_range(0..4), 600);
        let own = |random: &mut StdRng, count| words(random.random(), count);
        let (begins, turns, turn_words) = match self {
            Self::Shared if random.random_bool(0.7) => (text(instructions(random).chain(own(random, 150))), 1, 15),
            Self::Shared | Self::Unshared => (text(own(random, 300)), 1, 15),
            Self::Chat => (text(own(random, 100)), random.random_range(4..12), 60),
            Self::Agents => (text(instructions(random).chain(own(random, 300))), random.random_range(6..16), 15),
        };
        Session { text: begins, turns, turn_words }
    }
}

fn text(words: impl Iterator<Item = &'static str>) -> String {
    words.collect::<Vec<_>>().join(" ")
}

impl Bench {
    /// Every kind of load by every rule, each beginning with empty caches.
    pub(crate) async fn routes(&mut self) -> Result<()> {
        for kind in self.args.kinds.clone() {
            let case = format!("live_{}_{}", kind.word(), self.args.replicas);
            for rule in [None].into_iter().chain(RIVALS.map(Some)) {
                let mut samples: [Vec<f64>; METRICS.len()] = Default::default();
                for time in 0..self.args.times {
                    let found = self.routed(kind, rule, time).await?;
                    samples.iter_mut().zip(found).for_each(|(samples, found)| samples.push(found));
                }
                let system = match rule {
                    None => System::stoker(),
                    Some(rule) => System { name: rule.word().to_owned(), version: "as documented".to_owned() },
                };
                for (metric, samples) in METRICS.iter().zip(&samples) {
                    self.note(&system, &case, metric, samples);
                }
            }
        }
        Ok(())
    }

    /// [`METRICS`] of one load by the gateway, or by a rule in its place.
    async fn routed(&self, kind: Kind, rule: Option<RuleName>, seed: u64) -> Result<[f64; METRICS.len()]> {
        let cache = KV_TOKENS.to_string();
        let live = Live::start(self.args.replicas, &self.agent_args(&["--kv-cache-tokens", &cache]), &[]).await?;
        let asker = match rule {
            None => Asker::new(live.gateway().base(), None)?,
            Some(rule) => Asker::by(Rival::start(rule, live.agents(), seed)?),
        };
        let busy = live.busy_seconds()?;
        let load = Sessions { kind, rate: kind.rate() * self.args.pace * self.args.replicas as f64, asker, seed };
        let Heard { waits, prompts } = load.run(Duration::from_secs(self.args.seconds)).await?;
        let busy: Vec<f64> = live.busy_seconds()?.iter().zip(busy).map(|(after, before)| after - before).collect();
        let [queried, hit] = live.looked_up().await?;
        let (hits, mean) = (hit / queried, busy.iter().sum::<f64>() / busy.len() as f64);
        let oracle = hits_of_one_cache(&prompts, KV_BLOCKS * self.args.replicas);
        Ok([
            1e3 * percentile(&waits, 0.5),
            1e3 * percentile(&waits, 0.99),
            hits,
            if oracle > 0.01 { hits / oracle } else { 1.0 },
            busy.iter().copied().fold(0.0, f64::max) / mean,
        ])
    }
}

/// What share of prompts one cache of all replicas' size would have had.
fn hits_of_one_cache(prompts: &[String], n_blocks: usize) -> f64 {
    let (mut cache, mut hits, mut blocks) = (Cache::of(n_blocks), 0, 0);
    for prompt in prompts {
        let prompt = Prompt::of_text(prompt.as_bytes());
        hits += cache.held(&prompt.blocks);
        blocks += prompt.blocks.len();
        cache.touch(&prompt.blocks);
    }
    hits as f64 / blocks as f64
}

struct Session {
    text: String,
    turns: u32,
    turn_words: usize,
}

/// What came of a load.
#[derive(Default)]
struct Heard {
    /// Seconds to each first token.
    waits: Vec<f64>,
    /// In the order in which they were sent.
    prompts: Vec<String>,
}

/// Sessions that begin when they begin.
struct Sessions {
    kind: Kind,
    /// In a second.
    rate: f64,
    asker: Asker,
    seed: u64,
}

impl Sessions {
    /// Begins sessions for so long, and waits for their ends.
    async fn run(self, begins_for: Duration) -> Result<Heard> {
        let mut random = StdRng::seed_from_u64(self.seed);
        let (begun, mut at, mut running) = (Instant::now(), Duration::ZERO, JoinSet::new());
        let heard = Arc::new(Mutex::new(Heard::default()));
        loop {
            at += Duration::from_secs_f64(exponential(&mut random) / self.rate);
            if at > begins_for {
                break;
            }
            let session = self.kind.session(&mut random);
            tokio::time::sleep_until((begun + at).into()).await;
            running.spawn(session.run(self.asker.clone(), Arc::clone(&heard), random.random()));
        }
        running.join_all().await.into_iter().collect::<Result<Vec<()>>>()?;
        Ok(std::mem::take(&mut *heard.lock().unwrap_or_else(PoisonError::into_inner)))
    }
}

impl Session {
    async fn run(mut self, asker: Asker, heard: Arc<Mutex<Heard>>, seed: u64) -> Result<()> {
        let mut random = StdRng::seed_from_u64(seed);
        for _ in 0..self.turns {
            self.text += &format!(" {}", text(words(random.random(), self.turn_words)));
            heard.lock().unwrap_or_else(PoisonError::into_inner).prompts.push(self.text.clone());
            let timed = asker.ask(self.text.clone(), ANSWER_TOKENS).await?;
            heard.lock().unwrap_or_else(PoisonError::into_inner).waits.push(timed.first_seconds);
            tokio::time::sleep(Duration::from_secs_f64(exponential(&mut random))).await;
        }
        Ok(())
    }
}

fn exponential(random: &mut StdRng) -> f64 {
    -random.random::<f64>().max(1e-12).ln()
}
