//! The grammar of an answer that may call: its text is free, and from the mark on that begins a call, a call is what comes. No text
//! has another mark that would be read as the beginning of one, so nothing is called but by the grammar.
//!
//! ```text
//! thoughts?  ( text mark calls )*  text
//! ```

use super::{
    CallFormat, CallsWanted, Reading, ReasoningFormat,
    grammar::{CallableFunction, Rules, any_object, layout, regex_of},
};

/// An object, or a list that begins like a call in Python: what an answer of Llama's begins with if it is a call.
const LLAMA_CALLS: [&str; 2] = [r"\s*\{(.|\n)*", r"\s*\[\s*[^\s(\]]+\((.|\n)*"];
/// What Llama may write in front of them.
const LLAMA_TAG: &str = "<|python_tag|>";
/// A call of Qwen's without the mark that belongs in front of it, which its coders forget at times.
const BARE_FUNCTION: &str = "<function=";
/// What ends the text of a message.
const MESSAGE_ENDS: [&str; 4] = ["<|end|>", "<|call|>", "<|start|>", "<|channel|>"];

impl Rules<'_> {
    /// The rule that the answer begins with. Where a function is not strict, its arguments are any object.
    pub(super) fn offered(&mut self, reading: &Reading, format: CallFormat, wanted: &CallsWanted) -> String {
        let run = self.run(format, &loosened(wanted));
        let mark = layout(format, self.special).mark;
        self.rule("ANY", "/(.|\\n)*/");
        match format {
            CallFormat::Harmony => {
                self.text_without(self.texts_around(&MESSAGE_ENDS));
                self.messages(&run)
            }
            CallFormat::Llama => {
                let tag = self.texts_around(&[LLAMA_TAG]);
                self.text_without(LLAMA_CALLS.map(str::to_owned).into_iter().chain(tag).collect());
                // Behind calls, which begin the answer, is nothing.
                let free = format!("{run} | {} {run} | TEXT", self.up_to("begun", LLAMA_TAG));
                self.behind_thoughts(reading, &free)
            }
            format => {
                self.text_without(self.other_beginnings(format, mark));
                let mut calls = format!("{} {run}", self.up_to("begun", mark));
                if format == CallFormat::QwenCoder {
                    calls += &format!(" | {} call", self.up_to("begun_bare", BARE_FUNCTION));
                }
                let free = if wanted.are_parallel { format!("({calls})* TEXT") } else { format!("{calls} | TEXT") };
                self.behind_thoughts(reading, &free)
            }
        }
    }

    /// Messages with text, the last of which may be calls instead.
    fn messages(&mut self, calls: &str) -> String {
        let head = [self.marks("<|channel|>"), self.marks("<|message|>")];
        self.rule("head", &format!("{} CHANNEL {}", head[0], head[1]));
        self.rule("CHANNEL", "\"analysis\" | \"commentary\" | \"final\"");
        let (ended, next) = (self.up_to("ended", "<|end|>"), self.marks("<|start|>assistant"));
        format!("(head {ended} {next})* ({calls} | head TEXT)")
    }

    /// An answer in front of which the model may think. Thoughts need not end: then they are all there is.
    fn behind_thoughts(&mut self, reading: &Reading, free: &str) -> String {
        let Some([open, close]) = reading.reasoning.and_then(ReasoningFormat::marks) else { return free.to_owned() };
        let thoughts = self.text_to("thoughts", close);
        if reading.reasoning_is_open {
            return format!("{thoughts} ({free}) | ANY");
        }
        let opened = if (self.special)(open).is_some() {
            self.marks(open)
        } else {
            // Lazy, so that a text which begins with this is a thought and nothing else.
            self.rule("opened[lazy]", &format!("/\\s*{}/", regex_of(open)));
            "opened".into()
        };
        format!("({opened} {thoughts})? ({free}) | {opened} ANY")
    }

    /// Text up to the first such mark, which is included.
    fn up_to(&mut self, name: &str, mark: &str) -> String {
        if (self.special)(mark).is_some() {
            return format!("TEXT {}", self.marks(mark));
        }
        self.rule(&format!("{name}[lazy]"), &name.to_uppercase());
        self.rule(&name.to_uppercase(), &format!("TEXT /{}/", regex_of(mark)));
        name.into()
    }

    /// Free text, but for these.
    fn text_without(&mut self, forbidden: Vec<String>) {
        let forbidden: String = forbidden.iter().map(|regex| format!(" & ~/{regex}/")).collect();
        self.rule("TEXT", &format!("ANY{forbidden}"));
    }

    /// Texts that hold one of these marks. A mark that is a token of its own is in no text.
    fn texts_around(&self, marks: &[&str]) -> Vec<String> {
        let written = marks.iter().filter(|mark| (self.special)(mark).is_none());
        let written: Vec<String> = written.map(|mark| regex_of(mark)).collect();
        // One expression for all: each one more is a factor in what the lexer has to follow.
        if written.is_empty() { Vec::new() } else { vec![format!("(.|\\n)*({})(.|\\n)*", written.join("|"))] }
    }

    /// Texts with what begins a call beside the mark that does.
    fn other_beginnings(&self, format: CallFormat, mark: &str) -> Vec<String> {
        let others: &[&str] = match format {
            CallFormat::QwenCoder => &["<tool_call>", "<seed:tool_call>"],
            CallFormat::Granite => &["<tool_call>"],
            CallFormat::DeepSeek => &["<｜tool▁call▁begin｜>"],
            CallFormat::Kimi => &["<|tool_call_begin|>"],
            CallFormat::Phi4Mini => return vec![r"(.|\n)*functools\s*\[?\s*\{(.|\n)*".to_owned()],
            _ => &[],
        };
        let others: Vec<&str> = others.iter().copied().filter(|other| *other != mark).collect();
        self.texts_around(&others)
    }
}

/// The same calls, with any arguments where a function is not strict.
fn loosened(wanted: &CallsWanted) -> CallsWanted {
    let loosened = |function: &CallableFunction| match function.is_strict {
        true => function.clone(),
        false => CallableFunction { parameters: any_object(), ..function.clone() },
    };
    CallsWanted { functions: wanted.functions.iter().map(loosened).collect(), ..*wanted }
}
