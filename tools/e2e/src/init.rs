//! The first process of the namespaces: starts the one that does the work, reaps what is orphaned, and when the work
//! ends kills what is left and removes the cgroups. Owns the end of a run; never starts a part of the cluster.

use std::{
    env, fs,
    io::{self, Read},
    process::{Child, Command, ExitCode},
    thread,
    time::Duration,
};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, wait};

use crate::cgroups::Slot;

/// Exit code of a run that was told to stop, as of a program that Ctrl-C ends.
const INTERRUPTED: i32 = 130;

/// Runs the next stage to its end, then leaves no process and no cgroup.
pub(crate) fn run(slot: &str) -> Result<ExitCode> {
    let slot = Slot::named(slot);
    slot.create().context("make cgroups")?;
    let child = start_inside()?;
    let code = reap_until(&child);
    kill_everything();
    slot.remove();
    Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)))
}

/// Ends this process as soon as its standard input closes: the outer process holds the other end for as long as
/// somebody wants this run.
pub(crate) fn exit_when_abandoned() {
    thread::spawn(|| {
        let _until_closed = io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(INTERRUPTED);
    });
}

fn start_inside() -> Result<Child> {
    let args = env::args_os().skip(1).map(|arg| if arg == "init" { "inside".into() } else { arg });
    Command::new(env::current_exe().context("find own executable")?).args(args).spawn().context("start stage inside")
}

/// Waits for any process, as the first process of a namespace must: containerd's shims become its children.
fn reap_until(child: &Child) -> i32 {
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid.as_raw_nonzero().get() as u32 == child.id() => {
                return status.exit_status().unwrap_or(1);
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => return 1,
        }
    }
}

/// Containers live in PID namespaces below this one, so this reaches them too.
fn kill_everything() {
    loop {
        for pid in others() {
            let _already_gone = kill_process(pid, Signal::KILL);
        }
        match wait(WaitOptions::NOHANG) {
            Err(rustix::io::Errno::CHILD) if others().is_empty() => return,
            Ok(Some(_)) => {}
            _ => thread::sleep(Duration::from_millis(5)),
        }
    }
}

fn others() -> Vec<Pid> {
    let Ok(processes) = fs::read_dir("/proc") else { return Vec::new() };
    let numbers = processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    numbers.filter(|&number: &i32| number > 1).filter_map(Pid::from_raw).collect()
}
