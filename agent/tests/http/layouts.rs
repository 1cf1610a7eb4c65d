//! Checkpoints whose files lie as a publisher ships them: they load, show the model its tools, and call them.

use std::{fs, path::Path};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::agent::{Agent, chat};

const EMBER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/ember");
/// ChatML, as Hermes-3's default template.
const CHAT_ML: &str = "{{bos_token}}{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + \
                       '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
/// In the form of its `tool_use` template: macros, namespaces, definitions between `<tools>`, results between `<tool_response>`.
const TOOL_USE: &str = r#"{%- macro kind(param) -%}{{ param.type if param.type is defined else 'any' }}{%- endmacro -%}
{{- bos_token }}
{{- '<|im_start|>system\n' }}
{{- "You are a function calling AI model. Here are the available tools: <tools> " }}
{%- for tool in tools %}
    {%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}
    {{- '{"type": "function", "function": {"name": "' + tool.name + '", "description": "' + tool.name + '(' }}
    {%- for name, param in tool.parameters.properties|items %}
        {{- name + ': ' + kind(param) }}{%- if not loop.last %}{{- ", " }}{%- endif %}
    {%- endfor %}
    {{- ')", "parameters": ' + (tool.parameters | tojson) + '}}' }}
{%- endfor %}
{{- " </tools>\nFor each call return a json object within <tool_call></tool_call>:\n<tool_call>\n" }}
{{- '{"name": <function-name>, "arguments": <args-dict>}\n</tool_call><|im_end|>\n' }}
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {{- '<|im_start|>tool\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- elif message.role == "assistant" and message.tool_calls is defined %}
        {{- '<|im_start|>assistant' }}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' + call.arguments|tojson + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"#;

/// What Hermes-3-Llama-3.1-8B says of itself beside ember's sizes; by these angles ember's weights say nothing, as random ones do.
fn hermes_config() -> Value {
    let mut config: Value =
        serde_json::from_str(&fs::read_to_string(Path::new(EMBER).join("config.json")).unwrap()).unwrap();
    let hermes = json!({
        "rope_theta": 500_000.0, "pretraining_tp": 1, "transformers_version": "4.42.4",
        "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    });
    config.as_object_mut().unwrap().extend(hermes.as_object().unwrap().clone());
    config
}

/// Ember's weights and tokenizer under Hermes' files; `settings` are added to `tokenizer_config.json`.
fn checkpoint(settings: Value, files: &[(&str, &str)]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let path = |file: &str| folder.path().join(file);
    for file in ["model.safetensors", "tokenizer.json"] {
        std::os::unix::fs::symlink(Path::new(EMBER).join(file), path(file)).unwrap();
    }
    fs::write(path("config.json"), hermes_config().to_string()).unwrap();
    let mut of_tokenizer =
        json!({"bos_token": "<|begin|>", "eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"});
    of_tokenizer.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
    fs::write(path("tokenizer_config.json"), of_tokenizer.to_string()).unwrap();
    lay(folder.path(), files);
    folder
}

/// Writes these files, in folders of the folder where they are said to be.
pub(crate) fn lay(folder: &Path, files: &[(&str, &str)]) {
    for (file, text) in files {
        let path = folder.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
}

pub(crate) fn with_tools(extra: Value) -> Value {
    let parameters = json!({"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"],
                            "additionalProperties": false});
    let tool = json!({"type": "function", "function": {"name": "weather_of", "parameters": parameters}});
    let mut body = chat(json!({"tools": [tool]}));
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

/// The prompt that a chat request becomes.
pub(crate) async fn prompt(agent: &Agent, body: Value) -> String {
    let (status, tokenized) = agent.post("/tokenize", body).await;
    assert_eq!(status, 200, "{tokenized}");
    let (_, text) = agent.post("/detokenize", json!({"tokens": tokenized["tokens"]})).await;
    text["prompt"].as_str().unwrap().to_owned()
}

/// Has a tool called; the city that it was called with, and the prompt in which its result is shown.
pub(crate) async fn call_a_tool(agent: &Agent) -> (String, String) {
    let body = with_tools(json!({"tool_choice": "required", "parallel_tool_calls": false, "seed": 1}));
    let (status, answer) = agent.post("/v1/chat/completions", body).await;
    assert_eq!((status.as_u16(), &answer["choices"][0]["finish_reason"]), (200, &json!("tool_calls")), "{answer}");
    let message = answer["choices"][0]["message"].clone();
    let call = &message["tool_calls"][0]["function"];
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
    let city = arguments["city"].as_str().unwrap().to_owned();
    assert!(call["name"] == "weather_of" && ["Oslo", "Rome"].contains(&&*city), "{call}");
    let result = json!({"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"});
    let turns = json!([{"role": "user", "content": "hi"}, message, result]);
    (city, prompt(agent, with_tools(json!({"messages": turns}))).await)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hermes_3_calls_tools_by_the_template_it_is_shipped_with_for_them_in_either_layout() {
    let list = json!({"chat_template": [
        {"name": "default", "template": CHAT_ML}, {"name": "tool_use", "template": TOOL_USE}]});
    let files = [("chat_template.jinja", CHAT_ML), ("additional_chat_templates/tool_use.jinja", TOOL_USE)];
    for folder in [checkpoint(list, &[]), checkpoint(json!({}), &files)] {
        let agent = Agent::of_folder(folder.path());
        let plain = prompt(&agent, chat(json!({}))).await;
        assert_eq!(plain, "<|begin|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
        let shown = prompt(&agent, with_tools(json!({}))).await;
        assert!(shown.contains("<tools> {\"type\": \"function\", \"function\": {\"name\": \"weather_of\""), "{shown}");
        assert!(shown.contains("weather_of(city: any)") && shown.ends_with("<|im_start|>assistant\n"), "{shown}");

        let (city, later) = call_a_tool(&agent).await;
        let called =
            format!("<tool_call>\n{{\"name\": \"weather_of\", \"arguments\": {{\"city\": \"{city}\"}}}}\n</tool_call>");
        assert!(later.contains(&called) && later.contains("<tool_response>\nrain\n</tool_response>"), "{later}");
    }
}
