//! Think blocks: thoughts between two marks at the very beginning of an answer, whose first mark the prompt may have
//! written. What looks like a tool call inside is a thought.

use super::marks::{Found, find, starts};

/// The marks around thoughts.
pub(crate) type ThinkMarks = [&'static str; 2];

/// Text that is known to be one or the other.
pub(super) enum Segment {
    Reasoning(String),
    Text(String),
}

/// Follows one answer.
#[derive(Debug)]
pub(super) struct ThinkBlock {
    marks: ThinkMarks,
    place: Place,
    held: String,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Place {
    Before {
        /// The prompt has written the opening mark.
        is_open: bool,
    },
    Inside,
    Behind,
}

impl ThinkBlock {
    pub(super) fn new(marks: ThinkMarks, is_open: bool) -> Self {
        Self { marks, place: Place::Before { is_open }, held: String::new() }
    }

    pub(super) fn advance(&mut self, text: &str, is_end: bool) -> Vec<Segment> {
        self.held.push_str(text);
        let mut segments = Vec::new();
        if let Place::Before { is_open } = self.place {
            self.enter(is_open, is_end);
        }
        if self.place == Place::Inside {
            self.read_thoughts(is_end, &mut segments);
        }
        if self.place == Place::Behind && !self.held.is_empty() {
            segments.push(Segment::Text(std::mem::take(&mut self.held)));
        }
        segments
    }

    /// Waits while the text may still become the opening mark. A model may repeat the one that its prompt ends with.
    fn enter(&mut self, is_open: bool, is_end: bool) {
        let start = self.held.len() - self.held.trim_start().len();
        match starts(&self.held[start..], &self.marks[..1], is_end) {
            None => {}
            Some(None) => self.place = if is_open { Place::Inside } else { Place::Behind },
            Some(Some(mark)) => {
                self.held.drain(..start + mark.len());
                self.place = Place::Inside;
            }
        }
    }

    fn read_thoughts(&mut self, is_end: bool, segments: &mut Vec<Segment>) {
        let (end, mark) = match find(&self.held, &self.marks[1..], is_end) {
            Found::Mark { at, mark } => (at, mark),
            Found::NoneBefore(end) => (end, ""),
        };
        segments.push(Segment::Reasoning(self.held.drain(..end).collect()));
        if !mark.is_empty() {
            self.held.drain(..mark.len());
            self.place = Place::Behind;
        }
    }
}
