//! A stream of server-sent events on its way through: passed on in whole events, so that what is said in the gateway's own name when a
//! replica is lost begins a new one. Looks for the ends of events and at nothing in them.

use bytes::{Bytes, BytesMut};
use memchr::memrchr_iter;

/// An event longer than this is passed on in parts.
const HELD_MAX: usize = 1 << 20;

/// The beginning of an event whose end has not come yet.
#[derive(Debug, Default)]
pub struct Events {
    held: BytesMut,
}

impl Events {
    /// What can be passed on, now that `data` came. Agents write whole events, which go through untouched.
    pub fn pass(&mut self, data: Bytes) -> Bytes {
        if self.held.is_empty() && end_of_last(&data) == data.len() {
            return data;
        }
        self.held.extend_from_slice(&data);
        let end = if self.held.len() > HELD_MAX { self.held.len() } else { end_of_last(&self.held) };
        self.held.split_to(end).freeze()
    }

    /// What is left when the stream has ended.
    pub fn rest(&mut self) -> Bytes {
        std::mem::take(&mut self.held).freeze()
    }
}

/// Where the last event that is whole ends: behind an empty line.
fn end_of_last(data: &[u8]) -> usize {
    let is_end = |at: &usize| data[..*at].ends_with(b"\n") || data[..*at].ends_with(b"\n\r");
    memrchr_iter(b'\n', data).find(is_end).map_or(0, |at| at + 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn whole_events_go_through_and_the_beginning_of_one_waits() {
        let mut events = Events::default();
        let mut pass =
            |data: &'static str| String::from_utf8(events.pass(Bytes::from_static(data.as_bytes())).to_vec()).unwrap();
        assert_eq!(pass("data: 1\n\n"), "data: 1\n\n");
        assert_eq!(pass("data: 2\n\ndata: 3"), "data: 2\n\n");
        assert_eq!(pass("\n"), "");
        assert_eq!(pass("\n: alive\r\n\r\n"), "data: 3\n\n: alive\r\n\r\n");
    }

    proptest! {
        #[test]
        fn nothing_is_lost_and_every_part_but_the_rest_ends_an_event(parts in prop::collection::vec("[ab\n\r]{0,6}", 0..20)) {
            let (mut events, mut passed) = (Events::default(), String::new());
            for part in &parts {
                let out = String::from_utf8(events.pass(Bytes::from(part.clone())).to_vec()).unwrap();
                passed.push_str(&out);
                prop_assert!(passed.is_empty() || passed.ends_with("\n\n") || passed.ends_with("\n\r\n"));
            }
            passed.push_str(std::str::from_utf8(&events.rest()).unwrap());
            prop_assert_eq!(passed, parts.concat());
        }
    }

    #[test]
    fn an_event_without_end_is_not_held_for_ever() {
        let mut events = Events::default();
        let passed: usize = (0..4096).map(|_| events.pass(Bytes::from_static(&[b'x'; 1024])).len()).sum();
        assert!(passed > 2 << 20);
    }
}
