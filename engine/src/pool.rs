//! The compute threads: one piece of work at a time, split into tasks that all threads claim, the caller included.
//!
//! Each thread has a share of neighbouring tasks and takes them in order, so that what one reads ahead is what it needs
//! next; who has done its own takes the last ones of others. A forward pass joins some 120 times, so threads spin between
//! two pieces before they sleep, and handing work over takes one store. Knows nothing of what it runs; never allocates.

use std::{
    hint,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// How long a thread without work spins: longer than the gap between two pieces of a step, much shorter than a wait
/// for the next request.
const SPIN: Duration = Duration::from_micros(50);
/// Pauses between two looks at the clock.
const PAUSES: usize = 64;
/// Pauses after which a caller that waits for others lets them have its CPU: some 100 microseconds.
const YIELD_AFTER: usize = 2048;

/// The share of the thread that hands work out.
const CALLER: usize = 0;

/// Threads that wait for work; they end when the pool is dropped.
#[derive(Debug)]
pub(crate) struct Pool {
    shared: Arc<Shared>,
    threads: Vec<thread::JoinHandle<()>>,
}

/// What a piece of work does for one of its tasks.
type Task<'a> = &'a (dyn Fn(usize) + Sync);

/// `claims` is `epoch << 32 | tasks left to claim`. A claim takes one off by compare-exchange: that it succeeds proves
/// that the piece of work it read is still the current one, since no piece ends before its claimed tasks are done. Which
/// task that is, the shares say: together they hold all that are not yet taken.
#[derive(Debug)]
struct Shared {
    claims: AtomicU64,
    shares: Vec<Share>,
    /// The caller's `Task`, valid while a claimed task is not done.
    work: AtomicPtr<Task<'static>>,
    done: AtomicU32,
    has_panicked: AtomicBool,
    is_closed: AtomicBool,
    sleeping: AtomicU32,
    lock: Mutex<()>,
    wake: Condvar,
}

impl Pool {
    /// A pool that computes on `n_threads` threads, the caller's among them.
    pub(crate) fn new(n_threads: usize) -> std::io::Result<Self> {
        Self::named("engine-cpu", n_threads)
    }

    /// The same with another name for its threads, which has a number behind it.
    pub(crate) fn named(name: &str, n_threads: usize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared::new(n_threads.max(1)));
        let mut pool = Self { shared, threads: Vec::new() };
        for idx in 1..n_threads {
            let shared = Arc::clone(&pool.shared);
            let builder = thread::Builder::new().name(format!("{name}-{idx}"));
            pool.threads.push(builder.spawn(move || shared.serve(idx))?);
        }
        Ok(pool)
    }

    /// Threads that compute, the caller's included.
    pub(crate) fn n_threads(&self) -> usize {
        self.threads.len() + 1
    }

    /// Runs `task(0)` to `task(n_tasks - 1)`, in any order and on any thread, and returns when all are done. One caller
    /// at a time. A task that panics makes this panic after the others are done.
    pub(crate) fn run(&mut self, n_tasks: usize, task: Task<'_>) {
        if self.threads.is_empty() || n_tasks <= 1 {
            return (0..n_tasks).for_each(task);
        }
        let shared = &self.shared;
        shared.publish(n_tasks, &task);
        shared.work_off(CALLER);
        shared.wait_for(n_tasks as u32);
        assert!(!shared.has_panicked.swap(false, Ordering::Relaxed), "a task panicked; its thread said why");
    }

    /// `task(idx, item)` for every item.
    #[expect(unsafe_code, reason = "a slice is lent item by item to tasks that cannot overlap")]
    pub(crate) fn for_each<T: Send>(&mut self, items: &mut [T], task: impl Fn(usize, &mut T) + Sync) {
        let items = Shareable(items.as_mut_ptr(), items.len());
        self.run(items.1, &|idx| {
            // Mentioned whole, so that the closure borrows the wrapper and not its pointer.
            let items = &items;
            assert!(idx < items.1, "a task is one of those asked for");
            // SAFETY: `idx` lies inside the slice, which this call borrows exclusively until all tasks are done, and
            // no two tasks have the same index.
            task(idx, unsafe { &mut *items.0.add(idx) });
        });
    }

    /// `task(first, rows)` for runs of `per_task` rows of `width` numbers; `first` is the index of the run's first row.
    pub(crate) fn for_rows<T: Send>(&mut self, values: &mut [T], rows: RowRuns, task: impl Fn(usize, &mut [T]) + Sync) {
        let RowRuns { width, per_task } = rows;
        if values.len() <= width * per_task {
            return task(0, values);
        }
        let mut runs: Vec<&mut [T]> = values.chunks_mut(width * per_task).collect();
        self.for_each(&mut runs, |idx, run| task(idx * per_task, run));
    }
}

/// How rows are cut into tasks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowRuns {
    /// Numbers of a row.
    pub(crate) width: usize,
    /// Rows of a task.
    pub(crate) per_task: usize,
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.is_closed.store(true, Ordering::SeqCst);
        drop(self.shared.locked());
        self.shared.wake.notify_all();
        for thread in self.threads.drain(..) {
            // It returns no value, and what its tasks panicked with was reported when they did.
            let _ = thread.join();
        }
    }
}

/// A slice in parts, so that tasks on other threads may each take theirs.
struct Shareable<T>(*mut T, usize);

#[expect(unsafe_code, reason = "says that items may be lent to other threads")]
// SAFETY: only disjoint items are taken from it, each by one task, and `T` may be sent.
unsafe impl<T: Send> Sync for Shareable<T> {}

/// Tasks that a thread is to do: `first << 32 | end`, on a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Share(AtomicU64);

impl Share {
    fn set(&self, tasks: Range<u32>) {
        self.0.store(u64::from(tasks.start) << 32 | u64::from(tasks.end), Ordering::Relaxed);
    }

    /// Takes the first task, if there is one.
    fn first(&self) -> Option<usize> {
        self.take(|first, end| (first, first + 1..end))
    }

    /// Takes the last task, if there is one.
    fn last(&self) -> Option<usize> {
        self.take(|first, end| (end - 1, first..end - 1))
    }

    fn take(&self, split: impl Fn(u32, u32) -> (u32, Range<u32>)) -> Option<usize> {
        let mut share = self.0.load(Ordering::Relaxed);
        loop {
            let (first, end) = ((share >> 32) as u32, share as u32);
            if first >= end {
                return None;
            }
            let (task, left) = split(first, end);
            let left = u64::from(left.start) << 32 | u64::from(left.end);
            match self.0.compare_exchange_weak(share, left, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(task as usize),
                Err(current) => share = current,
            }
        }
    }
}

impl Shared {
    fn new(n_threads: usize) -> Self {
        Self {
            claims: AtomicU64::new(0),
            shares: (0..n_threads).map(|_| Share::default()).collect(),
            work: AtomicPtr::default(),
            done: AtomicU32::new(0),
            has_panicked: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
            sleeping: AtomicU32::new(0),
            lock: Mutex::new(()),
            wake: Condvar::new(),
        }
    }

    /// Makes `task` the current work. The caller keeps `task` alive until `done` says that all tasks are.
    fn publish(&self, n_tasks: usize, task: &Task<'_>) {
        let n_tasks = u32::try_from(n_tasks).expect("no step has 2^32 tasks");
        let epoch = self.claims.load(Ordering::Relaxed) >> 32;
        self.share_out(n_tasks);
        self.work.store((&raw const *task).cast_mut().cast(), Ordering::Relaxed);
        self.done.store(0, Ordering::Relaxed);
        self.claims.store((epoch + 1) << 32 | u64::from(n_tasks), Ordering::SeqCst);
        // Either this sees that a thread sleeps, or that thread, which says so first and then looks again, sees the work.
        if self.sleeping.load(Ordering::SeqCst) > 0 {
            drop(self.locked());
            self.wake.notify_all();
        }
    }

    /// Nobody takes from a share before the claims are published.
    fn share_out(&self, n_tasks: u32) {
        let n_shares = self.shares.len() as u64;
        let start = |idx: usize| (u64::from(n_tasks) * idx as u64 / n_shares) as u32;
        for (idx, share) in self.shares.iter().enumerate() {
            share.set(start(idx)..start(idx + 1));
        }
    }

    /// Claims tasks and runs them until none is left.
    fn work_off(&self, thread: usize) {
        while let Some(work) = self.claim() {
            let task = self.take(thread);
            if catch_unwind(AssertUnwindSafe(|| work(task))).is_err() {
                self.has_panicked.store(true, Ordering::Relaxed);
            }
            self.done.fetch_add(1, Ordering::Release);
        }
    }

    /// A claimed task: of the thread's own share, else the last one of another's. Shares only shrink and hold one task for
    /// each claim, so looking once is enough.
    fn take(&self, thread: usize) -> usize {
        let (before, from_own) = self.shares.split_at(thread);
        let (own, after) = from_own.split_first().expect("every thread has a share");
        let of_others = || after.iter().chain(before).find_map(Share::last);
        own.first().or_else(of_others).expect("a claimed task is in some share")
    }

    #[expect(unsafe_code, reason = "work outlives its tasks, which no lifetime can say across threads")]
    fn claim(&self) -> Option<Task<'_>> {
        let mut claims = self.claims.load(Ordering::Acquire);
        while claims as u32 > 0 {
            let work = self.work.load(Ordering::Relaxed);
            match self.claims.compare_exchange_weak(claims, claims - 1, Ordering::Acquire, Ordering::Acquire) {
                // SAFETY: the exchange shows that this epoch still had an unclaimed task, so `work` was read while its
                // caller was inside `run`, and `run` does not return before this task is counted in `done`.
                Ok(_) => return Some(unsafe { *work }),
                Err(current) => claims = current,
            }
        }
        None
    }

    /// A thread's life: works, spins, sleeps.
    fn serve(&self, thread: usize) {
        while !self.is_closed.load(Ordering::Relaxed) {
            self.work_off(thread);
            if !self.spin() {
                self.sleep();
            }
        }
    }

    /// Waits for the tasks that other threads claimed. They are short, unless the thread that has one lost its CPU: then
    /// it may want this one.
    fn wait_for(&self, n_tasks: u32) {
        while self.done.load(Ordering::Acquire) < n_tasks {
            for _ in 0..YIELD_AFTER {
                if self.done.load(Ordering::Acquire) == n_tasks {
                    return;
                }
                hint::spin_loop();
            }
            thread::yield_now();
        }
    }

    fn has_work(&self) -> bool {
        self.claims.load(Ordering::SeqCst) as u32 > 0 || self.is_closed.load(Ordering::SeqCst)
    }

    /// Whether work came within [`SPIN`].
    fn spin(&self) -> bool {
        let start = Instant::now();
        while start.elapsed() < SPIN {
            for _ in 0..PAUSES {
                if self.has_work() {
                    return true;
                }
                hint::spin_loop();
            }
        }
        false
    }

    fn sleep(&self) {
        let mut guard = self.locked();
        self.sleeping.fetch_add(1, Ordering::SeqCst);
        while !self.has_work() {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleeping.fetch_sub(1, Ordering::SeqCst);
    }

    fn locked(&self) -> MutexGuard<'_, ()> {
        self.lock.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn every_task_runs_once_in_every_piece_of_work() {
        for n_threads in [1, 2, 5] {
            let mut pool = Pool::new(n_threads).unwrap();
            for n_tasks in (0..300).chain([2, 1, 0]) {
                let runs: Vec<AtomicUsize> = (0..n_tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(n_tasks, &|task| {
                    runs[task].fetch_add(1, Ordering::Relaxed);
                });
                assert!(runs.iter().all(|n| n.load(Ordering::Relaxed) == 1), "{n_tasks} on {n_threads}");
            }
        }
    }

    #[test]
    fn a_pool_that_slept_wakes_up() {
        let mut pool = Pool::new(3).unwrap();
        for round in 0..5 {
            thread::sleep(10 * SPIN);
            let mut items = vec![0; 64];
            pool.for_each(&mut items, |idx, item| *item = idx + round);
            assert!(items.iter().enumerate().all(|(idx, item)| *item == idx + round));
        }
    }

    #[test]
    fn rows_are_cut_where_they_end() {
        let mut pool = Pool::new(2).unwrap();
        let mut values = vec![0; 7 * 3];
        let rows = RowRuns { width: 3, per_task: 2 };
        pool.for_rows(&mut values, rows, |first, run| {
            run.chunks_mut(3).enumerate().for_each(|(row, values)| values.fill(first + row));
        });
        assert_eq!(values, (0..7).flat_map(|row| [row; 3]).collect::<Vec<_>>());
    }

    #[test]
    fn a_panic_reaches_the_caller_after_all_tasks_are_done() {
        let mut pool = Pool::new(2).unwrap();
        let done = AtomicUsize::new(0);
        let work = |task| {
            assert!(task != 17, "as planned");
            done.fetch_add(1, Ordering::Relaxed);
        };
        assert!(catch_unwind(AssertUnwindSafe(|| pool.run(100, &work))).is_err());
        assert_eq!(done.load(Ordering::Relaxed), 99);
    }
}
