//! The whole model at one moment: what the user wants, the cluster, and what the operator is in the middle of.

use crate::{
    pod::{Pod, Stage},
    round::Round,
};

/// How large the model is and what may happen in it.
#[derive(Clone, Copy, Debug)]
pub struct Scope {
    /// Replicas wanted at first, and at most.
    pub replicas: u8,
    /// How often the user may change the number or the revision.
    pub changes: u8,
    /// How many faults may happen.
    pub faults: u8,
    /// Pods that nodes have room for.
    pub room: u8,
    /// `rollout.maxUnavailable`.
    pub max_unavailable: u8,
    /// `rollout.maxSurge`.
    pub max_surge: u8,
    /// Agents that the operator cannot reach may never be reached again.
    pub mute_for_ever: bool,
    /// The user may pause changes, and go on.
    pub pauses: bool,
    /// A change is tried on one replica first, and its gate passes or fails.
    pub canaries: bool,
}

impl Scope {
    /// One replica, that may never be missing, with room for one more.
    pub const ONE: Self = Self {
        replicas: 1,
        changes: 1,
        faults: 1,
        room: 2,
        max_unavailable: 0,
        max_surge: 1,
        mute_for_ever: false,
        pauses: false,
        canaries: false,
    };
    /// The same without that room: the old pod goes first.
    pub const IN_PLACE: Self = Self { room: 1, max_unavailable: 1, ..Self::ONE };

    /// The same where no pod may be too many: as under a quota.
    pub const BY_QUOTA: Self = Self { max_surge: 0, ..Self::IN_PLACE };
    /// Several replicas may be replaced at a time.
    pub const SEVERAL: Self = Self { replicas: 3, room: 3, max_unavailable: 2, max_surge: 2, faults: 0, ..Self::ONE };

    /// What is looked at in a release build, with its figures in docs/faults.md.
    pub fn recorded() -> Vec<Self> {
        let (one, two) = (Self::ONE, Self { replicas: 2, room: 3, ..Self::ONE });
        vec![
            one,
            Self { changes: 2, ..one },
            Self { faults: 2, ..one },
            Self { faults: 2, mute_for_ever: true, ..one },
            Self { changes: 0, faults: 3, ..one },
            Self { changes: 2, ..Self::IN_PLACE },
            Self { changes: 2, faults: 0, pauses: true, ..one },
            Self { canaries: true, ..one },
            Self { changes: 2, faults: 0, canaries: true, ..one },
            Self { faults: 0, canaries: true, room: 2, max_unavailable: 1, ..two },
            Self { faults: 0, canaries: true, ..two },
            Self { faults: 2, ..Self::IN_PLACE },
            Self { faults: 2, ..Self::BY_QUOTA },
            Self { max_unavailable: 1, ..Self::SEVERAL },
            Self::SEVERAL,
            Self { faults: 0, ..two },
            Self { changes: 0, faults: 2, ..two },
            Self { changes: 1, faults: 1, ..two },
            Self { replicas: 3, room: 4, changes: 0, faults: 1, ..one },
        ]
    }
}

/// See the module.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct World {
    /// Replicas wanted.
    pub replicas: u8,
    /// Revision wanted.
    pub revision: u8,
    /// The deployment's pods, by revision and number.
    pub pods: Vec<Pod>,
    /// What the operator is writing.
    pub round: Option<Round>,
    /// Changes that the user may still make.
    pub changes: u8,
    /// Faults that may still happen.
    pub faults: u8,
    /// `rollout.paused`.
    pub paused: bool,
    /// The other revision is tried on one replica.
    pub trial: bool,
}

impl World {
    /// The deployment was just accepted.
    pub fn new(scope: &Scope) -> Self {
        let Scope { replicas, changes, faults, .. } = *scope;
        Self { replicas, revision: 0, pods: Vec::new(), round: None, changes, faults, paused: false, trial: false }
    }

    /// The pod of this name.
    pub fn find(&self, revision: u8, ordinal: u8) -> Option<usize> {
        self.pods.iter().position(|pod| (pod.revision, pod.ordinal) == (revision, ordinal))
    }

    /// Changes a pod. What the API server shows of it has another version then, and what was decided on the one before fails.
    pub fn change(&mut self, place: usize, change: impl FnOnce(&mut Pod)) {
        let pod = &mut self.pods[place];
        let (stage, intent) = (pod.stage, pod.intent.map(|intent| (intent.number, intent.drain)));
        change(pod);
        let seen =
            pod.stage_seen() != stage_seen(stage) || pod.intent.map(|intent| (intent.number, intent.drain)) != intent;
        pod.renumber();
        let name = (pod.revision, pod.ordinal);
        if seen && let Some(round) = &mut self.round {
            round.outdate(name);
        }
    }

    /// Takes away a pod that is gone.
    pub fn remove(&mut self, place: usize) {
        let pod = self.pods.remove(place);
        if let Some(round) = &mut self.round {
            round.outdate((pod.revision, pod.ordinal));
        }
    }

    /// Adds a pod.
    pub fn add(&mut self, pod: Pod) {
        self.pods.push(pod);
        self.pods.sort_unstable();
    }

    /// True when a node has room for one more pod.
    pub fn has_room(&self, scope: &Scope) -> bool {
        self.pods.iter().filter(|pod| pod.holds_room()).count() < usize::from(scope.room)
    }

    /// The revision that is tried, if one is.
    pub fn tried(&self) -> u8 {
        1 - self.revision
    }

    /// Replicas that serve and are meant to stay.
    pub fn serving(&self) -> usize {
        self.pods.iter().filter(|pod| pod.serves()).count()
    }
}

impl Pod {
    fn stage_seen(&self) -> Stage {
        stage_seen(self.stage)
    }
}

/// A stage without its age, which no write changes.
fn stage_seen(stage: Stage) -> Stage {
    match stage {
        Stage::Unscheduled { .. } => Stage::Unscheduled { age: 0 },
        Stage::Faltering { .. } => Stage::Faltering { age: 0 },
        Stage::Finished { .. } => Stage::Finished { age: 0 },
        stage => stage,
    }
}
