//! A real `stoker-agent` process that always stops, also when the test is killed. Sends no requests of its own beyond
//! asking whether the agent is ready.

use std::{
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use stoker_cluster::Keeper;
use stoker_crds::contract::{AgentPhase, LoadReport};

/// A debug build reads ember in well under a second; a loaded machine takes longer.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running agent on a free port of the loopback.
pub struct AgentProcess {
    child: Child,
    base: String,
    admin: String,
    log: Arc<Mutex<String>>,
    _keeper: Keeper,
}

impl AgentProcess {
    /// Starts the agent with `args` and waits until it listens.
    pub fn start(args: &[&str]) -> Result<Self> {
        let keeper = Keeper::start().context("start the keeper")?;
        let program = binary()?;
        let mut child = keeper
            .command(&program)?
            .args(["--host", "127.0.0.1", "--port", "0"])
            .args(args)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("start {}", program.display()))?;
        let log = Arc::new(Mutex::new(String::new()));
        let [base, admin] = listening(&mut child, &log)?.map(|address| format!("http://{address}"));
        Ok(Self { child, base, admin, log, _keeper: keeper })
    }

    /// Starts the agent with `args` and waits until it serves.
    pub async fn ready(args: &[&str]) -> Result<Self> {
        let agent = Self::start(args)?;
        agent.wait_until("ready", |load| load.phase == AgentPhase::Ready).await?;
        Ok(agent)
    }

    /// Its URL without a path.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// The URL of a path on its admin port.
    pub fn admin_url(&self, path: &str) -> String {
        format!("{}{path}", self.admin)
    }

    /// The URL of a path.
    pub fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }

    /// Its load, now.
    pub async fn load(&self) -> Result<LoadReport> {
        Ok(reqwest::get(self.admin_url("/v1/load")).await?.json().await?)
    }

    /// Polls its load until `holds`.
    pub async fn wait_until(&self, what: &str, holds: impl Fn(&LoadReport) -> bool) -> Result<LoadReport> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let load = self.load().await?;
            if holds(&load) {
                return Ok(load);
            }
            ensure!(Instant::now() < deadline, "not {what} within {PATIENCE:?}: {load:?}\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Memory that it holds now.
    pub fn resident_bytes(&self) -> Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let kib = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.parse().ok());
        let kib: u64 = kib.context("the kernel says how much memory a process holds")?;
        Ok(kib << 10)
    }

    /// Sends SIGTERM.
    pub fn terminate(&self) -> Result<()> {
        let status = Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status()?;
        ensure!(status.success(), "kill ended with {status}");
        Ok(())
    }

    /// Waits for its end.
    pub async fn ended(&mut self) -> Result<ExitStatus> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            ensure!(Instant::now() < deadline, "still runs after {PATIENCE:?}\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// What it logged so far.
    pub fn log(&self) -> String {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for AgentProcess {
    fn drop(&mut self) {
        // It may have ended by itself, which is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The agent to test: `$STOKER_AGENT_BIN`, or the one built next to this test.
pub fn binary() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("STOKER_AGENT_BIN") {
        return Ok(path.into());
    }
    // A test lies in `target/PROFILE/deps`, a program in `target/PROFILE`.
    let this = std::env::current_exe()?;
    let found = this.ancestors().skip(1).take(2).map(|dir| dir.join("stoker-agent")).find(|path| path.is_file());
    found.with_context(|| {
        format!("no stoker-agent near {}: run `cargo build -p stoker-agent`, or set STOKER_AGENT_BIN", this.display())
    })
}

/// Reads the log on a thread, for as long as the agent writes it; returns the public and the admin address it names.
fn listening(child: &mut Child, log: &Arc<Mutex<String>>) -> Result<[String; 2]> {
    let lines = BufReader::new(child.stderr.take().context("stderr is a pipe")?).lines();
    let (found, addresses) = mpsc::channel();
    let kept = Arc::clone(log);
    thread::spawn(move || {
        for line in lines.map_while(Result::ok) {
            if let Some(addresses) = addresses_in(&line) {
                // Only the first are waited for.
                let _ = found.send(addresses);
            }
            let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            kept.push_str(&line);
            kept.push('\n');
        }
    });
    match addresses.recv_timeout(PATIENCE) {
        Ok(addresses) => Ok(addresses),
        Err(_) => bail!("the agent does not listen:\n{}", log.lock().unwrap_or_else(PoisonError::into_inner)),
    }
}

fn addresses_in(line: &str) -> Option<[String; 2]> {
    let line: Value = serde_json::from_str(line).ok()?;
    let address = |name: &str| line[name].as_str().map(str::to_owned);
    if line["message"] == "listening" { Some([address("address")?, address("admin")?]) } else { None }
}
