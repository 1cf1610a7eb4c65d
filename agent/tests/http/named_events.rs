//! Streams whose frames have names, and a call that both newer APIs are asked for.

use serde_json::Value;

use crate::agent::*;

/// The events of a stream whose frames have names, each of which must be its data's type.
pub(crate) fn named_events(stream: &str) -> Vec<Value> {
    let event = |frame: &str| {
        let (name, data) = frame.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: "), data["type"].as_str(), "{frame}");
        data
    };
    stream.split_terminator("\n\n").map(event).collect()
}

pub(crate) fn types(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["type"].as_str().unwrap()).collect()
}

pub(crate) async fn stream_of(agent: &Agent, path: &str, body: &Value) -> Vec<Value> {
    let response = agent.send("POST", path, &body.to_string()).await;
    assert_eq!(response.status(), 200);
    let stream = Stream { body: response.into_body() }.rest().await;
    let (events, is_done) = match stream.strip_suffix("data: [DONE]\n\n") {
        Some(events) => (events, true),
        None => (stream.as_str(), false),
    };
    assert_eq!(
        is_done,
        path == "/v1/responses",
        "Open Responses ends by this word, and Anthropic's API does not: {stream}"
    );
    named_events(events)
}

pub(crate) const CALLING: &str = r#"Let me see.<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>"#;
pub(crate) const TOOLS_TEMPLATE: &str = "{% for t in tools or [] %}<tool_call>{{ t|tojson }}{% endfor %}{% for m in messages %}[{{ m.role }}]{{ m.content }}\
     {% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments|tojson }}){% endfor %}{% endfor %}>";
