//! A round of the operator: what it decided, as the writes that are still to be made, one by one.

use stoker_crds::intent::Want;
use stoker_operator::{
    lint,
    plan::Plan,
    rollout::{PodRef, RolloutPlan, Why, plan_rollout},
};
use stoker_replica::Replica;

use crate::{
    pod::{AGE_MAX, Intent, Pod, Stage},
    promises::Broken,
    view,
    world::{Scope, World},
};

/// See the module.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Round {
    /// In the order in which they are made; the next one last.
    pub writes: Vec<Write>,
    /// Replicas that must serve after each of them, if nobody else changes anything.
    pub floor: u8,
    /// Revision of created pods.
    pub revision: u8,
    /// Ticks since it was decided.
    pub age: u8,
    /// Something failed since it was decided, so that fewer may serve than it counted on.
    pub disturbed: bool,
}

/// One write.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Write {
    /// Revision of its pod.
    pub revision: u8,
    /// Number of its pod.
    pub ordinal: u8,
    /// What is written.
    pub what: What,
    /// The pod has the version that it was decided on.
    pub current: bool,
}

/// What is written.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum What {
    /// A new pod.
    Create,
    /// What a pod should do.
    Intend {
        /// Its number.
        number: u8,
        /// Drain, or serve.
        drain: bool,
    },
    /// A pod goes.
    Delete(Why),
}

/// How a write went.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Outcome {
    Done,
    /// The pod is gone or another: nothing is written, the round goes on.
    Skipped,
    /// The round is tried again.
    Refused,
}

impl Round {
    /// What the operator would write now; `None` if nothing.
    pub fn decide(world: &World, scope: &Scope) -> Result<Option<Self>, Broken> {
        let (wanted, replicas) = (view::wanted(world, scope), view::replicas(world, scope));
        let pods = plan_rollout(&wanted, &replicas, view::now());
        let plan = Plan { pods, revision: wanted.revision.clone(), ..Plan::default() };
        let violations = lint::check(&plan, &wanted, &replicas, view::now());
        if let Some(violation) = violations.into_iter().next() {
            return Err(Broken::Lint(violation.to_string()));
        }
        let serving = world.serving();
        let floor = serving.min(wanted.replicas.saturating_sub(wanted.replacing.max_unavailable)) as u8;
        let writes = writes(&plan.pods, world, &replicas);
        let round = Self { writes, floor, revision: world.revision, age: 0, disturbed: false };
        Ok((!round.writes.is_empty()).then_some(round))
    }

    /// A pod changed: what was decided on its version fails.
    pub fn outdate(&mut self, (revision, ordinal): (u8, u8)) {
        let of_pod = |write: &&mut Write| (write.revision, write.ordinal) == (revision, ordinal);
        self.writes.iter_mut().filter(of_pod).for_each(|write| write.current = false);
    }

    /// A tick passes.
    pub fn tick(&mut self) {
        self.age = (self.age + 1).min(AGE_MAX);
    }
}

/// In the order of `Apply::run`, turned round.
fn writes(plan: &RolloutPlan, world: &World, replicas: &[Replica]) -> Vec<Write> {
    let RolloutPlan { create, create_canary, drain, undrain, reassert, delete, .. } = plan;
    let to = |pod: &PodRef, what| {
        let (revision, ordinal) = view::place_of(&pod.name);
        Write { revision, ordinal, what, current: true }
    };
    let intend = |pod: &PodRef, drain| to(pod, What::Intend { number: pod.next_number as u8, drain });
    let again = |pod: &PodRef| {
        let written = replicas.iter().find(|replica| replica.pod.uid == pod.uid).expect("plans name what is there");
        intend(pod, written.want() != Want::Serve)
    };
    let new = |revision, ordinal| Write { revision, ordinal: ordinal as u8, what: What::Create, current: true };
    let create = create.iter().map(|ordinal| new(world.revision, *ordinal));
    let create_canary = create_canary.iter().map(|ordinal| new(world.tried(), *ordinal));
    let undrain = undrain.iter().map(|pod| intend(pod, false));
    let delete = delete.iter().map(|deletion| to(&deletion.pod, What::Delete(deletion.why)));
    let drain = drain.iter().map(|pod| intend(pod, true));
    let mut writes: Vec<Write> = undrain
        .chain(delete)
        .chain(create)
        .chain(create_canary)
        .chain(drain)
        .chain(reassert.iter().map(again))
        .collect();
    writes.reverse();
    writes
}

impl World {
    /// Makes the next write. `Err`: it broke a promise.
    pub fn write(&mut self) -> Result<(), Broken> {
        let Some(mut round) = self.round.take() else { return Ok(()) };
        let Some(write) = round.writes.pop() else { return Ok(()) };
        let serving = self.serving();
        let going_on = !round.writes.is_empty();
        let (floor, age, disturbed) = (round.floor, round.age, round.disturbed);
        self.round = going_on.then_some(round);
        let outcome = self.carry_out(write, age)?;
        if outcome == Outcome::Refused {
            self.round = None;
        }
        let after = self.serving();
        if !disturbed && after < serving && after < usize::from(floor) {
            return Err(Broken::ServesTooFew { after, floor: floor.into() });
        }
        Ok(())
    }

    fn carry_out(&mut self, write: Write, age: u8) -> Result<Outcome, Broken> {
        let found = self.find(write.revision, write.ordinal);
        match (write.what, found) {
            (What::Create, Some(_)) => Ok(Outcome::Refused),
            (What::Create, None) => {
                self.add(Pod::new(write.revision, write.ordinal));
                Ok(Outcome::Done)
            }
            (What::Intend { .. } | What::Delete(_), None) => Ok(Outcome::Skipped),
            (What::Intend { .. }, Some(_)) if !write.current => Ok(Outcome::Refused),
            (What::Delete(_), Some(_)) if !write.current => Ok(Outcome::Skipped),
            (What::Intend { number, drain }, Some(place)) => {
                self.change(place, |pod| pod.intent = Some(Intent { number, drain, age }));
                Ok(Outcome::Done)
            }
            (What::Delete(why), Some(place)) => self.delete(place, why).map(|()| Outcome::Done),
        }
    }

    fn delete(&mut self, place: usize, why: Why) -> Result<(), Broken> {
        let pod = self.pods[place];
        Broken::by_deleting(&pod, why).map_or(Ok(()), Err)?;
        self.delete_pod(place);
        Ok(())
    }

    /// A pod is deleted, by whomever.
    pub fn delete_pod(&mut self, place: usize) {
        let gone = matches!(self.pods[place].stage, Stage::Unscheduled { .. } | Stage::Finished { .. });
        if gone {
            self.remove(place);
        } else {
            self.change(place, Pod::delete);
        }
    }
}
