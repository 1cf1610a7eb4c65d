//! Calls written as JSON objects: `{"name": "f", "arguments": {…}}`, keys in any order, `parameters` for `arguments`,
//! wrapped in `function` or not. The head is read as soon as it is certain, so that long arguments stream.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::marks::JsonSpan;

/// What the beginning of an object says.
#[derive(Debug, PartialEq)]
pub(super) enum Head {
    /// More text is needed.
    Wait,
    /// It is a call, and its arguments are an object that begins at this byte.
    Call { name: String, arguments_at: usize },
    /// It is a call, known to its end.
    Whole { name: String, arguments: String, end: usize },
    /// It is no call.
    NotACall,
}

#[derive(Deserialize)]
struct WrittenCall<'a> {
    name: Option<String>,
    #[serde(borrow, alias = "parameters")]
    arguments: Option<&'a RawValue>,
    #[serde(borrow)]
    function: Option<WrittenFunction<'a>>,
}

#[derive(Deserialize)]
struct WrittenFunction<'a> {
    name: String,
    #[serde(borrow, alias = "parameters")]
    arguments: Option<&'a RawValue>,
}

/// Reads the object that `text` begins with.
pub(super) fn head(text: &str) -> Head {
    let mut keys = Keys { text, at: 0 };
    match keys.read() {
        Ok(head) => head,
        Err(Stop::Ended) => Head::Wait,
        Err(Stop::Wrong) => Head::NotACall,
    }
}

/// Why reading stopped.
enum Stop {
    Ended,
    Wrong,
}

struct Keys<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Keys<'a> {
    fn read(&mut self) -> Result<Head, Stop> {
        self.expect(b'{')?;
        let mut name = None;
        loop {
            if self.peek()? == b'}' {
                return Ok(whole(&self.text[..self.at + 1]));
            }
            let key = self.string()?;
            self.expect(b':')?;
            let is_arguments = key == "arguments" || key == "parameters";
            if let (Some(name), true, b'{') = (&name, is_arguments, self.peek()?) {
                return Ok(Head::Call { name: String::clone(name), arguments_at: self.at });
            }
            let value = self.value()?;
            if key == "name" {
                name = Some(serde_json::from_str::<String>(value).map_err(|_| Stop::Wrong)?);
            }
            match self.peek()? {
                b',' => self.at += 1,
                b'}' => {}
                _ => return Err(Stop::Wrong),
            }
        }
    }

    /// The next byte that is no white space.
    fn peek(&mut self) -> Result<u8, Stop> {
        let rest = &self.text[self.at..];
        self.at += rest.len() - rest.trim_ascii_start().len();
        self.text.as_bytes().get(self.at).copied().ok_or(Stop::Ended)
    }

    fn expect(&mut self, byte: u8) -> Result<(), Stop> {
        if self.peek()? != byte {
            return Err(Stop::Wrong);
        }
        self.at += 1;
        Ok(())
    }

    fn string(&mut self) -> Result<String, Stop> {
        if self.peek()? != b'"' {
            return Err(Stop::Wrong);
        }
        serde_json::from_str(self.value()?).map_err(|_| Stop::Wrong)
    }

    fn value(&mut self) -> Result<&'a str, Stop> {
        let first = self.peek()?;
        let rest = &self.text[self.at..];
        let len = match first {
            b'{' | b'[' | b'"' => JsonSpan::default().end_in(rest),
            _ => rest.find([',', '}', ']']),
        };
        let value = &rest[..len.ok_or(Stop::Ended)?];
        self.at += value.len();
        Ok(value)
    }
}

fn whole(object: &str) -> Head {
    let Ok(written) = serde_json::from_str::<WrittenCall<'_>>(object) else { return Head::NotACall };
    let call = match written {
        WrittenCall { name: Some(name), arguments, .. } => WrittenFunction { name, arguments },
        WrittenCall { function: Some(function), .. } => function,
        WrittenCall { .. } => return Head::NotACall,
    };
    Head::Whole { name: call.name, arguments: arguments_text(call.arguments), end: object.len() }
}

/// Some models write the arguments as a JSON string that holds JSON, some `null` for none.
fn arguments_text(arguments: Option<&RawValue>) -> String {
    match arguments.map_or("null", RawValue::get) {
        "null" => "{}".to_owned(),
        raw => serde_json::from_str::<String>(raw).unwrap_or_else(|_| raw.to_owned()),
    }
}
