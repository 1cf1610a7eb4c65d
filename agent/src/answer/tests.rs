//! Every format, whole and in pieces. What the formats look like is the models' own chat templates' and model cards'.

mod grammars;

use serde_json::json;

use super::*;

fn reading(calls: Option<CallFormat>, reasoning: Option<ReasoningFormat>) -> Reading {
    let parameters = json!({"properties": {"city": {"type": "string"}, "days": {"type": "integer"},
                                           "code": {"type": "string"}}});
    let schemas = ToolSchemas::new(["weather", "f", "g"].map(|name| (name.to_owned(), parameters.clone())));
    Reading { calls, reasoning, reasoning_is_open: false, schemas: Arc::new(schemas) }
}

fn calls_in(format: CallFormat) -> Reading {
    reading(Some(format), None)
}

/// Neighbouring pieces of a kind as one.
fn joined(pieces: impl IntoIterator<Item = Piece>) -> Vec<Piece> {
    let mut joined: Vec<Piece> = Vec::new();
    for piece in pieces {
        match (joined.last_mut(), piece) {
            (Some(Piece::Text(last)), Piece::Text(text)) => last.push_str(&text),
            (Some(Piece::Reasoning(last)), Piece::Reasoning(text)) => last.push_str(&text),
            (Some(Piece::Arguments(last)), Piece::Arguments(text)) => last.push_str(&text),
            (_, piece) => joined.push(piece),
        }
    }
    joined
}

fn parse<'a>(reading: &Reading, chunks: impl IntoIterator<Item = &'a str>) -> Vec<Piece> {
    let mut parser = AnswerParser::new(reading);
    let mut pieces: Vec<Piece> = chunks.into_iter().flat_map(|chunk| parser.push(chunk)).collect();
    pieces.extend(parser.finish());
    joined(pieces)
}

/// The whole answer gives `expected`, and so do the ways to cut it in three, and one character at a time.
#[track_caller]
fn check(reading: &Reading, answer: &str, expected: &[Piece]) {
    assert_eq!(parse(reading, [answer]), expected, "whole: {answer}");
    let cuts: Vec<usize> = (0..=answer.len()).filter(|at| answer.is_char_boundary(*at)).collect();
    assert_eq!(parse(reading, cuts.windows(2).map(|cut| &answer[cut[0]..cut[1]])), expected, "by character: {answer}");
    // Two cuts anywhere in a short answer, near each other in a long one: marks are no longer than that.
    for first in &cuts {
        for second in cuts.iter().filter(|at| *at >= first && (answer.len() < 80 || **at - *first < 32)) {
            let chunks = [&answer[..*first], &answer[*first..*second], &answer[*second..]];
            assert_eq!(parse(reading, chunks), expected, "{chunks:?}");
        }
    }
}

fn text(text: &str) -> Piece {
    Piece::Text(text.into())
}

fn thought(text: &str) -> Piece {
    Piece::Reasoning(text.into())
}

fn begun(name: &str, arguments: &str) -> Vec<Piece> {
    let call = Piece::Call { name: name.into(), id: None };
    if arguments.is_empty() { vec![call] } else { vec![call, Piece::Arguments(arguments.into())] }
}

fn call(name: &str, arguments: &str) -> Vec<Piece> {
    [begun(name, arguments), vec![Piece::CallEnd]].concat()
}

const OSLO: &str = r#"{"city": "Oslo"}"#;

/// In every format: an answer that calls twice, first without arguments, and what it says beside.
fn two_calls(format: CallFormat) -> &'static str {
    match format {
        CallFormat::Hermes => {
            "Let me see.\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>\n\
                               <tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>"
        }
        CallFormat::QwenCoder => {
            "Let me see.\n<tool_call>\n<function=now>\n</function>\n</tool_call>\n<tool_call>\n\
                                  <function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
        }
        CallFormat::Glm => {
            "Let me see.\n<tool_call>now</tool_call>\n<tool_call>weather\n<arg_key>city</arg_key>\n\
                            <arg_value>Oslo</arg_value>\n</tool_call>"
        }
        CallFormat::Llama => {
            "{\"name\": \"now\", \"parameters\": {}}; {\"name\": \"weather\", \
                              \"parameters\": {\"city\": \"Oslo\"}}"
        }
        CallFormat::Mistral => "Let me see.[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]weather[ARGS]{\"city\": \"Oslo\"}",
        CallFormat::DeepSeek => {
            "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n\
                                 ```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"city\": \"Oslo\"}\
                                 <｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        }
        CallFormat::Harmony => {
            "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant to=functions.now\
                                <|channel|>commentary json<|message|><|call|><|start|>assistant<|channel|>commentary \
                                to=functions.weather <|constrain|>json<|message|>{\"city\": \"Oslo\"}<|call|>"
        }
        CallFormat::Phi4Mini => {
            "Let me see.<|tool_call|>[{\"name\": \"now\", \"arguments\": {}}, {\"name\": \"weather\", \
                                 \"arguments\": {\"city\": \"Oslo\"}}]<|/tool_call|>"
        }
        CallFormat::Granite => {
            "Let me see.<|tool_call|>[{\"arguments\": {}, \"name\": \"now\"}, {\"name\": \"weather\", \
                                \"arguments\": {\"city\": \"Oslo\"}}]"
        }
        CallFormat::Kimi => {
            "Let me see.<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0\
                             <|tool_call_argument_begin|>{}<|tool_call_end|><|tool_call_begin|>functions.weather:1\
                             <|tool_call_argument_begin|>{\"city\": \"Oslo\"}<|tool_call_end|><|tool_calls_section_end|>"
        }
        CallFormat::Pythonic => "Let me see.<|tool_call_start|>[now(), weather(city='Oslo')]<|tool_call_end|>",
    }
}

#[test]
fn arguments_after_an_empty_call_arrive_in_every_format_and_every_split() {
    for (name, format) in CallFormat::NAMES {
        let said = if format == CallFormat::Llama { vec![] } else { vec![text("Let me see.")] };
        let mut expected = [said, call("now", "{}"), call("weather", OSLO)].concat();
        if format == CallFormat::Kimi {
            let ids = ["functions.now:0", "functions.weather:1"].map(|id| Some(id.to_owned()));
            let calls = expected.iter_mut().filter_map(|piece| match piece {
                Piece::Call { id, .. } => Some(id),
                _ => None,
            });
            calls.zip(ids).for_each(|(id, given)| *id = given);
        }
        println!("{name}");
        check(&calls_in(format), two_calls(format), &expected);
    }
}

#[test]
fn a_call_cut_off_by_the_end_of_the_context_is_never_complete() {
    for (name, format) in CallFormat::NAMES {
        let answer = two_calls(format);
        let whole = parse(&calls_in(format), [answer]);
        let n_complete = |pieces: &[Piece]| pieces.iter().filter(|piece| **piece == Piece::CallEnd).count();
        let arguments_end = answer.rfind("Oslo").unwrap() + 4;
        for cut in (0..arguments_end).filter(|at| answer.is_char_boundary(*at)) {
            let pieces = parse(&calls_in(format), [&answer[..cut]]);
            assert!(n_complete(&pieces) < n_complete(&whole), "{name}: {pieces:?}");
            let complete = pieces.iter().rposition(|piece| *piece == Piece::CallEnd).map_or(0, |at| at + 1);
            for piece in &pieces[..complete] {
                if let Piece::Arguments(json) = piece {
                    assert!(serde_json::from_str::<serde_json::Value>(json).is_ok(), "{name}: {json}");
                }
            }
        }
    }
}

#[test]
fn long_arguments_stream_before_the_call_ends() {
    for format in [CallFormat::Hermes, CallFormat::QwenCoder, CallFormat::Glm, CallFormat::Kimi, CallFormat::Harmony] {
        let answer = two_calls(format);
        let cut = answer.rfind("slo").unwrap();
        let mut parser = AnswerParser::new(&calls_in(format));
        let pieces = joined(parser.push(&answer[..cut]));
        assert_eq!(pieces.last(), Some(&Piece::Arguments(r#"{"city": "O"#.into())), "{format:?}");
    }
}

#[test]
fn hermes_calls_are_taken_out_of_the_text_around_them() {
    let hermes = calls_in(CallFormat::Hermes);
    let answer = r#"é<tool<tool_call>{"name": "f", "arguments": {"x": "</tool"}}</tool_call><tool_call>{"name": "g"}</tool_call> Done.<"#;
    let expected = [vec![text("é<tool")], call("f", r#"{"x": "</tool"}"#), call("g", "{}"), vec![text("Done.<")]];
    check(&hermes, answer, &expected.concat());
    check(&hermes, r#"<tool_call>{"name": "f", "arguments": "{\"x\": 1}"}"#, &call("f", r#"{"x": 1}"#));
    check(&hermes, r#"<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>"#, &call("f", r#"{"a": 1}"#));
    check(&hermes, r#"<tool_call>{"type": "function", "function": {"name": "f"}}"#, &call("f", "{}"));
    let beside = r#"<tool_call>{"name": "f", "arguments": {}, "id": "x}"}</tool_call>"#;
    check(&hermes, beside, &call("f", "{}"));
}

#[test]
fn what_is_not_a_call_stays_text() {
    let answers = [
        (CallFormat::Hermes, "<tool_call>not json</tool_call>"),
        (CallFormat::Hermes, "<tool_call>{\"arguments\": {}}</tool_call>"),
        (CallFormat::Hermes, "a < b <tool_cal"),
        (CallFormat::Hermes, "<tool_call>{\"name\": \"f\""),
        (CallFormat::Llama, "{\"a\": 1} is JSON"),
        (CallFormat::Llama, "  Hello {\"name\": \"f\", \"parameters\": {}}"),
        (CallFormat::Llama, "[1, 2] and [f](x)"),
        (CallFormat::Mistral, "[TOOL_CALLS] are marked so"),
        (CallFormat::Mistral, "a [TOOL_"),
        (CallFormat::DeepSeek, "a <｜tool▁call▁begin｜> b {c}"),
        (CallFormat::Kimi, "a <|tool_call_begin|>"),
        (CallFormat::Phi4Mini, "functools is a module of Python"),
        (CallFormat::QwenCoder, "<tool_call>\nnothing"),
        (CallFormat::QwenCoder, "<function=a b>"),
        (CallFormat::Glm, "<tool_call>{\"name\": 1}</tool_call>"),
        (CallFormat::Pythonic, "<|tool_call_start|>[f(1)]<|tool_call_end|>"),
        (CallFormat::Pythonic, "<|tool_call_start|>nothing"),
        (CallFormat::Harmony, "no channel at all"),
    ];
    for (format, answer) in answers {
        check(&calls_in(format), answer, &[text(answer)]);
    }
}

#[test]
fn every_form_that_mistral_ever_wrote_is_read() {
    let mistral = calls_in(CallFormat::Mistral);
    check(&mistral, r#"[TOOL_CALLS][{"name": "f", "arguments": {"x": [1]}}]"#, &call("f", r#"{"x": [1]}"#));
    check(&mistral, r#"[TOOL_CALLS] {"name": "f", "arguments": {}}"#, &call("f", "{}"));
    check(&mistral, r#"[TOOL_CALLS]f{"x": 1}"#, &call("f", r#"{"x": 1}"#));
    let with_id = [Piece::Call { name: "f".into(), id: Some("abcdefghi".into()) }, Piece::Arguments("{}".into())];
    check(&mistral, "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}", &[&with_id[..], &[Piece::CallEnd]].concat());
}

#[test]
fn llama_writes_json_or_python() {
    let llama = calls_in(CallFormat::Llama);
    let python = "[weather(city=\"Oslo\", days=3), f(x=[1, -2.5], y={'a': None, 'b': (True,)}, z='it\\'s')]";
    let second = r#"{"x": [1, -2.5], "y": {"a": null, "b": [true]}, "z": "it's"}"#;
    check(&llama, python, &[call("weather", r#"{"city": "Oslo", "days": 3}"#), call("f", second)].concat());
    let tagged = r#"<|python_tag|>{"type": "function", "name": "f", "parameters": {"x": 1}}"#;
    check(&llama, tagged, &call("f", r#"{"x": 1}"#));
}

#[test]
fn values_between_tags_become_what_the_schema_says() {
    let coder = calls_in(CallFormat::QwenCoder);
    let answer = "<tool_call>\n<function=f>\n<parameter=city>\n123\n</parameter>\n<parameter=days>\n3\n</parameter>\n\
                  <parameter=code>\nif a < b:\n    print(\"x\")\n\n</parameter>\n<parameter=other>\n{'k': True}\n\
                  </parameter>\n</function>\n</tool_call>\nDone.";
    let arguments = r#"{"city": "123", "days": 3, "code": "if a < b:\n    print(\"x\")\n", "other": {"k": true}}"#;
    check(&coder, answer, &[call("f", arguments), vec![text("Done.")]].concat());
    check(&coder, "<function=f><parameter=city>Oslo</parameter></function>", &call("f", OSLO));
    let glm = calls_in(CallFormat::Glm);
    let answer = "<tool_call>f<arg_key>days</arg_key><arg_value>3</arg_value><arg_key>x</arg_key>\
                  <arg_value>a b</arg_value></tool_call>";
    check(&glm, answer, &call("f", r#"{"days": 3, "x": "a b"}"#));
}

#[test]
fn harmony_tells_thoughts_calls_and_text_apart() {
    let harmony = reading(Some(CallFormat::Harmony), Some(ReasoningFormat::Harmony));
    let answer = "<|channel|>analysis<|message|>User asks for <tool_call>.<|end|><|start|>assistant<|channel|>final\
                  <|message|>It is 7 °C.<|return|>";
    check(&harmony, answer, &[thought("User asks for <tool_call>."), text("It is 7 °C.")]);
    check(&harmony, "<|channel|>analysis<|message|>Hm", &[thought("Hm")]);
    check(
        &harmony,
        "<|channel|>final<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
        &[text("a\n\nb")],
    );
}

#[test]
fn think_blocks_are_reasoning_wherever_they_begin() {
    let think = reading(None, Some(ReasoningFormat::Think));
    check(&think, "<think>\nHm, é.\n</think>\n\nHello. ", &[thought("Hm, é."), text("Hello. ")]);
    check(&think, " \n<think>a</think>b<think>c</think>", &[thought("a"), text("b<think>c</think>")]);
    check(&think, "No thoughts </think>", &[text("No thoughts </think>")]);
    check(&think, "<think>never ends </thin", &[thought("never ends </thin")]);
    check(&think, "<thi", &[text("<thi")]);
    check(&think, "<think>\n\n</think>\n\nHello", &[text("Hello")]);
    let open = Reading { reasoning_is_open: true, ..think };
    check(&open, "Hm.\n</think>\n\nHello.", &[thought("Hm."), text("Hello.")]);
    check(&open, "<think>\nHm.</think>Hello.", &[thought("Hm."), text("Hello.")]);
    check(&open, "cut off", &[thought("cut off")]);
}

#[test]
fn tools_together_with_thinking_and_a_call_inside_a_thought() {
    for (_, format) in CallFormat::NAMES.into_iter().filter(|(_, format)| *format != CallFormat::Harmony) {
        let both = reading(Some(format), Some(ReasoningFormat::Think));
        let calls = two_calls(format);
        let after = parse(&calls_in(format), [calls]);
        let answer = format!("<think>I could say {calls}, or not.</think>\n{calls}");
        let expected = [vec![thought(&format!("I could say {calls}, or not."))], after].concat();
        assert_eq!(parse(&both, [answer.as_str()]), expected);
        let chars: Vec<String> = answer.chars().map(String::from).collect();
        assert_eq!(parse(&both, chars.iter().map(String::as_str)), expected);
    }
}

#[test]
fn random_pieces_of_random_marks_are_the_same_in_every_split() {
    use rand::{RngExt, SeedableRng, rngs::StdRng};
    let mut rng = StdRng::seed_from_u64(15);
    let fragments = [
        "{",
        "}",
        "\"name\": \"f\"",
        "\"arguments\": ",
        "[",
        "]",
        ", ",
        "\n",
        " ",
        "é",
        "x",
        "f(a=1)",
        "\"",
        ">",
        "```",
    ];
    for (name, format) in CallFormat::NAMES {
        let marks: Vec<&str> =
            format.marks().iter().chain(&fragments).copied().chain(["<think>", "</think>"]).collect();
        let reading = reading(Some(format), Some(ReasoningFormat::Think));
        for _ in 0..400 {
            let answer: String =
                (0..rng.random_range(1..14)).map(|_| marks[rng.random_range(0..marks.len())]).collect();
            let whole = parse(&reading, [answer.as_str()]);
            let chars: Vec<String> = answer.chars().map(String::from).collect();
            for size in 1..4 {
                let chunks: Vec<String> = chars.chunks(size).map(<[String]>::concat).collect();
                assert_eq!(parse(&reading, chunks.iter().map(String::as_str)), whole, "{name}, {size}: {answer}");
            }
        }
    }
}

#[test]
fn the_format_is_recognised_from_the_template() {
    for (template, expected) in [
        ("{{ '<tool_call>\\n{\"name\": \"' }}", Some(CallFormat::Hermes)),
        ("<tool_call>\\n<function=example><parameter=x>", Some(CallFormat::QwenCoder)),
        ("<tool_call>{{ name }}<arg_key>{{ k }}</arg_key><arg_value>", Some(CallFormat::Glm)),
        ("{\"name\": function name, \"parameters\": dictionary of argument name", Some(CallFormat::Llama)),
        ("{{ '[TOOL_CALLS]' }}", Some(CallFormat::Mistral)),
        ("{{'<｜tool▁calls▁begin｜>'}}", Some(CallFormat::DeepSeek)),
        ("<|channel|>analysis", Some(CallFormat::Harmony)),
        ("{{ messages }}", None),
    ] {
        assert_eq!(CallFormat::of_template(template), expected, "{template}");
    }
    assert_eq!(ReasoningFormat::of_template("x.split('</think>')"), Some(ReasoningFormat::Think));
    assert!(ReasoningFormat::Think.is_open_in("<|im_start|>assistant\n<think>\n"));
    assert!(!ReasoningFormat::Think.is_open_in("<think>\n\n</think>\n\n"));
}
