//! Tokens as a tree of their bytes, in the order of a walk through it.
//!
//! ```text
//! a  ab  abc  b      depth  0 1 2 0
//!                    below  3 2 1 1     nodes to pass over where the byte cannot come, its own among them
//! ```
//! llguidance has the same tree and walks it with lexer and grammar together. Here the lexer goes alone, which needs no stack but a state
//! for each depth; the grammar is asked where tokens leave a lexeme, once for all that leave it alike. Keeps nothing.

use llguidance::{
    derivre::StateID,
    earley::{ParserRecognizer, lexerspec::LexemeIdx},
};
use toktrie::{Recognizer, SimpleVob, TokTrie, TrieNode};

use crate::request::TokenId;

#[derive(Debug)]
pub(super) struct Tree {
    nodes: Vec<Node>,
    n_levels: usize,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    /// `NO_TOKEN`: none ends here.
    token: TokenId,
    n_below: u32,
    depth: u16,
    byte: u8,
}

const NO_TOKEN: TokenId = TokenId::MAX;

/// Where tokens of a tree leave a lexeme alike: the grammar takes what comes there for all of them or for none.
#[derive(Debug, Eq, Hash, PartialEq)]
pub(super) struct Exit {
    /// The bytes of one of them, as far as out of the lexeme.
    way: Box<[u8]>,
    /// The last node of each way.
    nodes: Vec<u32>,
}

impl Tree {
    pub(super) fn of(trie: &TokTrie) -> Self {
        let mut nodes = Vec::new();
        trie.node_children(trie.root()).for_each(|child| add(&mut nodes, trie, child, 0));
        let n_levels = nodes.iter().map(|node: &Node| usize::from(node.depth) + 1).max().unwrap_or(0);
        Self { nodes, n_levels }
    }

    /// Marks the tokens that stay within the lexeme from a state on, which the grammar around it has no say in.
    pub(super) fn within(&self, rec: &mut ParserRecognizer<'_>, state: StateID, inside: &mut SimpleVob) -> Vec<Exit> {
        let (mut states, mut way) = (vec![state; self.n_levels + 1], vec![0; self.n_levels]);
        let mut exits = Exits::new();
        let (mut idx, mut n_tried) = (0, 0);
        let mut lexer = rec.lexer_mut();
        while let Some(node) = self.nodes.get(idx) {
            n_tried += 1;
            let depth = usize::from(node.depth);
            way[depth] = node.byte;
            let next = lexer.transition_start_state(states[depth], Some(node.byte), &None);
            if stays(next) {
                states[depth + 1] = next;
                if node.token != NO_TOKEN {
                    inside.allow_token(node.token);
                }
                idx += 1;
                continue;
            }
            if let Some(ending) = Ending::of(rec, states[depth], next, &way[..=depth]) {
                exits.add(ending, &way[..=depth], idx as u32);
            }
            lexer = rec.lexer_mut();
            idx += node.n_below as usize;
        }
        rec.save_stats(n_tried);
        exits.all
    }

    /// Marks the tokens that leave a lexeme and that the grammar takes.
    pub(super) fn beyond(&self, exits: &[Exit], rec: &mut ParserRecognizer<'_>, allowed: &mut SimpleVob) {
        rec.trie_started("exits");
        let mut walk = Walk { rec, depth: 0, n_tried: 0 };
        for Exit { way, nodes } in exits {
            if way.iter().enumerate().all(|(depth, byte)| walk.goes_on(*byte, depth)) {
                nodes.iter().for_each(|node| self.try_below(*node as usize, way.len(), &mut walk, allowed));
            }
        }
        let Walk { rec, depth, n_tried } = walk;
        rec.pop_bytes(depth);
        rec.trie_finished();
        rec.save_stats(n_tried);
    }

    /// Marks what is taken of the tokens that end at a node, which is taken, or below it. `depth` is that of the walk, which may have
    /// come there on another token's way.
    fn try_below(&self, at: usize, depth: usize, walk: &mut Walk<'_, '_>, allowed: &mut SimpleVob) {
        let top = self.nodes[at];
        if top.token != NO_TOKEN {
            allowed.allow_token(top.token);
        }
        let (mut idx, end) = (at + 1, at + top.n_below as usize);
        while idx < end {
            let node = &self.nodes[idx];
            if walk.goes_on(node.byte, depth + usize::from(node.depth - top.depth) - 1) {
                if node.token != NO_TOKEN {
                    allowed.allow_token(node.token);
                }
                idx += 1;
            } else {
                idx += node.n_below as usize;
            }
        }
    }
}

impl Exit {
    pub(super) fn n_bytes(&self) -> usize {
        size_of::<Self>() + self.way.len() + self.nodes.capacity() * size_of::<u32>()
    }
}

fn add(nodes: &mut Vec<Node>, trie: &TokTrie, node: &TrieNode, depth: u16) {
    let (token, n_below) = (node.token_id().unwrap_or(NO_TOKEN), node.subtree_size() as u32);
    nodes.push(Node { token, n_below, depth, byte: node.byte() });
    trie.node_children(node).for_each(|child| add(nodes, trie, child, depth + 1));
}

/// Whether a state that the lexer comes to is within the lexeme.
pub(super) fn stays(state: StateID) -> bool {
    !state.is_dead() && !state.has_lowest_match()
}

/// What the grammar knows of a lexeme that ends, when a mask is computed.
#[derive(Clone, Copy, Debug)]
struct Ending {
    lexeme: Ended,
    /// The byte behind it, which begins the next one; `None`: the last byte is the lexeme's own.
    behind: Option<u8>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Ended {
    /// It can be no other.
    Only(LexemeIdx),
    /// One or several, by the state that the lexer is in.
    In(StateID),
    /// A special token, whose text matters. Nothing else ends alike.
    Itself,
}

impl Ending {
    /// Where the last byte of a way leads from one state to the next, and that is out of the lexeme. `None`: to nowhere.
    fn of(rec: &mut ParserRecognizer<'_>, from: StateID, next: StateID, way: &[u8]) -> Option<Self> {
        let (lexer, byte) = (rec.lexer_mut(), *way.last()?);
        if lexer.advance(from, byte, false, &None).is_error() {
            return None;
        }
        let (last, behind) = if next.is_dead() { (from, Some(byte)) } else { (next, None) };
        let mut possible = lexer.possible_lexemes(last).iter();
        let lexeme = match (possible.next(), possible.next()) {
            _ if way.contains(&TokTrie::SPECIAL_TOKEN_MARKER) => Ended::Itself,
            (Some(only), None) => Ended::Only(only),
            _ => Ended::In(last),
        };
        Some(Self { lexeme, behind })
    }
}

struct Exits {
    all: Vec<Exit>,
    /// By the byte behind the lexeme; last, where it is the lexeme's own.
    known: Vec<Vec<(Ended, usize)>>,
}

impl Exits {
    fn new() -> Self {
        Self { all: Vec::new(), known: vec![Vec::new(); 257] }
    }

    fn add(&mut self, Ending { lexeme, behind }: Ending, way: &[u8], node: u32) {
        let known = &mut self.known[behind.map_or(256, usize::from)];
        let alike = known.iter().find(|(ended, _)| *ended == lexeme && lexeme != Ended::Itself);
        let idx = alike.map_or(self.all.len(), |(_, idx)| *idx);
        if idx == self.all.len() {
            known.push((lexeme, idx));
            self.all.push(Exit { way: way.into(), nodes: Vec::new() });
        }
        self.all[idx].nodes.push(node);
    }
}

/// A walk of lexer and grammar.
struct Walk<'a, 'b> {
    rec: &'a mut ParserRecognizer<'b>,
    /// Bytes that were taken.
    depth: usize,
    n_tried: usize,
}

impl Walk<'_, '_> {
    /// Whether a byte may come behind the first bytes that were taken, which are kept.
    fn goes_on(&mut self, byte: u8, n_kept: usize) -> bool {
        self.n_tried += 1;
        self.rec.pop_bytes(self.depth - n_kept);
        let goes_on = self.rec.try_push_byte(byte);
        self.depth = n_kept + usize::from(goes_on);
        goes_on
    }
}
