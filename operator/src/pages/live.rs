//! Pages that stay true while they are open: what changed since it was last sent, every two seconds, and nothing when nothing did.
//! Bounded: what does not fit the bytes of one look comes with the next.

use std::{
    collections::{HashMap, VecDeque, hash_map::DefaultHasher},
    convert::Infallible,
    hash::{Hash, Hasher},
    time::Duration,
};

use axum::response::sse::Event;
use futures::Stream;
use stoker_pages::{
    deployment::{self, DeploymentQuery},
    fleet::{self, FleetQuery},
    live::{Fragment, build},
};
use tokio::{
    sync::OwnedSemaphorePermit,
    time::{Interval, MissedTickBehavior, interval},
};

use super::board::Board;
use crate::lease::Leadership;

/// Between two looks: agents are read as often.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// Of one look: 20 KB a second.
const BYTES_A_LOOK: usize = 40_000;

/// Which page is open.
pub(super) enum Target {
    Fleet(FleetQuery),
    Deployment { key: (String, String), query: DeploymentQuery },
}

/// An open page.
pub(super) struct Live {
    board: Board,
    leadership: Leadership,
    target: Target,
    sent: Sent,
    /// Rows that the page has; none before the first look.
    n_rows: Option<usize>,
    queue: VecDeque<Event>,
    looks: Interval,
    _place: OwnedSemaphorePermit,
}

/// What a page has, by a hash of each part.
#[derive(Debug, Default)]
struct Sent {
    hashes: HashMap<String, u64>,
    /// The part that did not fit any more.
    next: usize,
}

impl Live {
    pub(super) fn new(board: Board, leadership: Leadership, target: Target, place: OwnedSemaphorePermit) -> Self {
        let mut looks = interval(LOOK_EVERY);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let queue = VecDeque::from([Event::default().event("build").data(build())]);
        Self { board, leadership, target, sent: Sent::default(), n_rows: None, queue, looks, _place: place }
    }

    /// Messages until the page is closed or another operator leads.
    pub(super) fn messages(self) -> impl Stream<Item = Result<Event, Infallible>> + Send {
        futures::stream::unfold(self, |mut live| async move {
            loop {
                if let Some(event) = live.queue.pop_front() {
                    return Some((Ok(event), live));
                }
                live.looks.tick().await;
                if !live.leadership.holds() {
                    return None;
                }
                live.look();
            }
        })
    }

    fn look(&mut self) {
        let parts = match &self.target {
            Target::Fleet(query) => {
                let Some(look) = self.board.look() else { return };
                let (parts, n_rows) = fleet::fragments(&look.fleet, query, self.n_rows);
                if self.n_rows.replace(n_rows) != Some(n_rows) {
                    // The table goes out as a whole; its rows count as sent with it.
                    let (rows, _) = fleet::fragments(&look.fleet, query, Some(n_rows));
                    self.sent.note(&rows);
                    self.sent.forget("facts");
                }
                parts
            }
            Target::Deployment { key, query } => match self.board.deployment(key, query) {
                None => return,
                Some(None) => vec![deployment::gone()],
                Some(Some(view)) => deployment::parts(&view, query),
            },
        };
        let news = self.sent.news(parts);
        self.queue.extend(news.iter().map(|part| Event::default().data(part.message())));
    }
}

impl Sent {
    /// Parts that are not as they were sent, as many as fit; they count as sent.
    fn news(&mut self, mut parts: Vec<Fragment>) -> Vec<Fragment> {
        let n_parts = parts.len();
        let first = self.next.min(n_parts.saturating_sub(1));
        parts.rotate_left(if n_parts == 0 { 0 } else { first });
        let (mut bytes, mut news) = (0, Vec::new());
        self.next = 0;
        for (idx, part) in parts.into_iter().enumerate() {
            let hash = hash(&part.html);
            if self.hashes.get(&part.id) == Some(&hash) {
                continue;
            }
            if bytes > 0 && bytes + part.html.len() > BYTES_A_LOOK {
                self.next = (first + idx) % n_parts;
                break;
            }
            bytes += part.html.len();
            self.hashes.insert(part.id.clone(), hash);
            news.push(part);
        }
        news
    }

    fn note(&mut self, parts: &[Fragment]) {
        self.hashes.extend(parts.iter().map(|part| (part.id.clone(), hash(&part.html))));
    }

    fn forget(&mut self, id: &str) {
        self.hashes.remove(id);
    }
}

fn hash(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(sizes: &[usize], letter: &str) -> Vec<Fragment> {
        let part = |(idx, size): (usize, &usize)| Fragment { id: idx.to_string(), html: letter.repeat(*size) };
        sizes.iter().enumerate().map(part).collect()
    }

    fn ids(news: &[Fragment]) -> Vec<&str> {
        news.iter().map(|part| part.id.as_str()).collect()
    }

    #[test]
    fn what_did_not_change_is_not_sent_again() {
        let mut sent = Sent::default();
        assert_eq!(ids(&sent.news(parts(&[10, 10], "a"))), ["0", "1"]);
        assert!(sent.news(parts(&[10, 10], "a")).is_empty());
        assert_eq!(ids(&sent.news(parts(&[10, 11], "a"))), ["1"]);
    }

    #[test]
    fn what_does_not_fit_comes_next_and_nothing_is_left_out() {
        let mut sent = Sent::default();
        let sizes = [BYTES_A_LOOK / 2 + 1; 3];
        let looks: Vec<Vec<String>> = ["a", "b", "c", "d", "d", "d", "d"]
            .iter()
            .map(|letter| ids(&sent.news(parts(&sizes, letter))).into_iter().map(str::to_owned).collect())
            .collect();
        assert_eq!(looks[..3], [["0"], ["1"], ["2"]], "{looks:?}");
        assert!(looks[6].is_empty() && sent.news(parts(&sizes, "d")).is_empty(), "all is true in the end: {looks:?}");
    }

    #[test]
    fn a_part_that_is_larger_than_a_look_is_sent_alone() {
        let mut sent = Sent::default();
        assert_eq!(ids(&sent.news(parts(&[BYTES_A_LOOK * 2, 1], "a"))), ["0"]);
        assert_eq!(ids(&sent.news(parts(&[BYTES_A_LOOK * 2, 1], "a"))), ["1"]);
    }
}
