//! A real `stoker-agent` process. Sends no requests of its own beyond asking whether the agent is ready.

use std::{
    path::PathBuf,
    process::ExitStatus,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use stoker_crds::contract::{AgentPhase, LoadReport};
use tokio::net::TcpSocket;

use crate::process::{self, PATIENCE, Process};

/// A running agent on a free port of the loopback.
pub struct AgentProcess {
    process: Process,
    base: String,
    admin: String,
    /// Its port after [`AgentProcess::kill`]: bound, and nobody listens.
    place: Option<TcpSocket>,
}

impl AgentProcess {
    /// Starts the agent with `args` and waits until it listens.
    pub fn start(args: &[&str]) -> Result<Self> {
        let process = Process::start("stoker-agent", &[&["--host", "127.0.0.1", "--port", "0"], args].concat())?;
        let (base, admin) = (process.url("address")?, process.url("admin")?);
        Ok(Self { process, base, admin, place: None })
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

    /// Processor time that it has used.
    pub fn busy_seconds(&self) -> Result<f64> {
        self.process.busy_seconds()
    }

    /// Memory that it holds now.
    pub fn resident_bytes(&self) -> Result<u64> {
        self.process.resident_bytes()
    }

    /// The most memory that it ever held.
    pub fn peak_bytes(&self) -> Result<u64> {
        self.process.peak_bytes()
    }

    /// Sends SIGTERM.
    pub fn terminate(&self) -> Result<()> {
        self.signal("TERM")
    }

    /// Sends a signal by its name without SIG.
    pub fn signal(&self, name: &str) -> Result<()> {
        self.process.signal(name)
    }

    /// Kills it. Whoever connects to its port is refused from now on: no other program of this machine gets the port, and answers in its
    /// place.
    pub fn kill(&mut self) -> Result<()> {
        self.process.kill()?;
        let address = self.base.strip_prefix("http://").context("a URL of an address")?;
        let place = TcpSocket::new_v4()?;
        place.set_reuseaddr(true)?;
        place.bind(address.parse()?)?;
        self.place = Some(place);
        Ok(())
    }

    /// Waits for its end.
    pub async fn ended(&mut self) -> Result<ExitStatus> {
        self.process.ended().await
    }

    /// What it logged so far.
    pub fn log(&self) -> String {
        self.process.log()
    }
}

/// The agent to test: `$STOKER_AGENT_BIN`, or the one built next to this test.
pub fn binary() -> Result<PathBuf> {
    process::binary("stoker-agent")
}
