//! What a plan holds, and that a refusal names what is enough.

use super::*;

const MIB: u64 = 1 << 20;
const NEEDS: MemoryNeeds = MemoryNeeds { weights_bytes: 32 * MIB, workspace_bytes: 8 * MIB, kv_bytes_per_token: 8192 };

/// As on a CPU by default.
const CACHE: CacheUse = CacheUse { max_model_len: 2048, max_num_seqs: 64, asked_tokens: None };

fn plan(cache: CacheUse, limit_bytes: u64) -> Result<MemoryPlan, MemoryError> {
    MemoryPlan::new(NEEDS, cache, MemoryBudget::host(limit_bytes))
}

#[test]
fn with_plenty_of_memory_every_sequence_may_be_full() {
    assert_eq!(plan(CACHE, 1 << 40).unwrap().kv_tokens(), 64 * 2048);
}

fn plan_on_gpu(memory: DeviceMemory, fraction: f64) -> Result<MemoryPlan, MemoryError> {
    MemoryPlan::new(NEEDS, CACHE, MemoryBudget::device(memory, fraction))
}

#[test]
fn a_gpus_cache_takes_all_that_is_left() {
    let memory = DeviceMemory { total_bytes: 100 << 30, taken_bytes: 1 << 30 };
    let plan = plan_on_gpu(memory, 0.9).unwrap();
    assert_eq!(plan.limit_bytes, 89 << 30);
    let used = plan.weights_bytes + plan.workspace_bytes + plan.kv_bytes;
    assert!(plan.limit_bytes - used < BLOCK_TOKENS as u64 * NEEDS.kv_bytes_per_token);
}

#[test]
fn a_gpu_with_too_little_memory_names_every_part_and_the_fraction_that_is_enough() {
    let memory = DeviceMemory { total_bytes: 200 * MIB, taken_bytes: 20 * MIB };
    let message = plan_on_gpu(memory, 0.2).unwrap_err().to_string();
    assert_eq!(
        message,
        "weights need 32 MiB, a step's workspace 8 MiB and the KV cache of one sequence 16 MiB, but what \
         memory_fraction leaves of the GPU is 20 MiB: raise memory_fraction to at least 0.39"
    );
    assert!(plan_on_gpu(memory, 0.39).is_ok());
    let message = plan_on_gpu(memory, 0.35).unwrap_err().to_string();
    assert!(message.ends_with("lower max_model_len to 1280, or raise memory_fraction to at least 0.39"), "{message}");
}

#[test]
fn a_gpu_that_is_too_small_at_any_fraction_says_so() {
    let memory = DeviceMemory { total_bytes: 64 * MIB, taken_bytes: 30 * MIB };
    let message = plan_on_gpu(memory, 1.0).unwrap_err().to_string();
    assert!(message.contains("no memory_fraction is enough, 57 MiB are needed and this one has 64 MiB"), "{message}");
}

#[test]
fn with_little_memory_the_cache_is_a_share_of_what_is_left() {
    let plan = plan(CACHE, 240 * MIB).unwrap();
    assert_eq!(plan.kv_bytes, 160 * MIB);
    assert!(plan.weights_bytes + plan.workspace_bytes + plan.kv_bytes < plan.limit_bytes);
}

#[test]
fn the_limit_named_in_a_refusal_is_enough() {
    let message = plan(CACHE, 30 * MIB).unwrap_err().to_string();
    assert!(message.ends_with("raise the memory limit to at least 61 MiB"), "{message}");
    assert!(plan(CACHE, 61 * MIB).is_ok());
    let below = plan(CACHE, 59 * MIB);
    assert!(matches!(below, Err(MemoryError::KvBelowContext { .. })), "{below:?}");
}

#[test]
fn a_cache_below_one_context_is_refused_with_the_size_that_works() {
    let cache = CacheUse { asked_tokens: Some(1000), ..CACHE };
    let message = plan(cache, 1 << 40).unwrap_err().to_string();
    assert!(message.contains("lower max_model_len to 992"), "{message}");
    assert!(message.contains("raise kv_cache_tokens to at least 2048"), "{message}");
}

#[test]
fn a_cache_beyond_the_limit_is_refused_with_the_size_that_fits() {
    let cache = CacheUse { asked_tokens: Some(1_000_000), ..CACHE };
    let refused = plan(cache, 240 * MIB).unwrap_err();
    let message = refused.to_string();
    assert!(message.contains("needs 7813 MiB, but the memory limit of 240 MiB leaves 200 MiB for it"), "{message}");
    assert!(
        message.ends_with("lower kv_cache_tokens to 20480, or raise the memory limit to at least 9806 MiB"),
        "{message}"
    );
}

/// What was asked of which memory.
#[derive(Clone, Debug)]
struct Asked {
    max_model_len: u32,
    kv_cache_tokens: Option<u32>,
    place: AskedOf,
}

#[derive(Clone, Copy, Debug)]
enum AskedOf {
    Host { limit_bytes: u64 },
    Gpu { memory: DeviceMemory, fraction: f64 },
}

impl Asked {
    fn plan(&self) -> Result<MemoryPlan, MemoryError> {
        let Self { max_model_len, kv_cache_tokens, place } = *self;
        let cache =
            CacheUse { max_model_len: max_model_len as usize, max_num_seqs: 256, asked_tokens: kv_cache_tokens };
        let budget = match place {
            AskedOf::Host { limit_bytes } => MemoryBudget::host(limit_bytes),
            AskedOf::Gpu { memory, fraction } => MemoryBudget::device(memory, fraction),
        };
        MemoryPlan::new(NEEDS, cache, budget)
    }

    fn contradicts_itself(&self) -> bool {
        self.kv_cache_tokens.is_some_and(|tokens| whole_blocks(tokens.into()) < self.max_model_len.into())
    }

    /// With one setting changed as advised.
    fn with(&self, fix: &Fix) -> Self {
        let tokens = |tokens: u64| u32::try_from(tokens).unwrap();
        let mut asked = self.clone();
        match (fix, &mut asked.place) {
            (Fix::ShortenContext(n), _) => asked.max_model_len = tokens(*n),
            (Fix::EnlargeCache(n) | Fix::ShrinkCache(n), _) => asked.kv_cache_tokens = Some(tokens(*n)),
            (Fix::SetBoth(n), _) => (asked.max_model_len, asked.kv_cache_tokens) = (tokens(*n), Some(tokens(*n))),
            (Fix::RaiseLimit(bytes), AskedOf::Host { limit_bytes }) => *limit_bytes = *bytes,
            (Fix::RaiseFraction(share), AskedOf::Gpu { fraction, .. }) => *fraction = *share,
            (Fix::LargerGpu { needed_bytes, .. }, AskedOf::Gpu { memory, fraction }) => {
                (memory.total_bytes, *fraction) = (memory.taken_bytes + needed_bytes, 1.0);
            }
            (fix, place) => panic!("{fix:?} is no way for {place:?}"),
        }
        asked
    }
}

/// On a host and on a GPU with this much for everything.
fn places(limit_bytes: u64) -> [AskedOf; 2] {
    let memory = DeviceMemory { total_bytes: 2 * limit_bytes + 10 * MIB, taken_bytes: 5 * MIB };
    [AskedOf::Host { limit_bytes }, AskedOf::Gpu { memory, fraction: 0.5 }]
}

/// From memory that is too small for the weights to plenty, contexts and caches of every size beside it.
fn asked() -> impl Iterator<Item = Asked> {
    let places = [39, 40, 41, 44, 50, 60, 100].into_iter().flat_map(|limit_mib| places(limit_mib * MIB));
    places.flat_map(|place| {
        let caches = [None, Some(16), Some(1000), Some(2500), Some(1_000_000)];
        let sizes = [16, 1000, 2048, 9999].into_iter().flat_map(move |len| caches.map(|cache| (len, cache)));
        sizes.map(move |(max_model_len, kv_cache_tokens)| Asked { max_model_len, kv_cache_tokens, place })
    })
}

#[test]
fn every_way_that_a_refusal_names_is_enough() {
    let mut n_fixes = 0;
    for asked in asked() {
        let fixes = match asked.plan() {
            Ok(_) => continue,
            // More memory, and a cache that is asked to be smaller than the context: one is told after the other.
            Err(MemoryError::WeightsTooLarge { .. }) if asked.contradicts_itself() => continue,
            Err(MemoryError::WeightsTooLarge { fixes, .. })
            | Err(MemoryError::KvBelowContext { fixes, .. })
            | Err(MemoryError::KvTooLarge { fixes, .. }) => fixes.0,
        };
        assert!(!fixes.is_empty(), "{asked:?}");
        for fix in fixes {
            n_fixes += 1;
            let fixed = asked.with(&fix).plan();
            assert!(fixed.is_ok(), "{asked:?} with {fix:?}: {fixed:?}");
        }
    }
    assert!(n_fixes > 200, "{n_fixes}");
}
