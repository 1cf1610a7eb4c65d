//! Which replicas hold which beginnings of prompts: what they say themselves ([`Hearing`]), and what can be told from what was sent to
//! them. Bounded, and wrong at times: a replica that no longer holds what is written here computes it again, no answer depends on it.
//!
//! Of a replica that is heard, what it was sent is believed until it was computed: then it has said that it holds it, or it does not.
//! Of others it is all that is known. A replica keeps what was used last. So each holder has the replica's count of blocks computed at that time, and what is behind
//! the count by more than the replica's cache holds is not believed. Entries that nobody asks for leave with their generation: when
//! the young one is full the old one is dropped. Whoever is noted has all of its marks renewed, so the marks of a prompt that are
//! present are always its first ones, and the last of them is found by halving.

use std::{
    collections::{HashMap, hash_map::Entry},
    mem,
};

use smallvec::SmallVec;

use crate::{
    BYTES_PER_TOKEN,
    chain::{Chain, Mark},
    held::{Hearing, Held},
    mix::{AlreadyHashed, mix},
};

/// Replicas of one beginning that are remembered. More are no better choice, and looking through them takes time.
pub(crate) const HOLDERS_MAX: usize = 64;
/// Tokens in a KV block.
const BLOCK_TOKENS: u32 = 16;
/// Bytes of text in one, about.
const BLOCK_BYTES: u32 = BLOCK_TOKENS * BYTES_PER_TOKEN;
/// More blocks than any cache holds: what a slot's former replica held is behind by at least as much.
const FORGOTTEN: u32 = 1 << 28;
/// What a replica that is heard was sent is believed for so long at least: until it was computed and what it says has come.
const BELIEVED_SECONDS: u32 = 2;

#[derive(Clone, Copy, Debug)]
struct Holder {
    slot: u32,
    /// The replica's count of blocks when the beginning was used last.
    at: u32,
    /// The second when that was.
    second: u32,
}

type Holders = SmallVec<[Holder; 2]>;
type Generation = HashMap<u64, Holders, AlreadyHashed>;

/// How it is known that a replica holds something.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Source {
    /// It said so.
    Exact,
    /// It was sent it.
    Predicted,
}

impl Source {
    /// Both of them.
    pub const ALL: [Self; 2] = [Self::Exact, Self::Predicted];

    /// One word, for metrics and for who asks.
    pub fn word(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Predicted => "predicted",
        }
    }
}

/// See the module. Replicas are known by small numbers, their slots.
#[derive(Debug, Default)]
pub struct PrefixIndex {
    young: Generation,
    old: Generation,
    n_young_max: usize,
    /// Blocks that each replica computed, by slot.
    counts: Vec<u32>,
    held: Held,
}

/// What a replica can hold, and has to do first.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Capacity {
    /// KV blocks of its cache.
    pub kv_blocks: u32,
    /// Tokens that need prefill there.
    pub waiting_tokens: u64,
}

/// What a replica will hold of a prompt that goes there.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Sent {
    /// All its beginnings, the shortest first.
    pub names: Vec<u64>,
    /// Bytes that the replica has to compute.
    pub new_bytes: u32,
}

impl Sent {
    /// Of a prompt of which the replica holds `matched` bytes.
    pub fn of(chain: &Chain, matched: u32) -> Self {
        let names = chain.marks().iter().map(|mark| mark.hash).collect();
        Self { names, new_bytes: chain.n_bytes().saturating_sub(matched) }
    }
}

/// How many bytes of a prompt's beginning each replica holds, by slot.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Matches {
    ends: Vec<Match>,
}

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct Match {
    end: u32,
    /// Of this, what it said itself.
    exact: u32,
}

impl Matches {
    /// Bytes that the replica in this slot holds.
    pub fn of(&self, slot: u32) -> u32 {
        self.ends.get(slot as usize).map_or(0, |found| found.end)
    }

    /// Of these, bytes that it said itself to hold.
    pub fn exact(&self, slot: u32) -> u32 {
        self.ends.get(slot as usize).map_or(0, |found| found.exact)
    }

    /// How that is known; `None`: it holds nothing.
    pub fn source(&self, slot: u32) -> Option<Source> {
        let found = self.ends.get(slot as usize).filter(|found| found.end > 0)?;
        Some(if found.exact == found.end { Source::Exact } else { Source::Predicted })
    }

    /// The most that any of them holds.
    pub fn longest(&self) -> u32 {
        self.ends.iter().map(|found| found.end).max().unwrap_or_default()
    }
}

impl PrefixIndex {
    /// An empty one that remembers up to this many beginnings of what was sent, and as many of what replicas say.
    pub fn bounded(n_max: usize) -> Self {
        Self { n_young_max: n_max.div_ceil(2), held: Held::bounded(n_max), ..Self::default() }
    }

    /// Beginnings that are remembered, by how they are known.
    pub fn len(&self, source: Source) -> usize {
        match source {
            Source::Exact => self.held.len(),
            Source::Predicted => self.young.len() + self.old.len(),
        }
    }

    /// Who holds how much of a prompt. `capacity` is of the replica of a slot.
    pub fn matches(&self, chain: &Chain, now_ms: u64, capacity: impl Fn(u32) -> Capacity) -> Matches {
        let mut matches = self.predicted(chain, second(now_ms), capacity);
        if self.held.len() > 0 {
            self.add_held(chain, &mut matches);
        }
        matches
    }

    fn predicted(&self, chain: &Chain, second: u32, capacity: impl Fn(u32) -> Capacity) -> Matches {
        let mut matches = Matches { ends: vec![Match::default(); self.counts.len()] };
        let marks = chain.marks();
        let present = marks.partition_point(|mark| self.holders(mark).is_some());
        let mut n_known = 0;
        for mark in marks[..present].iter().rev() {
            let holders = self.holders(mark).map(SmallVec::as_slice).unwrap_or_default();
            // Who holds a longer beginning holds this one: a few more are not worth the look.
            if n_known > 0 && holders.len() <= n_known + n_known / 8 {
                continue;
            }
            n_known = n_known.max(holders.len());
            for holder in holders.iter().filter(|holder| self.is_believed(holder, second, capacity(holder.slot))) {
                let end = &mut matches.ends[holder.slot as usize].end;
                *end = (*end).max(mark.end);
            }
        }
        matches
    }

    /// Every mark is looked at: a replica that gave up one that lies before others may hold those all the same.
    fn add_held(&self, chain: &Chain, matches: &mut Matches) {
        for mark in chain.marks().iter().rev() {
            for slot in self.held.of(mark.hash) {
                let Match { end, exact } = &mut matches.ends[*slot as usize];
                *exact = (*exact).max(mark.end);
                *end = (*end).max(mark.end);
            }
        }
    }

    /// A prompt goes to a replica, which holds `matched` bytes of it.
    pub fn note(&mut self, chain: &Chain, slot: u32, matched: u32, now_ms: u64) {
        self.note_sent(&Sent::of(chain, matched), slot, now_ms);
    }

    /// The same of a prompt that another gateway sent.
    pub fn note_sent(&mut self, sent: &Sent, slot: u32, now_ms: u64) {
        self.know(slot);
        let count = &mut self.counts[slot as usize];
        *count = count.wrapping_add(sent.new_bytes.div_ceil(BLOCK_BYTES));
        let holder = Holder { slot, at: *count, second: second(now_ms) };
        if self.young.len() + sent.names.len() > self.n_young_max {
            self.old = mem::take(&mut self.young);
        }
        for name in &sent.names {
            self.renew(*name, holder);
        }
    }

    /// A slot has another replica from now on, or the same one restarted.
    pub fn forget(&mut self, slot: u32) {
        if let Some(count) = self.counts.get_mut(slot as usize) {
            *count = count.wrapping_add(FORGOTTEN);
        }
        self.held.forget(slot);
    }

    /// From now on the replica in this slot says what it holds; nothing, at first.
    pub fn hear(&mut self, slot: u32) -> Hearing {
        self.know(slot);
        self.held.hear(slot)
    }

    /// Whether the replica in this slot says what it holds.
    pub fn is_heard(&self, slot: u32) -> bool {
        self.held.is_heard(slot)
    }

    /// Whether what it says is still taken in.
    pub fn goes_on(&self, hearing: &Hearing) -> bool {
        self.held.goes_on(hearing)
    }

    /// It says nothing any more: only what it is sent is known.
    pub fn hear_no_more(&mut self, hearing: &Hearing) {
        if self.held.goes_on(hearing) {
            self.held.forget(hearing.slot());
        }
    }

    /// It says that it holds a beginning.
    pub fn store(&mut self, hearing: &Hearing, name: u64) {
        self.held.store(hearing, name);
    }

    /// It says that it does not any more. What it was sent is believed all the same while it waits: it is computed again.
    pub fn remove(&mut self, hearing: &Hearing, name: u64) {
        self.held.remove(hearing, name);
    }

    fn know(&mut self, slot: u32) {
        if self.counts.len() <= slot as usize {
            self.counts.resize(slot as usize + 1, 0);
        }
    }

    fn holders(&self, mark: &Mark) -> Option<&Holders> {
        self.young.get(&mark.hash).or_else(|| self.old.get(&mark.hash))
    }

    /// Prompts are computed in their order, about: one that was sent within the last that wait there has not been.
    fn is_believed(&self, holder: &Holder, second: u32, capacity: Capacity) -> bool {
        let behind = self.counts[holder.slot as usize].wrapping_sub(holder.at);
        let is_new = || second.saturating_sub(holder.second) < BELIEVED_SECONDS;
        let waits = || u64::from(behind) * u64::from(BLOCK_TOKENS) < capacity.waiting_tokens;
        behind < capacity.kv_blocks.min(FORGOTTEN) && (!self.held.is_heard(holder.slot) || is_new() || waits())
    }

    fn renew(&mut self, hash: u64, holder: Holder) {
        let holders = match self.young.entry(hash) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(self.old.remove(&hash).unwrap_or_default()),
        };
        match holders.iter().position(|held| held.slot == holder.slot) {
            Some(place) => holders[place] = holder,
            None if holders.len() < HOLDERS_MAX => holders.push(holder),
            // Any: slots count blocks apart, so none is the oldest.
            None => holders[mix(hash, u64::from(holder.slot)) as usize % HOLDERS_MAX] = holder,
        }
    }
}

fn second(now_ms: u64) -> u32 {
    (now_ms / 1000) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    const BIG: Capacity = idle(1 << 20);

    const fn idle(kv_blocks: u32) -> Capacity {
        Capacity { kv_blocks, waiting_tokens: 0 }
    }

    fn prompt(shared: u8, own: u8, len: usize) -> Chain {
        let (shared, own) = (vec![shared; 4096], vec![own; len]);
        Chain::of(1, &[&shared, &own])
    }

    #[test]
    fn who_was_sent_a_prompt_holds_its_beginning_for_others() {
        let mut index = PrefixIndex::bounded(1000);
        index.note(&prompt(1, 1, 2048), 0, 0, 0);
        index.note(&prompt(1, 2, 1024), 3, 0, 0);
        let same = index.matches(&prompt(1, 1, 2048), 0, |_| BIG);
        let whole = prompt(1, 1, 2048).marks().last().unwrap().end;
        assert_eq!([same.of(0), same.of(1), same.of(3)], [whole, 0, 4096]);
        let other = index.matches(&prompt(1, 9, 4000), 0, |_| BIG);
        assert_eq!([other.of(0), other.of(3), other.longest()], [4096; 3]);
        assert_eq!(index.matches(&prompt(2, 1, 2048), 0, |_| BIG).longest(), 0);
    }

    #[test]
    fn what_a_cache_cannot_hold_any_more_is_not_believed() {
        let mut index = PrefixIndex::bounded(100_000);
        index.note(&prompt(1, 1, 0), 0, 0, 0);
        for other in 0..10 {
            index.note(&prompt(2, other, 4096), 0, 0, 0);
        }
        // 10 prompts of 128 blocks came after it.
        let believed = |kv_blocks| index.matches(&prompt(1, 1, 0), 0, |_| idle(kv_blocks)).of(0) > 0;
        assert!(believed(1281) && !believed(1280));
    }

    #[test]
    fn a_new_replica_holds_nothing_of_its_slots_former_one() {
        let mut index = PrefixIndex::bounded(1000);
        index.note(&prompt(1, 1, 0), 0, 0, 0);
        for _ in 0..10 {
            index.forget(0);
            assert_eq!(index.matches(&prompt(1, 1, 0), 0, |_| idle(u32::MAX)).of(0), 0);
        }
        index.note(&prompt(1, 1, 0), 0, 0, 0);
        assert_eq!(index.matches(&prompt(1, 1, 0), 0, |_| BIG).of(0), 4096);
    }

    #[test]
    fn it_stays_bounded_and_keeps_what_is_asked_for() {
        let mut index = PrefixIndex::bounded(200);
        for at in 0..1000u32 {
            let other = Chain::of(u64::from(at) + 10, &[&vec![7; 1024]]);
            index.note(&other, 1, 0, 0);
            index.note(&prompt(1, 1, 0), 0, 4096, 0);
            assert!(index.len(Source::Predicted) <= 200, "{}", index.len(Source::Predicted));
        }
        assert_eq!(index.matches(&prompt(1, 1, 0), 0, |_| BIG).of(0), 4096);
    }

    #[test]
    fn a_popular_beginning_has_bounded_holders() {
        let mut index = PrefixIndex::bounded(1000);
        for slot in 0..1000 {
            index.note(&prompt(1, 1, 0), slot, 0, 0);
        }
        let matches = index.matches(&prompt(1, 1, 0), 0, |_| BIG);
        let holders = (0..1000).filter(|slot| matches.of(*slot) == 4096).count();
        assert!((32..=HOLDERS_MAX).contains(&holders), "{holders}");
    }

    fn names(chain: &Chain) -> Vec<u64> {
        chain.marks().iter().map(|mark| mark.hash).collect()
    }

    #[test]
    fn of_a_replica_that_is_heard_what_it_was_sent_is_believed_until_it_should_have_said_so() {
        let (mut index, prompt) = (PrefixIndex::bounded(1000), prompt(1, 1, 0));
        let hearing = index.hear(0);
        [0, 1].into_iter().for_each(|slot| index.note(&prompt, slot, 0, 5_000));
        let known = |index: &PrefixIndex, now_ms| {
            let matches = index.matches(&prompt, now_ms, |_| BIG);
            [0, 1].map(|slot| (matches.of(slot), matches.source(slot)))
        };
        let sent = (4096, Some(Source::Predicted));
        assert_eq!(known(&index, 6_900), [sent, sent]);
        assert_eq!(known(&index, 7_000), [(0, None), sent], "the other one cannot say so");
        names(&prompt)[..2].iter().for_each(|name| index.store(&hearing, *name));
        assert_eq!(known(&index, 7_000)[0], (512, Some(Source::Exact)));
        assert_eq!(known(&index, 6_900)[0], sent, "the rest may come");
        names(&prompt).iter().for_each(|name| index.remove(&hearing, *name));
        assert_eq!(known(&index, 6_900)[0], sent, "it may have given up an older one");
        assert_eq!(known(&index, 7_000)[0], (0, None));
    }

    #[test]
    fn what_waits_for_its_prefill_will_be_held_whatever_is_given_up_meanwhile() {
        let mut index = PrefixIndex::bounded(10_000);
        let (hearing, [first, second]) = (index.hear(0), [1, 2].map(|own| prompt(own, own, 0)));
        let new_tokens = first.n_bytes() / BYTES_PER_TOKEN;
        index.note(&first, 0, 0, 0);
        index.note(&second, 0, 0, 0);
        names(&first).iter().for_each(|name| index.remove(&hearing, *name));
        let known = |waiting_tokens: u32| {
            let capacity = Capacity { waiting_tokens: waiting_tokens.into(), ..BIG };
            [&first, &second].map(|prompt| index.matches(prompt, 60_000, |_| capacity).of(0) > 0)
        };
        assert_eq!(known(2 * new_tokens), [true, true]);
        assert_eq!(known(new_tokens), [false, true], "the first was computed, and it does not say that it holds it");
        assert_eq!(known(0), [false, false]);
    }

    #[test]
    fn who_is_heard_no_more_is_predicted_as_before() {
        let (mut index, prompt) = (PrefixIndex::bounded(1000), prompt(1, 1, 0));
        let hearing = index.hear(3);
        names(&prompt).iter().for_each(|name| index.store(&hearing, *name));
        index.note(&prompt, 3, 4096, 0);
        let source = |index: &PrefixIndex| index.matches(&prompt, 90_000, |_| BIG).source(3);
        assert_eq!(source(&index), Some(Source::Exact));
        index.hear_no_more(&hearing);
        assert_eq!((source(&index), index.len(Source::Exact)), (Some(Source::Predicted), 0));
        let [hearing, newer] = [(); 2].map(|()| index.hear(3));
        index.store(&hearing, names(&prompt)[0]);
        assert_eq!((index.goes_on(&hearing), index.goes_on(&newer), index.len(Source::Exact)), (false, true, 0));
        index.forget(3);
        assert!(!index.goes_on(&newer) && source(&index).is_none());
    }
}
