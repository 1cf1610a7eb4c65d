//! Finds prompts that cannot fit the context while they are still JSON of a body, and refuses them: of eight megabytes some kilobytes are read, and
//! nothing is copied. Knows where texts of a prompt are in its field, and no template.

use std::{borrow::Cow, sync::Arc};

use memchr::memchr;
use stoker_engine::{EncodeLimit, SLICE_BYTES};

use crate::{
    http::{
        error::ApiError,
        fields::Fields,
        generate::{self, Encoding},
        json_walk::{DEPTH_MAX, Step, Walk, said},
        prompt_work,
    },
    replica::Served,
};

/// What the field of a prompt holds.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Held {
    /// Messages that become one prompt.
    Messages,
    /// A prompt or a list of them, of which each has the context for itself.
    Prompts,
}

/// Refuses what `field` says if it cannot fit. What it lets pass may still be too long with what a template adds, or because it has few
/// bytes for a token.
pub(crate) async fn refuse(
    fields: &Fields,
    field: &str,
    held: Held,
    served: &Arc<Served>,
    encoding: Encoding,
) -> Result<(), ApiError> {
    let max_tokens = generate::max_tokens_read(served, encoding);
    let Some(json) = fields.json(field).filter(|json| !EncodeLimit::is_likely_within(json.len(), max_tokens)) else {
        return Ok(());
    };
    let served = Arc::clone(served);
    let counted = prompt_work::run(json.len(), move |is_abandoned| {
        let json = std::str::from_utf8(&json).expect("the body is UTF-8 and values end at its characters");
        let texts = held.texts(json);
        let n_together = if held == Held::Messages { texts.len().max(1) } else { 1 };
        texts.chunks(n_together).try_for_each(|prompt| {
            let n_bytes = prompt.iter().map(|text| text.len()).sum();
            let slices = prompt.iter().flat_map(|text| slices(text));
            generate::refuse_too_many(&served, n_bytes, slices, encoding, is_abandoned)
        })
    });
    // The field that the client knows.
    counted.await.map_err(|error| ApiError { param: error.param.as_ref().map(|_| field.to_owned()), ..error })
}

impl Held {
    /// Texts of prompts in a field's value, in quotes.
    fn texts(self, json: &str) -> Vec<&str> {
        let mut texts = Vec::new();
        // Names of what is open, where it has one, and of the value that comes.
        let (mut open, mut name): (Vec<Option<Cow<'_, str>>>, _) = (Vec::new(), None);
        for step in Walk::through(json) {
            match step {
                Step::Opened { .. } if open.len() == DEPTH_MAX => break,
                Step::Opened { .. } => open.push(name.take()),
                Step::Closed => drop((open.pop(), name.take())),
                Step::Name(quoted) => name = said(quoted),
                Step::Text(text) => {
                    let name = name.take();
                    let path: Vec<&str> = open.iter().chain([&name]).flatten().map(Cow::as_ref).collect();
                    texts.extend(self.is_read(&path).then_some(text));
                }
            }
        }
        texts
    }

    /// Whether the text that stands below these names becomes a part of a prompt.
    fn is_read(self, path: &[&str]) -> bool {
        match self {
            Self::Messages => matches!(path, ["content" | "refusal"] | ["content", "text" | "refusal"]),
            Self::Prompts => path.is_empty(),
        }
    }
}

/// What a text in quotes says, in slices. One that cannot be read says nothing: it is refused where all of it is.
fn slices(quoted: &str) -> impl Iterator<Item = Cow<'_, str>> {
    let mut rest = quoted.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or_default();
    std::iter::from_fn(move || {
        let (slice, behind) = rest.split_at(slice_end(rest));
        rest = behind;
        (!slice.is_empty()).then(|| match slice.contains('\\') {
            true => serde_json::from_str(&format!("\"{slice}\"")).map_or(Cow::Borrowed(""), Cow::Owned),
            false => Cow::Borrowed(slice),
        })
    })
}

/// Where the first slice of a text ends, which cuts no character in two, escaped or not.
fn slice_end(text: &str) -> usize {
    let bytes = &text.as_bytes()[..text.len().min(SLICE_BYTES)];
    let mut at = 0;
    while let Some(found) = bytes.get(at..).and_then(|rest| memchr(b'\\', rest)) {
        at += found + escape_len(&text.as_bytes()[at + found..]);
    }
    at.max(text.floor_char_boundary(SLICE_BYTES)).min(text.len())
}

/// Bytes of the escaped character that `bytes` begin with. One beyond the first 65,536 is two, a high and a low surrogate.
fn escape_len(bytes: &[u8]) -> usize {
    match bytes {
        [_, b'u', b'd' | b'D', b'8' | b'9' | b'a' | b'b' | b'A' | b'B', _, _, b'\\', b'u', ..] => 12,
        [_, b'u', ..] => 6,
        _ => 2,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn texts_of_a_prompt_are_told_from_what_nobody_reads() {
        let messages = r#"[{"role": "user", "content": "a"}, {"cont\u0065nt": ["b", {"type": "text", "text": "c\""}], "n": 1, "name": "x"},
            {"content": [{"type": "image_url", "image_url": {"url": "x", "text": "x"}}, {"refusal": "d"}], "refusal": "e", "text": "x"},
            {"annotations": [{"content": "x"}], "tool_calls": [{"function": {"arguments": "x"}}], "content": null}, "x"]"#;
        assert_eq!(Held::Messages.texts(messages), [r#""a""#, r#""b""#, r#""c\"""#, r#""d""#, r#""e""#]);
        assert_eq!(Held::Prompts.texts(r#""a""#), [r#""a""#]);
        assert_eq!(Held::Prompts.texts(r#"["a", "b", 3]"#), [r#""a""#, r#""b""#]);
        assert!(Held::Prompts.texts(r#"[[1, 2], {"text": "x"}]"#).is_empty());
    }

    #[test]
    fn nothing_is_looked_for_in_what_is_deeper_than_any_request() {
        let deep = |n_levels: usize| format!(r#"["a", {}"b"{}, "c"]"#, "[".repeat(n_levels), "]".repeat(n_levels));
        assert_eq!(Held::Prompts.texts(&deep(DEPTH_MAX - 1)).len(), 3);
        assert_eq!(Held::Prompts.texts(&deep(DEPTH_MAX)), [r#""a""#]);
    }

    proptest! {
        #[test]
        fn slices_add_up_to_what_is_said(parts in prop::collection::vec(("[a-z\"\\\\\n é🔥]{0,9}", 0..600usize, any::<bool>()), 0..9)) {
            let (mut text, mut quoted) = (String::new(), String::from('"'));
            for (part, times, is_ascii) in parts {
                let part = part.repeat(times);
                let json = serde_json::to_string(&part).unwrap();
                let units = |c: char| c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04X}")).collect::<String>();
                let escaped = |c: char| if c.is_ascii() || !is_ascii { c.to_string() } else { units(c) };
                quoted.extend(json[1..json.len() - 1].chars().map(escaped));
                text += &part;
            }
            quoted.push('"');
            let slices: Vec<Cow<'_, str>> = slices(&quoted).collect();
            prop_assert!(slices.iter().all(|slice| slice.len() <= SLICE_BYTES + 12));
            prop_assert_eq!(slices.concat(), text);
        }
    }

    #[test]
    fn what_is_no_text_says_nothing() {
        assert!(slices(r#""\ud800""#).all(|slice| slice.is_empty()));
        assert_eq!(slices(r#""\ud83d"#).count(), 0);
    }
}
