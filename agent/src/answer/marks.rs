//! Finding marks in a text that is still growing.

/// What is known about marks in a text.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Found {
    /// A mark begins here.
    Mark {
        /// Where.
        at: usize,
        /// Which.
        mark: &'static str,
    },
    /// None begins before this place; from here on the text may become one, or ends.
    NoneBefore(usize),
}

/// The first of `marks` in `text`. No mark is the beginning of another one.
pub(super) fn find(text: &str, marks: &[&'static str], is_end: bool) -> Found {
    let whole = marks.iter().filter_map(|mark| Some((text.find(mark)?, *mark))).min_by_key(|(at, _)| *at);
    let partial = if is_end { text.len() } else { text.len() - undecided(text, marks) };
    match whole {
        // A longer mark may begin before: it is not decided yet.
        Some((at, mark)) if at <= partial => Found::Mark { at, mark },
        _ => Found::NoneBefore(partial),
    }
}

/// Whether `text` begins with one of `marks`; `None`: it may, with more text.
pub(super) fn starts(text: &str, marks: &[&'static str], is_end: bool) -> Option<Option<&'static str>> {
    if let Some(mark) = marks.iter().find(|mark| text.starts_with(**mark)) {
        return Some(Some(mark));
    }
    let may_become = !is_end && marks.iter().any(|mark| mark.starts_with(text));
    if may_become { None } else { Some(None) }
}

/// Bytes at the end of `text` that may be the beginning of a mark.
fn undecided(text: &str, marks: &[&'static str]) -> usize {
    let begins = |mark: &&'static str| {
        let starts = mark.char_indices().map(|(at, _)| at).skip(1);
        starts.filter(|n| text.ends_with(&mark[..*n])).max().unwrap_or(0)
    };
    marks.iter().map(begins).max().unwrap_or(0)
}

/// Follows one JSON value to its end, by brackets and quotes alone: what is inside is not checked.
#[derive(Clone, Debug, Default)]
pub(super) struct JsonSpan {
    depth: u32,
    in_string: bool,
    is_escaped: bool,
}

impl JsonSpan {
    /// Behind the opening brace of an object.
    pub(super) fn inside_object() -> Self {
        Self { depth: 1, ..Self::default() }
    }

    /// Bytes of `text` up to the value's end; `None`: the value goes on. The value is an object, a list or a string.
    pub(super) fn end_in(&mut self, text: &str) -> Option<usize> {
        text.bytes().position(|byte| self.ends_with(byte)).map(|at| at + 1)
    }

    fn ends_with(&mut self, byte: u8) -> bool {
        match byte {
            _ if self.is_escaped => self.is_escaped = false,
            b'\\' if self.in_string => self.is_escaped = true,
            b'"' => {
                self.in_string = !self.in_string;
                return !self.in_string && self.depth == 0;
            }
            _ if self.in_string => {}
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => {
                self.depth = self.depth.saturating_sub(1);
                return self.depth == 0;
            }
            _ => {}
        }
        false
    }
}
