//! How much of the second-level cache products may fill with rows while weights pass by.

use std::sync::OnceLock;

/// What is taken where a CPU does not tell: half of the 512 KB of Zen 2 and 3 and of many Arm cores.
const UNTOLD_BYTES: usize = 264 << 10;
/// More than this brings nothing: panels are met by more than a hundred rows already.
const MOST_BYTES: usize = 528 << 10;

/// Bytes of rows that stay there: half of what a core has, so that weights and results pass beside them.
pub(super) fn rows_bytes() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| told().map_or(UNTOLD_BYTES, |bytes| (bytes / 2).min(MOST_BYTES)))
}

/// Bytes of second-level cache that each core has.
#[cfg(target_arch = "x86_64")]
fn told() -> Option<usize> {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    /// Where Intel's CPUs tell of caches, and where AMD's do.
    const LEAVES: [u32; 2] = [4, 0x8000_001d];
    let most = [__cpuid(0).eax, __cpuid(0x8000_0000).eax];
    let leaf =
        LEAVES.into_iter().zip(most).find(|(leaf, most)| leaf <= most && __cpuid_count(*leaf, 0).eax & 0x1f != 0);
    let caches = |(leaf, _): (u32, u32)| (0..8).map(move |n| __cpuid_count(leaf, n)).map(|r| [r.eax, r.ebx, r.ecx]);
    leaf.and_then(|leaf| caches(leaf).find_map(second_level))
}

#[cfg(not(target_arch = "x86_64"))]
fn told() -> Option<usize> {
    None
}

/// Bytes of a cache for each core that shares it, if it is of the second level: EAX, EBX and ECX of the manuals' "deterministic cache parameters".
/// Two threads that share one are those of a core.
#[cfg(any(target_arch = "x86_64", test))]
fn second_level([a, b, c]: [u32; 3]) -> Option<usize> {
    let (kind, level, threads) = (a & 0x1f, a >> 5 & 7, (a >> 14 & 0xfff) + 1);
    let [line, partitions, ways] = [b & 0xfff, b >> 12 & 0x3ff, b >> 22].map(|less_one| less_one as usize + 1);
    // 1 is a cache of data, 2 one of instructions, 3 one of both.
    let holds_data = matches!(kind, 1 | 3);
    (holds_data && level == 2).then(|| line * partitions * ways * (c as usize + 1) / (threads as usize / 2).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Registers of a cache with lines of 64 bytes in one partition.
    fn registers(kind: u32, level: u32, threads: u32, ways: u32, sets: u32) -> [u32; 3] {
        [kind | level << 5 | (threads - 1) << 14, 63 | (ways - 1) << 22, sets - 1]
    }

    #[test]
    fn a_cache_is_counted_for_each_core_that_shares_it() {
        for (what, cache, bytes) in [
            ("Zen 3", registers(3, 2, 2, 8, 1024), Some(512 << 10)),
            ("Sapphire Rapids", registers(3, 2, 2, 16, 2048), Some(2 << 20)),
            ("four small cores", registers(3, 2, 8, 16, 2048), Some(512 << 10)),
            ("one thread a core", registers(3, 2, 1, 16, 2048), Some(2 << 20)),
            ("the first level", registers(1, 1, 2, 12, 64), None),
            ("instructions", registers(2, 2, 2, 8, 64), None),
            ("no cache", [0, 0, 0], None),
        ] {
            assert_eq!(second_level(cache), bytes, "{what}");
        }
    }

    #[test]
    fn rows_never_take_more_than_helps_nor_less_than_some() {
        assert!((64 << 10..=MOST_BYTES).contains(&rows_bytes()), "{}", rows_bytes());
    }
}
