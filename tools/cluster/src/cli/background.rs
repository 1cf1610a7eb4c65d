//! Starts, finds and stops the background process of a cluster. Never holds a cluster itself.

use std::{
    env,
    fs::{self, File, OpenOptions},
    io::{Read, Seek},
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use super::{
    ClusterArgs,
    state::{Files, Found, Stage, State},
};

const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// An orderly stop takes a fraction of a second; after this long the process is killed and its keeper cleans up.
const STOP_TIMEOUT: Duration = Duration::from_secs(15);

pub(crate) fn up(args: &ClusterArgs) -> anyhow::Result<()> {
    let files = Files::at(&args.dir.dir);
    if let Found::Running(state) = files.find() {
        println!("a cluster runs already in {}", files.dir().display());
        tell(&state);
        return Ok(());
    }
    let state = start(args, &mut |stage| println!("{:<18} {:6.1} s", stage.stage, stage.seconds))?;
    tell(&state);
    Ok(())
}

pub(crate) fn status(dir: &Path) -> anyhow::Result<()> {
    match Files::at(dir).find() {
        Found::Running(state) => tell(&state),
        Found::Starting(pid) => println!("a cluster is starting in {} (process {pid})", dir.display()),
        Found::Stale => {
            println!("no cluster runs, but {} has files of one; `stoker-cluster down` removes them", dir.display())
        }
        Found::Nothing | Found::Foreign => println!("no cluster runs in {}", dir.display()),
    }
    Ok(())
}

pub(crate) fn down(dir: &Path) -> anyhow::Result<()> {
    let files = Files::at(dir);
    match files.find() {
        Found::Nothing | Found::Foreign => println!("no cluster runs in {}", dir.display()),
        Found::Stale => remove(&files)?,
        Found::Starting(pid) | Found::Running(State { pid, .. }) => {
            stop(pid, &files)?;
            println!("stopped; {} is gone", dir.display());
        }
    }
    Ok(())
}

fn tell(state: &State) {
    println!("API server   {}\nkubeconfig   {}\nprocess      {}", state.url, state.kubeconfig.display(), state.pid);
}

/// Starts the background process, unless one is starting already, and follows it until it is ready.
pub(crate) fn start(args: &ClusterArgs, on_stage: &mut dyn FnMut(&Stage)) -> anyhow::Result<State> {
    let files = Files::at(&args.dir.dir);
    match files.find() {
        Found::Running(state) => return Ok(state),
        Found::Starting(_) => {}
        Found::Foreign => bail!("{} holds other files; give --dir a folder of its own", files.dir().display()),
        Found::Stale => remove(&files)?,
        Found::Nothing => {}
    }
    fs::create_dir_all(files.dir()).with_context(|| format!("create {}", files.dir().display()))?;
    // Kept open: when the start fails, the log's name is gone with the folder before we can read it.
    let open = || OpenOptions::new().create(true).append(true).read(true).open(files.log());
    let mut log = open().with_context(|| format!("open {}", files.log().display()))?;
    let child = if let Found::Starting(_) = files.find() { None } else { Some(spawn(args, &files, &log)?) };
    follow(&files, child, &mut log, on_stage)
}

fn follow(
    files: &Files,
    mut child: Option<Child>,
    log: &mut File,
    on_stage: &mut dyn FnMut(&Stage),
) -> anyhow::Result<State> {
    let mut n_told = 0;
    loop {
        for stage in files.stages().iter().skip(n_told) {
            on_stage(stage);
            n_told += 1;
        }
        let found = files.find();
        if let Found::Running(state) = found {
            return Ok(state);
        }
        // Of a process that we did not start we know only what the folder says. Of our own we know better: for a moment
        // after its start it has no command line yet, and its last words come after its folder is gone.
        let goes_on = match &mut child {
            Some(child) => child.try_wait().context("look at the background process")?.is_none(),
            None => matches!(found, Found::Starting(_)),
        };
        if !goes_on {
            bail!("the cluster did not start:\n{}", last_words(log));
        }
        sleep(POLL_INTERVAL);
    }
}

/// A copy of this program in a process group of its own, so that Ctrl-C here does not reach it.
fn spawn(args: &ClusterArgs, files: &Files, log: &File) -> anyhow::Result<Child> {
    let mut command = Command::new(env::current_exe().context("find this program")?);
    command
        .arg("serve")
        .arg("--dir")
        .arg(files.dir())
        .arg("--source")
        .arg(&args.source)
        .arg("--gpus")
        .arg(args.gpus.to_string());
    if let Some(owner) = args.owner {
        command.arg("--owner").arg(owner.to_string());
    }
    for image in &args.images {
        command.arg("--image").arg(format!("{}={}", image.name, image.binary.display()));
    }
    for (flag, binary) in [("--agent", &args.agent), ("--operator", &args.operator), ("--gateway", &args.gateway)] {
        if let Some(binary) = binary {
            command.arg(flag).arg(binary);
        }
    }
    command.stdin(Stdio::null()).stderr(log.try_clone()?).stdout(log.try_clone()?).process_group(0);
    let child = command.spawn().context("start the background process")?;
    files.write_pid(child.id()).context("write serve.pid")?;
    Ok(child)
}

fn last_words(log: &mut File) -> String {
    let mut text = String::new();
    // What cannot be read is missing from the message, which has the exit status at least.
    let _unreadable = log.rewind().and_then(|()| log.read_to_string(&mut text));
    text.trim_end().to_owned()
}

fn stop(pid: u32, files: &Files) -> anyhow::Result<()> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).context("serve.pid has no process id")?;
    let deadline = Instant::now() + STOP_TIMEOUT;
    kill_process(pid, Signal::TERM).context("stop the cluster")?;
    while test_kill_process(pid).is_ok() && matches!(files.find(), Found::Starting(_) | Found::Running(_)) {
        if Instant::now() >= deadline {
            kill_process(pid, Signal::KILL).context("kill the cluster")?;
        }
        sleep(POLL_INTERVAL);
    }
    // The keeper may still be removing what is left.
    while files.dir().exists() && Instant::now() < deadline {
        sleep(POLL_INTERVAL);
    }
    remove(files)
}

fn remove(files: &Files) -> anyhow::Result<()> {
    match fs::remove_dir_all(files.dir()) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", files.dir().display()))
        }
        _ => Ok(()),
    }
}
