//! One agent over a simulated engine, and what it answers.

use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use axum::http::Response;
use axum::http::StatusCode;
use http_body_util::BodyExt;
use serde_json::Value;
use serde_json::json;
use stoker_agent::answer::FormatChoice;
use stoker_agent::chat_template::ChatTemplate;
use stoker_agent::chat_template::SpecialTokens;
use stoker_agent::config::Settings;
use stoker_agent::config::StartedBy;
use stoker_agent::health::Patience;
use stoker_agent::http;
use stoker_agent::lifecycle::Departure;
use stoker_agent::lifecycle::Event;
use stoker_agent::lifecycle::Purpose;
use stoker_agent::replica::Replica;
use stoker_agent::replica::Served;
use stoker_agent::startup;
use stoker_agent::startup::Loaded;
use stoker_crds::contract::AgentConfig;
use stoker_crds::contract::DrainSettings;
use stoker_crds::contract::EngineSettings;
use stoker_crds::contract::ModelConfig;
use stoker_crds::contract::ParallelSettings;
use stoker_edge::playground::Playground;
use stoker_engine::EngineHandle;
use stoker_engine::EngineLimits;
use stoker_engine::exec::sim::SimExecutor;
use stoker_engine::exec::sim::SimScript;
use tower::ServiceExt;

pub(crate) const TEMPLATE: &str = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]";

pub(crate) const THINKS: &str = "{{ tools | tojson }}{{ enable_thinking }}<tool_call></think>{% for m in messages %}\
                      [{{ m.role }}]{{ m.reasoning_content }}{{ m.content }}{% endfor %}";
/// Long enough for any step of these scripts, short enough to fail soon.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

pub(crate) struct Agent {
    pub(crate) replica: Arc<Replica>,
    pub(crate) router: Router,
}

impl Agent {
    pub(crate) fn loading(limits: &EngineLimits) -> Self {
        Self::loading_with(EngineSettings { max_waiting: Some(limits.max_waiting), ..EngineSettings::default() })
    }

    fn loading_with(engine: EngineSettings) -> Self {
        let names = vec!["sim".into(), "alias".into()];
        let model = ModelConfig { source: "/simulated".into(), served_names: names, ..ModelConfig::default() };
        Self::configured(model, engine)
    }

    fn configured(model: ModelConfig, engine: EngineSettings) -> Self {
        let config = AgentConfig {
            revision: "r1".into(),
            model,
            gpus: 0,
            parallelism: ParallelSettings::default(),
            engine,
            drain: DrainSettings::default(),
        };
        let settings = Settings::validate(config, StartedBy::Operator).unwrap();
        let patience = Patience { step_seconds: 0.3, ..settings.patience };
        let replica = Replica::new(Settings { patience, ..settings });
        Self { router: http::router(replica.clone(), Playground::On.routes()), replica }
    }

    pub(crate) fn serving(script: SimScript, limits: EngineLimits, template: &str) -> Self {
        let agent = Self::loading(&limits);
        let template = ChatTemplate::compile(template.into(), SpecialTokens::default()).unwrap();
        let engine = SimExecutor::start(script, limits).unwrap();
        agent.replica.serve(Served::new(engine, Some(template), FormatChoice::default()));
        agent
    }

    /// As it is started on a folder with a model.
    pub(crate) fn of_folder(folder: &std::path::Path) -> Self {
        let model = ModelConfig {
            source: folder.to_str().unwrap().into(),
            served_names: vec!["sim".into()],
            ..ModelConfig::default()
        };
        let engine = EngineSettings { threads: Some(1), ..EngineSettings::default() };
        let agent = Self::configured(model, engine);
        assert_eq!(startup::load(&agent.replica, ([127, 0, 0, 1], 8000).into()).unwrap(), Loaded::Serving);
        agent
    }

    /// Over a real engine, with its model's own template.
    pub(crate) fn of(engine: EngineHandle) -> Self {
        let agent = Self::loading(&EngineLimits::default());
        let source = engine.model().chat_template.clone();
        let template = source.map(|source| ChatTemplate::compile(source.default, SpecialTokens::default()).unwrap());
        agent.replica.serve(Served::new(engine, template, FormatChoice::default()));
        agent
    }

    pub(crate) fn with(script: SimScript, limits: EngineLimits) -> Self {
        Self::serving(script, limits, TEMPLATE)
    }

    pub(crate) fn with_template(script: SimScript, template: &str) -> Self {
        Self::serving(script, EngineLimits::default(), template)
    }

    pub(crate) fn new() -> Self {
        Self::with(SimScript::default(), EngineLimits::default())
    }

    /// Renders templates that requests bring.
    pub(crate) fn trusting() -> Self {
        let engine = EngineSettings { trust_request_chat_template: Some(true), ..EngineSettings::default() };
        let agent = Self::loading_with(engine);
        let template = ChatTemplate::compile(TEMPLATE.into(), SpecialTokens::default()).unwrap();
        let engine = SimExecutor::start(SimScript::default(), EngineLimits::default()).unwrap();
        agent.replica.serve(Served::new(engine, Some(template), FormatChoice::default()));
        agent
    }

    /// Steps of 10 ms and a text that does not end soon.
    pub(crate) fn slow(limits: EngineLimits) -> Self {
        let script =
            SimScript { completion: "x".repeat(1000), step_time: Duration::from_millis(10), ..SimScript::default() };
        Self::with(script, limits)
    }

    pub(crate) async fn send(&self, method: &str, path: &str, body: &str) -> Response<Body> {
        let request = Request::builder().method(method).uri(path).body(Body::from(body.to_owned())).unwrap();
        self.router.clone().oneshot(request).await.unwrap()
    }

    /// Sends without waiting for an answer.
    pub(crate) fn send_aside(&self, path: &str, body: &str) -> tokio::task::JoinHandle<Response<Body>> {
        let request = Request::post(path).body(Body::from(body.to_owned())).unwrap();
        let answer = self.router.clone().oneshot(request);
        tokio::spawn(async { answer.await.unwrap() })
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> (StatusCode, Value) {
        json_of(self.send("POST", path, &body.to_string()).await).await
    }

    pub(crate) async fn get(&self, path: &str) -> (StatusCode, Value) {
        json_of(self.send("GET", path, "").await).await
    }

    /// A stream that has delivered its first chunk.
    pub(crate) async fn open_stream(&self) -> Stream {
        let body = json!({"prompt": "hi", "stream": true, "max_tokens": 1000});
        let response = self.send("POST", "/v1/completions", &body.to_string()).await;
        assert_eq!(response.status(), 200);
        let mut stream = Stream { body: response.into_body() };
        assert!(stream.next().await.unwrap().contains("\"text\":\"x"));
        stream
    }

    pub(crate) async fn wait_until(&self, what: &str, holds: impl Fn(&stoker_crds::contract::LoadReport) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !holds(&self.replica.load_report()) {
            assert!(Instant::now() < deadline, "{what}: {:?}", self.replica.load_report());
            tokio::time::sleep(Duration::from_millis(5)).await;
            self.replica.tick();
        }
    }

    pub(crate) fn leave(&self, withdraw_seconds: u32, deadline_seconds: u32) {
        let window = DrainSettings { withdraw_seconds, deadline_seconds };
        self.replica.apply(Event::Leave(Departure::new(Purpose::Drain, Instant::now(), window)));
        self.replica.tick();
    }
}

pub(crate) struct Stream {
    pub(crate) body: Body,
}

impl Stream {
    pub(crate) async fn next(&mut self) -> Option<String> {
        let frame = self.body.frame().await?.unwrap();
        Some(String::from_utf8(frame.into_data().unwrap().to_vec()).unwrap())
    }

    pub(crate) async fn rest(mut self) -> String {
        let mut text = String::new();
        while let Some(frame) = self.next().await {
            text.push_str(&frame);
        }
        text
    }
}

pub(crate) async fn json_of(response: Response<Body>) -> (StatusCode, Value) {
    let status = response.status();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
}

/// The data of every event but `[DONE]`, which must be the last.
pub(crate) fn events(stream: &str) -> Vec<Value> {
    let mut lines: Vec<&str> = stream.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    assert_eq!(lines.pop(), Some("[DONE]"), "{stream}");
    lines.into_iter().map(|line| serde_json::from_str(line).unwrap()).collect()
}

pub(crate) fn chat(extra: Value) -> Value {
    let mut body = json!({"model": "sim", "messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}
