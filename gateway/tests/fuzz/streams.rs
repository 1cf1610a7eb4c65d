//! Answers on their way: what a client gets and what is kept of it does not depend on how connections cut it, no mark is passed on, and
//! without marks no byte is lost.

use std::time::Duration;

use bytes::Bytes;
use rand::{RngExt, rngs::StdRng};
use stoker_gateway::{
    events::Events,
    journal::{Journal, Then},
    usage::{Tail, Usage},
};

use crate::{every_input, mutate::Corpus};

const CHUNK: &str = "data: {\"id\":\"chatcmpl-1\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" a\"},\"finish_reason\":null}]}\n\n";

fn seeds() -> Vec<Vec<u8>> {
    let opened = ": stoker opened\n";
    let usage = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":4,\"prompt_tokens_details\":{\"cached_tokens\":8}}}\n\n";
    [
        format!("{opened}{CHUNK}: stoker 0 32 5 6\n{CHUNK}: stoker 0 32 7\n: stoker 0 end\n{usage}data: [DONE]\n\n: stoker done\n"),
        format!("{opened}{CHUNK}{CHUNK}: stoker 0 0 5\n: stoker 1 0 6\ndata: {{\"error\":1}}\n\n: stoker elsewhere\n"),
        format!("{opened}: stoker 0 16/250 1 2 3\n: stoker 1 0/7 4\n: stoker 0 16/300 4\n: stoker 0 end\n{{\"choices\":[],\"usage\":{{\"input_tokens\":1}}}}: stoker done\n"),
        format!("{opened}: stoker 0 0 1\n{{\"error\":{{\"code\":500}}}}\n: stoker failed 500\n"),
        format!("event: message_start\n{CHUNK}: keep-alive\n\nevent: ping\r\ndata: {{}}\r\n\r\n: stoker\n{usage}"),
        format!("{CHUNK}{CHUNK}{usage}data: [DONE]\n\n"),
    ]
    .map(String::into_bytes)
    .to_vec()
}

const WORDS: &[&[u8]] = &[
    b"\n: stoker",
    b": stoker ",
    b"\n: stoker 65535 0 4294967295\n",
    b"\n: stoker 65536 0 1\n",
    b"\n: stoker 0 end\n",
    b"\n: stoker done\n",
    b": stoker elsewhere\n",
    b": stoker broken\n",
    b"\n\n",
    b"\r\n\r\n",
    b"\n: stoke",
    b"data: ",
    b"\"usage\":",
    b"4294967295",
    b"/18446744073709551615",
    b"/",
    b"\"cache_read_input_tokens\":4294967295,",
];

/// What came of a stream that comes in these parts.
#[derive(Debug, PartialEq)]
struct Heard {
    passed: Vec<u8>,
    then: Then,
    told: Option<String>,
    n_tokens: usize,
    device_time: Option<Duration>,
}

fn hear<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Heard {
    let (mut journal, mut passed, mut then) = (Journal::new(true), Vec::new(), Then::More);
    for part in parts {
        let heard = journal.pass(Bytes::copy_from_slice(part));
        passed.extend_from_slice(&heard.data);
        then = heard.then;
        if then != Then::More {
            break;
        }
    }
    let (told, n_tokens) = (journal.told("v"), journal.n_tokens());
    let device_time = journal.usage().device_time;
    journal.drop_unsaid();
    assert_eq!(journal.usage().device_time.filter(|time| !time.is_zero()), device_time.filter(|time| !time.is_zero()));
    Heard { passed, then, told, n_tokens, device_time }
}

fn cut<'a>(stream: &'a [u8], random: &mut StdRng) -> Vec<&'a [u8]> {
    let (mut parts, mut rest) = (Vec::new(), stream);
    while !rest.is_empty() {
        let (part, later) = rest.split_at(random.random_range(1..=rest.len().min(40)));
        (parts, rest) = ([parts, vec![part]].concat(), later);
    }
    parts
}

/// Whether a token of it was kept.
fn check(stream: &[u8], random: &mut StdRng) -> bool {
    let (whole, parts) = (hear([stream]), cut(stream, random));
    assert_eq!(hear(parts.iter().copied()), whole, "{}", String::from_utf8_lossy(stream));
    let is_mark = |line: &[u8]| line.starts_with(b": stoker");
    assert!(!whole.passed.split(|byte| *byte == b'\n').any(is_mark), "{}", String::from_utf8_lossy(&whole.passed));
    let (mut events, mut tail, mut passed) = (Events::default(), Tail::default(), Vec::new());
    for part in &parts {
        tail.pass(part);
        passed.extend_from_slice(&events.pass(Bytes::copy_from_slice(part)));
    }
    passed.extend_from_slice(&events.rest());
    assert_eq!(passed, stream, "without marks no byte is lost");
    // It is shorter than what a tail keeps.
    assert!(Usage::of_whole(stream).is_none_or(|usage| usage == tail.usage()));
    whole.n_tokens > 0
}

#[test]
fn streams_say_the_same_however_they_are_cut() {
    let seeds = seeds();
    let corpus = Corpus { seeds: &seeds, words: WORDS };
    every_input("streams", 1, |number| {
        let (stream, mut random) = corpus.input(number);
        check(&stream, &mut random)
    });
}
