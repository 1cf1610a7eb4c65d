//! The gateway before the simulated replicas: which of them begins with a prompt soonest.
//!
//! Owns what was sent where; the choice is that of our gateway, [`route`]. It is the only one, and sees the load of now where a real one
//! knows what it sent itself and what replicas said up to two seconds ago. Replicas have their whole share from the first moment.

use stoker_routing::{Ask, BYTES_PER_TOKEN, Capacity, Chain, Load, PrefixIndex, ReplicaView, Rules, mix, route};
use stoker_workload::{HASH_BLOCK_TOKENS, Request};

use crate::fleet::{Member, Stage};

/// Beginnings that are remembered, as in the gateway.
const BEGINNINGS_MAX: usize = 1 << 20;
/// Whatever is asked is asked of one model.
const MODEL: u64 = 1;
/// Everybody serves for longer than a slow start takes.
const LONG_MS: u64 = 1_000_000;

/// See the module.
#[derive(Debug)]
pub(crate) struct Gateway {
    index: PrefixIndex,
    n_asked: u64,
}

impl Default for Gateway {
    fn default() -> Self {
        Self { index: PrefixIndex::bounded(BEGINNINGS_MAX), n_asked: 0 }
    }
}

impl Gateway {
    /// The place of the replica that this request goes to; `None` while none serves. Replicas are in the present.
    pub(crate) fn choose(&mut self, request: &Request, members: &[Member]) -> Option<usize> {
        self.n_asked += 1;
        let chain = Chain::of(MODEL, &[&text(request, self.n_asked)]);
        let (places, views): (Vec<usize>, Vec<ReplicaView>) = members
            .iter()
            .enumerate()
            .filter(|(_, member)| member.stage == Stage::Serving)
            .map(|(place, member)| (place, view(member)))
            .unzip();
        let kv_blocks = members.first().map_or(0, |member| member.replica.total_blocks());
        // Replicas here do not say what they hold: how much waits there does not matter.
        let matches = self.index.matches(&chain, 0, |_| Capacity { kv_blocks, waiting_tokens: 0 });
        let ask = Ask { chain: &chain, session: None, request: 0, now_ms: LONG_MS };
        let choice = route(&ask, &views, &matches, &Rules::default())?;
        self.index.note(&chain, views[choice.place].slot, choice.matched, 0);
        Some(places[choice.place])
    }
}

fn view(member: &Member) -> ReplicaView {
    let replica = &member.replica;
    ReplicaView {
        slot: member.id,
        seed: mix(MODEL, member.id.into()),
        weight: 100,
        serving_since_ms: 0,
        is_healthy: true,
        load: Load {
            requests: replica.open(),
            prefill_tokens: replica.prefill_ahead(),
            kv_share: replica.kv_usage() as f32,
            is_fresh: true,
        },
    }
}

/// A text that begins like others as far as their blocks have the same names. What has no name is like nothing else.
fn text(request: &Request, nth: u64) -> Vec<u8> {
    let names = request.hash_ids.as_slice();
    let block_bytes = (HASH_BLOCK_TOKENS * BYTES_PER_TOKEN) as usize;
    let n_bytes = (request.prompt_tokens.max(1) * BYTES_PER_TOKEN) as usize;
    let mut text = Vec::with_capacity(n_bytes.next_multiple_of(block_bytes));
    for at in 0..n_bytes.div_ceil(block_bytes) {
        let name = names.get(at).copied().unwrap_or_else(|| mix(!nth, at as u64));
        (0..block_bytes as u64 / 8).for_each(|word| text.extend_from_slice(&mix(name, word).to_le_bytes()));
    }
    text.truncate(n_bytes);
    text
}

#[cfg(test)]
mod tests {
    use stoker_workload::HashIds;

    use super::*;
    use crate::{Replica, ReplicaModel};

    /// Its answer takes longer than a test.
    fn request(names: &[u64]) -> Request {
        let prompt_tokens = HASH_BLOCK_TOKENS * names.len().max(4) as u32;
        let hash_ids = HashIds::from(names.to_vec());
        Request { arrived: 0.0, prompt_tokens, cached_tokens: 0, completion_tokens: 8000, hash_ids }
    }

    fn members(n: u32) -> Vec<Member> {
        let replica = || Replica::serving_from(0.0, &ReplicaModel::default());
        (0..n)
            .map(|id| Member { id, created: 0.0, is_warm: false, stage: Stage::Serving, replica: replica() })
            .collect()
    }

    /// Sends prompts that begin alike, each when the one before is computed; answers with the requests of each replica.
    fn spread(names: impl Fn(u64) -> Vec<u64>, n_requests: u64) -> Vec<u32> {
        let (mut gateway, mut members) = (Gateway::default(), members(4));
        for nth in 0..n_requests {
            let request = request(&names(nth));
            let place = gateway.choose(&request, &members).expect("all serve");
            members[place].replica.submit(request);
            members.iter_mut().for_each(|member| member.replica.advance(0.1 * (nth + 1) as f64));
        }
        members.iter().map(|member| member.replica.open()).collect()
    }

    #[test]
    fn a_prompt_follows_its_beginning_until_the_replica_has_more_than_its_share() {
        let alike = |nth| vec![1, 2, 3, 100 + nth];
        let mut few = spread(alike, 3);
        few.sort_unstable();
        assert_eq!(few, [0, 0, 0, 3]);
        let most = spread(alike, 40).into_iter().max();
        assert!(most.is_some_and(|most| (11..=16).contains(&most)), "{most:?}");
    }

    #[test]
    fn prompts_without_names_share_nothing_and_spread() {
        let open = spread(|_| Vec::new(), 40);
        assert!(open.iter().all(|open| (8..=12).contains(open)), "{open:?}");
    }

    #[test]
    fn only_who_serves_is_chosen() {
        let (mut gateway, mut members) = (Gateway::default(), members(2));
        members[0].stage = Stage::Starting { until: 9.0 };
        assert_eq!(gateway.choose(&request(&[1]), &members), Some(1));
        members[1].stage = Stage::Draining { until: 9.0 };
        assert_eq!(gateway.choose(&request(&[1]), &members), None);
    }
}
