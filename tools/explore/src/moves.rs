//! Everything that can happen next: what the operator, kubelets, agents and clients do, what users change, what fails.

use std::fmt::{self, Display};

use crate::{
    pod::{Agent, Pod, Reading, Service, Stage},
    promises::Broken,
    round::Round,
    world::{Scope, World},
};

/// Something that happens. A number is the place of a pod.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Move {
    /// The operator decides.
    Decide,
    /// The operator makes the next write of its round.
    Write,
    /// The operator reads an agent and tells it what is written.
    Probe(usize),
    /// The scheduler finds a node, the kubelet starts the agent.
    Start(usize),
    /// The engine runs.
    Load(usize),
    /// The kubelet looks at an agent.
    Look(usize),
    /// A request is admitted.
    Arrive(usize),
    /// The last request ended.
    Finish(usize),
    /// An agent's window to withdraw is over, or it is empty.
    DrainOn(usize),
    /// A pod that was deleted is gone.
    Go(usize),
    /// The operator reaches an agent again.
    Unmute(usize),
    /// Time passes.
    Tick,
    /// The canary's gate passes.
    Pass,
    /// It does not, and its revision is given up.
    GiveUp,
    /// The user wants another revision.
    ChangeRevision,
    /// The user pauses changes, or goes on.
    Pause,
    /// The user wants another number of replicas.
    ChangeReplicas(u8),
    /// The operator ends in the middle of a round, and another one starts.
    Crash,
    /// A write is made, and its answer lost.
    LoseAnswer,
    /// An agent's process dies and starts again.
    Kill(usize),
    /// A pod fails for good.
    Fail(usize),
    /// The operator cannot reach an agent any more.
    Mute(usize),
    /// Somebody takes the operator's annotation away.
    Strip(usize),
    /// Somebody deletes a pod.
    Delete(usize),
}

/// Who makes a move.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Mover {
    /// What goes on by itself.
    World,
    /// Who changes what is wanted.
    User,
    /// Nobody wanted it.
    Fault,
}

impl Move {
    /// Who makes it.
    pub fn mover(self) -> Mover {
        match self {
            Self::ChangeRevision | Self::ChangeReplicas(_) | Self::Pause => Mover::User,
            Self::Crash
            | Self::LoseAnswer
            | Self::Kill(_)
            | Self::Fail(_)
            | Self::Mute(_)
            | Self::Strip(_)
            | Self::Delete(_) => Mover::Fault,
            _ => Mover::World,
        }
    }
}

impl Display for Move {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

/// Every move from here, and where it leads.
pub fn next(world: &World, scope: &Scope) -> Vec<(Move, Result<World, Broken>)> {
    let mut candidates = vec![Move::Decide, Move::Write, Move::Tick, Move::Pass, Move::GiveUp];
    if world.changes > 0 {
        candidates.push(Move::ChangeRevision);
        candidates.extend(scope.pauses.then_some(Move::Pause));
        candidates.extend((0..=scope.replicas).filter(|n| *n != world.replicas).map(Move::ChangeReplicas));
    }
    if world.faults > 0 {
        candidates.extend([Move::Crash, Move::LoseAnswer]);
    }
    let of_pod: [fn(usize) -> Move; 8] =
        [Move::Probe, Move::Start, Move::Load, Move::Look, Move::Arrive, Move::Finish, Move::DrainOn, Move::Go];
    let faults: [fn(usize) -> Move; 5] = [Move::Kill, Move::Fail, Move::Mute, Move::Strip, Move::Delete];
    for place in 0..world.pods.len() {
        candidates.extend(of_pod.iter().map(|of| of(place)));
        candidates.extend((!scope.mute_for_ever).then_some(Move::Unmute(place)));
        candidates.extend(faults.iter().filter(|_| world.faults > 0).map(|of| of(place)));
    }
    let moved = candidates.into_iter().filter_map(|made| Some((made, make(world, made, scope)?)));
    moved.filter(|(_, after)| after.as_ref() != Ok(world)).collect()
}

/// Where a move leads; `None` if it cannot be made.
fn make(world: &World, made: Move, scope: &Scope) -> Option<Result<World, Broken>> {
    let mut after = world.clone();
    match made.mover() {
        Mover::User => after.changes -= 1,
        Mover::Fault => {
            after.faults -= 1;
            after.round.iter_mut().for_each(|round| round.disturbed = true);
        }
        Mover::World => {}
    }
    let result = match made {
        Move::Decide if world.round.is_none() => Round::decide(world, scope).map(|round| after.round = round),
        Move::Write | Move::LoseAnswer if world.round.is_some() => after.write(),
        Move::Decide | Move::Write | Move::LoseAnswer => return None,
        Move::Tick => {
            after.tick();
            Ok(())
        }
        Move::Pass | Move::GiveUp => {
            let is_tried = |pod: &Pod| pod.revision == world.tried() && pod.serves();
            (world.trial && world.pods.iter().any(is_tried)).then_some(())?;
            after.trial = false;
            after.revision = if made == Move::Pass { world.tried() } else { world.revision };
            Ok(())
        }
        Move::ChangeRevision if scope.canaries => {
            after.trial = !after.trial;
            Ok(())
        }
        Move::ChangeRevision => {
            after.revision = world.tried();
            Ok(())
        }
        Move::Pause => {
            after.paused = !after.paused;
            Ok(())
        }
        Move::ChangeReplicas(replicas) => {
            after.replicas = replicas;
            Ok(())
        }
        Move::Crash => {
            after.crash();
            Ok(())
        }
        Move::Go(place) => {
            let pod = &world.pods[place];
            (pod.stage == Stage::Leaving && !pod.holds_streams()).then_some(())?;
            after.remove(place);
            Ok(())
        }
        Move::Start(place) => {
            world.has_room(scope).then_some(())?;
            after.step(place, made).then_some(())?;
            Ok(())
        }
        Move::Delete(place) => {
            (world.pods[place].stage != Stage::Leaving).then_some(())?;
            after.delete_pod(place);
            Ok(())
        }
        of_pod => {
            after.step(place_of(of_pod)?, of_pod).then_some(())?;
            Ok(())
        }
    };
    if made == Move::LoseAnswer {
        after.round = None;
    }
    Some(result.map(|()| after))
}

fn place_of(made: Move) -> Option<usize> {
    match made {
        Move::Probe(place)
        | Move::Load(place)
        | Move::Look(place)
        | Move::Arrive(place)
        | Move::Finish(place)
        | Move::DrainOn(place)
        | Move::Unmute(place)
        | Move::Kill(place)
        | Move::Fail(place)
        | Move::Mute(place)
        | Move::Strip(place) => Some(place),
        _ => None,
    }
}

impl World {
    fn tick(&mut self) {
        for place in 0..self.pods.len() {
            self.change(place, Pod::tick);
        }
        self.round.iter_mut().for_each(Round::tick);
    }

    /// Who leads next remembers nothing.
    fn crash(&mut self) {
        self.round = None;
        for pod in &mut self.pods {
            pod.reading = Reading::Unread;
            pod.renumber();
        }
    }

    /// What happens to one pod; false if it cannot.
    fn step(&mut self, place: usize, made: Move) -> bool {
        let mut can = true;
        self.change(place, |pod| can = pod.step(made));
        can
    }
}

impl Pod {
    fn step(&mut self, made: Move) -> bool {
        let leaving = self.stage == Stage::Leaving;
        match (made, &mut self.agent) {
            (Move::Start(_), None) if matches!(self.stage, Stage::Unscheduled { .. }) => {
                (self.stage, self.agent) = (Stage::Starting, Some(Agent::started()));
            }
            (Move::Load(_), Some(agent)) if !agent.loaded && !leaving => agent.loaded = true,
            (Move::Look(_), Some(_)) => self.look(),
            (Move::Probe(_), Some(_)) => self.probe(),
            (Move::Arrive(_), Some(agent)) if self.stage == Stage::Serving && agent.admits() => agent.streams = true,
            (Move::Finish(_), Some(agent)) if agent.streams => agent.streams = false,
            (Move::DrainOn(_), Some(agent)) if agent.service != Service::Serving => agent.drain_on(),
            (Move::Unmute(_), _) if self.muted => self.muted = false,
            (Move::Mute(_), Some(_)) if !self.muted && !leaving => self.muted = true,
            (Move::Strip(_), _) if self.intent.is_some() => self.intent = None,
            (Move::Kill(_), Some(agent)) if !leaving => {
                (*agent, self.stage) = (Agent::started(), Stage::Blocked);
            }
            (Move::Fail(_), Some(_)) if !leaving => {
                (self.stage, self.agent, self.muted) = (Stage::Finished { age: 0 }, None, false);
                self.reading = Reading::Unread;
            }
            _ => return false,
        }
        true
    }
}
