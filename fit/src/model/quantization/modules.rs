//! Which modules of a model an entry of `quantization_config` means. Dialects write them in their own ways; each way is read
//! as the library reads it that made it. Whoever is meant by mistake is found out later: his tensors are others.

use fancy_regex::Regex;

use crate::model::ModelError;

/// Some modules, by their names.
#[derive(Clone, Debug, Default)]
pub(super) struct Modules(Vec<Entry>);

#[derive(Clone, Debug)]
enum Entry {
    /// All matrices that are multiplied with.
    All,
    /// The module of that name.
    Named(String),
    /// Names that the pattern matches from their beginning.
    Matching(Box<Regex>),
    /// Names that end so.
    Ending(String),
}

/// How a list of modules is written.
#[derive(Clone, Copy, Debug)]
pub(super) enum Writing {
    /// A class, a whole name, or `re:` and a pattern.
    CompressedTensors,
    /// A name's beginning or end, or a pattern up to a dot.
    Transformers,
    /// A pattern.
    Pattern,
}

impl Modules {
    /// Every one.
    pub(super) fn all() -> Self {
        Self(vec![Entry::All])
    }

    /// Those of a list; a pattern that is none is refused by `refuse`.
    pub(super) fn of(
        list: &[&str],
        writing: Writing,
        refuse: impl Fn(String) -> ModelError,
    ) -> Result<Self, ModelError> {
        let pattern = |pattern: &str| match Regex::new(pattern) {
            Ok(pattern) => Ok(Entry::Matching(Box::new(pattern))),
            Err(reason) => Err(refuse(format!("has {pattern:?}, which is no pattern: {reason}"))),
        };
        let mut entries = Vec::new();
        for entry in list {
            match (writing, entry.strip_prefix("re:")) {
                (Writing::CompressedTensors, Some(text)) => entries.push(pattern(&format!("^(?:{text})"))?),
                (Writing::CompressedTensors, None) if *entry == "Linear" => entries.push(Entry::All),
                (Writing::CompressedTensors, None) => entries.push(Entry::Named((*entry).into())),
                (Writing::Transformers, _) => {
                    entries.push(pattern(&format!(r"^(?:{entry})(?:(?<=\.)|(?=\.|$))"))?);
                    entries.push(Entry::Ending((*entry).into()));
                }
                (Writing::Pattern, _) => entries.push(pattern(&format!("^(?:{entry})"))?),
            }
        }
        Ok(Self(entries))
    }

    /// Those of both lists.
    pub(super) fn and(mut self, other: Self) -> Self {
        self.0.extend(other.0);
        self
    }

    /// Whether a module is among them.
    pub(super) fn contains(&self, module: &str) -> bool {
        self.0.iter().any(|entry| match entry {
            Entry::All => true,
            Entry::Named(name) => name == module,
            // A pattern that takes too long matches nothing; the tensors would say so.
            Entry::Matching(pattern) => pattern.is_match(module).unwrap_or(false),
            Entry::Ending(end) => module.ends_with(end.as_str()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn modules(entry: &str, writing: Writing) -> Modules {
        Modules::of(&[entry], writing, |problem| panic!("{problem}")).unwrap()
    }

    #[test]
    fn entries_mean_what_their_library_takes_them_for() {
        let down = "model.layers.1.mlp.down_proj";
        for (entry, writing, expected) in [
            ("Linear", Writing::CompressedTensors, true),
            (down, Writing::CompressedTensors, true),
            ("model.layers.1", Writing::CompressedTensors, false),
            ("re:.*down_proj$", Writing::CompressedTensors, true),
            ("re:down_proj", Writing::CompressedTensors, false),
            ("re:(?!.*mlp).*", Writing::CompressedTensors, false),
            ("model.layers.1", Writing::Transformers, true),
            ("model.layers.1.mlp.down", Writing::Transformers, false),
            ("model.layers.*.mlp", Writing::Transformers, true),
            ("down_proj", Writing::Transformers, true),
            ("up_proj", Writing::Transformers, false),
            ("down_proj", Writing::Pattern, false),
            (r".*\.1\..*down", Writing::Pattern, true),
        ] {
            assert_eq!(modules(entry, writing).contains(down), expected, "{entry:?} as {writing:?}");
        }
        assert!(modules("model.layers.1", Writing::Transformers).contains("model.layers.1.self_attn.q_proj"));
        assert!(!modules("model.layers.1", Writing::Transformers).contains("model.layers.11.self_attn.q_proj"));
    }

    #[test]
    fn what_is_no_pattern_is_refused() {
        let refuse = |problem| ModelError::Field { file: "f".into(), field: "ignore".into(), problem };
        let text = Modules::of(&["re:(a"], Writing::CompressedTensors, refuse).unwrap_err().to_string();
        assert!(text.starts_with("f: field `ignore` has \"^(?:(a)\", which is no pattern"), "{text}");
    }
}
