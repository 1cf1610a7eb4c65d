//! The grammar of an answer: thoughts, then calls of the tools that may be called, or the structure that was asked for, in
//! the format the model was trained to write. Pure: compiles nothing.

use serde_json::{Value, json};
use stoker_engine::{
    TokenId,
    grammar::{GrammarSpec, quoted},
};

use super::{CallFormat, Reading, coerce::is_text};

/// A function that may be called.
#[derive(Clone, Debug)]
pub struct CallableFunction {
    /// Its name.
    pub name: String,
    /// The schema of its arguments.
    pub parameters: Value,
    /// Its arguments follow that schema wherever it is called, not only where a call is required.
    pub is_strict: bool,
    /// The field that says so, for errors.
    pub param: String,
}

/// What calls an answer has.
#[derive(Clone, Debug, Default)]
pub struct CallsWanted {
    /// Of these functions; none: calls are not constrained.
    pub functions: Vec<CallableFunction>,
    /// There must be one.
    pub is_required: bool,
    /// There may be more than one.
    pub are_parallel: bool,
    /// The model was shown others, which it may not call.
    pub is_narrowed: bool,
}

/// A language inside an answer, and the field that asked for it.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// The language.
    pub spec: GrammarSpec,
    /// The field.
    pub param: String,
}

/// A grammar, and the languages it is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct AnswerGrammar {
    /// The whole.
    pub spec: GrammarSpec,
    /// Where a mistake of the client can be.
    pub parts: Vec<Part>,
}

impl AnswerGrammar {
    /// The answer is of one language.
    pub fn of(part: Part) -> Self {
        Self { spec: part.spec.clone(), parts: vec![part] }
    }
}

/// The grammar of an answer; `None` if nothing constrains it. `special` knows the marks that are tokens of their own and
/// part of no text.
pub fn answer_grammar(
    reading: &Reading,
    calls: &CallsWanted,
    body: Option<Part>,
    special: &dyn Fn(&str) -> Option<TokenId>,
) -> Option<AnswerGrammar> {
    let mut rules = Rules { special, lark: String::new(), parts: Vec::new() };
    let format = reading.calls.filter(|_| !calls.functions.is_empty());
    let is_held = calls.is_narrowed || calls.functions.iter().any(|function| function.is_strict);
    if let Some(format) = format.filter(|_| is_held && body.is_none() && !calls.is_required) {
        return Some(rules.whole(|rules| rules.offered(reading, format, calls)));
    }
    let constrained = format.filter(|_| calls.is_required || body.is_some());
    let calls = constrained.map(|format| (rules.calls(format, calls), calls.is_required));
    if calls.is_none() && body.is_none() {
        return None;
    }
    let thoughts = rules.thoughts(reading);
    if thoughts.is_empty() && calls.is_none() {
        return body.map(AnswerGrammar::of);
    }
    let is_harmony = reading.reasoning == Some(super::ReasoningFormat::Harmony) || format == Some(CallFormat::Harmony);
    let body = body.filter(|_| calls.as_ref().is_none_or(|(_, is_required)| !is_required));
    let body = body.map(|body| {
        let opening = if is_harmony { rules.marks("<|channel|>final<|message|>") } else { String::new() };
        format!("{opening} {}", rules.part("body", body))
    });
    let answers: Vec<String> = calls.map(|(calls, _)| calls).into_iter().chain(body).collect();
    rules.rule("BLANK", "/[ \\n]{0,4}/");
    Some(rules.whole(|_| format!("{thoughts} ({})", answers.join(" | "))))
}

/// Rules in Lark, as they are needed.
pub(super) struct Rules<'a> {
    pub(super) special: &'a dyn Fn(&str) -> Option<TokenId>,
    lark: String,
    parts: Vec<(String, Part)>,
}

impl Rules<'_> {
    /// All of them, begun by the rule that `start` makes.
    fn whole(mut self, start: impl FnOnce(&mut Self) -> String) -> AnswerGrammar {
        let start = start(&mut self);
        let Self { lark, parts, .. } = self;
        let named = parts.iter().map(|(name, part)| (name.clone(), part.spec.clone())).collect();
        let spec = GrammarSpec::Frame { lark: format!("start: {start}\n{lark}"), parts: named };
        AnswerGrammar { spec, parts: parts.into_iter().map(|(_, part)| part).collect() }
    }

    /// A language by its name.
    fn part(&mut self, name: &str, part: Part) -> String {
        self.parts.push((name.to_owned(), part));
        format!("@{name}")
    }

    pub(super) fn rule(&mut self, name: &str, body: &str) {
        self.lark.push_str(&format!("{name}: {body}\n"));
    }

    /// Text with marks in it: what lies between `<|` and `|>` or is a token of its own is a mark.
    pub(super) fn marks(&self, text: &str) -> String {
        let mut lark = String::new();
        let mut rest = text;
        while !rest.is_empty() {
            let ends = rest.char_indices().map(|(at, c)| at + c.len_utf8());
            let mark = ends.rev().find_map(|end| Some((end, (self.special)(&rest[..end])?)));
            let len = match mark {
                Some((end, id)) => {
                    lark.push_str(&format!(" <[{id}]>"));
                    end
                }
                None => {
                    let starts = rest.char_indices().map(|(at, _)| at).skip(1);
                    let is_mark = |at: &usize| self.begins_with_mark(&rest[*at..]);
                    let end = starts.clone().find(is_mark).unwrap_or(rest.len());
                    lark.push_str(&format!(" {}", quoted(&rest[..end])));
                    end
                }
            };
            rest = &rest[len..];
        }
        lark
    }

    fn begins_with_mark(&self, text: &str) -> bool {
        let ends = text.char_indices().map(|(at, c)| at + c.len_utf8()).take(48);
        ends.into_iter().any(|end| (self.special)(&text[..end]).is_some())
    }

    /// Thoughts in front of the answer; empty for a model that has none.
    fn thoughts(&mut self, reading: &Reading) -> String {
        if reading.reasoning == Some(super::ReasoningFormat::Harmony) || reading.calls == Some(CallFormat::Harmony) {
            let opening = self.marks("<|channel|>analysis<|message|>");
            let end = self.marks("<|end|><|start|>assistant");
            self.rule("thoughts", &format!("{opening} THOUGHT {end}"));
            self.rule("THOUGHT", "/(.|\\n)*/");
            return "thoughts?".into();
        }
        let Some([open, close]) = reading.reasoning.and_then(super::ReasoningFormat::marks) else {
            return String::new();
        };
        let thoughts = self.text_to("thoughts", close);
        if reading.reasoning_is_open {
            return format!("{thoughts} BLANK");
        }
        let open = self.marks(open);
        format!("({open} {thoughts} BLANK)?")
    }

    /// Any text up to the first such mark, which is included.
    pub(super) fn text_to(&mut self, name: &str, mark: &str) -> String {
        if (self.special)(mark).is_some() {
            return format!("/(.|\\n)*/ {}", self.marks(mark));
        }
        self.rule(&format!("{name}[lazy]"), &format!("/(.|\\n)*{}/", regex_of(mark)));
        name.into()
    }

    /// One call or several.
    fn calls(&mut self, format: CallFormat, wanted: &CallsWanted) -> String {
        let Layout { mark, between, .. } = layout(format, self.special);
        let (begin, run) = (self.marks(mark), self.run(format, wanted));
        // Some models put their calls one right behind the other.
        let more = match between {
            None if wanted.are_parallel => format!("(/\\n?/ {begin} {run})*"),
            _ => String::new(),
        };
        self.rule("calls", &format!("{begin} {run} {more}"));
        "calls".into()
    }

    /// What stands behind the mark that begins calls.
    pub(super) fn run(&mut self, format: CallFormat, wanted: &CallsWanted) -> String {
        let Layout { opening, between, end, .. } = layout(format, self.special);
        for (idx, function) in wanted.functions.iter().enumerate() {
            let call = self.call(format, idx, function);
            self.rule(&format!("call_{idx}"), &call);
        }
        let names: Vec<String> = (0..wanted.functions.len()).map(|idx| format!("call_{idx}")).collect();
        self.rule("call", &names.join(" | "));
        let more = match between {
            Some(between) if wanted.are_parallel => format!("({} call)*", self.marks(between)),
            _ => String::new(),
        };
        let (opening, end) = (self.marks(opening), self.marks(end));
        self.rule("run", &format!("{opening} call {more} {end}"));
        "run".into()
    }

    fn call(&mut self, format: CallFormat, idx: usize, function: &CallableFunction) -> String {
        let name = &function.name;
        let json_name = quoted(name);
        match format {
            CallFormat::Hermes => {
                let arguments = self.arguments(idx, function);
                let head = format!("{{\"name\": {json_name}, \"arguments\": ");
                format!("/\\n?/ {} {arguments} \"}}\" /\\n?/", quoted(&head))
            }
            CallFormat::Phi4Mini | CallFormat::Granite => {
                let arguments = self.arguments(idx, function);
                format!("{} {arguments} \"}}\"", quoted(&format!("{{\"name\": {json_name}, \"arguments\": ")))
            }
            CallFormat::Llama => {
                let arguments = self.arguments(idx, function);
                format!("{} {arguments} \"}}\"", quoted(&format!("{{\"name\": {json_name}, \"parameters\": ")))
            }
            CallFormat::Mistral => {
                let arguments = self.arguments(idx, function);
                if (self.special)("[ARGS]").is_some() {
                    return format!("{} {arguments}", self.marks(&format!("{name}[ARGS]")));
                }
                format!("{} {arguments} \"}}\"", quoted(&format!("{{\"name\": {json_name}, \"arguments\": ")))
            }
            CallFormat::DeepSeek => {
                let arguments = self.arguments(idx, function);
                let fenced = self.marks(&format!("function<｜tool▁sep｜>{name}\n```json\n"));
                let plain = self.marks(&format!("{name}<｜tool▁sep｜>"));
                let (open, close) = (self.marks("<｜tool▁call▁begin｜>"), self.marks("<｜tool▁call▁end｜>"));
                format!("{open} ({fenced} {arguments} \"\\n```\" | {plain} {arguments}) {close}")
            }
            CallFormat::Kimi => {
                let arguments = self.arguments(idx, function);
                let open = self.marks(&format!("<|tool_call_begin|>functions.{name}:"));
                let then = self.marks("<|tool_call_argument_begin|>");
                format!("{open} /[0-9]{{1,3}}/ {then} {arguments} {}", self.marks("<|tool_call_end|>"))
            }
            CallFormat::Harmony => {
                let arguments = self.arguments(idx, function);
                let head = format!("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>");
                format!("{} {arguments}", self.marks(&head))
            }
            CallFormat::QwenCoder => {
                let tags = Tags { open: "<parameter=", between: ">\n", padding: "\n", close: "</parameter>" };
                let parameters = self.parameters(idx, function, tags);
                format!("{} {parameters} \"</function>\"", quoted(&format!("{name}>\n")))
            }
            CallFormat::Glm => {
                let tags =
                    Tags { open: "<arg_key>", between: "</arg_key>\n<arg_value>", padding: "", close: "</arg_value>" };
                let parameters = self.parameters(idx, function, tags);
                format!("{} {parameters}", quoted(&format!("{name}\n")))
            }
            CallFormat::Pythonic => {
                let parameters = self.keywords(idx, function);
                format!("{} {parameters} \")\"", quoted(&format!("{name}(")))
            }
        }
    }

    /// The arguments as one JSON object.
    fn arguments(&mut self, idx: usize, function: &CallableFunction) -> String {
        let spec = GrammarSpec::Json(object_schema(&function.parameters));
        self.part(&format!("arguments_{idx}"), Part { spec, param: function.param.clone() })
    }

    /// Parameters between tags, in the schema's order.
    fn parameters(&mut self, idx: usize, function: &CallableFunction, tags: Tags) -> String {
        let Tags { open, between, padding, close } = tags;
        if is_open(&function.parameters) {
            return self.any_parameters(idx, tags);
        }
        let mut rules = String::new();
        for (n, (key, schema, is_required)) in parameters_of(&function.parameters).into_iter().enumerate() {
            let name = format!("parameter_{idx}_{n}");
            let value = if is_text(&schema) && schema.get("enum").is_none() {
                self.text_to(&format!("text_{idx}_{n}"), close)
            } else {
                let spec = match texts_of(&schema) {
                    Some(texts) => GrammarSpec::Choice(texts),
                    None => GrammarSpec::Json(self.rooted(&schema, &function.parameters)),
                };
                let part = self.part(&format!("value_{idx}_{n}"), Part { spec, param: function.param.clone() });
                format!("{part} {}", self.marks(&format!("{padding}{close}")))
            };
            let head = self.marks(&format!("{open}{key}{between}"));
            self.rule(&name, &format!("{head} {value} \"\\n\""));
            rules.push_str(&format!(" {name}{}", if is_required { "" } else { "?" }));
        }
        rules
    }

    /// Parameters of any names, with any texts.
    fn any_parameters(&mut self, idx: usize, Tags { open, between, close, .. }: Tags) -> String {
        let value = self.text_to(&format!("any_{idx}"), close);
        format!("({} {KEY} {} {value} \"\\n\")*", self.marks(open), self.marks(between))
    }

    /// Keyword arguments, in the schema's order. The required ones come first, so that commas stand between.
    fn keywords(&mut self, idx: usize, function: &CallableFunction) -> String {
        if is_open(&function.parameters) {
            let any = Part { spec: GrammarSpec::Json(json!({})), param: function.param.clone() };
            let argument = format!("{KEY} \"=\" {}", self.part(&format!("any_{idx}"), any));
            return format!("({argument} (\", \" {argument})*)?");
        }
        let mut parameters = parameters_of(&function.parameters);
        parameters.sort_by_key(|(_, _, is_required)| !is_required);
        let mut rule = String::new();
        let any_required = parameters.iter().any(|(_, _, is_required)| *is_required);
        for (n, (key, schema, is_required)) in parameters.into_iter().enumerate() {
            // Without a required one in front, one optional argument is all that is written.
            if !any_required && n > 0 {
                break;
            }
            let spec = GrammarSpec::Json(self.rooted(&schema, &function.parameters));
            let value = self.part(&format!("value_{idx}_{n}"), Part { spec, param: function.param.clone() });
            let comma = if n > 0 { ", " } else { "" };
            let argument = format!("{} {value}", quoted(&format!("{comma}{key}=")));
            rule.push_str(&if is_required { format!(" {argument}") } else { format!(" ({argument})?") });
        }
        rule
    }

    /// A parameter's schema, which may refer to definitions of the whole.
    fn rooted(&self, schema: &Value, whole: &Value) -> Value {
        let mut schema = schema.clone();
        if let Some(members) = schema.as_object_mut() {
            for key in ["$defs", "definitions"] {
                if let Some(definitions) = whole.get(key) {
                    members.entry(key).or_insert_with(|| definitions.clone());
                }
            }
        }
        schema
    }
}

/// What stands around the parameters of a call: in front of the key, of the value, and behind it.
#[derive(Clone, Copy)]
struct Tags {
    open: &'static str,
    between: &'static str,
    /// Between a value and what closes it: no part of a text.
    padding: &'static str,
    close: &'static str,
}

/// What stands around calls.
pub(super) struct Layout {
    /// What begins them; empty: the beginning of the answer does, or its header.
    pub(super) mark: &'static str,
    /// Behind the mark.
    opening: &'static str,
    /// Between calls behind one mark; `None`: each has a mark of its own.
    between: Option<&'static str>,
    /// Behind the last one.
    end: &'static str,
}

pub(super) fn layout(format: CallFormat, special: &dyn Fn(&str) -> Option<TokenId>) -> Layout {
    let each = |mark, opening, end| Layout { mark, opening, between: None, end };
    let list = |mark, opening, between, end| Layout { mark, opening, between: Some(between), end };
    match format {
        CallFormat::Hermes | CallFormat::Glm => each("<tool_call>", "", "</tool_call>"),
        CallFormat::QwenCoder if special("<seed:tool_call>").is_some() => {
            each("<seed:tool_call>", "\n<function=", "\n</seed:tool_call>")
        }
        CallFormat::QwenCoder => each("<tool_call>", "\n<function=", "\n</tool_call>"),
        CallFormat::Mistral if special("[ARGS]").is_some() => each("[TOOL_CALLS]", "", ""),
        CallFormat::Mistral => list("[TOOL_CALLS]", "[", ", ", "]"),
        CallFormat::Harmony => list("", "", "<|call|><|start|>assistant", ""),
        CallFormat::Llama => list("", "", "; ", ""),
        CallFormat::DeepSeek => list("<｜tool▁calls▁begin｜>", "", "\n", "<｜tool▁calls▁end｜>"),
        CallFormat::Kimi => list("<|tool_calls_section_begin|>", "", "", "<|tool_calls_section_end|>"),
        CallFormat::Phi4Mini => list("<|tool_call|>", "[", ", ", "]<|/tool_call|>"),
        CallFormat::Granite => list("<|tool_call|>", "[", ", ", "]"),
        CallFormat::Pythonic => list("<|tool_call_start|>", "[", ", ", "]<|tool_call_end|>"),
    }
}

/// Arguments are an object, whether the schema says so or not. Without a schema there are none.
fn object_schema(parameters: &Value) -> Value {
    match parameters.as_object() {
        None => json!({"type": "object", "properties": {}, "additionalProperties": false}),
        Some(members) => {
            let mut members = members.clone();
            members.entry("type").or_insert_with(|| json!("object"));
            Value::Object(members)
        }
    }
}

/// A key that no schema names.
const KEY: &str = "/[A-Za-z_][A-Za-z0-9_]*/";

/// Whether a schema says nothing about parameters but that there may be some.
fn is_open(parameters: &Value) -> bool {
    *parameters == any_object()
}

/// The schema of arguments of which nothing is said.
pub(super) fn any_object() -> Value {
    json!({"type": "object"})
}

/// Key, schema, and whether it is required.
fn parameters_of(parameters: &Value) -> Vec<(String, Value, bool)> {
    let required = parameters["required"].as_array();
    let is_required = |key: &str| required.is_some_and(|keys| keys.iter().any(|required| required == key));
    let properties = parameters["properties"].as_object().into_iter().flatten();
    properties.map(|(key, schema)| (key.clone(), schema.clone(), is_required(key))).collect()
}

/// The texts of a schema that only lists texts.
fn texts_of(schema: &Value) -> Option<Vec<String>> {
    let texts = schema["enum"].as_array()?.iter().map(|value| value.as_str().map(str::to_owned));
    texts.collect::<Option<Vec<_>>>().filter(|texts| !texts.is_empty() && !texts.iter().any(String::is_empty))
}

/// A text as a regular expression that matches it, inside slashes.
pub(super) fn regex_of(text: &str) -> String {
    let escaped = |c: char| match c {
        '\n' => "\\n".to_owned(),
        c if !c.is_ascii() || c.is_alphanumeric() || " <>_-=".contains(c) => c.to_string(),
        c => format!("\\{c}"),
    };
    text.chars().map(escaped).collect()
}
