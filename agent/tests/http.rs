//! The HTTP surface over a simulated engine: scripted text, scripted timing, scripted failures. The real engine behind a
//! real socket is tested in the `tests` crate.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::Body,
    http::{Request, Response, StatusCode},
};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use stoker_agent::{
    answer::FormatChoice,
    chat_template::{ChatTemplate, SpecialTokens},
    config::{Settings, StartedBy},
    health::Patience,
    http,
    lifecycle::{Departure, Event, Purpose},
    replica::{Replica, Served},
};
use stoker_crds::contract::{AgentConfig, AgentPhase, DrainSettings, EngineSettings, ModelConfig};
use stoker_engine::{
    EngineLimits,
    exec::sim::{SimExecutor, SimScript},
};
use tower::ServiceExt;

const TEMPLATE: &str = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]";
/// Long enough for any step of these scripts, short enough to fail soon.
const PATIENCE: Duration = Duration::from_secs(5);

struct Agent {
    replica: Arc<Replica>,
    router: Router,
}

impl Agent {
    fn loading(limits: &EngineLimits) -> Self {
        let config = AgentConfig {
            revision: "r1".into(),
            model: ModelConfig {
                source: "/simulated".into(),
                served_names: vec!["sim".into(), "alias".into()],
                ..ModelConfig::default()
            },
            gpus: 0,
            engine: EngineSettings { max_waiting: Some(limits.max_waiting), ..EngineSettings::default() },
            drain: DrainSettings::default(),
        };
        let settings = Settings::validate(config, StartedBy::Operator).unwrap();
        let patience = Patience { step_seconds: 0.3, ..settings.patience };
        let replica = Replica::new(Settings { patience, ..settings });
        Self { router: http::router(replica.clone()), replica }
    }

    fn serving(script: SimScript, limits: EngineLimits, template: &str) -> Self {
        let agent = Self::loading(&limits);
        let template = ChatTemplate::compile(template.into(), SpecialTokens::default()).unwrap();
        let engine = SimExecutor::start(script, limits).unwrap();
        agent.replica.serve(Served::new(engine, Some(template), FormatChoice::default()));
        agent
    }

    fn with(script: SimScript, limits: EngineLimits) -> Self {
        Self::serving(script, limits, TEMPLATE)
    }

    fn with_template(script: SimScript, template: &str) -> Self {
        Self::serving(script, EngineLimits::default(), template)
    }

    fn new() -> Self {
        Self::with(SimScript::default(), EngineLimits::default())
    }

    /// Steps of 10 ms and a text that does not end soon.
    fn slow(limits: EngineLimits) -> Self {
        let script =
            SimScript { completion: "x".repeat(1000), step_time: Duration::from_millis(10), ..SimScript::default() };
        Self::with(script, limits)
    }

    async fn send(&self, method: &str, path: &str, body: &str) -> Response<Body> {
        let request = Request::builder().method(method).uri(path).body(Body::from(body.to_owned())).unwrap();
        self.router.clone().oneshot(request).await.unwrap()
    }

    /// Sends without waiting for an answer.
    fn send_aside(&self, path: &str, body: &str) -> tokio::task::JoinHandle<Response<Body>> {
        let request = Request::post(path).body(Body::from(body.to_owned())).unwrap();
        let answer = self.router.clone().oneshot(request);
        tokio::spawn(async { answer.await.unwrap() })
    }

    async fn post(&self, path: &str, body: Value) -> (StatusCode, Value) {
        json_of(self.send("POST", path, &body.to_string()).await).await
    }

    async fn get(&self, path: &str) -> (StatusCode, Value) {
        json_of(self.send("GET", path, "").await).await
    }

    /// A stream that has delivered its first chunk.
    async fn open_stream(&self) -> Stream {
        let body = json!({"prompt": "hi", "stream": true, "max_tokens": 1000});
        let response = self.send("POST", "/v1/completions", &body.to_string()).await;
        assert_eq!(response.status(), 200);
        let mut stream = Stream { body: response.into_body() };
        assert!(stream.next().await.unwrap().contains("\"text\":\"x"));
        stream
    }

    async fn wait_until(&self, what: &str, holds: impl Fn(&stoker_crds::contract::LoadReport) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !holds(&self.replica.load_report()) {
            assert!(Instant::now() < deadline, "{what}: {:?}", self.replica.load_report());
            tokio::time::sleep(Duration::from_millis(5)).await;
            self.replica.tick();
        }
    }

    fn leave(&self, withdraw_seconds: u32, deadline_seconds: u32) {
        let window = DrainSettings { withdraw_seconds, deadline_seconds };
        self.replica.apply(Event::Leave(Departure::new(Purpose::Drain, Instant::now(), window)));
        self.replica.tick();
    }
}

struct Stream {
    body: Body,
}

impl Stream {
    async fn next(&mut self) -> Option<String> {
        let frame = self.body.frame().await?.unwrap();
        Some(String::from_utf8(frame.into_data().unwrap().to_vec()).unwrap())
    }

    async fn rest(mut self) -> String {
        let mut text = String::new();
        while let Some(frame) = self.next().await {
            text.push_str(&frame);
        }
        text
    }
}

async fn json_of(response: Response<Body>) -> (StatusCode, Value) {
    let status = response.status();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
}

/// The data of every event but `[DONE]`, which must be the last.
fn events(stream: &str) -> Vec<Value> {
    let mut lines: Vec<&str> = stream.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    assert_eq!(lines.pop(), Some("[DONE]"), "{stream}");
    lines.into_iter().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn chat(extra: Value) -> Value {
    let mut body = json!({"model": "sim", "messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn a_chat_answer_has_openais_form() {
    let (status, answer) = Agent::new().post("/v1/chat/completions", chat(json!({}))).await;
    assert_eq!(status, 200);
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(
        answer["choices"][0]["message"],
        json!({"role": "assistant", "content": "All is well.", "refusal": null})
    );
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    let prompt_tokens = "[user]hi[assistant]".len();
    assert_eq!(answer["usage"]["prompt_tokens"], prompt_tokens);
    assert_eq!(answer["usage"]["completion_tokens"], "All is well.".len() + 1);
}

#[tokio::test]
async fn a_stream_opens_every_choice_with_its_role_and_ends_with_usage() {
    let body = chat(json!({"n": 2, "stream": true, "stream_options": {"include_usage": true}}));
    let response = Agent::new().send("POST", "/v1/chat/completions", &body.to_string()).await;
    assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
    assert_eq!(response.headers()["x-accel-buffering"], "no");
    let events = events(&Stream { body: response.into_body() }.rest().await);

    for index in 0..2 {
        let of_choice: Vec<&Value> = events
            .iter()
            .filter_map(|event| event["choices"].get(0))
            .filter(|choice| choice["index"] == index)
            .collect();
        assert_eq!(of_choice[0]["delta"], json!({"role": "assistant", "content": ""}));
        let text: String = of_choice.iter().filter_map(|choice| choice["delta"]["content"].as_str()).collect();
        assert_eq!(text, "All is well.");
        let ends: Vec<&Value> =
            of_choice.iter().map(|choice| &choice["finish_reason"]).filter(|end| !end.is_null()).collect();
        assert_eq!(ends, ["stop"]);
    }
    let last = events.last().unwrap();
    assert_eq!((&last["choices"], &last["usage"]["completion_tokens"]), (&json!([]), &json!(26)));
    assert!(events[..events.len() - 1].iter().all(|event| event["usage"].is_null()));
}

#[tokio::test]
async fn completions_take_all_four_forms_of_prompt() {
    let agent = Agent::new();
    for (prompt, n_choices) in
        [(json!("hi"), 1), (json!([104, 105]), 1), (json!(["hi", "you"]), 2), (json!([[104], [105], [106]]), 3)]
    {
        let (status, answer) = agent.post("/v1/completions", json!({"prompt": prompt, "n": 2})).await;
        assert_eq!(status, 200, "{answer}");
        let choices = answer["choices"].as_array().unwrap();
        assert_eq!(choices.len(), 2 * n_choices);
        assert!(choices.iter().enumerate().all(|(index, choice)| choice["index"] == index));
    }
    let (status, answer) = agent.post("/v1/completions", json!({"prompt": []})).await;
    assert_eq!((status.as_u16(), &answer["error"]["param"]), (400, &json!("prompt")));
}

#[tokio::test]
async fn log_probabilities_come_once_a_token() {
    let agent = Agent::new();
    let body = chat(json!({"logprobs": true, "top_logprobs": 3, "max_tokens": 4}));
    let (_, answer) = agent.post("/v1/chat/completions", body).await;
    let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!((content.len(), content[0]["top_logprobs"].as_array().unwrap().len()), (4, 3));
    let (_, answer) = agent.post("/v1/completions", json!({"prompt": "x", "logprobs": 2, "max_tokens": 4})).await;
    assert_eq!(answer["choices"][0]["logprobs"]["text_offset"], json!([0, 1, 2, 3]));
}

#[tokio::test]
async fn tool_calls_are_parsed_the_same_in_a_stream_and_in_a_whole_answer() {
    let completion = r#"I look.<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>"#;
    let script = SimScript { completion: completion.into(), ..SimScript::default() };
    let agent = Agent::with_template(script, "{{ tools | tojson }}<tool_call>");
    let tools = json!([{"type": "function", "function": {"name": "weather", "parameters": {}}}]);
    let (_, whole) = agent.post("/v1/chat/completions", chat(json!({"tools": tools}))).await;
    let message = &whole["choices"][0]["message"];
    assert_eq!((&message["content"], &whole["choices"][0]["finish_reason"]), (&json!("I look."), &json!("tool_calls")));
    let function = json!({"name": "weather", "arguments": "{\"city\": \"Oslo\"}"});
    assert_eq!(message["tool_calls"][0]["function"], function);

    let body = chat(json!({"tools": tools, "stream": true})).to_string();
    let response = agent.send("POST", "/v1/chat/completions", &body).await;
    let events = events(&Stream { body: response.into_body() }.rest().await);
    let deltas: Vec<&Value> = events.iter().map(|event| &event["choices"][0]["delta"]).collect();
    let text: String = deltas.iter().filter_map(|delta| delta["content"].as_str()).collect();
    let calls: Vec<&Value> = deltas.iter().filter_map(|delta| delta["tool_calls"].get(0)).collect();
    let arguments: String = calls.iter().filter_map(|call| call["function"]["arguments"].as_str()).collect();
    assert_eq!((text.as_str(), arguments.as_str()), ("I look.", "{\"city\": \"Oslo\"}"));
    assert_eq!((&calls[0]["index"], &calls[0]["function"]["name"]), (&json!(0), &json!("weather")));
    assert!(
        calls.len() > 10 && calls[1..].iter().all(|call| call["id"].is_null()),
        "arguments come as they are written"
    );
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");

    let (_, plain) = agent.post("/v1/chat/completions", chat(json!({"tools": tools, "tool_choice": "none"}))).await;
    assert_eq!(plain["choices"][0]["message"]["content"], completion, "no tool was offered, so nothing is a call");
}

const THINKS: &str = "{{ tools | tojson }}{{ enable_thinking }}<tool_call></think>{% for m in messages %}\
                      [{{ m.role }}]{{ m.reasoning_content }}{{ m.content }}{% endfor %}";

#[tokio::test]
async fn reasoning_has_fields_of_its_own_whole_and_in_a_stream_and_goes_back_into_the_prompt() {
    let completion = "<think>\nA <tool_call> may help.\n</think>\n\n<tool_call>{\"name\": \"f\"}</tool_call>";
    let agent = Agent::with_template(SimScript { completion: completion.into(), ..SimScript::default() }, THINKS);
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let (_, whole) = agent.post("/v1/chat/completions", chat(json!({"tools": tools}))).await;
    let message = &whole["choices"][0]["message"];
    assert_eq!(message["reasoning"], "A <tool_call> may help.");
    assert_eq!((&message["reasoning_content"], &message["content"]), (&message["reasoning"], &Value::Null));
    assert_eq!(message["tool_calls"][0]["function"], json!({"name": "f", "arguments": "{}"}));
    assert_eq!(whole["choices"][0]["finish_reason"], "tool_calls");

    let body = chat(json!({"tools": tools, "stream": true})).to_string();
    let stream = Stream { body: agent.send("POST", "/v1/chat/completions", &body).await.into_body() };
    let events = events(&stream.rest().await);
    let of = |field: &str| -> String {
        events.iter().filter_map(|event| event["choices"][0]["delta"][field].as_str()).collect()
    };
    let thought = "A <tool_call> may help.";
    assert_eq!([of("reasoning"), of("reasoning_content"), of("content")], [thought, thought, ""]);

    let hidden = chat(json!({"tools": tools, "include_reasoning": false}));
    let (_, hidden) = agent.post("/v1/chat/completions", hidden).await;
    assert_eq!(hidden["choices"][0]["message"]["reasoning"], Value::Null);

    let count = async |extra: Value| {
        let mut said = json!({"role": "assistant", "content": "x"});
        said.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let (_, answer) = agent.post("/tokenize", json!({"messages": [said]})).await;
        answer["count"].as_u64().unwrap()
    };
    let plain = count(json!({})).await;
    assert_eq!(count(json!({"reasoning": "abc"})).await, plain + 3);
    assert_eq!(count(json!({"reasoning_content": "abcd"})).await, plain + 4);
}

#[tokio::test]
async fn a_call_cut_off_by_its_length_is_not_called_complete() {
    let completion = r#"<tool_call>{"name": "f", "arguments": {"x": "a long text"}}</tool_call>"#;
    let agent = Agent::with_template(SimScript { completion: completion.into(), ..SimScript::default() }, THINKS);
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let (_, answer) = agent.post("/v1/chat/completions", chat(json!({"tools": tools, "max_tokens": 50}))).await;
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(choice["message"]["tool_calls"][0]["function"]["arguments"], r#"{"x": "a lon"#);
}

#[tokio::test]
async fn effort_and_template_variables_reach_the_template_or_are_refused() {
    let agent = Agent::with_template(SimScript::default(), THINKS);
    let ask = async |extra: Value| {
        let (status, answer) = agent.post("/v1/chat/completions", chat(extra)).await;
        (status.as_u16(), answer["error"]["param"].clone(), answer["usage"]["prompt_tokens"].clone())
    };
    // `true` and `false` as the template prints them.
    let (_, _, thinking) = ask(json!({"chat_template_kwargs": {"enable_thinking": true}})).await;
    assert_eq!(ask(json!({"reasoning_effort": "low"})).await, (200, Value::Null, thinking.clone()));
    let (_, _, silent) = ask(json!({"reasoning_effort": "none"})).await;
    assert_eq!(silent.as_u64(), thinking.as_u64().map(|n| n + 1));
    assert_eq!(ask(json!({"chat_template_kwargs": {"mood": 1}})).await.1, "chat_template_kwargs.mood");
    assert_eq!(ask(json!({"reasoning_effort": "extreme"})).await.1, "reasoning_effort");
    let plain = Agent::new();
    let (status, answer) = plain.post("/v1/chat/completions", chat(json!({"reasoning_effort": "high"}))).await;
    assert_eq!((status.as_u16(), &answer["error"]["param"]), (400, &json!("reasoning_effort")));
    assert_eq!(plain.post("/v1/chat/completions", chat(json!({"reasoning_effort": "none"}))).await.0, 200);
}

const CALLS: &str = "{{ tools | tojson }}<tool_call>";

/// What a simulated model says that would say `completion`, and what its end is called.
async fn constrained(completion: &str, template: &str, fields: Value) -> (Value, Value) {
    let agent = Agent::with_template(SimScript { completion: completion.into(), ..SimScript::default() }, template);
    let (status, answer) = agent.post("/v1/chat/completions", chat(fields)).await;
    assert_eq!(status, 200, "{answer}");
    (answer["choices"][0]["message"].clone(), answer["choices"][0]["finish_reason"].clone())
}

#[tokio::test]
async fn an_answer_has_the_structure_that_was_asked_for() {
    let schema = json!({"type": "object", "required": ["city"], "additionalProperties": false,
                        "properties": {"city": {"enum": ["Oslo", "Rome"]}}});
    let named = json!({"type": "json_schema", "json_schema": {"name": "place", "strict": true, "schema": schema}});
    for (fields, expected) in [
        (json!({"response_format": named}), r#"{"city":"Oslo"}"#),
        (json!({"structured_outputs": {"json": schema}}), r#"{"city":"Oslo"}"#),
        (json!({"guided_choice": ["Paris", "Oslo"]}), "Oslo"),
        (json!({"guided_regex": "[a-c]{3}"}), "abc"),
        (json!({"structured_outputs": {"grammar": "root ::= \"so \" [xy]+ \"!\""}}), "so xy!"),
    ] {
        // The simulated model would say this; what the grammar forbids gives way.
        let (message, reason) = constrained(expected, TEMPLATE, fields.clone()).await;
        assert_eq!((&message["content"], &reason), (&json!(expected), &json!("stop")), "{fields}");
        let (message, _) = constrained("zzzzzzzzzzzzzzzzzzzzzzzz", TEMPLATE, fields.clone()).await;
        let text = message["content"].as_str().unwrap();
        assert!(!text.is_empty() && !text.starts_with("zz"), "{fields}: {text}");
    }
    let agent =
        Agent::with(SimScript { completion: "cabbage".into(), ..SimScript::default() }, EngineLimits::default());
    let (_, answer) = agent.post("/v1/completions", json!({"prompt": "x", "guided_regex": "[a-c]{3}"})).await;
    assert_eq!(answer["choices"][0]["text"], "cab");
    let cut = json!({"response_format": named, "max_tokens": 4});
    let (message, reason) = constrained(r#"{"city": "Oslo"}"#, TEMPLATE, cut).await;
    assert_eq!((message["content"].as_str().unwrap().len(), reason), (4, json!("length")), "no claim of validity");
}

#[tokio::test]
async fn a_call_that_is_required_is_made_and_its_arguments_follow_the_schema() {
    let parameters = json!({"type": "object", "required": ["n"], "additionalProperties": false,
                            "properties": {"n": {"type": "integer", "minimum": 7, "maximum": 7}}});
    let tool = |name: &str| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
    let tools = json!([tool("f"), tool("g")]);
    let named = json!({"type": "function", "function": {"name": "g"}});
    for (choice, allowed) in [(json!("required"), ["f", "g"]), (named, ["g", "g"])] {
        let fields = json!({"tools": tools, "tool_choice": choice, "parallel_tool_calls": false});
        let (message, reason) = constrained("I will not call anything at all, ever.", CALLS, fields).await;
        let call = &message["tool_calls"][0]["function"];
        assert!(allowed.contains(&call["name"].as_str().unwrap()), "{message}");
        let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
        assert_eq!(arguments, json!({"n": 7}));
        assert_eq!((reason, message["tool_calls"].as_array().unwrap().len()), (json!("tool_calls"), 1));
    }
}

#[tokio::test]
async fn a_structure_holds_behind_the_thoughts() {
    let fields = json!({"guided_choice": ["yes", "no"]});
    let (message, _) = constrained("<think>hm</think>yes", THINKS, fields).await;
    assert_eq!((&message["reasoning"], &message["content"]), (&json!("hm"), &json!("yes")));
}

#[tokio::test]
async fn a_tool_whose_schema_cannot_be_followed_is_named() {
    let agent = Agent::with_template(SimScript::default(), THINKS);
    let tool = |parameters: Value| json!({"type": "function", "function": {"name": "f", "parameters": parameters}});
    let tools =
        json!([tool(json!({"type": "object"})), tool(json!({"type": "object", "properties": {"x": {"type": "y"}}}))]);
    let fields = chat(json!({"tools": tools, "tool_choice": "required"}));
    let (status, answer) = agent.post("/v1/chat/completions", fields).await;
    assert_eq!((status.as_u16(), &answer["error"]["param"]), (400, &json!("tools[1].function.parameters")), "{answer}");
    let (_, metrics) = (agent.get("/healthz").await, agent.send("GET", "/metrics", "").await);
    let text = metrics.into_body().collect().await.unwrap().to_bytes();
    assert!(String::from_utf8_lossy(&text).contains("stoker_grammars_total{outcome=\"refused\"} 1"));
}

#[tokio::test]
async fn every_refusal_names_its_parameter_in_openais_words_and_the_next_request_works() {
    let agent = Agent::new();
    let said = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    let message = |message: Value| json!({"messages": [message]});
    let function = json!({"type": "function", "function": {"name": "f"}});
    for (fields, status, param, code) in [
        (json!({"guided_xml": {}}), 400, "guided_xml", "unknown_parameter"),
        (json!({"temprature": 1}), 400, "temprature", "unknown_parameter"),
        (json!({"stream_options": {"x": 1}}), 400, "stream_options.x", "unknown_parameter"),
        (json!({"model": "gpt-4"}), 404, "model", "model_not_found"),
        (json!({"temperature": "hot"}), 400, "temperature", "invalid_type"),
        (json!({"temperature": 2.5}), 400, "temperature", "decimal_above_max_value"),
        (json!({"presence_penalty": -3}), 400, "presence_penalty", "decimal_below_min_value"),
        (json!({"n": 0}), 400, "n", "integer_below_min_value"),
        (json!({"max_tokens": -1}), 400, "max_tokens", "integer_below_min_value"),
        (json!({"max_tokens": 1e30}), 400, "max_tokens", "integer_above_max_value"),
        (json!({"max_tokens": "10"}), 400, "max_tokens", "invalid_type"),
        (json!({"max_tokens": 3000}), 400, "max_tokens", "invalid_value"),
        (json!({"logit_bias": {"999": 1}}), 400, "logit_bias.999", "invalid_value"),
        (json!({"top_logprobs": 2}), 400, "top_logprobs", "invalid_value"),
        (json!({"response_format": {"type": "xml"}}), 400, "response_format.type", "unsupported_parameter"),
        (json!({"guided_json": {"type": "objec"}}), 400, "guided_json", "invalid_value"),
        (json!({"guided_choice": (0..10_000).collect::<Vec<_>>()}), 400, "guided_choice[0]", "invalid_type"),
        (
            json!({"structured_outputs": {"choice": (0..10_000).map(|n| n.to_string()).collect::<Vec<_>>()}}),
            400,
            "structured_outputs.choice",
            "invalid_value",
        ),
        (json!({"guided_regex": "(unclosed"}), 400, "guided_regex", "invalid_value"),
        (json!({"guided_grammar": "start: missing"}), 400, "guided_grammar", "invalid_value"),
        (json!({"tools": [function]}), 400, "tools", "unsupported_parameter"),
        (json!({"tools": [{"type": "retrieval"}]}), 400, "tools[0]", "invalid_value"),
        (json!({"tool_choice": "required"}), 400, "tool_choice", "invalid_value"),
        (json!({"tool_choice": function}), 400, "tool_choice", "invalid_value"),
        (json!({"tool_choice": 1}), 400, "tool_choice", "invalid_type"),
        (json!({"messages": null}), 400, "messages", "missing_required_parameter"),
        (json!({"messages": []}), 400, "messages", "empty_array"),
        (json!({"messages": "hi"}), 400, "messages", "invalid_type"),
        (said(json!([])), 400, "messages[0].content", "empty_array"),
        (said(json!("x".repeat(3000))), 400, "messages", "context_length_exceeded"),
        (message(json!({"content": "x"})), 400, "messages[0].role", "missing_required_parameter"),
        (message(json!({"role": "robot"})), 400, "messages[0].role", "invalid_value"),
        (
            message(json!({"role": "tool", "content": "x"})),
            400,
            "messages[0].tool_call_id",
            "missing_required_parameter",
        ),
    ] {
        let (got, answer) = agent.post("/v1/chat/completions", chat(fields)).await;
        let error = &answer["error"];
        assert_eq!((got.as_u16(), &error["param"], &error["code"]), (status, &json!(param), &json!(code)), "{answer}");
        assert!(error["message"].is_string() && error["type"] == "invalid_request_error");
    }
    for (field, value) in
        [("prompt_logprobs", json!(1)), ("best_of", json!(2)), ("suffix", json!("x")), ("logprobs", json!(21))]
    {
        let (status, answer) = agent.post("/v1/completions", json!({"prompt": "x", field: value})).await;
        assert_eq!((status.as_u16(), &answer["error"]["param"]), (400, &json!(field)), "{answer}");
    }
    assert_eq!(agent.post("/v1/chat/completions", chat(json!({}))).await.0, 200);
}

#[tokio::test]
async fn a_compressed_body_is_told_from_one_that_is_not_json() {
    let agent = Agent::new();
    for (encoding, expected) in [("gzip", 415), ("identity", 200)] {
        let request = Request::post("/v1/chat/completions").header("content-encoding", encoding);
        let request = request.body(Body::from(chat(json!({})).to_string())).unwrap();
        let (status, answer) = json_of(agent.router.clone().oneshot(request).await.unwrap()).await;
        assert_eq!(status, expected, "{answer}");
    }
}

#[tokio::test]
async fn a_step_that_fails_ends_the_stream_with_an_error_and_then_the_process() {
    let script = SimScript { fail_at_step: Some(5), completion: "x".repeat(100), ..SimScript::default() };
    let agent = Agent::with(script, EngineLimits::default());
    let stream = agent.open_stream().await.rest().await;
    let last = events(&stream).pop().unwrap();
    assert!(last["error"]["message"].as_str().unwrap().contains("scripted failure"), "{last}");

    agent.wait_until("the failure is noticed", |report| report.phase == AgentPhase::Failed).await;
    let (status, health) = agent.get("/healthz").await;
    assert_eq!(status, 503, "{health}");
    assert_eq!(agent.post("/v1/completions", json!({"prompt": "x"})).await.0, 503);
    assert_eq!(*agent.replica.exit_code().borrow(), Some(1));
}

#[tokio::test]
async fn a_step_that_hangs_makes_the_replica_unhealthy_until_it_completes() {
    let script = SimScript { step_time: Duration::from_millis(900), ..SimScript::default() };
    let agent = Agent::with(script, EngineLimits::default());
    let body = json!({"prompt": "hi", "stream": true, "max_tokens": 1}).to_string();
    let stream = agent.send_aside("/v1/completions", &body);
    agent.wait_until("it stands still", |report| report.stalled_seconds > 0.35).await;
    let (status, health) = agent.get("/healthz").await;
    assert_eq!(status, 503);
    assert!(health["reason"].as_str().unwrap().contains("no step completed for"), "{health}");
    assert_eq!(agent.get("/readyz").await.0, 503);
    Stream { body: stream.await.unwrap().into_body() }.rest().await;
    assert_eq!(agent.get("/healthz").await.0, 200);
}

#[tokio::test]
async fn a_full_queue_refuses_with_429_and_a_time_to_retry() {
    let agent = Agent::slow(EngineLimits { max_num_seqs: Some(1), max_waiting: 1, ..EngineLimits::default() });
    let _running = agent.open_stream().await;
    let body = json!({"prompt": "x", "stream": true, "max_tokens": 1000}).to_string();
    let waiting = agent.send_aside("/v1/completions", &body);
    agent.wait_until("one waits", |report| report.waiting == 1).await;
    let refused = agent.send("POST", "/v1/completions", &body).await;
    assert_eq!(refused.status(), 429);
    assert!(refused.headers()["retry-after"].to_str().unwrap().parse::<u32>().unwrap() >= 1);
    waiting.abort();
    agent.wait_until("a place is free", |report| report.waiting == 0).await;
    let next = agent.send_aside("/v1/completions", &body);
    agent.wait_until("it is taken", |report| report.waiting == 1).await;
    next.abort();
}

#[tokio::test]
async fn what_fails_before_the_first_token_has_the_status_of_an_error() {
    let script = SimScript { fail_at_step: Some(1), ..SimScript::default() };
    let agent = Agent::with(script, EngineLimits::default());
    let (status, answer) = agent.post("/v1/completions", json!({"prompt": "x", "stream": true})).await;
    assert_eq!((status.as_u16(), &answer["error"]["code"]), (500, &json!("engine_error")), "{answer}");
}

#[tokio::test]
async fn a_client_that_goes_away_frees_its_blocks() {
    let agent = Agent::slow(EngineLimits::default());
    let stream = agent.open_stream().await;
    agent.wait_until("it runs", |report| report.referenced_blocks > 0).await;
    drop(stream);
    agent.wait_until("its blocks are free", |report| report.referenced_blocks == 0 && report.running == 0).await;
}

#[tokio::test]
async fn a_drain_admits_until_withdrawn_then_finishes_what_runs_and_can_be_undone() {
    let agent = Agent::slow(EngineLimits::default());
    let stream = agent.open_stream().await;
    agent.leave(60, 60);
    assert_eq!(agent.replica.load_report().phase, AgentPhase::Withdrawing);
    assert_eq!(agent.get("/readyz").await.0, 503);
    let other = agent.open_stream().await;

    agent.leave(0, 60);
    let refused = agent.send("POST", "/v1/completions", r#"{"prompt": "x"}"#).await;
    assert_eq!(refused.status(), 503);
    assert!(refused.headers().contains_key("retry-after"));
    assert_eq!(agent.replica.load_report().phase, AgentPhase::Draining);
    drop((stream, other));
    agent.wait_until("it is empty", |report| report.phase == AgentPhase::Empty).await;

    agent.replica.apply(Event::Return);
    assert_eq!(agent.get("/readyz").await.0, 200);
    agent.open_stream().await;
}

#[tokio::test]
async fn the_drain_deadline_ends_a_stream_with_an_error_terminal() {
    let agent = Agent::slow(EngineLimits::default());
    let stream = agent.open_stream().await;
    agent.leave(0, 0);
    let last = events(&stream.rest().await).pop().unwrap();
    assert!(last["error"]["message"].as_str().unwrap().contains("drain deadline"), "{last}");
    agent.wait_until("it is empty", |report| report.phase == AgentPhase::Empty).await;
}

#[tokio::test]
async fn while_loading_it_is_alive_unready_and_says_when_to_retry() {
    let agent = Agent::loading(&EngineLimits::default());
    agent.replica.note_load_progress(0.4);
    assert_eq!(agent.get("/healthz").await.0, 200);
    let (status, ready) = agent.get("/readyz").await;
    assert_eq!((status.as_u16(), &ready["phase"]), (503, &json!("loading")));
    let refused = agent.send("POST", "/v1/chat/completions", &chat(json!({})).to_string()).await;
    assert_eq!(refused.status(), 503);
    assert!(refused.headers().contains_key("retry-after"));
    assert_eq!(agent.get("/v1/models").await.1["data"][1]["id"], "alias");

    agent.replica.apply(Event::LoadFailed("config.json: no such file".into()));
    assert_eq!(agent.get("/healthz").await.0, 200, "a restart would hide the reason");
    let load = agent.replica.load_report();
    assert_eq!((load.phase, load.error.as_deref()), (AgentPhase::Failed, Some("config.json: no such file")));
}

#[tokio::test]
async fn errors_outside_the_endpoints_have_the_same_body() {
    let agent = Agent::new();
    for (method, path, status) in [
        ("GET", "/v1/chat/completions", 405),
        ("GET", "/nope", 404),
        ("GET", "/v1/models/a/b", 404),
        ("GET", "/v1/models/%ff", 404),
    ] {
        let (got, answer) = json_of(agent.send(method, path, "").await).await;
        assert_eq!(got, status, "{method} {path}");
        assert!(answer["error"]["message"].is_string(), "{answer}");
    }
}

#[tokio::test]
async fn the_request_id_is_echoed_or_made() {
    let agent = Agent::new();
    let request = Request::builder().uri("/healthz").header("x-request-id", "abc").body(Body::empty()).unwrap();
    let response = agent.router.clone().oneshot(request).await.unwrap();
    assert_eq!(response.headers()["x-request-id"], "abc");
    assert!(agent.send("GET", "/healthz", "").await.headers()["x-request-id"].to_str().unwrap().starts_with("req-"));
}

/// A body that says how long it is and must not be asked for.
struct Unread(u64);

impl hyper::body::Body for Unread {
    type Data = bytes::Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<hyper::body::Frame<Self::Data>, Self::Error>>> {
        panic!("the body is asked for")
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        hyper::body::SizeHint::with_exact(self.0)
    }
}

async fn answer_to_unread(agent: &Agent, bytes: u64) -> (StatusCode, Value) {
    let request = Request::post("/v1/completions").header("expect", "100-continue").body(Body::new(Unread(bytes)));
    json_of(agent.router.clone().oneshot(request.unwrap()).await.unwrap()).await
}

#[tokio::test]
async fn a_client_that_asks_before_it_sends_is_not_invited_to_send_what_is_refused() {
    let (status, answer) = answer_to_unread(&Agent::new(), 100 << 20).await;
    assert_eq!((status.as_u16(), &answer["error"]["code"]), (413, &json!("body_too_large")));
    let loading = Agent::loading(&EngineLimits::default());
    assert_eq!(answer_to_unread(&loading, 100).await.0, 503, "refused by its head");
}

#[tokio::test]
async fn what_could_run_at_once_takes_no_place_of_those_that_wait() {
    let agent = Agent::with(
        SimScript::default(),
        EngineLimits { max_num_seqs: Some(3), max_waiting: 2, ..EngineLimits::default() },
    );
    let texts = |n: usize| json!({"prompt": vec!["x"; n], "max_tokens": 1});
    let (status, answer) = agent.post("/v1/completions", texts(5)).await;
    assert_eq!(status, 200, "{answer}");
    for (body, param) in [(texts(6), "prompt"), (json!({"prompt": "x", "n": 6}), "n")] {
        let (status, answer) = agent.post("/v1/completions", body).await;
        assert_eq!((status.as_u16(), &answer["error"]["param"]), (400, &json!(param)), "{answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains("the 5 that may run and wait"), "{answer}");
    }
}

#[tokio::test]
async fn a_prompt_far_beyond_the_context_is_refused_by_its_beginning() {
    let agent = Agent::new();
    let text = "x".repeat(7 << 20);
    let message = json!({"messages": [{"role": "user", "content": text}]});
    for (path, body, param) in [
        ("/v1/completions", json!({"prompt": text}), "prompt"),
        ("/v1/completions", json!({"prompt": ["short", text]}), "prompt"),
        ("/v1/chat/completions", message.clone(), "messages"),
        ("/tokenize", message, "messages"),
    ] {
        let (status, answer) = agent.post(path, body).await;
        let error = &answer["error"];
        assert_eq!((status.as_u16(), &error["code"]), (400, &json!("context_length_exceeded")), "{answer}");
        assert_eq!(error["param"], param, "{path}");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("maximum context length is 2048 tokens"), "{message}");
        assert!(message.contains("contains at least 14746 input tokens"), "one slice was read: {message}");
    }
}

#[tokio::test]
async fn a_name_sent_twice_is_refused() {
    for body in [r#"{"prompt": "a", "prompt": "b"}"#, r#"{"prompt": "a", "logit_bias": {"1": 1, "1": 2}}"#] {
        let (status, answer) = json_of(Agent::new().send("POST", "/v1/completions", body).await).await;
        assert_eq!((status.as_u16(), &answer["error"]["code"]), (400, &json!("duplicate_parameter")), "{answer}");
    }
}

#[tokio::test]
async fn a_prompt_is_echoed_before_each_of_its_completions() {
    let agent = Agent::new();
    let asked = json!({"prompt": ["one ", "two "], "n": 2, "echo": true});
    let (status, answer) = agent.post("/v1/completions", asked.clone()).await;
    assert_eq!(status, 200, "{answer}");
    let texts: Vec<&str> = (0..4).map(|idx| answer["choices"][idx]["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["one All is well.", "one All is well.", "two All is well.", "two All is well."]);

    let mut streamed = asked;
    streamed["stream"] = json!(true);
    let response = agent.send("POST", "/v1/completions", &streamed.to_string()).await;
    let events = events(&Stream { body: response.into_body() }.rest().await);
    let text_of = |index: u32| {
        let choices = events.iter().map(|event| &event["choices"][0]).filter(|choice| choice["index"] == index);
        choices.filter_map(|choice| choice["text"].as_str()).collect::<String>()
    };
    assert_eq!((text_of(0), text_of(3)), (texts[0].to_owned(), texts[3].to_owned()));

    let (status, answer) = agent.post("/v1/completions", json!({"prompt": "x", "echo": true, "logprobs": 1})).await;
    assert_eq!((status.as_u16(), &answer["error"]["param"]), (400, &json!("echo")));
}

#[tokio::test]
async fn a_prompt_is_cut_from_its_beginning_and_the_answer_is_called_as_asked() {
    let asked = json!({"prompt": "x".repeat(5000), "truncate_prompt_tokens": 7, "request_id": "mine"});
    let (status, answer) = Agent::new().post("/v1/completions", asked).await;
    assert_eq!(
        (status.as_u16(), &answer["usage"]["prompt_tokens"], &answer["id"]),
        (200, &json!(7), &json!("cmpl-mine"))
    );
    let asked = json!({"prompt": "x".repeat(5000), "truncate_prompt_tokens": -1, "max_tokens": 1});
    let (_, answer) = Agent::new().post("/v1/completions", asked).await;
    assert_eq!(answer["usage"]["prompt_tokens"], 2047);
}

#[tokio::test]
async fn a_final_message_is_continued_where_it_ends() {
    let agent = Agent::with_template(
        SimScript::default(),
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    );
    let messages = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "It is "}]);
    for (fields, prompt) in [
        (json!({"continue_final_message": true}), "[user]hi</s>[assistant]It is "),
        (json!({"add_generation_prompt": false}), "[user]hi</s>[assistant]It is </s>"),
        (json!({}), "[user]hi</s>[assistant]It is </s>[assistant]"),
    ] {
        let mut body = json!({"messages": messages});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let (_, tokenized) = agent.post("/tokenize", body).await;
        let (_, text) = agent.post("/detokenize", json!({"tokens": tokenized["tokens"]})).await;
        assert_eq!(text["prompt"], prompt, "{fields}");
    }
    let both = chat(json!({"continue_final_message": true, "add_generation_prompt": true}));
    let (status, answer) = agent.post("/v1/chat/completions", both).await;
    assert_eq!((status.as_u16(), &answer["error"]["param"]), (400, &json!("continue_final_message")));
}

#[tokio::test]
async fn what_other_servers_answer_is_answered_here() {
    let agent = Agent::new();
    assert_eq!(agent.get("/health").await.0, 200);
    assert_eq!(Agent::loading(&EngineLimits::default()).get("/health").await.0, 503, "others listen once they serve");
    assert_eq!(agent.get("/version").await.1, json!({"version": env!("CARGO_PKG_VERSION")}));
}

/// The events of a stream whose frames have names, each of which must be its data's type.
fn named_events(stream: &str) -> Vec<Value> {
    let event = |frame: &str| {
        let (name, data) = frame.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: "), data["type"].as_str(), "{frame}");
        data
    };
    stream.split_terminator("\n\n").map(event).collect()
}

fn types(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["type"].as_str().unwrap()).collect()
}

async fn stream_of(agent: &Agent, path: &str, body: &Value) -> Vec<Value> {
    let response = agent.send("POST", path, &body.to_string()).await;
    assert_eq!(response.status(), 200);
    named_events(&Stream { body: response.into_body() }.rest().await)
}

const CALLING: &str = r#"Let me see.<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>"#;
const TOOLS_TEMPLATE: &str = "{% for t in tools or [] %}<tool_call>{{ t|tojson }}{% endfor %}{% for m in messages %}[{{ m.role }}]{{ m.content }}\
     {% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments|tojson }}){% endfor %}{% endfor %}>";

#[tokio::test]
async fn a_message_of_anthropics_api_is_answered_in_its_form() {
    let agent = Agent::new();
    let asked = json!({"model": "sim", "max_tokens": 100, "system": "Be brief.", "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}]});
    let (status, answer) = agent.post("/v1/messages", asked.clone()).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["content"], json!([{"type": "text", "text": "All is well."}]));
    assert_eq!((&answer["type"], &answer["role"]), (&json!("message"), &json!("assistant")));
    assert_eq!((&answer["stop_reason"], &answer["stop_sequence"]), (&json!("end_turn"), &json!(null)));
    let n_prompt = "[system]Be brief.[user]hi[assistant]".len();
    assert_eq!(answer["usage"]["input_tokens"], n_prompt);
    assert!(answer["id"].as_str().unwrap().starts_with("msg_"), "{answer}");
    let mut counted = asked.clone();
    counted.as_object_mut().unwrap().remove("max_tokens");
    assert_eq!(agent.post("/v1/messages/count_tokens", counted).await.1, json!({"input_tokens": n_prompt}));

    let mut stopped = asked.clone();
    stopped["stop_sequences"] = json!(["is"]);
    let (_, answer) = agent.post("/v1/messages", stopped).await;
    assert_eq!((&answer["stop_reason"], &answer["stop_sequence"]), (&json!("stop_sequence"), &json!("is")));

    let mut streamed = asked;
    streamed["stream"] = json!(true);
    let events = stream_of(&agent, "/v1/messages", &streamed).await;
    let order = types(&events);
    assert_eq!(order[..3], ["message_start", "ping", "content_block_start"]);
    assert!(order[3..order.len() - 3].iter().all(|name| *name == "content_block_delta"), "{order:?}");
    assert_eq!(order[order.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
    let text: String = events.iter().filter_map(|event| event["delta"]["text"].as_str()).collect();
    assert_eq!(text, "All is well.");
    assert_eq!(events[events.len() - 2]["delta"]["stop_reason"], "end_turn");
    assert_eq!(events[events.len() - 2]["usage"]["output_tokens"], 13);
}

#[tokio::test]
async fn a_tool_of_anthropics_api_is_called_and_answered() {
    let script = SimScript { completion: CALLING.into(), ..SimScript::default() };
    let agent = Agent::with_template(script, TOOLS_TEMPLATE);
    let asked = json!({"max_tokens": 100, "tools": [{"name": "f", "input_schema": {"z": 1, "a": 2}}], "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "so"},
                                          {"type": "tool_use", "id": "t1", "name": "f", "input": {"z": 1, "a": 2}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "4"},
                                     {"type": "text", "text": "and?"}]}]});
    let (status, answer) = agent.post("/v1/messages", asked.clone()).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["stop_reason"], "tool_use");
    let call = &answer["content"][1];
    assert_eq!((&call["type"], &call["name"], &call["input"]), (&json!("tool_use"), &json!("f"), &json!({"x": 1})));
    let prompt = "<tool_call>{\"type\": \"function\", \"function\": {\"name\": \"f\", \"parameters\": {\"z\": 1, \"a\": 2}}}\
                  [user]hi[assistant]so(f {\"z\": 1, \"a\": 2})[tool]4[user]and?>";
    assert_eq!(answer["usage"]["input_tokens"], prompt.len(), "schemas and arguments keep the order of their members");

    let mut streamed = asked;
    streamed["stream"] = json!(true);
    let events = stream_of(&agent, "/v1/messages", &streamed).await;
    let starts: Vec<&Value> = events.iter().filter(|event| event["type"] == "content_block_start").collect();
    assert_eq!((&starts[0]["content_block"]["type"], &starts[1]["index"]), (&json!("text"), &json!(1)));
    assert_eq!(starts[1]["content_block"]["input"], json!({}));
    let input: String = events.iter().filter_map(|event| event["delta"]["partial_json"].as_str()).collect();
    assert_eq!(input, r#"{"x": 1}"#);
}

#[tokio::test]
async fn refusals_of_anthropics_api_have_its_form_and_name_its_fields() {
    let agent = Agent::new();
    let asked = |extra: Value| {
        let mut body = json!({"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        body
    };
    let image = json!([{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]);
    let result = json!([{"role": "user", "content": [{"type": "tool_result", "content": "4"}]}]);
    for (extra, param) in [
        (json!({"max_tokens": null}), "max_tokens"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": image}), "messages[0].content[0]"),
        (json!({"messages": result}), "messages[0].content[0].tool_use_id"),
        (json!({"messages": [{"role": "system", "content": "x"}]}), "messages[0].role"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "mood": 1}]}]}),
            "messages[0].content[0].mood",
        ),
        (json!({"stop_sequences": [""]}), "stop_sequences"),
        (json!({"tools": [{"type": "bash_20250124", "name": "bash"}]}), "tools[0]"),
        (json!({"tools": [{"name": "f"}]}), "tools[0].input_schema"),
        (json!({"tool_choice": {"type": "tool"}}), "tool_choice"),
        (json!({"thinking": {"type": "enabled"}}), "thinking.budget_tokens"),
        (json!({"container": "x"}), "container"),
    ] {
        let (status, answer) = agent.post("/v1/messages", asked(extra)).await;
        let error = &answer["error"];
        assert_eq!((status.as_u16(), &error["param"]), (400, &json!(param)), "{answer}");
        assert_eq!((&answer["type"], &error["type"]), (&json!("error"), &json!("invalid_request_error")));
    }
    let (status, answer) = agent.post("/v1/messages", asked(json!({"model": "claude"}))).await;
    assert_eq!((status.as_u16(), &answer["error"]["type"]), (404, &json!("not_found_error")));
    let request = Request::post("/v1/messages").header("anthropic-version", "1999-01-01");
    let request = request.body(Body::from(asked(json!({})).to_string())).unwrap();
    let (status, answer) = json_of(agent.router.clone().oneshot(request).await.unwrap()).await;
    assert_eq!((status.as_u16(), &answer["error"]["param"]), (400, &json!("anthropic-version")));
}

#[tokio::test]
async fn a_response_is_kept_followed_and_forgotten() {
    let agent = Agent::new();
    let (status, first) = agent.post("/v1/responses", json!({"input": "hi", "instructions": "Be brief."})).await;
    assert_eq!(status, 200, "{first}");
    assert_eq!((&first["object"], &first["status"]), (&json!("response"), &json!("completed")));
    let item = &first["output"][0];
    assert_eq!((&item["type"], &item["content"][0]["text"]), (&json!("message"), &json!("All is well.")));
    assert_eq!(first["usage"]["input_tokens"], "[system]Be brief.[user]hi[assistant]".len());
    let id = first["id"].as_str().unwrap();
    assert_eq!(agent.get(&format!("/v1/responses/{id}")).await.1, first);

    let (_, second) = agent.post("/v1/responses", json!({"input": "and?", "previous_response_id": id})).await;
    let prompt = "[user]hi[assistant]All is well.[user]and?[assistant]";
    assert_eq!(second["usage"]["input_tokens"], prompt.len(), "instructions are not handed on: {second}");
    assert_eq!(second["previous_response_id"], id);

    let deleted = json_of(agent.send("DELETE", &format!("/v1/responses/{id}"), "").await).await;
    assert_eq!(deleted, (StatusCode::OK, json!({"id": id, "object": "response", "deleted": true})));
    assert_eq!(agent.get(&format!("/v1/responses/{id}")).await.0, 404);
    let lost = json!({"input": "x", "previous_response_id": id});
    let (status, answer) = agent.post("/v1/responses", lost).await;
    assert_eq!((status.as_u16(), &answer["error"]["param"]), (404, &json!("previous_response_id")));
    let (_, unkept) = agent.post("/v1/responses", json!({"input": "x", "store": false})).await;
    assert_eq!(agent.get(&format!("/v1/responses/{}", unkept["id"].as_str().unwrap())).await.0, 404);
}

#[tokio::test]
async fn a_streamed_response_adds_up_and_ends_with_the_whole() {
    let script = SimScript { completion: CALLING.into(), ..SimScript::default() };
    let agent = Agent::with_template(script, TOOLS_TEMPLATE);
    let tools = json!([{"type": "function", "name": "f", "parameters": {"type": "object"}}]);
    let events = stream_of(&agent, "/v1/responses", &json!({"input": "hi", "tools": tools, "stream": true})).await;
    let mut order = types(&events);
    order.dedup();
    assert_eq!(
        order,
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    let numbers: Vec<u64> = events.iter().map(|event| event["sequence_number"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (0..events.len() as u64).collect::<Vec<_>>());
    let whole = &events.last().unwrap()["response"];
    let text: String = events
        .iter()
        .filter(|event| event["type"] == "response.output_text.delta")
        .map(|event| event["delta"].as_str().unwrap())
        .collect();
    assert_eq!((&whole["output"][0]["content"][0]["text"], text.as_str()), (&json!("Let me see."), "Let me see."));
    let call = &whole["output"][1];
    assert_eq!((&call["type"], &call["arguments"]), (&json!("function_call"), &json!(r#"{"x": 1}"#)));

    let asked = json!({"tools": tools, "previous_response_id": whole["id"], "input": [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "4"}]});
    let (status, next) = agent.post("/v1/responses", asked).await;
    let prompt = "<tool_call>{\"type\": \"function\", \"function\": {\"name\": \"f\", \"parameters\": {\"type\": \"object\"}}}\
                  [user]hi[assistant]Let me see.(f {\"x\": 1})[tool]4>";
    assert_eq!((status.as_u16(), &next["usage"]["input_tokens"]), (200, &json!(prompt.len())), "{next}");
    let (_, cut) = agent.post("/v1/responses", json!({"input": "x", "max_output_tokens": 3})).await;
    assert_eq!(
        (&cut["status"], &cut["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
}

#[tokio::test]
async fn refusals_of_the_responses_api_name_its_fields() {
    let agent = Agent::new();
    for (asked, param) in [
        (json!({}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": [{"type": "item_reference", "id": "x"}]}), "input[0]"),
        (
            json!({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
            "input[0].content[0]",
        ),
        (json!({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}), "input[0].call_id"),
        (json!({"input": "x", "background": true}), "background"),
        (json!({"input": "x", "truncation": "auto"}), "truncation"),
        (json!({"input": "x", "max_output_tokens": 0}), "max_output_tokens"),
        (json!({"input": "x", "tools": [{"type": "web_search"}]}), "tools[0]"),
        (json!({"input": "x".repeat(3000)}), "input"),
        (json!({"input": "x", "text": {"format": {"type": "json_schema", "name": "n"}}}), "text.format.schema"),
        (json!({"input": "x", "reasoning": {"summary": "detailed"}}), "reasoning.summary"),
        (json!({"input": "x", "mood": 1}), "mood"),
    ] {
        let (status, answer) = agent.post("/v1/responses", asked).await;
        assert_eq!((status.as_u16(), &answer["error"]["param"]), (400, &json!(param)), "{answer}");
    }
}
