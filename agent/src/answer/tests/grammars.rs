//! What the grammars of answers allow, drawn at random or wished for, and what is read in it.

use std::collections::HashMap;

use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};
use stoker_engine::{
    TokenId, Tokenizer,
    constraint::{Constraint, Matcher, allows, mask_words},
    grammar::GrammarCompiler,
};

use super::*;

/// A vocabulary and what is compiled over it.
struct Model {
    tokenizer: Arc<Tokenizer>,
    compiler: GrammarCompiler,
    end: TokenId,
    /// Tokens that are one byte, and those that are a mark.
    bytes: HashMap<u8, TokenId>,
    marks: Vec<(&'static str, TokenId)>,
}

impl Model {
    /// Marks are written like any text.
    fn of_bytes() -> Self {
        Self::new(Tokenizer::bytes(), 256)
    }

    /// Every mark of every format is a token of its own.
    fn of_marks() -> Self {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/goldens/tokenizers/byte-level.json");
        let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
        let n_known = tokenizer["model"]["vocab"].as_object().unwrap().len();
        let added = tokenizer["added_tokens"].as_array_mut().unwrap();
        for (id, mark) in (n_known..).zip(all_marks()) {
            added.push(json!({"id": id, "content": mark, "single_word": false, "lstrip": false, "rstrip": false,
                              "normalized": false, "special": true}));
        }
        Self::new(Tokenizer::from_json(tokenizer.to_string().as_bytes()).unwrap(), 2)
    }

    fn new(tokenizer: Tokenizer, end: TokenId) -> Self {
        let tokenizer = Arc::new(tokenizer);
        let of_byte = |token: TokenId| match tokenizer.token_bytes(token)[..] {
            [byte] if !tokenizer.is_special(token) => Some((byte, token)),
            _ => None,
        };
        let bytes = (0..tokenizer.n_ids() as TokenId).filter_map(of_byte).collect();
        // The end of the byte vocabulary is written like one of Harmony's marks.
        let special = |mark: &'static str| Some((mark, tokenizer.token_id(mark).filter(|token| *token != end)?));
        let marks = all_marks().into_iter().filter_map(special).collect();
        Self { compiler: GrammarCompiler::new(&tokenizer, &[end]).unwrap(), tokenizer, end, bytes, marks }
    }

    fn special(&self, text: &str) -> Option<TokenId> {
        self.marks.iter().find(|(mark, _)| *mark == text).map(|(_, token)| *token)
    }

    /// Marks as the tokens they are, and bytes.
    fn tokens(&self, mut text: &str) -> Vec<TokenId> {
        let mut tokens = Vec::new();
        while let Some(byte) = text.bytes().next() {
            let mark = self.marks.iter().find(|(mark, _)| text.starts_with(mark));
            let (n_bytes, token) = mark.map_or((1, self.bytes[&byte]), |(mark, token)| (mark.len(), *token));
            tokens.push(token);
            if text.is_char_boundary(n_bytes) {
                text = &text[n_bytes..];
                continue;
            }
            let n_bytes = text.chars().next().map_or(0, char::len_utf8);
            tokens.extend(text.bytes().take(n_bytes).skip(1).map(|byte| self.bytes[&byte]));
            text = &text[n_bytes..];
        }
        tokens
    }

    fn writer(&self, reading: &Reading, wanted: &CallsWanted) -> Writer<'_> {
        let grammar = answer_grammar(reading, wanted, None, &|mark| self.special(mark)).expect("it constrains");
        let compiled = self.compiler.compile(&grammar.spec);
        let (constraint, _) = compiled.unwrap_or_else(|error| panic!("{reading:?}: {error}\n{:?}", grammar.spec));
        Writer::new(self, &constraint)
    }
}

fn all_marks() -> Vec<&'static str> {
    let calls = CallFormat::NAMES.iter().flat_map(|(_, format)| format.marks());
    let mut marks: Vec<&str> = calls.copied().filter(|mark| !mark.contains("seed")).collect();
    marks.sort_unstable();
    marks.dedup();
    marks
}

/// An answer that is being written.
struct Writer<'a> {
    model: &'a Model,
    matcher: Box<dyn Matcher>,
    mask: Vec<u32>,
    bytes: Vec<u8>,
}

impl<'a> Writer<'a> {
    fn new(model: &'a Model, constraint: &Constraint) -> Self {
        let mask = vec![0; mask_words(model.tokenizer.n_ids())];
        let mut writer = Self { model, matcher: constraint.0.any_spelling(), mask, bytes: Vec::new() };
        writer.look();
        writer
    }

    fn look(&mut self) {
        self.mask.fill(0);
        self.matcher.allow(&mut self.mask).unwrap();
    }

    /// Writes a token if it may come.
    fn takes(&mut self, token: TokenId) -> bool {
        let is_allowed = allows(&self.mask, token) && token != self.model.end;
        if is_allowed {
            self.matcher.accept(token).unwrap();
            self.bytes.extend(self.model.tokenizer.token_bytes(token));
            self.look();
        }
        is_allowed
    }

    /// Writes of a text as much as may come; whether that is all of it.
    fn writes(&mut self, text: &str) -> bool {
        self.model.tokens(text).into_iter().all(|token| self.takes(token))
    }

    fn may_end(&self) -> bool {
        allows(&self.mask, self.model.end)
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }
}

/// Forecasts, which are strict, and the hour, which is not.
fn functions() -> Vec<CallableFunction> {
    let function = |name: &str, parameters, is_strict| CallableFunction {
        name: name.into(),
        parameters,
        is_strict,
        param: String::new(),
    };
    let parameters = json!({"type": "object", "required": ["city", "days"], "additionalProperties": false, "properties": {
        "city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}}});
    let loose = json!({"type": "object", "properties": {"zone": {"type": "integer"}}});
    vec![function("weather", parameters, true), function("now", loose, false)]
}

fn offered(are_parallel: bool) -> CallsWanted {
    CallsWanted { functions: functions(), are_parallel, ..CallsWanted::default() }
}

fn reading_of(format: CallFormat, reasoning: Option<ReasoningFormat>, reasoning_is_open: bool) -> Reading {
    let schemas = ToolSchemas::new(functions().into_iter().map(|function| (function.name, function.parameters)));
    Reading { calls: Some(format), reasoning, reasoning_is_open, schemas: Arc::new(schemas) }
}

/// One call as a model of this format writes it, of arguments as they stand in it.
fn written(format: CallFormat, model: &Model, name: &str, arguments: &[(&str, &str)]) -> String {
    let is_text = |value: &str| value.starts_with('"');
    let pairs = |tie: &str| -> Vec<String> {
        arguments
            .iter()
            .map(|(key, value)| if tie == "=" { format!("{key}={value}") } else { format!("\"{key}\"{tie}{value}") })
            .collect()
    };
    let json = format!("{{{}}}", pairs(": ").join(", "));
    let tagged = |[open, between, close]: [&str; 3]| -> String {
        let bare = |value: &str| if is_text(value) { value.trim_matches('"').to_owned() } else { value.to_owned() };
        arguments.iter().map(|(key, value)| format!("{open}{key}{between}{}{close}", bare(value))).collect()
    };
    let object = format!("{{\"name\": \"{name}\", \"arguments\": {json}}}");
    match format {
        CallFormat::Hermes => format!("<tool_call>\n{object}\n</tool_call>"),
        CallFormat::QwenCoder => {
            let parameters = tagged(["<parameter=", ">\n", "\n</parameter>\n"]);
            format!("<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>")
        }
        CallFormat::Glm => {
            let parameters = tagged(["<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"]);
            format!("<tool_call>{name}\n{parameters}</tool_call>")
        }
        CallFormat::Llama => object.replace("arguments", "parameters"),
        CallFormat::Mistral if model.special("[ARGS]").is_some() => format!("[TOOL_CALLS]{name}[ARGS]{json}"),
        CallFormat::Mistral => format!("[TOOL_CALLS][{object}]"),
        CallFormat::DeepSeek => format!(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        CallFormat::Harmony => {
            format!("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json}")
        }
        CallFormat::Phi4Mini => format!("<|tool_call|>[{object}]<|/tool_call|>"),
        CallFormat::Granite => format!("<|tool_call|>[{object}]"),
        CallFormat::Kimi => format!(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{json}\
             <|tool_call_end|><|tool_calls_section_end|>"
        ),
        CallFormat::Pythonic => format!("<|tool_call_start|>[{name}({})]<|tool_call_end|>", pairs("=").join(", ")),
    }
}

/// What an answer may say before it calls, and the text alone.
fn spoken(format: CallFormat) -> (&'static str, &'static str) {
    match format {
        CallFormat::Llama => ("", "Let me see: {x} [a](b), <b>é</b> < c.\n"),
        CallFormat::Harmony => (
            "<|channel|>analysis<|message|>Hm {x}.<|end|><|start|>assistant",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>{x} [a](b), <b>é</b>.\n",
        ),
        _ => ("Let me see: {x} [a](b), <b>é</b> < c.\n", "{\"x\": [1]} and [a](b), <b>é</b> < c.\n"),
    }
}

/// Says whether an answer may be this, and what is read in it if so: the same in one piece and by single characters.
fn said(model: &Model, reading: &Reading, wanted: &CallsWanted, answer: &str) -> Option<Vec<Piece>> {
    let mut writer = model.writer(reading, wanted);
    let is_possible = writer.writes(answer) && writer.may_end();
    if !is_possible {
        println!("of {answer:?} this may be written: {:?}", writer.text());
    }
    is_possible.then(|| {
        let pieces = parse(reading, [answer]);
        let chars: Vec<String> = answer.chars().map(String::from).collect();
        assert_eq!(parse(reading, chars.iter().map(String::as_str)), pieces, "{answer}");
        pieces
    })
}

#[test]
fn text_is_free_and_a_call_of_a_strict_function_follows_its_schema() {
    let oslo = |days: &'static str| [("city", "\"Oslo\""), ("days", days)];
    for model in [Model::of_bytes(), Model::of_marks()] {
        for (name, format) in CallFormat::NAMES {
            let thoughts = [
                (None, false, ""),
                (Some(ReasoningFormat::Think), false, "\n<think>a <tool_call> b</think>"),
                (Some(ReasoningFormat::Think), true, "b</think>"),
            ];
            for (reasoning, is_open, thought) in
                thoughts.into_iter().take(if format == CallFormat::Harmony { 1 } else { 3 })
            {
                let thought = if model.special("<tool_call>").is_some() {
                    thought.replace("<tool_call>", "")
                } else {
                    thought.into()
                };
                let (reading, (before, alone)) = (reading_of(format, reasoning, is_open), spoken(format));
                let said = |answer: String| said(&model, &reading, &offered(true), &format!("{thought}{answer}"));
                let call = |name: &str, arguments: &[(&str, &str)]| {
                    said(format!("{before}{}", written(format, &model, name, arguments)))
                };
                let calls_of = |pieces: Option<Vec<Piece>>| {
                    pieces.map(|pieces| {
                        let is_whole = pieces.last() == Some(&Piece::CallEnd);
                        let names = pieces.iter().filter_map(|piece| match piece {
                            Piece::Call { name, .. } => Some(name.clone()),
                            _ => None,
                        });
                        (names.collect::<Vec<_>>().concat(), is_whole)
                    })
                };
                assert_eq!(calls_of(said(alone.into())), Some((String::new(), false)), "{name}: text may be all");
                assert_eq!(calls_of(call("weather", &oslo("3"))), Some(("weather".into(), true)), "{name}");
                let any = [("zone", "\"CET\""), ("and", "\"more\"")];
                assert_eq!(calls_of(call("now", &any)), Some(("now".into(), true)), "{name}: it is not strict");
                for wrong in [&oslo("12")[..], &oslo("true"), &oslo("3")[..1], &[("town", "\"Oslo\"")], &[]] {
                    assert_eq!(call("weather", wrong), None, "{name}: {wrong:?}");
                }
                assert_eq!(call("wetter", &oslo("3")), None, "{name}: there is no such function");
                if is_open {
                    assert!(model.writer(&reading, &offered(true)).may_end(), "thoughts may be all there is");
                }
            }
        }
    }
}

#[test]
fn one_call_is_all_there_is_where_calls_are_not_parallel() {
    let model = Model::of_bytes();
    for (name, format) in CallFormat::NAMES {
        let reading = reading_of(format, None, false);
        let call = written(format, &model, "weather", &[("city", "\"Oslo\""), ("days", "3")]);
        assert!(said(&model, &reading, &offered(false), &call).is_some(), "{name}");
        assert!(said(&model, &reading, &offered(false), &format!("{call}{call}")).is_none(), "{name}");
    }
}

#[test]
fn whatever_is_written_beside_strict_functions_calls_nothing_but_by_their_schemas() {
    let mut n_calls = HashMap::new();
    for model in [Model::of_bytes(), Model::of_marks()] {
        for (name, format) in CallFormat::NAMES {
            let reading =
                reading_of(format, Some(ReasoningFormat::Think).filter(|_| format != CallFormat::Harmony), false);
            let call = written(format, &model, "weather", &[("city", "\"Oslo\""), ("days", "3")]);
            let wrong = written(format, &model, "weather", &[("days", "true")]);
            let (open, rest) = call.split_at(call.find("weather").unwrap());
            let words = [
                "{",
                "}",
                "[",
                "]",
                "\"name\": ",
                "weather",
                "(",
                "days=true",
                " functools [ {",
                "\n",
                "é",
                "; ",
                "to=functions.weather",
            ];
            let fragments: Vec<&str> = [&call, &wrong, open, rest, two_calls(format)]
                .into_iter()
                .chain(words)
                .chain(format.marks().iter().copied())
                .collect();
            for seed in 0..60 {
                let mut rng = StdRng::seed_from_u64(seed);
                let mut writer = model.writer(&reading, &offered(true));
                for _ in 0..8 {
                    writer.writes(fragments[rng.random_range(0..fragments.len())]);
                }
                let text = writer.text();
                let pieces = parse(&reading, [text.as_str()]);
                let chars: Vec<String> = text.chars().map(String::from).collect();
                assert_eq!(parse(&reading, chars.iter().map(String::as_str)), pieces, "{name}: {text}");
                *n_calls.entry(name).or_insert(0) += check_strictness(name, &text, &pieces);
            }
        }
    }
    assert!(CallFormat::NAMES.iter().all(|(name, _)| n_calls[name] >= 10), "{n_calls:?}");
}

/// Counts the whole calls of the strict function, of which none has other arguments than it may.
fn check_strictness(name: &str, text: &str, pieces: &[Piece]) -> u32 {
    let (mut function, mut arguments, mut n_calls) = ("", "", 0);
    for piece in pieces {
        match piece {
            Piece::Call { name: called, .. } => {
                assert!(called == "weather" || called == "now", "{name}: {called} in {text}");
                (function, arguments) = (called, "");
            }
            Piece::Arguments(json) => arguments = json,
            Piece::CallEnd if function == "weather" => {
                let value: Value =
                    serde_json::from_str(arguments).unwrap_or_else(|error| panic!("{name}: {error}: {text}"));
                let is_right = value["city"].is_string() && (1..=9).contains(&value["days"].as_i64().unwrap_or(0));
                assert!(is_right && value.as_object().unwrap().len() == 2, "{name}: {arguments} in {text}");
                n_calls += 1;
            }
            Piece::CallEnd | Piece::Text(_) | Piece::Reasoning(_) => {}
        }
    }
    n_calls
}

/// Text drawn at random from what a grammar allows over single bytes, and whether it ended.
fn drawn(constraint: &Constraint, seed: u64) -> (String, bool) {
    const END: u32 = 256;
    let (mut rng, mut matcher, mut bytes) = (StdRng::seed_from_u64(seed), constraint.0.matcher(), Vec::new());
    for _ in 0..800 {
        let mut mask = [0u32; 9];
        matcher.allow(&mut mask).unwrap();
        let allowed: Vec<u32> = (0..=END).filter(|token| mask[*token as usize / 32] >> (token % 32) & 1 == 1).collect();
        // Mostly what ends something: the answer, a thought or a text, a value.
        let favourite = [END, u32::from(b'"'), u32::from(b'}'), u32::from(b'<')]
            .into_iter()
            .find(|token| allowed.contains(token) && rng.random_range(0..4) > 0);
        let token = favourite.unwrap_or_else(|| allowed[rng.random_range(0..allowed.len())]);
        if token == END {
            return (String::from_utf8(bytes).unwrap(), true);
        }
        matcher.accept(token).unwrap();
        bytes.push(token as u8);
    }
    (String::from_utf8_lossy(&bytes).into_owned(), false)
}

#[test]
fn whatever_the_grammar_of_a_required_call_allows_is_read_as_calls_that_follow_their_schemas() {
    let compiler = GrammarCompiler::new(&Arc::new(Tokenizer::bytes()), &[256]).unwrap();
    let parameters = json!({"type": "object", "required": ["city", "days"], "additionalProperties": false, "properties": {
        "city": {"type": "string", "maxLength": 5}, "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["c", "f"]}}});
    let functions = vec![
        CallableFunction {
            name: "weather".into(),
            parameters: parameters.clone(),
            is_strict: false,
            param: "a".into(),
        },
        CallableFunction { name: "now".into(), parameters: Value::Null, is_strict: false, param: "b".into() },
    ];
    for (name, format) in CallFormat::NAMES {
        let schemas = ToolSchemas::new([("weather".to_owned(), parameters.clone())]);
        let reading = Reading { schemas: Arc::new(schemas), ..reading(Some(format), None) };
        let wanted =
            CallsWanted { functions: functions.clone(), is_required: true, are_parallel: true, is_narrowed: false };
        let grammar = answer_grammar(&reading, &wanted, None, &|_| None).unwrap();
        let (constraint, _) = compiler.compile(&grammar.spec).unwrap_or_else(|error| panic!("{name}: {error}"));
        let texts: Vec<(String, bool)> = (0..40).map(|seed| drawn(&constraint, seed)).collect();
        let n_ended = texts.iter().filter(|(_, ended)| *ended).count();
        assert!(n_ended > 3, "{name}: {n_ended} ended: {:?}", texts[0].0);
        for (text, _) in texts.into_iter().filter(|(_, ended)| *ended) {
            check_calls(name, &text, &parse(&reading, [text.as_str()]));
        }
    }
}

#[track_caller]
fn check_calls(name: &str, text: &str, pieces: &[Piece]) {
    let (mut function, mut n_calls) = ("", 0);
    for piece in pieces {
        match piece {
            Piece::Call { name, .. } => function = name,
            Piece::Arguments(json) => {
                let arguments: Value = serde_json::from_str(json).unwrap_or_else(|error| panic!("{error}: {text}"));
                match function {
                    "weather" => assert!(arguments["city"].is_string() && arguments["days"].is_i64(), "{name}: {text}"),
                    _ => assert_eq!(arguments, json!({}), "{name}: {text}"),
                }
            }
            Piece::CallEnd => n_calls += 1,
            Piece::Reasoning(_) => {}
            Piece::Text(said) => panic!("{name}: {said:?} of {text:?} is no call"),
        }
    }
    assert!(n_calls > 0 && pieces.last() == Some(&Piece::CallEnd), "{name}: {text}");
}
