//! `bench-gateway`: what a gateway costs. A real `stoker-gateway` before replicas that compute nothing: how long it adds to requests and to
//! events on their way, beside the same load without it, in turn; the processor time that it takes for that, for long prompts and for
//! nothing; the memory of streams that stand still.

use std::{
    net::SocketAddr,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use clap::Parser;
use futures::future::try_join_all;
use serde_json::json;
use stoker_crds::{
    contract::LoadReport,
    endpoints::{EndpointState, ReplicaEndpoint},
};
use stoker_figures::{self as figures, Figure, Key, Run, System};
use stoker_tests::{
    gateway::{GatewayProcess, Teller, deployment},
    haproxy::{self, Haproxy, Mode},
    picker::{Destination, Picker, Request},
    transit::{Load, Pace, PacedReplica, Transit, silent_streams},
};
use tokio::task::JoinSet;

/// Measures the gateway on this machine.
#[derive(Debug, Parser)]
struct Args {
    /// File that figures are appended to. Default: none is written.
    #[arg(long)]
    out: Option<PathBuf>,
    /// What is measured. Default: all of it.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Part::ALL)]
    parts: Vec<Part>,
    /// Replicas that answer.
    #[arg(long, default_value_t = 8)]
    replicas: usize,
    /// Requests a second of 200 tokens in and 100 out.
    #[arg(long, default_value_t = 500.0)]
    rate: f64,
    /// Between two tokens of an answer.
    #[arg(long, default_value_t = 10)]
    gap_ms: u64,
    /// Times that the load is sent, without the gateway and through it.
    #[arg(long, default_value_t = 5)]
    pairs: usize,
    /// Seconds of each.
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Streams that stand still.
    #[arg(long, default_value_t = 10_000)]
    streams: usize,
}

/// What is measured.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Part {
    Chat,
    Picks,
    LongPrompts,
    Idle,
    Silent,
}

impl Part {
    const ALL: [Self; 5] = [Self::Chat, Self::Picks, Self::LongPrompts, Self::Idle, Self::Silent];
}

/// A token is about four bytes.
const TOKEN: &str = "abc ";
/// Requests a second of a hundred thousand tokens.
const LONG_RATE: f64 = 20.0;
/// Replicas that nobody asks for anything.
const IDLE: usize = 100;
/// The operator reads agents this often.
const READ_EVERY: Duration = Duration::from_secs(2);

/// A gateway and the replicas behind it.
struct Bench {
    run: Run,
    args: Args,
    replicas: Vec<PacedReplica>,
    teller: Teller,
    gateway: GatewayProcess,
    found: Vec<Figure>,
}

#[tokio::main]
async fn main() -> Result<()> {
    let mut bench = Bench::start(Args::parse()).await?;
    for part in bench.args.parts.clone() {
        match part {
            Part::Chat => bench.chat().await?,
            Part::Picks => bench.picks().await?,
            Part::LongPrompts => bench.long_prompts().await?,
            Part::Idle => bench.idle().await?,
            Part::Silent => bench.silent().await?,
        }
    }
    match &bench.args.out {
        Some(out) => figures::append(out, &bench.found),
        None => Ok(()),
    }
}

impl Bench {
    async fn start(args: Args) -> Result<Self> {
        let replicas = try_join_all((0..args.replicas).map(|_| PacedReplica::start())).await?;
        let teller = Teller::start().await?;
        let gateway = GatewayProcess::start(teller.url(), &[])?;
        let bench = Self { run: Run::start("make bench-gateway"), args, replicas, teller, gateway, found: Vec::new() };
        bench.tell(bench.endpoints()).await?;
        Ok(bench)
    }

    fn endpoints(&self) -> Vec<ReplicaEndpoint> {
        self.replicas.iter().enumerate().map(|(at, replica)| replica.endpoint(&format!("pod-{at}"))).collect()
    }

    async fn tell(&self, replicas: Vec<ReplicaEndpoint>) -> Result<()> {
        let count = replicas.len();
        self.teller.tell(vec![deployment("chat", &["chat"], replicas)]);
        self.gateway.knows("chat", EndpointState::Serving, count).await
    }

    fn note(&mut self, case: &str, metric: &str, samples: &[f64]) {
        self.note_of(&System::stoker(), case, metric, samples);
    }

    fn note_of(&mut self, system: &System, case: &str, metric: &str, samples: &[f64]) {
        let figure = self.run.figure_of(system, Key { model: "none", dtype: "none", case, metric }, samples);
        let (Figure { value, min, max, .. }, System { name, .. }) = (&figure, system);
        println!("{case} {metric} {name} {value:.3} ({min:.3} to {max:.3})");
        self.found.push(figure);
    }

    /// 200 tokens in and 100 out.
    fn chats(&self) -> Load {
        Load {
            to: self.replicas.iter().map(PacedReplica::address).collect(),
            rate: self.args.rate,
            time: Duration::from_secs(self.args.seconds),
            pace: Pace { n_tokens: 100, gap: Duration::from_millis(self.args.gap_ms) },
            prompts: (0..64).map(|number| format!("{number:03} {}", TOKEN.repeat(199))).collect(),
        }
    }

    /// The load without a proxy, through the gateway and, if it is installed, through HAProxy, in turn.
    async fn chat(&mut self) -> Result<()> {
        let load = self.chats();
        let beside = haproxies(&load.to)?;
        let mut ways = vec![(System::stoker(), Proxy::Ours(&self.gateway), Pairs::default())];
        ways.extend(beside.iter().map(|(system, haproxy)| (system.clone(), Proxy::Other(haproxy), Pairs::default())));
        let warm = Load { time: Duration::from_secs(2), ..load.clone() };
        warm.run().await;
        for (_, proxy, _) in &ways {
            Load { to: vec![proxy.address()?], ..warm.clone() }.run().await;
        }
        for _ in 0..self.args.pairs {
            let without = whole(load.run().await)?;
            for (_, proxy, pairs) in &mut ways {
                let through = Load { to: vec![proxy.address()?], ..load.clone() };
                let (begun, before) = (Instant::now(), proxy.busy_seconds()?);
                let with = whole(through.run().await)?;
                pairs.cores.push((proxy.busy_seconds()? - before) / begun.elapsed().as_secs_f64());
                pairs.add(&with, &without);
            }
        }
        let found: Vec<(System, Pairs)> = ways.into_iter().map(|(system, _, pairs)| (system, pairs)).collect();
        found.iter().for_each(|(system, pairs)| self.note_pairs(system, pairs));
        Ok(())
    }

    fn note_pairs(&mut self, system: &System, pairs: &Pairs) {
        let case = format!("gateway_{:.0}", self.args.rate);
        self.note_of(system, &case, "cores", &pairs.cores);
        let metrics = ["added_p50_ms", "added_p95_ms", "added_event_p50_ms", "added_event_p95_ms"];
        for (metric, samples) in metrics.iter().zip(&pairs.added_ms) {
            self.note_of(system, &case, metric, samples);
        }
    }

    /// Prompts of a hundred thousand tokens, each another.
    async fn long_prompts(&mut self) -> Result<()> {
        let load = Load {
            to: vec![self.gateway.address()?],
            rate: LONG_RATE,
            time: Duration::from_secs(self.args.seconds),
            pace: Pace { n_tokens: 10, gap: Duration::from_millis(10) },
            prompts: (0..16).map(|number| format!("{number:03} {}", TOKEN.repeat(99_999))).collect(),
        };
        let mut cores = Vec::new();
        for _ in 0..self.args.pairs {
            let (transit, busy) = self.busy(load.run()).await?;
            whole(transit)?;
            cores.push(busy);
        }
        self.note("gateway_100k_20", "cores", &cores);
        Ok(())
    }

    /// How long a proxy waits until it is told where a request goes, at the rate and with the prompts of a chat.
    async fn picks(&mut self) -> Result<()> {
        let gateway = GatewayProcess::start(self.teller.url(), &["--endpoint-picker"])?;
        gateway.knows("chat", EndpointState::Serving, self.replicas.len()).await?;
        let picker = Picker::at(&gateway.address()?.to_string())?;
        let prompts: Vec<String> = (0..64).map(|number| format!("{number:03} {}", TOKEN.repeat(199))).collect();
        let bodies = prompts.iter().map(|prompt| json!({"model": "chat", "prompt": prompt}).to_string());
        let bodies: Vec<String> = bodies.collect();
        let (mut cores, mut waits) = (Vec::new(), [Vec::new(), Vec::new()]);
        picks(&picker, &bodies, self.args.rate, Duration::from_secs(2)).await?;
        for _ in 0..self.args.pairs {
            let (begun, before) = (Instant::now(), gateway.busy_seconds()?);
            let waited = picks(&picker, &bodies, self.args.rate, Duration::from_secs(self.args.seconds)).await?;
            cores.push((gateway.busy_seconds()? - before) / begun.elapsed().as_secs_f64());
            waits[0].push(percentile(&waited, 0.5));
            waits[1].push(percentile(&waited, 0.99));
        }
        let case = format!("picker_{:.0}", self.args.rate);
        self.note(&case, "cores", &cores);
        for (metric, samples) in ["pick_p50_ms", "pick_p99_ms"].iter().zip(&waits) {
            self.note(&case, metric, samples);
        }
        Ok(())
    }

    /// Replicas that have nothing to do: the operator tells of them whenever it has read them.
    async fn idle(&mut self) -> Result<()> {
        let report = LoadReport { start_id: "s".to_owned(), ..LoadReport::idle(10_000) };
        let of = |at: usize, up_ms: u64| {
            let load = Some((&LoadReport { up_ms, ..report.clone() }).into());
            ReplicaEndpoint { load, ..self.replicas[at % self.replicas.len()].endpoint(&format!("idle-{at}")) }
        };
        let reads = self.args.seconds.max(10) / READ_EVERY.as_secs();
        let told = async {
            for read in 0..reads {
                self.tell((0..IDLE).map(|at| of(at, read * 2000)).collect()).await?;
                tokio::time::sleep(READ_EVERY).await;
            }
            anyhow::Ok(())
        };
        let (told, busy) = self.busy(told).await?;
        told?;
        self.note("gateway_idle_100", "cores", &[busy]);
        self.tell(self.endpoints()).await
    }

    /// Streams of which nothing comes.
    async fn silent(&mut self) -> Result<()> {
        let streams = silent_streams(self.args.streams, self.gateway.address()?).await?;
        tokio::time::sleep(Duration::from_secs(5)).await;
        let bytes = self.gateway.resident_bytes()?;
        let case = format!("gateway_streams_{}", streams.len());
        self.note(&case, "rss_mb", &[bytes as f64 / 1e6]);
        Ok(())
    }

    /// What comes of something, and the cores that the gateway was busy with meanwhile.
    async fn busy<T>(&self, work: impl Future<Output = T>) -> Result<(T, f64)> {
        let (begun, before) = (Instant::now(), self.gateway.busy_seconds()?);
        let done = work.await;
        Ok((done, (self.gateway.busy_seconds()? - before) / begun.elapsed().as_secs_f64()))
    }
}

/// Public proxies before the same replicas: one takes them in turn for each request, one only passes bytes on. None if it is not installed.
fn haproxies(replicas: &[SocketAddr]) -> Result<Vec<(System, Haproxy)>> {
    let version = match haproxy::version() {
        Ok(version) => version,
        Err(reason) => {
            println!("skipped: the same through HAProxy: {reason:#}");
            return Ok(Vec::new());
        }
    };
    let start = |mode: Mode| -> Result<(System, Haproxy)> {
        let name = format!("haproxy, mode {}", mode.word());
        Ok((System { name, version: version.clone() }, Haproxy::start(mode, replicas)?))
    };
    [Mode::Http, Mode::Tcp].into_iter().map(start).collect()
}

/// Through which the load goes.
enum Proxy<'a> {
    Ours(&'a GatewayProcess),
    Other(&'a Haproxy),
}

impl Proxy<'_> {
    fn address(&self) -> Result<SocketAddr> {
        match self {
            Self::Ours(gateway) => gateway.address(),
            Self::Other(haproxy) => Ok(haproxy.address()),
        }
    }

    fn busy_seconds(&self) -> Result<f64> {
        match self {
            Self::Ours(gateway) => gateway.busy_seconds(),
            Self::Other(haproxy) => haproxy.busy_seconds(),
        }
    }
}

/// What a proxy cost in each pair of loads.
#[derive(Default)]
struct Pairs {
    cores: Vec<f64>,
    /// Added to requests with their first event and to every other event, each at p50 and p95.
    added_ms: [Vec<f64>; 4],
}

impl Pairs {
    fn add(&mut self, with: &Transit, without: &Transit) {
        let (first, later) = ((&with.first_ms, &without.first_ms), (&with.later_ms, &without.later_ms));
        let looks = [(first, 0.5), (first, 0.95), (later, 0.5), (later, 0.95)];
        for (samples, ((with, without), share)) in self.added_ms.iter_mut().zip(looks) {
            samples.push(percentile(with, share) - percentile(without, share));
        }
    }
}

/// Milliseconds from the beginning of each conversation to where its request goes; it is answered then.
async fn picks(picker: &Picker, bodies: &[String], rate: f64, time: Duration) -> Result<Vec<f64>> {
    let mut due = tokio::time::interval(Duration::from_secs_f64(1.0 / rate));
    let count = (rate * time.as_secs_f64()) as usize;
    let mut asking = JoinSet::new();
    for number in 0..count {
        due.tick().await;
        let (picker, body) = (picker.clone(), bodies[number % bodies.len()].clone());
        asking.spawn(async move {
            let begun = Instant::now();
            let mut conversation = picker.begin_whole(&Request::post("/v1/completions"), &body).await?;
            Destination::of(&conversation.told().await?)?;
            let waited = begun.elapsed().as_secs_f64() * 1000.0;
            conversation.passed().await?;
            conversation.answered("200", "{}").await?;
            anyhow::Ok(waited)
        });
    }
    asking.join_all().await.into_iter().collect()
}

fn whole(transit: Transit) -> Result<Transit> {
    ensure!(transit.n_failed == 0, "{} answers did not come whole", transit.n_failed);
    Ok(transit)
}

fn percentile(samples: &[f64], share: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[((sorted.len() - 1) as f64 * share).round() as usize]
}
