//! Tenants before a real agent: who has no key, who may not, who asks for what is not there, who is over a limit; a key that is
//! changed without a restart; what each used; prompts that are nobody else's; and no key in any log.

use std::{
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use reqwest::{Client, RequestBuilder, Response};
use ring::digest::{SHA256, digest};
use serde_json::{Value, json};
use stoker_crds::endpoints::EndpointState;
use stoker_tests::{
    agent::AgentProcess,
    cluster::built,
    gateway::{GatewayProcess, Teller, deployment, replica},
};
use tempfile::TempDir;

const CHAT: &str = "/v1/chat/completions";
const PATIENCE: Duration = Duration::from_secs(60);

/// A gateway with tenants, before one agent that is the deployments `chat` and `code`.
struct Rig {
    gateway: GatewayProcess,
    file: PathBuf,
    _teller: Teller,
    _agent: AgentProcess,
    _folder: TempDir,
}

/// Tenants, each with the key `key-of-NAME`, and what the file says of them.
fn file_of(tenants: &[(&str, &str)]) -> String {
    let line = |(name, more): &(&str, &str)| {
        let key = format!("key-of-{name}");
        let hash: String = digest(&SHA256, key.as_bytes()).as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        format!("- {{name: {name}, keys: ['sha256:{hash}']{more}}}\n")
    };
    format!("tenants:\n{}", tenants.iter().map(line).collect::<String>())
}

impl Rig {
    async fn start(tenants: &[(&str, &str)]) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("tenants.yaml");
        std::fs::write(&file, file_of(tenants))?;
        let agent = AgentProcess::ready(&["--served-name", "ember", "--served-name", "code"]).await?;
        let teller = Teller::start().await?;
        let args = ["--hold", "1", "--tenants", &file.display().to_string()];
        let gateway = GatewayProcess::start(teller.url(), &args)?;
        let told = replica("pod-0", &agent).await?;
        let code = deployment("code", &["code"], vec![]);
        teller.tell(vec![deployment("chat", &["ember"], vec![told]), code]);
        gateway.knows("chat", EndpointState::Serving, 1).await?;
        Ok(Self { gateway, file, _teller: teller, _agent: agent, _folder: folder })
    }

    fn ask(&self, tenant: &str, body: &Value) -> RequestBuilder {
        Client::new().post(self.gateway.url(CHAT)).bearer_auth(format!("key-of-{tenant}")).json(body)
    }

    async fn counted(&self, line: &str) -> Result<f64> {
        let metrics = self.gateway.metrics().await?;
        let found = metrics.lines().find_map(|found| found.strip_prefix(line)?.trim().parse().ok());
        Ok(found.unwrap_or(0.0))
    }

    /// Asks until it is answered so.
    async fn wait(&self, tenant: &str, status: u16) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while self.ask(tenant, &body("Hi", 1)).send().await?.status() != status {
            ensure!(Instant::now() < deadline, "{tenant}: never {status}\n{}", self.gateway.log());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    }
}

fn body(content: &str, max_tokens: u32) -> Value {
    json!({"model": "ember", "max_tokens": max_tokens, "ignore_eos": true, "temperature": 0,
           "messages": [{"role": "user", "content": content}]})
}

async fn error_of(answer: Response) -> Result<(u16, String, String)> {
    let status = answer.status().as_u16();
    let error = answer.json::<Value>().await?["error"].clone();
    let word = |field: &str| error[field].as_str().unwrap_or_default().to_owned();
    Ok((status, word("code"), word("message")))
}

#[tokio::test]
async fn who_may_not_is_told_why_and_nothing_else() -> Result<()> {
    let rig = Rig::start(&[("search", ", models: [ember]"), ("all", "")]).await?;
    let post = || Client::new().post(rig.gateway.url(CHAT)).json(&body("Hi", 1));
    for nobody in [
        post(),
        post().bearer_auth("key-of-search-"),
        post().bearer_auth(""),
        post().header("authorization", "key-of-search"),
        post().header("x-api-key", "x".repeat(5000)),
        Client::new().post(rig.gateway.url(CHAT)).body("no JSON"),
        Client::new().get(rig.gateway.url("/v1/models")),
        Client::new().get(rig.gateway.url("/v1/responses/resp_1")),
    ] {
        let (status, code, message) = error_of(nobody.send().await?).await?;
        assert_eq!((status, code.as_str()), (401, "invalid_api_key"), "{message}");
    }
    let message = json!({"model": "ember", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]});
    let to_messages = || Client::new().post(rig.gateway.url("/v1/messages")).json(&message);
    let refused: Value = to_messages().send().await?.json().await?;
    assert_eq!(refused["error"]["type"], "authentication_error", "{refused}");
    assert_eq!(to_messages().header("x-api-key", "key-of-search").send().await?.status(), 200);
    assert_eq!(rig.ask("search", &body("Hi", 1)).send().await?.status(), 200);

    let mut code = body("Hi", 1);
    code["model"] = json!("code");
    let (status, word, message) = error_of(rig.ask("search", &code).send().await?).await?;
    assert_eq!((status, word.as_str()), (403, "model_not_allowed"), "{message}");
    assert_eq!(rig.ask("all", &code).send().await?.status(), 503, "it may, and nobody serves it");
    code["model"] = json!("gpt");
    for (tenant, list) in [("search", "there is: ember"), ("all", "there is: code, ember")] {
        let (status, word, message) = error_of(rig.ask(tenant, &code).send().await?).await?;
        assert_eq!((status, word.as_str()), (404, "model_not_found"));
        assert!(message.ends_with(list), "{tenant}: {message}");
    }
    let models = Client::new().get(rig.gateway.url("/v1/models")).bearer_auth("key-of-search").send().await?;
    assert_eq!(models.json::<Value>().await?["data"].as_array().unwrap().len(), 1);
    for open in ["/healthz", "/readyz"] {
        assert_eq!(reqwest::get(rig.gateway.url(open)).await?.status(), 200, "{open}");
    }
    for (told_elsewhere, of_it) in [("/metrics", "stoker_gateway_"), ("/v1/lines", "lines"), ("/v1/in-flight", "")] {
        let refused = Client::new().get(rig.gateway.url(told_elsewhere)).bearer_auth("key-of-all").send().await?;
        assert_eq!(error_of(refused).await?.1, "unknown_url", "{told_elsewhere}: also not with a key");
        let told = reqwest::get(rig.gateway.admin_url(told_elsewhere)).await?.chunk().await?;
        let told = String::from_utf8(told.unwrap_or_default().to_vec())?;
        assert!(told.contains(of_it), "{told_elsewhere}: {told}");
    }
    let asked = Client::new().post(rig.gateway.admin_url(CHAT)).bearer_auth("key-of-search").json(&body("Hi", 1));
    assert_eq!(error_of(asked.send().await?).await?.0, 404, "nobody is served there, who is or is not a tenant");
    assert!(!rig.gateway.log().contains("key-of"), "{}", rig.gateway.log());
    Ok(())
}

#[tokio::test]
async fn a_limit_is_one_tenant_s_and_says_when_to_come_back() -> Result<()> {
    let tenants = [
        ("few", ", limits: {requestsPerMinute: 2}"),
        ("one", ", limits: {concurrentRequests: 1}"),
        ("short", ", limits: {tokensPerMinute: 60}"),
        ("free", ""),
    ];
    let rig = Rig::start(&tenants).await?;
    let limited = async |tenant: &str, limit: &str| {
        let answer = rig.ask(tenant, &body("Hi", 1)).send().await?;
        let seconds: u32 = answer.headers()["retry-after"].to_str()?.parse()?;
        let (status, code, message) = error_of(answer).await?;
        assert_eq!((status, code.as_str()), (429, "rate_limit_exceeded"), "{tenant}");
        assert!(message.contains(limit) && (1..=120).contains(&seconds), "{message}");
        assert_eq!(rig.ask("free", &body("Hi", 1)).send().await?.status(), 200, "others go on");
        anyhow::Ok(())
    };
    for _ in 0..2 {
        assert_eq!(rig.ask("few", &body("Hi", 1)).send().await?.status(), 200);
    }
    limited("few", "2 requestsPerMinute").await?;

    let mut endless = body("Once upon a time", 1900);
    endless["stream"] = json!(true);
    let mut stream = rig.ask("one", &endless).send().await?;
    stream.chunk().await?;
    limited("one", "1 concurrentRequests").await?;
    drop(stream);
    rig.wait("one", 200).await?;

    assert_eq!(rig.ask("short", &body("Hi", 100)).send().await?.status(), 200, "what it will cost nobody knows");
    // It is counted when the answer has gone, so a client may be first.
    let used = "stoker_gateway_tenant_tokens_total{kind=\"completion\",tenant=\"short\"}";
    let deadline = Instant::now() + PATIENCE;
    while rig.counted(used).await? < 100.0 {
        ensure!(Instant::now() < deadline, "100 tokens are never counted");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    limited("short", "60 tokensPerMinute").await?;
    assert!(
        rig.counted("stoker_gateway_tenant_limited_total{limit=\"tokensPerMinute\",tenant=\"short\"}").await? >= 1.0
    );
    Ok(())
}

#[tokio::test]
async fn what_a_tenant_used_is_counted_whole_and_streamed() -> Result<()> {
    let rig = Rig::start(&[("search", ""), ("other", "")]).await?;
    let begun = Instant::now();
    let answer = rig.ask("search", &body("Tell me a story.", 20)).send().await?;
    let told: f64 = answer.headers()["x-stoker-device-seconds"].to_str()?.parse()?;
    assert!(told > 0.0 && told < begun.elapsed().as_secs_f64(), "{told}");
    let whole: Value = answer.json().await?;
    let mut streamed = body("Tell me a story.", 30);
    streamed["stream"] = json!(true);
    rig.ask("search", &streamed).send().await?.text().await?;
    let tokens = async |kind: &str| {
        rig.counted(&format!("stoker_gateway_tenant_tokens_total{{kind=\"{kind}\",tenant=\"search\"}}")).await
    };
    let deadline = Instant::now() + PATIENCE;
    while tokens("completion").await? < 50.0 {
        ensure!(Instant::now() < deadline, "{} of 50 tokens", tokens("completion").await?);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(tokens("completion").await?, 50.0);
    assert!(tokens("prompt").await? > whole["usage"]["prompt_tokens"].as_f64().unwrap());
    assert_eq!(rig.counted("stoker_gateway_tenant_requests_total{code=\"200\",tenant=\"search\"}").await?, 2.0);
    let line = rig.gateway.access_line(|line| line["completion_tokens"] == 20).await?;
    assert_eq!((&line["tenant"], &line["prompt_tokens"]), (&json!("search"), &whole["usage"]["prompt_tokens"]));
    let seconds = |line: &Value| line["device_seconds"].as_f64().unwrap();
    assert!((seconds(&line) - told).abs() < 1e-6, "{line}");
    let streamed = rig.gateway.access_line(|line| line["completion_tokens"] == 30).await?;
    assert!(seconds(&streamed) > 0.0 && seconds(&streamed) < streamed["seconds"].as_f64().unwrap(), "{streamed}");
    let all = rig.counted("stoker_gateway_tenant_device_seconds_total{tenant=\"search\"}").await?;
    assert!((all - seconds(&line) - seconds(&streamed)).abs() < 1e-6, "{all}: {line} {streamed}");
    let embedded = json!({"model": "ember", "input": ["Once", "upon a time"]});
    let client = Client::new().post(rig.gateway.url("/v1/embeddings")).bearer_auth("key-of-other").json(&embedded);
    let answer = client.send().await?;
    let told: f64 = answer.headers()["x-stoker-device-seconds"].to_str()?.parse()?;
    let line = rig.gateway.access_line(|line| line["path"] == "/v1/embeddings").await?;
    assert!(told > 0.0 && seconds(&line) == told, "{told}: {line}");
    Ok(())
}

#[tokio::test]
async fn what_a_response_in_the_background_used_is_counted_though_its_request_was_answered() -> Result<()> {
    let rig = Rig::start(&[("search", "")]).await?;
    let (begun, url) = (Instant::now(), rig.gateway.url("/v1/responses"));
    let asked = json!({"model": "ember", "input": "Tell me a story.", "background": true, "max_output_tokens": 40});
    let queued: Value = Client::new().post(&url).bearer_auth("key-of-search").json(&asked).send().await?.json().await?;
    assert_eq!(queued["status"], "queued", "{queued}");
    let id = queued["id"].as_str().unwrap();
    let kept = async || -> Result<Value> {
        let kept = Client::new().get(format!("{url}/{id}")).bearer_auth("key-of-search").send().await?;
        Ok(kept.json().await?)
    };
    let mut ended = kept().await?;
    while !["completed", "incomplete"].map(Value::from).contains(&ended["status"]) {
        ensure!(begun.elapsed() < PATIENCE, "it does not end");
        tokio::time::sleep(Duration::from_millis(50)).await;
        ended = kept().await?;
    }
    let longest = begun.elapsed().as_secs_f64();
    let used = async || rig.counted("stoker_gateway_tenant_device_seconds_total{tenant=\"search\"}").await;
    while used().await? == 0.0 {
        ensure!(begun.elapsed() < PATIENCE, "nothing is counted\n{}", rig.gateway.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(used().await? < longest, "{} of {longest}", used().await?);
    // Once, though it was read again and again, and the estimate of its prompt is not beside them.
    let tokens = async |kind: &str| {
        rig.counted(&format!("stoker_gateway_tenant_tokens_total{{kind=\"{kind}\",tenant=\"search\"}}")).await
    };
    let usage = |field: &str| ended["usage"][field].as_f64().unwrap();
    while tokens("completion").await? < usage("output_tokens") {
        ensure!(begun.elapsed() < PATIENCE, "its tokens are not counted\n{}", rig.gateway.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    kept().await?;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let counted = [tokens("prompt").await?, tokens("completion").await?];
    assert_eq!(counted, ["input_tokens", "output_tokens"].map(usage), "{ended}");
    Ok(())
}

#[tokio::test]
async fn a_key_is_changed_without_a_restart_and_a_broken_file_changes_nothing() -> Result<()> {
    let rig = Rig::start(&[("old", "")]).await?;
    rig.wait("old", 200).await?;
    std::fs::write(&rig.file, file_of(&[("old", ""), ("new", "")]))?;
    rig.wait("new", 200).await?;
    assert_eq!(rig.ask("old", &body("Hi", 1)).send().await?.status(), 200, "both, for as long as it takes");
    std::fs::write(&rig.file, file_of(&[("new", "")]))?;
    rig.wait("old", 401).await?;

    for broken in ["tenants: []", "", "tenants: [{name: x, keys: [plain-secret]}]"] {
        std::fs::write(&rig.file, broken)?;
        let deadline = Instant::now() + PATIENCE;
        while rig.counted("stoker_gateway_tenants_stale").await? < 1.0 {
            ensure!(Instant::now() < deadline, "nobody says that it is broken");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert_eq!(rig.ask("new", &body("Hi", 1)).send().await?.status(), 200);
    }
    std::fs::remove_file(&rig.file)?;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(rig.ask("new", &body("Hi", 1)).send().await?.status(), 200);
    assert!(!rig.gateway.log().contains("plain-secret"), "{}", rig.gateway.log());
    let refused = GatewayProcess::start("http://127.0.0.1:1", &["--tenants", &rig.file.display().to_string()]);
    assert!(refused.is_err(), "without its tenants it does not begin");
    Ok(())
}

#[tokio::test]
async fn prompts_of_a_tenant_are_cached_for_itself_alone() -> Result<()> {
    let rig =
        Rig::start(&[("a", ""), ("b", ""), ("c", ", sharesPrefixes: true"), ("d", ", sharesPrefixes: true")]).await?;
    let prompt = body(&"The quick brown fox jumps over the lazy dog. ".repeat(20), 1);
    let cached = async |tenant: &str| {
        let answer: Value = rig.ask(tenant, &prompt).send().await?.json().await?;
        anyhow::Ok(answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0))
    };
    assert_eq!(cached("a").await?, 0);
    assert!(cached("a").await? > 100);
    assert_eq!([cached("b").await?, cached("c").await?], [0, 0]);
    assert!(cached("d").await? > 100, "these two want it so");
    Ok(())
}

#[tokio::test]
async fn a_command_says_where_a_request_would_go() -> Result<()> {
    let rig = Rig::start(&[("search", ", limits: {requestsPerMinute: 2}")]).await?;
    let folder = tempfile::tempdir()?;
    let file = |name: &str, text: &str| -> Result<String> {
        std::fs::write(folder.path().join(name), text)?;
        Ok(folder.path().join(name).display().to_string())
    };
    // A gateway that is named is asked, and no API server.
    let kubeconfig = file(
        "kubeconfig",
        "{clusters: [{name: a, cluster: {server: 'http://127.0.0.1:1'}}], users: [{name: a, user: {}}],
          contexts: [{name: a, context: {cluster: a, user: a}}], current-context: a}",
    )?;
    let url = rig.gateway.url("");
    let route = |tenant: &str, more: &[&str]| -> Result<(bool, String)> {
        let mut command = Command::new(built("kubectl-stoker"));
        command.args(["route", "chat", "--kubeconfig", &kubeconfig, "--gateway", &url]).args(more);
        let output = command.env("STOKER_API_KEY", format!("key-of-{tenant}")).output()?;
        let said = if output.status.success() { output.stdout } else { output.stderr };
        Ok((output.status.success(), String::from_utf8(said)?))
    };
    let (is_told, said) = route("search", &[])?;
    assert!(
        is_told && said.contains("for chat.default of about") && said.contains("would go to pod-0, the only one"),
        "{said}"
    );
    let request = file("request", r#"{"prompt": "The quick brown fox jumps over the lazy dog", "max_tokens": 1}"#)?;
    let (_, said) = route("search", &["--request", &request, "--output", "json"])?;
    let told: Value = serde_json::from_str(&said)?;
    assert_eq!([&told["replica"], &told["replicas"][0]["chosen"]], [&json!("pod-0"), &json!(true)], "{told}");
    assert_eq!(rig.counted("stoker_gateway_routes_total{reason=\"only\"}").await?, 0.0, "nothing was sent");

    let refused = |(is_told, said): (bool, String), words: &str| assert!(!is_told && said.contains(words), "{said}");
    refused(route("search", &[])?, "429");
    refused(route("nobody", &[])?, "401");
    let neither = file("neither", "{}")?;
    refused(route("search", &["--request", &neither])?, "neither `messages`");
    Ok(())
}
