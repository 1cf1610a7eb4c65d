//! A real HAProxy before replicas, which takes them in turn and looks at no body: what passing streams on costs by itself. It comes with the
//! machine: `apt-get install haproxy`.

use std::{
    fmt::Write as _,
    fs,
    net::{SocketAddr, TcpListener, TcpStream},
    process::{Child, Command},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use stoker_cluster::Keeper;
use tempfile::TempDir;

use crate::process;

const STARTED_WITHIN: Duration = Duration::from_secs(10);

/// What it makes of what passes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Mode {
    /// Requests, each to the next replica, over connections that are kept.
    Http,
    /// Bytes: a connection stays with its replica, and nothing is read.
    Tcp,
}

impl Mode {
    /// As its configuration calls it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Tcp => "tcp",
        }
    }
}

/// A running HAProxy.
pub struct Haproxy {
    child: Child,
    address: SocketAddr,
    _keeper: Keeper,
    _folder: TempDir,
}

/// Its version; an error is a reason to skip.
pub fn version() -> Result<String> {
    let output =
        Command::new("haproxy").arg("-v").output().context("haproxy is not installed (apt-get install haproxy)")?;
    let said = String::from_utf8(output.stdout)?;
    Ok(said.split_whitespace().nth(2).context("it says its version")?.to_owned())
}

impl Haproxy {
    /// Starts it before these replicas, with a thread for each processor as it does by itself.
    pub fn start(mode: Mode, replicas: &[SocketAddr]) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let file = folder.path().join("haproxy.cfg");
        fs::write(&file, config(mode, address, replicas)?)?;
        let keeper = Keeper::start().context("start the keeper")?;
        let mut command = keeper.command("haproxy".as_ref())?;
        let child = command.args(["-db", "-q", "-f"]).arg(&file).spawn().context("start haproxy")?;
        let mut started = Self { child, address, _keeper: keeper, _folder: folder };
        let begun = Instant::now();
        while TcpStream::connect(address).is_err() {
            ensure!(started.child.try_wait()?.is_none(), "haproxy ended; what it met stands above");
            ensure!(begun.elapsed() < STARTED_WITHIN, "haproxy does not listen at {address}");
            sleep(Duration::from_millis(20));
        }
        Ok(started)
    }

    /// Where clients ask.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Processor time that it has used.
    pub fn busy_seconds(&self) -> Result<f64> {
        process::busy_seconds(self.child.id())
    }
}

fn config(mode: Mode, address: SocketAddr, replicas: &[SocketAddr]) -> Result<String> {
    let word = mode.word();
    let kept = if mode == Mode::Http { "  http-reuse always\n  option http-no-delay\n" } else { "" };
    let mut config = format!(
        "global\n  maxconn 4000\ndefaults\n  mode {word}\n  timeout connect 5s\n  timeout client 60s\n  timeout server 60s\n\
         frontend all\n  bind {address}\n  default_backend replicas\nbackend replicas\n  balance roundrobin\n{kept}"
    );
    for (at, replica) in replicas.iter().enumerate() {
        writeln!(config, "  server r{at} {replica}")?;
    }
    Ok(config)
}

impl Drop for Haproxy {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _killed = self.child.kill();
        let _waited = self.child.wait();
    }
}
