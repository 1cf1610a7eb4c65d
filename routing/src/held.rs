//! Which replicas hold which beginnings of prompts, as they say themselves. Exact as far as they are heard: what a replica has stored
//! is here until it says that it has removed it, or until whoever listens to it lost something and has it forgotten.
//!
//! Bounded: what does not fit is not remembered, and of those that hold what very many hold, some are.

use std::collections::{HashMap, HashSet, hash_map::Entry};

use smallvec::SmallVec;

use crate::{index::HOLDERS_MAX, mix::AlreadyHashed};

/// Listening to one replica, from when it told all that it holds. Over for good when its slot is forgotten or heard anew.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Hearing {
    slot: u32,
    number: u64,
}

impl Hearing {
    /// Of the replica in this slot.
    pub fn slot(&self) -> u32 {
        self.slot
    }
}

/// See the module. Replicas are known by their slots.
#[derive(Debug, Default)]
pub(crate) struct Held {
    holders: HashMap<u64, SmallVec<[u32; 4]>, AlreadyHashed>,
    /// By slot; `None`: nobody listens to it.
    heard: Vec<Option<Announced>>,
    n_hearings: u64,
    n_max: usize,
}

/// What a replica has told.
#[derive(Debug)]
struct Announced {
    number: u64,
    /// Of the beginnings that it is a holder of.
    names: HashSet<u64, AlreadyHashed>,
}

impl Held {
    /// An empty one of at most so many beginnings.
    pub(crate) fn bounded(n_max: usize) -> Self {
        Self { n_max, ..Self::default() }
    }

    /// Beginnings.
    pub(crate) fn len(&self) -> usize {
        self.holders.len()
    }

    /// Whether a replica says what it holds.
    pub(crate) fn is_heard(&self, slot: u32) -> bool {
        self.heard.get(slot as usize).is_some_and(Option::is_some)
    }

    /// Who holds a beginning.
    pub(crate) fn of(&self, name: u64) -> &[u32] {
        self.holders.get(&name).map(SmallVec::as_slice).unwrap_or_default()
    }

    /// A replica says what it holds from now on: nothing, at first.
    pub(crate) fn hear(&mut self, slot: u32) -> Hearing {
        self.forget(slot);
        if self.heard.len() <= slot as usize {
            self.heard.resize_with(slot as usize + 1, || None);
        }
        self.n_hearings += 1;
        self.heard[slot as usize] = Some(Announced { number: self.n_hearings, names: HashSet::default() });
        Hearing { slot, number: self.n_hearings }
    }

    /// Nobody listens to it any more.
    pub(crate) fn forget(&mut self, slot: u32) {
        let Some(heard) = self.heard.get_mut(slot as usize).and_then(Option::take) else { return };
        heard.names.iter().for_each(|name| self.lose(slot, *name));
    }

    /// Whether it is not over.
    pub(crate) fn goes_on(&self, hearing: &Hearing) -> bool {
        self.heard
            .get(hearing.slot as usize)
            .and_then(Option::as_ref)
            .is_some_and(|heard| heard.number == hearing.number)
    }

    /// The replica holds a beginning.
    pub(crate) fn store(&mut self, hearing: &Hearing, name: u64) {
        let is_full = self.holders.len() >= self.n_max;
        let Some(heard) = self.names(hearing) else { return };
        if heard.contains(&name) {
            return;
        }
        let holders = match self.holders.entry(name) {
            Entry::Vacant(_) if is_full => return,
            Entry::Vacant(new) => new.insert(SmallVec::new()),
            Entry::Occupied(known) => known.into_mut(),
        };
        if holders.len() < HOLDERS_MAX {
            holders.push(hearing.slot);
            self.names(hearing).expect("it goes on").insert(name);
        }
    }

    /// It does not hold it any more.
    pub(crate) fn remove(&mut self, hearing: &Hearing, name: u64) {
        if self.names(hearing).is_some_and(|names| names.remove(&name)) {
            self.lose(hearing.slot, name);
        }
    }

    fn names(&mut self, hearing: &Hearing) -> Option<&mut HashSet<u64, AlreadyHashed>> {
        let heard = self.heard.get_mut(hearing.slot as usize)?.as_mut()?;
        (heard.number == hearing.number).then_some(&mut heard.names)
    }

    fn lose(&mut self, slot: u32, name: u64) {
        let Entry::Occupied(mut holders) = self.holders.entry(name) else { unreachable!("a holder's name is known") };
        holders.get_mut().retain(|holder| *holder != slot);
        if holders.get().is_empty() {
            holders.remove();
        }
    }
}
