//! The demo: from nothing to a streamed answer of a model, with the time of every stage, leaving everything running.

use std::{
    io::{self, BufRead, BufReader, Write},
    path::{Path, absolute},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use serde_json::{Value, json};
use stoker_cluster::Gpus;

use super::{
    ClusterArgs, DemoArgs, background,
    kubectl::Kubectl,
    state::{Files, Found, State},
};

const DEPLOYMENT: &str = "chat";
const QUESTION: &str = "What is 12 plus 30?";

pub(crate) fn demo(args: &DemoArgs) -> anyhow::Result<()> {
    let begun = Instant::now();
    let state = cluster(args, Gpus::Pretended(0))?;
    let kubectl = Kubectl::of(&state, &args.dir.dir);
    let example = args.source.join("examples/chat.yaml");
    timed("apply", || kubectl.run(&["apply", "-f", &example.to_string_lossy()]))?;
    timed("ready", || kubectl.wait_until_ready(DEPLOYMENT))?;
    let url = kubectl.service_url(DEPLOYMENT)?;
    let (total, _) = ask(&url, DEPLOYMENT, begun)?;
    println!("\nFirst token {:.1} s after the start of this command.\n", total.as_secs_f64());
    print_next_steps(&state, args, &url);
    Ok(())
}

/// The cluster that runs already, or a new one.
pub(super) fn cluster(args: &DemoArgs, gpus: Gpus) -> anyhow::Result<State> {
    if let Found::Running(state) = Files::at(&args.dir.dir).find() {
        println!("A demo is running already; using it (`make demo-down` stops it, for a fresh one).");
        return Ok(state);
    }
    let args = ClusterArgs {
        dir: args.dir.clone(),
        images: Vec::new(),
        agent: Some(args.agent.clone()),
        operator: Some(args.operator.clone()),
        gateway: args.gateway.clone(),
        owner: args.owner,
        gpus,
        source: args.source.canonicalize().with_context(|| format!("find {}", args.source.display()))?,
    };
    background::start(&args, &mut |stage| print_stage(&stage.stage, stage.seconds))
}

fn print_stage(stage: &str, seconds: f64) {
    println!("{stage:<18} {seconds:6.1} s");
}

pub(super) fn timed<T>(stage: &str, work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
    let begun = Instant::now();
    let done = work()?;
    print_stage(stage, begun.elapsed().as_secs_f64());
    Ok(done)
}

/// Streams an answer with curl and prints it as it comes; says how long after `begun` its first token came, and what it was.
pub(super) fn ask(url: &str, deployment: &str, begun: Instant) -> anyhow::Result<(Duration, String)> {
    let body = json!({"model": deployment, "stream": true, "temperature": 0, "messages": [{"role": "user", "content": QUESTION}]}).to_string();
    let endpoint = format!("{url}/v1/chat/completions");
    println!("\n$ curl -N {endpoint} -H 'content-type: application/json' \\\n    -d '{body}'\n");
    let asked = Instant::now();
    let mut curl = Command::new("curl")
        .args(["-sSN", "--fail-with-body", &endpoint, "-H", "content-type: application/json", "-d", &body])
        .stdout(Stdio::piped())
        .spawn()
        .context("run curl; install it to see the answer")?;
    let lines = BufReader::new(curl.stdout.take().expect("stdout is piped")).lines();
    let (first, text) = print_answer(lines, &mut io::stdout())?;
    if !curl.wait().context("wait for curl")?.success() {
        bail!("{endpoint} did not answer");
    }
    let first = first.with_context(|| format!("{endpoint} answered without a token"))?;
    println!("\n");
    print_stage("first token", (first - asked).as_secs_f64());
    Ok((first - begun, text))
}

/// Prints the text of a stream of server-sent events; says when its first piece came, and the whole.
pub(super) fn print_answer(
    lines: impl Iterator<Item = io::Result<String>>,
    out: &mut impl Write,
) -> anyhow::Result<(Option<Instant>, String)> {
    let (mut first, mut whole) = (None, String::new());
    for line in lines {
        let line = line.context("read the answer")?;
        let Some(event) = line.strip_prefix("data: ").and_then(|data| serde_json::from_str::<Value>(data).ok()) else {
            continue;
        };
        let text = event["choices"][0]["delta"]["content"].as_str().unwrap_or_default();
        if !text.is_empty() {
            first = first.or_else(|| Some(Instant::now()));
            whole.push_str(text);
            write!(out, "{text}")?;
            out.flush()?;
        }
    }
    Ok((first, whole))
}

fn print_next_steps(state: &State, args: &DemoArgs, url: &str) {
    let cluster = Files::at(&args.dir.dir).cluster_dir();
    let cluster = cluster.display();
    println!(
        "It is still running. In a browser:\n
  {}    what runs, and why
  {url}/    talk to it\n
Try:\n
  {}
  kubectl stoker dashboard                        # opens the pages
  kubectl stoker status chat                      # one deployment on one screen
  kubectl get infd,pods,services                  # what there is, and why it is in its state
  kubectl scale infd chat --replicas=2            # a second replica
  kubectl edit infd chat                          # e.g. spec.engine.maxModelLen: replicas roll one by one
  kubectl explain infd.spec.engine                # its fields, each with unit and default
  kubectl logs -f -l app.kubernetes.io/managed-by=stoker
  curl {url}/v1/models
  curl {all}/v1/models                             # one address for all deployments
  kubectl delete infd chat                        # drains, then leaves nothing

`make demo-load` sends a step of load to a second deployment and shows its replicas follow and come back.
Logs are in {cluster}. `make demo-down` stops everything.",
        state.pages.as_deref().unwrap_or("no pages"),
        environment(state, args),
        all = state.gateway.as_deref().unwrap_or(url),
    );
}

/// What a shell needs to work with the cluster: kubectl with its plugin, credentials, and where the operator explains
/// itself, as it is no pod here whose port could be forwarded.
pub(super) fn environment(state: &State, args: &DemoArgs) -> String {
    let State { binaries, kubeconfig, operator, pages, .. } = state;
    let plugins = absolute(&args.agent).ok().and_then(|agent| agent.parent().map(Path::to_owned)).unwrap_or_default();
    let cache = Files::at(&args.dir.dir).cluster_dir().join("kubectl-cache");
    let (plugins, cache) = (plugins.display(), cache.display());
    format!(
        "export PATH={}:{plugins}:$PATH KUBECONFIG={} KUBECACHEDIR={cache} STOKER_OPERATOR_URL={} STOKER_PAGES_URL={}",
        binaries.display(),
        kubeconfig.display(),
        operator.as_deref().unwrap_or_default(),
        pages.as_deref().unwrap_or_default()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_its_pieces_and_nothing_else() {
        let stream = [
            ": comment",
            "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\"}}]}",
            "",
            "data: {\"choices\":[{\"delta\":{\"content\":\"4\"}}]}",
            "data: {\"choices\":[{\"delta\":{\"content\":\"2\"}}]}",
            "data: [DONE]",
        ];
        let mut out = Vec::new();
        let (first, whole) = print_answer(stream.iter().map(|line| Ok((*line).to_owned())), &mut out).unwrap();
        assert_eq!((String::from_utf8(out).unwrap().as_str(), whole.as_str()), ("42", "42"));
        assert!(first.is_some());
    }
}
