//! Damaged copies of a file, for tests of those who read it: the same case is the same damage. Touches no disk.

/// Numbers that lengths, counts and offsets go wrong by.
const ABSURD: [u64; 6] = [0, 1, 1 << 31, 1 << 40, u64::MAX >> 1, u64::MAX];

/// How many cases a test takes: few by default, as many as `STOKER_FUZZ_CASES` says for a long run.
pub(crate) fn n_cases() -> u64 {
    std::env::var("STOKER_FUZZ_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(20_000)
}

/// Up to four edits: a byte, an absurd number, a piece cut out, the end cut off.
pub(crate) fn damaged(file: &[u8], case: u64) -> Vec<u8> {
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
