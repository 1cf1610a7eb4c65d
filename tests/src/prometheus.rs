//! A real Prometheus that scrapes what a test runs, and promtool. Both come from `tools/prometheus.sh`.

use std::{
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use stoker_cluster::Keeper;
use tempfile::TempDir;

/// Until it answers.
const STARTED_WITHIN: Duration = Duration::from_secs(60);

/// The root of the repository.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests have a parent").to_owned()
}

/// One of the two programs, if it is there.
pub fn program(name: &str) -> Option<PathBuf> {
    let where_is = Command::new(repository().join("tools/prometheus.sh")).args(["--where", name]).output().ok()?;
    let path = PathBuf::from(String::from_utf8(where_is.stdout).ok()?.trim());
    path.is_file().then_some(path)
}

/// One scraped process, with the labels that its monitor in the chart gives it.
#[derive(Clone, Debug)]
pub struct Target {
    /// `host:port`.
    pub address: String,
    /// Labels of all its series.
    pub labels: Value,
    /// Its series keep labels of their own, as the operator's do.
    pub honors_labels: bool,
}

/// A running Prometheus.
pub struct Prometheus {
    child: Child,
    base: String,
    http: reqwest::Client,
    _keeper: Keeper,
    _directory: TempDir,
}

impl Prometheus {
    /// Starts it with a second between scrapes.
    pub async fn start(program: &Path, targets: &[Target]) -> Result<Self> {
        let directory = TempDir::new()?;
        let config = directory.path().join("prometheus.json");
        fs::write(&config, serde_json::to_vec(&configuration(targets))?)?;
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let keeper = Keeper::start()?;
        let child = keeper
            .command(program)?
            .arg(format!("--config.file={}", config.display()))
            .arg(format!("--storage.tsdb.path={}", directory.path().join("data").display()))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("start {}", program.display()))?;
        let base = format!("http://127.0.0.1:{port}");
        let started = Self { child, base, http: reqwest::Client::new(), _keeper: keeper, _directory: directory };
        started.wait_ready().await?;
        Ok(started)
    }

    async fn wait_ready(&self) -> Result<()> {
        let begun = Instant::now();
        while begun.elapsed() < STARTED_WITHIN {
            if let Ok(answer) = self.http.get(format!("{}/-/ready", self.base)).send().await
                && answer.status().is_success()
            {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        bail!("Prometheus is not ready within {STARTED_WITHIN:?}")
    }

    /// The values that an expression has now, one a series. A refused expression is an error with Prometheus' words.
    pub async fn query(&self, expression: &str) -> Result<Vec<f64>> {
        let url = reqwest::Url::parse_with_params(&format!("{}/api/v1/query", self.base), [("query", expression)])?;
        let answer: Value = self.http.get(url).send().await?.json().await?;
        ensure!(answer["status"] == "success", "{expression}: {}", answer["error"]);
        let series = answer["data"]["result"].as_array().context("a query has a result")?;
        series.iter().map(|one| Ok(one["value"][1].as_str().context("a series has a value")?.parse()?)).collect()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// YAML is a superset of JSON.
fn configuration(targets: &[Target]) -> Value {
    let jobs = targets.iter().enumerate().map(|(idx, target)| {
        json!({
            "job_name": format!("job-{idx}"), "honor_labels": target.honors_labels,
            "static_configs": [{"targets": [target.address], "labels": target.labels}],
        })
    });
    json!({"global": {"scrape_interval": "1s"}, "scrape_configs": jobs.collect::<Vec<_>>()})
}
