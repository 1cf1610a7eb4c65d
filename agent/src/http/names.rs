//! A quick look at JSON for names that an object has twice. Long texts are passed over by whole vectors of bytes, so that it costs next to
//! nothing where a prompt is long; what it finds is then read with care. Knows nothing of what the names mean.

use std::{borrow::Cow, collections::BTreeSet};

use memchr::memchr2;

/// Deeper values are read with care, whatever is in them.
const DEPTH_MAX: usize = 100;

/// False when no object in `json`, which must be JSON, has a name twice.
pub(crate) fn may_be_there_twice(json: &str) -> bool {
    let bytes = json.as_bytes();
    let mut open: Vec<Option<BTreeSet<Cow<'_, str>>>> = Vec::new();
    let (mut at, mut names_follow) = (0, false);
    while let Some(byte) = bytes.get(at) {
        match byte {
            b'{' | b'[' if open.len() == DEPTH_MAX => return true,
            b'{' | b'[' => {
                names_follow = *byte == b'{';
                open.push(names_follow.then(BTreeSet::new));
            }
            b'}' | b']' => drop(open.pop()),
            b',' => names_follow = matches!(open.last(), Some(Some(_))),
            b'"' => {
                let end = end_of_text(bytes, at);
                if std::mem::take(&mut names_follow)
                    && let Some(Some(names)) = open.last_mut()
                    && !name(&json[at..end]).is_some_and(|name| names.insert(name))
                {
                    return true;
                }
                at = end;
                continue;
            }
            _ => {}
        }
        at += 1;
    }
    false
}

/// Behind the closing quote of the text that begins at `begin`.
fn end_of_text(bytes: &[u8], begin: usize) -> usize {
    let mut at = begin + 1;
    while let Some(found) = bytes.get(at..).and_then(|rest| memchr2(b'"', b'\\', rest)) {
        match bytes[at + found] {
            b'"' => return at + found + 1,
            _ => at += found + 2,
        }
    }
    bytes.len()
}

/// What a name in quotes says.
fn name(quoted: &str) -> Option<Cow<'_, str>> {
    match quoted.strip_prefix('"')?.strip_suffix('"')? {
        plain if !plain.contains('\\') => Some(Cow::Borrowed(plain)),
        _ => serde_json::from_str(quoted).ok().map(Cow::Owned),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;
    use crate::http::json_object::NamesOnce;

    #[test]
    fn names_are_counted_in_each_object_by_itself() {
        for (json, twice) in [
            (r#"{"a": 1, "b": {"a": 2}, "c": [{"a": 3}, {"a": 4}]}"#, false),
            (r#"{"a": "a", "b": ["a", "a", "b"], "c": "\"a\": , \\"}"#, false),
            (r#"["a", "a", {}, [], {"": 1}]"#, false),
            (r#"{"a": [{"b": 1}, 2], "a": 3}"#, true),
            (r#"[[{"x": {"b": 1, "\u0062": 2}}]]"#, true),
            (r#"{"a\\": 1, "a\\\"": 2, "a": 3}"#, false),
            (r#"{"é": 1, "\u00e9": 2}"#, true),
            ("12", false),
        ] {
            assert_eq!(may_be_there_twice(json), twice, "{json}");
        }
        assert!(may_be_there_twice(&format!("{}{}", "[".repeat(101), "]".repeat(101))), "too deep for a quick look");
    }

    fn json() -> impl Strategy<Value = String> {
        let leaf = prop_oneof![
            any::<String>().prop_map(|text| Value::from(text).to_string()),
            any::<i32>().prop_map(|number| number.to_string()),
            Just("null".to_owned()),
        ];
        leaf.prop_recursive(4, 24, 4, |inner| {
            let name =
                prop_oneof![Just(r#""a""#), Just(r#""\u0061""#), Just(r#""b\"""#), Just(r#""{""#), Just(r#""""#)];
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(|items| format!("[{}]", items.join(" , "))),
                prop::collection::vec((name, inner), 0..4).prop_map(|members| {
                    let members: Vec<String> = members.iter().map(|(name, value)| format!("{name} :{value}")).collect();
                    format!("{{ {} }}", members.join(","))
                }),
            ]
        })
    }

    proptest! {
        #[test]
        fn the_quick_look_finds_what_reading_finds(json in json()) {
            let read = serde_json::from_str::<NamesOnce>(&json);
            prop_assert_eq!(may_be_there_twice(&json), read.is_err(), "{}", json);
        }
    }
}
