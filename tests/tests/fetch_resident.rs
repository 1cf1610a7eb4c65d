//! `stoker-agent fetch --keep-resident` as a process: the kernel's own word that a model's pages are in memory, for as long as it runs and
//! no longer.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, ChildStderr, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use stoker_tests::{
    fetches::{Fetcher, NEEDED, sharded},
    hub::{Commit, Hub, Repository},
    resident::{in_memory, let_go},
    skip::skip,
};

const MODEL: &str = "hf://tests/model";
/// A busy machine starts a process and reads some megabytes in this time.
const LIMIT: Duration = Duration::from_secs(60);

/// A process that keeps the model, and where it says whether it does.
struct Keeper {
    process: Child,
    address: String,
    said: BufReader<ChildStderr>,
}

impl Keeper {
    fn start(fetcher: &Fetcher) -> Result<Self> {
        let mut command = fetcher.command(MODEL, &["--keep-resident", "--host", "127.0.0.1", "--admin-port", "0"]);
        let mut process = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
        let mut said = BufReader::new(process.stderr.take().context("its stderr")?);
        let mut line = String::new();
        while !line.contains("/readyz") {
            line.clear();
            ensure!(said.read_line(&mut line)? > 0, "it ended");
        }
        let (_, url) = line.split_once("http://").context("a URL")?;
        let address = url.split('/').next().context("an address")?.to_owned();
        Ok(Self { process, address, said })
    }

    fn wait_ready(&self) -> Result<()> {
        let deadline = Instant::now() + LIMIT;
        while !self.is_ready()? {
            ensure!(Instant::now() < deadline, "it does not become ready");
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    fn is_ready(&self) -> Result<bool> {
        let mut asked = TcpStream::connect(&self.address)?;
        asked.write_all(b"GET /readyz HTTP/1.1\r\nhost: keeper\r\nconnection: close\r\n\r\n")?;
        let mut answer = String::new();
        asked.read_to_string(&mut answer)?;
        Ok(answer.starts_with("HTTP/1.1 200"))
    }

    /// Its exit code, and what it said.
    fn ended(mut self) -> Result<(Option<i32>, String)> {
        let mut said = String::new();
        self.said.read_to_string(&mut said)?;
        Ok((self.process.wait()?.code(), said))
    }
}

/// Bytes of the model's weights that are in memory, and of all their pages.
fn weights(dir: &Path) -> Result<(usize, usize)> {
    let found = shards(dir).iter().map(|shard| Ok(in_memory(shard)?)).collect::<Result<Vec<_>>>()?;
    Ok(found.into_iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1)))
}

fn shards(dir: &Path) -> [PathBuf; 2] {
    [NEEDED[1], NEEDED[2]].map(|name| dir.join(name))
}

fn drop_all(dir: &Path) -> Result<(usize, usize)> {
    shards(dir).iter().try_for_each(|shard| let_go(shard))?;
    weights(dir)
}

#[test]
fn a_model_is_in_memory_while_somebody_keeps_it_there_and_no_longer() -> Result<()> {
    let hub = Hub::start(vec![Repository::public("tests/model", Commit::of(sharded([3 << 20, 2 << 20])))])?;
    let fetcher = Fetcher::new(&["--endpoint", &hub.endpoint()])?;
    let (dir, _) = fetcher.fetch(MODEL, &[]).map_err(anyhow::Error::msg)?;
    let (left, all) = drop_all(&dir)?;
    if left == all {
        let test = "a_model_is_in_memory_while_somebody_keeps_it_there_and_no_longer";
        skip(test, "the file system of temporary files is memory: nothing of it can be let go");
        return Ok(());
    }

    let keeper = Keeper::start(&fetcher)?;
    keeper.wait_ready()?;
    ensure!(
        weights(&dir)? == (all, all),
        "{:?} of {all} bytes in memory, and it says that it is ready",
        weights(&dir)?
    );
    ensure!(drop_all(&dir)? == (all, all), "{:?}: the kernel takes what is kept", weights(&dir)?);
    let pid = Pid::from_child(&keeper.process);
    kill_process(pid, Signal::TERM)?;
    let asked = Instant::now();
    let (code, said) = keeper.ended()?;
    ensure!(code == Some(143) && asked.elapsed() < Duration::from_secs(10), "{code:?} after {:?}", asked.elapsed());
    ensure!(said.contains("GB in memory after"), "{said}");
    let (left, _) = drop_all(&dir)?;
    ensure!(left < all, "its end lets nothing go: {left} of {all}");

    // Who removes a file of it is told of by the end of the process; the kubelet starts it again, and it fetches.
    let keeper = Keeper::start(&fetcher)?;
    keeper.wait_ready()?;
    let blob = fs::canonicalize(&shards(&dir)[1])?;
    fs::remove_file(&blob)?;
    let (code, said) = keeper.ended()?;
    ensure!(code == Some(1) && said.contains(&format!("{} is gone", blob.display())), "{code:?}: {said}");
    let keeper = Keeper::start(&fetcher)?;
    keeper.wait_ready()?;
    ensure!(blob.exists() && weights(&dir)? == (all, all), "it is not fetched again");
    kill_process(Pid::from_child(&keeper.process), Signal::TERM)?;
    ensure!(keeper.ended()?.0 == Some(143));
    Ok(())
}
