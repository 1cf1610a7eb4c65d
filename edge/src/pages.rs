//! Pages for a buffer that is about to be filled, asked for many at a time: memory that comes new from the system costs a long body a fault for each
//! of its 4 KiB, more than to copy it.

use std::mem::MaybeUninit;

/// What is asked for at a time. A client that announces much and sends little gets no more than that.
const AHEAD_BYTES: usize = 256 << 10;

/// How much of a buffer has been asked for.
#[derive(Debug, Default)]
pub(crate) struct Pages {
    n_bytes: usize,
}

impl Pages {
    /// Sees to it that the next `n_bytes` of a buffer that holds `n_held` have pages. `spare` is what it has room for beyond these.
    pub(crate) fn make_ready(&mut self, n_held: usize, n_bytes: usize, spare: &mut [MaybeUninit<u8>]) {
        if n_held + n_bytes <= self.n_bytes {
            return;
        }
        let ready = spare.len().min(n_bytes + AHEAD_BYTES);
        self.n_bytes = n_held + ready;
        if ready > AHEAD_BYTES {
            populate(&mut spare[..ready]);
        }
    }
}

/// Where the system does not know the advice, pages come one by one.
#[cfg(target_os = "linux")]
fn populate(spare: &mut [MaybeUninit<u8>]) {
    use rustix::mm::{Advice, madvise};

    let page = rustix::param::page_size();
    let begin = spare.as_mut_ptr();
    let before = begin.addr() % page;
    let n_bytes = (before + spare.len()) / page * page;
    // SAFETY: the advice changes no byte, so it does no harm that the first page has others' too; all pages are in the buffer that `spare` is of.
    let advised = unsafe { madvise(begin.wrapping_byte_sub(before).cast(), n_bytes, Advice::LinuxPopulateWrite) };
    if let Err(error) = advised {
        tracing::debug!(%error, "pages of a long body come one by one");
    }
}

#[cfg(not(target_os = "linux"))]
fn populate(_: &mut [MaybeUninit<u8>]) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_asked_for_than_comes_soon() {
        let mut buffer = Vec::<u8>::with_capacity(4 * AHEAD_BYTES);
        let mut pages = Pages::default();
        let mut ready = |n_held: usize, n_bytes| {
            pages.make_ready(n_held, n_bytes, &mut buffer.spare_capacity_mut()[n_held..]);
            pages.n_bytes
        };
        assert_eq!(ready(0, 1000), 1000 + AHEAD_BYTES);
        assert_eq!(ready(1000, AHEAD_BYTES), 1000 + AHEAD_BYTES, "it is there");
        assert_eq!(ready(1000 + AHEAD_BYTES, 1), 1001 + 2 * AHEAD_BYTES);
        assert_eq!(ready(2 * AHEAD_BYTES, 2 * AHEAD_BYTES), 4 * AHEAD_BYTES, "the buffer ends");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn what_was_asked_for_is_filled_without_faults_and_what_was_there_stays() {
        // Of this thread, which no other test runs on.
        let faults = || {
            let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
            let (_, behind_the_name) = stat.rsplit_once(") ").unwrap();
            behind_the_name.split(' ').nth(7).unwrap().parse::<usize>().unwrap()
        };
        let mut buffer = Vec::<u8>::with_capacity(64 << 20);
        buffer.extend_from_slice(b"kept");
        let mut fill = |n_bytes: usize| {
            let before = faults();
            buffer.extend(std::iter::repeat_n(b'x', n_bytes));
            let taken = faults() - before;
            populate(&mut buffer.spare_capacity_mut()[..16 << 20]);
            taken
        };
        let n_pages = (16 << 20) / rustix::param::page_size();
        let (unasked, asked) = (fill(16 << 20), fill(16 << 20));
        // Where pages of 2 MiB come by themselves, both are few.
        assert!(asked < n_pages / 10, "{asked} faults, {unasked} without asking, of {n_pages} pages");
        assert!(buffer.starts_with(b"keptx"));
    }
}
