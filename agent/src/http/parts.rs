//! The parts of a generated answer as they become certain: thoughts, text, and tool calls with their ids. What every API but
//! chat's own makes its blocks and items of.

use crate::{
    answer::Piece,
    http::{
        chat_answer::{AnswerForm, CallIds, Reader},
        stream::AnswerHead,
    },
};

/// More of an answer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Part {
    /// What the model thinks before it answers.
    Reasoning(String),
    /// Text for the user.
    Text(String),
    /// A call begins.
    Call {
        /// Its id.
        id: String,
        /// The function.
        name: String,
    },
    /// More of the arguments of the call that began last, as JSON text.
    Arguments(String),
    /// The call that began last is complete.
    CallEnd,
}

/// Reads the text of one choice.
pub(crate) struct Parts {
    reader: Reader,
    ids: CallIds,
    n_calls: u32,
}

impl Parts {
    /// Of the only choice of an answer.
    pub(crate) fn new(head: &AnswerHead, form: &AnswerForm) -> Self {
        Self { reader: Reader::new(form), ids: CallIds::new(head, form, 0), n_calls: 0 }
    }

    /// Takes more text; returns what became certain. Of no text, which is what the token has that ends an answer, nothing does.
    pub(crate) fn push(&mut self, text: String) -> Vec<Part> {
        if text.is_empty() {
            return Vec::new();
        }
        let pieces = self.reader.push(text);
        pieces.into_iter().map(|piece| self.of(piece)).collect()
    }

    /// The end of the text.
    pub(crate) fn finish(&mut self) -> Vec<Part> {
        let pieces = self.reader.finish();
        pieces.into_iter().map(|piece| self.of(piece)).collect()
    }

    /// What the end is called, by OpenAI's name.
    pub(crate) fn finish_reason(&self, reason: &'static str) -> &'static str {
        self.reader.finish_reason(reason)
    }

    fn of(&mut self, piece: Piece) -> Part {
        match piece {
            Piece::Text(text) => Part::Text(text),
            Piece::Reasoning(text) => Part::Reasoning(text),
            Piece::Call { name, id } => {
                self.n_calls += 1;
                Part::Call { id: self.ids.id(self.n_calls - 1, id), name }
            }
            Piece::Arguments(json) => Part::Arguments(json),
            Piece::CallEnd => Part::CallEnd,
        }
    }
}
