//! One request's events on their way from the ledger to its reader. A reader that stalls holds nobody up and costs bounded
//! memory: once so many events are unread, what follows is held back as one, and a reader too far behind loses its request.
//! The terminal always has its place.

use std::time::Duration;

use tokio::sync::mpsc::{OwnedPermit, Receiver, Sender, channel, error::TrySendError};

use crate::request::{PositionLogprobs, RequestEvent, TokenId};

/// Events that may be unread before they are held back: half a second of a fast model.
const MAX_UNREAD_EVENTS: usize = 128;
/// Tokens that may be held back, and those of them that have log-probabilities, each of which may name twenty others.
const MAX_HELD_TOKENS: usize = 65_536;
const MAX_HELD_LOGPROBS: usize = 4096;

/// What a request's stream is told.
#[derive(Debug, PartialEq)]
pub(crate) enum StreamMessage {
    /// It has been let in; so many tokens of its prompt were found in the cache.
    Started(u32),
    /// Its first token is about to come.
    Soon,
    /// Something happened, and so much of its devices' time the request had by then.
    Event(RequestEvent, Duration),
}

impl StreamMessage {
    /// What happened, if anything.
    pub(crate) fn event(self) -> Option<RequestEvent> {
        match self {
            Self::Started(_) | Self::Soon => None,
            Self::Event(event, _) => Some(event),
        }
    }
}

/// New text of a request.
#[derive(Debug, Default)]
pub(crate) struct Delta {
    pub(crate) text: String,
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) logprobs: Vec<PositionLogprobs>,
}

/// A reader is so far behind that no more is kept for it.
#[derive(Debug, PartialEq)]
pub(crate) struct TooFarBehind {
    /// Tokens that are held back.
    pub(crate) n_tokens: usize,
}

/// Where a request's events go.
#[derive(Debug)]
pub(crate) struct EventSender {
    unread: Sender<StreamMessage>,
    /// For what is held back at the end, for text that waited for more tokens, and for the terminal.
    last_three: [OwnedPermit<StreamMessage>; 3],
    held: Delta,
    /// What the request had of its devices' time, told with every event.
    pub(crate) device_time: Duration,
}

/// A request's events: the end for the ledger, and the reader's.
pub(crate) fn event_channel() -> (EventSender, Receiver<StreamMessage>) {
    let (unread, received) = channel(MAX_UNREAD_EVENTS + 3);
    let place = || unread.clone().try_reserve_owned().expect("a new channel has room");
    let last_three = [place(), place(), place()];
    (EventSender { last_three, unread, held: Delta::default(), device_time: Duration::ZERO }, received)
}

impl EventSender {
    /// Tells that the request has been let in, which is before anything else: there is room.
    pub(crate) fn started(&self, cached_tokens: u32) {
        let _ = self.unread.try_send(StreamMessage::Started(cached_tokens));
    }

    /// Calls a reader that waits for its first token. One that does not read now needs no call.
    pub(crate) fn announce(&self) {
        let _ = self.unread.try_send(StreamMessage::Soon);
    }

    /// Sends what was read of the prompt, before any text: there is room then.
    pub(crate) fn prompt(&self, read: RequestEvent) {
        let _ = self.unread.try_send(StreamMessage::Event(read, self.device_time));
    }

    /// Sends new text, with what was held back before it. A reader that went away is noticed by its stream's drop.
    pub(crate) fn send(&mut self, delta: Delta) -> Result<(), TooFarBehind> {
        self.held.append(delta);
        match self.unread.try_reserve() {
            Ok(place) => place.send(StreamMessage::Event(std::mem::take(&mut self.held).into(), self.device_time)),
            Err(TrySendError::Closed(())) => self.held = Delta::default(),
            Err(TrySendError::Full(())) => {
                let n_tokens = self.held.tokens.len();
                if n_tokens > MAX_HELD_TOKENS || self.held.logprobs.len() > MAX_HELD_LOGPROBS {
                    return Err(TooFarBehind { n_tokens });
                }
            }
        }
        Ok(())
    }

    /// Sends the last text and the terminal. That text has no token: it stands alone, so that text behind tokens is the tokens' own.
    pub(crate) fn finish(self, last_text: String, terminal: RequestEvent) {
        let Self { last_three: [for_held, for_text, for_terminal], held, device_time, .. } = self;
        if !held.text.is_empty() || !held.tokens.is_empty() {
            for_held.send(StreamMessage::Event(held.into(), device_time));
        }
        if !last_text.is_empty() {
            let last = Delta { text: last_text, ..Delta::default() };
            for_text.send(StreamMessage::Event(last.into(), device_time));
        }
        for_terminal.send(StreamMessage::Event(terminal, device_time));
    }
}

impl Delta {
    fn append(&mut self, Self { text, tokens, logprobs }: Self) {
        // Nothing is held as a rule, and then nothing is copied.
        if self.tokens.is_empty() && self.text.is_empty() {
            *self = Self { text, tokens, logprobs };
            return;
        }
        self.text.push_str(&text);
        self.tokens.extend(tokens);
        self.logprobs.extend(logprobs);
    }
}

impl From<Delta> for RequestEvent {
    fn from(Delta { text, tokens, logprobs }: Delta) -> Self {
        Self::Delta { text, tokens, logprobs }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{FinishReason, Usage};

    fn delta(n: usize) -> Delta {
        Delta { text: format!("{n} "), tokens: vec![n as TokenId], logprobs: Vec::new() }
    }

    fn terminal() -> RequestEvent {
        RequestEvent::Finished { reason: FinishReason::Length, stop_match: None, usage: Usage::default(), timing: None }
    }

    #[test]
    fn a_reader_that_comes_late_gets_everything_in_few_pieces() {
        let (mut sender, mut received) = event_channel();
        let n_sent = 10 * MAX_UNREAD_EVENTS;
        (0..n_sent).for_each(|n| sender.send(delta(n)).unwrap());
        sender.finish("end".into(), terminal());
        let (mut text, mut tokens, mut n_events) = (String::new(), Vec::new(), 0);
        while let Ok(message) = received.try_recv() {
            n_events += 1;
            match message.event().unwrap() {
                RequestEvent::Delta { text: more, tokens: ids, .. } => {
                    text.push_str(&more);
                    tokens.extend(ids);
                }
                last => assert_eq!((last, received.is_empty()), (terminal(), true)),
            }
        }
        assert_eq!(n_events, MAX_UNREAD_EVENTS + 3);
        assert_eq!(tokens, (0..n_sent as TokenId).collect::<Vec<_>>());
        assert!(text.starts_with("0 1 2 ") && text.ends_with(&format!("{} end", n_sent - 1)));
    }

    #[test]
    fn a_reader_too_far_behind_is_given_up() {
        let (mut sender, _received) = event_channel();
        let mut sent = (0..=MAX_UNREAD_EVENTS + MAX_HELD_TOKENS).map(|n| sender.send(delta(n)));
        assert_eq!(sent.find_map(Result::err), Some(TooFarBehind { n_tokens: MAX_HELD_TOKENS + 1 }));
    }

    #[test]
    fn nothing_is_held_for_a_reader_that_went_away() {
        let (mut sender, received) = event_channel();
        drop(received);
        (0..2 * MAX_HELD_TOKENS).for_each(|n| sender.send(delta(n)).unwrap());
        sender.finish(String::new(), terminal());
    }
}
