//! Gemma 3 and Qwen3-Coder by their publishers' own chat templates and configs, in small and with random weights: they load, and call
//! tools. Qwen3-Coder's layout is Qwen3's, its dense twin.

use std::{fs, path::Path};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{
    agent::{Agent, chat},
    fetched::{fetched, skip::skip},
    layouts::{call_a_tool, lay, prompt, with_tools},
};

const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// Tools for Gemma, whose own template shows none: as its users put it beside that.
const TOOLS_FOR_GEMMA: &str = r#"{{- bos_token }}
{%- for message in messages %}
    {%- set role = 'model' if message.role == 'assistant' else 'user' %}
    {{- '<start_of_turn>' + role + '\n' }}
    {%- if loop.first %}{{- 'Tools: ' + (tools | tojson) + '\n' }}{%- endif %}
    {%- if message.role == 'tool' %}{{- '<tool_response>' + message.content + '</tool_response>' }}
    {%- elif message.tool_calls is defined %}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}</tool_call>' }}
        {%- endfor %}
    {%- else %}{{- message.content | trim }}{%- endif %}
    {{- '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}
"#;

/// A template as it is published; `None`, and it is said why, where there is no way to it.
fn published(test: &str, name: &str) -> Option<String> {
    let directory =
        fetched().inspect_err(|reason| skip(test, &format!("no chat templates from PyPI: {reason}"))).ok()?;
    Some(fs::read_to_string(directory.join(format!("{name}.jinja"))).unwrap())
}

/// What a publisher says of a model, at sizes for which a test has time. The vocabulary is ember's.
fn config(spec: &str, sizes: &Value) -> Value {
    let spec = Path::new(REPOSITORY).join("tests/goldens/specs").join(spec);
    let mut config: Value = serde_json::from_str(&fs::read_to_string(spec).unwrap()).unwrap();
    let small = json!({"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 2,
                       "num_key_value_heads": 1, "vocab_size": 4096, "bos_token_id": 1, "eos_token_id": 3});
    for sizes in [&small, sizes] {
        config.as_object_mut().unwrap().extend(sizes.as_object().unwrap().clone());
    }
    config
}

/// The tensors of a Qwen3 or a Gemma 3, whose blocks have norms behind their parts too.
fn tensors(config: &Value) -> Vec<(String, Vec<usize>)> {
    let size = |name: &str| config[name].as_u64().unwrap() as usize;
    let [hidden, inner, head] = ["hidden_size", "intermediate_size", "head_dim"].map(size);
    let [queries, keys] = ["num_attention_heads", "num_key_value_heads"].map(|heads| size(heads) * head);
    let is_gemma = config["architectures"][0] == "Gemma3ForCausalLM";
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_owned(), vec![size("vocab_size"), hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
    ];
    if !is_gemma {
        tensors.push(("lm_head.weight".to_owned(), vec![size("vocab_size"), hidden]));
    }
    for layer in 0..size("num_hidden_layers") {
        let mut parts = vec![
            ("input_layernorm", vec![hidden]),
            ("post_attention_layernorm", vec![hidden]),
            ("self_attn.q_proj", vec![queries, hidden]),
            ("self_attn.k_proj", vec![keys, hidden]),
            ("self_attn.v_proj", vec![keys, hidden]),
            ("self_attn.o_proj", vec![hidden, queries]),
            ("self_attn.q_norm", vec![head]),
            ("self_attn.k_norm", vec![head]),
            ("mlp.gate_proj", vec![inner, hidden]),
            ("mlp.up_proj", vec![inner, hidden]),
            ("mlp.down_proj", vec![hidden, inner]),
        ];
        if is_gemma {
            parts.extend(["pre_feedforward_layernorm", "post_feedforward_layernorm"].map(|norm| (norm, vec![hidden])));
        }
        tensors.extend(parts.into_iter().map(|(part, shape)| (format!("model.layers.{layer}.{part}.weight"), shape)));
    }
    tensors
}

/// Random numbers around nothing, the same each time.
fn weights(tensors: Vec<(String, Vec<usize>)>) -> Vec<u8> {
    let (mut header, mut data, mut state) = (serde_json::Map::new(), Vec::new(), 7u64);
    for (name, shape) in tensors {
        let begin = data.len();
        for _ in 0..shape.iter().product() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let value = (state >> 40) as f32 / (1u32 << 24) as f32 - 0.5;
            data.extend((value * 0.2).to_le_bytes());
        }
        header.insert(name, json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, data.len()]}));
    }
    let header = Value::Object(header).to_string();
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
}

fn checkpoint(config: &Value, files: &[(&str, &str)]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let path = |file: &str| folder.path().join(file);
    std::os::unix::fs::symlink(Path::new(REPOSITORY).join("models/ember/tokenizer.json"), path("tokenizer.json"))
        .unwrap();
    fs::write(path("model.safetensors"), weights(tensors(config))).unwrap();
    fs::write(path("config.json"), config.to_string()).unwrap();
    fs::write(path("tokenizer_config.json"), json!({"bos_token": "<|begin|>", "eos_token": "<|end|>"}).to_string())
        .unwrap();
    lay(folder.path(), files);
    folder
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn qwen3_coder_calls_a_tool_in_the_form_of_its_template() {
    const NAME: &str = "qwen3_coder_calls_a_tool_in_the_form_of_its_template";
    let Some(template) = published(NAME, "xinference-Qwen3-Coder") else { return };
    let config = config("qwen3-8b.json", &json!({"num_hidden_layers": 2}));
    let folder = checkpoint(&config, &[("chat_template.jinja", &template)]);
    let agent = Agent::of_folder(folder.path());
    let shown = prompt(&agent, with_tools(json!({}))).await;
    assert!(shown.contains("<function>\n<name>weather_of</name>") && shown.contains("<name>city</name>"), "{shown}");
    let (city, later) = call_a_tool(&agent).await;
    let called = format!(
        "<tool_call>\n<function=weather_of>\n<parameter=city>\n{city}\n</parameter>\n</function>\n</tool_call>"
    );
    assert!(later.contains(&called) && later.contains("<tool_response>\nrain\n</tool_response>"), "{later}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gemma_3_calls_a_tool_once_a_template_shows_it_tools() {
    const NAME: &str = "gemma_3_calls_a_tool_once_a_template_shows_it_tools";
    let Some(template) = published(NAME, "axolotl-gemma3") else { return };
    // Six layers see a window and one sees all, as its layers do.
    let config = config("gemma-3-1b.json", &json!({"num_hidden_layers": 7, "query_pre_attn_scalar": 32}));
    let own = ("chat_template.jinja", &*template);
    let folder = checkpoint(&config, &[own]);
    let agent = Agent::of_folder(folder.path());
    let plain = prompt(&agent, chat(json!({}))).await;
    assert_eq!(plain, "<|begin|><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n");
    let (status, answer) = agent.post("/v1/chat/completions", chat(json!({"max_tokens": 4}))).await;
    assert_eq!((status.as_u16(), &answer["usage"]["completion_tokens"]), (200, &json!(4)), "{answer}");
    let (status, refused) = agent.post("/v1/chat/completions", with_tools(json!({}))).await;
    assert_eq!((status.as_u16(), &refused["error"]["param"]), (400, &json!("tools")), "{refused}");

    let folder = checkpoint(&config, &[own, ("additional_chat_templates/tool_use.jinja", TOOLS_FOR_GEMMA)]);
    let agent = Agent::of_folder(folder.path());
    assert_eq!(prompt(&agent, chat(json!({}))).await, plain, "without tools its own template is rendered");
    let (city, later) = call_a_tool(&agent).await;
    let called = format!(
        "<start_of_turn>model\n<tool_call>{{\"name\": \"weather_of\", \"arguments\": {{\"city\": \"{city}\"}}}}</tool_call>"
    );
    assert!(later.contains(&called) && later.contains("<tool_response>rain</tool_response>"), "{later}");
}
