//! A deployment and its replicas.

use stoker_crds::endpoints::EndpointState;
use stoker_routing::ReplicaView;

use super::Member;
use crate::vital::Vital;

/// A deployment and its replicas.
#[derive(Debug)]
pub struct Deployment {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Names that it takes in `model`.
    pub models: Vec<String>,
    /// Replicas that it should have.
    pub replicas_wanted: u32,
    /// Where requests arrive that are for it alone.
    pub port: Option<u16>,
    /// Its replicas, in any state.
    pub members: Vec<Member>,
    /// Of its name: what prompts are hashed behind.
    pub salt: u64,
}

/// Whether a deployment's replicas take more requests now.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Room {
    /// Whether any replica takes requests.
    pub serves: bool,
    /// Requests that they take before others have begun; all if none of them answers: it is asked then, and says why.
    pub places: u32,
}

impl Deployment {
    /// The shortest host name that means it.
    pub fn host(&self) -> String {
        format!("{}.{}", self.name, self.namespace)
    }

    /// Members that may be sent requests and were not tried before, and what routing sees of them.
    pub fn candidates(&self, now_ms: u64, tried: &[u32]) -> (Vec<&Member>, Vec<ReplicaView>) {
        let untried = |member: &&Member| !tried.contains(&member.slot);
        let members: Vec<&Member> =
            self.members.iter().filter(|member| member.takes_requests()).filter(untried).collect();
        let views = members.iter().map(|member| member.view(now_ms)).collect();
        (members, views)
    }

    /// How much room there is; no more members are looked at than it takes to find as much as is `enough`.
    pub fn room(&self, now_ms: u64, enough: u32) -> Room {
        // Who is only suspect has its places where nobody else has any: a moment's silence of the only one lets nobody past the line.
        let (mut serves, mut places, mut of_suspects) = (false, None::<u32>, None::<u32>);
        for member in self.members.iter().filter(|member| member.takes_requests()) {
            serves = true;
            if member.is_up(now_ms) {
                let all = if member.vital.is_suspect(now_ms) { &mut of_suspects } else { &mut places };
                *all = Some(all.unwrap_or(0).saturating_add(member.places(now_ms)));
            }
            if places.is_some_and(|places| places >= enough) {
                break;
            }
        }
        Room { serves, places: places.or(of_suspects).unwrap_or(u32::MAX) }
    }

    /// Whether a member has spoken since one that has not was asked.
    pub fn speaks_louder_than(&self, silent: &Vital) -> bool {
        let spoke = |since_ms| self.members.iter().any(|member| member.vital.heard_ms() > since_ms);
        silent.unanswered_since_ms().is_some_and(spoke)
    }

    /// How many members are in a state.
    pub fn count(&self, state: EndpointState) -> usize {
        self.members.iter().filter(|member| member.state == state).count()
    }
}
