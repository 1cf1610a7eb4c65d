//! A pod for tests of what is made of observed ones.

use jiff::Timestamp;
use stoker_replica::{Needs, ObservedPod, Stage};

/// The first one of revision `a`, on no node, in this stage.
pub(crate) fn observed_pod(stage: Stage) -> ObservedPod {
    ObservedPod {
        name: "chat-a-0".into(),
        uid: "u".into(),
        revision: "a".into(),
        ordinal: 0,
        resource_version: "1".into(),
        created: Timestamp::UNIX_EPOCH,
        stage,
        lost: false,
        gone_by: None,
        node: None,
        needs: Needs::default(),
    }
}
