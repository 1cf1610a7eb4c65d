//! GPUs by name: what their drivers say of them.

/// What launch shapes depend on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Chip {
    /// Compute capability.
    pub capability: (i32, i32),
    /// Multiprocessors.
    pub n_multiprocessors: u32,
}

/// A GPU that can be bought.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Card {
    /// As people write it.
    pub name: &'static str,
    /// Memory in MiB as the driver counts it, and the label `nvidia.com/gpu.memory` says.
    pub memory_mib: u64,
    /// Its chip.
    pub chip: Chip,
}

const fn card(name: &'static str, memory_mib: u64, capability: (i32, i32), n_multiprocessors: u32) -> Card {
    Card { name, memory_mib, chip: Chip { capability, n_multiprocessors } }
}

/// The smallest first.
pub const CARDS: &[Card] = &[
    card("T4", 15_360, (7, 5), 40),
    card("A10G", 23_028, (8, 6), 80),
    card("L4", 23_034, (8, 9), 58),
    card("RTX-4090", 24_564, (8, 9), 128),
    card("A100-40GB", 40_960, (8, 0), 108),
    card("L40S", 46_068, (8, 9), 142),
    card("A6000", 49_140, (8, 6), 84),
    card("H100-80GB", 81_559, (9, 0), 132),
    card("A100-80GB", 81_920, (8, 0), 108),
    card("GH200", 97_871, (9, 0), 132),
    card("H200", 143_771, (9, 0), 132),
    card("B200", 183_359, (10, 0), 148),
];

/// What of the memory that a driver counts CUDA never gives: 616 MiB of an H200. Of other cards nobody looked: more is taken for all.
const NEVER_GIVEN_MIB: u64 = 896;
/// What a driver, its context, modules and libraries take before a weight is there: 571 MiB of an H200.
const TAKEN_MIB: u64 = 592;

impl Card {
    /// Bytes of all memory.
    pub fn total_bytes(self) -> u64 {
        self.memory_mib << 20
    }

    /// Bytes that CUDA gives. Few rather than many, so that a plan never says yes to what then fails.
    pub fn given_bytes(self) -> u64 {
        self.memory_mib.saturating_sub(NEVER_GIVEN_MIB) << 20
    }

    /// Bytes of these that are in use before an engine takes any.
    pub fn taken_bytes(self) -> u64 {
        (TAKEN_MIB << 20).min(self.given_bytes())
    }

    /// The same as if nobody had taken anything of it, with something to spare: what does not fit there fits no such card.
    #[must_use]
    pub fn at_best(self) -> Self {
        Self { memory_mib: self.memory_mib + 2 * (NEVER_GIVEN_MIB + TAKEN_MIB), ..self }
    }

    /// The card that a name means, as people, or the label `nvidia.com/gpu.product`, write it: `H100`, `h200`,
    /// `NVIDIA-H100-80GB-HBM3`, `NVIDIA-A100-SXM4-40GB`. Where a name has several sizes, the smaller one.
    pub fn named(name: &str) -> Option<Self> {
        let asked = words(name);
        let is_meant = |card: &&Self| words(card.name).iter().all(|word| asked.contains(word));
        let family = |card: &&Self| words(card.name).first().is_some_and(|first| asked.contains(first));
        CARDS.iter().find(is_meant).or_else(|| CARDS.iter().find(family)).copied()
    }

    /// A card of which only the memory is known: with a chip that promises no format, and as many multiprocessors as any has, so
    /// that its scratch is not too small.
    pub fn of_memory(memory_mib: u64) -> Self {
        Self { name: "GPU", memory_mib, chip: Chip { capability: (8, 0), n_multiprocessors: 148 } }
    }
}

/// Upper-case parts of a name: makers and forms tell nothing apart.
fn words(name: &str) -> Vec<String> {
    let parts = name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|part| !part.is_empty());
    parts.map(str::to_ascii_uppercase).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_are_found_by_their_products_and_by_what_people_write() {
        let found = |name| Card::named(name).map(|card| card.name);
        assert_eq!(found("NVIDIA-H100-80GB-HBM3"), Some("H100-80GB"));
        assert_eq!(found("NVIDIA-A100-SXM4-40GB"), Some("A100-40GB"));
        assert_eq!(found("NVIDIA-A100-SXM4-80GB"), Some("A100-80GB"));
        assert_eq!(
            ["h200", "H100", "a100", "NVIDIA L4", "NVIDIA-L40S"].map(found),
            [Some("H200"), Some("H100-80GB"), Some("A100-40GB"), Some("L4"), Some("L40S")]
        );
        assert_eq!(found("Radeon"), None);
    }

    #[test]
    fn cards_are_listed_by_size() {
        assert!(CARDS.is_sorted_by_key(|card| card.memory_mib));
    }
}
