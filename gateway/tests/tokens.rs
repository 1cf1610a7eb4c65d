//! Tenants by tokens, from an issuer on loopback through a gateway to a replica: discovery, over TLS too, keys in a file, keys that change and an
//! issuer that is away, without a restart; what a replica is told; limits of a class, and how many it may have; no token in what is logged.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    io,
    path::Path,
    sync::{
        Arc, LazyLock, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use axum::{
    Json, Router,
    extract::State,
    http::{HeaderMap, StatusCode},
    routing::{get, post},
};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use rcgen::{CertifiedKey, generate_simple_self_signed};
use reqwest::{Client, Response};
use ring::signature::{Ed25519KeyPair, KeyPair};
use serde_json::{Value, json};
use stoker_crds::{
    contract::LoadReport,
    endpoints::{DeploymentEndpoints, EndpointState, Endpoints, ReplicaEndpoint, WHOLE_WEIGHT},
};
use stoker_gateway::{
    gateway::{Gateway, Settings},
    server::router,
    tenants::Tenants,
    tls::{Tls, TlsFiles},
};
use tokio::net::TcpListener;

const PATIENCE: Duration = Duration::from_secs(60);

async fn served(routes: Router) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, routes).await });
    base
}

/// The same with a certificate for `localhost`, which is written to the folder.
async fn served_by_tls(routes: Router, folder: &Path) -> String {
    let CertifiedKey { cert, signing_key } = generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let (certificate, key) = (folder.join("ca.crt"), folder.join("tls.key"));
    std::fs::write(&certificate, cert.pem()).unwrap();
    std::fs::write(&key, signing_key.serialize_pem()).unwrap();
    let tls = Tls::read(TlsFiles { certificate, key, http2: false }).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base = format!("https://localhost:{}", listener.local_addr().unwrap().port());
    tokio::spawn(async move { axum::serve(tls.over(listener), routes).await });
    base
}

/// An issuer with one key at a time.
struct Issuer {
    base: String,
    desk: Arc<Desk>,
}

struct Desk {
    base: Mutex<String>,
    jwk: Mutex<Option<Value>>,
    n_asked: AtomicU32,
}

impl Desk {
    /// With what is asked of it. Below `/impostor` it says the same of itself, which is another issuer's there.
    fn open() -> (Arc<Self>, Router) {
        let desk = Arc::new(Self { base: Mutex::default(), jwk: Mutex::new(None), n_asked: AtomicU32::new(0) });
        let routes = Router::new()
            .route("/.well-known/openid-configuration", get(discovery))
            .route("/impostor/.well-known/openid-configuration", get(discovery))
            .route("/keys", get(keys))
            .with_state(Arc::clone(&desk));
        (desk, routes)
    }
}

struct Key {
    pair: Ed25519KeyPair,
    kid: &'static str,
}

impl Key {
    fn new(kid: &'static str, seed: u8) -> Self {
        Self { pair: Ed25519KeyPair::from_seed_unchecked(&[seed; 32]).unwrap(), kid }
    }

    fn jwk(&self) -> Value {
        let x = URL_SAFE_NO_PAD.encode(self.pair.public_key());
        json!({"kty": "OKP", "crv": "Ed25519", "kid": self.kid, "x": x})
    }

    fn token(&self, issuer: &Issuer, more: Value) -> String {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        let mut claims = json!({"iss": issuer.base, "aud": ["stoker"], "exp": now + 3600, "sub": "search"});
        claims.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let header = json!({"alg": "EdDSA", "kid": self.kid});
        let signed = [header, claims].map(|part| URL_SAFE_NO_PAD.encode(part.to_string())).join(".");
        format!("{signed}.{}", URL_SAFE_NO_PAD.encode(self.pair.sign(signed.as_bytes())))
    }
}

impl Issuer {
    async fn start() -> Self {
        let (desk, routes) = Desk::open();
        Self::at(served(routes).await, desk)
    }

    async fn by_tls(folder: &Path) -> Self {
        let (desk, routes) = Desk::open();
        Self::at(served_by_tls(routes, folder).await, desk)
    }

    fn at(base: String, desk: Arc<Desk>) -> Self {
        desk.base.lock().unwrap().clone_from(&base);
        Self { base, desk }
    }

    /// From now on it has this key, or does not answer.
    fn publishes(&self, key: Option<&Key>) {
        *self.desk.jwk.lock().unwrap() = key.map(Key::jwk);
    }

    fn n_asked(&self) -> u32 {
        self.desk.n_asked.load(Ordering::Relaxed)
    }
}

async fn discovery(State(desk): State<Arc<Desk>>) -> Json<Value> {
    let base = desk.base.lock().unwrap().clone();
    Json(json!({"issuer": base, "jwks_uri": format!("{base}/keys")}))
}

async fn keys(State(desk): State<Arc<Desk>>) -> Result<Json<Value>, StatusCode> {
    desk.n_asked.fetch_add(1, Ordering::Relaxed);
    let jwk = desk.jwk.lock().unwrap().clone().ok_or(StatusCode::SERVICE_UNAVAILABLE)?;
    Ok(Json(json!({ "keys": [jwk] })))
}

/// Heads of requests that a replica got.
type Heads = Arc<Mutex<Vec<HeaderMap>>>;

async fn replica(heads: Heads) -> String {
    async fn answer(State(heads): State<Heads>, head: HeaderMap) -> Json<Value> {
        heads.lock().unwrap().push(head);
        Json(json!({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}))
    }
    served(Router::new().route("/v1/chat/completions", post(answer)).with_state(heads)).await
}

fn endpoints(address: &str) -> Endpoints {
    let replica = ReplicaEndpoint {
        pod: "pod".into(),
        uid: "uid".into(),
        address: Some(address.trim_start_matches("http://").to_owned()),
        events: None,
        revision: "r".into(),
        weight: WHOLE_WEIGHT,
        state: EndpointState::Serving,
        load: Some((&LoadReport { start_id: "s".into(), ..LoadReport::idle(100) }).into()),
    };
    let chat = DeploymentEndpoints {
        namespace: "default".into(),
        name: "chat".into(),
        models: vec!["chat".into()],
        replicas_wanted: 1,
        port: None,
        replicas: vec![replica],
    };
    Endpoints { source: "test".into(), number: 1, gateways: vec![], deployments: vec![chat] }
}

struct Rig {
    gateway: Arc<Gateway>,
    base: String,
    heads: Heads,
    client: Client,
}

impl Rig {
    async fn start(issuer: &Issuer) -> Self {
        let issuers = format!("{{issuer: '{}', audiences: [stoker], tenantClaim: sub, classClaim: tier}}", issuer.base);
        Self::among(&issuers, Path::new("")).await
    }

    /// With these issuers, whose files are in this folder.
    async fn among(issuers: &str, folder: &Path) -> Self {
        LazyLock::force(&LOG);
        let heads = Heads::default();
        let gateway = Gateway::new(Settings::default()).unwrap();
        gateway.learn(endpoints(&replica(Arc::clone(&heads)).await));
        let tenants = format!(
            "{{tenants: [{{name: search, weight: 3}}], classes: [{{name: small, limits: {{requestsPerMinute: 1}}}}],
               issuers: [{issuers}]}}"
        );
        gateway.learn_tenants(Tenants::parse(&tenants).unwrap(), folder);
        let base = served(router(Arc::clone(&gateway), Router::new())).await;
        // An error means that the other test did.
        let _chosen_before = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
        Self { gateway, base, heads, client: Client::new() }
    }

    async fn ask(&self, token: &str) -> Response {
        let body = json!({"model": "chat", "messages": [{"role": "user", "content": "Hi"}]});
        let asked = self.client.post(format!("{}/v1/chat/completions", self.base)).bearer_auth(token).json(&body);
        asked.send().await.unwrap()
    }

    async fn status(&self, token: &str) -> u16 {
        self.ask(token).await.status().as_u16()
    }

    /// Asks until it is answered so.
    async fn wait(&self, token: &str, status: u16) {
        let deadline = Instant::now() + PATIENCE;
        while self.status(token).await != status {
            assert!(Instant::now() < deadline, "never {status}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    fn counted(&self, line: &str) -> f64 {
        let metrics = self.gateway.render_metrics().unwrap();
        let found = metrics.lines().find_map(|found| found.strip_prefix(line)?.trim().parse().ok());
        found.unwrap_or(0.0)
    }

    fn tokens(&self, outcome: &str) -> f64 {
        self.counted(&format!("stoker_gateway_tokens_total{{outcome=\"{outcome}\"}}"))
    }
}

async fn error_of(answer: Response) -> (u16, String, String) {
    let (status, challenge) = (answer.status().as_u16(), answer.headers().get("www-authenticate").cloned());
    let code = answer.json::<Value>().await.unwrap()["error"]["code"].as_str().unwrap().to_owned();
    (status, code, challenge.map_or_else(String::new, |challenge| challenge.to_str().unwrap().to_owned()))
}

/// What was logged, of everything.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

/// For all threads and both tests: what one of them asks for is not asked for again.
static LOG: LazyLock<Log> = LazyLock::new(|| {
    let log = Log::default();
    let writer = log.clone();
    let lines = tracing_subscriber::fmt().with_max_level(tracing::Level::TRACE).with_writer(move || writer.clone());
    tracing::subscriber::set_global_default(lines.finish()).expect("it is the first");
    log
});

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn a_token_is_its_tenant_s_and_says_why_it_is_not_and_is_nowhere_else() {
    let (issuer, key) = (Issuer::start().await, Key::new("a", 1));
    let rig = Rig::start(&issuer).await;
    let early = key.token(&issuer, json!({}));
    assert_eq!(error_of(rig.ask(&early).await).await.1, "issuer_unreachable");
    issuer.publishes(Some(&key));
    rig.wait(&early, 200).await;
    assert_eq!(rig.status(&early).await, 200);
    assert_eq!(rig.tokens("verified"), 1.0, "one signature, then it is remembered");
    assert!(rig.tokens("remembered") >= 1.0);
    for head in rig.heads.lock().unwrap().iter() {
        assert_eq!(head.get("authorization"), None);
        assert_eq!([&head["x-stoker-tenant"], &head["x-stoker-salt"]], ["search", "search"]);
    }
    let deadline = Instant::now() + PATIENCE;
    while rig.counted("stoker_gateway_tenant_tokens_total{kind=\"completion\",tenant=\"search\"}") < 4.0 {
        assert!(Instant::now() < deadline, "what it used is counted");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }

    let of_class = key.token(&issuer, json!({"sub": "app:7", "tier": "small"}));
    assert_eq!(rig.status(&of_class).await, 200);
    assert_eq!(error_of(rig.ask(&of_class).await).await.1, "rate_limit_exceeded", "its class has one a minute");
    let sibling = key.token(&issuer, json!({"sub": "app:8", "tier": "small"}));
    assert_eq!(rig.status(&sibling).await, 200, "each for itself");
    let stranger = key.token(&issuer, json!({"sub": "nobody"}));
    assert_eq!(error_of(rig.ask(&stranger).await).await.1, "unknown_tenant");

    let forged = Key { kid: "a", ..Key::new("b", 2) }.token(&issuer, json!({}));
    let elsewhere = key.token(&issuer, json!({"aud": "elsewhere"}));
    let old = key.token(&issuer, json!({"exp": 1}));
    for (token, why) in [(&forged, "signature is wrong"), (&elsewhere, "`aud`"), (&old, "has expired")] {
        let (status, code, challenge) = error_of(rig.ask(token).await).await;
        assert_eq!((status, code.as_str()), (401, "invalid_token"), "{why}");
        assert!(challenge.starts_with("Bearer realm=\"stoker\", error=\"invalid_token\"") && challenge.contains(why));
    }
    let (status, code, challenge) = error_of(rig.ask("no-token").await).await;
    assert_eq!((status, code.as_str(), challenge.as_str()), (401, "invalid_api_key", "Bearer realm=\"stoker\""));
    let log = String::from_utf8(LOG.0.lock().unwrap().clone()).unwrap();
    assert!(log.contains("tenant"), "there is a line for each request: {log}");
    for token in [&early, &of_class, &sibling, &stranger, &forged, &elsewhere, &old] {
        for part in token.split('.').skip(1) {
            assert!(!log.contains(part), "{log}");
        }
    }
}

#[tokio::test]
async fn keys_change_without_a_restart_and_an_issuer_that_is_away_changes_nothing() {
    let (issuer, [first, second, third]) =
        (Issuer::start().await, [("a", 1), ("b", 2), ("c", 3)].map(|(kid, seed)| Key::new(kid, seed)));
    issuer.publishes(Some(&first));
    let rig = Rig::start(&issuer).await;
    let [by_first, by_second, by_third] = [&first, &second, &third].map(|key| key.token(&issuer, json!({})));
    rig.wait(&by_first, 200).await;
    issuer.publishes(Some(&second));
    rig.wait(&by_second, 200).await;
    assert_eq!(error_of(rig.ask(&by_first).await).await.1, "invalid_token", "its key was taken back");

    issuer.publishes(None);
    let stale = format!("stoker_gateway_issuer_keys_stale{{issuer=\"{}\"}}", issuer.base);
    assert_eq!(rig.status(&by_third).await, 401, "its key is not known");
    assert_eq!((rig.counted(&stale), rig.status(&by_second).await), (1.0, 200), "the last keys stay");
    issuer.publishes(Some(&third));
    rig.wait(&by_third, 200).await;
    assert_eq!(rig.counted(&stale), 0.0);

    let (begun, before) = (Instant::now(), issuer.n_asked());
    for seed in 10..40 {
        let made_up = Key::new("made-up", seed).token(&issuer, json!({}));
        assert_eq!(rig.status(&made_up).await, 401);
    }
    let (more, most) = (issuer.n_asked() - before, 5 + begun.elapsed().as_secs() / 10);
    assert!(u64::from(more) <= most, "{more} questions for thirty tokens, {most} at most");
}

#[tokio::test]
async fn keys_come_by_tls_from_whom_the_named_authority_vouches_for_and_by_discovery_of_the_issuer_alone() {
    let (folder, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (issuer, key) = (Issuer::by_tls(folder.path()).await, Key::new("a", 1));
    issuer.publishes(Some(&key));
    // Vouches for itself, and for nobody that is asked here.
    served_by_tls(Router::new(), elsewhere.path()).await;
    std::fs::copy(elsewhere.path().join("ca.crt"), folder.path().join("other.crt")).unwrap();
    let base = &issuer.base;
    let of = |issuer: &str, more: &str| {
        format!("{{issuer: '{issuer}', audiences: [stoker], tenantClaim: sub, certificateAuthority: ca.crt{more}}}")
    };
    let (by_url, by_other) =
        (format!(", jwks: '{base}/keys'"), format!(", jwks: '{base}/keys', certificateAuthority: other.crt"));
    let issuers = [
        of(base, ""),
        of("by-url", &by_url),
        of(&format!("{base}/impostor"), ""),
        of("another-authority", &by_other).replacen(", certificateAuthority: ca.crt", "", 1),
        of("no-authority", &by_url).replacen(", certificateAuthority: ca.crt", "", 1),
        of("no-file", &by_url).replacen("ca.crt", "missing.crt", 1),
    ];
    let rig = Rig::among(&issuers.join(", "), folder.path()).await;
    let token = |iss: &str| key.token(&issuer, json!({ "iss": iss }));
    rig.wait(&token(base), 200).await;
    rig.wait(&token("by-url"), 200).await;
    for nobody in [&format!("{base}/impostor"), "another-authority", "no-authority", "no-file"] {
        let (status, code, _) = error_of(rig.ask(&token(nobody)).await).await;
        assert_eq!((status, code.as_str()), (503, "issuer_unreachable"), "{nobody}");
        let stale = format!("stoker_gateway_issuer_keys_stale{{issuer=\"{nobody}\"}}");
        assert_eq!(rig.counted(&stale), 1.0, "{nobody}");
    }
    let log = String::from_utf8(LOG.0.lock().unwrap().clone()).unwrap();
    assert!(log.contains(&format!("is of the issuer {base}, to the letter")), "{log}");
}

#[tokio::test]
async fn keys_are_read_from_a_file_beside_the_list_and_again_when_a_token_names_another() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (Key::new("a", 1), Key::new("b", 2));
    let writes =
        |keys: Value| std::fs::write(folder.path().join("keys.json"), json!({ "keys": keys }).to_string()).unwrap();
    let nowhere = Issuer::at("https://kubernetes.default.svc".to_owned(), Desk::open().0);
    let issuers = "{issuer: 'https://kubernetes.default.svc', audiences: [stoker], jwks: keys.json, tenantClaim: /kubernetes.io/namespace}";
    let rig = Rig::among(issuers, folder.path()).await;
    let [by_first, by_second] =
        [&first, &second].map(|key| key.token(&nowhere, json!({"kubernetes.io": {"namespace": "search"}})));
    assert_eq!(error_of(rig.ask(&by_first).await).await.1, "issuer_unreachable", "there is no file yet");
    writes(json!([first.jwk()]));
    rig.wait(&by_first, 200).await;
    writes(json!([first.jwk(), second.jwk()]));
    rig.wait(&by_second, 200).await;
    assert_eq!(rig.status(&by_first).await, 200, "both are in it");
    std::fs::write(folder.path().join("keys.json"), "half").unwrap();
    assert_eq!(rig.status(&Key::new("c", 3).token(&nowhere, json!({}))).await, 401);
    assert_eq!(rig.status(&by_second).await, 200, "the last keys stay");
}

#[tokio::test]
async fn tokens_name_so_many_tenants_of_classes_and_no_more() {
    let (issuer, key) = (Issuer::start().await, Key::new("a", 1));
    issuer.publishes(Some(&key));
    let rig = Rig::start(&issuer).await;
    let of_class = |name: &str| key.token(&issuer, json!({"sub": name, "tier": "small"}));
    rig.wait(&of_class("first"), 200).await;
    let n_more = (0..20_000).filter(|n| rig.gateway.has_account(&format!("app:{n}"))).count();
    assert_eq!(n_more, 9_999, "with the first one ten thousand");
    let (status, code, _) = error_of(rig.ask(&of_class("one-too-many")).await).await;
    assert_eq!((status, code.as_str()), (403, "unknown_tenant"));
    assert_eq!(rig.status(&of_class("app:7")).await, 200, "who is among them stays");
    assert_eq!(rig.status(&key.token(&issuer, json!({}))).await, 200, "the file's own tenants are not counted");
}
