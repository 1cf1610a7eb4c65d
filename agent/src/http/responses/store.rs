//! Responses that can be asked for again or followed: the newest ones, bounded in number and bytes. In this process only: they
//! are gone with the replica, and another replica does not know them. Knows no HTTP.

use std::collections::{HashMap, VecDeque};

use serde_json::Value;

use super::owner::Owner;

/// A response, and the conversation up to its end as JSON texts of chat messages.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Stored {
    /// Who asked for it.
    pub(crate) owner: Owner,
    /// As it was answered.
    pub(crate) response: Value,
    /// What a response that follows it begins with.
    pub(crate) messages: Vec<String>,
}

/// The newest responses by their ids.
#[derive(Debug)]
pub(crate) struct Store {
    max_responses: usize,
    max_bytes: usize,
    n_bytes: usize,
    by_id: HashMap<String, (usize, Stored)>,
    /// Ids, oldest first; those of deleted ones too, until they are the oldest.
    order: VecDeque<String>,
}

impl Store {
    /// An empty one.
    pub(crate) fn new(max_responses: usize, max_bytes: usize) -> Self {
        Self { max_responses, max_bytes, n_bytes: 0, by_id: HashMap::new(), order: VecDeque::new() }
    }

    /// Keeps a response, instead of what is kept by its id, if anything is; the oldest make room.
    pub(crate) fn put(&mut self, id: String, stored: Stored) {
        let n_bytes = stored.response.to_string().len() + stored.messages.iter().map(String::len).sum::<usize>();
        self.n_bytes += n_bytes;
        match self.by_id.insert(id.clone(), (n_bytes, stored)) {
            Some((n_before, _)) => self.n_bytes -= n_before,
            None => self.order.push_back(id),
        }
        while self.n_bytes > self.max_bytes || self.order.len() > self.max_responses {
            let Some(oldest) = self.order.pop_front() else { break };
            self.delete(&oldest);
        }
    }

    /// A response that is kept.
    pub(crate) fn get(&self, id: &str) -> Option<&Stored> {
        self.by_id.get(id).map(|(_, stored)| stored)
    }

    /// Forgets a response; whether there was one.
    pub(crate) fn delete(&mut self, id: &str) -> bool {
        let deleted = self.by_id.remove(id);
        self.n_bytes -= deleted.as_ref().map_or(0, |(n_bytes, _)| *n_bytes);
        deleted.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(text: &str) -> Stored {
        Stored { owner: Owner::default(), response: Value::Null, messages: vec![text.to_owned()] }
    }

    #[test]
    fn the_oldest_make_room_by_number_and_by_bytes() {
        let mut store = Store::new(3, 100);
        (0..5).for_each(|n| store.put(n.to_string(), stored("x")));
        let kept = |store: &Store| (0..7).filter(|n| store.get(&n.to_string()).is_some()).collect::<Vec<_>>();
        assert_eq!(kept(&store), [2, 3, 4]);
        store.put("5".into(), stored(&"x".repeat(90)));
        assert_eq!(kept(&store), [4, 5]);
        store.put("6".into(), stored(&"x".repeat(200)));
        assert_eq!((kept(&store), store.n_bytes), (vec![], 0));
    }

    #[test]
    fn a_response_takes_the_place_of_what_it_was_before() {
        let mut store = Store::new(2, 100);
        ["a", "b", "a"]
            .into_iter()
            .zip(["queued", "x", "done"])
            .for_each(|(id, text)| store.put(id.into(), stored(text)));
        assert_eq!((store.get("a"), store.n_bytes), (Some(&stored("done")), 2 * 4 + 4 + 1));
        store.put("c".into(), stored("x"));
        assert!(store.get("a").is_none() && store.get("b").is_some(), "it is as old as it was");
    }

    #[test]
    fn a_deleted_response_is_gone_once() {
        let mut store = Store::new(3, 100);
        store.put("a".into(), stored("x"));
        assert!(store.delete("a") && !store.delete("a") && store.get("a").is_none());
        assert_eq!(store.n_bytes, 0);
    }
}
