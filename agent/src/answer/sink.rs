//! Where state machines put what they found. Neighbouring texts become one piece, and white space between two parts of an
//! answer is dropped: models put new lines around their marks that are no part of what they say.

use super::Piece;

/// Collects pieces.
#[derive(Debug, Default)]
pub(super) struct Sink {
    pieces: Vec<Piece>,
    part: Part,
    /// Nothing of this part has come out yet, and another one was before it.
    is_fresh: bool,
    /// White space that is part of the text if more text follows.
    blank: String,
}

/// What the answer is in the middle of.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
enum Part {
    #[default]
    Nothing,
    Reasoning,
    Text,
    Call,
}

impl Sink {
    pub(super) fn text(&mut self, text: &str) {
        self.prose(Part::Text, text, Piece::Text);
    }

    pub(super) fn reasoning(&mut self, text: &str) {
        self.prose(Part::Reasoning, text, Piece::Reasoning);
    }

    pub(super) fn call(&mut self, name: &str, id: Option<String>) {
        (self.part, self.is_fresh) = (Part::Call, false);
        self.blank.clear();
        self.pieces.push(Piece::Call { name: name.to_owned(), id });
    }

    pub(super) fn arguments(&mut self, json: &str) {
        match self.pieces.last_mut() {
            _ if json.is_empty() => {}
            Some(Piece::Arguments(last)) => last.push_str(json),
            _ => self.pieces.push(Piece::Arguments(json.to_owned())),
        }
    }

    pub(super) fn call_end(&mut self) {
        self.pieces.push(Piece::CallEnd);
    }

    /// A call that is known as a whole.
    pub(super) fn whole_call(&mut self, name: &str, arguments: &str) {
        self.call(name, None);
        self.arguments(arguments);
        self.call_end();
    }

    /// The end of the answer: white space at the end of its text is part of it.
    pub(super) fn finish(&mut self) {
        if self.part == Part::Text && !self.is_fresh {
            let blank = std::mem::take(&mut self.blank);
            self.push(blank, Piece::Text);
        }
    }

    /// What came since the last time.
    pub(super) fn take(&mut self) -> Vec<Piece> {
        std::mem::take(&mut self.pieces)
    }

    fn prose(&mut self, part: Part, text: &str, piece: fn(String) -> Piece) {
        if text.is_empty() {
            return;
        }
        if self.part != part {
            self.is_fresh = self.part != Part::Nothing || part == Part::Reasoning;
            self.part = part;
            self.blank.clear();
        }
        let text = if self.is_fresh { text.trim_start() } else { text };
        let body = text.trim_end();
        if body.is_empty() {
            self.blank.push_str(text);
            return;
        }
        self.is_fresh = false;
        let out = std::mem::replace(&mut self.blank, text[body.len()..].to_owned()) + body;
        self.push(out, piece);
    }

    fn push(&mut self, text: String, piece: fn(String) -> Piece) {
        match (self.pieces.last_mut(), piece(text)) {
            (_, Piece::Text(text) | Piece::Reasoning(text)) if text.is_empty() => {}
            (Some(Piece::Text(last)), Piece::Text(text)) => last.push_str(&text),
            (Some(Piece::Reasoning(last)), Piece::Reasoning(text)) => last.push_str(&text),
            (_, piece) => self.pieces.push(piece),
        }
    }
}
