//! Changes of bytes at random, by a seed: what a fuzzer without knowledge of the form does, with words of the form in its dictionary.

use rand::{RngExt, SeedableRng, rngs::StdRng};

/// Bytes at which parsers turn.
const TURNS: &[u8] = b"\r\n\0\t :;,\"\\{}[]/0129afx\x7f\x80\xff";

/// Something to begin with and words to put in.
pub(crate) struct Corpus<'a> {
    pub(crate) seeds: &'a [Vec<u8>],
    pub(crate) words: &'a [&'a [u8]],
}

impl Corpus<'_> {
    /// The input of a number, and chance for what is done with it. One of sixteen is a seed as it is.
    pub(crate) fn input(&self, number: u64) -> (Vec<u8>, StdRng) {
        let mut random = StdRng::seed_from_u64(number);
        let mut input = self.any(&mut random).to_vec();
        if random.random_range(0..16) > 0 {
            (0..random.random_range(1..=4)).for_each(|_| self.change(&mut input, &mut random));
        }
        (input, random)
    }

    fn any(&self, random: &mut StdRng) -> &[u8] {
        &self.seeds[random.random_range(0..self.seeds.len())]
    }

    fn change(&self, input: &mut Vec<u8>, random: &mut StdRng) {
        let at = random.random_range(0..=input.len());
        let end = (at + random.random_range(1..=16)).min(input.len());
        match random.random_range(0..8) {
            0 if at < input.len() => input[at] ^= 1 << random.random_range(0..8),
            1 if at < input.len() => input[at] = TURNS[random.random_range(0..TURNS.len())],
            2 => input.insert(at, TURNS[random.random_range(0..TURNS.len())]),
            3 => drop(input.drain(at..end)),
            4 => {
                let again = input[at..end].to_vec();
                input.splice(at..at, again);
            }
            5 => {
                let word = self.words[random.random_range(0..self.words.len())];
                input.splice(at..at, word.iter().copied());
            }
            6 => {
                let other = self.any(random);
                let from = random.random_range(0..=other.len());
                let part = other[from..(from + 64).min(other.len())].to_vec();
                input.splice(at..at, part);
            }
            _ => input.truncate(at),
        }
    }
}
