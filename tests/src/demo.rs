//! The demo as `make demo` starts it, with the programs of this build: its own cluster, real agents, operator and gateway.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::Value;
use stoker_cluster::Binaries;

use crate::cluster::{built, run_with_input};

/// The source tree.
pub fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Runs a word of `stoker-cluster` on the cluster in `dir`; what it printed, or an error with everything it said.
pub fn stoker_cluster(word: &str, dir: &Path, args: &[&str]) -> Result<String> {
    let output = Command::new(built("stoker-cluster")).arg(word).arg("--dir").arg(dir).args(args).output()?;
    let [stdout, stderr] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    ensure!(output.status.success(), "{word}:\n{stdout}\n{stderr}");
    Ok(stdout)
}

/// Starts it in `dir`, for as long as this process lives at most; what it printed.
pub fn start(dir: &Path) -> Result<String> {
    let programs = ["stoker-agent", "stoker-operator", "stoker-gateway"];
    let [agent, operator, gateway] = programs.map(|name| built(name).display().to_string());
    let (source, owner) = (source().display().to_string(), std::process::id().to_string());
    let programs = ["--agent", &agent, "--operator", &operator, "--gateway", &gateway];
    stoker_cluster("demo", dir, &[&programs[..], &["--source", &source, "--owner", &owner]].concat())
}

/// `kubectl ARGS` on the demo in `dir`, with `manifest` as input.
pub fn kubectl(dir: &Path, args: &[&str], manifest: &str) -> Result<String> {
    let credentials = dir.join("cluster/credentials/admin.kubeconfig");
    let mut command = Command::new(Binaries::find().path("kubectl")?);
    command.args(args).env("KUBECONFIG", credentials).env("KUBECACHEDIR", dir.join("cluster/kubectl-cache"));
    run_with_input(command, manifest).map_err(|complaint| anyhow!("kubectl {}: {complaint}", args.join(" ")))
}

/// The demo, until this is dropped.
pub struct Demo {
    dir: tempfile::TempDir,
    said: String,
}

impl Demo {
    /// Starts one of its own.
    pub fn start() -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let said = start(&dir.path().join("demo"))?;
        Ok(Self { dir, said })
    }

    fn cluster(&self) -> PathBuf {
        self.dir.path().join("demo")
    }

    /// The address that it printed in front of these words.
    pub fn address(&self, words: &str) -> Result<&str> {
        let line = self.said.lines().find(|line| line.trim_end().ends_with(words));
        let line = line.with_context(|| format!("no {words:?} in:\n{}", self.said))?;
        line.split_whitespace().next().context("an address")
    }

    /// See [`kubectl`].
    pub fn kubectl(&self, args: &[&str]) -> Result<String> {
        kubectl(&self.cluster(), args, "")
    }

    /// Makes an object, or changes it to this.
    pub fn apply(&self, object: &Value) -> Result<()> {
        kubectl(&self.cluster(), &["apply", "--validate=strict", "-f", "-"], &object.to_string()).map(drop)
    }

    /// Where a Service is reached from here.
    pub fn service_url(&self, name: &str) -> Result<String> {
        let form = "jsonpath=http://{.spec.clusterIP}:{.spec.ports[0].port}";
        self.kubectl(&["get", "service", name, "-o", form])
    }

    /// Kills the process of a pod, as a fault of its own would.
    pub fn kill_process_of(&self, pod: &str) -> Result<()> {
        let own = format!("HOSTNAME={pod}");
        let is_of_pod = |path: &Path| {
            fs::read(path.join("environ"))
                .is_ok_and(|all| all.split(|&byte| byte == 0).any(|one| one == own.as_bytes()))
        };
        let found = fs::read_dir("/proc")?.flatten().map(|entry| entry.path()).find(|path| is_of_pod(path));
        let found = found.with_context(|| format!("no process of pod {pod}"))?;
        let pid = found.file_name().and_then(|name| name.to_str()).context("a process id")?;
        ensure!(Command::new("kill").args(["-KILL", pid]).status()?.success(), "kill {pid}");
        Ok(())
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        let down = stoker_cluster("down", &self.cluster(), &[]);
        // A test that fails already says why.
        assert!(down.is_ok() || std::thread::panicking(), "{down:?}");
    }
}
