//! A prompt as rules see it: blocks, marks and a head of its text, of four bytes a token. A simulated one is a chain of pieces, so that
//! prompts that share pieces share tokens.

use std::sync::Arc;

use stoker_routing::{BYTES_PER_TOKEN, Chain, mix};

/// Tokens in a KV block.
pub const BLOCK_TOKENS: u32 = 16;

/// A piece of text that is its number: the same number, the same tokens.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Piece {
    pub(crate) id: u64,
    pub(crate) tokens: u32,
}

/// A prompt and all that is computed of it once.
#[derive(Clone, Debug)]
pub struct Prompt {
    pub(crate) tokens: u32,
    /// Hash of each whole block and all before it.
    pub blocks: Arc<[u64]>,
    /// As the gateway sees it.
    pub(crate) chain: Arc<Chain>,
    /// Of the first hundred tokens: what consistent hashing goes by.
    pub(crate) head: u64,
}

impl Prompt {
    pub(crate) fn of(pieces: &[Piece]) -> Self {
        let mut text = Vec::new();
        for piece in pieces {
            for at in 0..piece.tokens {
                text.extend_from_slice(&(mix(piece.id, at.into()) as u32).to_le_bytes());
            }
        }
        Self::of_text(&text)
    }

    /// Of a text, of which every four bytes count as a token.
    pub fn of_text(text: &[u8]) -> Self {
        let hashed = |parent: &mut u64, block: &[u8]| {
            *parent = stoker_routing::hash(*parent, block);
            Some(*parent)
        };
        let blocks = text.chunks_exact((BLOCK_TOKENS * BYTES_PER_TOKEN) as usize).scan(0, hashed).collect();
        let head = stoker_routing::hash(0, &text[..text.len().min(100 * BYTES_PER_TOKEN as usize)]);
        Self { tokens: text.len() as u32 / BYTES_PER_TOKEN, blocks, chain: Arc::new(Chain::of(1, &[text])), head }
    }
}
