//! Streams of all kinds through a gateway whose replicas die, freeze and are drained past their deadline under them, and what each
//! stream says when nobody disturbs it.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use futures::StreamExt;
use reqwest::Client;
use serde_json::{Map, Value, json};
use stoker_crds::endpoints::{EndpointState, ReplicaEndpoint};

use crate::{
    agent::AgentProcess,
    gateway::{GatewayProcess, Teller, deployment, replica},
    process::PATIENCE,
};

/// Asks a gateway for its reasons, and has them in the answer.
const ROUTE: &str = "x-stoker-route";
/// Seconds for which a drained replica may stream on.
const DRAIN_SECONDS: &str = "0";

/// A request, and what it is called.
#[derive(Clone, Debug)]
pub struct Case {
    /// For people.
    pub name: &'static str,
    path: &'static str,
    body: Value,
}

/// What an answer says, put together: texts of each choice, calls, log-probabilities, ends, counts. Without what no two answers have in
/// common (ids, dates) and without what depends on who was asked before (cached tokens).
pub type Said = BTreeMap<String, Value>;

/// Requests of every kind, each sampled from a seed of its own: nothing of them is the machine's choice.
pub fn cases(seed: u64, max_tokens: u32) -> Vec<Case> {
    let messages = json!([{"role": "user", "content": format!("Tell me story number {seed}.")}]);
    let chat = |name, fields: Value| {
        let body = json!({"model": "ember", "messages": messages, "stream": true, "seed": seed, "temperature": 0.9,
                          "max_tokens": max_tokens, "ignore_eos": true, "stream_options": {"include_usage": true}});
        Case { name, path: "/v1/chat/completions", body: with(body, fields) }
    };
    let people = json!({"type": "array", "minItems": 40, "items": {"type": "object", "additionalProperties": false,
        "required": ["name", "age"], "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}}}});
    let format = json!({"type": "json_schema", "json_schema": {"name": "people", "strict": true, "schema": people}});
    let tool = json!({"type": "function", "function": {"name": "remember", "parameters": {"type": "object",
        "additionalProperties": false, "required": ["people"], "properties": {"people": people}}}});
    let bounded = json!({"ignore_eos": false});
    let others = json!({"model": "ember", "stream": true, "max_tokens": max_tokens, "temperature": 0});
    vec![
        chat("greedy", json!({"temperature": 0})),
        chat("sampled", json!({"top_p": 0.95, "top_k": 50})),
        chat("penalties", json!({"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.1})),
        chat("log-probabilities", json!({"logprobs": true, "top_logprobs": 3})),
        chat("two choices", json!({"n": 2})),
        chat("a stop string", json!({"stop": ["zebra crossing"]})),
        chat("a schema", with(bounded.clone(), json!({"response_format": format}))),
        chat("a tool", with(bounded, json!({"tools": [tool], "tool_choice": "required"}))),
        Case {
            name: "a text",
            path: "/v1/completions",
            body: json!({"model": "ember", "prompt": format!("Once upon a time {seed}"), "stream": true, "seed": seed, "logprobs": 2,
                         "max_tokens": max_tokens, "ignore_eos": true, "stream_options": {"include_usage": true}}),
        },
        Case { name: "a message", path: "/v1/messages", body: with(others.clone(), json!({"messages": messages})) },
        Case {
            name: "a response",
            path: "/v1/responses",
            body: json!({"model": "ember", "stream": true, "temperature": 0, "store": false, "max_output_tokens": max_tokens,
                         "input": format!("Tell me story number {seed}.")}),
        },
    ]
}

/// Requests of a model that thinks, with answers long enough behind their thoughts.
pub fn thinking_cases(seed: u64, max_tokens: u32) -> Vec<Case> {
    let n_thought = max_tokens / 2;
    let messages = json!([{"role": "user", "content": format!("Tell me story number {seed}.")}]);
    let chat = json!({"model": "ember", "messages": messages, "stream": true, "seed": seed, "temperature": 0.9, "ignore_eos": true,
                      "max_tokens": max_tokens, "thinking_token_budget": n_thought, "stream_options": {"include_usage": true}});
    vec![
        Case {
            name: "a whole thought",
            path: "/v1/chat/completions",
            body: with(chat.clone(), json!({"stream": false, "stream_options": null})),
        },
        Case { name: "a thought", path: "/v1/chat/completions", body: chat },
        Case {
            name: "a message's thought",
            path: "/v1/messages",
            // Its template has no setting for thoughts, so nobody can bound them here.
            body: json!({"model": "ember", "stream": true, "temperature": 0, "messages": messages, "max_tokens": max_tokens}),
        },
        Case {
            name: "a response's thought",
            path: "/v1/responses",
            body: json!({"model": "ember", "stream": true, "temperature": 0, "store": false, "max_output_tokens": max_tokens,
                         "thinking_token_budget": n_thought, "input": format!("Tell me story number {seed}.")}),
        },
    ]
}

/// Requests whose answers are not streamed, of every kind.
pub fn whole_cases(seed: u64, max_tokens: u32) -> Vec<Case> {
    let named = |name: &'static str| match name {
        "a text" => "a whole text",
        "a message" => "a whole message",
        "a response" => "a whole response",
        "a tool" => "a whole call",
        "two choices" => "two whole answers",
        "log-probabilities" => "a whole answer with log-probabilities",
        "greedy" => "a whole answer",
        _ => "",
    };
    let whole = |case: Case| {
        let (name, mut body) = (named(case.name), with(case.body, json!({"stream": false})));
        if let Some(fields) = body.as_object_mut() {
            fields.remove("stream_options");
            // Log-probabilities have a case of their own: with them an answer begins anew.
            fields.retain(|field, _| !field.contains("logprobs") || name.contains("log-probabilities"));
        }
        Case { name, body, ..case }
    };
    cases(seed, max_tokens).into_iter().map(whole).filter(|case| !case.name.is_empty()).collect()
}

fn with(mut body: Value, fields: Value) -> Value {
    if let (Some(body), Value::Object(fields)) = (body.as_object_mut(), fields) {
        body.extend(fields);
    }
    body
}

impl Case {
    /// What is sent where.
    pub fn request(&self) -> (&'static str, &Value) {
        (self.path, &self.body)
    }

    /// Asks at this base; `started` is told of the first bytes.
    pub async fn ask(&self, base: &str, mut started: impl FnMut()) -> Result<Said> {
        let mut is_begun = false;
        let came = || {
            if !std::mem::replace(&mut is_begun, true) {
                started();
            }
        };
        Ok(self.listen(base, came).await?.said)
    }

    /// The same; `came` is told of all bytes, whenever some come. A gateway says where it went.
    pub async fn listen(&self, base: &str, mut came: impl FnMut()) -> Result<Listened> {
        let request = Client::new().post(format!("{base}{}", self.path)).json(&self.body);
        // Whoever asks again does so by the same id.
        let request = request.header(ROUTE, "explain").header("x-request-id", self.name.replace(' ', "-"));
        let response = request.send().await?;
        let (status, route) = (response.status(), response.headers().get(ROUTE).cloned());
        let (mut chunks, mut body) = (response.bytes_stream(), Vec::new());
        while let Some(chunk) = chunks.next().await {
            body.extend_from_slice(&chunk?);
            came();
        }
        let body = String::from_utf8(body)?;
        ensure!(status == 200, "{}: {status} {body}", self.name);
        let said = if self.body["stream"] == true { said(&body) } else { said_whole(&body) };
        let said = said.with_context(|| format!("{}: {body}", self.name))?;
        let pod =
            route.and_then(|route| Some(route.to_str().ok()?.split_once("replica=")?.1.split(' ').next()?.to_owned()));
        Ok(Listened { said, pod })
    }
}

/// An answer, and the pod that began it, if it came through a gateway.
#[derive(Clone, Debug)]
pub struct Listened {
    /// What it says.
    pub said: Said,
    /// The pod.
    pub pod: Option<String>,
}

fn said_whole(body: &str) -> Result<Said> {
    let mut answer: Value = serde_json::from_str(body)?;
    let usage = counts(&answer["usage"].take());
    remove_own(&mut answer);
    Ok([("answer".to_owned(), answer), ("usage".to_owned(), usage)].into())
}

/// Takes out what no two answers have in common.
fn remove_own(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields
                .retain(|name, _| !["id", "call_id", "created", "created_at", "completed_at"].contains(&name.as_str()));
            fields.values_mut().for_each(remove_own);
        }
        Value::Array(items) => items.iter_mut().for_each(remove_own),
        _ => {}
    }
}

/// Adds up the events of a stream, which must end as it should.
fn said(body: &str) -> Result<Said> {
    let mut said = Said::new();
    let mut is_whole = false;
    ensure!(body.ends_with("\n\n"), "half an event at its end");
    for event in body.split_terminator("\n\n") {
        let Some(data) = event.lines().find_map(|line| line.strip_prefix("data: ")) else { continue };
        if data == "[DONE]" {
            is_whole = true;
            continue;
        }
        let event: Value = serde_json::from_str(data)?;
        let kind = event["type"].as_str().unwrap_or_default();
        ensure!(event["error"].is_null() && kind != "response.failed", "an error: {event}");
        is_whole |= ["message_stop", "response.completed", "response.incomplete"].contains(&kind);
        for choice in event["choices"].as_array().into_iter().flatten() {
            let name = |field: &str| format!("{} {field}", choice["index"]);
            for (field, value) in [
                ("text", &choice["text"]),
                ("content", &choice["delta"]["content"]),
                ("reasoning", &choice["delta"]["reasoning"]),
            ] {
                append(&mut said, name(field), value);
            }
            for call in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
                for part in ["name", "arguments"] {
                    append(&mut said, name(&format!("call {} {part}", call["index"])), &call["function"][part]);
                }
            }
            for list in ["content", "tokens", "token_logprobs", "top_logprobs", "text_offset"] {
                extend(&mut said, name(list), &choice["logprobs"][list]);
            }
            keep(&mut said, name("end"), &choice["finish_reason"]);
        }
        append(&mut said, "delta".into(), &event["delta"]);
        append(&mut said, "delta".into(), &event["delta"]["text"]);
        append(&mut said, "thought".into(), &event["delta"]["thinking"]);
        keep(&mut said, "end".into(), &event["delta"]["stop_reason"]);
        keep(&mut said, "end".into(), &event["response"]["status"]);
        for usage in [&event["usage"], &event["response"]["usage"]] {
            keep(&mut said, "usage".into(), &counts(usage));
        }
    }
    ensure!(is_whole, "it has no end");
    Ok(said)
}

fn append(said: &mut Said, name: String, more: &Value) {
    let Some(more) = more.as_str() else { return };
    let before = said.get(&name).and_then(Value::as_str).unwrap_or_default();
    let all = format!("{before}{more}");
    said.insert(name, all.into());
}

fn extend(said: &mut Said, name: String, more: &Value) {
    let Some(more) = more.as_array() else { return };
    let all = said.entry(name + " logprobs").or_insert_with(|| json!([]));
    all.as_array_mut().into_iter().for_each(|all| all.extend(more.iter().cloned()));
}

fn keep(said: &mut Said, name: String, value: &Value) {
    if !value.is_null() {
        said.insert(name, value.clone());
    }
}

/// The counts of a usage that are the request's own.
fn counts(usage: &Value) -> Value {
    let own = |(name, _): &(&String, &Value)| {
        ["prompt_tokens", "completion_tokens", "output_tokens", "total_tokens"].contains(&name.as_str())
    };
    let Some(usage) = usage.as_object() else { return Value::Null };
    Value::Object(usage.iter().filter(own).map(|(name, count)| (name.clone(), count.clone())).collect::<Map<_, _>>())
}

/// What befalls a replica.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Blow {
    /// SIGKILL.
    Kill,
    /// SIGSTOP, and nothing after it.
    Freeze,
    /// SIGTERM, with less time than its streams take.
    Drain,
    /// The same, after its successor serves.
    Roll,
}

impl Blow {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Kill, Self::Freeze, Self::Drain, Self::Roll];
}

/// Agents behind a gateway that are replaced when they are gone.
pub struct Fleet {
    agents: Vec<(AgentProcess, ReplicaEndpoint)>,
    /// Those that were struck: they end with the fleet at the latest.
    struck: Vec<AgentProcess>,
    teller: Teller,
    /// The gateway before them.
    pub gateway: GatewayProcess,
    agent_args: Vec<String>,
    n_started: usize,
}

impl Fleet {
    /// So many agents, and a gateway with these arguments.
    pub async fn start(n_agents: usize, gateway_args: &[&str]) -> Result<Self> {
        Self::of(n_agents, gateway_args, &[]).await
    }

    /// The same with arguments of agents too.
    pub async fn of(n_agents: usize, gateway_args: &[&str], agent_args: &[&str]) -> Result<Self> {
        let agent_args = agent_args.iter().map(|arg| (*arg).to_owned()).collect();
        let teller = Teller::start().await?;
        let gateway = GatewayProcess::start(teller.url(), gateway_args)?;
        let mut fleet = Self { agents: Vec::new(), struck: Vec::new(), teller, gateway, agent_args, n_started: 0 };
        for _ in 0..n_agents {
            fleet.add().await?;
        }
        Ok(fleet)
    }

    /// One replica more.
    pub async fn add(&mut self) -> Result<()> {
        // Several replicas share the cores: with a thread for each of these they would wait for each other.
        let each = ["--threads", "1", "--drain-withdraw-seconds", "0", "--drain-deadline-seconds", DRAIN_SECONDS];
        let args: Vec<&str> = each.into_iter().chain(self.agent_args.iter().map(String::as_str)).collect();
        let agent = AgentProcess::ready(&args).await?;
        let endpoint = replica(&format!("pod-{}", self.n_started), &agent).await?;
        self.n_started += 1;
        self.agents.push((agent, endpoint));
        self.tell().await
    }

    /// Agents that live.
    pub fn agents(&self) -> impl ExactSizeIterator<Item = &AgentProcess> {
        self.agents.iter().map(|(agent, _)| agent)
    }

    /// Strikes a replica; its pod. The gateway hears of it from nobody but the replica until [`Fleet::tell`].
    pub fn strike(&mut self, place: usize, blow: Blow) -> Result<String> {
        let (mut agent, endpoint) = self.agents.remove(place);
        match blow {
            Blow::Kill => agent.kill()?,
            Blow::Freeze => agent.signal("STOP")?,
            Blow::Drain | Blow::Roll => agent.terminate()?,
        }
        self.struck.push(agent);
        Ok(endpoint.pod)
    }

    /// Tells the gateway which replicas there are.
    pub async fn tell(&mut self) -> Result<()> {
        let told: Vec<ReplicaEndpoint> = self.agents.iter().map(|(_, told)| told.clone()).collect();
        let count = told.len();
        self.teller.tell(vec![deployment("chat", &["ember"], told)]);
        self.gateway.knows("chat", EndpointState::Serving, count).await
    }

    /// Ends those that were struck.
    pub fn bury(&mut self) {
        self.struck.clear();
    }

    /// A family of the gateway's metrics, added up over its labels that contain `label`.
    pub async fn counted(&self, family: &str, label: &str) -> Result<f64> {
        let metrics = self.gateway.metrics().await?;
        let lines = metrics.lines().filter(|line| line.starts_with(family) && line.contains(label));
        Ok(lines.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum())
    }

    /// Waits until so many requests are being answered.
    pub async fn answers(&self, count: usize) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while self.counted("stoker_gateway_requests_in_flight", "").await? < count as f64 {
            ensure!(Instant::now() < deadline, "not {count} requests at once");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }
}
