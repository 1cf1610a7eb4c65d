//! One of several replicas is killed, or stands still, under many streams.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use futures::future::{join_all, try_join_all};
use stoker_figures::System;
use stoker_tests::{
    live::Live,
    resumes::{Case, Listened, cases},
};

use crate::{Bench, percentile};

/// Streams have been on their way for so long when a replica is lost.
const BEFORE_THE_LOSS: Duration = Duration::from_secs(2);

/// How a replica is lost.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Loss {
    /// SIGKILL.
    Killed,
    /// SIGSTOP: its connections stay, and nothing comes.
    Frozen,
}

impl Loss {
    fn word(self) -> &'static str {
        match self {
            Self::Killed => "kill",
            Self::Frozen => "freeze",
        }
    }

    /// Without SIG.
    fn signal(self) -> &'static str {
        match self {
            Self::Killed => "KILL",
            Self::Frozen => "STOP",
        }
    }
}

impl Bench {
    /// One replica is lost under streams of all: what comes to clients, and how long they wait for it.
    pub(crate) async fn lose(&mut self, loss: Loss) -> Result<()> {
        let case = format!("gateway_{}_{}", loss.word(), self.args.streams);
        let mut samples: [Vec<f64>; 5] = Default::default();
        for time in 0..self.args.times {
            let struck = self.strike(loss, time).await?;
            let gaps = &struck.gaps_ms;
            ensure!(!gaps.is_empty(), "nobody was on the replica that was lost");
            let found =
                [struck.n_errors as f64, struck.n_different as f64, percentile(gaps, 0.5), percentile(gaps, 0.99)];
            samples.iter_mut().zip(found).for_each(|(samples, found)| samples.push(found));
            samples[4].push(percentile(&struck.others_ms, 0.99));
        }
        let metrics = ["client_errors", "different", "gap_p50_ms", "gap_p99_ms", "others_gap_p99_ms"];
        for (metric, samples) in metrics.iter().zip(&samples) {
            self.note(&System::stoker(), &case, metric, samples);
        }
        Ok(())
    }

    async fn strike(&self, loss: Loss, time: u64) -> Result<Struck> {
        let live = Live::start(self.args.replicas, &self.agent_args(&[]), &[]).await?;
        let seeds = time * self.args.streams..(time + 1) * self.args.streams;
        let asked: Vec<Case> = seeds.map(|seed| telling(seed, self.args.stream_tokens)).collect::<Result<_>>()?;
        let bases: Vec<String> = live.agents().iter().map(|agent| agent.base().to_owned()).collect();
        let alone = asked.iter().zip(bases.iter().cycle()).map(|(case, base)| case.ask(base, || {}));
        let expected = try_join_all(alone).await?;
        let (base, n_begun) = (live.gateway().base().to_owned(), Arc::new(AtomicUsize::new(0)));
        let streams = asked.iter().map(|case| tokio::spawn(stream(case.clone(), base.clone(), Arc::clone(&n_begun))));
        let streams: Vec<_> = streams.collect();
        while n_begun.load(Ordering::Relaxed) < asked.len() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        tokio::time::sleep(BEFORE_THE_LOSS).await;
        let lost = Instant::now();
        live.agents()[0].signal(loss.signal())?;
        let mut struck = Struck { n_errors: 0, n_different: 0, gaps_ms: Vec::new(), others_ms: Vec::new() };
        for (stream, expected) in join_all(streams).await.into_iter().zip(&expected) {
            let Stream { heard, came } = stream?;
            let Ok(Listened { said, pod }) = heard.inspect_err(|error| println!("{error:#}")) else {
                struck.n_errors += 1;
                continue;
            };
            struck.n_different += usize::from(&said != expected);
            let Some(gap_ms) = gap_ms(&came, lost) else { continue };
            let gaps = if pod.as_deref() == Some("pod-0") { &mut struck.gaps_ms } else { &mut struck.others_ms };
            gaps.push(gap_ms);
        }
        Ok(struck)
    }
}

/// What came of streams of which one replica's lost it.
struct Struck {
    n_errors: usize,
    n_different: usize,
    /// The longest that each stream that was on it said nothing from then on.
    gaps_ms: Vec<f64>,
    /// The same of all others, which share the cores and the replicas that are left.
    others_ms: Vec<f64>,
}

/// A stream as its client saw it.
struct Stream {
    heard: Result<Listened>,
    came: Vec<Instant>,
}

/// A request whose answer follows from its seed alone, and says each token as it comes: text waits for tokens behind it, and of some there is none.
fn telling(seed: u64, tokens: u32) -> Result<Case> {
    let all = cases(seed, tokens);
    all.into_iter().find(|case| case.name == "log-probabilities").context("there is a case that tells each token")
}

async fn stream(case: Case, base: String, n_begun: Arc<AtomicUsize>) -> Stream {
    let mut came = Vec::new();
    let heard = case.listen(&base, || {
        if came.is_empty() {
            n_begun.fetch_add(1, Ordering::Relaxed);
        }
        came.push(Instant::now());
    });
    Stream { heard: heard.await, came }
}

/// The longest pause that ended after a moment; `None` if the stream had ended by then. What was on its way comes at once, so the first one is
/// none of a loss.
fn gap_ms(came: &[Instant], at: Instant) -> Option<f64> {
    let pauses = came.windows(2).filter(|pair| pair[1] > at).map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1e3);
    pauses.max_by(f64::total_cmp)
}
