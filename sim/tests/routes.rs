//! Rules of routing on small fleets: what ours promises, beside the usual ones, on the same load.

use stoker_sim::routing::{Hears, Kind, Load, Outcome, RuleName, Setting, run, shared_cache_hits};

fn load(kind: Kind) -> Load {
    Load { kind, n_replicas: 4, seconds: 30.0, pace: 1.0, seed: 3 }
}

fn outcome(kind: Kind, rule: RuleName) -> Outcome {
    run(&Setting { load: load(kind), rule })
}

#[test]
fn conversations_and_agents_find_their_prefix() {
    for kind in [Kind::Conversations, Kind::Agents] {
        let (ours, in_turn) = (outcome(kind, RuleName::STOKER), outcome(kind, RuleName::RoundRobin));
        let oracle = shared_cache_hits(&load(kind));
        assert!(ours.hit_share >= 0.95 * oracle, "{kind:?}: {:.3} of {oracle:.3}", ours.hit_share);
        assert!(ours.ttft.p50 < in_turn.ttft.p50 && ours.ttft.p99 < in_turn.ttft.p99, "{kind:?}: {ours:?} {in_turn:?}");
    }
}

#[test]
fn prompts_of_a_catalogue_that_no_replica_holds_alone_are_found_where_they_are() {
    let (ours, in_turn) = (outcome(Kind::Catalogue, RuleName::STOKER), outcome(Kind::Catalogue, RuleName::RoundRobin));
    let oracle = shared_cache_hits(&load(Kind::Catalogue));
    assert!(ours.hit_share >= 0.95 * oracle && in_turn.hit_share < 0.7 * oracle, "{ours:?} {in_turn:?} {oracle:.3}");
    assert!(ours.ttft.p50 < 0.5 * in_turn.ttft.p50 && ours.ttft.p99 < 0.5 * in_turn.ttft.p99, "{ours:?} {in_turn:?}");
}

#[test]
fn three_gateways_find_what_one_does_by_what_replicas_say_or_by_what_they_tell_each_other() {
    for kind in [Kind::Conversations, Kind::Agents] {
        let hits = |hears, tell| outcome(kind, RuleName::Stoker { n_gateways: 3, hears, tell }).hit_share;
        let oracle = shared_cache_hits(&load(kind));
        for hears in [Hears::All, Hears::Late, Hears::Most, Hears::Nothing] {
            let hits = hits(hears, true);
            assert!(hits >= 0.95 * oracle, "{kind:?}, {hears:?}: {hits:.3} of {oracle:.3}");
        }
        let deaf = hits(Hears::Nothing, false);
        for hears in [Hears::All, Hears::Late, Hears::Most] {
            let hits = hits(hears, false);
            assert!(hits > deaf, "{kind:?}, {hears:?}: {hits:.3}, {deaf:.3} without");
        }
    }
}

#[test]
fn three_gateways_that_tell_each_other_choose_as_one() {
    for kind in Kind::ALL {
        let three = |tell| outcome(kind, RuleName::Stoker { n_gateways: 3, hears: Hears::All, tell });
        let (apart, together, one) = (three(false), three(true), outcome(kind, RuleName::STOKER));
        assert!(together.agreement >= 0.95 && together.agreement > apart.agreement, "{kind:?}: {together:?} {apart:?}");
        assert!(together.ttft.p50 <= 1.1 * one.ttft.p50, "{kind:?}: {together:?} {one:?}");
    }
}

#[test]
fn without_anything_to_share_it_is_no_worse_than_the_least_loaded() {
    let [ours, least] = [RuleName::STOKER, RuleName::LeastRequests].map(|rule| outcome(Kind::NoSharing, rule));
    assert!(ours.ttft.p50 <= 1.02 * least.ttft.p50 && ours.ttft.p99 <= 1.02 * least.ttft.p99, "{ours:?} {least:?}");
    assert!(ours.imbalance < 1.3, "{ours:?}");
}

#[test]
fn a_run_is_its_loads_and_seeds() {
    let [first, second] = [(); 2].map(|()| outcome(Kind::SharedPrompts, RuleName::STOKER));
    assert_eq!(format!("{first:?}"), format!("{second:?}"));
}
