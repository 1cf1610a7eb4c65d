//! What a background cluster tells about itself in files of its folder: its process id at once, a line in `stages.jsonl`
//! for every stage of its start, `state.json` once it is ready. Reads and writes these files and nothing else.
//!
//! ```text
//! DIR/serve.pid      the background process
//! DIR/serve.log      what the background process says
//! DIR/stages.jsonl   {"stage":"control plane","seconds":3.1}
//! DIR/state.json     written last, whole
//! DIR/cluster/       data, credentials, logs, pods: the library's
//! ```

use std::{
    fs::{self, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf, absolute},
};

use serde::{Deserialize, Serialize};

/// Everything that this program puts into a cluster's folder.
const OWN_NAMES: [&str; 6] = ["serve.pid", "serve.log", "stages.jsonl", "state.json", "state.json.new", "cluster"];

/// A cluster that is ready.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct State {
    /// The background process.
    pub(crate) pid: u32,
    pub(crate) kubeconfig: PathBuf,
    /// Folder of kubectl and the others.
    pub(crate) binaries: PathBuf,
    pub(crate) url: String,
    /// URL of the operator's HTTP, if one runs.
    pub(crate) operator: Option<String>,
    /// URL of its pages for people.
    #[serde(default)]
    pub(crate) pages: Option<String>,
    /// URL of the gateway's address for all deployments, if one runs.
    #[serde(default)]
    pub(crate) gateway: Option<String>,
    /// Unix seconds.
    pub(crate) ready_at: i64,
}

/// One finished stage of a start.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct Stage {
    pub(crate) stage: String,
    pub(crate) seconds: f64,
}

/// What a folder says.
#[derive(Clone, Debug)]
pub(crate) enum Found {
    /// No folder, or an empty one.
    Nothing,
    /// A background process is there, and not ready yet.
    Starting(u32),
    /// A background process is there and ready.
    Running(State),
    /// Files of a cluster whose process is gone (or never became ready), and no others.
    Stale,
    /// Somebody else's files: not ours to remove.
    Foreign,
}

/// The files of one background cluster.
#[derive(Clone, Debug)]
pub(crate) struct Files {
    dir: PathBuf,
}

impl Files {
    /// `dir` is made absolute: it is looked for in command lines, and removed by a process with another working folder.
    pub(crate) fn at(dir: &Path) -> Self {
        Self { dir: absolute(dir).unwrap_or_else(|_| dir.to_owned()) }
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn log(&self) -> PathBuf {
        self.dir.join("serve.log")
    }

    pub(crate) fn cluster_dir(&self) -> PathBuf {
        self.dir.join("cluster")
    }

    pub(crate) fn find(&self) -> Found {
        let pid = fs::read_to_string(self.pid_path()).ok().and_then(|text| text.trim().parse().ok());
        match (pid.filter(|&pid| is_serving(pid, &self.dir)), self.read()) {
            (Some(_), Some(state)) => Found::Running(state),
            (Some(pid), None) => Found::Starting(pid),
            (None, _) => self.what_is_left(),
        }
    }

    fn what_is_left(&self) -> Found {
        let names = fs::read_dir(&self.dir).into_iter().flatten().flatten().map(|entry| entry.file_name());
        let names: Vec<_> = names.collect();
        match names.iter().all(|name| OWN_NAMES.iter().any(|own| name == own)) {
            _ if names.is_empty() => Found::Nothing,
            true => Found::Stale,
            false => Found::Foreign,
        }
    }

    /// Moves the state into place whole: a reader sees all of it or none.
    pub(crate) fn write(&self, state: &State) -> io::Result<()> {
        let draft = self.dir.join("state.json.new");
        fs::write(&draft, serde_json::to_vec_pretty(state)?)?;
        fs::rename(draft, self.state())
    }

    pub(crate) fn write_pid(&self, pid: u32) -> io::Result<()> {
        fs::write(self.pid_path(), pid.to_string())
    }

    pub(crate) fn add_stage(&self, stage: &str, seconds: f64) -> io::Result<()> {
        let line = serde_json::to_string(&Stage { stage: stage.to_owned(), seconds })?;
        let mut file = OpenOptions::new().create(true).append(true).open(self.stages_path())?;
        writeln!(file, "{line}")
    }

    pub(crate) fn stages(&self) -> Vec<Stage> {
        parse_stages(&fs::read_to_string(self.stages_path()).unwrap_or_default())
    }

    fn read(&self) -> Option<State> {
        serde_json::from_slice(&fs::read(self.state()).ok()?).ok()
    }

    fn pid_path(&self) -> PathBuf {
        self.dir.join("serve.pid")
    }

    fn state(&self) -> PathBuf {
        self.dir.join("state.json")
    }

    fn stages_path(&self) -> PathBuf {
        self.dir.join("stages.jsonl")
    }
}

/// Whether `pid` is the background process of `dir`, and not another that got its number.
fn is_serving(pid: u32, dir: &Path) -> bool {
    let command_line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words: Vec<&[u8]> = command_line.split(|&byte| byte == 0).collect();
    let has = |word: &[u8]| words.contains(&word);
    has(b"serve") && has(dir.as_os_str().as_encoded_bytes())
}

/// A line that is still being written is left for the next look.
fn parse_stages(text: &str) -> Vec<Stage> {
    text.lines().map_while(|line| serde_json::from_str(line).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_is_read_once_its_line_is_whole() {
        let stages = parse_stages("{\"stage\":\"a\",\"seconds\":1.5}\n{\"stage\":\"b\",\"sec");
        assert_eq!(stages, [Stage { stage: "a".to_owned(), seconds: 1.5 }]);
    }

    #[test]
    fn a_folder_with_other_files_is_not_ours() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("serve.log"), "").unwrap();
        assert!(matches!(Files::at(dir.path()).find(), Found::Stale));
        fs::write(dir.path().join("thesis.tex"), "").unwrap();
        assert!(matches!(Files::at(dir.path()).find(), Found::Foreign));
    }

    #[test]
    fn a_folder_whose_process_is_gone_is_stale() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::at(dir.path());
        assert!(matches!(files.find(), Found::Nothing));
        let state = State {
            pid: std::process::id(),
            kubeconfig: "k".into(),
            binaries: "b".into(),
            url: "u".to_owned(),
            operator: None,
            pages: None,
            gateway: None,
            ready_at: 0,
        };
        files.write(&state).unwrap();
        files.write_pid(std::process::id()).unwrap();
        assert!(matches!(files.find(), Found::Stale), "this process serves no cluster");
    }
}
