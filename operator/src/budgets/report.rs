//! What statuses say about grants. Pure.

use stoker_crds::{
    conditions,
    inference_budget::{BUDGET_NAME, InferenceBudgetStatus},
    status::BudgetStatus,
};

use super::{
    Granted,
    grants::{Blocked, Budget, Claim, Grant},
};
use crate::verdict::Verdict;

/// The section of a deployment's status.
pub fn budget_status(granted: &Granted) -> BudgetStatus {
    let Granted { wanted, grant, .. } = granted;
    let blocked_by = grant.blocked.as_ref().map(|blocked| blocked.holders().to_vec()).unwrap_or_default();
    BudgetStatus { wanted: as_i32(*wanted), granted: as_i32(grant.replicas), blocked_by }
}

/// The condition Granted.
pub fn granted_verdict(granted: &Granted) -> Verdict {
    let Granted { wanted, grant, gpus, .. } = granted;
    let each = if *gpus == 1 { "a GPU".to_owned() } else { format!("{gpus} GPUs") };
    let of = format!(
        "{} of {wanted} replicas with {each} each are granted by InferenceBudget {BUDGET_NAME}",
        grant.replicas
    );
    let no = |reason: &str, why: String| Verdict::new(false, reason, format!("{of}: {why}"));
    match &grant.blocked {
        _ if grant.replicas >= *wanted => Verdict::new(true, conditions::REASON_GRANTED, of),
        None => no(conditions::REASON_GRANT_PENDING, "it is being looked at".to_owned()),
        Some(Blocked::Spent(by)) => no(
            conditions::REASON_BUDGET_SPENT,
            format!(
                "the namespace has what it may have{}; raise its spec.gpus or spec.borrowing.maxGpus, or lower what these want",
                held_by(by)
            ),
        ),
        Some(Blocked::Lent(by)) => no(
            conditions::REASON_BUDGET_LENT,
            format!(
                "its own GPUs are lent{}, of no lower priority: it gets them when those want less, or at once with a higher \
                 spec.priority",
                held_by(by)
            ),
        ),
        Some(Blocked::NothingLeft(by)) => no(
            conditions::REASON_NOTHING_TO_BORROW,
            format!(
                "beyond its own there is nothing left to borrow{}; raise its spec.gpus to have more by right",
                held_by(by)
            ),
        ),
    }
}

fn held_by(holders: &[String]) -> String {
    if holders.is_empty() { String::new() } else { format!(" (held by {})", holders.join(", ")) }
}

/// The status of a budget.
pub(super) fn status_of(budget: &Budget, generation: Option<i64>, all: &[(&Claim, &Grant)]) -> InferenceBudgetStatus {
    let own: Vec<_> = all.iter().filter(|(claim, _)| claim.namespace == budget.namespace).collect();
    let sum = |replicas: &dyn Fn(&Claim, &Grant) -> u32| -> u64 {
        own.iter().map(|(claim, grant)| u64::from(replicas(claim, grant)) * claim.gpus).sum()
    };
    let granted = sum(&|_, grant| grant.replicas);
    let waiting = own.iter().filter(|(claim, grant)| grant.replicas < claim.wanted);
    let mut waiting: Vec<String> = waiting.map(|(claim, _)| claim.name.clone()).collect();
    waiting.sort();
    InferenceBudgetStatus {
        observed_generation: generation,
        wanted_gpus: whole(sum(&|claim, _| claim.wanted)),
        granted_gpus: whole(granted),
        borrowed_gpus: whole(granted.saturating_sub(budget.gpus)),
        waiting,
    }
}

fn whole(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn as_i32(count: u32) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX)
}
