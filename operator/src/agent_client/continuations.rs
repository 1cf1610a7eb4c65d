//! The question for greedy continuations of prompts with their log-probabilities, and its answer: one text completion of OpenAI's form.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::json;

use super::AgentError;
use crate::canary::drift::Position;

/// Where it is asked.
pub(super) const PATH: &str = "/v1/completions";
/// Tokens of each continuation.
const N_TOKENS: u32 = 32;
/// Of the likeliest tokens so many have to be told: the most that the API has.
const N_LIKELIEST: u32 = 20;

/// All texts at once. Tokens are named by their ids, which are never ambiguous; what the model's own defaults would add to greedy choice
/// is switched off, and no end of a text ends it.
pub(super) fn question(texts: &[String]) -> Vec<u8> {
    let body = json!({
        "prompt": texts, "max_tokens": N_TOKENS, "temperature": 0, "top_p": 1, "top_k": -1, "repetition_penalty": 1,
        "logprobs": N_LIKELIEST, "return_tokens_as_token_ids": true, "ignore_eos": true,
    });
    body.to_string().into_bytes()
}

/// What comes back, as far as it is read.
#[derive(Debug, Deserialize)]
pub(super) struct Completions {
    choices: Vec<Choice>,
}

#[derive(Debug, Deserialize)]
struct Choice {
    index: usize,
    logprobs: Option<Logprobs>,
}

#[derive(Debug, Deserialize)]
struct Logprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<f64>,
    top_logprobs: Vec<BTreeMap<String, f64>>,
}

/// Those of each text, in order.
pub(super) fn positions(answer: Completions, n_texts: usize) -> Result<Vec<Vec<Position>>, AgentError> {
    let mut choices = answer.choices;
    choices.sort_by_key(|choice| choice.index);
    let is_complete = choices.iter().map(|choice| choice.index).eq(0..n_texts);
    if !is_complete {
        return Err(AgentError::Prompts(format!("{} answers to {n_texts} prompts", choices.len())));
    }
    let of = |choice: Choice| choice.logprobs.and_then(Logprobs::positions);
    let all: Option<Vec<Vec<Position>>> = choices.into_iter().map(of).collect();
    all.ok_or_else(|| AgentError::Prompts("an answer without the log-probabilities of its tokens".to_owned()))
}

impl Logprobs {
    fn positions(self) -> Option<Vec<Position>> {
        let Self { tokens, token_logprobs, top_logprobs } = self;
        let is_whole = tokens.len() == token_logprobs.len() && tokens.len() == top_logprobs.len();
        let positions = tokens.into_iter().zip(token_logprobs).zip(top_logprobs);
        is_whole.then(|| {
            let position = |((token, logprob), likeliest): ((String, f64), BTreeMap<String, f64>)| Position {
                token,
                logprob,
                likeliest: likeliest.into_iter().collect(),
            };
            positions.map(position).collect()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(answer: serde_json::Value) -> Result<Vec<Vec<Position>>, String> {
        let answer = serde_json::from_value(answer).map_err(|error| error.to_string())?;
        positions(answer, 2).map_err(|error| error.to_string())
    }

    fn choice(index: usize, tokens: &[&str]) -> serde_json::Value {
        let likeliest: Vec<_> = tokens.iter().map(|token| json!({*token: -0.25, "token_id:9": -3.5})).collect();
        let logprobs = vec![-0.25; tokens.len()];
        json!({"index": index, "logprobs": {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": likeliest}})
    }

    #[test]
    fn answers_are_read_in_the_order_of_prompts() {
        let said =
            read(json!({"choices": [choice(1, &["token_id:4"]), choice(0, &["token_id:7", "token_id:8"])]})).unwrap();
        let tokens: Vec<Vec<&str>> =
            said.iter().map(|positions| positions.iter().map(|position| position.token.as_str()).collect()).collect();
        assert_eq!(tokens, [vec!["token_id:7", "token_id:8"], vec!["token_id:4"]]);
        assert_eq!(said[1][0].likeliest, [("token_id:4".to_owned(), -0.25), ("token_id:9".to_owned(), -3.5)]);
    }

    #[test]
    fn half_an_answer_is_none() {
        let one = json!({"choices": [choice(0, &["token_id:7"])]});
        assert_eq!(read(one).unwrap_err(), "1 answers to 2 prompts");
        let twice = json!({"choices": [choice(0, &["token_id:7"]), choice(0, &["token_id:7"])]});
        assert_eq!(read(twice).unwrap_err(), "2 answers to 2 prompts");
        let bare = json!({"choices": [choice(0, &["token_id:7"]), {"index": 1, "logprobs": null}]});
        assert_eq!(read(bare).unwrap_err(), "an answer without the log-probabilities of its tokens");
        let mut short = choice(1, &["token_id:7", "token_id:8"]);
        short["logprobs"]["token_logprobs"] = json!([-0.25]);
        let short = json!({"choices": [choice(0, &["token_id:7"]), short]});
        assert_eq!(read(short).unwrap_err(), "an answer without the log-probabilities of its tokens");
    }
}
