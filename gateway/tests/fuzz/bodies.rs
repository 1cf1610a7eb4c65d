//! Bodies of requests: whatever serde reads as one object is read alike, but what two readers could read differently.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, Visitor},
};
use serde_json::{Value, json};
use stoker_gateway::scan::{Facts, ScanError};

use crate::{every_input, mutate::Corpus};

/// An object with all its fields, also those that are there twice.
struct Pairs(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Pairs;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Pairs(pairs))
            }
        }
        deserializer.deserialize_map(Object)
    }
}

impl Pairs {
    fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Value> {
        self.0.iter().filter(move |(field, _)| field == name).map(|(_, value)| value)
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let messages = json!([{"role": "system", "content": "Be \"brief\".\n\\"}, {"role": "user", "content": "Grüße \u{1F600} \u{1}"}]);
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"model": {}}}}});
    let bodies = [
        json!({"model": "chat", "messages": messages, "stream": true, "max_tokens": 12, "seed": 3, "temperature": 0.5e-3}),
        json!({"messages": messages, "tools": [tool], "model": "a\u{0}b", "priority": -7, "user": "u", "stream": false}),
        json!({"model": "chat", "prompt": ["one", "two"], "prompt_cache_key": "k", "max_completion_tokens": 1e3}),
        json!({"model": "chat", "prompt": [1, 2, 3], "stream": null, "logprobs": 2}),
        json!({"model": "chat", "input": "Hi", "previous_response_id": "resp_1", "max_output_tokens": 5, "store": true}),
        json!({"model": "chat", "system": "S", "messages": messages, "max_tokens": 100, "metadata": {"user_id": "x"}}),
        json!({}),
    ];
    let plain = bodies.iter().map(|body| serde_json::to_vec(body).unwrap());
    plain.chain(bodies.iter().map(|body| serde_json::to_vec_pretty(body).unwrap())).collect()
}

const WORDS: &[&[u8]] = &[
    b"\"model\":",
    b"\"mode\\u006c\":",
    b"\"stream\":true,",
    b"\"messages\":[],",
    b"\\ud800",
    b"\\ud83d\\ude00",
    b"\\\"",
    b"\\",
    b"null",
    b"true",
    b"-0",
    b"1e999",
    b"[[[[",
    b"]]]]",
    b"{}",
    b",",
    b"\xef\xbb\xbf",
    b"\xc3\x28",
    b"\"priority\":2147483648,",
];

/// Whether it was read.
fn check(body: &[u8]) -> bool {
    let facts = Facts::scan(body);
    let Ok(pairs) = serde_json::from_slice::<Pairs>(body) else { return facts.is_ok() };
    let facts = match facts {
        Ok(facts) => facts,
        Err(ScanError::Twice { field }) => return assert_twice(&pairs, field),
        Err(ScanError::WrongType { field, .. }) => {
            assert!(pairs.all(field).any(|value| !value.is_null()), "{field}: {body:?}");
            return false;
        }
        Err(error @ ScanError::Malformed { .. }) => {
            panic!("serde reads it: {error}: {}", String::from_utf8_lossy(body))
        }
    };
    let only = |name: &'static str| pairs.all(name).last().cloned().unwrap_or_default();
    assert_eq!(facts.model.as_deref(), only("model").as_str(), "{}", String::from_utf8_lossy(body));
    assert_eq!(facts.stream, only("stream").as_bool().unwrap_or(false));
    assert_eq!(facts.follows, only("previous_response_id").is_string());
    assert_eq!(facts.priority.map(f64::from), only("priority").as_f64());
    for part in facts.prompt(body) {
        let read: Value = serde_json::from_slice(part).unwrap();
        assert!(pairs.0.iter().any(|(_, value)| *value == read), "no field is {read}");
    }
    true
}

fn assert_twice(pairs: &Pairs, field: &str) -> bool {
    assert!(pairs.all(field).count() > 1, "{field} is there once");
    false
}

#[test]
fn bodies_read_as_serde_reads_them() {
    let seeds = seeds();
    let corpus = Corpus { seeds: &seeds, words: WORDS };
    every_input("bodies", 1, |number| check(&corpus.input(number).0));
}
