//! From `hf://ORG/MODEL` to the first token: operator, real agents and a hub on loopback, on a real control plane.

use std::{fs, path::Path, process::Command, time::Duration};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use stoker_cluster::Audit;
use stoker_crds::status::StartupPhase;
use stoker_tests::{
    cluster::built,
    hub::{Access, Commit, Hub, Repository},
    operator::{Rig, condition},
};

/// A busy machine fetches, loads and probes in this time.
const LIMIT: Duration = Duration::from_secs(120);
/// The image with the real agent.
const IMAGE: &str = "real/agent:1";
const MODEL: &str = "tests/ember";

fn ember() -> Result<Commit> {
    Commit::of_directory(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/ember"))
}

/// A hub that gives ember to who has the token.
fn hub() -> Result<Hub> {
    let access = Access::Token("secret".to_owned());
    Hub::start(vec![Repository { access, ..Repository::public(MODEL, ember()?) }])
}

fn spec(replicas: u32) -> Value {
    json!({
        "model": {"source": format!("hf://{MODEL}"), "tokenSecret": {"name": "hub"}},
        "engine": {"threads": 1, "maxModelLen": 256, "kvCacheTokens": 1024},
        "drain": {"deadlineSeconds": 5, "withdrawSeconds": 0},
        "replicas": replicas,
        "pod": {"image": IMAGE},
    })
}

fn put_token(rig: &Rig, token: &str) -> Result<()> {
    let secret =
        json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub"}, "stringData": {"token": token}});
    let params = PatchParams::apply("test").force();
    rig.block_on(rig.api::<Secret>().patch("hub", &params, &Patch::Apply(secret)))?;
    Ok(())
}

/// The first of what the model says.
fn ask(rig: &Rig, name: &str) -> Result<String> {
    let url = format!("http://{}/v1/chat/completions", rig.cluster.service_address(name));
    let body = json!({"model": name, "max_tokens": 8, "messages": [{"role": "user", "content": "Who are you?"}]});
    let mut curl = Command::new("curl");
    curl.args(["-sS", "--fail-with-body", "--max-time", "30", &url, "-d", &body.to_string()]);
    let output = curl.args(["-H", "content-type: application/json"]).output().context("run curl")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    let answer: Value = serde_json::from_slice(&output.stdout)?;
    Ok(answer["choices"][0]["message"]["content"].as_str().unwrap_or_default().to_owned())
}

/// Names of variables of a pod's containers, those that fetch first.
fn variables(pod: &Pod) -> [Vec<String>; 2] {
    let spec = pod.spec.as_ref().expect("a pod has a spec");
    let all = [spec.init_containers.as_deref().unwrap_or_default(), &spec.containers];
    all.map(|containers| {
        containers
            .iter()
            .flat_map(|container| container.env.iter().flatten())
            .map(|variable| variable.name.clone())
            .collect()
    })
}

#[test]
fn a_model_of_a_hub_is_fetched_once_a_node_and_answers() -> Result<()> {
    let (hub, node_cache) = (hub()?, tempfile::tempdir()?);
    let mut rig = Rig::start(Audit::Off)?;
    rig.cluster.node.add_image(IMAGE, built("stoker-agent"));
    let cache = node_cache.path().to_str().context("a path of text")?;
    rig.operator.restart_with(&["--hub-endpoint", &hub.endpoint(), "--model-cache", cache])?;

    put_token(&rig, "wrong")?;
    rig.apply("chat", spec(1))?;
    rig.wait("the status says what is wrong with the token", LIMIT, |rig| {
        let ready = condition(&rig.get("chat")?, "Ready").unwrap_or_default();
        let says = ["401 from", "the token of key token of Secret hub is not valid"]
            .iter()
            .all(|words| ready.2.contains(words));
        Ok(ready.0 == "False" && ready.1 == "ModelFetchFailed" && says)
    })?;
    rig.wait("and that this is a fault", LIMIT, |rig| {
        Ok(condition(&rig.get("chat")?, "Degraded").is_some_and(|degraded| degraded.0 == "True"))
    })?;

    put_token(&rig, "secret")?;
    rig.wait_ready("chat", LIMIT)?;
    ensure!(!ask(&rig, "chat")?.is_empty(), "the model says something");
    let pod = &rig.pods("chat")?[0];
    let [fetcher, agent] = variables(pod);
    ensure!(
        fetcher.contains(&"HF_TOKEN".to_owned()) && !agent.contains(&"HF_TOKEN".to_owned()),
        "{fetcher:?} {agent:?}"
    );
    let kept: Vec<_> =
        fs::read_dir(node_cache.path().join("models"))?.flatten().map(|model| model.file_name()).collect();
    ensure!(kept == [format!("tests--ember@{}", ember()?.sha()).as_str()], "{kept:?}");

    // Another replica gets the same bytes, finds them on the node and asks nobody, though the branch has moved.
    let commit = ember()?.sha().to_owned();
    ensure!(commit_of(&rig, "chat")? == commit, "the status says which commit it is");
    hub.set(vec![Repository::public(MODEL, Commit::of(vec![("config.json", b"{}".to_vec())]))]);
    hub.take_asked();
    rig.apply("chat", spec(2))?;
    rig.wait("both serve", LIMIT, |rig| Ok(rig.get("chat")?.status.is_some_and(|status| status.ready_replicas == 2)))?;
    ensure!(hub.take_asked().is_empty(), "the hub was asked again");
    ensure!(commit_of(&rig, "chat")? == commit, "another commit");
    Ok(())
}

#[test]
fn one_replica_asks_what_the_branch_is_and_the_status_says_how_far_its_fetch_is() -> Result<()> {
    let hub = Hub::start(vec![Repository::public(MODEL, ember()?)])?;
    let mut rig = Rig::start(Audit::Off)?;
    rig.cluster.node.add_image(IMAGE, built("stoker-agent"));
    rig.operator.restart_with(&["--hub-endpoint", &hub.endpoint()])?;
    // It does not end before it is let go: whoever looks late sees it, too.
    hub.slow_down(Duration::from_secs(2));
    let mut two = spec(2);
    two["model"] = json!({"source": format!("hf://{MODEL}")});
    rig.apply("chat", two)?;
    rig.wait("the status says how far the fetch is", LIMIT, |rig| {
        let deployment = rig.get("chat")?;
        let (_, reason, message) = condition(&deployment, "Ready").unwrap_or_default();
        let startup = deployment.status.and_then(|status| status.startup).map(|startup| startup.phase);
        let says = message.contains(" % of 0.") && message.contains(" GB fetched, ") && message.contains(" MB/s");
        Ok(reason == "FetchingModel" && says && startup == Some(StartupPhase::Fetching))
    })?;
    rig.wait("both are made", LIMIT, |rig| Ok(rig.pods("chat")?.len() == 2))?;
    hub.slow_down(Duration::ZERO);
    rig.wait_ready("chat", LIMIT)?;
    let told = rig.pods("chat")?.iter().map(told_commit).collect::<Vec<_>>();
    ensure!(told == [None, Some(ember()?.sha().to_owned())], "{told:?}");
    let asked = hub.take_asked();
    let resolved = asked.iter().filter(|asked| asked.what.contains("/revision/"));
    ensure!(resolved.count() == 1, "{asked:?}");
    Ok(())
}

/// The commit that the status says.
fn commit_of(rig: &Rig, name: &str) -> Result<String> {
    let model = rig.get(name)?.status.and_then(|status| status.model).context("the status says the model")?;
    ensure!(model.source == format!("hf://{MODEL}"), "{model:?}");
    Ok(model.commit)
}

/// The commit that a pod was made with.
fn told_commit(pod: &Pod) -> Option<String> {
    let args = pod.spec.as_ref()?.init_containers.as_ref()?[0].args.clone()?;
    let place = args.iter().position(|arg| arg == "--commit")?;
    args.get(place + 1).cloned()
}
