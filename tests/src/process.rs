//! A program of ours as a process that always stops, also when the test is killed, and that says in its log where it listens.

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

/// A debug build reads ember in well under a second; a loaded machine takes longer.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A running program.
pub struct Process {
    child: Child,
    listening: Value,
    log: Arc<Mutex<String>>,
    _keeper: Keeper,
}

/// What TLS of HTTP clients in this process computes with: they make none before it is chosen, also those that never use it.
pub fn choose_crypto() {
    // An error means that it was chosen before.
    let _chosen_before = rustls::crypto::ring::default_provider().install_default();
}

/// Processor time that a process has used.
pub fn busy_seconds(pid: u32) -> Result<f64> {
    /// Of clock ticks: the kernel shows a hundred a second to everybody (USER_HZ).
    const TICKS_A_SECOND: f64 = 100.0;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name in parentheses may have spaces of its own.
    let fields = stat.rsplit_once(')').context("a name in parentheses")?.1.split_whitespace();
    let ticks = fields.skip(11).take(2).map(str::parse::<f64>).sum::<Result<f64, _>>()?;
    Ok(ticks / TICKS_A_SECOND)
}

impl Process {
    /// Starts the program of this name with `args` and waits until it listens.
    pub fn start(name: &str, args: &[&str]) -> Result<Self> {
        choose_crypto();
        let keeper = Keeper::start().context("start the keeper")?;
        let program = binary(name)?;
        let mut child = keeper
            .command(&program)?
            .args(args)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("start {}", program.display()))?;
        let log = Arc::new(Mutex::new(String::new()));
        let listening = listening(&mut child, &log)?;
        Ok(Self { child, listening, log, _keeper: keeper })
    }

    /// The URL without a path at which it listens, of the field `name` of what it logged then.
    pub fn url(&self, name: &str) -> Result<String> {
        let address = self.listening[name].as_str().with_context(|| format!("no {name} in {}", self.listening))?;
        Ok(format!("http://{address}"))
    }

    /// Memory that it holds now.
    pub fn resident_bytes(&self) -> Result<u64> {
        self.status_bytes("VmRSS:")
    }

    /// The most memory that it ever held.
    pub fn peak_bytes(&self) -> Result<u64> {
        self.status_bytes("VmHWM:")
    }

    fn status_bytes(&self, name: &str) -> Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let kib = status.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_suffix(" kB")?.parse().ok());
        let kib: u64 = kib.context("the kernel says how much memory a process holds")?;
        Ok(kib << 10)
    }

    /// Processor time that it has used.
    pub fn busy_seconds(&self) -> Result<f64> {
        busy_seconds(self.child.id())
    }

    /// Sends a signal by its name without SIG.
    pub fn signal(&self, name: &str) -> Result<()> {
        let status = Command::new("kill").args([&format!("-{name}"), &self.child.id().to_string()]).status()?;
        ensure!(status.success(), "kill ended with {status}");
        Ok(())
    }

    /// Kills it and waits for its end.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
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

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself, which is as good.
        let _ = self.kill();
    }
}

/// The program to test: what `$STOKER_AGENT_BIN` and its like name, or the one built next to this test.
pub fn binary(name: &str) -> Result<PathBuf> {
    let variable = format!("{}_BIN", name.replace('-', "_").to_uppercase());
    if let Some(path) = std::env::var_os(&variable) {
        return Ok(path.into());
    }
    // A test lies in `target/PROFILE/deps`, a program in `target/PROFILE`.
    let this = std::env::current_exe()?;
    let found = this.ancestors().skip(1).take(2).map(|dir| dir.join(name)).find(|path| path.is_file());
    found.with_context(|| format!("no {name} near {}: run `cargo build -p {name}`, or set {variable}", this.display()))
}

/// Reads the log on a thread, for as long as it is written; returns the line that says where the program listens.
fn listening(child: &mut Child, log: &Arc<Mutex<String>>) -> Result<Value> {
    let lines = BufReader::new(child.stderr.take().context("stderr is a pipe")?).lines();
    let (found, listening) = mpsc::channel();
    let kept = Arc::clone(log);
    thread::spawn(move || {
        for line in lines.map_while(Result::ok) {
            if let Some(line) = serde_json::from_str(&line).ok().filter(|line: &Value| line["message"] == "listening") {
                // Only the first is waited for.
                let _ = found.send(line);
            }
            let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            kept.push_str(&line);
            kept.push('\n');
        }
    });
    match listening.recv_timeout(PATIENCE) {
        Ok(line) => Ok(line),
        Err(_) => bail!("it does not listen:\n{}", log.lock().unwrap_or_else(PoisonError::into_inner)),
    }
}
