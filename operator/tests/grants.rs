//! Grants of budgets: named cases as a table, and what must hold of any claims.

use proptest::prelude::*;
use stoker_operator::budgets::grants::{Blocked, Budget, Claim, Grant, grants};

/// `team: gpus priority borrows`.
fn budget(namespace: &str, gpus: u64, priority: i32, borrows: u64) -> Budget {
    Budget { namespace: namespace.into(), gpus, priority, borrows }
}

/// Of one GPU each, named `namespace/name`.
fn claim(name: &str, wanted: u32, held: u32) -> Claim {
    let (namespace, name) = name.split_once('/').expect("NAMESPACE/NAME");
    Claim { namespace: namespace.into(), name: name.into(), gpus: 1, min: 1, wanted, held, stuck: 0 }
}

fn granted(budgets: &[Budget], claims: &[Claim]) -> Vec<u32> {
    grants(budgets, claims).into_iter().map(|grant| grant.replicas).collect()
}

#[test]
fn a_budget_is_shared_by_who_has_less_and_nobody_without_one_is_limited() {
    let budgets = [budget("a", 4, 0, 0)];
    let claims = [claim("a/x", 9, 0), claim("a/y", 9, 0), claim("b/z", 9, 0)];
    assert_eq!(granted(&budgets, &claims), [2, 2, 9]);
    let blocked = grants(&budgets, &claims)[0].blocked.clone();
    assert_eq!(blocked, Some(Blocked::Spent(vec!["a/x".into(), "a/y".into()])));
    // What runs is not taken, and minima come first.
    assert_eq!(granted(&budgets, &[claim("a/x", 9, 4), claim("a/y", 9, 0)]), [4, 0]);
    let large = Claim { min: 3, ..claim("a/x", 3, 0) };
    assert_eq!(granted(&budgets, &[claim("a/a", 9, 0), large]), [1, 3]);
}

#[test]
fn what_nobody_uses_is_lent_in_order_of_priority_to_who_may_borrow() {
    let budgets = [budget("a", 6, 0, 0), budget("b", 1, 0, 2), budget("c", 1, 5, u64::MAX), budget("d", 0, 9, 0)];
    let claims = [claim("a/x", 2, 0), claim("b/x", 9, 0), claim("c/x", 3, 0), claim("d/x", 1, 0)];
    assert_eq!(granted(&budgets, &claims), [2, 3, 3, 0]);
}

#[test]
fn a_namespace_gets_its_own_back_from_a_lower_priority_only() {
    let claims = [claim("a/x", 2, 0), claim("b/x", 9, 4)];
    let budgets = |priority| [budget("a", 2, priority, 0), budget("b", 2, 0, u64::MAX)];
    assert_eq!(granted(&budgets(1), &claims), [2, 2]);
    let equal = grants(&budgets(0), &claims);
    let lent = Some(Blocked::Lent(vec!["b/x".into()]));
    assert_eq!(equal[0], Grant { replicas: 0, blocked: lent });
    assert_eq!(equal[1].replicas, 4);
}

#[test]
fn nothing_is_lent_while_somebody_waits_for_what_is_theirs() {
    // Of 8 GPUs 7 are in use, and a's next replica takes 4: the last one is not lent to c meanwhile.
    let budgets = [budget("a", 4, 0, 0), budget("b", 4, 0, u64::MAX), budget("c", 0, 0, u64::MAX)];
    let large = Claim { gpus: 4, ..claim("a/x", 1, 0) };
    let found = grants(&budgets, &[large, claim("b/x", 7, 7), claim("c/x", 1, 0)]);
    assert_eq!(found[0].blocked, Some(Blocked::Lent(vec!["b/x".into()])));
    assert_eq!((found[2].replicas, found[2].blocked.clone()), (0, Some(Blocked::NothingLeft(vec!["a/x".into()]))));
}

#[test]
fn nobody_gives_anything_where_that_would_not_be_enough() {
    let budgets = [budget("a", 4, 9, 0), budget("b", 2, 0, u64::MAX), budget("c", 2, 9, u64::MAX)];
    let large = Claim { gpus: 4, ..claim("a/x", 1, 0) };
    assert_eq!(granted(&budgets, &[large, claim("b/x", 4, 4), claim("c/x", 4, 4)]), [0, 4, 4]);
}

#[test]
fn what_finds_no_room_is_offered_to_others_and_comes_back_when_they_find_none_either() {
    let budgets = [budget("a", 2, 0, 0), budget("b", 0, 0, u64::MAX)];
    let stuck = |name: &str, wanted, stuck| Claim { stuck, ..claim(name, wanted, 0) };
    assert_eq!(granted(&budgets, &[stuck("a/x", 2, 2), claim("b/x", 2, 0)]), [0, 2]);
    assert_eq!(granted(&budgets, &[stuck("a/x", 2, 1), claim("b/x", 2, 0)]), [1, 1]);
    // All of them are stuck: nobody is worse off by it than before.
    assert_eq!(granted(&budgets, &[stuck("a/x", 2, 2), stuck("b/x", 2, 2)]).iter().sum::<u32>(), 2);
    assert_eq!(granted(&budgets, &[stuck("a/x", 2, 2), claim("b/x", 0, 0)]), [2, 0], "nobody else wants it");
}

prop_compose! {
    fn any_budget(namespace: usize)(gpus in 0_u64..9, priority in -1..3, borrows in prop::sample::select(vec![0, 1, 3, u64::MAX]))
        -> Budget { budget(&format!("n{namespace}"), gpus, priority, borrows) }
}

prop_compose! {
    fn any_claim(idx: usize)(
        namespace in 0_usize..4, gpus in prop::sample::select(vec![1_u64, 2, 4]),
        min in 0_u32..3, wanted in 0_u32..7, held in 0_u32..7, stuck in prop::sample::select(vec![0_u32, 0, 1, 9]),
    ) -> Claim { Claim { namespace: format!("n{namespace}"), name: format!("c{idx}"), gpus, min, wanted, held, stuck } }
}

fn any_world() -> impl Strategy<Value = (Vec<Budget>, Vec<Claim>)> {
    // The last namespace has no budget.
    let budgets = (any_budget(0), any_budget(1), any_budget(2)).prop_map(|(a, b, c)| vec![a, b, c]);
    let claims = (any_claim(0), any_claim(1), any_claim(2), any_claim(3), any_claim(4));
    (budgets, claims.prop_map(|(a, b, c, d, e)| vec![a, b, c, d, e]))
}

fn used(budget: &Budget, claims: &[Claim], replicas: impl Fn(usize) -> u32) -> u64 {
    let own = claims.iter().enumerate().filter(|(_, claim)| claim.namespace == budget.namespace);
    own.map(|(idx, claim)| claim.gpus * u64::from(replicas(idx))).sum()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn nobody_gets_more_than_is_wanted_may_be_had_and_there_is((budgets, claims) in any_world()) {
        let found = granted(&budgets, &claims);
        let kept = |idx: usize| claims[idx].kept();
        for (claim, granted) in claims.iter().zip(&found) {
            prop_assert!(*granted <= claim.wanted);
            prop_assert!(claim.namespace != "n3" || *granted == claim.wanted, "nothing limits it");
        }
        let mut all = (0, 0, 0);
        for budget in &budgets {
            let (now, before) = (used(budget, &claims, |idx| found[idx]), used(budget, &claims, kept));
            prop_assert!(now <= before.max(budget.gpus.saturating_add(budget.borrows)), "{budget:?} {now}");
            all = (all.0 + now, all.1 + before, all.2 + budget.gpus);
        }
        prop_assert!(all.0 <= all.1.max(all.2), "more is granted than there is: {all:?}");
    }

    #[test]
    fn what_serves_is_taken_only_from_who_borrows_for_a_higher_priority_within_its_own((budgets, claims) in any_world()) {
        let found = granted(&budgets, &claims);
        let kept = |idx: usize| claims[idx].kept();
        for claim in (0..claims.len()).filter(|idx| found[*idx] < kept(*idx)).map(|idx| &claims[idx]) {
            let budget = budgets.iter().find(|budget| budget.namespace == claim.namespace).unwrap();
            prop_assert!(used(budget, &claims, kept) > budget.gpus, "{claim:?} did not borrow");
            let is_owed = |other: &Budget| {
                let gains = |idx: usize| claims[idx].namespace == other.namespace && found[idx] > kept(idx);
                let had_less = used(other, &claims, kept) < other.gpus;
                other.priority > budget.priority && had_less && (0..claims.len()).any(gains)
            };
            prop_assert!(budgets.iter().any(is_owed), "{claim:?} was taken from for nobody");
        }
    }

    #[test]
    fn who_gets_less_knows_who_has_it_and_nothing_lies_idle((budgets, claims) in any_world()) {
        let found = grants(&budgets, &claims);
        let all: u64 = budgets.iter().map(|budget| budget.gpus).sum();
        let in_use: u64 = budgets.iter().map(|budget| used(budget, &claims, |idx| found[idx].replicas)).sum();
        let owed = |grant: &Grant| matches!(grant.blocked, Some(Blocked::Lent(_)));
        for (claim, grant) in claims.iter().zip(&found) {
            prop_assert_eq!(grant.blocked.is_some(), grant.replicas < claim.wanted);
            let Some(blocked) = &grant.blocked else { continue };
            let budget = budgets.iter().find(|budget| budget.namespace == claim.namespace).unwrap();
            let own = used(budget, &claims, |idx| found[idx].replicas);
            let is_spent = own + claim.gpus > budget.gpus.saturating_add(budget.borrows);
            let is_out = in_use + claim.gpus > all;
            match blocked {
                Blocked::Spent(_) => prop_assert!(is_spent),
                Blocked::Lent(holders) => prop_assert!(is_out && !holders.is_empty()),
                Blocked::NothingLeft(_) => prop_assert!(is_out || found.iter().any(owed)),
            }
        }
    }

    #[test]
    fn what_was_granted_is_granted_again((budgets, claims) in any_world()) {
        let first = granted(&budgets, &claims);
        let again = |(claim, granted): (&Claim, &u32)| Claim { held: *granted, ..claim.clone() };
        let second: Vec<Claim> = claims.iter().zip(&first).map(again).collect();
        prop_assert_eq!(granted(&budgets, &second), first);
    }
}
