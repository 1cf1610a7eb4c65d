//! The process a person starts: checks that the machine can do it, makes the namespaces, and waits. Owns signals;
//! everything it makes belongs to the namespaces' first process, which notices when this one is gone.

use std::{
    env, io,
    process::{ExitCode, ExitStatus, Stdio},
};

use anyhow::{Context, Result};
use tokio::{
    process::{Child, ChildStdin, Command},
    signal::unix::{SignalKind, signal},
};

use crate::{cgroups, requirements};

/// Runs the same command line inside fresh namespaces and returns its exit code.
pub(crate) fn run() -> Result<ExitCode> {
    if let Some(reason) = requirements::why_not_here() {
        println!("skipped: {reason}");
        return Ok(ExitCode::SUCCESS);
    }
    cgroups::sweep();
    let slot = cgroups::Slot::own();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("start runtime")?;
    let code = runtime.block_on(supervise(&slot));
    // The first process removes these itself, unless it was killed.
    slot.remove();
    code
}

async fn supervise(slot: &cgroups::Slot) -> Result<ExitCode> {
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let mut child = start(slot)?;
    // Taken out, because `wait` would close it.
    let lifeline = child.stdin.take();
    let status = tokio::select! {
        status = child.wait() => status,
        _ = interrupt.recv() => stop(&mut child, lifeline).await,
        _ = terminate.recv() => stop(&mut child, lifeline).await,
    };
    let code = status.context("wait for the namespaces")?.code().unwrap_or(1);
    Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)))
}

/// `--kill-child`: should this process and its lifeline's reader both fail, `unshare` still takes the rest along.
fn start(slot: &cgroups::Slot) -> Result<Child> {
    Command::new("unshare")
        .args(["--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child=KILL", "--mount-proc"])
        .arg("--")
        .arg(env::current_exe().context("find own executable")?)
        .args(["--stage", "init", "--slot", slot.name()])
        .args(env::args_os().skip(1))
        // Ctrl-C reaches this process only; it decides what happens.
        .process_group(0)
        .stdin(Stdio::piped())
        .spawn()
        .context("start unshare")
}

/// Closing the lifeline asks for the end; the first process then cleans up and exits.
async fn stop(child: &mut Child, lifeline: Option<ChildStdin>) -> io::Result<ExitStatus> {
    drop(lifeline);
    child.wait().await
}
