//! A checkpoint as GGUF, converted and quantised once into the cache by llama.cpp's own programs: what it reads, and what the
//! engine reads for formats that safetensors has no word for.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use stoker_engine::ops::Isa;

const TO_GGUF: &str = include_str!("../../tools/bench/to-gguf.py");

/// A llama.cpp that `tools/bench/llama-cpp.sh` built into the cache.
#[derive(Clone, Debug)]
pub struct Toolbox {
    home: PathBuf,
    bin: PathBuf,
    models: PathBuf,
    /// The archive's version.
    pub version: String,
}

impl Toolbox {
    /// Finds the one that was built for those instructions, or for this machine.
    pub fn open(cache: &Path, isa: Option<Isa>) -> Result<Self> {
        let built_for = isa.map_or("native", Isa::name);
        let home = cache.join("bench/peers/llama.cpp");
        let bin = home.join(format!("bin-{built_for}"));
        let version = fs::read_to_string(bin.join("version"))
            .with_context(|| format!("not installed: run tools/bench/llama-cpp.sh {built_for}"))?;
        Ok(Self { home, bin, models: cache.join("bench/models"), version: version.trim().to_owned() })
    }

    /// One of its programs.
    pub fn program(&self, name: &str) -> PathBuf {
        self.bin.join(name)
    }

    /// The same weights in the same format as one file.
    pub fn convert(&self, directory: &Path) -> Result<PathBuf> {
        let name = directory.file_name().context("a checkpoint is a directory")?.to_string_lossy();
        self.made(&format!("{name}.gguf"), |out| {
            let mut command = Command::new(self.home.join("venv/bin/python"));
            command.args(["-c", TO_GGUF]).args([directory, out]);
            command
        })
    }

    /// Every matrix in one format, by its name in lower case.
    pub fn quantize(&self, directory: &Path, format: &str) -> Result<PathBuf> {
        let from = self.convert(directory)?;
        let name = from.file_stem().context("a file has a name")?.to_string_lossy();
        self.made(&format!("{name}-{format}.gguf"), |out| {
            let mut command = Command::new(self.program("llama-quantize"));
            command.arg("--pure").args([&from, out]).arg(format.to_uppercase());
            command
        })
    }

    /// A file of the cache: written beside its place first, so that one that is there is whole.
    fn made(&self, name: &str, command: impl FnOnce(&Path) -> Command) -> Result<PathBuf> {
        let path = self.models.join(name);
        if path.exists() {
            return Ok(path);
        }
        fs::create_dir_all(&self.models).with_context(|| format!("create {}", self.models.display()))?;
        let unfinished = self.models.join(format!("{name}.{}", std::process::id()));
        let mut command = command(&unfinished);
        let output = command.output().with_context(|| format!("start {}", command.get_program().display()))?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "write {}: {}", path.display(), last_lines(&said));
        fs::rename(&unfinished, &path).with_context(|| format!("rename to {}", path.display()))?;
        Ok(path)
    }
}

/// What a program said last: where its reason stands.
pub(crate) fn last_lines(text: &str) -> String {
    let lines: Vec<_> = text.lines().rev().take(3).collect();
    lines.into_iter().rev().collect::<Vec<_>>().join(" | ")
}
