//! Work on many items by as many threads as there are processors, each the next item that nobody has: for starts, which wait for nothing
//! else. Steps have threads of their own.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

/// What `act` makes of each item, in the order of the items.
pub(crate) fn each<T: Sync, R: Send>(items: &[T], act: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut made = Vec::new();
        loop {
            let idx = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(idx) else { return made };
            made.push((idx, act(item)));
        }
    };
    let n_threads = thread::available_parallelism().map_or(1, usize::from).min(items.len()).max(1);
    let mut made: Vec<(usize, R)> = thread::scope(|scope| {
        let workers: Vec<_> = (0..n_threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("no item panics")).collect()
    });
    made.sort_by_key(|(idx, _)| *idx);
    made.into_iter().map(|(_, made)| made).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_made_of_each_comes_in_the_order_of_the_items() {
        let items: Vec<usize> = (0..1000).collect();
        assert_eq!(each(&items, |item| item * 2), (0..2000).step_by(2).collect::<Vec<_>>());
        assert_eq!(each(&[] as &[usize], |item| *item), [] as [usize; 0]);
    }
}
