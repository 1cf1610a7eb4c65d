//! Which fleets change, how, and what goes wrong meanwhile.

use jiff::SignedDuration;
use stoker_operator::rollout::{Missing, ReplacingRule, Share};

use super::fleet::{Fleet, Outcome};

/// A replica is ready five minutes after it has room.
const START_SECONDS: i64 = 300;

/// One change of one fleet.
#[derive(Clone, Debug)]
pub struct Case {
    /// What happens.
    pub name: &'static str,
    /// Replicas wanted.
    pub replicas: usize,
    /// Replicas that nodes have room for.
    pub room: usize,
    /// `rollout` as it is written.
    pub said: &'static str,
    /// What it means.
    pub rule: ReplacingRule,
    /// How long a replica of the new revision takes until it serves.
    pub start_seconds: i64,
    /// What goes wrong.
    pub fault: Fault,
}

/// What goes wrong, or otherwise than usual.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Fault {
    /// Nothing.
    None,
    /// The image of the new revision does not come.
    BadImage,
    /// The new revision cannot load its model.
    BadModel,
    /// A node with four replicas is lost.
    NodeLost {
        /// Seconds after the change.
        at: i64,
    },
    /// A third revision is asked for.
    Edited {
        /// Seconds after the change.
        at: i64,
    },
    /// The change is held for a while.
    Paused {
        /// Seconds after the change.
        at: i64,
        /// And when it goes on.
        until: i64,
    },
}

impl Case {
    /// How it goes.
    pub fn run(&self) -> Outcome {
        Fleet::settled(self).change()
    }
}

/// Those of the table.
pub fn cases() -> Vec<Case> {
    let seconds = SignedDuration::from_secs;
    let default = ReplacingRule::default();
    let nine_tenths = ReplacingRule { missing: Missing::AllBut(Share::Percent(90)), ..default };
    let few = Case {
        name: "as many GPUs as replicas",
        replicas: 4,
        room: 4,
        said: "`maxUnavailable: 1`",
        rule: ReplacingRule { missing: Missing::AtMost(1), ..default },
        start_seconds: START_SECONDS,
        fault: Fault::None,
    };
    let full = Case {
        name: "a full cluster",
        replicas: 100,
        room: 100,
        said: "`minAvailable: 90%, surgeSeconds: 20`",
        rule: ReplacingRule { surge_patience: seconds(20), ..nine_tenths },
        ..few
    };
    let quota = ReplacingRule { surge: Share::Count(0), ..nine_tenths };
    let lost = Fault::NodeLost { at: 1000 };
    let paused = Fault::Paused { at: 1000, until: 2800 };
    vec![
        few.clone(),
        Case { name: "one GPU more", room: 5, said: "", rule: default, ..few },
        full.clone(),
        Case { name: "a full quota", said: "`minAvailable: 90%, maxSurge: 0`", rule: quota, ..full.clone() },
        Case { name: "ten GPUs more", room: 110, said: "", rule: default, ..full.clone() },
        Case { name: "one GPU more", room: 101, said: "", rule: default, ..full.clone() },
        Case { name: "bad image", fault: Fault::BadImage, ..full.clone() },
        Case { name: "bad model", fault: Fault::BadModel, ..full.clone() },
        Case { name: "slow start, 20 minutes", start_seconds: 4 * START_SECONDS, ..full.clone() },
        Case { name: "node with four replicas lost, room for them", room: 104, fault: lost, ..full.clone() },
        Case { name: "edited in the middle", fault: Fault::Edited { at: 1000 }, ..full.clone() },
        Case { name: "paused for half an hour", fault: paused, ..full },
    ]
}
