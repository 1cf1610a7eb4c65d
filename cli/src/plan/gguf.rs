//! A GGUF file as a plan sees it: what stands in its header. Reads that and no weight, so the beginning of a file is enough.

use std::{
    fs::File,
    io::Read,
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, anyhow};
use serde_json::Value;
use stoker_fit::gguf::{Extent, Gguf, Header};

/// Beyond every header with its vocabulary.
const HEADER_BYTES: u64 = 64 << 20;
const MAGIC: [u8; 4] = *b"GGUF";

/// Whether it is one, whatever its name.
pub(super) fn is_one(path: &Path) -> Result<bool> {
    let mut begins = Vec::new();
    open(path)?
        .take(MAGIC.len() as u64)
        .read_to_end(&mut begins)
        .with_context(|| format!("read {}", path.display()))?;
    Ok(begins == MAGIC)
}

/// The file of a directory that has one and no other of its kind.
pub(super) fn only_one(directory: &Path) -> Option<PathBuf> {
    let entries = directory.read_dir().ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let mut files = entries.filter(|path| path.extension().is_some_and(|end| end == "gguf"));
    files.next().filter(|_| files.next().is_none())
}

/// What stands for its `config.json`.
pub(super) fn planning_config(path: &Path) -> Result<Value> {
    let (file, name) = (open(path)?, path.display().to_string());
    let mut begins = Vec::new();
    (&file).take(HEADER_BYTES).read_to_end(&mut begins).with_context(|| format!("read {name}"))?;
    let header = Header::read(&begins, Extent::Beginning).map_err(|reason| anyhow!("{name}: {reason}"))?;
    Ok(Gguf { file: &name, header: &header }.planning_config(&|range| read_at(&file, range))?)
}

fn open(path: &Path) -> Result<File> {
    File::open(path).with_context(|| format!("open {}", path.display()))
}

/// `None` where the file ends before, or the range is no list of angles.
fn read_at(file: &File, range: Range<usize>) -> Option<Vec<u8>> {
    let n_bytes = u64::try_from(range.len()).ok().filter(|n_bytes| *n_bytes <= HEADER_BYTES)?;
    let mut bytes = vec![0; usize::try_from(n_bytes).ok()?];
    file.read_exact_at(&mut bytes, range.start as u64).ok()?;
    Some(bytes)
}
