//! Starts parts, each below a steward, waits for them, and writes what each said when it is over, so that it stays together. Decides nothing.

use std::{
    collections::VecDeque,
    env,
    fs::File,
    io::{Read, Seek, Write, stdout},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Sender, channel},
    },
    thread,
    time::Instant,
};

use anyhow::{Context, Result, anyhow, ensure};

use crate::{
    order::{self, Machine},
    part::{Lane, Part},
    plane::{self, Plane},
    steward::{self, Account},
};

/// The niceness of what computes: half of what waiting tests get when both want a core. With 10 it got a tenth, of other people's programs too, and beside
/// four of these the engine's tests had not ended after twenty minutes.
const BEHIND: &str = "3";

/// How a part ended.
struct Ended {
    part: Part,
    account: Account,
    /// All that it wrote, in its order.
    said: Vec<u8>,
    seconds: f64,
}

/// What all parts came to.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// Titles of those that failed.
    pub(crate) failed: Vec<String>,
    /// What each took of cores, in seconds.
    pub(crate) costs: Vec<(String, f64)>,
}

/// Runs all parts. Those that wait have control planes of `lender`, one a seat.
pub(crate) fn all(parts: &[Part], machine: Machine, lender: Option<&Path>, log: &Path) -> Result<Outcome> {
    let log = File::create(log).with_context(|| format!("create {}", log.display()))?;
    let mut report = Report { log, outcome: Outcome::default() };
    let (ended, endings) = channel();
    let lanes = [(Lane::Beside, machine.seats(), "0", lender), (Lane::Behind, 1, BEHIND, None)];
    for (lane, seats, niceness, lender) in lanes {
        let waiting = Arc::new(Mutex::new(VecDeque::from(order::lane(parts, lane))));
        for _ in 0..seats {
            let (waiting, ended) = (Arc::clone(&waiting), ended.clone());
            let seat = Seat { niceness, lender: lender.map(Path::to_owned), plane: None };
            thread::spawn(move || seat.sit(&waiting, &ended));
        }
    }
    drop(ended);
    for over in endings {
        report.add(over?)?;
    }
    for part in order::lane(parts, Lane::Alone) {
        report.add(run(part, "0", None)?)?;
    }
    ensure!(report.outcome.costs.len() == parts.len(), "not every part was run to its end");
    Ok(report.outcome)
}

/// Where parts run one after another.
struct Seat {
    niceness: &'static str,
    /// What starts its control plane, if it has one.
    lender: Option<PathBuf>,
    /// As new.
    plane: Option<Plane>,
}

impl Seat {
    /// Runs one part after another, until none waits or nobody listens any more, since something went wrong.
    fn sit(mut self, waiting: &Mutex<VecDeque<Part>>, ended: &Sender<Result<Ended>>) {
        let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        while let Some(part) = next() {
            self.prepare();
            let over = run(part, self.niceness, self.plane.as_ref().map(Plane::lease));
            self.tidy(over.as_ref().is_ok_and(|over| over.account.left_nobody));
            if ended.send(over).is_err() {
                return;
            }
        }
    }

    /// Without a control plane a part starts one of its own.
    fn prepare(&mut self) {
        let Some(lender) = self.lender.as_ref().filter(|_| self.plane.is_none()) else { return };
        match Plane::start(lender) {
            Ok(plane) => self.plane = Some(plane),
            Err(error) => eprintln!("no control plane is lent: {error:#}"),
        }
    }

    /// A control plane to which somebody may still write, or that is not itself any more, is nobody's.
    fn tidy(&mut self, is_free: bool) {
        let Some(plane) = &mut self.plane else { return };
        let renewed = if is_free { plane.renew() } else { Err(anyhow!("processes of a test go on")) };
        if let Err(error) = renewed {
            eprintln!("a control plane is given up: {error:#}");
            self.plane = None;
        }
    }
}

/// Runs one part to its end, at this niceness.
fn run(part: Part, niceness: &str, lease: Option<&str>) -> Result<Ended> {
    let begun = Instant::now();
    // Not a pipe: a process that a test left behind would hold its other end.
    let mut output = tempfile::tempfile()?;
    let mut command = Command::new("nice");
    command.args(["-n", niceness]).arg(env::current_exe()?).arg(steward::WORD).arg(&part.program).args(&part.arguments);
    command.current_dir(&part.folder).env("CARGO_MANIFEST_DIR", &part.folder).stdin(Stdio::null());
    plane::tune(&mut command).envs(lease.map(|lease| (plane::LEASE, lease)));
    let steward = command.stderr(output.try_clone()?).output().with_context(|| format!("start {}", part.title))?;
    // Who was killed could not say so.
    let killed = || Account { cpu_seconds: 0.0, left_nobody: false, failure: Some(steward.status.to_string()) };
    let account = steward::read(&String::from_utf8_lossy(&steward.stdout)).unwrap_or_else(killed);
    let mut said = Vec::new();
    output.rewind()?;
    output.read_to_end(&mut said)?;
    Ok(Ended { part, account, said, seconds: begun.elapsed().as_secs_f64() })
}

/// What is said to whoever waits, and kept.
struct Report {
    log: File,
    outcome: Outcome,
}

impl Report {
    fn add(&mut self, ended: Ended) -> Result<()> {
        let Ended { part, account, said, seconds } = ended;
        let state = account.failure.as_ref().map(|failure| format!("FAILED, {failure}, ")).unwrap_or_default();
        let took = format!("{seconds:.1} s, {:.1} of a core", account.cpu_seconds);
        let heading = format!("     Running {} ({state}{took})\n", part.title);
        for bytes in [heading.as_bytes(), &said, b"\n"] {
            stdout().write_all(bytes)?;
            self.log.write_all(bytes)?;
        }
        if account.failure.is_some() {
            self.outcome.failed.push(part.title.clone());
        }
        self.outcome.costs.push((part.title, account.cpu_seconds));
        Ok(())
    }
}
