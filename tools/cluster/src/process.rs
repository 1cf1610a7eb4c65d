//! Processes of this machine, by what the kernel says of them.

/// Whether a process runs. A zombie does not: nobody has waited for it, but it is over.
pub fn is_running(pid: u32) -> bool {
    // Not by its command line: between being started and being itself a process has none.
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name in parentheses may have some of its own.
    stat.rsplit_once(')').is_some_and(|(_, fields)| !fields.trim_start().starts_with(['Z', 'X']))
}

#[cfg(test)]
mod tests {
    use std::{
        process::{Command, Stdio},
        thread::sleep,
        time::{Duration, Instant},
    };

    use super::*;

    #[test]
    fn a_process_runs_from_its_start_to_its_end_whether_it_was_waited_for_or_not() {
        for _ in 0..200 {
            let mut child =
                Command::new("sleep").arg("600").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            assert!(is_running(child.id()), "as soon as it is there");
            child.kill().unwrap();
            let killed = Instant::now();
            while is_running(child.id()) {
                assert!(killed.elapsed() < Duration::from_secs(10), "it is a zombie now");
                sleep(Duration::from_millis(1));
            }
            child.wait().unwrap();
            assert!(!is_running(child.id()));
        }
    }
}
