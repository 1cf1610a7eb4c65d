//! What clients may ask for, and its form for llguidance.

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde_json::{Value, json};

use super::{GrammarError, notation::quoted};

/// Largest schema, expression or grammar, in bytes: one thirtieth of a body, far beyond any that was written by hand.
pub const MAX_GRAMMAR_BYTES: usize = 256 * 1024;
/// Largest grammar in Lark, in bytes: what a chain of its rules takes of the compiling thread's stack is bounded by it.
pub const MAX_LARK_BYTES: usize = 128 * 1024;
/// Texts to choose from at most.
pub const MAX_CHOICES: usize = 4096;

/// White space between the tokens of JSON: a space, or a new line and its indentation. A model that may write any amount
/// sometimes writes nothing else.
const JSON_BLANK: &str = r" |\n[ \t]{0,64}";

/// A language of completions.
#[derive(Clone, Debug, PartialEq)]
pub enum GrammarSpec {
    /// Values of a JSON schema (draft 2020-12).
    Json(Value),
    /// One of these texts.
    Choice(Vec<String>),
    /// Texts that a regular expression matches as a whole.
    Regex(String),
    /// Texts of a grammar in llguidance's Lark.
    Lark(String),
    /// Texts of a grammar in Lark that names other languages as `@NAME`.
    Frame {
        /// The grammar.
        lark: String,
        /// The languages it names.
        parts: Vec<(String, GrammarSpec)>,
    },
}

impl GrammarSpec {
    /// Any JSON object.
    pub fn json_object() -> Self {
        Self::Json(json!({"type": "object"}))
    }

    /// The same for the same question.
    pub(super) fn key(&self) -> String {
        match self {
            Self::Json(schema) => format!("json {schema}"),
            Self::Choice(choices) => format!("choice {}", json!(choices)),
            Self::Regex(regex) => format!("regex {regex}"),
            Self::Lark(lark) => format!("lark {lark}"),
            Self::Frame { lark, parts } => {
                let parts: Vec<String> =
                    parts.iter().map(|(name, part)| format!("\n@{name}: {}", part.key())).collect();
                format!("frame {lark}{}", parts.concat())
            }
        }
    }

    pub(super) fn check_size(&self) -> Result<(), GrammarError> {
        let check = |unit, found, limit| {
            if found > limit { Err(GrammarError::TooLarge { unit, found, limit }) } else { Ok(()) }
        };
        if let Self::Choice(choices) = self {
            check("choices", choices.len(), MAX_CHOICES)?;
        }
        if let Self::Lark(lark) = self {
            check("bytes", lark.len(), MAX_LARK_BYTES)?;
        }
        check("bytes", self.key().len(), MAX_GRAMMAR_BYTES)
    }

    pub(super) fn grammar(&self) -> Result<TopLevelGrammar, GrammarError> {
        let mut grammar = TopLevelGrammar::from_grammar(self.own()?);
        if let Self::Frame { parts, .. } = self {
            for (name, part) in parts {
                grammar.grammars.push(GrammarWithLexer { name: Some(name.clone()), ..part.own()? });
            }
        }
        Ok(grammar)
    }

    fn own(&self) -> Result<GrammarWithLexer, GrammarError> {
        Ok(match self {
            Self::Json(schema) => GrammarWithLexer::from_json_schema(with_blank(schema)),
            Self::Regex(regex) => GrammarWithLexer::from_regex(regex),
            Self::Lark(lark) | Self::Frame { lark, .. } => GrammarWithLexer::from_lark(lark.clone()),
            Self::Choice(choices) if choices.is_empty() || choices.iter().any(String::is_empty) => {
                return Err(GrammarError::Refused("it needs at least one text, and no empty one".into()));
            }
            Self::Choice(choices) => {
                let texts: Vec<String> = choices.iter().map(|text| quoted(text)).collect();
                GrammarWithLexer::from_lark(format!("start: CHOICE\nCHOICE: {}", texts.join(" | ")))
            }
        })
    }
}

/// The schema with what llguidance shall know beside it. A client cannot say that itself: some of it loosens the schema.
fn with_blank(schema: &Value) -> Value {
    let mut schema = match schema {
        Value::Bool(true) => json!({}),
        schema => schema.clone(),
    };
    if let Some(members) = schema.as_object_mut() {
        members.insert("x-guidance".to_owned(), json!({"whitespace_pattern": JSON_BLANK}));
    }
    schema
}
