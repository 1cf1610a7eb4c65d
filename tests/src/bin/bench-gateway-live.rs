//! `bench-gateway-live`: what clients of real replicas see through the gateway. Agents with ember on this machine's cores: one is killed
//! under many streams; a tenant asks for ten times its share beside others; prompts that share beginnings, by the gateway and in turn.

use std::{
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use futures::future::{join_all, try_join_all};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use ring::digest::{SHA256, digest};
use stoker_figures::{self as figures, Figure, Key, Run, System};
use stoker_loadgen::prompt::words;
use stoker_tests::{
    live::{Asker, Live},
    resumes::{Case, Listened, cases},
};
use tokio::task::JoinSet;

/// Measures what clients of real replicas see through the gateway.
#[derive(Debug, Parser)]
struct Args {
    /// File that figures are appended to. Default: none is written.
    #[arg(long)]
    out: Option<PathBuf>,
    /// What is measured. Default: all of it.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Part::Kill, Part::Fairness, Part::Routes])]
    parts: Vec<Part>,
    /// Replicas.
    #[arg(long, default_value_t = 4)]
    replicas: usize,
    /// Streams under which one of them is killed.
    #[arg(long, default_value_t = 200)]
    streams: u64,
    /// Times that everything is done.
    #[arg(long, default_value_t = 5)]
    times: u64,
    /// Seconds of each load.
    #[arg(long, default_value_t = 40)]
    seconds: u64,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
enum Part {
    Kill,
    Fairness,
    Routes,
}

/// Completion tokens of a stream that is cut.
const STREAM_TOKENS: u32 = 200;
/// Streams have been on their way for so long when a replica is killed.
const BEFORE_THE_KILL: Duration = Duration::from_secs(2);

struct Bench {
    run: Run,
    args: Args,
    found: Vec<Figure>,
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    let mut bench = Bench { run: Run::start("make bench-gateway-live"), args, found: Vec::new() };
    for part in bench.args.parts.clone() {
        match part {
            Part::Kill => bench.kill().await?,
            Part::Fairness => bench.fairness().await?,
            Part::Routes => bench.routes().await?,
        }
    }
    match &bench.args.out {
        Some(out) => figures::append(out, &bench.found),
        None => Ok(()),
    }
}

impl Bench {
    fn note(&mut self, system: &System, case: &str, metric: &str, samples: &[f64]) {
        let figure = self.run.figure_of(system, Key { model: "ember", dtype: "bf16", case, metric }, samples);
        println!("{case} {}: {metric} {:.3} ({:.3} to {:.3})", system.name, figure.value, figure.min, figure.max);
        self.found.push(figure);
    }

    /// One replica is killed under streams of all: what comes to clients, and how long they wait for it.
    async fn kill(&mut self) -> Result<()> {
        let case = format!("gateway_kill_{}", self.args.streams);
        let mut samples: [Vec<f64>; 5] = Default::default();
        for time in 0..self.args.times {
            let struck = Struck::by_a_kill(&self.args, time).await?;
            let gaps = &struck.gaps_ms;
            ensure!(!gaps.is_empty(), "nobody was on the replica that was killed");
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

    /// A tenant that asks for half of its share, beside eight that ask for theirs and one that asks for one share, then for ten.
    async fn fairness(&mut self) -> Result<()> {
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("tenants.yaml");
        std::fs::write(&file, tenants())?;
        let agent_args = ["--max-num-seqs", "8"];
        let live = Live::start(1, &agent_args, &["--tenants", &file.display().to_string()]).await?;
        let capacity = capacity(&live).await?;
        println!("one replica answers {capacity:.1} requests a second");
        let (mut fair, mut beside) = (Vec::new(), Vec::new());
        for time in 0..self.args.times {
            for (greed, all) in [(1.0, &mut fair), (10.0, &mut beside)] {
                let shares = Shares { share: 0.1 * capacity, greed, seconds: self.args.seconds as f64, seed: time };
                all.push(1e3 * shares.modest_p95(&live).await?);
            }
        }
        let ratios: Vec<f64> = fair.iter().zip(&beside).map(|(fair, beside)| beside / fair).collect();
        for (metric, samples) in [("ttft_p95_ms_at_share", &fair), ("ttft_p95_ms_at_ten", &beside), ("ratio", &ratios)]
        {
            self.note(&System::stoker(), "gateway_fairness", metric, samples);
        }
        Ok(())
    }

    /// Sessions that share beginnings, through the gateway and to the same number of replicas in turn.
    async fn routes(&mut self) -> Result<()> {
        for (name, through) in [("stoker", true), ("round robin", false)] {
            let system = System { name: name.to_owned(), version: env!("CARGO_PKG_VERSION").to_owned() };
            let mut samples: [Vec<f64>; 3] = Default::default();
            for time in 0..self.args.times {
                // Caches are as empty for one as for the other.
                let live = Live::start(self.args.replicas, &["--kv-cache-tokens", "16384"], &[]).await?;
                let bases: Vec<&str> = match through {
                    true => vec![live.gateway().base()],
                    false => live.agents().iter().map(|agent| agent.base()).collect(),
                };
                let asker = Asker::new(&bases, None)?;
                let waits = sessions(&asker, self.args.replicas, self.args.seconds as f64, time).await?;
                let [queried, hit] = live.looked_up().await?;
                let found = [1e3 * percentile(&waits, 0.5), 1e3 * percentile(&waits, 0.99), hit / queried];
                samples.iter_mut().zip(found).for_each(|(samples, found)| samples.push(found));
            }
            for (metric, samples) in ["ttft_p50_ms", "ttft_p99_ms", "hits"].iter().zip(&samples) {
                self.note(&system, &format!("live_agents_{}", self.args.replicas), metric, samples);
            }
        }
        Ok(())
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

impl Struck {
    async fn by_a_kill(args: &Args, time: u64) -> Result<Self> {
        let live = Live::start(args.replicas, &[], &[]).await?;
        let seeds = time * args.streams..(time + 1) * args.streams;
        let asked: Vec<Case> = seeds.map(sampled).collect::<Result<_>>()?;
        let bases: Vec<String> = live.agents().iter().map(|agent| agent.base().to_owned()).collect();
        let alone = asked.iter().zip(bases.iter().cycle()).map(|(case, base)| case.ask(base, || {}));
        let expected = try_join_all(alone).await?;
        let (base, n_begun) = (live.gateway().base().to_owned(), Arc::new(AtomicUsize::new(0)));
        let streams = asked.iter().map(|case| tokio::spawn(stream(case.clone(), base.clone(), Arc::clone(&n_begun))));
        let streams: Vec<_> = streams.collect();
        while n_begun.load(Ordering::Relaxed) < asked.len() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        tokio::time::sleep(BEFORE_THE_KILL).await;
        let killed = Instant::now();
        live.agents()[0].signal("KILL")?;
        let mut struck = Self { n_errors: 0, n_different: 0, gaps_ms: Vec::new(), others_ms: Vec::new() };
        for (stream, expected) in join_all(streams).await.into_iter().zip(&expected) {
            let Stream { heard, came } = stream?;
            let Ok(Listened { said, pod }) = heard.inspect_err(|error| println!("{error:#}")) else {
                struck.n_errors += 1;
                continue;
            };
            struck.n_different += usize::from(&said != expected);
            let Some(gap_ms) = gap_ms(&came, killed) else { continue };
            let gaps = if pod.as_deref() == Some("pod-0") { &mut struck.gaps_ms } else { &mut struck.others_ms };
            gaps.push(gap_ms);
        }
        Ok(struck)
    }
}

/// A request whose text follows from its seed alone.
fn sampled(seed: u64) -> Result<Case> {
    let all = cases(seed, STREAM_TOKENS);
    all.into_iter().find(|case| case.name == "sampled").context("there is a case with sampling")
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

const TENANTS: usize = 10;
/// Tokens of each prompt of theirs, about, and of each answer.
const PROMPT_WORDS: usize = 120;
const ANSWER_TOKENS: u32 = 64;

fn key(tenant: usize) -> String {
    format!("key-of-tenant-{tenant}")
}

fn tenants() -> String {
    let hash =
        |tenant| digest(&SHA256, key(tenant).as_bytes()).as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    let line = |tenant| {
        let hash: String = hash(tenant);
        format!("- {{name: tenant-{tenant}, keys: ['sha256:{hash}']}}\n")
    };
    format!("tenants:\n{}", (0..TENANTS).map(line).collect::<String>())
}

fn prompt(number: u64) -> String {
    words(number, PROMPT_WORDS).collect::<Vec<_>>().join(" ")
}

/// Requests a second that are answered where there are always more.
async fn capacity(live: &Live) -> Result<f64> {
    const CLIENTS: u64 = 32;
    const SECONDS: f64 = 15.0;
    let asker = Asker::new(&[live.gateway().base()], Some(&key(0)))?;
    let (begun, mut clients) = (Instant::now(), JoinSet::new());
    for client in 0..CLIENTS {
        let asker = asker.clone();
        clients.spawn(async move {
            let mut n_answered = 0;
            while begun.elapsed().as_secs_f64() < SECONDS {
                asker.ask(prompt((client << 32) + n_answered), ANSWER_TOKENS).await?;
                n_answered += 1;
            }
            anyhow::Ok(n_answered)
        });
    }
    let answered = clients.join_all().await.into_iter().sum::<Result<u64>>()?;
    Ok(answered as f64 / begun.elapsed().as_secs_f64())
}

/// What tenants ask for.
struct Shares {
    /// Requests a second that are a tenth of what the replica answers.
    share: f64,
    /// Shares that the last tenant asks for.
    greed: f64,
    seconds: f64,
    seed: u64,
}

impl Shares {
    /// Seconds to the first token of the first tenant, who asks for half of its share.
    async fn modest_p95(&self, live: &Live) -> Result<f64> {
        let mut tenants = Vec::new();
        for tenant in 0..TENANTS {
            let asker = Asker::new(&[live.gateway().base()], Some(&key(tenant)))?;
            let part = match tenant {
                0 => 0.5,
                tenant if tenant == TENANTS - 1 => self.greed,
                _ => 1.0,
            };
            let (rate, seconds, seed) = (self.share * part, self.seconds, self.seed * 100 + tenant as u64);
            tenants.push(tokio::spawn(open_loop(asker, rate, seconds, seed)));
        }
        let mut waits = Vec::new();
        for tenant in tenants {
            waits.push(tenant.await?);
        }
        let refused: Vec<usize> = waits.iter().map(|(_, n_refused)| *n_refused).collect();
        println!(
            "greed {}: answered {:?}, refused {refused:?}",
            self.greed,
            waits.iter().map(|(waits, _)| waits.len()).collect::<Vec<_>>()
        );
        ensure!(refused[0] == 0, "{} of the modest tenant's requests were refused", refused[0]);
        Ok(percentile(&waits[0].0, 0.95))
    }
}

/// Requests that come when they come; how long each waited, and how many were refused.
async fn open_loop(asker: Asker, rate: f64, seconds: f64, seed: u64) -> (Vec<f64>, usize) {
    let mut random = StdRng::seed_from_u64(seed);
    let (begun, mut at, mut asked) = (Instant::now(), 0.0, JoinSet::new());
    loop {
        at += -random.random::<f64>().max(1e-12).ln() / rate;
        if at > seconds {
            break;
        }
        tokio::time::sleep_until((begun + Duration::from_secs_f64(at)).into()).await;
        let (asker, number) = (asker.clone(), random.random());
        asked.spawn(async move { asker.ask(prompt(number), ANSWER_TOKENS).await });
    }
    let answers = asked.join_all().await;
    let waits: Vec<f64> = answers.iter().flatten().map(|timed| timed.first_seconds).collect();
    let n_refused = answers.len() - waits.len();
    (waits, n_refused)
}

/// Agents that call again and again behind long instructions, as in the simulation and a sixteenth as long: ember reads 2,048 tokens.
struct Session {
    text: String,
    turns: u32,
}

/// Of this many words, in four kinds.
const KIND_WORDS: usize = 600;
const TASK_WORDS: usize = 300;
const TURN_WORDS: usize = 15;
/// Sessions that begin in a second for each replica.
const SESSIONS: f64 = 0.6;

/// Runs sessions to their end; seconds to each first token.
async fn sessions(asker: &Asker, n_replicas: usize, seconds: f64, seed: u64) -> Result<Vec<f64>> {
    let mut random = StdRng::seed_from_u64(seed);
    let rate = SESSIONS * n_replicas as f64;
    let (begun, mut at, mut running) = (Instant::now(), 0.0, JoinSet::new());
    let waits = Arc::new(Mutex::new(Vec::new()));
    loop {
        at += -random.random::<f64>().max(1e-12).ln() / rate;
        if at > seconds {
            break;
        }
        let kind = words(1 + random.random_range(0..4), KIND_WORDS);
        let text = kind.chain(words(random.random(), TASK_WORDS)).collect::<Vec<_>>().join(" ");
        let session = Session { text, turns: random.random_range(6..16) };
        tokio::time::sleep_until((begun + Duration::from_secs_f64(at)).into()).await;
        running.spawn(session.run(asker.clone(), Arc::clone(&waits), random.random()));
    }
    running.join_all().await.into_iter().collect::<Result<Vec<()>>>()?;
    let waits = std::mem::take(&mut *waits.lock().expect("nobody panics with it"));
    Ok(waits)
}

impl Session {
    async fn run(mut self, asker: Asker, waits: Arc<Mutex<Vec<f64>>>, seed: u64) -> Result<()> {
        let mut random = StdRng::seed_from_u64(seed);
        for _ in 0..self.turns {
            self.text += &format!(" {}", words(random.random(), TURN_WORDS).collect::<Vec<_>>().join(" "));
            let timed = asker.ask(self.text.clone(), 8).await?;
            waits.lock().expect("nobody panics with it").push(timed.first_seconds);
            tokio::time::sleep(Duration::from_secs_f64(-random.random::<f64>().max(1e-12).ln())).await;
        }
        Ok(())
    }
}

fn percentile(samples: &[f64], share: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[((sorted.len() - 1) as f64 * share).round() as usize]
}
