//! What grammars hold in memory together, and which of them has to end when that is too much. An account is of one lexer or of one way
//! through a grammar; who holds it says how large it is, nothing is measured here.
//!
//! ```text
//! bytes        █
//!              █ █         what is above the line ends at its next step; the line is where
//! part ────────█─█───────  all that is below it makes up the limit
//!          █ ▄ █ █ ▁
//! ```
//! So small grammars do not end for the sake of large ones. What stands in line takes no step and grows no more: at worst all hold twice
//! the limit.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Bytes that all grammars of an engine may hold together. A schema that people write holds one to a few megabytes.
pub(super) const MAX_BYTES: usize = 512 << 20;

/// All accounts.
#[derive(Debug)]
pub(super) struct Memory {
    max_bytes: usize,
    accounts: Mutex<Accounts>,
}

#[derive(Debug, Default)]
struct Accounts {
    /// By the number of each.
    bytes: HashMap<u64, usize>,
    n_opened: u64,
    held: usize,
}

/// What one lexer or one way holds, until it is dropped.
#[derive(Debug)]
pub(super) struct Account {
    memory: Arc<Memory>,
    number: u64,
}

/// All together hold too much, and one more than its part.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct TooMuch {
    pub(super) max_bytes: usize,
    pub(super) part: usize,
}

impl Memory {
    pub(super) fn new(max_bytes: usize) -> Arc<Self> {
        Arc::new(Self { max_bytes, accounts: Mutex::default() })
    }

    pub(super) fn open(self: &Arc<Self>) -> Account {
        let mut accounts = self.accounts();
        accounts.n_opened += 1;
        let number = accounts.n_opened;
        accounts.bytes.insert(number, 0);
        Account { memory: Arc::clone(self), number }
    }

    /// Whether what nobody uses should go.
    pub(super) fn is_tight(&self) -> bool {
        self.accounts().held > self.max_bytes / 2
    }

    pub(super) fn held(&self) -> usize {
        self.accounts().held
    }

    fn accounts(&self) -> MutexGuard<'_, Accounts> {
        // Every critical section leaves valid accounts.
        self.accounts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Account {
    /// It holds so much now. The error: that has to end.
    pub(super) fn set(&self, bytes: usize) -> Result<(), TooMuch> {
        let max_bytes = self.memory.max_bytes;
        let mut accounts = self.memory.accounts();
        let before = accounts.bytes.insert(self.number, bytes).expect("an account is open until it is dropped");
        accounts.held = accounts.held - before + bytes;
        if accounts.held <= max_bytes {
            return Ok(());
        }
        match part(accounts.bytes.values().copied().collect(), max_bytes) {
            part if bytes > part => Err(TooMuch { max_bytes, part }),
            _ => Ok(()),
        }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        let mut accounts = self.memory.accounts();
        accounts.held -= accounts.bytes.remove(&self.number).expect("an account is open until it is dropped");
    }
}

/// The most that each may have, so that all have `max_bytes` together: what small ones leave is the large ones'.
fn part(mut bytes: Vec<usize>, max_bytes: usize) -> usize {
    bytes.sort_unstable();
    let mut left = max_bytes;
    for (n_left, bytes) in (1..=bytes.len()).rev().zip(bytes) {
        if bytes > left / n_left {
            return left / n_left;
        }
        left -= bytes;
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_part_of_each_is_what_the_small_ones_leave() {
        assert_eq!(part(vec![10, 500, 20, 300], 430), 200);
        assert_eq!(part(vec![101, 101, 101], 300), 100);
        assert_eq!(part(vec![7], 5), 5);
    }

    #[test]
    fn who_holds_more_than_a_part_ends_and_who_holds_less_does_not() {
        let memory = Memory::new(100);
        let [small, large, larger] = [(); 3].map(|()| memory.open());
        assert_eq!((small.set(10), large.set(40), larger.set(50)), (Ok(()), Ok(()), Ok(())));
        assert_eq!(small.set(11), Ok(()), "the large ones are to end for it");
        assert_eq!(larger.set(51), Err(TooMuch { max_bytes: 100, part: 49 }));
        assert_eq!(large.set(40), Ok(()));
        drop(larger);
        assert_eq!((large.set(89), memory.is_tight()), (Ok(()), true));
        drop((small, large));
        assert_eq!((memory.is_tight(), memory.held(), memory.accounts().bytes.len()), (false, 0, 0));
    }

    #[test]
    fn at_worst_twice_the_limit_is_held() {
        let memory = Memory::new(1000);
        let idle = memory.open();
        idle.set(1000).unwrap();
        let growing: Vec<_> = (0..20).map(|_| memory.open()).collect();
        for bytes in 1..200 {
            growing.iter().for_each(|account| {
                // Who may not grow is gone.
                if account.set(bytes).is_err() {
                    account.set(0).unwrap();
                }
            });
            assert!(memory.held() <= 2000);
        }
    }
}
