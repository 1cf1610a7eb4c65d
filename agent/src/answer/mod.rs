//! What a model's text says beside its text: reasoning and tool calls, in the format the model was trained to write.
//! Pure and incremental: however the text is cut, the pieces add up to the same answer, and text that only looks like a
//! call stays text. Knows neither HTTP nor tokens.
//!
//! ```text
//! text ─► reasoning (think blocks) ─► tool calls (one state machine a format) ─► sink ─► pieces
//! ```
//! Harmony has channels instead, so one machine reads both. What lies between two parts is white space that belongs to
//! neither: the sink drops it.

mod coerce;
mod format;
mod grammar;
mod harmony;
mod json_call;
mod marked;
mod marks;
mod offered;
mod pythonic;
mod reasoning;
mod sink;
mod tagged;
#[cfg(test)]
mod tests;
mod thinking_budget;

use std::sync::Arc;

pub use coerce::ToolSchemas;
pub use format::{CallFormat, Choice, FormatChoice, Formats, ReasoningFormat, UnknownFormat};

pub use grammar::{AnswerGrammar, CallableFunction, CallsWanted, Part, answer_grammar};
pub use thinking_budget::ThinkingBudget;

use harmony::Harmony;
use marked::MarkedCalls;
use pythonic::PythonicCalls;
use reasoning::{Segment, ThinkBlock};
use sink::Sink;
use tagged::TaggedCalls;

/// A part of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Piece {
    /// Thoughts before the answer.
    Reasoning(String),
    /// Text for the user.
    Text(String),
    /// A call for the client to make begins; its arguments follow.
    Call {
        /// The function.
        name: String,
        /// The id that the model itself gave the call, where its format has one.
        id: Option<String>,
    },
    /// More JSON text of the arguments of the call that began last, as the model wrote it.
    Arguments(String),
    /// The call that began last is complete. A call without this was cut off.
    CallEnd,
}

/// How to read one answer.
#[derive(Clone, Debug, Default)]
pub struct Reading {
    /// Calls are looked for, in this format.
    pub calls: Option<CallFormat>,
    /// Reasoning is looked for, in this format.
    pub reasoning: Option<ReasoningFormat>,
    /// The prompt has opened the reasoning already.
    pub reasoning_is_open: bool,
    /// The types of arguments, for formats that write them without.
    pub schemas: Arc<ToolSchemas>,
}

/// Splits one growing text into pieces.
#[derive(Debug)]
pub struct AnswerParser {
    think: Option<ThinkBlock>,
    calls: Option<Scanner>,
    sink: Sink,
}

impl AnswerParser {
    /// At the beginning of an answer.
    pub fn new(reading: &Reading) -> Self {
        let harmony = reading.calls == Some(CallFormat::Harmony) || reading.reasoning == Some(ReasoningFormat::Harmony);
        let think = reading.reasoning.and_then(ReasoningFormat::marks);
        let calls = if harmony { Some(CallFormat::Harmony) } else { reading.calls };
        Self {
            think: think.map(|marks| ThinkBlock::new(marks, reading.reasoning_is_open)),
            calls: calls.map(|format| Scanner { machine: machine(format, reading), held: String::new() }),
            sink: Sink::default(),
        }
    }

    /// Takes more text; returns the pieces that became certain.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        self.advance(text, false);
        self.sink.take()
    }

    /// The end of the text: what was held back comes out.
    pub fn finish(&mut self) -> Vec<Piece> {
        self.advance("", true);
        self.sink.finish();
        self.sink.take()
    }

    fn advance(&mut self, text: &str, is_end: bool) {
        let Self { think, calls, sink } = self;
        let mut answer = |text: &str, is_end, sink: &mut Sink| match calls {
            Some(calls) => calls.advance(text, is_end, sink),
            None => sink.text(text),
        };
        let Some(think) = think else { return answer(text, is_end, sink) };
        for segment in think.advance(text, is_end) {
            match segment {
                Segment::Reasoning(thoughts) => sink.reasoning(&thoughts),
                Segment::Text(text) => answer(&text, false, sink),
            }
        }
        if is_end {
            answer("", true, sink);
        }
    }
}

/// One format's state machine. It sees the text from where it stopped, and decides only what more text cannot change.
trait Machine: std::fmt::Debug + Send {
    /// Takes so many bytes off the front of `text`, 0 if only its state changed; `None`: it needs more text. At the end
    /// of the answer it must take everything.
    fn step(&mut self, text: &str, is_end: bool, sink: &mut Sink) -> Option<usize>;

    /// The answer ended right behind what was taken last.
    fn end(&mut self, _sink: &mut Sink) {}
}

/// Feeds a machine.
#[derive(Debug)]
struct Scanner {
    machine: Box<dyn Machine>,
    held: String,
}

impl Scanner {
    fn advance(&mut self, text: &str, is_end: bool, sink: &mut Sink) {
        self.held.push_str(text);
        let mut at = 0;
        while at < self.held.len() {
            let Some(taken) = self.machine.step(&self.held[at..], is_end, sink) else { break };
            at += taken;
        }
        self.held.drain(..at);
        if is_end {
            self.machine.end(sink);
        }
        debug_assert!(!is_end || self.held.is_empty(), "at the end everything is taken: {:?}", self.held);
    }
}

fn machine(format: CallFormat, reading: &Reading) -> Box<dyn Machine> {
    match format {
        CallFormat::Hermes => Box::new(MarkedCalls::new(&marked::HERMES)),
        CallFormat::Granite => Box::new(MarkedCalls::new(&marked::GRANITE)),
        CallFormat::Phi4Mini => Box::new(MarkedCalls::new(&marked::PHI4_MINI)),
        CallFormat::Mistral => Box::new(MarkedCalls::new(&marked::MISTRAL)),
        CallFormat::DeepSeek => Box::new(MarkedCalls::new(&marked::DEEPSEEK)),
        CallFormat::Kimi => Box::new(MarkedCalls::new(&marked::KIMI)),
        CallFormat::Llama => Box::new(pythonic::Llama::default()),
        CallFormat::Pythonic => Box::new(PythonicCalls::new(&pythonic::MARKED)),
        CallFormat::QwenCoder => Box::new(TaggedCalls::new(&tagged::QWEN_CODER, Arc::clone(&reading.schemas))),
        CallFormat::Glm => Box::new(TaggedCalls::new(&tagged::GLM, Arc::clone(&reading.schemas))),
        CallFormat::Harmony => Box::<Harmony>::default(),
    }
}
