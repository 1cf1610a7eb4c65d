//! Damaged copies of a file, for tests of those who read it: the same case is the same damage. Watches what reading them
//! allocates. Touches no disk.

#![expect(unsafe_code, reason = "an allocator that is watched is an unsafe trait")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

/// Numbers that lengths, counts and offsets go wrong by.
const ABSURD: [u64; 6] = [0, 1, 1 << 31, 1 << 40, u64::MAX >> 1, u64::MAX];
/// What one allocation of a reader may have for each byte of the file: a value, which a number of one byte becomes when it is
/// parsed. 32 bytes, or 72 where a crate of the build has serde_json keep the order of fields, as llguidance does.
const MAX_TIMES_FILE: usize = size_of::<serde_json::Value>();
/// Cases between two lines of a long run.
const CASES_A_LINE: u64 = 100_000;

thread_local! {
    static LARGEST_BYTES: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator, which remembers the largest request of each thread.
struct Watched;

#[global_allocator]
static ALLOCATOR: Watched = Watched;

// SAFETY: hands every call on to the system's allocator unchanged; what it adds allocates nothing.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        watch(layout.size());
        // SAFETY: as the caller vouches.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        watch(layout.size());
        // SAFETY: as the caller vouches.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, n_bytes: usize) -> *mut u8 {
        watch(n_bytes);
        // SAFETY: as the caller vouches.
        unsafe { System.realloc(at, layout, n_bytes) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as the caller vouches.
        unsafe { System.dealloc(at, layout) }
    }
}

fn watch(n_bytes: usize) {
    // A thread that ends may still free and allocate; nobody looks at it.
    let _ = LARGEST_BYTES.try_with(|largest| largest.set(largest.get().max(n_bytes)));
}

/// Reads as many damaged copies of `file` as [`n_cases`] says. `read` is told the number of the case and checks what it
/// got; this checks that no allocation of it was out of proportion.
pub(crate) fn read_all(file: &[u8], read: impl Fn(u64, Vec<u8>)) {
    let (n_cases, begun) = (n_cases(), std::time::Instant::now());
    let limit_bytes = MAX_TIMES_FILE * file.len();
    for case in 0..n_cases {
        let damaged = damaged(file, case);
        LARGEST_BYTES.set(0);
        read(case, damaged);
        let largest = LARGEST_BYTES.get();
        assert!(largest <= limit_bytes, "case {case}: {largest} bytes at once for a file of {}", file.len());
        if (case + 1) % CASES_A_LINE == 0 || case + 1 == n_cases {
            println!("{} cases, {:.0} a second", case + 1, (case + 1) as f64 / begun.elapsed().as_secs_f64());
        }
    }
}

/// Few by default, as many as `STOKER_FUZZ_CASES` says for a long run.
fn n_cases() -> u64 {
    std::env::var("STOKER_FUZZ_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(20_000)
}

/// Up to four edits: a byte, an absurd number, a piece cut out, the end cut off.
fn damaged(file: &[u8], case: u64) -> Vec<u8> {
    let mut file = file.to_vec();
    let mut state = case;
    let mut below = |n: usize| (splitmix64(&mut state) % n as u64) as usize;
    for _ in 0..=below(4) {
        if file.is_empty() {
            break;
        }
        let at = below(file.len());
        match below(8) {
            0 => file.truncate(at),
            1 => drop(file.drain(at..(at + below(9)).min(file.len()))),
            2 | 3 => {
                let number = ABSURD[below(ABSURD.len())].to_le_bytes();
                file[at..].iter_mut().zip(number).for_each(|(byte, new)| *byte = new);
            }
            _ => file[at] = below(256) as u8,
        }
    }
    file
}

fn splitmix64(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[test]
fn an_allocation_out_of_proportion_is_noticed() {
    let caught = std::panic::catch_unwind(|| {
        read_all(&[0; 64], |_, _| drop(std::hint::black_box(Vec::<u8>::with_capacity(MAX_TIMES_FILE * 64 + 1))));
    });
    assert!(caught.is_err());
}
