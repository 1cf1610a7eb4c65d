//! `bench-fleet`: a thousand deployments of ten replicas on a real API server, with nodes and agents that are not there. How
//! long until all are ready; then what the settled operator writes, how long its rounds take, how much memory it holds and
//! how old readings get; the same while every third agent hangs; and a twentieth of all deployments changed at once.

use std::{
    path::PathBuf,
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use kube::{
    Api, Client,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use stoker_cluster::{Audit, ControlPlane, ControlPlaneOptions, Controllers};
use stoker_crds::InferenceDeployment;
use stoker_figures::{self as figures, Key, Run};
use stoker_tests::{
    browser::Browser,
    fleet::Fleet,
    measured::{Requests, Rounds, Writes},
    operator::{NAMESPACE, Operator, client_of, is_ready, kinds, prepare},
    readers::{Readers, paint},
};
use tokio::runtime::Runtime;

/// Measures the operator with a fleet that is not there, on this machine.
#[derive(Debug, Parser)]
struct Args {
    /// File that figures are appended to.
    #[arg(long, default_value = "docs/benchmarks/results/control_plane.jsonl")]
    out: PathBuf,
    #[arg(long, default_value_t = 1000)]
    deployments: usize,
    #[arg(long, default_value_t = 10)]
    replicas: usize,
    /// Pages that are open at the same time in the part about pages; 0: no such part.
    #[arg(long, default_value_t = 50)]
    pages: usize,
    /// Measures pages and nothing else.
    #[arg(long)]
    only_pages: bool,
    /// Seconds in which a settled operator is watched.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
}

/// Room for a Service of each deployment.
const SERVICES: &str = "127.96.0.0/16";
/// Time for readings and statuses to come to rest.
const SETTLE: Duration = Duration::from_secs(35);
const ALL_READY_WITHIN: Duration = Duration::from_secs(900);
/// Where the operator's pages are.
const PAGES: &str = "127.0.0.1:8081";
/// Times that a page is asked for.
const PAINTS: usize = 5;
/// Every n-th agent that hangs, and every n-th deployment that is changed.
const HANGS: usize = 3;
const CHANGES: usize = 20;
/// Between two looks at all deployments.
const LOOK: Duration = Duration::from_secs(1);

/// A control plane, an operator, and a fleet.
struct Bench {
    operator: Operator,
    fleet: Fleet,
    client: Client,
    runtime: Runtime,
    control_plane: ControlPlane,
    args: Args,
}

/// What is measured in a time in which nobody asks for anything.
struct Quiet {
    writes: Writes,
    rounds: Rounds,
    longest_pause: Duration,
}

fn main() -> Result<()> {
    let bench = Bench::start(Args::parse())?;
    let run = Run::start("make bench-fleet");
    let name = format!("fleet_{}x{}", bench.args.deployments, bench.args.replicas);
    let mut found = Vec::new();
    let mut note = |phase: &str, metric: &str, value: f64| {
        let case = format!("{name}{phase}");
        println!("{case} {metric} {value:.3}");
        found.push(run.figure(Key { model: "none", dtype: "none", case: &case, metric }, &[value]));
    };

    let names: Vec<String> = (0..bench.args.deployments).map(|number| format!("bench-{number}")).collect();
    let (ready, rounds) = bench.change(&names, "a")?;
    note("_start", "seconds", ready.as_secs_f64());
    note("_start", "p99_ms", rounds.p99_seconds() * 1e3);
    sleep(SETTLE);

    if bench.args.pages > 0 {
        for (metric, value) in bench.pages()? {
            note(&format!("_pages_{}", bench.args.pages), metric, value);
        }
    }
    if bench.args.only_pages {
        return figures::append(&bench.args.out, &found);
    }
    let quiet = bench.watch()?;
    println!("settled: {quiet:?}", quiet = quiet.writes);
    note("", "api_writes", quiet.writes.of_others() as f64);
    note("", "lease_writes", quiet.writes.of_lease() as f64);
    note("", "reading_age_s_max", quiet.longest_pause.as_secs_f64());
    let touched = bench.touch(&names)?;
    note("", "p99_ms", touched.p99_seconds() * 1e3);
    note("", "rss_mb", bench.operator.rss_mb()?);

    bench.fleet.hang(Some(HANGS));
    sleep(SETTLE);
    let quiet = bench.watch()?;
    println!("a third hangs: {quiet:?}", quiet = quiet.writes);
    note("_third_hangs", "api_writes", quiet.writes.of_others() as f64);
    note("_third_hangs", "reading_age_s_max", quiet.longest_pause.as_secs_f64());
    note("_third_hangs", "rss_mb", bench.operator.rss_mb()?);
    if quiet.rounds.count() > 0.0 {
        note("_third_hangs", "p99_ms", quiet.rounds.p99_seconds() * 1e3);
    }
    bench.fleet.hang(None);
    sleep(SETTLE);

    let some: Vec<String> = names.iter().step_by(CHANGES).cloned().collect();
    bench.fleet.forget_pauses();
    let (ready, rounds) = bench.change(&some, "b")?;
    note("_churn", "seconds", ready.as_secs_f64());
    note("_churn", "p99_ms", rounds.p99_seconds() * 1e3);
    note("_churn", "reading_age_s_max", bench.fleet.longest_pause().as_secs_f64());
    note("_churn", "rss_mb", bench.operator.rss_mb()?);
    figures::append(&bench.args.out, &found)
}

impl Bench {
    fn start(args: Args) -> Result<Self> {
        let services = Some(SERVICES.to_owned());
        let options = ControlPlaneOptions {
            controllers: Controllers::None,
            audit: Audit::Metadata,
            services,
            kinds: kinds(),
            ..Default::default()
        };
        let control_plane = ControlPlane::start(options)?;
        let runtime = Runtime::new()?;
        let client = runtime.block_on(client_of(&control_plane.kubeconfig_path()))?;
        runtime.block_on(prepare(&client))?;
        let fleet = runtime.block_on(Fleet::start(client.clone()))?;
        let mut operator = Operator::start(&control_plane)?;
        operator.restart_with(&["--pages-address", PAGES])?;
        while operator.metrics().is_err() {
            sleep(LOOK / 10);
        }
        Ok(Self { operator, fleet, client, runtime, control_plane, args })
    }

    /// Asks for these deployments, and waits until all there are are ready; how long that took, and its rounds.
    fn change(&self, names: &[String], change: &str) -> Result<(Duration, Rounds)> {
        let (begun, before) = (Instant::now(), Rounds::read(&self.operator)?);
        let requests = Requests::read(&self.control_plane)?;
        for name in names {
            self.apply(name, change)?;
        }
        loop {
            let list = self.runtime.block_on(self.deployments().list(&ListParams::default()))?.items;
            let ready = list.iter().filter(|deployment| is_ready(deployment)).count();
            if ready == self.args.deployments && self.fleet.count() == self.args.deployments * self.args.replicas {
                let lasted = begun.elapsed();
                let rounds = Rounds::read(&self.operator)?.since(&before);
                println!(
                    "change {change}: {} rounds; the operator's requests, as the API server saw them:",
                    rounds.count()
                );
                let requests = Requests::read(&self.control_plane)?.since(&requests);
                requests.iter().for_each(|line| println!("  {line}"));
                return Ok((lasted, rounds));
            }
            ensure!(
                begun.elapsed() < ALL_READY_WITHIN,
                "{ready} are ready, {} pods\n{}",
                self.fleet.count(),
                self.operator.last_words()
            );
            sleep(LOOK);
        }
    }

    fn apply(&self, name: &str, change: &str) -> Result<()> {
        let spec = json!({
            "model": {"source": "builtin://ember"}, "replicas": self.args.replicas,
            "drain": {"deadlineSeconds": 1, "withdrawSeconds": 0}, "pod": {"annotations": {"change": change}},
        });
        let object: Value = json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "metadata": {"name": name}, "spec": spec,
        });
        let params = PatchParams::apply("bench").force();
        self.runtime.block_on(self.deployments().patch(name, &params, &Patch::Apply(object)))?;
        Ok(())
    }

    /// Looks on for a while.
    fn watch(&self) -> Result<Quiet> {
        let (writes, rounds) = (Writes::read(&self.control_plane)?, Rounds::read(&self.operator)?);
        self.fleet.forget_pauses();
        sleep(Duration::from_secs(self.args.seconds));
        Ok(Quiet {
            longest_pause: self.fleet.longest_pause(),
            writes: Writes::read(&self.control_plane)?.since(&writes),
            rounds: Rounds::read(&self.operator)?.since(&rounds),
        })
    }

    /// What open pages cost the operator: half of them all deployments, in several orders, half of them one deployment each.
    fn pages(&self) -> Result<Vec<(&'static str, f64)>> {
        let of_one = |idx: usize| format!("/ns/{NAMESPACE}/bench-{}/events", idx % self.args.deployments);
        let of_all = |idx: usize| format!("/events?sort=-kv&page={}", 1 + idx % (self.args.deployments / 50).max(1));
        let paths: Vec<String> =
            (0..self.args.pages).map(|idx| if idx % 2 == 0 { of_all(idx) } else { of_one(idx) }).collect();
        let alone = self.cores()?;
        let mut paints = Vec::new();
        for _ in 0..PAINTS {
            // Nobody looked for a while: everything is looked at for this page alone.
            sleep(Duration::from_secs(3));
            paints.push(paint(PAGES, "/")?);
        }
        let readers = Readers::open(PAGES, &paths)?;
        sleep(SETTLE);
        let (bytes, begun) = (readers.bytes(), Instant::now());
        let watched = self.cores()?;
        let rate = (readers.bytes() - bytes) as f64 / begun.elapsed().as_secs_f64() / self.args.pages as f64;
        let first_paint = self.runtime.block_on(first_paint_ms())?;
        ensure!(readers.are_open(), "a page was closed");
        let slowest = paints.iter().map(|(took, _)| took.as_secs_f64()).fold(0.0, f64::max);
        println!("{alone:.3} cores with no page open, {watched:.3} with {}", self.args.pages);
        let mut found = vec![
            ("cores", watched - alone),
            ("paint_ms_max", slowest * 1e3),
            ("page_kb", paints[0].1 as f64 / 1e3),
            ("bytes_s", rate),
        ];
        found.extend(first_paint.map(|ms| ("first_paint_ms_max", ms)));
        Ok(found)
    }

    /// Processor time of the operator for each second of a while.
    fn cores(&self) -> Result<f64> {
        let (before, begun) = (self.operator.cpu_seconds()?, Instant::now());
        sleep(Duration::from_secs(self.args.seconds));
        Ok((self.operator.cpu_seconds()? - before) / begun.elapsed().as_secs_f64())
    }

    /// A round of each deployment that finds nothing to do.
    fn touch(&self, names: &[String]) -> Result<Rounds> {
        let before = Rounds::read(&self.operator)?;
        let patch = Patch::Merge(json!({"metadata": {"annotations": {"bench/touch": "yes"}}}));
        for name in names {
            self.runtime.block_on(self.deployments().patch(name, &PatchParams::default(), &patch))?;
        }
        sleep(Duration::from_secs(2));
        Ok(Rounds::read(&self.operator)?.since(&before))
    }

    fn deployments(&self) -> Api<InferenceDeployment> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }
}

/// Milliseconds until a browser paints the first of the page of all deployments, while the other pages are open; the longest of some
/// times. `None` without a browser, which is said.
async fn first_paint_ms() -> Result<Option<f64>> {
    let Some(browser) = Browser::start("bench-fleet: first paint").await? else { return Ok(None) };
    let mut longest = 0.0_f64;
    for _ in 0..PAINTS {
        browser.open("about:blank").await?;
        browser.open(&format!("http://{PAGES}/")).await?;
        let painted = "performance.getEntriesByName('first-contentful-paint')[0]";
        browser.wait_until("the first paint", &format!("!!{painted}")).await?;
        let ms = browser.value(&format!("{painted}.startTime")).await?.as_f64();
        longest = longest.max(ms.context("a paint has a time")?);
    }
    Ok(Some(longest))
}
