//! Small worlds, whole: nothing is found where the operator keeps its promises, and something where it cannot.

use stoker_explore::{
    explore::{Seen, explore},
    world::Scope,
};

fn seen(scope: Scope) -> Seen {
    let seen = explore(&scope, |_, _| {});
    println!("{scope:?}: {} states, {} moves, {} settled, {:.1?}", seen.states, seen.moves, seen.core, seen.time);
    seen
}

#[test]
fn whatever_fails_nothing_is_cut_and_the_wanted_replicas_serve_in_the_end() {
    let two = Scope { replicas: 2, room: 3, changes: 0, ..Scope::ONE };
    let paused = Scope { pauses: true, changes: 2, faults: 0, ..Scope::ONE };
    let tried = Scope { canaries: true, ..Scope::ONE };
    let tried_in_place = Scope { replicas: 2, room: 2, max_unavailable: 1, faults: 0, ..tried };
    let alone = [Scope::ONE, Scope { mute_for_ever: true, ..Scope::ONE }, Scope::IN_PLACE, Scope::BY_QUOTA];
    for scope in alone.into_iter().chain([two, paused, tried, tried_in_place]) {
        let seen = seen(scope);
        assert!(seen.core > 0 && seen.fault.is_none(), "{scope:?}: {:#?}", seen.fault);
    }
}

#[test]
fn a_roll_that_has_no_room_and_may_not_give_up_the_old_pod_is_found() {
    let finding = seen(Scope { max_unavailable: 0, faults: 0, ..Scope::IN_PLACE }).fault.expect("nothing can change");
    assert!(finding.what.contains("never settled"), "{}", finding.what);
    assert!(!finding.way.is_empty());
}

#[test]
fn a_world_without_nodes_never_settles() {
    let seen = seen(Scope { room: 0, changes: 0, faults: 0, ..Scope::ONE });
    assert_eq!((seen.core, seen.fault.is_some()), (0, true));
}
