//! A walk through JSON that was read before, or whose reading follows: objects, arrays, names and texts in their order. Texts are passed over by whole
//! vectors of bytes, so that a walk costs next to nothing where a prompt is long. Knows nothing of what the names mean.

use std::borrow::Cow;

use memchr::memchr;

/// A walk is for values that are no deeper: they are read with care, or refused where they are read. Every level is kept, of which eight megabytes of
/// brackets have millions.
pub(crate) const DEPTH_MAX: usize = 100;

/// What a walk comes to. Names and texts are in quotes, as they were sent; numbers, truths and `null` are passed over.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Step<'a> {
    /// An array or an object begins.
    Opened {
        /// It is an object.
        has_names: bool,
    },
    /// What was opened last ends.
    Closed,
    /// Of an object's member.
    Name(&'a str),
    /// A value.
    Text(&'a str),
}

/// Through text that must be JSON: of other text the steps are some or other.
pub(crate) struct Walk<'a> {
    json: &'a str,
    at: usize,
    /// Of everything that is open, whether it is an object.
    open: Vec<bool>,
    is_name_next: bool,
}

impl<'a> Walk<'a> {
    pub(crate) fn through(json: &'a str) -> Self {
        Self { json, at: 0, open: Vec::new(), is_name_next: false }
    }

    fn quoted(&mut self) -> &'a str {
        let begin = self.at;
        self.at = end_of_text(self.json.as_bytes(), begin);
        &self.json[begin..self.at]
    }
}

impl<'a> Iterator for Walk<'a> {
    type Item = Step<'a>;

    fn next(&mut self) -> Option<Step<'a>> {
        loop {
            let byte = *self.json.as_bytes().get(self.at)?;
            match byte {
                b'"' if std::mem::take(&mut self.is_name_next) => return Some(Step::Name(self.quoted())),
                b'"' => return Some(Step::Text(self.quoted())),
                _ => self.at += 1,
            }
            match byte {
                b'{' | b'[' => {
                    let has_names = byte == b'{';
                    self.open.push(has_names);
                    self.is_name_next = has_names;
                    return Some(Step::Opened { has_names });
                }
                b'}' | b']' => {
                    self.open.pop();
                    return Some(Step::Closed);
                }
                b',' => self.is_name_next = self.open.last() == Some(&true),
                _ => {}
            }
        }
    }
}

/// Behind the closing quote of the text that begins at `begin`: the first one that is not escaped, which it is by an odd number of backslashes. Escapes
/// are frequent in long texts, quotes are not.
fn end_of_text(bytes: &[u8], begin: usize) -> usize {
    let mut at = begin + 1;
    while let Some(found) = bytes.get(at..).and_then(|rest| memchr(b'"', rest)) {
        let n_backslashes = bytes[at..at + found].iter().rev().take_while(|byte| **byte == b'\\').count();
        at += found + 1;
        if n_backslashes.is_multiple_of(2) {
            return at;
        }
    }
    bytes.len()
}

/// What a short text in quotes says.
pub(crate) fn said(quoted: &str) -> Option<Cow<'_, str>> {
    match quoted.strip_prefix('"')?.strip_suffix('"')? {
        plain if !plain.contains('\\') => Some(Cow::Borrowed(plain)),
        _ => serde_json::from_str(quoted).ok().map(Cow::Owned),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_texts_come_in_their_order() {
        let json = r#" {"a": 1, "b\"": ["c", {"d" : "e\\"}, null, "f"], "g": "h"} "#;
        let opened = |has_names| Step::Opened { has_names };
        let steps = [
            opened(true),
            Step::Name(r#""a""#),
            Step::Name(r#""b\"""#),
            opened(false),
            Step::Text(r#""c""#),
            opened(true),
            Step::Name(r#""d""#),
            Step::Text(r#""e\\""#),
            Step::Closed,
            Step::Text(r#""f""#),
            Step::Closed,
            Step::Name(r#""g""#),
            Step::Text(r#""h""#),
            Step::Closed,
        ];
        assert_eq!(Walk::through(json).collect::<Vec<_>>(), steps);
        assert_eq!(Walk::through("12").next(), None);
        let texts = [r#""\\""#, r#""\\\\""#, r#""\"\"""#, r#""\\\"""#, r#""""#];
        let json = format!("[{}]", texts.join(","));
        let walked = Walk::through(&json).filter(|step| matches!(step, Step::Text(_)));
        assert_eq!(walked.collect::<Vec<_>>(), texts.map(Step::Text));
        assert_eq!(said(r#""a\u00e9""#).as_deref(), Some("aé"));
    }
}
