//! Which formats there are, what they are called, and which of them a model was trained on, by its chat template: a
//! template writes earlier calls and thoughts as the model writes new ones.

use super::reasoning::ThinkMarks;

/// How a model writes tool calls.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum CallFormat {
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>`: Hermes, Qwen 2.5 and 3, Granite 4, ember.
    Hermes,
    /// `<tool_call><function=f><parameter=a>…`: Qwen3-Coder, Qwen 3.5, Nemotron 3, Seed-OSS.
    QwenCoder,
    /// `<tool_call>f<arg_key>a</arg_key><arg_value>…`: GLM 4.5 and later.
    Glm,
    /// `{"name": …, "parameters": …}` or `[f(a=1)]` as the whole answer: Llama 3.
    Llama,
    /// `[TOOL_CALLS]` and a list, or names with `[ARGS]`.
    Mistral,
    /// `<｜tool▁calls▁begin｜>…`: DeepSeek V3, R1 and V3.1.
    DeepSeek,
    /// Channels: gpt-oss.
    Harmony,
    /// `<|tool_call|>[…]<|/tool_call|>` or `functools[…]`.
    Phi4Mini,
    /// `<|tool_call|>[…]`: Granite 3.
    Granite,
    /// `<|tool_calls_section_begin|>…`: Kimi K2.
    Kimi,
    /// `<|tool_call_start|>[f(a=1)]<|tool_call_end|>`: LFM2.
    Pythonic,
}

/// How a model writes its reasoning.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ReasoningFormat {
    /// `<think>…</think>`: Qwen3, DeepSeek R1, GLM, QwQ, Kimi, SmolLM3, Nemotron.
    Think,
    /// `[THINK]…[/THINK]`: Magistral.
    Mistral,
    /// `<seed:think>…</seed:think>`: Seed-OSS.
    Seed,
    /// The analysis channel: gpt-oss.
    Harmony,
}

impl CallFormat {
    /// All formats by their names.
    pub const NAMES: [(&str, Self); 11] = [
        ("hermes", Self::Hermes),
        ("qwen3-coder", Self::QwenCoder),
        ("glm", Self::Glm),
        ("llama", Self::Llama),
        ("mistral", Self::Mistral),
        ("deepseek", Self::DeepSeek),
        ("harmony", Self::Harmony),
        ("phi4-mini", Self::Phi4Mini),
        ("granite", Self::Granite),
        ("kimi", Self::Kimi),
        ("pythonic", Self::Pythonic),
    ];

    /// The format that a model with this chat template writes.
    pub fn of_template(template: &str) -> Option<Self> {
        let has = |mark: &str| template.contains(mark);
        let marks = [
            (has("<|channel|>"), Self::Harmony),
            (has("<|tool_calls_section_begin|>"), Self::Kimi),
            (has("<｜tool▁calls▁begin｜>"), Self::DeepSeek),
            (has("<arg_key>") && has("<arg_value>"), Self::Glm),
            (has("<function=") && has("<parameter="), Self::QwenCoder),
            (has("[TOOL_CALLS]"), Self::Mistral),
            (has("<|tool_call_start|>"), Self::Pythonic),
            (has("<|/tool_call|>") || has("functools"), Self::Phi4Mini),
            (has("<|tool_call|>"), Self::Granite),
            (has("<tool_call>") && !has("]<]"), Self::Hermes),
            (has(r#"{"name": function name, "parameters": "#), Self::Llama),
        ];
        marks.into_iter().find_map(|(is_it, format)| is_it.then_some(format))
    }

    /// Marks that are special tokens in many tokenizers: the parser must see them.
    pub fn marks(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => &["<tool_call>", "</tool_call>"],
            Self::QwenCoder => &["<tool_call>", "</tool_call>", "<seed:tool_call>", "</seed:tool_call>"],
            Self::Glm => &["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
            Self::Llama => &["<|python_tag|>"],
            Self::Mistral => &["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
            Self::DeepSeek => &[
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁calls▁end｜>",
                "<｜tool▁call▁begin｜>",
                "<｜tool▁call▁end｜>",
                "<｜tool▁sep｜>",
            ],
            Self::Harmony => HARMONY_MARKS,
            Self::Phi4Mini => &["<|tool_call|>", "<|/tool_call|>"],
            Self::Granite => &["<|tool_call|>", "<tool_call>"],
            Self::Kimi => &[
                "<|tool_calls_section_begin|>",
                "<|tool_calls_section_end|>",
                "<|tool_call_begin|>",
                "<|tool_call_argument_begin|>",
                "<|tool_call_end|>",
            ],
            Self::Pythonic => &["<|tool_call_start|>", "<|tool_call_end|>"],
        }
    }
}

/// `<|return|>` only ends the answer, and needs no text.
const HARMONY_MARKS: &[&str] = &["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|call|>"];

impl ReasoningFormat {
    /// All formats by their names.
    pub const NAMES: [(&str, Self); 4] =
        [("think", Self::Think), ("mistral", Self::Mistral), ("seed", Self::Seed), ("harmony", Self::Harmony)];

    /// The format that a model with this chat template writes.
    pub fn of_template(template: &str) -> Option<Self> {
        let marks = [
            ("<|channel|>", Self::Harmony),
            ("</think>", Self::Think),
            ("</seed:think>", Self::Seed),
            ("[/THINK]", Self::Mistral),
        ];
        marks.into_iter().find_map(|(mark, format)| template.contains(mark).then_some(format))
    }

    /// Whether a prompt with this end has begun the reasoning.
    pub fn is_open_in(self, prompt: &str) -> bool {
        self.marks().is_some_and(|[open, _]| prompt.trim_end().ends_with(open))
    }

    /// Marks that are special tokens in some tokenizers: the parser must see them.
    pub fn visible_marks(self) -> &'static [&'static str] {
        match self {
            Self::Think => &["<think>", "</think>"],
            Self::Mistral => &["[THINK]", "[/THINK]"],
            Self::Seed => &["<seed:think>", "</seed:think>"],
            Self::Harmony => HARMONY_MARKS,
        }
    }

    /// The two marks around thoughts, of a format that has such.
    pub(crate) fn marks(self) -> Option<ThinkMarks> {
        match self {
            Self::Harmony => None,
            _ => self.visible_marks().try_into().ok(),
        }
    }
}

/// How the answers of the model that is served are read.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Formats {
    /// `None`: tools are refused.
    pub calls: Option<CallFormat>,
    /// `None`: nothing is taken for reasoning.
    pub reasoning: Option<ReasoningFormat>,
}

/// What the configuration says about both.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct FormatChoice {
    /// Of tool calls.
    pub calls: Choice<CallFormat>,
    /// Of reasoning.
    pub reasoning: Choice<ReasoningFormat>,
}

/// A format, chosen or not.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Choice<T> {
    /// What the chat template says.
    #[default]
    OfTemplate,
    /// None at all.
    Off,
    /// This one.
    Named(T),
}

/// A name that no format has.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("unknown format `{name}`: use auto, none, {known}")]
pub struct UnknownFormat {
    name: String,
    known: String,
}

impl FormatChoice {
    /// From the names in the configuration; absent is `auto`.
    pub fn named(calls: Option<&str>, reasoning: Option<&str>) -> Result<Self, UnknownFormat> {
        Ok(Self {
            calls: Choice::named(calls, &CallFormat::NAMES)?,
            reasoning: Choice::named(reasoning, &ReasoningFormat::NAMES)?,
        })
    }
}

impl<T: Copy> Choice<T> {
    fn named(name: Option<&str>, names: &[(&'static str, T)]) -> Result<Self, UnknownFormat> {
        match name.unwrap_or("auto") {
            "auto" => Ok(Self::OfTemplate),
            "none" => Ok(Self::Off),
            name => match names.iter().find(|(known, _)| *known == name) {
                Some((_, format)) => Ok(Self::Named(*format)),
                None => {
                    let known: Vec<&str> = names.iter().map(|(known, _)| *known).collect();
                    Err(UnknownFormat { name: name.to_owned(), known: known.join(", ") })
                }
            },
        }
    }

    /// The format, where the template says `of_template`.
    pub fn resolve(self, of_template: Option<T>) -> Option<T> {
        match self {
            Self::OfTemplate => of_template,
            Self::Off => None,
            Self::Named(format) => Some(format),
        }
    }
}
