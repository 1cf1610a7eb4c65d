//! The models that travel inside this program. Reads no file at run time.

/// Files of one model: name and content.
pub type Files = &'static [(&'static str, &'static [u8])];

/// Name and files of every embedded model.
static MODELS: &[(&str, Files)] = &[("ember", EMBER)];

static EMBER: Files = &[
    ("chat_template.jinja", include_bytes!("../../models/ember/chat_template.jinja")),
    ("config.json", include_bytes!("../../models/ember/config.json")),
    ("generation_config.json", include_bytes!("../../models/ember/generation_config.json")),
    ("model.safetensors", include_bytes!("../../models/ember/model.safetensors")),
    ("tokenizer.json", include_bytes!("../../models/ember/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../../models/ember/tokenizer_config.json")),
];

/// The files of a model, if it is embedded.
pub fn files(name: &str) -> Option<(&'static str, Files)> {
    MODELS.iter().find(|(known, _)| *known == name).copied()
}

/// Names of the embedded models.
pub fn names() -> impl Iterator<Item = &'static str> {
    MODELS.iter().map(|(name, _)| *name)
}
