//! The choice: what it looks at, case by case, and what holds for all of them.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use proptest::prelude::*;
use stoker_routing::{
    Ask, Capacity, Chain, Choice, Load, Matches, PrefixIndex, Reason, ReplicaView, Rules, Score, Source, Standing,
    route, scores,
};

const NOW_MS: u64 = 1_000_000;
const CAPACITY: Capacity = Capacity { kv_blocks: 1 << 20, waiting_tokens: 0 };

fn replica(slot: u32) -> ReplicaView {
    let load = Load { requests: 0, prefill_tokens: 0, kv_share: 0.0, is_fresh: true };
    ReplicaView { slot, seed: u64::from(slot) * 7919 + 1, weight: 100, serving_since_ms: 0, is_healthy: true, load }
}

fn fleet(n: u32, change: impl Fn(&mut ReplicaView)) -> Vec<ReplicaView> {
    (0..n)
        .map(replica)
        .map(|mut view| {
            change(&mut view);
            view
        })
        .collect()
}

fn prompt(seed: u8, n_bytes: usize) -> Chain {
    Chain::of(1, &[&vec![seed; n_bytes]])
}

fn choose(chain: &Chain, replicas: &[ReplicaView], index: &PrefixIndex) -> Option<Choice> {
    let ask = Ask { chain, session: None, request: 7, now_ms: NOW_MS };
    route(&ask, replicas, &index.matches(chain, NOW_MS, |_| CAPACITY), &Rules::default())
}

fn seen(chain: &Chain, replicas: &[ReplicaView], index: &PrefixIndex) -> Vec<Score> {
    let ask = Ask { chain, session: None, request: 7, now_ms: NOW_MS };
    scores(&ask, replicas, &index.matches(chain, NOW_MS, |_| CAPACITY), &Rules::default())
}

fn slot_of(chain: &Chain, replicas: &[ReplicaView], index: &PrefixIndex) -> (u32, Reason) {
    let choice = choose(chain, replicas, index).unwrap();
    (replicas[choice.place].slot, choice.reason)
}

#[test]
fn nobody_is_chosen_of_nobody_and_the_only_one_of_one() {
    let (chain, index) = (prompt(1, 4000), PrefixIndex::bounded(100));
    assert_eq!(choose(&chain, &[], &index), None);
    assert_eq!(choose(&chain, &fleet(3, |view| view.weight = 0), &index), None);
    let mut replicas = fleet(3, |view| view.weight = 0);
    (replicas[1].weight, replicas[1].load.requests) = (100, 500);
    assert_eq!(slot_of(&chain, &replicas, &index), (1, Reason::Only));
}

#[test]
fn who_holds_the_prefix_is_chosen_until_waiting_costs_more_than_computing_it() {
    let (chain, mut index) = (prompt(1, 40_000), PrefixIndex::bounded(1000));
    index.note(&chain, 2, 0, NOW_MS);
    let with_waiting = |tokens| {
        let mut replicas = fleet(4, |_| {});
        replicas[2].load.prefill_tokens = tokens;
        slot_of(&chain, &replicas, &index)
    };
    assert_eq!(with_waiting(0), (2, Reason::Prefix));
    assert_eq!(
        with_waiting(13_000),
        (2, Reason::Prefix),
        "it holds some 10,000 tokens, which count half as much again"
    );
    assert_ne!(with_waiting(16_000).0, 2);
}

/// Of who holds 10,000 tokens: 16,000 that wait are too many where others are idle, and not where nobody has less than 8,192 to do.
#[test]
fn what_is_computed_again_costs_more_the_more_everybody_has_to_do() {
    let (chain, mut index) = (prompt(1, 40_000), PrefixIndex::bounded(1000));
    index.note(&chain, 2, 0, NOW_MS);
    let chosen = |everybody, more| {
        let mut replicas = fleet(4, |view| view.load.prefill_tokens = everybody);
        replicas[2].load.prefill_tokens += more;
        slot_of(&chain, &replicas, &index).0
    };
    assert_ne!(chosen(0, 17_000), 2);
    assert_eq!((chosen(8192, 17_000), chosen(8192, 25_000)), (2, 2));
    assert_ne!(chosen(8192, 32_000), 2);
    assert_eq!(chosen(40_000, 70_000), 2);
}

#[test]
fn the_longer_prefix_counts_more() {
    let (long, short) = (prompt(1, 40_000), prompt(1, 20_000));
    let mut index = PrefixIndex::bounded(1000);
    index.note(&short, 0, 0, NOW_MS);
    index.note(&long, 3, 0, NOW_MS);
    assert_eq!(slot_of(&long, &fleet(4, |_| {}), &index).0, 3);
}

#[test]
fn the_least_loaded_is_chosen_where_nobody_holds_anything() {
    let index = PrefixIndex::bounded(100);
    let mut replicas = fleet(8, |view| view.load.requests = 10);
    replicas[5].load.requests = 2;
    for seed in 0..20 {
        assert_eq!(slot_of(&prompt(seed, 4000), &replicas, &index), (5, Reason::Load));
    }
}

#[test]
fn a_full_cache_and_a_stall_of_prompts_count() {
    let index = PrefixIndex::bounded(100);
    let full = fleet(2, |view| view.load.kv_share = if view.slot == 0 { 0.99 } else { 0.7 });
    let long_line = fleet(2, |view| view.load.prefill_tokens = if view.slot == 0 { 5000 } else { 0 });
    for seed in 0..20 {
        assert_eq!(slot_of(&prompt(seed, 400), &full, &index).0, 1);
        assert_eq!(slot_of(&prompt(seed, 400), &long_line, &index).0, 1);
    }
}

#[test]
fn of_nearly_equals_who_says_that_it_holds_the_prompt_is_chosen_and_who_was_only_sent_it_is_not() {
    let (chain, replicas) = (prompt(1, 700), fleet(8, |_| {}));
    let own = slot_of(&chain, &replicas, &PrefixIndex::bounded(100)).0;
    for other in (0..8).filter(|slot| *slot != own) {
        let mut index = PrefixIndex::bounded(100);
        index.note(&chain, other, 0, NOW_MS);
        assert_eq!(slot_of(&chain, &replicas, &index).0, own, "the prompt's own, as at every gateway");
        let hearing = index.hear(other);
        chain.marks().iter().for_each(|mark| index.store(&hearing, mark.hash));
        assert_eq!(slot_of(&chain, &replicas, &index), (other, Reason::Prefix));
        let choice = choose(&chain, &replicas, &index).unwrap();
        assert_eq!((choice.matched, choice.source), (512, Some(Source::Exact)));
    }
}

#[test]
fn what_one_gateway_sent_since_the_last_report_changes_no_choice_of_another() {
    let index = PrefixIndex::bounded(100);
    for seed in 0..40 {
        let chain = prompt(seed, 4000);
        let own = slot_of(&chain, &fleet(8, |_| {}), &index).0;
        let sent = |count| fleet(8, |view| view.load.requests = if view.slot == own { count } else { 0 });
        assert_eq!(slot_of(&chain, &sent(2), &index), (own, Reason::Key));
        assert_ne!(slot_of(&chain, &sent(5), &index).0, own, "five are too many for it");
    }
}

#[test]
fn prompts_that_many_hold_the_beginning_of_are_spread_among_these_and_stay_off_the_busier_ones() {
    let mut index = PrefixIndex::bounded(10_000);
    let beginning = prompt(1, 8192);
    for slot in 0..6 {
        let hearing = index.hear(slot);
        beginning.marks().iter().for_each(|mark| index.store(&hearing, mark.hash));
    }
    // The first is busier by less than would keep a prompt's only holder from it.
    let replicas = fleet(8, |view| view.load.requests = if view.slot == 0 { 3 } else { 0 });
    let mut counts = [0; 8];
    for number in 0..600u32 {
        let chain = Chain::of(1, &[&vec![1; 8192], &number.to_le_bytes()]);
        counts[slot_of(&chain, &replicas, &index).0 as usize] += 1;
    }
    assert!(counts[1..6].iter().all(|count| (80..160).contains(count)), "{counts:?}");
    assert_eq!([counts[0], counts[6], counts[7]], [0; 3], "{counts:?}");
}

#[test]
fn equals_share_keys_by_weight_and_a_new_replica_takes_only_its_own() {
    let index = PrefixIndex::bounded(100);
    let keys: Vec<Chain> = (0..4000u64).map(|key| Chain::of(key, &[b"x"])).collect();
    let mut replicas = fleet(5, |view| view.weight = if view.slot == 0 { 200 } else { 100 });
    let before: Vec<u32> = keys.iter().map(|key| slot_of(key, &replicas, &index).0).collect();
    let of = |slot| before.iter().filter(|chosen| **chosen == slot).count();
    assert!((1200..1470).contains(&of(0)), "a third: {}", of(0));
    assert!((1..5).all(|slot| (560..780).contains(&of(slot))), "a sixth each");
    replicas.push(replica(5));
    for (key, before) in keys.iter().zip(before) {
        let after = slot_of(key, &replicas, &index).0;
        assert!(after == before || after == 5, "{before} to {after}");
    }
}

#[test]
fn who_is_tried_gets_its_part_of_requests_whatever_it_holds_and_has_to_do() {
    const REQUESTS: u64 = 4000;
    let (chain, mut index) = (prompt(1, 20_000), PrefixIndex::bounded(10_000));
    index.note(&chain, 1, 0, NOW_MS);
    let chosen = |request, session, replicas: &[ReplicaView]| {
        let ask = Ask { chain: &chain, session, request, now_ms: NOW_MS };
        let choice = route(&ask, replicas, &index.matches(&chain, NOW_MS, |_| CAPACITY), &Rules::default()).unwrap();
        (replicas[choice.place].slot, choice.reason)
    };
    let beside = |n_older: u32, tried: ReplicaView| (1..=n_older).map(replica).chain([tried]).collect::<Vec<_>>();
    for (weight, n_older, percent) in [(11, 1, 10.0), (33, 3, 10.0), (5, 1, 5.0), (99, 1, 50.0)] {
        let busy = Load { requests: 30, prefill_tokens: 9000, kv_share: 0.9, is_fresh: true };
        for load in [replica(0).load, busy] {
            let replicas = beside(n_older, ReplicaView { weight, load, ..replica(0) });
            let to_it = (0..REQUESTS).filter(|request| chosen(*request, None, &replicas) == (0, Reason::Trial)).count();
            let share = to_it as f64 * 100.0 / REQUESTS as f64;
            assert!((share - percent).abs() < 2.0, "{weight} beside {n_older}: {share} %");
        }
    }
    let replicas = beside(1, ReplicaView { weight: 11, ..replica(0) });
    assert!((0..50).all(|session| chosen(1, Some(session), &replicas) == chosen(2, Some(session), &replicas)));
    let alone = beside(0, ReplicaView { weight: 11, ..replica(0) });
    assert_eq!(chosen(1, None, &alone), (0, Reason::Only), "nobody else is left");
    let silent = beside(2, ReplicaView { weight: 11, is_healthy: false, ..replica(0) });
    assert!((0..REQUESTS).all(|request| chosen(request, None, &silent).0 != 0), "it does not answer");
}

#[test]
fn a_session_keeps_its_replica_whatever_it_asks() {
    let (index, replicas) = (PrefixIndex::bounded(100), fleet(16, |_| {}));
    let slot = |seed: u8, session: u64| {
        let chain = prompt(seed, 2000);
        let ask = Ask { chain: &chain, session: Some(session), request: seed.into(), now_ms: NOW_MS };
        replicas[route(&ask, &replicas, &Matches::default(), &Rules::default()).unwrap().place].slot
    };
    assert!((0..50).all(|seed| slot(seed, 7) == slot(0, 7)));
    assert!((0..50).any(|session| slot(0, session) != slot(0, 7)));
    let _ = index;
}

#[test]
fn who_does_not_answer_is_asked_only_if_nobody_does() {
    let (chain, mut index) = (prompt(1, 40_000), PrefixIndex::bounded(1000));
    index.note(&chain, 1, 0, NOW_MS);
    let mut replicas = fleet(3, |view| view.is_healthy = view.slot != 1);
    assert_ne!(slot_of(&chain, &replicas, &index).0, 1);
    replicas.iter_mut().for_each(|view| view.is_healthy = false);
    assert_eq!(slot_of(&chain, &replicas, &index).0, 1);
}

#[test]
fn a_replica_that_has_just_begun_takes_a_part_of_its_share() {
    let index = PrefixIndex::bounded(100);
    let chosen_at = |since_ms| {
        let mut replicas = fleet(4, |view| view.load.requests = 20);
        (replicas[0].load.requests, replicas[0].serving_since_ms) = (8, since_ms);
        slot_of(&prompt(1, 400), &replicas, &index).0
    };
    assert_ne!(chosen_at(NOW_MS), 0, "eight are more than a tenth of a share");
    assert_eq!(chosen_at(NOW_MS - 20_000), 0);
}

#[test]
fn without_any_report_two_are_compared_and_holders_stay_first() {
    let mut index = PrefixIndex::bounded(1000);
    let replicas = fleet(16, |view| view.load.is_fresh = false);
    let chain = prompt(1, 4000);
    let (first, reason) = slot_of(&chain, &replicas, &index);
    assert_eq!(reason, Reason::TwoChoices);
    let mut busy = replicas.clone();
    busy[first as usize].load.requests = 2;
    let (second, _) = slot_of(&chain, &busy, &index);
    assert_ne!(second, first);
    busy[second as usize].load.requests = 2;
    assert!([first, second].contains(&slot_of(&chain, &busy, &index).0), "no third is looked at");
    index.note(&chain, 9, 0, NOW_MS);
    assert_eq!(slot_of(&chain, &replicas, &index), (9, Reason::Prefix));
}

#[test]
fn who_may_not_be_chosen_is_said_why() {
    let (chain, mut index) = (prompt(1, 4000), PrefixIndex::bounded(100));
    index.note(&chain, 1, 0, NOW_MS);
    let mut replicas = fleet(5, |_| {});
    (replicas[1].load.requests, replicas[2].is_healthy, replicas[3].weight) = (90, false, 0);
    let standings = |replicas: &[ReplicaView]| -> Vec<Standing> {
        seen(&chain, replicas, &index).iter().map(|score| score.standing).collect()
    };
    let (fits, over) = (Standing::Fits, Standing::OverShare);
    assert_eq!(standings(&replicas), [fits, over, Standing::Silent, Standing::Weightless, fits]);
    let held = seen(&chain, &replicas, &index)[1];
    assert_eq!((held.terms.cached_tokens, held.terms.requests, held.source), (960, 90, Some(Source::Predicted)));
    // One that is tried: the request is drawn for it or for the others.
    replicas[4].weight = 1;
    assert_eq!(standings(&replicas)[4], Standing::NotDrawn);
    replicas.iter_mut().for_each(|view| view.is_healthy = false);
    assert!(!standings(&replicas).contains(&Standing::Silent), "nobody else is there");
}

/// A fleet in any state, and a prompt that some of it hold.
fn worlds() -> impl Strategy<Value = (Vec<ReplicaView>, Chain, PrefixIndex)> {
    let load = (0..60u32, 0..20_000u64, 0.0..1.0f32, prop::bool::weighted(0.9)).prop_map(
        |(requests, prefill_tokens, kv_share, is_fresh)| Load { requests, prefill_tokens, kv_share, is_fresh },
    );
    let view = (load, prop::sample::select(vec![0, 25, 100, 300]), prop::bool::weighted(0.9), 0..NOW_MS);
    (prop::collection::vec(view, 1..40), 0..60_000usize, prop::collection::vec(0..40u32, 0..6)).prop_map(
        |(views, n_bytes, holders)| {
            let (chain, mut index) = (prompt(1, n_bytes), PrefixIndex::bounded(10_000));
            holders.iter().for_each(|slot| index.note(&prompt(1, n_bytes / (*slot as usize + 1)), *slot, 0, NOW_MS));
            let views = views.into_iter().enumerate().map(|(slot, (load, weight, is_healthy, since))| ReplicaView {
                load,
                weight,
                is_healthy,
                serving_since_ms: since,
                ..replica(slot as u32)
            });
            (views.collect(), chain, index)
        },
    )
}

proptest! {
    #[test]
    fn the_chosen_may_be_chosen((replicas, chain, index) in worlds()) {
        let Some(choice) = choose(&chain, &replicas, &index) else {
            prop_assert!(replicas.iter().all(|view| view.weight == 0));
            return Ok(());
        };
        let chosen = &replicas[choice.place];
        let any_healthy = replicas.iter().any(|view| view.weight > 0 && view.is_healthy);
        prop_assert!(chosen.weight > 0 && (chosen.is_healthy || !any_healthy));
        prop_assert!(choice.terms.cost.is_finite() && choice.n_over_share <= choice.n_candidates);
    }

    #[test]
    fn what_is_said_of_replicas_is_what_the_choice_was_made_by((replicas, chain, index) in worlds()) {
        let seen = seen(&chain, &replicas, &index);
        let count = |standing| seen.iter().filter(|score| score.standing == standing).count();
        let (n_fit, n_over) = (count(Standing::Fits), count(Standing::OverShare));
        let Some(choice) = choose(&chain, &replicas, &index) else {
            prop_assert_eq!(n_fit + n_over, 0);
            return Ok(());
        };
        prop_assert_eq!((n_fit + n_over, n_over), (choice.n_candidates, choice.n_over_share));
        let chosen = seen[choice.place];
        prop_assert_eq!((chosen.terms, chosen.source), (choice.terms, choice.source));
        prop_assert_eq!(chosen.standing, if n_fit > 0 { Standing::Fits } else { Standing::OverShare });
    }

    #[test]
    fn nobody_is_sent_more_than_the_bound_while_others_have_room((mut replicas, chain, index) in worlds()) {
        let rules = Rules::default();
        replicas.iter_mut().for_each(|view| (view.weight, view.is_healthy, view.serving_since_ms) = (100, true, 0));
        let choice = choose(&chain, &replicas, &index).unwrap();
        let requests = |view: &ReplicaView| f64::from(view.load.requests);
        let mean = (replicas.iter().map(requests).sum::<f64>() + 1.0) / replicas.len() as f64;
        // The least loaded is never above it. Where the bound is a whole number, the same sum in another order rounds to either side of it.
        let rounding = 1e-9;
        prop_assert!(requests(&replicas[choice.place]) < rules.balance * mean + rules.slack + rounding);
    }

    #[test]
    fn the_order_of_replicas_changes_nothing((replicas, chain, index) in worlds(), turn in 0..40usize) {
        let slot = |replicas: &[ReplicaView]| choose(&chain, replicas, &index).map(|choice| replicas[choice.place].slot);
        let mut turned = replicas.clone();
        turned.rotate_left(turn % replicas.len());
        prop_assert_eq!(slot(&replicas), slot(&turned));
    }

    #[test]
    fn more_work_elsewhere_never_drives_a_request_there((mut replicas, chain, index) in worlds(), other in 0..40usize) {
        replicas.iter_mut().for_each(|view| view.load.is_fresh = true);
        let Some(choice) = choose(&chain, &replicas, &index) else { return Ok(()) };
        let other = other % replicas.len();
        if other == choice.place {
            return Ok(());
        }
        let mut busier = replicas.clone();
        busier[other].load.prefill_tokens += 10_000;
        let after = choose(&chain, &busier, &index).unwrap();
        prop_assert_ne!(after.place, other);
    }
}
