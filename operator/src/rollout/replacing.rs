//! What replacing an older revision may cost: how many replicas may be missing, how many there may be beyond the wanted ones. Pure.

use jiff::SignedDuration;

/// As it is said of a deployment, whatever its number of replicas.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ReplacingRule {
    /// Replicas that may be missing.
    pub missing: Missing,
    /// Replicas beyond the wanted ones.
    pub surge: Share,
    /// How long a surplus pod waits for room before one is given up for it.
    pub surge_patience: SignedDuration,
}

/// How many replicas may be missing.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Missing {
    /// So many.
    AtMost(usize),
    /// All but these.
    AllBut(Share),
}

/// A number of replicas, or a part of them; parts of one are rounded up.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Share {
    /// So many.
    Count(usize),
    /// So many of a hundred.
    Percent(usize),
}

/// The same of a number of replicas.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Replacing {
    /// Replicas that may be missing.
    pub max_unavailable: usize,
    /// Replicas that there may be beyond the wanted ones.
    pub max_surge: usize,
    /// How long a surplus pod waits for room before one is given up for it.
    pub surge_patience: SignedDuration,
}

impl Default for ReplacingRule {
    /// Never fewer than served; a tenth beyond them; time for a cluster autoscaler to add a node.
    fn default() -> Self {
        Self { missing: Missing::AtMost(0), surge: Share::Percent(10), surge_patience: SignedDuration::from_secs(120) }
    }
}

impl Default for Replacing {
    /// That of few replicas.
    fn default() -> Self {
        ReplacingRule::default().of(1)
    }
}

impl ReplacingRule {
    /// What it allows with so many replicas. Where none may be missing, one pod has to be beyond the wanted ones: nothing could be replaced.
    pub fn of(&self, replicas: usize) -> Replacing {
        let max_unavailable = match self.missing {
            Missing::AtMost(count) => count,
            Missing::AllBut(available) => replicas.saturating_sub(available.of(replicas)),
        };
        let max_surge = self.surge.of(replicas).max(usize::from(max_unavailable == 0));
        Replacing { max_unavailable, max_surge, surge_patience: self.surge_patience }
    }
}

impl Share {
    fn of(self, replicas: usize) -> usize {
        match self {
            Self::Count(count) => count,
            Self::Percent(percent) => (replicas * percent).div_ceil(100),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Replicas that may be missing and that may be too many.
    fn allowed(missing: Missing, surge: Share, replicas: usize) -> (usize, usize) {
        let replacing = ReplacingRule { missing, surge, ..ReplacingRule::default() }.of(replicas);
        (replacing.max_unavailable, replacing.max_surge)
    }

    #[test]
    fn shares_never_let_fewer_serve_than_they_say() {
        let nine_tenths = Missing::AllBut(Share::Percent(90));
        let of = |replicas| allowed(nine_tenths, Share::Percent(10), replicas);
        assert_eq!([1, 9, 10, 19, 20, 100].map(of), [(0, 1), (0, 1), (1, 1), (1, 2), (2, 2), (10, 10)]);
        assert_eq!(allowed(Missing::AllBut(Share::Percent(0)), Share::Percent(0), 4), (4, 0));
        assert_eq!(allowed(Missing::AtMost(2), Share::Count(5), 3), (2, 5));
    }

    #[test]
    fn where_nobody_may_be_missing_one_may_be_too_many() {
        assert_eq!(allowed(Missing::AllBut(Share::Percent(90)), Share::Count(0), 5), (0, 1));
        assert_eq!(allowed(Missing::AllBut(Share::Count(3)), Share::Count(0), 2), (0, 1));
        assert_eq!(allowed(Missing::AllBut(Share::Percent(90)), Share::Count(0), 10), (1, 0));
    }
}
