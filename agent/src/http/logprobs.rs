//! Log-probabilities on the wire: the nested form of chat and the parallel arrays of text completions. Pure.

use std::collections::BTreeMap;

use serde::{Serialize, Serializer};
use stoker_engine::{PositionLogprobs, PromptPosition, TokenId, TokenLogprob};

/// JSON has no infinity: the log-probability of an impossible token, as OpenAI writes it.
const IMPOSSIBLE: f32 = -9999.0;

/// What tokens are called.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) enum Names {
    /// Their text.
    #[default]
    Text,
    /// `token_id:` and their id, which is never ambiguous.
    Id,
}

impl Names {
    fn of(self, token: TokenLogprob) -> String {
        match self {
            Self::Text => token.text,
            Self::Id => format!("token_id:{}", token.token),
        }
    }
}

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
    pub(crate) fn new(positions: Vec<PositionLogprobs>, names: Names) -> Self {
        let token = |mut token: TokenLogprob| ChatToken {
            logprob: token.logprob.max(IMPOSSIBLE),
            bytes: std::mem::take(&mut token.bytes),
            token: names.of(token),
        };
        let content = positions.into_iter().map(|PositionLogprobs { chosen, top }| ChatPosition {
            chosen: token(chosen),
            top_logprobs: top.into_iter().map(token).collect(),
        });
        Self { content: content.collect(), refusal: None }
    }

    /// The positions alone.
    pub(crate) fn into_content(self) -> Vec<serde_json::Value> {
        let value = |position| serde_json::to_value(position).expect("names and finite numbers");
        self.content.into_iter().map(value).collect()
    }
}

/// `choices[].logprobs` of text completions: arrays with one entry a token.
#[derive(Debug, Default, Serialize)]
pub(crate) struct TextLogprobs {
    tokens: Vec<String>,
    /// Nothing is known of a prompt's first token.
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<Rivals>>,
    text_offset: Vec<usize>,
}

/// A JSON object of names and log-probabilities: the chosen token, then the likeliest, best first.
#[derive(Debug)]
struct Rivals(Vec<(String, f32)>);

impl Serialize for Rivals {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, logprob)| (name, logprob)))
    }
}

/// Characters of a choice's text before its next token.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TextOffset(usize);

impl TextLogprobs {
    /// The wire form of some positions that begin at `offset`, which is moved behind them.
    pub(crate) fn new(positions: Vec<PositionLogprobs>, offset: &mut TextOffset, names: Names) -> Self {
        let mut logprobs = Self::default();
        positions.into_iter().for_each(|position| logprobs.push(position, offset, names));
        logprobs
    }

    /// The same behind those of a prompt, of whose first token nothing is known but its text.
    pub(crate) fn behind_prompt(
        first: TokenLogprob,
        prompt: Vec<PromptPosition>,
        positions: Vec<PositionLogprobs>,
        names: Names,
    ) -> Self {
        let (mut logprobs, mut offset) = (Self::default(), TextOffset::default());
        logprobs.push(PositionLogprobs { chosen: first, top: Vec::new() }, &mut offset, names);
        (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) = (None, None);
        let all = prompt.into_iter().map(|position| position.logprobs).chain(positions);
        all.for_each(|position| logprobs.push(position, &mut offset, names));
        logprobs
    }

    fn push(&mut self, PositionLogprobs { chosen, top }: PositionLogprobs, offset: &mut TextOffset, names: Names) {
        self.text_offset.push(offset.0);
        offset.0 += chosen.text.chars().count();
        let chosen_logprob = chosen.logprob.max(IMPOSSIBLE);
        // The chosen token is there also when it is none of the likeliest: one more than was asked for then.
        let chosen = names.of(chosen);
        let mut rivals = vec![(chosen.clone(), chosen_logprob)];
        for token in top {
            let logprob = token.logprob.max(IMPOSSIBLE);
            let name = names.of(token);
            // A name stands once in an object: also two tokens of one text, as halves of characters are.
            if rivals.iter().all(|(other, _)| *other != name) {
                rivals.push((name, logprob));
            }
        }
        self.top_logprobs.push(Some(Rivals(rivals)));
        self.token_logprobs.push(Some(chosen_logprob));
        self.tokens.push(chosen);
    }
}

/// `prompt_logprobs`, vLLM's form: for each token of the prompt its own and its rivals' by id, `null` for the first.
pub(crate) type PromptLogprobs = Vec<Option<BTreeMap<TokenId, PromptToken>>>;

#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct PromptToken {
    logprob: f32,
    rank: u32,
    decoded_token: String,
}

/// The wire form of a prompt's positions from its second token.
pub(crate) fn prompt_logprobs(positions: &[PromptPosition]) -> PromptLogprobs {
    let token = |token: &TokenLogprob, rank: u32| {
        (token.token, PromptToken { logprob: token.logprob.max(IMPOSSIBLE), rank, decoded_token: token.text.clone() })
    };
    let position = |PromptPosition { rank, logprobs }: &PromptPosition| {
        let rivals = logprobs.top.iter().zip(1..).map(|(rival, rank)| token(rival, rank));
        Some(rivals.chain([token(&logprobs.chosen, *rank)]).collect())
    };
    [None].into_iter().chain(positions.iter().map(position)).collect()
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
        let json = serde_json::to_value(ChatLogprobs::new(positions(), Names::Text)).unwrap();
        assert_eq!(json["content"][0]["token"], "né");
        assert_eq!(json["content"][0]["bytes"], serde_json::json!([110, 195, 169]));
        assert_eq!(json["content"][0]["top_logprobs"][1]["logprob"], -9999.0);
        assert_eq!(json["content"][1]["top_logprobs"], serde_json::json!([]));
    }

    #[test]
    fn the_chosen_token_of_a_text_is_among_its_rivals_also_beyond_those_asked_for() {
        let position = PositionLogprobs { chosen: token("c", -3.0), top: vec![token("a", -0.5), token("b", -1.0)] };
        let json =
            serde_json::to_value(TextLogprobs::new(vec![position], &mut TextOffset::default(), Names::Text)).unwrap();
        assert_eq!(json["top_logprobs"], serde_json::json!([{"a": -0.5, "b": -1.0, "c": -3.0}]));
        let position = PositionLogprobs { chosen: token("c", -3.0), top: vec![token("b", -0.5), token("a", -1.0)] };
        let text = TextLogprobs::new(vec![position], &mut TextOffset::default(), Names::Text);
        assert!(serde_json::to_string(&text).unwrap().contains(r#"[{"c":-3.0,"b":-0.5,"a":-1.0}]"#), "it stands first");
    }

    #[test]
    fn tokens_are_named_by_id_where_that_is_asked_for() {
        let chat = serde_json::to_value(ChatLogprobs::new(positions(), Names::Id)).unwrap();
        assert_eq!(
            (&chat["content"][0]["token"], &chat["content"][0]["bytes"][0]),
            (&"token_id:1".into(), &110.into())
        );
        let text = TextLogprobs::new(positions(), &mut TextOffset::default(), Names::Id);
        assert_eq!(text.tokens, ["token_id:1", "token_id:1"]);
        assert_eq!(text.text_offset, [0, 2], "offsets are those of the text");
    }

    #[test]
    fn nothing_is_known_of_a_prompts_first_token() {
        let prompt = || vec![PromptPosition { rank: 3, logprobs: positions().remove(0) }];
        let text = TextLogprobs::behind_prompt(token("A", 0.0), prompt(), positions(), Names::Text);
        assert_eq!(text.tokens, ["A", "né", "né", "!"]);
        assert_eq!((text.text_offset, text.token_logprobs[0]), (vec![0, 1, 3, 5], None));
        assert!(text.top_logprobs[0].is_none() && text.top_logprobs[1..].iter().all(Option::is_some));
        let json = serde_json::to_value(prompt_logprobs(&prompt())).unwrap();
        let expected = serde_json::json!([null, {"1": {"logprob": -0.5, "rank": 3, "decoded_token": "né"}}]);
        assert_eq!(json, expected);
    }

    #[test]
    fn text_offsets_count_characters_across_chunks() {
        let mut offset = TextOffset::default();
        let [first, second] = [0, 1].map(|_| TextLogprobs::new(positions(), &mut offset, Names::Text));
        assert_eq!((first.text_offset, second.text_offset), (vec![0, 2], vec![3, 5]));
        assert_eq!(first.tokens, ["né", "!"]);
    }
}
