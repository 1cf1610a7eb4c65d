//! The processes of a node's containers: started through the keeper, found by pod for fault injection, all killed when
//! the node ends.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    path::Path,
    sync::{Arc, Mutex},
};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use tokio::process::{Child, Command};

use super::launch::Launch;
use crate::keeper::Keeper;

/// Namespace, pod and container.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) struct ProcessKey {
    pub(crate) namespace: String,
    pub(crate) pod: String,
    pub(crate) container: String,
}

/// Process ids by container; a process id is also the id of its group.
#[derive(Debug)]
pub(crate) struct Processes {
    keeper: Arc<Keeper>,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    running: BTreeMap<ProcessKey, u32>,
    /// The node has ended: nothing may start any more.
    closed: bool,
}

impl Processes {
    pub(crate) fn new(keeper: Arc<Keeper>) -> Self {
        Self { keeper, table: Mutex::default() }
    }

    /// Starts `launch` in `dir` with its output in `log`.
    pub(crate) fn start(&self, key: ProcessKey, launch: &Launch, dir: &Path, log: &Path) -> io::Result<Child> {
        fs::create_dir_all(log.parent().unwrap_or(dir))?;
        let out = File::create(log)?;
        // The shell in between would report a missing program as exit code 127 of the container.
        fs::metadata(&launch.program)
            .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", launch.program.display())))?;
        let mut table = self.table.lock().expect("no holder panics");
        if table.closed {
            return Err(io::Error::other("the node has ended"));
        }
        let mut command = self.keeper.command(&launch.program)?;
        command.args(&launch.args).env_clear().envs(launch.env.iter().cloned()).current_dir(dir);
        command.stderr(out.try_clone()?).stdout(out);
        let child = Command::from(command).spawn()?;
        table.running.insert(key, child.id().expect("a process that was just started has an id"));
        Ok(child)
    }

    /// After the main process of `key` was waited for: ends what it left behind in its group.
    pub(crate) fn ended(&self, key: &ProcessKey) {
        if let Some(group) = self.table.lock().expect("no holder panics").running.remove(key) {
            kill_group(group);
            self.keeper.forget(group);
        }
    }

    /// The main process of `key`.
    pub(crate) fn signal(&self, key: &ProcessKey, signal: Signal) {
        let pid = self.table.lock().expect("no holder panics").running.get(key).copied();
        if let Some(pid) = pid.and_then(to_pid) {
            // Fails only when the process has ended, which its waiter will see.
            let _ended = kill_process(pid, signal);
        }
    }

    /// Everything the container `key` started.
    pub(crate) fn kill(&self, key: &ProcessKey) {
        let group = self.table.lock().expect("no holder panics").running.get(key).copied();
        group.into_iter().for_each(kill_group);
    }

    /// Main processes of one pod.
    pub(crate) fn of_pod(&self, namespace: &str, pod: &str) -> Vec<u32> {
        let table = self.table.lock().expect("no holder panics");
        let of_pod = |key: &&ProcessKey| key.namespace == namespace && key.pod == pod;
        table.running.iter().filter(|(key, _)| of_pod(key)).map(|(_, &pid)| pid).collect()
    }

    /// Kills everything and starts nothing more.
    pub(crate) fn close(&self) {
        let mut table = self.table.lock().expect("no holder panics");
        table.closed = true;
        for group in std::mem::take(&mut table.running).into_values() {
            kill_group(group);
            self.keeper.forget(group);
        }
    }
}

/// Sends `signal` to the group of `pid`.
pub(crate) fn signal_group(pid: u32, signal: Signal) {
    if let Some(group) = to_pid(pid) {
        // Fails only when the group is gone.
        let _gone = kill_process_group(group, signal);
    }
}

fn kill_group(group: u32) {
    signal_group(group, Signal::KILL);
}

fn to_pid(pid: u32) -> Option<Pid> {
    Pid::from_raw(pid.cast_signed())
}
