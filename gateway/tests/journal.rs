//! What the gateway keeps of a stream that passes: marks are taken out, what has none is not passed on, however it is cut.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use bytes::Bytes;
use proptest::prelude::*;

use stoker_gateway::journal::{Journal, Passed, Then};

fn pass(journal: &mut Journal, data: &str) -> (String, Then) {
    let Passed { data, then } = journal.pass(Bytes::from(data.to_owned()));
    (String::from_utf8(data.to_vec()).unwrap(), then)
}

#[test]
fn what_has_a_mark_behind_it_is_passed_on_without_it() {
    let mut journal = Journal::new(true);
    assert_eq!(journal.told("v"), None);
    assert_eq!(pass(&mut journal, "data: 0\n\n: stoker opened\n"), ("data: 0\n\n".into(), Then::More));
    assert_eq!(pass(&mut journal, "data: a\n\n: stoker 0 32 5 6\ndata: b"), ("data: a\n\n".into(), Then::More));
    assert_eq!(pass(&mut journal, "\n\n: sto"), (String::new(), Then::More));
    assert_eq!(pass(&mut journal, "ker 2 0 7\n: stoker 0 32 8\n"), ("data: b\n\n".into(), Then::More));
    assert_eq!(
        pass(&mut journal, "data: e\n\n: stoker 0 end\n: keep-alive\n\n: stoker\n").0,
        "data: e\n\n: keep-alive\n\n"
    );
    let choices = r#"[{"tokens":[5,6,8],"cached":32,"ended":true},{"tokens":[],"cached":0,"ended":false},{"tokens":[7],"cached":0,"ended":false}]"#;
    assert_eq!(journal.told("v").unwrap(), format!(r#"{{"vocabulary":"v","choices":{choices}}}"#));
    assert_eq!(journal.n_tokens(), 4);
    assert_eq!(pass(&mut journal, "data: [DONE]\n\n: stoker done\n"), ("data: [DONE]\n\n".into(), Then::Done));
}

#[test]
fn what_a_replica_says_of_its_own_end_is_not_passed_on() {
    let mut journal = Journal::new(true);
    for (mark, end) in [("elsewhere", Then::Elsewhere), ("broken", Then::Broken)] {
        let stream = format!("data: a\n\n: stoker 0 0 5\ndata: {{\"error\":1}}\n\n: stoker {mark}\n");
        let (said, then) = pass(&mut journal, &stream);
        assert_eq!((said.as_str(), then), ("data: a\n\n", end));
    }
    pass(&mut journal, "data: half");
    journal.drop_unsaid();
    assert_eq!(pass(&mut journal, "data: b\n\n: stoker 0 0 6\n").0, "data: b\n\n");
}

#[test]
fn device_time_is_that_of_all_choices_and_of_all_replicas_that_made_them() {
    let of = |journal: &Journal| journal.usage().device_time.map(|time| time.as_micros());
    let mut journal = Journal::new(true);
    pass(&mut journal, ": stoker opened\n: stoker 0 7 5\n");
    assert_eq!(of(&journal), None, "an agent that tells none has not said that it is nothing");
    pass(&mut journal, ": stoker 0 7/300 6\n: stoker 1 7/200 5\n: stoker 0 7/450 8\n");
    assert_eq!((of(&journal), journal.usage().cached_tokens, journal.n_tokens()), (Some(650), 7, 4));
    journal.drop_unsaid();
    assert_eq!(of(&journal), Some(650), "what was done is done");
    pass(&mut journal, ": stoker 0 7/100 9\n: stoker 0 7/130 9\n");
    assert_eq!(of(&journal), Some(780), "the next replica counts from nothing");
    // Another one is lost; an older one that tells no time goes on.
    journal.drop_unsaid();
    pass(&mut journal, ": stoker 0 7 9\n: stoker done\n");
    assert_eq!(journal.usage().device_time, Some(Duration::from_micros(780)));
    assert!(!journal.told("v").unwrap().contains('/'), "who goes on is told of tokens only");
}

#[test]
fn a_mark_that_is_none_ends_it() {
    for mark in
        ["x", "0", "0 x", "0 0 x", "-1 0 5", "70000 0 5", "0 0 4294967296", "0 0/ 5", "0 /1 5", "0 0/-1 5", "0 0/1/2 5"]
    {
        assert_eq!(pass(&mut Journal::new(true), &format!(": stoker {mark}\n")).1, Then::Unreadable, "{mark}");
    }
    assert_eq!(Journal::new(true).pass(Bytes::from_static(b": stoker \xff\n")).then, Then::Unreadable);
}

proptest! {
    #[test]
    fn however_a_stream_is_cut_it_says_the_same(
        pieces in prop::collection::vec(("[ab:]{0,5}", prop::collection::vec(0_u32..99, 0..4)), 0..20),
        cuts in prop::collection::vec(1_usize..9, 0..200),
    ) {
        let line = |(text, tokens): &(String, Vec<u32>)| {
            let ids: String = tokens.iter().map(|token| format!(" {token}")).collect();
            format!("data: {text}\n\n: stoker 0 7{ids}\n")
        };
        let stream: String = pieces.iter().map(line).collect();
        let said: String = pieces.iter().map(|(text, _)| format!("data: {text}\n\n")).collect();
        let (mut journal, mut rest, mut passed) = (Journal::new(true), stream.as_str(), String::new());
        for cut in cuts {
            let (now, later) = rest.split_at(cut.min(rest.len()));
            passed += &pass(&mut journal, now).0;
            prop_assert!(said.starts_with(&passed));
            rest = later;
        }
        passed += &pass(&mut journal, rest).0;
        prop_assert_eq!(passed, said);
        let tokens: Vec<u32> = pieces.iter().flat_map(|(_, tokens)| tokens.clone()).collect();
        prop_assert_eq!(journal.n_tokens(), tokens.len());
    }

    #[test]
    fn no_bytes_end_it_otherwise(data in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut journal = Journal::new(true);
        journal.pass(Bytes::from(data.clone()));
        journal.pass(Bytes::from([b"\n: stoker".as_slice(), &data, b"\n"].concat()));
    }
}
