//! One server process of a cluster: started through the keeper, with its log in a file, stopped or killed on demand and
//! started again with the same arguments. Never restarts anything by itself.

use std::{
    fs::{self, OpenOptions},
    path::{Path, PathBuf},
    process::Child,
    sync::Arc,
};

use rustix::process::{Pid, Signal, kill_process_group};

use crate::{error::ClusterError, keeper::Keeper};

/// Lines of a log that an error quotes.
const LOG_TAIL_LINES: usize = 15;

/// What to run.
#[derive(Clone, Debug)]
pub(crate) struct ComponentSpec {
    pub(crate) name: &'static str,
    pub(crate) program: PathBuf,
    pub(crate) args: Vec<String>,
    pub(crate) env: Vec<(String, String)>,
    pub(crate) log: PathBuf,
}

/// A server process and what is needed to start it again.
#[derive(Debug)]
pub(crate) struct Component {
    spec: ComponentSpec,
    keeper: Arc<Keeper>,
    child: Option<Child>,
}

impl Component {
    pub(crate) fn start(spec: ComponentSpec, keeper: &Arc<Keeper>) -> Result<Self, ClusterError> {
        let mut component = Self { spec, keeper: Arc::clone(keeper), child: None };
        component.restart()?;
        Ok(component)
    }

    /// Starts the process (after killing the one before, if it still runs). The log is continued.
    pub(crate) fn restart(&mut self) -> Result<(), ClusterError> {
        self.kill();
        let ComponentSpec { name, program, args, env, log } = &self.spec;
        let out =
            OpenOptions::new().create(true).append(true).open(log).map_err(ClusterError::file("open log", log))?;
        let err = out.try_clone().map_err(ClusterError::file("open log", log))?;
        let start =
            || self.keeper.command(program)?.args(args).envs(env.iter().cloned()).stdout(out).stderr(err).spawn();
        self.child = Some(start().map_err(ClusterError::process("start", name))?);
        Ok(())
    }

    /// SIGKILL to the whole process group, and waits for its end. Nothing happens when it is not running.
    pub(crate) fn kill(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        if let Some(group) = Pid::from_raw(child.id().cast_signed()) {
            // Fails only when the group is gone, which is what a kill wants to hear.
            let _gone = kill_process_group(group, Signal::KILL);
        }
        // The process is ours and was just killed; a failing wait would mean that somebody reaped it before us.
        let _already_reaped = child.wait();
        self.keeper.forget(child.id());
    }

    pub(crate) fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    pub(crate) fn has_exited(&mut self) -> bool {
        self.child.as_mut().is_none_or(|child| !matches!(child.try_wait(), Ok(None)))
    }

    pub(crate) fn not_ready(&self, what: impl Into<String>) -> ClusterError {
        ClusterError::NotReady { name: self.spec.name.to_owned(), what: what.into(), log_tail: tail(&self.spec.log) }
    }
}

impl Drop for Component {
    fn drop(&mut self) {
        self.kill();
    }
}

fn tail(log: &Path) -> String {
    let text = fs::read(log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LOG_TAIL_LINES)..].join("\n")
}
