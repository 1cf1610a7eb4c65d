//! Which replicas hold which beginnings of prompts, as far as can be told from what was sent to them. Bounded, and wrong at times:
//! a replica that no longer holds what is written here computes it again, no answer depends on it.
//!
//! A replica keeps what was used last. So each holder has the replica's count of blocks computed at that time, and what is behind
//! the count by more than the replica's cache holds is not believed. Entries that nobody asks for leave with their generation: when
//! the young one is full the old one is dropped. Whoever is noted has all of its marks renewed, so the marks of a prompt that are
//! present are always its first ones, and the last of them is found by halving.

use std::{
    collections::{HashMap, hash_map::Entry},
    hash::{BuildHasherDefault, Hasher},
    mem,
};

use smallvec::SmallVec;

use crate::{
    chain::{Chain, Mark},
    mix::mix,
};

/// Replicas of one beginning that are remembered. More are no better choice, and looking through them takes time.
const HOLDERS_MAX: usize = 64;
/// Bytes of text in a KV block of 16 tokens, about.
const BLOCK_BYTES: u32 = 64;
/// More blocks than any cache holds: what a slot's former replica held is behind by at least as much.
const FORGOTTEN: u32 = 1 << 28;

#[derive(Clone, Copy, Debug)]
struct Holder {
    slot: u32,
    /// The replica's count of blocks when the beginning was used last.
    at: u32,
}

type Holders = SmallVec<[Holder; 2]>;
type Generation = HashMap<u64, Holders, BuildHasherDefault<Hashed>>;

/// See the module. Replicas are known by small numbers, their slots.
#[derive(Debug, Default)]
pub struct PrefixIndex {
    young: Generation,
    old: Generation,
    n_young_max: usize,
    /// Blocks that each replica computed, by slot.
    counts: Vec<u32>,
}

/// How many bytes of a prompt's beginning each replica holds, by slot.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Matches {
    ends: Vec<u32>,
}

impl Matches {
    /// Bytes that the replica in this slot holds.
    pub fn of(&self, slot: u32) -> u32 {
        self.ends.get(slot as usize).copied().unwrap_or_default()
    }

    /// The most that any of them holds.
    pub fn longest(&self) -> u32 {
        self.ends.iter().copied().max().unwrap_or_default()
    }
}

impl PrefixIndex {
    /// An empty one that remembers up to this many beginnings.
    pub fn bounded(n_max: usize) -> Self {
        Self { n_young_max: n_max.div_ceil(2), ..Self::default() }
    }

    /// Beginnings that are remembered.
    pub fn len(&self) -> usize {
        self.young.len() + self.old.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Who holds how much of a prompt. `capacity` is how many KV blocks the replica of a slot has.
    pub fn matches(&self, chain: &Chain, capacity: impl Fn(u32) -> u32) -> Matches {
        let mut matches = Matches { ends: vec![0; self.counts.len()] };
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
            for holder in holders.iter().filter(|holder| self.is_held(holder, capacity(holder.slot))) {
                let end = &mut matches.ends[holder.slot as usize];
                *end = (*end).max(mark.end);
            }
        }
        matches
    }

    /// A prompt goes to a replica, which holds `matched` bytes of it.
    pub fn note(&mut self, chain: &Chain, slot: u32, matched: u32) {
        if self.counts.len() <= slot as usize {
            self.counts.resize(slot as usize + 1, 0);
        }
        let count = &mut self.counts[slot as usize];
        *count = count.wrapping_add(chain.n_bytes().saturating_sub(matched).div_ceil(BLOCK_BYTES));
        let holder = Holder { slot, at: *count };
        if self.young.len() + chain.marks().len() > self.n_young_max {
            self.old = mem::take(&mut self.young);
        }
        for mark in chain.marks() {
            self.renew(mark.hash, holder);
        }
    }

    /// A slot has another replica from now on, or the same one restarted.
    pub fn forget(&mut self, slot: u32) {
        if let Some(count) = self.counts.get_mut(slot as usize) {
            *count = count.wrapping_add(FORGOTTEN);
        }
    }

    fn holders(&self, mark: &Mark) -> Option<&Holders> {
        self.young.get(&mark.hash).or_else(|| self.old.get(&mark.hash))
    }

    fn is_held(&self, holder: &Holder, capacity: u32) -> bool {
        let behind = self.counts[holder.slot as usize].wrapping_sub(holder.at);
        behind < capacity.min(FORGOTTEN)
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

/// Keys are hashes already.
#[derive(Clone, Copy, Debug, Default)]
struct Hashed(u64);

impl Hasher for Hashed {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are of 64 bits")
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BIG: u32 = 1 << 20;

    fn prompt(shared: u8, own: u8, len: usize) -> Chain {
        let (shared, own) = (vec![shared; 4096], vec![own; len]);
        Chain::of(1, &[&shared, &own])
    }

    #[test]
    fn who_was_sent_a_prompt_holds_its_beginning_for_others() {
        let mut index = PrefixIndex::bounded(1000);
        index.note(&prompt(1, 1, 2048), 0, 0);
        index.note(&prompt(1, 2, 1024), 3, 0);
        let same = index.matches(&prompt(1, 1, 2048), |_| BIG);
        let whole = prompt(1, 1, 2048).marks().last().unwrap().end;
        assert_eq!([same.of(0), same.of(1), same.of(3)], [whole, 0, 4096]);
        let other = index.matches(&prompt(1, 9, 4000), |_| BIG);
        assert_eq!([other.of(0), other.of(3), other.longest()], [4096; 3]);
        assert_eq!(index.matches(&prompt(2, 1, 2048), |_| BIG).longest(), 0);
    }

    #[test]
    fn what_a_cache_cannot_hold_any_more_is_not_believed() {
        let mut index = PrefixIndex::bounded(100_000);
        index.note(&prompt(1, 1, 0), 0, 0);
        for other in 0..10 {
            index.note(&prompt(2, other, 4096), 0, 0);
        }
        // 10 prompts of 128 blocks came after it.
        let believed = |capacity| index.matches(&prompt(1, 1, 0), |_| capacity).of(0) > 0;
        assert!(believed(1281) && !believed(1280));
    }

    #[test]
    fn a_new_replica_holds_nothing_of_its_slots_former_one() {
        let mut index = PrefixIndex::bounded(1000);
        index.note(&prompt(1, 1, 0), 0, 0);
        for _ in 0..10 {
            index.forget(0);
            assert_eq!(index.matches(&prompt(1, 1, 0), |_| u32::MAX).of(0), 0);
        }
        index.note(&prompt(1, 1, 0), 0, 0);
        assert_eq!(index.matches(&prompt(1, 1, 0), |_| BIG).of(0), 4096);
    }

    #[test]
    fn it_stays_bounded_and_keeps_what_is_asked_for() {
        let mut index = PrefixIndex::bounded(200);
        for at in 0..1000u32 {
            let other = Chain::of(u64::from(at) + 10, &[&vec![7; 1024]]);
            index.note(&other, 1, 0);
            index.note(&prompt(1, 1, 0), 0, 4096);
            assert!(index.len() <= 200, "{}", index.len());
        }
        assert_eq!(index.matches(&prompt(1, 1, 0), |_| BIG).of(0), 4096);
    }

    #[test]
    fn a_popular_beginning_has_bounded_holders() {
        let mut index = PrefixIndex::bounded(1000);
        for slot in 0..1000 {
            index.note(&prompt(1, 1, 0), slot, 0);
        }
        let matches = index.matches(&prompt(1, 1, 0), |_| BIG);
        let holders = (0..1000).filter(|slot| matches.of(*slot) == 4096).count();
        assert!((32..=HOLDERS_MAX).contains(&holders), "{holders}");
    }
}
