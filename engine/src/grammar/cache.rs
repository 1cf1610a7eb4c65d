//! Grammars that were compiled lately, by what was asked. Bounded: the one used longest ago goes.

use std::collections::HashMap;

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
        if self.kept.len() >= N_KEPT
            && let Some(oldest) =
                self.kept.iter().min_by_key(|(_, (_, last_use))| *last_use).map(|(key, _)| key.clone())
        {
            self.kept.remove(&oldest);
        }
        self.n_uses += 1;
        self.kept.insert(key, (constraint, self.n_uses));
    }
}
