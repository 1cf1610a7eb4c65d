//! The promise that nothing outlives its owner, not even when the owner is killed with SIGKILL.
//!
//! A `Keeper` is one small shell process in a process group of its own that reads a pipe. Everything started through
//! [`Keeper::command`] writes its process id into that pipe *before* it becomes the program asked for, so there is no
//! moment in which a process runs unregistered. When the last writer of the pipe is gone, the keeper kills every
//! registered process group and removes the registered folders. (`PR_SET_PDEATHSIG` would not do: it fires when the
//! *thread* that forked ends, and it is not inherited by grandchildren.) The keeper never touches a process that was
//! not registered.

use std::{
    io::{self, PipeWriter, Write},
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, Command, Stdio},
};

const SCRIPT: &str = include_str!("keeper.sh");
/// Runs between fork and the program: stdin is the keeper's pipe until the id is written, `/dev/null` afterwards.
const REGISTER_THEN_EXEC: &str = r#"echo "start $$" >&0 && exec "$@" </dev/null"#;

/// Kills what it knows when its owner is gone. Dropping it does the same at once, and waits.
#[derive(Debug)]
pub struct Keeper {
    pipe: Option<PipeWriter>,
    shell: Child,
}

impl Keeper {
    /// Starts the keeper's shell.
    pub fn start() -> io::Result<Self> {
        let (reader, writer) = io::pipe()?;
        let shell = Command::new("/bin/sh")
            .args(["-c", SCRIPT, "stoker-keeper"])
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .current_dir("/")
            .stdin(reader)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        Ok(Self { pipe: Some(writer), shell })
    }

    /// A command whose process is registered before `program` runs in it, as leader of its own process group.
    /// Its stdin is `/dev/null`; do not set another.
    pub fn command(&self, program: &Path) -> io::Result<Command> {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", REGISTER_THEN_EXEC, "stoker-start"]).arg(program);
        command.stdin(self.pipe().try_clone()?).process_group(0);
        Ok(command)
    }

    /// Says that the process group is gone, so that a later owner of the same id is safe.
    pub fn forget(&self, group: u32) {
        self.tell(&format!("stop {group}\n"));
    }

    /// Removes `dir`, an absolute path, when the owner is gone.
    pub fn remove_at_end(&self, dir: &Path) {
        assert!(
            dir.is_absolute(),
            "the keeper works in another folder: {} would be something else there",
            dir.display()
        );
        self.tell(&format!("dir {}\n", dir.display()));
    }

    fn tell(&self, line: &str) {
        // A keeper that somebody killed cannot be told; its owner still stops everything in the ordinary way.
        if let Err(error) = self.pipe().write_all(line.as_bytes()) {
            tracing::warn!(%error, "the keeper is gone: processes may outlive a kill");
        }
    }

    fn pipe(&self) -> &PipeWriter {
        self.pipe.as_ref().expect("the pipe is open until drop")
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.pipe = None;
        if let Err(error) = self.shell.wait() {
            tracing::warn!(%error, "wait for the keeper");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{path::PathBuf, thread::sleep, time::Duration};

    use super::*;
    use crate::process::is_running;

    fn becomes_dead(pid: u32) -> bool {
        (0..100).any(|_| {
            sleep(Duration::from_millis(20));
            !is_running(pid)
        })
    }

    #[test]
    fn dropping_the_keeper_kills_the_whole_group_and_removes_the_folder() {
        let dir = tempfile::tempdir().unwrap().keep();
        let keeper = Keeper::start().unwrap();
        keeper.remove_at_end(&dir);
        let pid_file = dir.join("grandchild");
        let script = format!("sleep 1000 & echo $! > {}; wait", pid_file.display());
        let mut child = keeper.command(Path::new("/bin/sh")).unwrap().args(["-c", &script]).spawn().unwrap();
        let grandchild = loop {
            match std::fs::read_to_string(&pid_file).unwrap_or_default().trim().parse::<u32>() {
                Ok(pid) => break pid,
                Err(_) => sleep(Duration::from_millis(10)),
            }
        };
        drop(keeper);
        child.wait().unwrap();
        assert!(becomes_dead(grandchild), "the grandchild survived");
        assert!(!dir.exists());
    }

    #[test]
    fn a_forgotten_group_is_left_alone() {
        let keeper = Keeper::start().unwrap();
        let mut child = keeper.command(&PathBuf::from("/bin/sleep")).unwrap().arg("1000").spawn().unwrap();
        sleep(Duration::from_millis(100));
        keeper.forget(child.id());
        drop(keeper);
        assert!(is_running(child.id()));
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
