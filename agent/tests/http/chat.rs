//! `/v1/chat/completions`: the form of answers, whole and streamed.

use serde_json::Value;
use serde_json::json;
use stoker_engine::exec::sim::SimScript;

use crate::agent::*;

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

#[tokio::test]
async fn a_template_of_the_request_is_rendered_where_it_is_trusted_and_refused_by_its_switch_elsewhere() {
    let ask = async |agent: &Agent, path: &str, template: &str| {
        let (status, answer) = agent.post(path, chat(json!({"chat_template": template}))).await;
        let words = answer["error"]["message"].as_str().unwrap_or_default().to_owned();
        (status.as_u16(), answer["error"]["param"].clone(), words, answer)
    };
    let upper = "{% for m in messages %}<{{ m.role | upper }}>{{ m.content }}{% endfor %}";
    for path in ["/v1/chat/completions", "/tokenize"] {
        let (status, param, words, _) = ask(&Agent::new(), path, upper).await;
        assert_eq!((status, param), (400, json!("chat_template")));
        assert!(words.contains("engine.trustRequestChatTemplate"), "{words}");
    }

    let agent = Agent::trusting();
    let (_, _, _, tokenized) = ask(&agent, "/tokenize", upper).await;
    let (_, text) = agent.post("/detokenize", json!({"tokens": tokenized["tokens"]})).await;
    let own = chat(json!({}))["messages"][0]["content"].as_str().unwrap().to_owned();
    assert_eq!(text["prompt"], format!("<USER>{own}"));
    let (status, _, _, answer) = ask(&agent, "/v1/chat/completions", upper).await;
    assert_eq!((status, &answer["usage"]["prompt_tokens"]), (200, &tokenized["count"]));

    for (template, param, words) in [
        ("{% for %}", "chat_template", "does not compile"),
        ("{{ messages.nothing.at_all }}", "chat_template", "failed on these messages"),
        ("{{ raise_exception('no talk here') }}", "messages", "no talk here"),
        ("{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}", "chat_template", "fuel"),
        (&"x".repeat(64 * 1024 + 1), "chat_template", "65537 bytes, more than 65536"),
    ] {
        let (status, named, said, _) = ask(&agent, "/v1/chat/completions", template).await;
        assert_eq!((status, named), (400, json!(param)), "{said}");
        assert!(said.contains(words), "{said}");
    }
    assert_eq!(agent.post("/v1/chat/completions", chat(json!({}))).await.0, 200);
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
