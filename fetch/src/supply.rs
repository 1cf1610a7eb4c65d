//! Who is asked for the next bytes: the source, or a replica that has the model. Pure: rates and what was tried are arguments.
//!
//! Replicas come first, as they are near and cost the source nothing. The source is measured beside them on one connection, and takes
//! part if it is worth it. Whoever is much slower than another is left; what it brought until then stays.

use std::time::Duration;

/// Files of one replica at the same time: it has others to serve.
pub const GIVER_STREAMS: usize = 4;
/// Who brings less than this part of what the best brings over a connection is not asked.
const SLOWER: f64 = 4.0;
/// Bytes of replicas after which the source is measured beside them: most of a large model is still to come, a small one is here.
const EXPLORED_BYTES: u64 = 256 << 20;
/// Or so long after the first of them was asked: they may be slow.
const EXPLORED_AFTER: Duration = Duration::from_secs(10);

/// One that has the bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Supplier {
    /// Requests under way.
    pub streams: usize,
    /// Bytes a second over one of them, once that was measured.
    pub rate: Option<f64>,
}

/// What is known when somebody is chosen.
#[derive(Clone, Debug, Default)]
pub struct Scene {
    /// The source. It has everything, and where nobody else can be asked it is.
    pub source: Supplier,
    /// It failed a moment ago.
    pub source_rests: bool,
    /// Replicas that can be asked now; `None` in the place of others.
    pub givers: Vec<Option<Supplier>>,
    /// Bytes that replicas brought.
    pub given: u64,
    /// Since when they are asked.
    pub asked_for: Duration,
}

/// Who is asked.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Choice {
    /// The source.
    Source,
    /// The replica in this place.
    Giver(usize),
    /// Nobody now: those worth asking have enough to do.
    Wait,
}

impl Scene {
    /// Who is asked next.
    pub fn choose(&self) -> Choice {
        let here = || self.givers.iter().enumerate().filter_map(|(place, giver)| Some((place, (*giver)?)));
        let source = (!self.source_rests).then_some(self.source);
        let best = here().map(|(_, giver)| giver).chain(source).filter_map(|of| of.rate).fold(0.0, f64::max);
        let is_worth = |of: Supplier| of.rate.is_none_or(|rate| rate * SLOWER >= best);
        if !here().any(|(_, giver)| is_worth(giver)) {
            return Choice::Source;
        }
        // Who was never measured is tried first, of equals who has least to do.
        let by_promise = |(_, giver): &(usize, Supplier)| (giver.rate.unwrap_or(f64::MAX), giver.streams);
        let free = here().filter(|(_, giver)| is_worth(*giver) && giver.streams < GIVER_STREAMS);
        let giver = free.max_by(|one, other| {
            let ((rate, streams), (other_rate, others)) = (by_promise(one), by_promise(other));
            rate.total_cmp(&other_rate).then(others.cmp(&streams))
        });
        let source = source.and_then(|source| match source.rate {
            Some(rate) => is_worth(source).then_some(rate),
            None => self.explores().then_some(f64::MAX),
        });
        match (giver, source) {
            (Some((place, giver)), Some(rate)) if giver.rate.is_none_or(|of_giver| of_giver >= rate) => {
                Choice::Giver(place)
            }
            (_, Some(_)) => Choice::Source,
            (Some((place, _)), None) => Choice::Giver(place),
            (None, None) => Choice::Wait,
        }
    }

    /// Whether a stream of this rate is to be left, as another one is free and so much faster, or nobody else would measure the source.
    /// `own` is whose it is.
    pub fn outdoes(&self, rate: f64, own: Choice) -> bool {
        if own != Choice::Source && self.explores() {
            return true;
        }
        let is_free = |giver: &Supplier| giver.streams < GIVER_STREAMS;
        let givers = self.givers.iter().enumerate().filter(|(place, _)| own != Choice::Giver(*place));
        let givers = givers.filter_map(|(_, giver)| giver.filter(is_free));
        let source = (own != Choice::Source && !self.source_rests).then_some(self.source);
        givers.chain(source).filter_map(|other| other.rate).any(|other| other > rate * SLOWER)
    }

    /// Whether the source is to be measured, and nobody does.
    fn explores(&self) -> bool {
        let is_due = self.given >= EXPLORED_BYTES || self.asked_for >= EXPLORED_AFTER;
        is_due && !self.source_rests && self.source.rate.is_none() && self.source.streams == 0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(streams: usize, rate: impl Into<Option<f64>>) -> Supplier {
        Supplier { streams, rate: rate.into() }
    }

    fn scene(source: Supplier, givers: &[Supplier]) -> Scene {
        let givers = givers.iter().copied().map(Some).collect();
        Scene { source, givers, ..Scene::default() }
    }

    fn explored(scene: Scene) -> Scene {
        Scene { asked_for: EXPLORED_AFTER, ..scene }
    }

    #[test]
    fn without_a_replica_the_source_is_asked() {
        assert_eq!(Scene::default().choose(), Choice::Source);
        assert_eq!(Scene { givers: vec![None, None], ..Scene::default() }.choose(), Choice::Source);
    }

    #[test]
    fn replicas_come_first_each_with_few_streams() {
        let choice = |givers: &[Supplier]| scene(of(0, None), givers).choose();
        assert_eq!(choice(&[of(0, None), of(0, None)]), Choice::Giver(1));
        assert_eq!(choice(&[of(0, None), of(1, None)]), Choice::Giver(0));
        assert_eq!(choice(&[of(GIVER_STREAMS, None)]), Choice::Wait);
        assert_eq!(choice(&[of(0, 50.0), of(0, 100.0)]), Choice::Giver(1));
        assert_eq!(choice(&[of(0, 50.0), of(GIVER_STREAMS, 100.0)]), Choice::Giver(0));
        assert_eq!(choice(&[of(0, 50.0), of(3, None)]), Choice::Giver(1), "who was never measured is");
        assert_eq!(
            choice(&[of(0, 20.0), of(GIVER_STREAMS, 100.0)]),
            Choice::Wait,
            "that one would only hold up the end"
        );
    }

    #[test]
    fn the_source_is_measured_on_one_connection_and_takes_part_if_it_is_worth_it() {
        let fast = of(0, 100.0);
        let busy = of(GIVER_STREAMS, 100.0);
        assert_eq!(scene(of(0, None), &[busy]).choose(), Choice::Wait);
        assert_eq!(explored(scene(of(0, None), &[fast])).choose(), Choice::Source);
        assert_eq!(Scene { given: EXPLORED_BYTES, ..scene(of(0, None), &[fast]) }.choose(), Choice::Source);
        assert_eq!(explored(scene(of(1, None), &[fast])).choose(), Choice::Giver(0));
        assert_eq!(explored(scene(of(1, None), &[busy])).choose(), Choice::Wait);
        assert_eq!(scene(of(3, 30.0), &[fast]).choose(), Choice::Giver(0));
        assert_eq!(scene(of(3, 30.0), &[busy]).choose(), Choice::Source);
        assert_eq!(scene(of(3, 20.0), &[busy]).choose(), Choice::Wait);
        assert_eq!(scene(of(3, 200.0), &[fast]).choose(), Choice::Source);
        assert_eq!(scene(of(3, 500.0), &[fast]).choose(), Choice::Source);
    }

    #[test]
    fn a_source_that_failed_is_left_alone_for_a_while_if_somebody_else_has_it() {
        let rests = |source, givers: &[Supplier]| Scene { source_rests: true, ..explored(scene(source, givers)) };
        assert_eq!(rests(of(0, None), &[of(0, 1.0)]).choose(), Choice::Giver(0));
        assert_eq!(rests(of(0, 500.0), &[of(0, 1.0)]).choose(), Choice::Giver(0));
        assert_eq!(rests(of(0, 500.0), &[of(GIVER_STREAMS, 1.0)]).choose(), Choice::Wait);
        assert!(!rests(of(0, 500.0), &[of(1, 1.0)]).outdoes(1.0, Choice::Giver(0)));
        assert_eq!(rests(of(0, None), &[]).choose(), Choice::Source);
    }

    #[test]
    fn who_is_much_slower_than_one_who_is_free_is_left() {
        let scene = scene(of(8, 100.0), &[of(1, 20.0), of(GIVER_STREAMS, 900.0)]);
        assert!(scene.outdoes(20.0, Choice::Giver(0)), "the source has always room");
        assert!(!scene.outdoes(30.0, Choice::Giver(0)));
        assert!(!scene.outdoes(20.0, Choice::Source), "the fast one has enough to do");
        assert!(!Scene::default().outdoes(0.0, Choice::Source), "there is nobody else");
        let unmeasured = super::tests::scene(of(0, None), &[of(1, 20.0)]);
        assert!(!unmeasured.outdoes(20.0, Choice::Giver(0)));
        assert!(explored(unmeasured).outdoes(20.0, Choice::Giver(0)), "where there is one connection it measures both");
    }

    proptest! {
        /// A fetch never stands still: who waits, waits for a stream that is under way; who is chosen can be asked.
        #[test]
        fn somebody_is_asked_or_somebody_brings(
            source in (0..9_usize, prop::option::of(0.0..1e9)),
            givers in prop::collection::vec(prop::option::of((0..=GIVER_STREAMS, prop::option::of(0.0..1e9))), 0..5),
            given: u64,
            seconds in 0..20_u64,
            source_rests: bool,
        ) {
            let supplier = |(streams, rate)| Supplier { streams, rate };
            let givers: Vec<_> = givers.into_iter().map(|giver| giver.map(supplier)).collect();
            let asked_for = Duration::from_secs(seconds);
            let scene = Scene { source: supplier(source), source_rests, givers, given, asked_for };
            match scene.choose() {
                Choice::Source => {}
                Choice::Giver(place) => prop_assert!(scene.givers[place].is_some_and(|giver| giver.streams < GIVER_STREAMS)),
                Choice::Wait => prop_assert!(scene.givers.iter().flatten().any(|giver| giver.streams == GIVER_STREAMS)),
            }
        }

        /// Who was chosen by its rate is not left at that rate for one who was free: nobody goes to and fro.
        #[test]
        fn who_is_chosen_by_its_rate_is_not_left_at_once(rates in prop::collection::vec((0..GIVER_STREAMS, 1.0..1e9), 1..5), source in 1.0..1e9) {
            let givers = rates.iter().map(|(streams, rate)| Some(Supplier { streams: *streams, rate: Some(*rate) })).collect();
            let scene = Scene { source: Supplier { streams: 1, rate: Some(source) }, givers, ..Scene::default() };
            let choice = scene.choose();
            let rate = match choice {
                Choice::Source => source,
                Choice::Giver(place) => rates[place].1,
                Choice::Wait => return Err(TestCaseError::fail("all have room")),
            };
            prop_assert!(!scene.outdoes(rate, choice));
        }
    }
}
