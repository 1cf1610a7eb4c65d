//! Reads of a JSON body what routing needs, in one pass and without building it: top-level strings and flags, and where the parts
//! lie that a prompt is made of. Looks into no value but those.
//!
//! The agent reads the same bytes and judges them whole, so this is only as strict as it must be for both to see the same request: the
//! body is one object, its keys are told by what they mean however they are escaped, and none of those that count is there twice.

use std::{borrow::Cow, ops::Range};

use memchr::memchr2;
use thiserror::Error;

/// What a request says that decides where it goes.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Facts<'a> {
    /// Name of the model.
    pub model: Option<Cow<'a, str>>,
    /// Whether the answer is streamed.
    pub stream: bool,
    /// What the client says that belongs together: `prompt_cache_key`, or else `user`.
    pub session: Option<Cow<'a, str>>,
    /// Where it stands among others: smaller is sooner.
    pub priority: Option<i32>,
    /// Milliseconds within which it should begin, if it says so. The agent judges them: what is no such number says nothing here.
    pub begins_within_ms: Option<u32>,
    /// Tokens of its answer at most, if it says so. The agent judges it: here it is a guess of what the request takes.
    pub max_tokens: Option<u32>,
    /// Whether it goes on with a response that one replica keeps: `previous_response_id` is there.
    pub follows: bool,
    /// Where the parts of the prompt lie that come before messages, in the order of [`PARTS`].
    parts: [Option<Range<usize>>; PARTS.len()],
}

/// Fields that the prompt is made of, in the order in which chat templates write them: what is shared by many comes first.
const PARTS: [&str; 6] = ["system", "instructions", "tools", "messages", "prompt", "input"];

/// Why a body cannot be routed.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
pub enum ScanError {
    /// Not one JSON object.
    #[error("the body is not a JSON object: {what} at byte {at}")]
    Malformed {
        /// What is wrong.
        what: &'static str,
        /// Where.
        at: usize,
    },
    /// A field is there twice: two readers could take different ones.
    #[error("`{field}` is there twice: send it once")]
    Twice {
        /// Which one.
        field: &'static str,
    },
    /// A field that routing needs has another type.
    #[error("`{field}` must be a {wanted}")]
    WrongType {
        /// Which one.
        field: &'static str,
        /// What it must be.
        wanted: &'static str,
    },
}

impl<'a> Facts<'a> {
    /// Reads a body.
    pub fn scan(body: &'a [u8]) -> Result<Self, ScanError> {
        let mut scanner = Scanner { body, at: 0 };
        let facts = scanner.object()?;
        scanner.space();
        if scanner.at < body.len() { Err(scanner.malformed("something follows the object")) } else { Ok(facts) }
    }

    /// The text of the prompt as it lies in the body, part by part.
    pub fn prompt(&self, body: &'a [u8]) -> Vec<&'a [u8]> {
        self.parts.iter().flatten().map(|range| &body[range.clone()]).collect()
    }
}

/// What a value is kept as.
enum Kept<'a> {
    Text(Cow<'a, str>),
    Flag(bool),
    Null,
    Other,
}

struct Scanner<'a> {
    body: &'a [u8],
    at: usize,
}

impl<'a> Scanner<'a> {
    fn object(&mut self) -> Result<Facts<'a>, ScanError> {
        let mut facts = Facts::default();
        let mut seen = [false; 7];
        let mut user = None;
        self.space();
        self.expect(b'{', "it does not begin with {")?;
        self.space();
        if self.take(b'}') {
            return Ok(facts);
        }
        loop {
            self.space();
            let key = self.string("a key must be a string")?;
            self.space();
            self.expect(b':', "a key has no value")?;
            self.space();
            match &*key {
                "model" => facts.model = self.text("model", &mut seen[0])?,
                "user" => user = self.text("user", &mut seen[1])?,
                "prompt_cache_key" => facts.session = self.text("prompt_cache_key", &mut seen[2])?,
                "previous_response_id" => facts.follows = self.text("previous_response_id", &mut seen[4])?.is_some(),
                "priority" => facts.priority = self.priority(&mut seen[5])?,
                "deadline_ms" => facts.begins_within_ms = self.deadline(&mut seen[6])?,
                "max_tokens" | "max_completion_tokens" | "max_output_tokens" => facts.max_tokens = self.guess()?,
                "stream" => facts.stream = self.flag("stream", &mut seen[3])?,
                key => self.part(key, &mut facts)?,
            }
            self.space();
            if self.take(b'}') {
                break;
            }
            self.expect(b',', "neither , nor } follows a value")?;
        }
        facts.session = facts.session.or(user);
        Ok(facts)
    }

    fn text(&mut self, field: &'static str, seen: &mut bool) -> Result<Option<Cow<'a, str>>, ScanError> {
        match self.once(field, seen)? {
            Kept::Text(text) => Ok(Some(text)),
            Kept::Null => Ok(None),
            _ => Err(ScanError::WrongType { field, wanted: "string" }),
        }
    }

    fn flag(&mut self, field: &'static str, seen: &mut bool) -> Result<bool, ScanError> {
        match self.once(field, seen)? {
            Kept::Flag(flag) => Ok(flag),
            Kept::Null => Ok(false),
            _ => Err(ScanError::WrongType { field, wanted: "boolean" }),
        }
    }

    fn priority(&mut self, seen: &mut bool) -> Result<Option<i32>, ScanError> {
        if std::mem::replace(seen, true) {
            return Err(ScanError::Twice { field: "priority" });
        }
        match self.number()? {
            Some("null") => Ok(None),
            Some(number) if let Ok(number) = number.parse() => Ok(Some(number)),
            _ => Err(ScanError::WrongType { field: "priority", wanted: "32-bit integer" }),
        }
    }

    fn deadline(&mut self, seen: &mut bool) -> Result<Option<u32>, ScanError> {
        if std::mem::replace(seen, true) {
            return Err(ScanError::Twice { field: "deadline_ms" });
        }
        self.guess()
    }

    fn guess(&mut self) -> Result<Option<u32>, ScanError> {
        Ok(self.number()?.and_then(|number| number.parse().ok()))
    }

    /// The text of a value that is no string.
    fn number(&mut self) -> Result<Option<&'a str>, ScanError> {
        let range = self.value()?;
        Ok(str::from_utf8(&self.body[range]).ok())
    }

    fn once(&mut self, field: &'static str, seen: &mut bool) -> Result<Kept<'a>, ScanError> {
        if std::mem::replace(seen, true) {
            return Err(ScanError::Twice { field });
        }
        match self.peek() {
            Some(b'"') => Ok(Kept::Text(self.string("a string has no end")?)),
            _ => {
                let range = self.value()?;
                Ok(match &self.body[range] {
                    b"true" => Kept::Flag(true),
                    b"false" => Kept::Flag(false),
                    b"null" => Kept::Null,
                    _ => Kept::Other,
                })
            }
        }
    }

    /// Passes over a value, and keeps where it lies if a prompt is made of it.
    fn part(&mut self, key: &str, facts: &mut Facts<'a>) -> Result<(), ScanError> {
        let range = self.value()?;
        let Some(place) = PARTS.iter().position(|part| *part == key) else { return Ok(()) };
        match facts.parts[place].replace(range) {
            Some(_) => Err(ScanError::Twice { field: PARTS[place] }),
            None => Ok(()),
        }
    }

    /// Passes over one value of any kind. Brackets are only counted: which closes which is the agent's to judge.
    fn value(&mut self) -> Result<Range<usize>, ScanError> {
        let begin = self.at;
        let mut depth = 0u32;
        loop {
            match self.peek() {
                Some(b'"') => self.pass_string()?,
                Some(b'{' | b'[') => {
                    depth += 1;
                    self.at += 1;
                }
                Some(b'}' | b']') if depth > 0 => {
                    depth -= 1;
                    self.at += 1;
                }
                Some(b',' | b':' | b' ' | b'\n' | b'\r' | b'\t') if depth > 0 => self.at += 1,
                Some(byte) if is_of_a_word(byte) => self.pass_word(),
                Some(_) => return Err(self.malformed("no value begins like this")),
                None => return Err(self.malformed("it ends in a value")),
            }
            if depth == 0 {
                return Ok(begin..self.at);
            }
        }
    }

    fn pass_word(&mut self) {
        let rest = &self.body[self.at..];
        self.at += rest.iter().position(|byte| !is_of_a_word(*byte)).unwrap_or(rest.len());
    }

    /// Passes over a string; its quotes included.
    fn pass_string(&mut self) -> Result<(), ScanError> {
        self.at += 1;
        loop {
            let Some(found) = memchr2(b'"', b'\\', &self.body[self.at.min(self.body.len())..]) else {
                self.at = self.body.len();
                return Err(self.malformed("a string has no end"));
            };
            self.at += found + 1;
            if self.body[self.at - 1] == b'"' {
                return Ok(());
            }
            // Whatever is escaped is one byte or begins with one that is no quote.
            self.at += 1;
        }
    }

    fn string(&mut self, what: &'static str) -> Result<Cow<'a, str>, ScanError> {
        if self.peek() != Some(b'"') {
            return Err(self.malformed(what));
        }
        let begin = self.at;
        self.pass_string()?;
        let quoted = &self.body[begin..self.at];
        let inside = &quoted[1..quoted.len() - 1];
        let bad = |what| ScanError::Malformed { what, at: begin };
        if inside.iter().all(|byte| !matches!(byte, b'\\' | 0..0x20)) {
            return std::str::from_utf8(inside).map(Cow::Borrowed).map_err(|_| bad("a string is not UTF-8"));
        }
        serde_json::from_slice::<String>(quoted).map(Cow::Owned).map_err(|_| bad("a string is not well formed"))
    }

    fn space(&mut self) {
        let rest = &self.body[self.at..];
        let is_space = |byte: &u8| matches!(byte, b' ' | b'\n' | b'\r' | b'\t');
        self.at += rest.iter().position(|byte| !is_space(byte)).unwrap_or(rest.len());
    }

    fn peek(&self) -> Option<u8> {
        self.body.get(self.at).copied()
    }

    fn take(&mut self, byte: u8) -> bool {
        let is_there = self.peek() == Some(byte);
        self.at += usize::from(is_there);
        is_there
    }

    fn expect(&mut self, byte: u8, what: &'static str) -> Result<(), ScanError> {
        if self.take(byte) { Ok(()) } else { Err(self.malformed(what)) }
    }

    fn malformed(&self, what: &'static str) -> ScanError {
        ScanError::Malformed { what, at: self.at }
    }
}

/// Of a number, `true`, `false` or `null`.
fn is_of_a_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'+' | b'.')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn model(body: &str) -> Result<Option<String>, ScanError> {
        Facts::scan(body.as_bytes()).map(|facts| facts.model.map(Cow::into_owned))
    }

    #[test]
    fn the_models_name_is_found_however_it_is_written() {
        for body in [
            r#"{"model":"a"}"#,
            " { \"model\"\n:\t\"a\" } \r\n",
            r#"{"x":{"model":"b"},"model":"a","y":[{"model":"c"}]}"#,
            r#"{"\u006dodel":"\u0061"}"#,
            r#"{"x":"\"model\":\"b\"","model":"a"}"#,
            r#"{"x":"\\","model":"a"}"#,
            r#"{"x":"{[","y":-1.5e+3,"z":null,"model":"a","w":[[],{}]}"#,
        ] {
            assert_eq!(model(body), Ok(Some("a".to_owned())), "{body}");
        }
        for body in ["{}", r#"{"model":null}"#, r#"{"Model":"a"}"#, r#"{"x":{"model":"a"}}"#] {
            assert_eq!(model(body), Ok(None), "{body}");
        }
    }

    #[test]
    fn what_two_readers_could_read_differently_is_refused() {
        for (body, field) in [
            (r#"{"model":"a","model":"b"}"#, "model"),
            (r#"{"model":null,"mode\u006c":"b"}"#, "model"),
            (r#"{"stream":true,"stream":false}"#, "stream"),
            (r#"{"messages":[],"messages":[1]}"#, "messages"),
        ] {
            assert_eq!(Facts::scan(body.as_bytes()), Err(ScanError::Twice { field }), "{body}");
        }
        for (body, field) in
            [(r#"{"model":7}"#, "model"), (r#"{"stream":"yes"}"#, "stream"), (r#"{"user":{}}"#, "user")]
        {
            let refused = Facts::scan(body.as_bytes());
            assert!(matches!(refused, Err(ScanError::WrongType { field: of, .. }) if of == field), "{body}");
        }
    }

    #[test]
    fn what_is_no_object_is_refused_where_it_breaks() {
        for (body, at) in [
            ("", 0),
            ("[]", 0),
            ("{", 1),
            (r#"{"model"}"#, 8),
            (r#"{"model":}"#, 9),
            (r#"{"model":"a"#, 11),
            (r#"{"model":"a\"#, 11),
            (r#"{"model":"a" "b":1}"#, 13),
            (r#"{"a":[1,2"#, 9),
            (r#"{"a":1}}"#, 7),
            (r#"{a:1}"#, 1),
            ("{\"model\":\"\u{1}\"}", 9),
            (r#"{"model":"\ud800"}"#, 9),
            (r#"{"a":'x'}"#, 5),
        ] {
            match Facts::scan(body.as_bytes()) {
                Err(ScanError::Malformed { at: found, .. }) => assert!(found.abs_diff(at) <= 2, "{body}: at {found}"),
                other => panic!("{body}: {other:?}"),
            }
        }
        assert!(matches!(Facts::scan(b"{\"model\":\"\xff\"}"), Err(ScanError::Malformed { at: 9, .. })));
    }

    #[test]
    fn the_prompt_is_its_parts_in_the_order_of_templates() {
        let body = br#"{"messages":[{"role":"user"}],"tools":[1],"max_tokens":5,"system":"S"}"#;
        let facts = Facts::scan(body).unwrap();
        let parts: [&[u8]; 3] = [br#""S""#, b"[1]", br#"[{"role":"user"}]"#];
        assert_eq!(facts.prompt(body), parts);
    }

    #[test]
    fn a_session_is_what_the_client_says() {
        let session = |body: &'static str| Facts::scan(body.as_bytes()).unwrap().session;
        assert_eq!(session(r#"{"user":"u"}"#).as_deref(), Some("u"));
        assert_eq!(session(r#"{"prompt_cache_key":"k","user":"u"}"#).as_deref(), Some("k"));
        assert_eq!(session("{}"), None);
    }

    #[test]
    fn a_priority_is_a_number_that_is_there_once_and_tokens_of_an_answer_are_a_guess() {
        let facts = |body: &'static str| Facts::scan(body.as_bytes()).map(|facts| (facts.priority, facts.max_tokens));
        assert_eq!(facts(r#"{"priority":-7,"max_tokens": 12}"#), Ok((Some(-7), Some(12))));
        assert_eq!(facts(r#"{"priority":null,"max_completion_tokens":3}"#), Ok((None, Some(3))));
        assert_eq!(facts(r#"{"max_tokens":"many","max_output_tokens":-1}"#), Ok((None, None)), "the agent judges it");
        let wrong = Err(ScanError::WrongType { field: "priority", wanted: "32-bit integer" });
        for body in [r#"{"priority":0.5}"#, r#"{"priority":"1"}"#, r#"{"priority":2147483648}"#, r#"{"priority":[1]}"#]
        {
            assert_eq!(facts(body), wrong, "{body}");
        }
        assert_eq!(facts(r#"{"priority":5,"priority":-5}"#), Err(ScanError::Twice { field: "priority" }));
    }

    #[test]
    fn a_deadline_is_there_once_and_the_agent_judges_it() {
        let facts = |body: &'static str| Facts::scan(body.as_bytes()).map(|facts| facts.begins_within_ms);
        assert_eq!(facts(r#"{"deadline_ms":250}"#), Ok(Some(250)));
        for body in [r#"{"deadline_ms":null}"#, r#"{"deadline_ms":-1}"#, r#"{"deadline_ms":"1"}"#, "{}"] {
            assert_eq!(facts(body), Ok(None), "{body}");
        }
        assert_eq!(facts(r#"{"deadline_ms":5,"deadline_ms":9}"#), Err(ScanError::Twice { field: "deadline_ms" }));
    }

    #[test]
    fn what_follows_a_kept_response_is_known() {
        let follows = |body: &str| Facts::scan(body.as_bytes()).unwrap().follows;
        assert!(follows(r#"{"previous_response_id":"resp_1"}"#) && !follows(r#"{"previous_response_id":null}"#));
    }

    #[test]
    fn a_million_brackets_are_counted_not_followed() {
        let nested = format!("{{\"x\":{}{},\"model\":\"a\"}}", "[".repeat(1_000_000), "]".repeat(1_000_000));
        assert_eq!(model(&nested), Ok(Some("a".to_owned())));
    }

    fn values() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            ".*".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                prop::collection::hash_map(".*", inner, 0..6).prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn any_json_reads_as_serde_reads_it(x in values(), messages in values(), name in ".*", stream: bool, pretty: bool) {
            let body = json!({"a": x, "messages": messages, "model": name, "stream": stream, "z": x});
            let text = if pretty { serde_json::to_vec_pretty(&body) } else { serde_json::to_vec(&body) }.unwrap();
            let facts = Facts::scan(&text).unwrap();
            prop_assert_eq!(facts.model.as_deref(), Some(name.as_str()));
            prop_assert_eq!(facts.stream, stream);
            let prompt = facts.prompt(&text);
            let read: Value = serde_json::from_slice(&text).unwrap();
            prop_assert_eq!(&serde_json::from_slice::<Value>(prompt[0]).unwrap(), &read["messages"]);
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Facts::scan(&bytes);
        }

        #[test]
        fn cut_or_changed_json_never_panics(x in values(), cut in 0..500usize, byte: u8) {
            let mut text = serde_json::to_vec(&json!({"a": x, "model": "m", "messages": [x]})).unwrap();
            let at = cut % text.len();
            text[at] = byte;
            let _ = Facts::scan(&text);
            prop_assert!(Facts::scan(&text[..at]).is_err());
        }

        #[test]
        fn what_serde_reads_is_never_refused_as_malformed(text in r#"[ \n]{0,2}\{("[a-c\\\\n]{0,3}":(1|"x"|\[\{\}\]),?){0,3}\}"#) {
            if serde_json::from_str::<serde_json::Map<String, Value>>(&text).is_ok() {
                prop_assert!(Facts::scan(text.as_bytes()).is_ok(), "{}", text);
            }
        }
    }
}
