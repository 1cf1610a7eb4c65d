//! `/v1/completions`: prompts, echoes, cuts.

use serde_json::json;

use crate::agent::*;

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
