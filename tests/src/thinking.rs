//! A model that thinks before it answers, made of ember.

use std::path::Path;

use anyhow::{Result, ensure};

/// ember with a template that opens a thought in front of every answer, and repeats those of earlier ones.
pub fn thinking_ember(to: &Path) -> Result<()> {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/ember");
    for file in
        ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    {
        std::os::unix::fs::symlink(from.join(file).canonicalize()?, to.join(file))?;
    }
    let plain = std::fs::read_to_string(from.join("chat_template.jinja"))?;
    let (thought, prompt) = ("{%- if message.content -%}", "{{- '<|assistant|>' -}}");
    ensure!(plain.contains(thought) && plain.contains(prompt), "its template is another one");
    let repeats =
        "{%- if message.reasoning_content -%}{{- '<think>' + message.reasoning_content + '</think>' -}}{%- endif -%}";
    let thinks = plain.replace(thought, &format!("{repeats}{thought}"));
    std::fs::write(to.join("chat_template.jinja"), thinks.replace(prompt, "{{- '<|assistant|><think>' -}}"))?;
    Ok(())
}
