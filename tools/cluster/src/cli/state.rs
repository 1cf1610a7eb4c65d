//! What a background cluster tells about itself in files of its folder: `state.json` once it is ready, a line in
//! `stages.jsonl` for every stage of its start. Reads and writes these files and nothing else.
//!
//! ```text
//! DIR/serve.log      what the background process says
//! DIR/stages.jsonl   {"stage":"control plane","seconds":3.1}
//! DIR/state.json     written last, whole
//! DIR/cluster/       data, credentials, logs, pods: the library's
//! ```

use std::{
    fs::{self, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

/// A cluster that is ready.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct State {
    /// The background process.
    pub(crate) pid: u32,
    pub(crate) kubeconfig: PathBuf,
    /// Folder of kubectl and the others.
    pub(crate) binaries: PathBuf,
    pub(crate) url: String,
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
    /// A background process is there and ready.
    Running(State),
    /// Files of a cluster whose process is gone (or never became ready).
    Stale,
}

/// The files of one background cluster.
#[derive(Clone, Debug)]
pub(crate) struct Files {
    dir: PathBuf,
}

impl Files {
    pub(crate) fn at(dir: &Path) -> Self {
        Self { dir: dir.to_owned() }
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
        match self.read() {
            Some(state) if is_serving(state.pid, &self.dir) => Found::Running(state),
            _ if fs::read_dir(&self.dir).is_ok_and(|mut entries| entries.next().is_some()) => Found::Stale,
            _ => Found::Nothing,
        }
    }

    /// Moves the state into place whole: a reader sees all of it or none.
    pub(crate) fn write(&self, state: &State) -> io::Result<()> {
        let draft = self.dir.join("state.json.new");
        fs::write(&draft, serde_json::to_vec_pretty(state)?)?;
        fs::rename(draft, self.state())
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
    fn a_folder_whose_process_is_gone_is_stale() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::at(dir.path());
        assert!(matches!(files.find(), Found::Nothing));
        let state = State {
            pid: std::process::id(),
            kubeconfig: "k".into(),
            binaries: "b".into(),
            url: "u".to_owned(),
            ready_at: 0,
        };
        files.write(&state).unwrap();
        assert!(matches!(files.find(), Found::Stale), "this process serves no cluster");
    }
}
