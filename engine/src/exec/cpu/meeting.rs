//! Where the ranks of a model on the CPU meet: what they give is added up, or put together, in the order of ranks, so that all of them
//! get the same bits. A rank is a thread here, and what it gives is memory.

use std::sync::{Arc, Barrier, PoisonError, RwLock, RwLockReadGuard};

use crate::{model::spec::Rank, ops::CpuTensor};

/// One rank's way to the others.
#[derive(Clone, Debug)]
pub(super) struct Meeting {
    rank: Rank,
    group: Arc<Group>,
}

#[derive(Debug)]
struct Group {
    barrier: Barrier,
    /// What each gave.
    given: Vec<RwLock<CpuTensor>>,
}

impl Meeting {
    /// Of every rank of a group.
    pub(super) fn of_group(n_ranks: usize) -> Vec<Self> {
        let nothing = || RwLock::new(CpuTensor { width: 1, values: [].into_iter().collect() });
        let given = (0..n_ranks).map(|_| nothing()).collect();
        let group = Arc::new(Group { barrier: Barrier::new(n_ranks), given });
        Rank::all(n_ranks).map(|rank| Self { rank, group: Arc::clone(&group) }).collect()
    }

    /// Which one this is.
    pub(super) fn rank(&self) -> Rank {
        self.rank
    }

    /// The sum of what all ranks give.
    pub(super) fn sum(&self, own: CpuTensor) -> CpuTensor {
        let add = |sum: &mut CpuTensor, given: &CpuTensor| {
            assert_eq!(sum.values.len(), given.values.len(), "ranks give as many rows");
            sum.values.iter_mut().zip(given.values.iter()).for_each(|(sum, x)| *sum += x);
        };
        self.meet(own, |all| {
            let mut sum = all[0].clone();
            all[1..].iter().for_each(|given| add(&mut sum, given));
            sum
        })
    }

    /// Rows whose parts all ranks give.
    pub(super) fn join(&self, own: CpuTensor) -> CpuTensor {
        self.meet(own, |all| {
            let width = all.iter().map(|part| part.width).sum();
            let n_rows = all[0].values.len() / all[0].width;
            let row = |row: usize| all.iter().flat_map(move |part| &part.values[row * part.width..][..part.width]);
            CpuTensor { width, values: (0..n_rows).flat_map(row).copied().collect() }
        })
    }

    /// What `of_all` makes of what all gave. Nobody gives the next before everybody has made it.
    fn meet(&self, own: CpuTensor, of_all: impl FnOnce(&[RwLockReadGuard<'_, CpuTensor>]) -> CpuTensor) -> CpuTensor {
        let Self { rank, group } = self;
        if rank.of == 1 {
            return own;
        }
        *group.given[rank.idx].write().unwrap_or_else(PoisonError::into_inner) = own;
        group.barrier.wait();
        let all = group.given.iter().map(|given| given.read().unwrap_or_else(PoisonError::into_inner));
        let result = of_all(&all.collect::<Vec<_>>());
        group.barrier.wait();
        result
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn on_each<T: Send>(n_ranks: usize, act: impl Fn(Meeting) -> T + Sync) -> Vec<T> {
        let act = &act;
        thread::scope(|scope| {
            let meetings = Meeting::of_group(n_ranks).into_iter();
            let threads: Vec<_> = meetings.map(|meeting| scope.spawn(move || act(meeting))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn ranks_add_up_in_their_order_and_put_parts_of_rows_together() {
        // Large and small: another order of these sums has other bits.
        let given = [1e8f32, 1.0, -1e8];
        let sums = on_each(3, |meeting| {
            let own = CpuTensor { width: 1, values: [given[meeting.rank().idx]].into_iter().collect() };
            [(); 2].map(|()| meeting.sum(own.clone()).values[0])
        });
        assert_eq!(sums, [[(1e8 + 1.0) - 1e8; 2]; 3]);
        let joined = on_each(2, |meeting| {
            let values = if meeting.rank().idx == 0 { vec![1.0, 2.0, 3.0, 4.0] } else { vec![5.0, 6.0] };
            let own = CpuTensor { width: values.len() / 2, values: values.into_iter().collect() };
            meeting.join(own).values.to_vec()
        });
        assert_eq!(joined, [[1.0, 2.0, 5.0, 3.0, 4.0, 6.0]; 2]);
    }
}
