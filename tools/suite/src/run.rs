//! Starts parts, waits for them, and writes what each said when it is over, so that it stays together. Decides nothing.

use std::{
    env,
    fs::File,
    io::{Read, Seek, Write, stdout},
    path::Path,
    process::{Command, ExitStatus, Stdio},
    sync::mpsc::{Receiver, Sender, channel},
    thread,
    time::Instant,
};

use anyhow::{Context, Result};

use crate::{
    order::{self, Machine},
    part::{Lane, Part},
};

/// Of Go's heaps, beside what is in use, until it is collected. Starting an API server is a fifth cheaper than with 100.
const GARBAGE_PERCENT: &str = "400";

/// How a part ended.
struct Ended {
    part: Part,
    status: ExitStatus,
    /// All that it wrote, in its order.
    said: Vec<u8>,
    seconds: f64,
}

/// Runs all parts; titles of those that failed.
pub(crate) fn all(parts: &[Part], machine: Machine, log: &Path) -> Result<Vec<String>> {
    let mut report =
        Report { log: File::create(log).with_context(|| format!("create {}", log.display()))?, failed: Vec::new() };
    let (ended, endings) = channel();
    let behind = order::lane(parts, Lane::Behind);
    let n_behind = behind.len();
    let at_its_end = ended.clone();
    thread::spawn(move || behind.into_iter().for_each(|part| _ = at_its_end.send(run(part, "10"))));
    beside(order::lane(parts, Lane::Beside), machine.seats(), n_behind, &ended, &endings, &mut report)?;
    Ok(report.failed)
}

/// Runs parts side by side on so many seats, and sees those of the other lane to their end too.
fn beside(
    mut waiting: Vec<Part>,
    seats: usize,
    n_behind: usize,
    ended: &Sender<Result<Ended>>,
    endings: &Receiver<Result<Ended>>,
    report: &mut Report,
) -> Result<()> {
    let (mut free, mut running) = (seats, n_behind);
    loop {
        while let Some(idx) = order::next(&waiting, free, seats) {
            let (part, ended) = (waiting.remove(idx), ended.clone());
            free -= order::seats_of(&part, seats);
            running += 1;
            // Nobody listens any more when something else went wrong.
            thread::spawn(move || _ = ended.send(run(part, "0")));
        }
        if running == 0 {
            return Ok(());
        }
        let over = endings.recv()??;
        running -= 1;
        if over.part.lane == Lane::Beside {
            free += order::seats_of(&over.part, seats);
        }
        report.add(over)?;
    }
}

/// Runs one part to its end, at this niceness.
fn run(part: Part, niceness: &str) -> Result<Ended> {
    let begun = Instant::now();
    // Not a pipe: a process that a test left behind would hold its other end.
    let mut output = tempfile::tempfile()?;
    let mut command = Command::new("nice");
    command.args(["-n", niceness]).arg(&part.program).args(&part.arguments).current_dir(&part.folder);
    command.env("CARGO_MANIFEST_DIR", &part.folder).stdin(Stdio::null());
    if env::var_os("GOGC").is_none() {
        command.env("GOGC", GARBAGE_PERCENT);
    }
    command.stdout(output.try_clone()?).stderr(output.try_clone()?);
    let status = command.status().with_context(|| format!("start {}", part.title))?;
    let mut said = Vec::new();
    output.rewind()?;
    output.read_to_end(&mut said)?;
    Ok(Ended { part, status, said, seconds: begun.elapsed().as_secs_f64() })
}

/// What is said to whoever waits, and kept.
struct Report {
    log: File,
    failed: Vec<String>,
}

impl Report {
    fn add(&mut self, ended: Ended) -> Result<()> {
        let Ended { part, status, said, seconds } = ended;
        // Who was killed could not say so.
        let state = if status.success() { String::new() } else { format!("FAILED, {status}, ") };
        let heading = format!("     Running {} ({state}{seconds:.1} s)\n", part.title);
        for bytes in [heading.as_bytes(), &said, b"\n"] {
            stdout().write_all(bytes)?;
            self.log.write_all(bytes)?;
        }
        if !status.success() {
            self.failed.push(part.title);
        }
        Ok(())
    }
}
