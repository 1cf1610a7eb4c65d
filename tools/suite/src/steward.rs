//! The process above a part's program. Whatever the program leaves behind becomes this process's child, so that it sees all of them to their
//! end and can say what the whole part cost: clusters that tests share end after their program, and nobody else waits for those.

use std::{
    ffi::OsString,
    fs, io,
    path::Path,
    process::{Child, Command, ExitCode, ExitStatus, Stdio},
    sync::mpsc::{RecvTimeoutError, channel},
    thread::{self, sleep},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use rustix::{
    io::Errno,
    process::{Pid, Signal, WaitOptions, getpid, kill_process, set_child_subreaper, wait},
};

/// The argument that makes a process of this program a steward.
pub(crate) const WORD: &str = "--part";
/// Processes that a test started end with it, by their keeper; what goes on for longer is not waited for.
const LEFT_BEHIND: Duration = Duration::from_secs(30);
/// A program that goes on for so long hangs. The longest takes two minutes, and ten on a machine with much else to do.
const HANGS: Duration = Duration::from_secs(20 * 60);
const POLL: Duration = Duration::from_millis(20);
/// Of clock ticks: the kernel shows a hundred a second to everybody (USER_HZ).
const TICKS_A_SECOND: f64 = 100.0;

/// What is known of a part at its end.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Account {
    /// Of cores, its program and all that this started, as far as they ended.
    pub(crate) cpu_seconds: f64,
    /// Whether everything that it started has ended.
    pub(crate) left_nobody: bool,
    /// How the program ended, when it failed.
    pub(crate) failure: Option<String>,
}

/// Runs a program to its end, and then those that it left behind. What they say goes to standard error; the account, one line, to standard output.
pub(crate) fn run(program: &Path, arguments: &[OsString]) -> Result<ExitCode> {
    set_child_subreaper(Some(getpid())).context("become the parent of processes that are left behind")?;
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(io::stderr());
    let mut child = command.spawn().with_context(|| format!("start {}", program.display()))?;
    let (status, hung) = ended(&mut child, HANGS).with_context(|| format!("wait for {}", program.display()))?;
    let left_nobody = reap(Instant::now() + LEFT_BEHIND);
    let cpu_seconds = cpu_seconds()?;
    let failure = match hung {
        true => Some(format!("killed: it went on for {} s", HANGS.as_secs())),
        false => (!status.success()).then(|| status.to_string()),
    };
    println!("{}", write(&Account { cpu_seconds, left_nobody, failure }));
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Waits for a program's end, and kills it if that does not come in time; how it ended, and whether it was killed.
fn ended(child: &mut Child, patience: Duration) -> io::Result<(ExitStatus, bool)> {
    let (pid, (over, told)) = (Pid::from_child(child), channel::<()>());
    let watchman = thread::spawn(move || {
        let hangs = told.recv_timeout(patience) == Err(RecvTimeoutError::Timeout);
        // An error: it has ended at last.
        hangs && kill_process(pid, Signal::KILL).is_ok()
    });
    let status = child.wait()?;
    drop(over);
    Ok((status, watchman.join().unwrap_or_default()))
}

/// Waits for everything that has become ours; whether nothing is left.
fn reap(deadline: Instant) -> bool {
    loop {
        match wait(WaitOptions::NOHANG) {
            Ok(Some(_)) | Err(Errno::INTR) => {}
            Ok(None) if Instant::now() < deadline => sleep(POLL),
            Ok(None) => return false,
            Err(_) => return true,
        }
    }
}

/// What all took that this process started and waited for, and that they started and waited for.
pub(crate) fn cpu_seconds() -> Result<f64> {
    let stat = fs::read_to_string("/proc/self/stat").context("read /proc/self/stat")?;
    of_children(&stat).context("the kernel says what children took")
}

/// Seconds of user and system time of children that were waited for, and of those whom these waited for: fields 16 and 17 of all.
fn of_children(stat: &str) -> Option<f64> {
    // The name before them may have spaces.
    let (_, rest) = stat.rsplit_once(") ")?;
    let ticks: Vec<f64> = rest.split(' ').skip(13).take(2).map(|field| field.parse().ok()).collect::<Option<_>>()?;
    (ticks.len() == 2).then(|| ticks.iter().sum::<f64>() / TICKS_A_SECOND)
}

fn write(account: &Account) -> String {
    let Account { cpu_seconds, left_nobody, failure } = account;
    format!("{cpu_seconds:.2} {left_nobody} {}", failure.as_deref().unwrap_or_default())
}

/// Reads what [`run`] wrote; nothing when it was killed before it could.
pub(crate) fn read(line: &str) -> Option<Account> {
    let (seconds, rest) = line.trim_end_matches('\n').split_once(' ')?;
    let (left_nobody, failure) = rest.split_once(' ')?;
    let failure = (!failure.is_empty()).then(|| failure.to_owned());
    Some(Account { cpu_seconds: seconds.parse().ok()?, left_nobody: left_nobody.parse().ok()?, failure })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_are_counted_behind_a_name_with_spaces() {
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194304 9 8 0 0 11 12 250 50 20 0 1 0";
        assert_eq!(of_children(stat), Some(3.0));
        assert_eq!(of_children("7 (a) S 1 7"), None);
    }

    #[test]
    fn who_goes_on_for_too_long_is_killed_and_who_ends_is_not() {
        let run = |seconds: &str, patience| {
            let mut child = Command::new("sleep").arg(seconds).spawn().unwrap();
            ended(&mut child, Duration::from_millis(patience)).map(|(status, hung)| (status.success(), hung)).unwrap()
        };
        assert_eq!(run("600", 50), (false, true));
        assert_eq!(run("0", 60_000), (true, false));
    }

    #[test]
    fn an_account_is_read_as_it_was_written() {
        for (left_nobody, failure) in [(true, None), (false, Some("signal: 9 (SIGKILL)".to_owned()))] {
            let account = Account { cpu_seconds: 12.5, left_nobody, failure };
            assert_eq!(read(&format!("{}\n", write(&account))), Some(account));
        }
        assert_eq!(read(""), None, "it was killed");
    }
}
