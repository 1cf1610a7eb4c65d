//! Which replicas give a model to one that fetches it, and what they and it are told. Pure: pods and readings are values.
//!
//! A model is as far as its namespace: whoever may make pods there may use its Secrets, too, so that nobody gets weights by this who
//! could not fetch them. Nobody is named to a pod of another namespace, and without a ticket nobody gives.

use std::net::{IpAddr, SocketAddr};

use sha2::{Digest, Sha256};
use stoker_crds::{
    contract::{AgentPhase, LoadReport, ModelReport},
    holders::{HOLDERS_MAX, HOLDERS_PURPOSE, Holder, Holders, TICKET_MS, TICKET_PURPOSE, Ticket, WEIGHTS_PORT},
    intent::hex,
};

use crate::keys::{Keyring, Signed};

/// A word that comes later than this after the reading that it answers is refused.
const WORD_MS: u64 = 30_000;

/// One pod and what its process said a moment ago.
#[derive(Clone, Debug, PartialEq)]
pub struct Party {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub pod: String,
    /// Its UID.
    pub uid: String,
    /// Its address.
    pub ip: IpAddr,
    /// What its process said.
    pub report: LoadReport,
}

impl Party {
    fn model(&self) -> Option<&ModelReport> {
        self.report.model.as_ref()
    }

    /// Who loads a model has all of it, and is not read by clients yet; who drains leaves.
    fn gives(&self, commit: &str) -> bool {
        let has_it = self.model().is_some_and(|model| model.commit == commit && model.fetch.is_none());
        has_it && matches!(self.report.phase, AgentPhase::Ready | AgentPhase::Loading)
    }
}

/// Who of `parties` gives the model to `fetcher`, at most [`HOLDERS_MAX`]: those that serve first. Among equals each fetcher finds others
/// first, so that many share what a few can give.
pub fn holders<'a>(fetcher: &Party, parties: &'a [Party]) -> Vec<&'a Party> {
    let Some(ModelReport { commit, .. }) = fetcher.model() else { return Vec::new() };
    let is_near = |party: &&Party| party.namespace == fetcher.namespace && party.uid != fetcher.uid;
    let mut givers: Vec<&Party> = parties.iter().filter(is_near).filter(|party| party.gives(commit)).collect();
    givers.sort_by_cached_key(|party| (party.report.phase != AgentPhase::Ready, distance(fetcher, party)));
    givers.truncate(HOLDERS_MAX);
    givers
}

/// Of two pods, the same each time.
fn distance(one: &Party, other: &Party) -> String {
    hex(&Sha256::digest(format!("{}{}", one.uid, other.uid)))
}

/// Whether `fetcher` takes files and was told otherwise.
pub fn is_news(fetcher: &Party, givers: &[&Party]) -> bool {
    let model = fetcher.model().filter(|model| model.fetch.is_some());
    model.and_then(|model| model.holders.as_ref()).is_some_and(|before| {
        before.asks || !before.told.iter().map(String::as_str).eq(givers.iter().map(|giver| giver.pod.as_str()))
    })
}

/// What `fetcher` is told.
pub fn word(fetcher: &Party, givers: &[&Party], bytes_per_second: u64, keyring: &Keyring) -> Signed {
    let holders = givers.iter().map(|giver| {
        let ticket = Ticket {
            pod_uid: giver.uid.clone(),
            start_id: giver.report.start_id.clone(),
            commit: giver.model().map(|model| model.commit.clone()).unwrap_or_default(),
            address: fetcher.ip,
            expires_up_ms: giver.report.up_ms + TICKET_MS,
            bytes_per_second,
        };
        let Signed { body, signature } = keyring.sign_for(TICKET_PURPOSE, &ticket);
        let ticket = String::from_utf8(body).expect("JSON is text");
        Holder {
            pod: giver.pod.clone(),
            address: SocketAddr::new(giver.ip, WEIGHTS_PORT).to_string(),
            ticket,
            signature,
        }
    });
    let word = Holders {
        pod_uid: fetcher.uid.clone(),
        start_id: fetcher.report.start_id.clone(),
        expires_up_ms: fetcher.report.up_ms + WORD_MS,
        holders: holders.collect(),
    };
    keyring.sign_for(HOLDERS_PURPOSE, &word)
}

#[cfg(test)]
mod tests {
    use stoker_crds::contract::{FetchReport, HoldersReport};

    use super::*;

    const COMMIT: &str = "c1";

    fn party(pod: &str, phase: AgentPhase) -> Party {
        let model = ModelReport { commit: COMMIT.to_owned(), ..ModelReport::default() };
        Party {
            namespace: "team".to_owned(),
            pod: pod.to_owned(),
            uid: format!("uid-{pod}"),
            ip: "10.0.0.1".parse().unwrap(),
            report: LoadReport {
                phase,
                model: Some(model),
                start_id: format!("run-{pod}"),
                up_ms: 5,
                ..LoadReport::idle(1)
            },
        }
    }

    fn fetcher(told: &[&str], asks: bool) -> Party {
        let mut fetcher = party("new", AgentPhase::Loading);
        let told = told.iter().map(|name| (*name).to_owned()).collect();
        let holders = Some(HoldersReport { told, asks });
        let fetch = Some(FetchReport::default());
        fetcher.report.model = Some(ModelReport { commit: COMMIT.to_owned(), bytes: 0, fetch, holders });
        fetcher
    }

    fn names<'a>(fetcher: &Party, parties: &'a [Party]) -> Vec<&'a str> {
        holders(fetcher, parties).into_iter().map(|party| party.pod.as_str()).collect()
    }

    #[test]
    fn who_has_the_very_model_in_the_same_namespace_gives_it() {
        let of = |change: fn(&mut Party)| {
            let mut party = party("a", AgentPhase::Ready);
            change(&mut party);
            names(&fetcher(&[], true), &[party]).len()
        };
        assert_eq!(of(|_| ()), 1);
        assert_eq!(of(|party| party.namespace = "others".to_owned()), 0);
        assert_eq!(of(|party| party.report.model.as_mut().unwrap().commit = "c2".to_owned()), 0);
        assert_eq!(of(|party| party.report.model.as_mut().unwrap().fetch = Some(FetchReport::default())), 0);
        assert_eq!(of(|party| party.report.model = None), 0);
        assert_eq!(of(|party| party.report.phase = AgentPhase::Draining), 0);
        assert_eq!(of(|party| party.uid = "uid-new".to_owned()), 0, "itself");
    }

    #[test]
    fn those_that_serve_come_first_and_each_fetcher_begins_with_others() {
        let loading = [party("loads", AgentPhase::Loading)];
        let ready: Vec<Party> = (0..9).map(|idx| party(&format!("r{idx}"), AgentPhase::Ready)).collect();
        let few = [&loading[..], &ready[..2]].concat();
        assert_eq!(names(&fetcher(&[], true), &few)[2], "loads");
        let all = [&loading[..], &ready[..]].concat();
        let of = |uid: &str| names(&Party { uid: uid.to_owned(), ..fetcher(&[], true) }, &all).join(" ");
        assert_eq!(of("x").split(' ').count(), HOLDERS_MAX);
        assert_eq!(of("x"), of("x"));
        let first: std::collections::BTreeSet<String> =
            (0..20).map(|idx| of(&idx.to_string()).split(' ').next().unwrap().to_owned()).collect();
        assert!(first.len() >= 5, "{first:?}");
    }

    #[test]
    fn it_is_told_what_it_does_not_know_and_nothing_twice() {
        let ready = [party("a", AgentPhase::Ready)];
        let is_news = |fetcher: &Party, parties: &[Party]| is_news(fetcher, &holders(fetcher, parties));
        assert!(is_news(&fetcher(&[], true), &[]), "that there is nobody is a word, too");
        assert!(is_news(&fetcher(&[], false), &ready) && is_news(&fetcher(&["a"], true), &ready));
        assert!(is_news(&fetcher(&["a"], false), &[]));
        assert!(!is_news(&fetcher(&["a"], false), &ready) && !is_news(&fetcher(&[], false), &[]));
        assert!(!is_news(&party("b", AgentPhase::Loading), &ready), "who fetches nothing");
        let mut of_before = fetcher(&[], true);
        of_before.report.model.as_mut().unwrap().holders = None;
        assert!(!is_news(&of_before, &ready), "who would not know what to do with it");
    }
}
