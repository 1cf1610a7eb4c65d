//! The second demo: a step of load on a deployment that scales. Shows the load generator's progress between the changes of
//! the number, and ends when the replicas came back. Fails when they did not follow.

use std::{
    io::{self, BufRead, BufReader, Read},
    path::Path,
    process::{Child, Command, Stdio},
    thread::{self, sleep},
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use serde_json::Value;
use stoker_cluster::Gpus;

use super::{DemoLoadArgs, demo, kubectl::Kubectl};

const DEPLOYMENT: &str = "chat-load";
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// The example's stabilisation time, a drain, and a busy machine's patience.
const COME_BACK_TIMEOUT: Duration = Duration::from_secs(300);

pub(crate) fn demo_load(args: &DemoLoadArgs) -> anyhow::Result<()> {
    let state = demo::cluster(&args.demo, Gpus::Pretended(0))?;
    let kubectl = Kubectl::of(&state, &args.demo.dir.dir);
    let example = args.demo.source.join("examples/chat-load.yaml");
    demo::timed("apply", || kubectl.run(&["apply", "-f", &example.to_string_lossy()]))?;
    demo::timed("ready", || kubectl.wait_until_ready(DEPLOYMENT))?;
    let url = kubectl.service_url(DEPLOYMENT)?;
    let words =
        ["--url", &url, "--step", &args.step, "--prompt-tokens", "40..120", "--max-tokens", "300", "--ignore-eos"];
    let mut load = start_load(&args.load, &words.map(str::to_owned))?;
    let course = follow(&kubectl, DEPLOYMENT, &mut load);
    // Whatever became of the deployment, nothing goes on sending.
    let _ended = load.kill();
    let most = course?;
    println!("\nFrom 1 replica to {most} and back. Every decision with its reasons:\n");
    println!("  {}\n  kubectl stoker explain {DEPLOYMENT} --changes", demo::environment(&state, &args.demo));
    println!("  kubectl stoker status {DEPLOYMENT}");
    Ok(())
}

/// The load generator. Its lines come between ours, whole.
pub(super) fn start_load(program: &Path, words: &[String]) -> anyhow::Result<Child> {
    println!("\n$ stoker-load {}\n", words.join(" "));
    let mut command = Command::new(program);
    command.args(words).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut load = command.spawn().with_context(|| format!("start {}", program.display()))?;
    relay(load.stdout.take().expect("stdout is piped"));
    relay(load.stderr.take().expect("stderr is piped"));
    Ok(load)
}

fn relay(pipe: impl Read + Send + 'static) {
    thread::spawn(move || BufReader::new(pipe).lines().map_while(io::Result::ok).for_each(|line| println!("{line}")));
}

/// Tells every change of the number until the load is over and one replica is left; the most replicas that served.
pub(super) fn follow(kubectl: &Kubectl<'_>, name: &str, load: &mut Child) -> anyhow::Result<u64> {
    let begun = Instant::now();
    let (mut told, mut most, mut load_over) = (None, 0, None);
    loop {
        let seen = Seen::of(&kubectl.get("inferencedeployment", name)?);
        if told.as_ref() != Some(&seen.number()) {
            println!("{:>4.0} s  {seen}", begun.elapsed().as_secs_f64());
            told = Some(seen.number());
        }
        most = most.max(seen.serving);
        if load_over.is_none()
            && let Some(status) = load.try_wait().context("look at the load generator")?
        {
            ensure!(status.success(), "the load generator ended with {status}");
            load_over = Some(Instant::now());
        }
        match load_over {
            Some(_) if seen.is_back() && most > 1 => return Ok(most),
            Some(over) if over.elapsed() > COME_BACK_TIMEOUT => bail!("{}", seen.complaint(name, most)),
            _ => sleep(POLL_INTERVAL),
        }
    }
}

/// What the object says of its number.
#[derive(Debug)]
struct Seen {
    serving: u64,
    wanted: u64,
    why: String,
}

impl Seen {
    fn of(deployment: &Value) -> Self {
        let status = &deployment["status"];
        let last = &status["scaling"]["last"];
        let word = |field: &str| last[field].as_str().unwrap_or("nothing");
        let why =
            || format!("pressure {} % from {}, bound by {}", last["pressurePercent"], word("cause"), word("bound"));
        Self {
            serving: status["readyReplicas"].as_u64().unwrap_or(0),
            wanted: status["scaling"]["desired"].as_u64().unwrap_or(0),
            why: if last.is_null() { "nothing was decided yet".to_owned() } else { why() },
        }
    }

    fn number(&self) -> (u64, u64) {
        (self.serving, self.wanted)
    }

    fn is_back(&self) -> bool {
        self.number() == (1, 1)
    }

    fn complaint(&self, name: &str, most: u64) -> String {
        if most > 1 {
            format!("{name} did not come back within {} s: {self}", COME_BACK_TIMEOUT.as_secs())
        } else {
            format!("{name} did not scale up: {self}")
        }
    }
}

impl std::fmt::Display for Seen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { serving, wanted, why } = self;
        write!(f, "{} {serving} of {wanted} serving: {why}", "#".repeat(usize::try_from(*serving).unwrap_or(0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_number_and_its_reason_are_read_from_the_status() {
        let last = json!({"pressurePercent": 126, "cause": "arrivals", "bound": "nothing"});
        let seen = Seen::of(&json!({"status": {"readyReplicas": 2, "scaling": {"desired": 3, "last": last}}}));
        assert_eq!(seen.to_string(), "## 2 of 3 serving: pressure 126 % from arrivals, bound by nothing");
        assert!(
            !seen.is_back()
                && seen.complaint("chat", 2).contains("did not come back")
                && seen.complaint("chat", 1).contains("scale up")
        );
    }
}
