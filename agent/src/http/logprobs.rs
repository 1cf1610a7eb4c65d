//! Log-probabilities on the wire: the nested form of chat and the parallel arrays of text completions. Pure.

use std::collections::BTreeMap;

use serde::Serialize;
use stoker_engine::{PositionLogprobs, TokenLogprob};

/// JSON has no infinity: the log-probability of an impossible token, as OpenAI writes it.
const IMPOSSIBLE: f32 = -9999.0;

/// `choices[].logprobs` of chat.
#[derive(Debug, Serialize)]
pub(crate) struct ChatLogprobs {
    content: Vec<ChatPosition>,
    refusal: Option<()>,
}

#[derive(Debug, Serialize)]
struct ChatPosition {
    #[serde(flatten)]
    chosen: ChatToken,
    top_logprobs: Vec<ChatToken>,
}

#[derive(Debug, Serialize)]
struct ChatToken {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl ChatLogprobs {
    /// The wire form of some positions.
    pub(crate) fn new(positions: Vec<PositionLogprobs>) -> Self {
        let content = positions.into_iter().map(|position| ChatPosition {
            chosen: position.chosen.into(),
            top_logprobs: position.top.into_iter().map(ChatToken::from).collect(),
        });
        Self { content: content.collect(), refusal: None }
    }
}

impl From<TokenLogprob> for ChatToken {
    fn from(token: TokenLogprob) -> Self {
        Self { token: token.text, logprob: token.logprob.max(IMPOSSIBLE), bytes: token.bytes }
    }
}

/// `choices[].logprobs` of text completions: arrays with one entry a token.
#[derive(Debug, Default, Serialize)]
pub(crate) struct TextLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<f32>,
    top_logprobs: Vec<BTreeMap<String, f32>>,
    text_offset: Vec<usize>,
}

/// Characters of a choice's text before its next token.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TextOffset(usize);

impl TextLogprobs {
    /// The wire form of some positions that begin at `offset`, which is moved behind them.
    pub(crate) fn new(positions: Vec<PositionLogprobs>, offset: &mut TextOffset) -> Self {
        let mut logprobs = Self::default();
        for PositionLogprobs { chosen, top } in positions {
            logprobs.text_offset.push(offset.0);
            offset.0 += chosen.text.chars().count();
            let chosen_logprob = chosen.logprob.max(IMPOSSIBLE);
            // The chosen token is there also when it is none of the likeliest: one more than was asked for then.
            let mut top: BTreeMap<_, _> =
                top.into_iter().map(|token| (token.text, token.logprob.max(IMPOSSIBLE))).collect();
            top.insert(chosen.text.clone(), chosen_logprob);
            logprobs.top_logprobs.push(top);
            logprobs.token_logprobs.push(chosen_logprob);
            logprobs.tokens.push(chosen.text);
        }
        logprobs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(text: &str, logprob: f32) -> TokenLogprob {
        TokenLogprob { token: 1, text: text.into(), bytes: text.bytes().collect(), logprob }
    }

    fn positions() -> Vec<PositionLogprobs> {
        vec![
            PositionLogprobs {
                chosen: token("né", -0.5), top: vec![token("né", -0.5), token("x", f32::NEG_INFINITY)]
            },
            PositionLogprobs { chosen: token("!", -0.25), top: vec![] },
        ]
    }

    #[test]
    fn chat_nests_the_rivals_and_writes_impossible_as_a_number() {
        let json = serde_json::to_value(ChatLogprobs::new(positions())).unwrap();
        assert_eq!(json["content"][0]["token"], "né");
        assert_eq!(json["content"][0]["bytes"], serde_json::json!([110, 195, 169]));
        assert_eq!(json["content"][0]["top_logprobs"][1]["logprob"], -9999.0);
        assert_eq!(json["content"][1]["top_logprobs"], serde_json::json!([]));
    }

    #[test]
    fn the_chosen_token_of_a_text_is_among_its_rivals_also_beyond_those_asked_for() {
        let position = PositionLogprobs { chosen: token("c", -3.0), top: vec![token("a", -0.5), token("b", -1.0)] };
        let json = serde_json::to_value(TextLogprobs::new(vec![position], &mut TextOffset::default())).unwrap();
        assert_eq!(json["top_logprobs"], serde_json::json!([{"a": -0.5, "b": -1.0, "c": -3.0}]));
    }

    #[test]
    fn text_offsets_count_characters_across_chunks() {
        let mut offset = TextOffset::default();
        let first = TextLogprobs::new(positions(), &mut offset);
        let second = TextLogprobs::new(positions(), &mut offset);
        assert_eq!((first.text_offset, second.text_offset), (vec![0, 2], vec![3, 5]));
        assert_eq!(first.tokens, ["né", "!"]);
    }
}
