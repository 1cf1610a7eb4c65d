//! The demo on a machine with GPUs: pods that have real ones. Each step is checked, and what it shows is printed, so that the
//! output is the record. It begins with a cluster of its own and takes it down at the end.

mod fault;
mod load;

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};
use stoker_cluster::Gpus;

use super::{
    DemoArgs, DemoGpuArgs, background,
    demo::{self, timed},
    demo_load::{follow, start_load},
    kubectl::Kubectl,
    state::{Files, Found, State},
};

use load::{LOAD_TOKENS, Load, curl, failed, load_words, seconds_of_one};

const CHAT: &str = "chat";
const PAIR: &str = "pair";
const LARGE: &str = "large";
const STAGES: &str = "stages";
/// How many answers of the load the example's KV cache holds.
const LOAD_FITS: f64 = 4.0;
const POLL_INTERVAL: Duration = Duration::from_millis(100);
const PATIENCE: Duration = Duration::from_secs(90);

pub(crate) fn demo_gpu(args: &DemoGpuArgs) -> anyhow::Result<()> {
    let dir = &args.demo.dir.dir;
    if let Found::Running(_) = Files::at(dir).find() {
        bail!("a demo is running already, and its node offers no GPUs; stop it first: make demo-down");
    }
    let n_gpus = Gpus::of_this_machine(1).context("a machine with GPUs is needed")?.count();
    ensure!(n_gpus > 0, "the driver lists no GPUs");
    // A second replica needs a second GPU, or a share of the one.
    let shares = if n_gpus == 1 { 2 } else { 1 };
    let gpus = Gpus::of_this_machine(shares)?;
    print!("{}", output("nvidia-smi", &["--query-gpu=index,name,uuid,driver_version", "--format=csv"])?);
    if shares > 1 {
        println!("one GPU: the node offers it twice, and pods share it by time");
    }
    let faults = tempfile::tempdir().context("make a folder for orders to fail")?;
    let agent = agent_that_can_fail(faults.path(), &args.demo.agent, &args.fault)?;
    let state = demo::cluster(&DemoArgs { agent, ..args.demo.clone() }, gpus)?;
    let walk = Walk {
        kubectl: Kubectl::of(&state, dir),
        state: &state,
        args,
        n_gpus,
        shares,
        faults: faults.path().to_owned(),
    };
    let walked = walk.all();
    if walked.is_err() {
        eprintln!("{}", walk.what_is_there());
    }
    background::down(dir)?;
    walked
}

/// The agent as it is, with a library beside it that makes a GPU fail when a file named after its pod appears.
fn agent_that_can_fail(folder: &Path, agent: &Path, fault: &Path) -> anyhow::Result<PathBuf> {
    let real = |path: &Path| path.canonicalize().with_context(|| format!("find {}; build it first", path.display()));
    let script = format!(
        "#!/bin/sh\nexport LD_PRELOAD={} STOKER_GPU_FAULT={}/$HOSTNAME\nexec {} \"$@\"\n",
        real(fault)?.display(),
        folder.display(),
        real(agent)?.display()
    );
    let path = folder.join("stoker-agent");
    fs::write(&path, script)
        .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o755)))
        .with_context(|| format!("write {}", path.display()))?;
    Ok(path)
}

fn output(program: &str, words: &[&str]) -> anyhow::Result<String> {
    let output = Command::new(program).args(words).stderr(Stdio::inherit()).output();
    let output = output.with_context(|| format!("run {program}"))?;
    ensure!(output.status.success(), "{program} {} ended with {}", words.join(" "), output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn title(text: &str) {
    println!("\n## {text}\n");
}

/// The steps, one behind the other on one cluster.
struct Walk<'a> {
    kubectl: Kubectl<'a>,
    state: &'a State,
    args: &'a DemoGpuArgs,
    n_gpus: usize,
    shares: usize,
    /// Where orders to fail are given.
    faults: PathBuf,
}

impl Walk<'_> {
    fn all(&self) -> anyhow::Result<()> {
        let alone = self.one_gpu()?;
        self.scale()?;
        self.roll()?;
        self.stay_alone()?;
        self.fault(CHAT, 0)?;
        self.fault_beside_another()?;
        self.delete(CHAT)?;
        if self.n_gpus > 1 {
            for (name, how) in [(PAIR, "share each layer of"), (STAGES, "have half the layers of")] {
                self.two_gpus(name, how, &alone)?;
                self.fault(name, 1)?;
                self.delete(name)?;
            }
        }
        self.too_many()?;
        if let Some(model) = &self.args.model {
            self.large(model)?;
        }
        println!("\nEvery step did what it had to.");
        Ok(())
    }

    fn one_gpu(&self) -> anyhow::Result<String> {
        title("One GPU a replica");
        let text = self.apply_and_ask(CHAT, "gpu/chat.yaml")?;
        ensure!(self.gpus_of(CHAT)?.len() == 1, "the pod has not one GPU");
        Ok(text)
    }

    fn two_gpus(&self, name: &str, how: &str, alone: &str) -> anyhow::Result<()> {
        title(&format!("Two GPUs that {how} a replica"));
        let text = self.apply_and_ask(name, &format!("gpu/{name}.yaml"))?;
        ensure!(self.gpus_of(name)?.len() == 2, "the pod has not two GPUs");
        ensure!(text == alone, "two GPUs answer {text:?}, one answered {alone:?}");
        println!("The same words as from one GPU.");
        Ok(())
    }

    fn apply_and_ask(&self, name: &str, example: &str) -> anyhow::Result<String> {
        let example = self.args.demo.source.join("examples").join(example);
        timed("apply", || self.kubectl.run(&["apply", "-f", &example.to_string_lossy()]))?;
        timed("ready", || self.kubectl.wait_until_ready(name))?;
        println!("its GPUs           {}", Vec::from_iter(self.gpus_of(name)?).join(", "));
        println!("{}", self.serving_line(name)?);
        let (_, text) = demo::ask(&self.kubectl.service_url(name)?, name, Instant::now())?;
        Ok(text)
    }

    /// What the agent says that it serves; it must compute on what it was given.
    fn serving_line(&self, name: &str) -> anyhow::Result<String> {
        let pod = self.pods_of(name)?.pop().context("there is a pod")?;
        let logs = self.kubectl.run(&["logs", &pod.name])?;
        let line = logs.lines().find(|line| line.starts_with("serving ")).context("the agent says what it serves")?;
        ensure!(!line.contains(" on cpu"), "it computes on the CPUs of a node with GPUs: {line}");
        Ok(line.to_owned())
    }

    /// What the node gave to the pods of a deployment that are there.
    fn gpus_of(&self, name: &str) -> anyhow::Result<BTreeSet<String>> {
        let events = self.kubectl.run(&["get", "events", "-o", "json", "--field-selector=reason=GPUsAllocated"])?;
        let events: Value = serde_json::from_str(&events).context("read events")?;
        let pods = self.pods_of(name)?;
        let mut gpus = BTreeSet::new();
        for event in events["items"].as_array().into_iter().flatten() {
            let of_pod = |pod: &Pod| event["involvedObject"]["uid"] == pod.uid.as_str();
            if pods.iter().any(of_pod) {
                gpus.extend(event["message"].as_str().unwrap_or_default().split(", ").map(str::to_owned));
            }
        }
        Ok(gpus)
    }

    fn pods_of(&self, name: &str) -> anyhow::Result<Vec<Pod>> {
        let selector = format!("app.kubernetes.io/instance={name}");
        let pods: Value = serde_json::from_str(&self.kubectl.run(&["get", "pods", "-o", "json", "-l", &selector])?)?;
        Ok(pods["items"].as_array().into_iter().flatten().map(Pod::of).collect())
    }

    /// A step of load that one replica cannot take and two can, by what one stream was seen to do.
    fn scale(&self) -> anyhow::Result<()> {
        title("Load: from one replica to two and back");
        let url = self.kubectl.service_url(CHAT)?;
        let seconds = seconds_of_one(&url)?;
        let full = LOAD_FITS / seconds;
        println!(
            "{LOAD_TOKENS} tokens of one stream take {seconds:.2} s; {LOAD_FITS} such requests fill the KV cache."
        );
        let step = format!("15s:{:.1},45s:{:.1},15s:{:.1}", full * 0.1, full * 0.4, full * 0.1);
        let mut load = start_load(&self.args.load, &load_words(&url, &step))?;
        let course = follow(&self.kubectl, CHAT, &mut load);
        let _ended = load.kill();
        ensure!(course? == 2, "there were never two replicas");
        Ok(())
    }

    /// New settings under load: no answer is cut.
    fn roll(&self) -> anyhow::Result<()> {
        title("A roll under load");
        let before = self.pods_of(CHAT)?;
        let load = self.background_load(20)?;
        sleep(Duration::from_secs(3));
        let begun = Instant::now();
        self.kubectl.run(&[
            "patch",
            "infd",
            CHAT,
            "--type=merge",
            "-p",
            r#"{"spec":{"engine":{"maxModelLen":960}}}"#,
        ])?;
        self.wait("the roll", || {
            let now = self.pods_of(CHAT)?;
            Ok(now.len() == 1 && now.iter().all(|pod| pod.ready && before.iter().all(|old| old.uid != pod.uid)))
        })?;
        println!("the new replica serves alone after {:.1} s", begun.elapsed().as_secs_f64());
        let summary = load.summary()?;
        println!("{} of {} answers whole, {} cut", summary["answered"], summary["planned"], failed(&summary));
        ensure!(failed(&summary) == 0, "answers were cut: {}", summary["failures"]);
        Ok(())
    }

    fn background_load(&self, seconds: u32) -> anyhow::Result<Load> {
        let url = self.kubectl.service_url(CHAT)?;
        Load::start(&self.args.load, &load_words(&url, &format!("{seconds}s:2")))
    }

    fn delete(&self, name: &str) -> anyhow::Result<()> {
        title(&format!("Delete {name}: it drains, and its GPUs are free"));
        timed("delete", || self.kubectl.run(&["delete", "infd", name, "--wait"]))?;
        timed("gone", || self.wait("the pods' end", || Ok(self.pods_of(name)?.is_empty())))
    }

    /// More GPUs than there are: said in `Ready`.
    fn too_many(&self) -> anyhow::Result<()> {
        let tensor = self.n_gpus * self.shares * 2;
        title(&format!("{tensor} GPUs where the node offers {}", self.n_gpus * self.shares));
        let spec = json!({"model": {"source": "builtin://ember"}, "parallelism": {"tensor": tensor}});
        self.kubectl.apply(&deployment("too-many", &spec))?;
        let mut said = String::new();
        let begun = Instant::now();
        self.wait("the reason", || {
            self.note_ready("too-many", begun, &mut said)?;
            Ok(said.contains("Unschedulable") && said.contains("Insufficient nvidia.com/gpu"))
        })?;
        self.kubectl.run(&["delete", "infd", "too-many", "--wait"]).map(drop)
    }

    /// A large checkpoint of this machine on all its GPUs: how long from the object to the first token.
    fn large(&self, model: &Path) -> anyhow::Result<()> {
        title(&format!("{} on {} GPUs", model.display(), self.n_gpus));
        println!("{}", output("du", &["-shL", &model.to_string_lossy()])?.trim());
        let source = format!("file://{}", model.canonicalize().context("find the model")?.display());
        let engine = json!({"maxModelLen": 8192});
        let parallelism = json!({"tensor": self.n_gpus});
        let spec = json!({
            "model": {"source": source}, "resources": {"gpus": self.n_gpus}, "parallelism": parallelism, "engine": engine,
        });
        let begun = Instant::now();
        self.kubectl.apply(&deployment(LARGE, &spec))?;
        timed("ready", || self.kubectl.wait_until_ready(LARGE))?;
        let body = json!({"model": LARGE, "prompt": "A", "max_tokens": 1, "ignore_eos": true});
        curl(&format!("{}/v1/completions", self.kubectl.service_url(LARGE)?), &body)?;
        println!("object to first token {:.1} s", begun.elapsed().as_secs_f64());
        println!("{}", self.serving_line(LARGE)?);
        self.delete(LARGE)
    }

    fn wait(&self, what: &str, mut is_there: impl FnMut() -> anyhow::Result<bool>) -> anyhow::Result<()> {
        let begun = Instant::now();
        while !is_there()? {
            ensure!(begun.elapsed() < PATIENCE, "waited {} s for {what}", PATIENCE.as_secs());
            sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// For whoever has to find out why a step failed.
    fn what_is_there(&self) -> String {
        let said = |words: &[&str]| self.kubectl.run(words).unwrap_or_else(|error| error.to_string());
        let logs = said(&["logs", "--prefix", "--tail=20", "-l", "app.kubernetes.io/managed-by=stoker"]);
        format!("{}\n{}\n{logs}", said(&["get", "infd,pods", "-o", "wide"]), said(&["get", "events"]))
    }
}

fn deployment(name: &str, spec: &Value) -> Value {
    json!({"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "metadata": {"name": name}, "spec": spec})
}

/// What is asked of a pod here.
#[derive(Clone, Debug)]
struct Pod {
    name: String,
    uid: String,
    ready: bool,
    restarts: u64,
}

impl Pod {
    fn of(pod: &Value) -> Self {
        let word = |field: &str| pod["metadata"][field].as_str().unwrap_or_default().to_owned();
        let container = &pod["status"]["containerStatuses"][0];
        Self {
            name: word("name"),
            uid: word("uid"),
            ready: container["ready"] == true,
            restarts: container["restartCount"].as_u64().unwrap_or(0),
        }
    }
}
