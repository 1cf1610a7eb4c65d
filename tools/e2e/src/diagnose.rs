//! What to look at after a failure: objects, events, and the ends of logs. Never fails itself; what cannot be had is
//! left out.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{
    Options,
    daemon::{log_directory, log_tail},
    kubectl::Kubectl,
};

/// Enough of a log to see the last error.
const N_TAIL_LINES: usize = 15;

/// Prints the state of the cluster to standard error.
pub(crate) fn print(options: &Options) {
    let kubectl = Kubectl::new(options);
    for args in [
        &["get", "infd,pods,services,configmaps,networkpolicies", "-A", "-o", "wide"][..],
        &["get", "events", "-A", "--sort-by=.lastTimestamp"],
        &["describe", "infd", "-A"],
    ] {
        let text = kubectl.run(args).unwrap_or_else(|error| error.to_string());
        eprintln!("--- kubectl {}\n{text}", args.join(" "));
    }
    for log in logs(&log_directory()) {
        eprintln!("--- {}\n{}", log.display(), log_tail(&log, N_TAIL_LINES));
    }
}

/// Copies all logs to where the user asked for them.
pub(crate) fn keep_logs(options: &Options) {
    let Some(directory) = &options.logs else { return };
    for log in logs(&log_directory()) {
        let name = log.strip_prefix(log_directory()).unwrap_or(&log).display().to_string().replace('/', "_");
        if let Err(error) = fs::create_dir_all(directory).and_then(|()| fs::copy(&log, directory.join(name))) {
            eprintln!("keep {}: {error}", log.display());
        }
    }
}

fn logs(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths.into_iter().flat_map(|path| if path.is_dir() { logs(&path) } else { vec![path] }).collect()
}
