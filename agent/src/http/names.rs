//! A quick look at JSON for names that an object has twice: what it finds is then read with care. Knows nothing of what the names mean.

use std::{borrow::Cow, collections::BTreeSet};

use crate::http::json_walk::{DEPTH_MAX, Step, Walk, said};

/// False when no object in `json`, which must be JSON, has a name twice.
pub(crate) fn may_be_there_twice(json: &str) -> bool {
    let mut open: Vec<BTreeSet<Cow<'_, str>>> = Vec::new();
    Walk::through(json).any(|step| match step {
        Step::Opened { .. } if open.len() == DEPTH_MAX => true,
        Step::Opened { .. } => {
            open.push(BTreeSet::new());
            false
        }
        Step::Closed => {
            open.pop();
            false
        }
        Step::Name(name) => !open.last_mut().is_some_and(|names| said(name).is_some_and(|name| names.insert(name))),
        Step::Text(_) => false,
    })
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
