//! What a client has of a streamed answer, in tokens: kept while the answer is passed on, so that another replica can go on with it.
//! Reads the marks that agents write into their streams (`agent/src/http/passage.rs`), takes them out and passes on what has a mark
//! behind it; the rest was not said yet. Pure; looks at nothing but marks.
//!
//! A mark is a line, `: stoker …`, at the beginning of a line. JSON has no line feed of its own, so nothing else begins like one.

use std::{fmt::Write, time::Duration};

use bytes::{Bytes, BytesMut};
use memchr::{memchr, memmem};

use crate::usage::Usage;

/// What is held for a mark at most: agents write one behind all that they write at a time.
const HELD_MAX: usize = 32 << 20;
const MARK: &[u8] = b": stoker";

/// See the module.
#[derive(Debug, Default)]
pub struct Journal {
    held: BytesMut,
    /// Tokens are kept, not only counted.
    keeps: bool,
    choices: Vec<Told>,
    is_opened: bool,
    n_tokens: usize,
    /// What replicas that were lost did for it, as far as they told.
    lost_time: Duration,
}

/// What was told of a choice.
#[derive(Clone, Debug, Default, PartialEq)]
struct Told {
    tokens: Vec<u32>,
    cached: u32,
    has_ended: bool,
    /// What devices of the replica that makes it now did for it.
    device_time: Option<Duration>,
}

/// What can be passed on, and how it stands.
#[derive(Clone, Debug, PartialEq)]
pub struct Passed {
    /// What was said.
    pub data: Bytes,
    /// Whether more comes from where this came.
    pub then: Then,
}

/// How a stream stands.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Then {
    /// There is more to come.
    More,
    /// That was all.
    Done,
    /// The replica ends it; another one may go on.
    Elsewhere,
    /// The replica's engine stopped; another one may go on, if it is not the answer that stops engines.
    Broken,
    /// What was said is an error of this status, and all of an answer that is not streamed.
    Failed(u16),
    /// It cannot be read.
    Unreadable,
}

impl Journal {
    /// An empty one; one that keeps nothing only takes marks out.
    pub fn new(keeps: bool) -> Self {
        Self { keeps, ..Self::default() }
    }

    /// Takes in what came.
    pub fn pass(&mut self, data: Bytes) -> Passed {
        let data = if self.held.is_empty() {
            data
        } else {
            self.held.extend_from_slice(&data);
            self.held.split().freeze()
        };
        let (mut said, mut from, mut then) = (Vec::new(), 0, Then::More);
        while then == Then::More
            && let Some((at, end)) = mark_in(&data, from)
        {
            let outcome = self.note(&data[at + MARK.len()..end]);
            // What a replica says of its own end is not the answer's.
            if !matches!(outcome, Some(Then::Elsewhere | Then::Broken)) && at > from {
                said.push(data.slice(from..at));
            }
            (from, then) = (end + 1, outcome.unwrap_or(Then::Unreadable));
        }
        if then == Then::More {
            self.held.extend_from_slice(&data[from..]);
            then = if self.held.len() > HELD_MAX { Then::Unreadable } else { Then::More };
        }
        let data = if said.len() == 1 { said.remove(0) } else { said.concat().into() };
        Passed { data, then }
    }

    /// Forgets what was not said, before somebody else goes on, who counts device time anew.
    pub fn drop_unsaid(&mut self) {
        self.held.clear();
        for choice in &mut self.choices {
            let made = choice.device_time.take().unwrap_or_default();
            self.lost_time = self.lost_time.saturating_add(made);
        }
    }

    /// Tokens told so far.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// What the answer cost so far. How long its prompt was, marks do not say.
    pub fn usage(&self) -> Usage {
        let cached_tokens = self.choices.first().map_or(0, |choice| choice.cached);
        let device_time = self.device_time();
        Usage { prompt_tokens: None, cached_tokens, completion_tokens: self.n_tokens as u32, device_time }
    }

    /// All that replicas' devices did for it, if any told that.
    fn device_time(&self) -> Option<Duration> {
        let now = self.choices.iter().filter_map(|choice| choice.device_time);
        now.chain(Some(self.lost_time).filter(|lost| !lost.is_zero())).reduce(Duration::saturating_add)
    }

    /// What was told, for who goes on; `None` if nothing was.
    pub fn told(&self, vocabulary: &str) -> Option<String> {
        if !self.is_opened || !self.keeps {
            return None;
        }
        let mut told = format!("{{\"vocabulary\":\"{vocabulary}\",\"choices\":[");
        for (place, choice) in self.choices.iter().enumerate() {
            told.push_str(if place > 0 { ",{\"tokens\":[" } else { "{\"tokens\":[" });
            for (place, token) in choice.tokens.iter().enumerate() {
                // Writing to a string does not fail.
                let _ = write!(told, "{}{token}", if place > 0 { "," } else { "" });
            }
            let _ = write!(told, "],\"cached\":{},\"ended\":{}}}", choice.cached, choice.has_ended);
        }
        told.push_str("]}");
        Some(told)
    }

    fn note(&mut self, mark: &[u8]) -> Option<Then> {
        let mark = std::str::from_utf8(mark).ok()?;
        let mut words = mark.split_ascii_whitespace();
        let index = match words.next() {
            None => return Some(Then::More),
            Some("opened") => {
                self.is_opened = true;
                return Some(Then::More);
            }
            Some("done") => return Some(Then::Done),
            Some("elsewhere") => return Some(Then::Elsewhere),
            Some("broken") => return Some(Then::Broken),
            Some("failed") => return Some(Then::Failed(words.next()?.parse().ok()?)),
            Some(index) => index.parse::<u16>().ok()?,
        };
        let keeps = self.keeps;
        let choice = self.choice(index);
        match words.next()? {
            "end" => choice.has_ended = true,
            cached => {
                let (cached, micros) =
                    cached.split_once('/').map_or((cached, None), |(cached, micros)| (cached, Some(micros)));
                choice.cached = cached.parse().ok()?;
                if let Some(micros) = micros {
                    choice.device_time = Some(Duration::from_micros(micros.parse().ok()?));
                }
                let mut n_new = 0;
                for token in words {
                    let token = token.parse().ok()?;
                    n_new += 1;
                    if keeps {
                        choice.tokens.push(token);
                    }
                }
                self.n_tokens += n_new;
            }
        }
        Some(Then::More)
    }

    fn choice(&mut self, index: u16) -> &mut Told {
        let index = usize::from(index);
        if self.choices.len() <= index {
            self.choices.resize(index + 1, Told::default());
        }
        &mut self.choices[index]
    }
}

/// The first whole mark from there on: where its line begins, and where the line feed is that ends it.
fn mark_in(data: &[u8], from: usize) -> Option<(usize, usize)> {
    let at = match data[from..].starts_with(MARK) {
        true => from,
        false => from + memmem::find(&data[from..], b"\n: stoker")? + 1,
    };
    Some((at, at + memchr(b'\n', &data[at..])?))
}
