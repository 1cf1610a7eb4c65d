//! From `hf://…`, `s3://…`, `oci://…` and `https://…` to the first token: operator, real agents and a hub, a bucket, a registry and a web
//! server on loopback, on a real control plane.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use stoker_cluster::{Audit, ControlPlaneOptions, Controllers, NodeOptions};
use stoker_crds::status::StartupPhase;
use stoker_tests::{
    bucket::{Bucket, Put},
    cluster::built,
    hub::{Access, Commit, Hub, Repository},
    operator::{AGENT_IMAGE, Rig, condition},
    registry::{LOGIN, Registry},
    skip::skip,
    web::Web,
};

/// A busy machine fetches, loads and probes in this time.
const LIMIT: Duration = Duration::from_secs(120);
/// The image with the real agent.
const IMAGE: &str = "real/agent:1";
const MODEL: &str = "tests/ember";

fn ember_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/ember")
}

fn ember() -> Result<Commit> {
    Commit::of_directory(&ember_dir())
}

/// Names of its files.
fn ember_files() -> Result<Vec<String>> {
    let entries = fs::read_dir(ember_dir())?.collect::<std::io::Result<Vec<_>>>()?;
    let files = entries.into_iter().filter(|entry| entry.path().is_file());
    Ok(files.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
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
    put_secret(rig, "hub", "Opaque", &json!({"token": token}))
}

fn put_secret(rig: &Rig, name: &str, kind: &str, data: &Value) -> Result<()> {
    let secret =
        json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "type": kind, "stringData": data});
    let params = PatchParams::apply("test").force();
    rig.block_on(rig.api::<Secret>().patch(name, &params, &Patch::Apply(secret)))?;
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

/// The first block of YAML in the README.
fn first_screen() -> Result<String> {
    let readme = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md"))?;
    let block = readme.split_once("```yaml\n").and_then(|(_, rest)| rest.split_once("```"));
    Ok(block.context("the README has a block of YAML")?.0.to_owned())
}

#[test]
fn three_lines_on_the_first_screen_of_the_readme_serve_a_named_model_of_a_hub() -> Result<()> {
    let yaml = first_screen()?;
    ensure!(
        yaml.lines().count() == 3 && !yaml.contains("http"),
        "three lines, and the hub is the platform's affair: {yaml}"
    );
    let object: Value = serde_norway::from_str(&yaml)?;
    let model = object["spec"]["model"]["source"].as_str().and_then(|source| source.strip_prefix("hf://"));
    // Under its name the hub has a model that a test can load.
    let hub = Hub::start(vec![Repository::public(model.context("of a hub")?, ember()?)])?;
    let mut rig = Rig::start(Audit::Off)?;
    rig.cluster.node.add_image(AGENT_IMAGE, built("stoker-agent"));
    rig.operator.restart_with(&["--hub-endpoint", &hub.endpoint()])?;

    let file = tempfile::NamedTempFile::new()?;
    fs::write(&file, &yaml)?;
    let applied = rig.cluster.control_plane.kubectl()?.args(["apply", "-f"]).arg(file.path()).output()?;
    ensure!(applied.status.success(), "{}", String::from_utf8_lossy(&applied.stderr));
    let name = object["metadata"]["name"].as_str().context("it has a name")?;
    rig.wait_ready(name, LIMIT)?;
    let served = rig.get(name)?.status.and_then(|status| status.model).context("the status says the model")?;
    ensure!(served.commit == ember()?.sha(), "all replicas are held to what was served: {served:?}");
    ensure!(!ask(&rig, name)?.is_empty(), "the model says something");
    Ok(())
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

#[test]
fn replicas_are_made_where_the_model_is_already() -> Result<()> {
    let (hub, node_cache) = (hub()?, tempfile::tempdir()?);
    let node = |name: &str, node_idx| NodeOptions { name: name.to_owned(), node_idx, ..NodeOptions::default() };
    let options = ControlPlaneOptions { controllers: Controllers::all(), ..ControlPlaneOptions::default() };
    let mut rig = Rig::start_with(options, node("node-0", 0))?;
    rig.cluster.node.add_image(IMAGE, built("stoker-agent"));
    let cache = node_cache.path().to_str().context("a path of text")?;
    rig.operator.restart_with(&["--hub-endpoint", &hub.endpoint(), "--model-cache", cache])?;
    put_token(&rig, "secret")?;
    rig.apply("chat", spec(1))?;
    rig.wait_ready("chat", LIMIT)?;
    let nodes =
        |rig: &Rig| anyhow::Ok(rig.get("chat")?.status.and_then(|status| status.model).map(|model| model.nodes));
    rig.wait("the status says where it is", LIMIT, |rig| Ok(nodes(rig)? == Some(vec!["node-0".to_owned()])))?;

    // An empty node is what the scheduler would choose.
    let other = rig.add_node(node("node-1", 1))?;
    other.add_image(IMAGE, built("stoker-agent"));
    rig.apply("chat", spec(3))?;
    rig.wait("three serve", LIMIT, |rig| Ok(rig.get("chat")?.status.is_some_and(|status| status.ready_replicas == 3)))?;
    let on = rig.pods("chat")?.into_iter().filter_map(|pod| pod.spec?.node_name).collect::<Vec<_>>();
    ensure!(on == ["node-0"; 3], "{on:?}");

    // Another deployment of the same model is no worse off.
    rig.apply("again", spec(1))?;
    rig.wait_ready("again", LIMIT)?;
    let on = rig.pods("again")?.into_iter().filter_map(|pod| pod.spec?.node_name).collect::<Vec<_>>();
    ensure!(on == ["node-0"], "{on:?}");

    // It is a wish: where there is no room the other node takes it, and is one that has the model from then on.
    rig.cluster.kubectl(&["cordon", "node-0"]);
    rig.apply("chat", spec(4))?;
    rig.wait("four serve", LIMIT, |rig| Ok(rig.get("chat")?.status.is_some_and(|status| status.ready_replicas == 4)))?;
    rig.wait("both nodes have it", LIMIT, |rig| {
        Ok(nodes(rig)? == Some(vec!["node-0".to_owned(), "node-1".to_owned()]))
    })?;
    Ok(())
}

/// A source that is behind a Secret.
struct Guarded<'a> {
    source: String,
    secret: &'a str,
    kind: &'a str,
    /// What lets nobody in, and words of what the status says of it.
    wrong: (Value, &'a [&'a str]),
    right: Value,
    /// Variables that only the fetcher has.
    variables: &'a [&'a str],
    /// Certificates to trust.
    ca: Option<PathBuf>,
}

/// It answers once its Secret is right, the agent has none of that, and a second replica is told what the first one found and gets
/// it from the node. `moves` makes the source another one in between.
fn serves_from(guarded: &Guarded<'_>, moves: impl FnOnce() -> Result<()>) -> Result<()> {
    let node_cache = tempfile::tempdir()?;
    let mut rig = Rig::start(Audit::Off)?;
    rig.cluster.node.add_image(IMAGE, built("stoker-agent"));
    let cache = node_cache.path().to_str().context("a path of text")?;
    rig.operator.restart_with(&["--model-cache", cache])?;
    let of = |replicas| {
        let mut spec = spec(replicas);
        spec["model"] = json!({"source": guarded.source, "tokenSecret": {"name": guarded.secret}});
        guarded.ca.iter().for_each(|ca| spec["pod"]["env"] = json!([{"name": "SSL_CERT_FILE", "value": ca}]));
        spec
    };
    let (wrong, words) = &guarded.wrong;
    put_secret(&rig, guarded.secret, guarded.kind, wrong)?;
    rig.apply("chat", of(1))?;
    rig.wait("the status says what is wrong with the Secret", LIMIT, |rig| {
        let ready = condition(&rig.get("chat")?, "Ready").unwrap_or_default();
        Ok(ready.1 == "ModelFetchFailed" && words.iter().all(|words| ready.2.contains(words)))
    })?;
    put_secret(&rig, guarded.secret, guarded.kind, &guarded.right)?;
    rig.wait_ready("chat", LIMIT)?;
    ensure!(!ask(&rig, "chat")?.is_empty(), "the model says something");
    let [fetcher, agent] = variables(&rig.pods("chat")?[0]);
    for name in guarded.variables.iter().map(|name| (*name).to_owned()) {
        ensure!(fetcher.contains(&name) && !agent.contains(&name), "{name}: {fetcher:?} {agent:?}");
    }
    let model = rig.get("chat")?.status.and_then(|status| status.model).context("the status says the model")?;
    ensure!(model.source == guarded.source && model.commit.len() == 64, "{model:?}");
    moves()?;
    rig.apply("chat", of(2))?;
    rig.wait("both serve", LIMIT, |rig| Ok(rig.get("chat")?.status.is_some_and(|status| status.ready_replicas == 2)))?;
    let told = rig.pods("chat")?.iter().map(told_commit).collect::<Vec<_>>();
    ensure!(told == [None, Some(model.commit.clone())] || told == [Some(model.commit), None], "{told:?}");
    Ok(())
}

#[test]
fn a_model_of_a_bucket_is_pinned_and_answers() -> Result<()> {
    let bucket = match Bucket::start() {
        Ok(bucket) => bucket,
        Err(error) => {
            skip("a_model_of_a_bucket_is_pinned_and_answers", &format!("{error:#}"));
            return Ok(());
        }
    };
    for name in ember_files()? {
        bucket.put(&format!("team/ember/{name}"), &fs::read(ember_dir().join(&name))?, Put::default())?;
    }
    let reader = bucket.reader()?;
    bucket.enforce()?;
    let mut right = json!({"AWS_ENDPOINT_URL": bucket.endpoint(), "AWS_REGION": "us-east-1"});
    reader.iter().for_each(|(name, value)| right[name] = json!(value));
    let mut wrong = right.clone();
    wrong["AWS_SECRET_ACCESS_KEY"] = json!("another");
    let words = ["403 Forbidden", "AWS_SECRET_ACCESS_KEY of Secret s3 is not that of its AWS_ACCESS_KEY_ID"];
    let guarded = Guarded {
        source: "s3://models/team/ember".to_owned(),
        secret: "s3",
        kind: "Opaque",
        wrong: (wrong, &words),
        right,
        variables: &["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION"],
        ca: None,
    };
    serves_from(&guarded, || bucket.put("team/ember/config.json", b"{}", Put::default()))
}

#[test]
fn a_model_of_a_registry_is_pinned_and_answers() -> Result<()> {
    let registry = match Registry::start() {
        Ok(registry) => registry,
        Err(error) => {
            skip("a_model_of_a_registry_is_pinned_and_answers", &format!("{error:#}"));
            return Ok(());
        }
    };
    let names = ember_files()?;
    registry.push("team/ember:v1", &ember_dir(), &names.iter().map(String::as_str).collect::<Vec<_>>())?;
    let tokens = registry.with_tokens()?;
    let login = |password: &str| {
        let auths = json!({"auths": {tokens.address(): {"username": LOGIN[0], "password": password}}});
        json!({".dockerconfigjson": auths.to_string()})
    };
    let guarded = Guarded {
        source: format!("oci://{}/team/ember:v1", tokens.address()),
        secret: "pull",
        kind: "kubernetes.io/dockerconfigjson",
        wrong: (login("another"), &["401 Unauthorized", "(key .dockerconfigjson of Secret pull) is not valid there"]),
        right: login(LOGIN[1]),
        variables: &["DOCKER_AUTH_CONFIG"],
        ca: None,
    };
    let scratch = tempfile::tempdir()?;
    fs::write(scratch.path().join("config.json"), "{}")?;
    serves_from(&guarded, || registry.push("team/ember:v1", scratch.path(), &["config.json"]))
}

#[test]
fn a_model_of_a_web_server_is_pinned_and_answers() -> Result<()> {
    let web = match Web::start() {
        Ok(web) => web,
        Err(error) => {
            skip("a_model_of_a_web_server_is_pinned_and_answers", &format!("{error:#}"));
            return Ok(());
        }
    };
    for name in ember_files()? {
        web.put(&format!("ember/{name}"), &fs::read(ember_dir().join(&name))?)?;
    }
    web.guard("Basic bWU6d29yZA==")?;
    let (url, ca) = web.secure();
    let login = |password: &str| json!({"username": "me", "password": password});
    let guarded = Guarded {
        source: format!("{url}/ember/"),
        secret: "files",
        kind: "kubernetes.io/basic-auth",
        wrong: (
            login("another"),
            &["403 Forbidden from https://127.0.0.1", "the login of Secret files may not read it"],
        ),
        right: login("word"),
        variables: &["STOKER_SOURCE_USERNAME", "STOKER_SOURCE_PASSWORD"],
        ca: Some(ca),
    };
    serves_from(&guarded, || web.put("ember/config.json", b"{}"))
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
