//! The file that `--record` appends to: records of one deployment, oldest first, each once.

use std::{
    fs::{File, OpenOptions},
    io::{Read as _, Write as _},
    path::Path,
};

use anyhow::{Context, Result, bail};
use stoker_scaling::DecisionRecord;

use crate::records;

/// See the module.
#[derive(Debug)]
pub(super) struct Journal {
    file: File,
    name: String,
    /// Time of its last record, Unix time in milliseconds.
    last_ms: u64,
}

impl Journal {
    /// Opens or makes the file; one that holds anything but records is refused.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let mut file = OpenOptions::new().create(true).append(true).read(true).open(path);
        let mut text = String::new();
        let file = file.as_mut().map_err(|error| anyhow::anyhow!("open {name}: {error}"))?;
        file.read_to_string(&mut text).with_context(|| format!("read {name}"))?;
        if !(text.is_empty() || text.ends_with('\n')) {
            bail!("{name}: its last line has no end; remove the line, then records can be appended");
        }
        let last_ms =
            if text.is_empty() { 0 } else { records::parse(&name, &text)?.last().map_or(0, |last| last.at_ms) };
        Ok(Self { file: file.try_clone().with_context(|| format!("open {name}"))?, name, last_ms })
    }

    /// Appends those that are newer than what the file has.
    pub(super) fn append(&mut self, records: &[DecisionRecord]) -> Result<()> {
        let news: Vec<_> = records.iter().filter(|record| record.at_ms > self.last_ms).collect();
        let lines: String = news.iter().map(|record| record.to_line() + "\n").collect();
        self.file.write_all(lines.as_bytes()).with_context(|| format!("append to {}", self.name))?;
        self.last_ms = news.last().map_or(self.last_ms, |record| record.at_ms);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::explain::pick::tests::records as some_records;

    #[test]
    fn a_record_is_written_once_however_often_it_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("chat.jsonl");
        let seen = some_records();
        Journal::open(&path).unwrap().append(&seen[..2]).unwrap();
        let mut again = Journal::open(&path).unwrap();
        again.append(&seen).unwrap();
        again.append(&seen).unwrap();
        assert_eq!(records::parse("x", &fs::read_to_string(&path).unwrap()).unwrap(), seen);
    }

    #[test]
    fn a_file_of_something_else_is_refused_and_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notes.txt");
        for text in ["notes\n", "{\"formula\": 1"] {
            fs::write(&path, text).unwrap();
            assert!(Journal::open(&path).is_err());
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
    }
}
