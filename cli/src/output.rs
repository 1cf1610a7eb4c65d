//! How an answer is printed: as text for people, or as JSON for programs.

use clap::{Args, ValueEnum};
use serde_json::Value;

/// The form of an answer.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct Output {
    /// Form of the answer.
    #[arg(long, short, value_enum, default_value_t = Form::Text)]
    output: Form,
}

/// One of them.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Form {
    /// For people.
    Text,
    /// For programs.
    Json,
}

impl Output {
    /// Whether programs read it.
    pub(crate) fn is_json(self) -> bool {
        self.output == Form::Json
    }

    /// Prints one of several: a line of text, or one of JSON.
    pub(crate) fn print_line(self, text: &str, json: impl FnOnce() -> Value) {
        match self.output {
            Form::Text => println!("{text}"),
            Form::Json => println!("{}", json()),
        }
    }

    /// Prints it.
    pub(crate) fn print(self, text: &str, json: impl FnOnce() -> Value) {
        match self.output {
            Form::Text => print!("{text}"),
            Form::Json => println!("{:#}", json()),
        }
    }
}
