//! Why a request went where it went, in one line: what the header of an answer says when it was asked for. And where one would go, with all
//! that the choice sees of every replica, for who asks before it is sent.

use std::time::Duration;

use stoker_crds::route::{ForeseenReplica, ForeseenRoute, SeenReplica};
use stoker_routing::{Choice, ReplicaView, Score, Source, Terms};

use crate::fleet::{Deployment, Member};

/// `replica=POD reason=WORD …`: the terms of a choice, in tokens, and how long the request stood in line before.
pub fn explained(pod: &str, choice: &Choice, attempts: u32, line_time: Duration) -> String {
    let terms = &choice.terms;
    format!(
        "replica={pod} reason={} prefix={} cached={} uncached={} waiting={} requests={} cost={:.0} candidates={} over-share={} line-ms={} attempts={attempts}",
        choice.reason.word(),
        choice.source.map_or("none", Source::word),
        terms.cached_tokens,
        terms.uncached_tokens,
        terms.waiting_tokens,
        terms.requests,
        terms.cost,
        choice.n_candidates,
        choice.n_over_share,
        line_time.as_millis(),
    )
}

/// What a choice would be, and what it sees of each replica: the same that it is made by, since it is the same function.
pub struct Foreseen<'a> {
    /// Of whom.
    pub deployment: &'a Deployment,
    /// Those that take requests.
    pub members: Vec<&'a Member>,
    /// What is seen of each of them, in their order.
    pub views: Vec<ReplicaView>,
    /// What each is chosen by.
    pub scores: Vec<Score>,
    /// Who would be.
    pub choice: Option<Choice>,
}

/// As it is told, those that take no requests last.
pub fn foreseen(foreseen: &Foreseen<'_>, prompt_tokens: u32) -> ForeseenRoute {
    let Foreseen { deployment, members, views, scores, choice } = foreseen;
    let chosen = choice.map(|choice| choice.place);
    let told = |member: &Member, chosen, seen| ForeseenReplica {
        pod: member.pod.clone(),
        state: member.state.word().to_owned(),
        chosen,
        seen,
    };
    let seen = members.iter().zip(views).zip(scores).enumerate();
    let seen = seen.map(|(place, ((member, view), score))| told(member, chosen == Some(place), Some(of(view, score))));
    let is_out = |member: &&Member| !members.iter().any(|seen| seen.slot == member.slot);
    let out = deployment.members.iter().filter(is_out).map(|member| told(member, false, None));
    ForeseenRoute {
        deployment: deployment.host(),
        prompt_tokens,
        replica: chosen.map(|place| members[place].pod.clone()),
        reason: choice.map(|choice| choice.reason.word().to_owned()),
        replicas: seen.chain(out).collect(),
    }
}

fn of(view: &ReplicaView, score: &Score) -> SeenReplica {
    let Terms { cached_tokens, uncached_tokens, waiting_tokens, requests, cost } = score.terms;
    SeenReplica {
        standing: score.standing.word().to_owned(),
        prefix: score.source.map_or("none", Source::word).to_owned(),
        cached_tokens,
        uncached_tokens,
        waiting_tokens,
        requests,
        kv_share: (f64::from(view.load.kv_share) * 1000.0).round() / 1000.0,
        load_is_fresh: view.load.is_fresh,
        weight: view.weight,
        cost: cost.round(),
    }
}
