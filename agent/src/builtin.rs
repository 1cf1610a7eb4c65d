//! The models that travel inside this program. Reads no file at run time.

/// Files of one model: name and content.
pub type Files = &'static [(&'static str, &'static [u8])];

/// Name and files of every embedded model.
static MODELS: &[(&str, Files)] = include!(concat!(env!("OUT_DIR"), "/builtin_models.rs"));

/// The files of a model, if it is embedded.
pub fn files(name: &str) -> Option<(&'static str, Files)> {
    MODELS.iter().find(|(known, _)| *known == name).copied()
}

/// Names of the embedded models.
pub fn names() -> impl Iterator<Item = &'static str> {
    MODELS.iter().map(|(name, _)| *name)
}
