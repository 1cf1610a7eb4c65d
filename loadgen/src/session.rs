//! What a user does: one turn after another, each behind the answers to those before it and some time to think. Pure.

use std::time::Duration;

use serde_json::{Value, json};
use stoker_workload::{Lengths, Request, Rng, Sizes};

use crate::{
    answer::{Call, Complete},
    client::Prompt,
    shape::{Shape, Shapes},
};

/// What every tool of ours returns.
const TOOL_RESULT: &str = "{\"done\": true}";
/// Draws of what follows a first turn must not be those of arrivals and lengths.
const TURNS_SEED: u64 = 0x0074_7572_6e73;

/// One user's visit.
#[derive(Clone, Debug)]
pub struct Session {
    /// When the first turn is planned, in seconds from the beginning of the run.
    pub arrived: f64,
    /// Which of the run's models it asks, in all turns.
    pub model_idx: usize,
    /// At least one.
    pub turns: Vec<Turn>,
}

/// One request of a session.
#[derive(Clone, Debug)]
pub struct Turn {
    /// From the last text of the answer before it to this request; nothing for the first.
    pub think: Duration,
    /// Tokens of what the user says now; what was said before comes in front of it.
    pub prompt_tokens: u32,
    /// Of those, tokens at the beginning that are the same in all sessions.
    pub shared_tokens: u32,
    /// Completion tokens at most.
    pub completion_tokens: u32,
    /// What the answer has to be.
    pub shape: Shape,
}

/// What sessions are like.
#[derive(Clone, Debug)]
pub struct Mix {
    /// How often each model is asked, in relation to the others.
    pub model_weights: Vec<f64>,
    /// How many turns a session has.
    pub turns: Lengths,
    /// Mean of the time to think, which is exponential.
    pub think: Duration,
    /// Tokens of later turns.
    pub sizes: Sizes,
    /// Tokens before each session's first prompt that are the same in all.
    pub shared_tokens: u32,
    /// What answers have to be.
    pub shapes: Shapes,
}

impl Mix {
    /// A session for each request, which is its first turn.
    pub fn sessions(&self, firsts: &[Request], seed: u64) -> Vec<Session> {
        let mut rng = Rng::seeded(seed ^ TURNS_SEED);
        firsts.iter().map(|first| self.session(first, &mut rng)).collect()
    }

    fn session(&self, first: &Request, rng: &mut Rng) -> Session {
        let model_idx = self.model(rng);
        let mut turns = vec![Turn {
            think: Duration::ZERO,
            prompt_tokens: first.prompt_tokens.saturating_add(self.shared_tokens),
            shared_tokens: first.cached_tokens.saturating_add(self.shared_tokens),
            completion_tokens: first.completion_tokens,
            shape: self.shapes.draw(rng),
        }];
        turns.extend((1..self.turns.draw(rng)).map(|_| self.later(rng)));
        Session { arrived: first.arrived, model_idx, turns }
    }

    fn later(&self, rng: &mut Rng) -> Turn {
        Turn {
            think: self.think.mul_f64(rng.exponential()),
            prompt_tokens: self.sizes.prompt.draw(rng),
            shared_tokens: 0,
            completion_tokens: self.sizes.completion.draw(rng),
            shape: self.shapes.draw(rng),
        }
    }

    fn model(&self, rng: &mut Rng) -> usize {
        let mut at = rng.uniform() * self.model_weights.iter().sum::<f64>();
        let reached = self.model_weights.iter().position(|weight| {
            at -= weight;
            at < 0.0
        });
        reached.unwrap_or(self.model_weights.len() - 1)
    }
}

/// What was said in a session so far.
#[derive(Clone, Debug, Default)]
pub struct Conversation {
    messages: Vec<Value>,
}

impl Conversation {
    /// What to send when the user says this now.
    pub(crate) fn asked(&mut self, text: String) -> Prompt {
        let is_first = self.messages.is_empty();
        self.messages.push(json!({"role": "user", "content": text}));
        if is_first { Prompt::Text(text) } else { Prompt::Messages(self.messages.clone()) }
    }

    /// The model's own answer, and for each call a result, as an application would send them back.
    pub(crate) fn answered(&mut self, answer: Complete) {
        let Complete { text, calls, .. } = answer;
        let call = |call: &Call| json!({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}});
        let mut message = json!({"role": "assistant", "content": text});
        if !calls.is_empty() {
            message["tool_calls"] = calls.iter().map(call).collect();
        }
        self.messages.push(message);
        let result = |call: &Call| json!({"role": "tool", "tool_call_id": call.id, "content": TOOL_RESULT});
        self.messages.extend(calls.iter().map(result));
    }
}

#[cfg(test)]
mod tests {
    use stoker_workload::Steps;

    use super::*;
    use crate::shape::{Schema, ToolChoice, Tools};

    fn mix() -> Mix {
        Mix {
            model_weights: vec![3.0, 1.0],
            turns: Lengths::Uniform { low: 2, high: 4 },
            think: Duration::from_secs(2),
            sizes: Sizes { prompt: Lengths::Fixed(20), completion: Lengths::Fixed(5) },
            shared_tokens: 100,
            shapes: Shapes {
                schema_share: 0.0,
                schemas: Schema::built_in(),
                tools_share: 0.0,
                tools: Tools::built_in(ToolChoice::Auto),
            },
        }
    }

    fn sessions(mix: &Mix) -> Vec<Session> {
        mix.sessions(&"1000s:4".parse::<Steps>().unwrap().requests(mix.sizes, 1), 1)
    }

    #[test]
    fn sessions_have_the_turns_thoughts_and_models_that_were_asked_for() {
        let sessions = sessions(&mix());
        let n = sessions.len() as f64;
        let share = sessions.iter().filter(|session| session.model_idx == 0).count() as f64 / n;
        // Four standard deviations of some four thousand draws.
        assert!((share - 0.75).abs() < 0.03, "{share}");
        assert!(sessions.iter().all(|session| (2..=4).contains(&session.turns.len())));
        assert!(sessions.iter().all(|session| session.turns[0].think.is_zero()));
        let thoughts: Vec<f64> =
            sessions.iter().flat_map(|session| &session.turns[1..]).map(|turn| turn.think.as_secs_f64()).collect();
        let mean = thoughts.iter().sum::<f64>() / thoughts.len() as f64;
        assert!((mean - 2.0).abs() < 0.1, "{mean}");
    }

    #[test]
    fn what_all_share_comes_before_the_first_prompt_only() {
        let session = &sessions(&mix())[0];
        let sizes: Vec<_> = session.turns.iter().map(|turn| (turn.prompt_tokens, turn.shared_tokens)).collect();
        assert_eq!((sizes[0], sizes[1]), ((120, 100), (20, 0)));
    }

    #[test]
    fn arrivals_do_not_change_with_what_sessions_are() {
        let arrivals = |mix: &Mix| sessions(mix).iter().map(|session| session.arrived).collect::<Vec<_>>();
        assert_eq!(arrivals(&mix()), arrivals(&Mix { turns: Lengths::Fixed(1), ..mix() }));
    }

    #[test]
    fn a_conversation_grows_by_the_model_s_own_answers_and_the_results_of_its_calls() {
        let mut talk = Conversation::default();
        let Prompt::Text(first) = talk.asked("one".into()) else { panic!("a first turn is a text") };
        assert_eq!(first, "one");
        let call = Call { id: "a".into(), name: "f".into(), arguments: "{}".into() };
        let answer = |text: &str, calls| Complete {
            pieces: Vec::new(),
            usage: None,
            text: text.into(),
            calls,
            finish_reason: None,
        };
        talk.answered(answer("first", Vec::new()));
        talk.asked("two".into());
        talk.answered(answer("", vec![call]));
        let Prompt::Messages(messages) = talk.asked("three".into()) else { panic!("a later turn is a conversation") };
        let said: Vec<_> =
            messages.iter().map(|m| (m["role"].as_str().unwrap(), m["content"].as_str().unwrap())).collect();
        assert_eq!(
            said,
            [
                ("user", "one"),
                ("assistant", "first"),
                ("user", "two"),
                ("assistant", ""),
                ("tool", TOOL_RESULT),
                ("user", "three")
            ]
        );
        assert_eq!((&messages[3]["tool_calls"][0]["id"], &messages[4]["tool_call_id"]), (&json!("a"), &json!("a")));
    }
}
