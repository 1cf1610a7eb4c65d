//! What the index takes for each KV block that replicas hold: counted by the allocator, in a process of its own.

#![expect(unsafe_code, reason = "an allocator that counts is one")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering},
};

use stoker_routing::{Chain, PrefixIndex, Source, mix};

struct Counting;

static BYTES: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is passed to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are the same.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const REPLICAS: u32 = 16;
/// Bytes of text in a KV block of 16 tokens, about.
const BLOCK_BYTES: usize = 64;

/// Every replica holds prompts of 16 KB of its own, which were sent to it and which it said that it holds.
fn bytes_per_block(n_prompts: u64) -> f64 {
    let before = BYTES.load(Ordering::Relaxed);
    let mut index = PrefixIndex::bounded(1 << 20);
    let hearings: Vec<_> = (0..REPLICAS).map(|slot| index.hear(slot)).collect();
    let mut n_blocks = 0;
    for number in 0..n_prompts {
        let text: Vec<u8> = (0..2048).flat_map(|at| mix(number, at).to_le_bytes()).collect();
        let (chain, slot) = (Chain::of(1, &[&text]), number as u32 % REPLICAS);
        index.note(&chain, slot, 0, 0);
        chain.marks().iter().for_each(|mark| index.store(&hearings[slot as usize], mark.hash));
        n_blocks += text.len() / BLOCK_BYTES;
    }
    assert!(index.len(Source::Exact) > 30 * n_prompts as usize, "{} beginnings", index.len(Source::Exact));
    (BYTES.load(Ordering::Relaxed) - before) as f64 / n_blocks as f64
}

#[test]
fn a_block_takes_less_than_a_hundred_bytes_predicted_and_exact_together() {
    // Tables grow by doubling: sizes in between show the worst of it.
    for n_prompts in [500, 1000, 2000, 2900, 4000] {
        let bytes = bytes_per_block(n_prompts);
        assert!(bytes < 100.0, "{bytes:.1} bytes a block with {n_prompts} prompts");
        println!("{n_prompts} prompts: {bytes:.1} bytes a block");
    }
}
