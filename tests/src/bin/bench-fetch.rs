//! `bench-fetch`: a model from a hub on loopback into memory, by `stoker-agent fetch`, by curl, and by curl with sha256sum
//! behind it, taken in turns. Both ends share this machine's CPUs, and so does the hub's.

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Result, ensure};
use clap::Parser;
use stoker_figures::{self as figures, Figure, Key, Run, System};
use stoker_tests::{
    cluster::built,
    hub::{Commit, Hub, Repository},
};

const MODEL: &str = "bench/model";

/// Measures fetching on this machine.
#[derive(Debug, Parser)]
struct Args {
    /// File that figures are appended to. Default: they are only printed.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Bytes of the model, in MiB; four shards.
    #[arg(long, default_value_t = 4096)]
    mib: usize,
    /// How often each fetches.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Where to: memory, so that no disk is measured.
    #[arg(long, default_value = "/dev/shm")]
    dir: PathBuf,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let (commit, bytes) = model(args.mib << 20);
    let hub = Hub::start(vec![Repository::public(MODEL, commit.clone())])?;
    let mut speeds = [const { Vec::new() }; 3];
    for _ in 0..args.rounds {
        for (place, fetch) in [ours, curl, curl_and_sum].into_iter().enumerate() {
            warm(&args.dir, bytes)?;
            let dir = tempfile::tempdir_in(&args.dir)?;
            let begun = Instant::now();
            fetch(&hub, &commit, dir.path())?;
            speeds[place].push(bytes as f64 / begun.elapsed().as_secs_f64() / 1e9);
        }
    }
    let run = Run::start("make bench-fetch");
    let key = || Key { model: "none", dtype: "none", case: "fetch", metric: "gb_s" };
    let peer = |name: &str| System { name: name.to_owned(), version: curl_version() };
    let systems = [System::stoker(), peer("curl"), peer("curl+sha256sum")];
    let found: Vec<Figure> =
        systems.iter().zip(&speeds).map(|(system, speeds)| run.figure_of(system, key(), speeds)).collect();
    systems.iter().zip(&speeds).for_each(|(system, speeds)| println!("{}: {speeds:.2?} GB/s", system.name));
    args.out.map_or(Ok(()), |out| figures::append(&out, &found))
}

/// Four shards of this many bytes together, and what a model has beside them.
fn model(bytes: usize) -> (Commit, usize) {
    let shard = |number: u8| (0..bytes / 4).map(|place| (place as u8).wrapping_mul(31) ^ number).collect::<Vec<u8>>();
    let names = [1, 2, 3, 4].map(|number| format!("model-0000{number}-of-00004.safetensors"));
    let index: Vec<String> = names.iter().map(|name| format!("\"{name}\": \"{name}\"")).collect();
    let index = format!("{{\"weight_map\": {{{}}}}}", index.join(", "));
    let shards = names.iter().zip(1..).map(|(name, number)| (name.as_str(), shard(number)));
    let small = [("config.json", "{}"), ("tokenizer.json", "{}"), ("model.safetensors.index.json", index.as_str())];
    let small = small.into_iter().map(|(name, text)| (name, text.as_bytes().to_vec()));
    (Commit::of(shards.chain(small).collect()), bytes)
}

/// Writes as many bytes and removes them: a virtual machine may have given back memory that nobody used, and who writes first
/// would wait for its host.
fn warm(dir: &Path, bytes: usize) -> Result<()> {
    let mut file = tempfile::tempfile_in(dir)?;
    let part = vec![1; 1 << 20];
    (0..bytes.div_ceil(part.len())).try_for_each(|_| file.write_all(&part))?;
    Ok(())
}

fn ours(hub: &Hub, _: &Commit, dir: &Path) -> Result<()> {
    let mut fetch = Command::new(built("stoker-agent"));
    fetch.args(["fetch", &format!("hf://{MODEL}"), "--endpoint", &hub.endpoint(), "--cache"]).arg(dir);
    run(&mut fetch)
}

fn curl(hub: &Hub, commit: &Commit, dir: &Path) -> Result<()> {
    for number in 1..=4 {
        let name = format!("model-0000{number}-of-00004.safetensors");
        let url = format!("{}/{MODEL}/resolve/{}/{name}", hub.endpoint(), commit.sha());
        run(Command::new("curl").args(["-sSfL", &url, "-o"]).arg(dir.join(name)))?;
    }
    Ok(())
}

fn curl_and_sum(hub: &Hub, commit: &Commit, dir: &Path) -> Result<()> {
    curl(hub, commit, dir)?;
    let files = fs::read_dir(dir)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>()?;
    run(Command::new("sha256sum").args(files))
}

/// `8.5.0`, of the first line that it says of itself.
fn curl_version() -> String {
    let output = Command::new("curl").arg("--version").output();
    let said = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    said.split_whitespace().nth(1).unwrap_or("unknown").to_owned()
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.stdout(Stdio::null()).output()?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
