//! How many requests may be sent a second time: a part of those that come, so that a fleet in trouble does not get twice its load.
//! Pure.

/// What a request adds: one in five may be sent again.
const EARNED: f64 = 0.2;
/// Kept at most, and at the beginning: a gateway that had little to do sends these again before it must earn more.
const MOST: f64 = 100.0;

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RetryBudget(f64);

impl Default for RetryBudget {
    fn default() -> Self {
        Self(MOST)
    }
}

impl RetryBudget {
    /// A request came.
    pub fn earn(&mut self) {
        self.0 = (self.0 + EARNED).min(MOST);
    }

    /// Takes one if there is one.
    pub fn spend(&mut self) -> bool {
        let has_one = self.0 >= 1.0;
        if has_one {
            self.0 -= 1.0;
        }
        has_one
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_everything_fails_one_in_five_is_sent_again() {
        let mut budget = RetryBudget::default();
        while budget.spend() {}
        let again = (0..1000).filter(|_| {
            budget.earn();
            budget.spend()
        });
        assert!((195..=200).contains(&again.count()));
    }
}
