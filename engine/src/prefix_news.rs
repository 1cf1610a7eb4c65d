//! What the cache holds of marked beginnings of prompts ([`PrefixMark`](crate::PrefixMark)), told step by step to who listens. The
//! engine never waits for a listener: what has no room is lost, and as soon as there is room again all that is held is told
//! instead. Without marks nothing is told.

use tokio::sync::mpsc::{Receiver, Sender, channel, error::TrySendError};

use crate::kv::{BlockPool, PrefixChange};

/// News that may wait for the listener: seconds of steps.
const UNHEARD_MAX: usize = 1024;

/// What is told at a time.
#[derive(Clone, Debug, PartialEq)]
pub enum PrefixNews {
    /// What changed, in this order.
    Changes(Vec<PrefixChange>),
    /// All that is held; something was lost before it.
    Whole(Vec<u64>),
}

/// The engine's end.
#[derive(Debug)]
pub(crate) struct PrefixTeller {
    listener: Sender<PrefixNews>,
    has_lost: bool,
}

impl PrefixTeller {
    /// A teller and what it tells.
    pub(crate) fn channel() -> (Self, Receiver<PrefixNews>) {
        let (listener, news) = channel(UNHEARD_MAX);
        (Self { listener, has_lost: false }, news)
    }

    /// Tells what changed in the pool since the last call.
    pub(crate) fn tell(&mut self, pool: &mut BlockPool) {
        let changes = pool.take_changes();
        if self.has_lost {
            if let Ok(place) = self.listener.try_reserve() {
                place.send(PrefixNews::Whole(pool.marks()));
                self.has_lost = false;
            }
        } else if !changes.is_empty() {
            let sent = self.listener.try_send(PrefixNews::Changes(changes));
            self.has_lost = matches!(sent, Err(TrySendError::Full(_)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{PrefixChange::Stored, *};
    use crate::kv::BlockHash;

    #[test]
    fn what_is_lost_is_told_as_a_whole_when_there_is_room() {
        let (mut teller, mut news) = PrefixTeller::channel();
        let mut pool = BlockPool::new(UNHEARD_MAX + 10);
        let mut store = |name: u32, pool: &mut BlockPool| {
            let (block, hash) = (pool.take().unwrap(), BlockHash::ROOT.then(&[name; 16]));
            pool.name(block, hash);
            pool.mark(hash, name.into());
            teller.tell(pool);
            teller.tell(pool);
        };
        (0..UNHEARD_MAX as u32 + 2).for_each(|name| store(name, &mut pool));
        for name in 0..UNHEARD_MAX as u64 {
            assert_eq!(news.try_recv(), Ok(PrefixNews::Changes(vec![Stored(name)])));
        }
        assert!(news.try_recv().is_err(), "nothing is told while nothing happens");
        store(5000, &mut pool);
        let Ok(PrefixNews::Whole(mut all)) = news.try_recv() else { panic!("two were lost") };
        all.sort_unstable();
        assert_eq!((all.len(), all.last()), (UNHEARD_MAX + 3, Some(&5000)));
        store(5001, &mut pool);
        assert_eq!(news.try_recv(), Ok(PrefixNews::Changes(vec![Stored(5001)])));
    }

    #[test]
    fn without_marks_and_without_a_listener_nothing_is_told() {
        let (mut teller, mut news) = PrefixTeller::channel();
        let mut pool = BlockPool::new(1);
        teller.tell(&mut pool);
        assert!(news.try_recv().is_err());
        drop(news);
        let (block, hash) = (pool.take().unwrap(), BlockHash::ROOT.then(&[7; 16]));
        pool.name(block, hash);
        pool.mark(hash, 7);
        teller.tell(&mut pool);
        assert!(pool.take_changes().is_empty() && !teller.has_lost);
    }
}
