//! Loading: starts the engine off the threads that serve HTTP, shows how far it is, and says at the end what is served.

use std::{
    fs,
    io::{self, IsTerminal, Write},
    net::SocketAddr,
    path::Path,
    sync::Arc,
    thread::sleep,
    time::Duration,
};

use anyhow::{Context, anyhow, bail};
use serde_json::Value;
use stoker_crds::{
    contract::{ModelReport, is_commit},
    description::{CONFIG_BYTES_MAX, in_shares},
};
use stoker_engine::{ChatTemplates, Engine, EngineHandle, ModelFiles, ModelInfo, StartError, model::planning_config};
use stoker_fetch::{Shelf, cache, lease};

use crate::{
    chat_template::{ChatTemplate, SpecialTokens},
    config::{Settings, StartedBy},
    dead_end::dead_end,
    lifecycle::Event,
    replica::{Replica, Served},
    wording::in_words_of,
};

/// Between the first failure to load and the next try; twice as long after each further one.
const FIRST_PAUSE: Duration = Duration::from_secs(10);
/// The longest pause. Shorter than a load may stand still: who waits to try again is not taken for hung.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);

/// Said after the reason of a failure: the same words at every try, so that a status which has them is not written again.
pub const TRIED_AGAIN: &str = "tried again with pauses of up to 5 minutes";

/// What came of one try to load.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Loaded {
    /// The model is in service.
    Serving,
    /// It cannot be loaded now; the replica says why.
    Failed,
}

/// Loads the model and puts it in service, with a pause after each failure: volumes fail over, files are still being
/// copied. Blocks until then. An error means: end the process.
pub fn load_until_served(replica: &Arc<Replica>, address: SocketAddr) -> anyhow::Result<()> {
    let mut pause = FIRST_PAUSE;
    while load(replica, address)? == Loaded::Failed {
        tracing::info!(seconds = pause.as_secs(), "loading is tried again after a pause");
        sleep(pause);
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
    Ok(())
}

/// Tries to load the model once, and puts it in service or notes why not. An error means: end the process.
pub fn load(replica: &Arc<Replica>, address: SocketAddr) -> anyhow::Result<Loaded> {
    replica.begin_to_load();
    match start_engine(replica) {
        Ok(served) => {
            // A reader that went away must not keep the model from being served.
            let _ = writeln!(io::stdout(), "{}", summary(replica.settings(), served.engine.model(), address));
            replica.serve(served);
            Ok(Loaded::Serving)
        }
        Err(error) => fail(replica, error),
    }
}

/// A replica that the operator started stays up and reports why; one started by hand exits with the reason.
fn fail(replica: &Replica, error: anyhow::Error) -> anyhow::Result<Loaded> {
    let error = error.context(what_was_asked(replica.settings()));
    match replica.settings().started_by {
        StartedBy::Person => Err(error),
        StartedBy::Operator => {
            let reason = format!("{error:#}");
            tracing::error!(reason, "the model cannot be loaded; staying up to report it");
            replica.apply(Event::LoadFailed(format!("{reason} ({TRIED_AGAIN})")));
            Ok(Loaded::Failed)
        }
    }
}

/// What failed. Where ranks or stages share the model they are named: what fails then, a GPU that is not there or heads that are not
/// divided, may be about their number.
fn what_was_asked(settings: &Settings) -> String {
    let Settings { source, started_by, limits, .. } = settings;
    let asked = [("tensor_parallel", limits.tensor_parallel), ("pipeline_parallel", limits.pipeline_parallel)];
    let several = asked.into_iter().filter(|(_, n)| *n > 1);
    let named: Vec<String> = several.map(|(setting, n)| format!("{} {n}", in_words_of(*started_by, setting))).collect();
    if named.is_empty() { format!("load {source}") } else { format!("load {source} with {}", named.join(" and ")) }
}

fn start_engine(replica: &Arc<Replica>) -> anyhow::Result<Served> {
    let settings = replica.settings();
    let reader = settings.started_by;
    // Before a file of it is opened: a cache that is full keeps what is used. It is held for as long as the process lives.
    if !settings.source.contains("://") {
        if let Some(why) = dead_end(Path::new(&settings.source)) {
            bail!("{why}: correct the path in {}", in_words_of(reader, "model_source"));
        }
        let lease = lease::hold(Path::new(&settings.source)).context("hold the model in its cache")?;
        if let Some(shelf) = lease.as_ref().and_then(|_| shelf(Path::new(&settings.source))) {
            replica.offer(shelf);
        }
        std::mem::forget(lease);
        replica.note_model(fetched(Path::new(&settings.source)));
        replica.note_config(config_text(Path::new(&settings.source)));
    }
    let config = settings.engine().map_err(|error| anyhow!(in_words_of(reader, &error.to_string())))?;
    let progress = ProgressLine::new(&settings.source);
    let noted = replica.clone();
    let started = Engine::start(config, move |fraction| {
        noted.note_load_progress(fraction);
        progress.show(fraction);
    });
    let engine = started.map_err(|error| for_reader(reader, error))?;
    let template = chat_template(&engine).context("chat template")?;
    Ok(Served::new(engine, template, settings.formats))
}

/// The configuration of a model, if it is short enough to be told: its `config.json`, or what stands for that of a GGUF file.
fn config_text(source: &Path) -> Option<String> {
    // What is wrong with a file is said when it is loaded.
    let of_gguf = planning_config(&ModelFiles::Directory(source.to_owned())).ok()?;
    let config = of_gguf.or_else(|| read_config(&source.join("config.json")))?;
    Some(config.to_string()).filter(|text| text.len() <= CONFIG_BYTES_MAX)
}

fn read_config(file: &Path) -> Option<Value> {
    // With its spaces it is longer than it is told.
    let is_short = fs::metadata(file).is_ok_and(|found| found.len() <= 2 * CONFIG_BYTES_MAX as u64);
    serde_json::from_slice(&is_short.then(|| fs::read(file).ok())??).ok()
}

/// What a cache of fetched models calls the directory; `None` for one that is in none.
fn fetched(source: &Path) -> Option<ModelReport> {
    let dir = fs::canonicalize(source).ok()?;
    let commit = cache::commit_of(&dir).filter(|commit| is_commit(commit))?.to_owned();
    Some(ModelReport { commit, bytes: file_bytes(&dir), ..ModelReport::default() })
}

/// Bytes of the files in a directory, or of those that links there lead to.
fn file_bytes(dir: &Path) -> u64 {
    let found = fs::read_dir(dir).into_iter().flatten().flatten().filter_map(|entry| fs::metadata(entry.path()).ok());
    found.filter(fs::Metadata::is_file).map(|file| file.len()).sum()
}

/// What of it others may have. A model that is in no cache of ours nobody verified.
fn shelf(source: &Path) -> Option<Shelf> {
    Shelf::of(&fs::canonicalize(source).ok()?)
        .inspect_err(|error| tracing::warn!(%error, "files of the model are given to nobody"))
        .ok()?
}

/// What is wrong with a model's files names files and no settings; a file may be called like a setting.
fn for_reader(reader: StartedBy, error: StartError) -> anyhow::Error {
    match error {
        StartError::Model(_) => error.into(),
        _ => anyhow!(in_words_of(reader, &error.to_string())),
    }
}

fn chat_template(engine: &EngineHandle) -> anyhow::Result<Option<ChatTemplate>> {
    let model = engine.model();
    let Some(ChatTemplates { default, tool_use }) = model.chat_template.clone() else { return Ok(None) };
    let specials = SpecialTokens { bos: model.bos_token.clone(), eos: model.eos_token.clone() };
    let template = ChatTemplate::compile(default, specials)?;
    Ok(Some(match tool_use {
        Some(source) => template.with_tool_use(&source)?,
        None => template,
    }))
}

/// What is served, on what, with how much KV cache, and how to try it.
fn summary(settings: &Settings, model: &ModelInfo, address: SocketAddr) -> String {
    let name = &settings.served_names[0];
    let ModelInfo { architecture, n_params, dtype, held, max_model_len, device, memory, .. } = model;
    let millions = *n_params as f64 / 1e6;
    let mib = |bytes: u64| bytes / (1 << 20);
    let (weights, kv) = (mib(memory.weights_bytes), mib(memory.kv_bytes));
    let held = in_shares(held.iter().map(|(format, bytes)| (format, *bytes)));
    let (kv_tokens, token_bytes) = (memory.kv_tokens(), memory.kv_bytes_per_token);
    let blocks = memory.kv_blocks;
    let seqs = model.max_num_seqs;
    let url = reachable(address);
    format!(
        "serving {name} ({architecture}, {millions:.1} M parameters, {dtype}, {weights} MiB: {held}) on {device}\n\
         context {max_model_len} tokens, KV cache {kv_tokens} tokens of {token_bytes} bytes ({blocks} blocks, {kv} MiB), up to {seqs} \
         sequences\n\
         try: curl {url}/v1/chat/completions -d '{{\"messages\": [{{\"role\": \"user\", \"content\": \"Hello!\"}}]}}'"
    )
}

/// A URL that works from this machine, also when listening on every address.
fn reachable(address: SocketAddr) -> String {
    if address.ip().is_unspecified() {
        format!("http://127.0.0.1:{}", address.port())
    } else {
        format!("http://{address}")
    }
}

/// One line on a terminal that is written over; nothing elsewhere, where `/readyz` tells the progress.
struct ProgressLine {
    label: Option<String>,
}

impl ProgressLine {
    fn new(source: &str) -> Self {
        Self { label: std::io::stderr().is_terminal().then(|| source.to_owned()) }
    }

    fn show(&self, fraction: f32) {
        let Some(label) = &self.label else { return };
        let end = if fraction < 1.0 { "" } else { "\n" };
        let mut terminal = std::io::stderr().lock();
        // A terminal that went away is no reason to stop loading.
        let _ = write!(terminal, "\rloading {label}: {:3.0} %{end}", fraction * 100.0).and_then(|()| terminal.flush());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_url_to_try_works_from_this_machine() {
        assert_eq!(reachable("0.0.0.0:8000".parse().unwrap()), "http://127.0.0.1:8000");
        assert_eq!(reachable("127.77.0.2:80".parse().unwrap()), "http://127.77.0.2:80");
    }
}
