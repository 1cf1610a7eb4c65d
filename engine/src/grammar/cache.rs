//! Grammars that were compiled lately, by what was asked. Bounded: the one used longest ago goes.

use std::{collections::HashMap, sync::Arc};

use crate::constraint::Constraint;

/// Grammars kept. An application has a few, each up to some megabytes of learnt lexemes.
const N_KEPT: usize = 64;

#[derive(Debug, Default)]
pub(super) struct Cache {
    kept: HashMap<String, (Constraint, u64)>,
    n_uses: u64,
}

impl Cache {
    pub(super) fn get(&mut self, key: &str) -> Option<Constraint> {
        self.n_uses += 1;
        let (constraint, last_use) = self.kept.get_mut(key)?;
        *last_use = self.n_uses;
        Some(constraint.clone())
    }

    pub(super) fn insert(&mut self, key: String, constraint: Constraint) {
        if self.kept.len() >= N_KEPT {
            self.take_oldest(|_| true);
        }
        self.n_uses += 1;
        self.kept.insert(key, (constraint, self.n_uses));
    }

    /// The one used longest ago of those that no request has.
    pub(super) fn take_unused(&mut self) -> Option<Constraint> {
        self.take_oldest(|constraint| Arc::strong_count(&constraint.0) == 1)
    }

    fn take_oldest(&mut self, is_meant: impl Fn(&Constraint) -> bool) -> Option<Constraint> {
        let meant = self.kept.iter().filter(|(_, (constraint, _))| is_meant(constraint));
        let oldest = meant.min_by_key(|(_, (_, last_use))| *last_use).map(|(key, _)| key.clone())?;
        self.kept.remove(&oldest).map(|(constraint, _)| constraint)
    }
}
