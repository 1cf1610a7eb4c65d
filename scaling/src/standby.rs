//! Nodes that have the model in memory for the next replicas: how many, and how long a start takes there.
//!
//! Owns what follows for a plan. A replica that is wanted only by the time that a cold start takes need not be asked for while a
//! node stands by for it, for it can still be had by the time of a warm one:
//!
//! ```text
//!     replicas = max(wanted within a warm start, wanted within a cold start - nodes)
//! ```
//!
//! Never looks at a node, never times a start.

use serde::{Deserialize, Serialize};

/// See the module.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Standby {
    /// Nodes with the model in memory and room for a further replica, which start one each: the first of the next ones.
    pub nodes: u32,
    /// Learned 90th percentile of the start time there. `None`: none was seen, and until then it is taken to be that of others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_seconds: Option<f64>,
}

impl Standby {
    /// How long the next replica takes to start, if it starts warm and that is known.
    pub fn next_start_seconds(self) -> Option<f64> {
        self.start_seconds.filter(|_| self.nodes > 0)
    }

    /// Replicas to ask for now, where so many are wanted within a warm start and so many within a cold one.
    pub(crate) fn replicas(self, within_warm: f64, within_cold: f64) -> f64 {
        within_warm.max(within_cold - f64::from(self.nodes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_still_start_warm_is_put_off_and_nothing_that_would_be_late_then() {
        let two = Standby { nodes: 2, start_seconds: Some(5.0) };
        assert_eq!(two.replicas(1.5, 4.0), 2.0);
        assert_eq!(two.replicas(3.5, 4.0), 3.5);
        assert_eq!(Standby { nodes: 0, ..two }.replicas(1.5, 4.0), 4.0);
    }

    #[test]
    fn the_next_start_is_warm_where_a_node_stands_by_and_one_was_seen() {
        let of = |nodes, start_seconds| Standby { nodes, start_seconds }.next_start_seconds();
        assert_eq!([of(1, Some(5.0)), of(0, Some(5.0)), of(1, None)], [Some(5.0), None, None]);
    }
}
