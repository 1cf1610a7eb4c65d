//! What replicas say that they hold: after any events, in any order and from hearings that are over, the index knows what a map of
//! sets knows; and no more than it may.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use stoker_routing::{Capacity, Chain, Hearing, PrefixIndex, Source};

const SLOTS: u32 = 5;
/// Prompts that share beginnings: each a kind's beginning of its own length, and an end of its own.
const PROMPTS: usize = 9;

fn prompt(at: usize) -> Chain {
    let shared = vec![(at % 3) as u8; 1000 * (at + 1)];
    Chain::of(1, &[&shared, &vec![100 + at as u8; 1500]])
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Hear {
        slot: u32,
    },
    Store {
        nth: usize,
        prompt: usize,
        mark: usize,
    },
    /// A whole prompt, as a replica stores it.
    StoreAll {
        nth: usize,
        prompt: usize,
    },
    Remove {
        nth: usize,
        prompt: usize,
        mark: usize,
    },
    HearNoMore {
        nth: usize,
    },
    Forget {
        slot: u32,
    },
}

fn event() -> impl Strategy<Value = Event> {
    let (nth, prompt, mark) = (0..12usize, 0..PROMPTS, 0..60usize);
    prop_oneof![
        2 => (0..SLOTS).prop_map(|slot| Event::Hear { slot }),
        6 => (nth.clone(), prompt.clone(), mark.clone()).prop_map(|(nth, prompt, mark)| Event::Store { nth, prompt, mark }),
        6 => (nth.clone(), prompt.clone()).prop_map(|(nth, prompt)| Event::StoreAll { nth, prompt }),
        8 => (nth.clone(), prompt, mark).prop_map(|(nth, prompt, mark)| Event::Remove { nth, prompt, mark }),
        1 => nth.prop_map(|nth| Event::HearNoMore { nth }),
        1 => (0..SLOTS).prop_map(|slot| Event::Forget { slot }),
    ]
}

/// What is held by slot; absent: it is not heard.
type Model = BTreeMap<u32, (Hearing, BTreeSet<u64>)>;

/// The names that an event is about; none if the prompt has no such mark.
fn names(chain: &Chain, mark: Option<usize>) -> Vec<u64> {
    let names: Vec<u64> = chain.marks().iter().map(|mark| mark.hash).collect();
    mark.map_or(names.clone(), |mark| names.get(mark).copied().into_iter().collect())
}

fn happen(event: Event, index: &mut PrefixIndex, model: &mut Model, hearings: &mut Vec<Hearing>, prompts: &[Chain]) {
    // Any that there was, also one that is over.
    let nth = |nth: usize, hearings: &[Hearing]| (!hearings.is_empty()).then(|| hearings[nth % hearings.len()]);
    let (hearing, stored, removed) = match event {
        Event::Hear { slot } => {
            let hearing = index.hear(slot);
            hearings.push(hearing);
            model.insert(slot, (hearing, BTreeSet::new()));
            return;
        }
        Event::Forget { slot } => {
            index.forget(slot);
            model.remove(&slot);
            return;
        }
        Event::HearNoMore { nth: at } => {
            let Some(hearing) = nth(at, hearings) else { return };
            index.hear_no_more(&hearing);
            model.retain(|_, (known, _)| *known != hearing);
            return;
        }
        Event::Store { nth: at, prompt, mark } => (nth(at, hearings), names(&prompts[prompt], Some(mark)), vec![]),
        Event::StoreAll { nth: at, prompt } => (nth(at, hearings), names(&prompts[prompt], None), vec![]),
        Event::Remove { nth: at, prompt, mark } => (nth(at, hearings), vec![], names(&prompts[prompt], Some(mark))),
    };
    let Some(hearing) = hearing else { return };
    stored.iter().for_each(|name| index.store(&hearing, *name));
    removed.iter().for_each(|name| index.remove(&hearing, *name));
    if let Some((_, held)) = model.get_mut(&hearing.slot()).filter(|(known, _)| *known == hearing) {
        held.extend(stored);
        held.retain(|name| !removed.contains(name));
    }
}

proptest! {
    #[test]
    fn the_index_is_a_map_of_sets_after_any_events(events in prop::collection::vec(event(), 0..200)) {
        let prompts: Vec<Chain> = (0..PROMPTS).map(prompt).collect();
        let (mut index, mut model, mut hearings) = (PrefixIndex::bounded(10_000), Model::new(), Vec::new());
        for event in events {
            happen(event, &mut index, &mut model, &mut hearings, &prompts);
        }
        let all: BTreeSet<u64> = model.values().flat_map(|(_, held)| held.iter().copied()).collect();
        prop_assert_eq!(index.len(Source::Exact), all.len());
        for chain in &prompts {
            let matches = index.matches(chain, 0, |_| Capacity::default());
            for slot in 0..SLOTS {
                let is_held = |name: u64| model.get(&slot).is_some_and(|(_, held)| held.contains(&name));
                let longest = chain.marks().iter().rev().find(|mark| is_held(mark.hash)).map_or(0, |mark| mark.end);
                prop_assert_eq!(matches.of(slot), longest, "slot {}", slot);
                prop_assert_eq!(matches.source(slot), (longest > 0).then_some(Source::Exact));
            }
        }
    }

    #[test]
    fn it_stays_bounded_and_takes_in_more_when_there_is_room(events in prop::collection::vec(event(), 0..200)) {
        let prompts: Vec<Chain> = (0..PROMPTS).map(prompt).collect();
        let (mut index, mut model, mut hearings) = (PrefixIndex::bounded(20), Model::new(), Vec::new());
        for event in events {
            happen(event, &mut index, &mut model, &mut hearings, &prompts);
            prop_assert!(index.len(Source::Exact) <= 20);
            for (slot, (_, held)) in &model {
                for chain in &prompts {
                    let end = index.matches(chain, 0, |_| Capacity::default()).of(*slot);
                    let is_held = |end: u32| chain.marks().iter().any(|mark| mark.end == end && held.contains(&mark.hash));
                    prop_assert!(end == 0 || is_held(end), "what is not held is never claimed");
                }
            }
        }
        (0..SLOTS).for_each(|slot| index.forget(slot));
        prop_assert_eq!(index.len(Source::Exact), 0);
        let hearing = index.hear(0);
        index.store(&hearing, prompts[0].marks()[0].hash);
        prop_assert_eq!(index.len(Source::Exact), 1);
    }
}

#[test]
fn of_very_many_holders_some_are_known() {
    let (mut index, chain) = (PrefixIndex::bounded(100), prompt(0));
    let name = chain.marks().last().unwrap().hash;
    let hearings: Vec<Hearing> = (0..1000).map(|slot| index.hear(slot)).collect();
    hearings.iter().for_each(|hearing| index.store(hearing, name));
    let matches = index.matches(&chain, 0, |_| Capacity::default());
    assert_eq!((0..1000).filter(|slot| matches.of(*slot) > 0).count(), 64);
    hearings.iter().for_each(|hearing| index.remove(hearing, name));
    assert_eq!(index.len(Source::Exact), 0);
}
