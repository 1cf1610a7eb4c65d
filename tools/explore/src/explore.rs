//! Every state, breadth first, and whether what is wanted is eventually always so.
//!
//! *Eventually always*, whenever faults and users rest: the settled states from which no move of the world leads away are
//! the core; from every state some moves of the world must lead there. Since the core is never left, a world in which every move that
//! stays possible is made at some time cannot stay outside.

use std::{
    collections::VecDeque,
    hash::{BuildHasherDefault, DefaultHasher, Hash, Hasher},
    time::{Duration, Instant},
};

use indexmap::IndexSet;
use rayon::prelude::*;

use crate::{
    moves::{Move, Mover, next},
    promises::{Broken, is_settled},
    world::{Scope, World},
};

/// Worlds whose moves are computed at a time, on all cores.
const BATCH: usize = 4096;

/// What was seen.
#[derive(Debug)]
pub struct Seen {
    /// States.
    pub states: usize,
    /// Moves between them.
    pub moves: usize,
    /// Settled states that the world does not leave by itself.
    pub core: usize,
    /// The longest shortest way from the start.
    pub depth: u32,
    /// How long it took.
    pub time: Duration,
    /// The first thing that is wrong.
    pub fault: Option<Finding>,
}

/// Something that is wrong, and the way there.
#[derive(Clone, Debug)]
pub struct Finding {
    /// What is wrong.
    pub what: String,
    /// The moves that lead there, each with the state behind it.
    pub way: Vec<(Move, World)>,
}

/// 64 bits of a state, in whose place they stand (Wolper and Leroy, "Reliable hashing without collision detection", 1993): of `n` states two
/// have the same ones by a chance of `n^2 / 2^65`, and then one of them is not looked at.
type Fingerprint = u64;

fn fingerprint(world: &World) -> Fingerprint {
    let mut hasher = DefaultHasher::new();
    world.hash(&mut hasher);
    hasher.finish()
}

/// What leads away from a state.
type Moves = Vec<(Move, Result<(Fingerprint, World), Broken>)>;

fn moves_of(world: &World, scope: &Scope) -> Moves {
    let moves = next(world, scope).into_iter();
    moves.map(|(made, after)| (made, after.map(|world| (fingerprint(&world), world)))).collect()
}

/// All states and the moves of the world between them.
struct Graph {
    scope: Scope,
    states: IndexSet<Fingerprint, BuildHasherDefault<DefaultHasher>>,
    /// From where each was reached first; the start from itself.
    origins: Vec<u32>,
    /// Those that were looked at, and whether they are settled.
    settled: Vec<bool>,
    /// Those that were not looked at yet, in their order.
    ahead: VecDeque<World>,
    moves: usize,
    /// Where moves lead that neither a user nor a fault makes, by the state they lead away from: `starts` has the first of each.
    own: Vec<u32>,
    starts: Vec<u32>,
    depth: u32,
}

/// Looks at every state within `scope`; `progress` hears of states seen and states left to look at.
pub fn explore(scope: &Scope, mut progress: impl FnMut(usize, usize)) -> Seen {
    let started = Instant::now();
    let mut graph = Graph::new(scope);
    let mut level_end = 1;
    let mut broken = None;
    while !graph.ahead.is_empty() && broken.is_none() {
        progress(graph.settled.len(), graph.ahead.len());
        if graph.settled.len() == level_end {
            (level_end, graph.depth) = (graph.states.len(), graph.depth + 1);
        }
        let in_level = BATCH.min(level_end - graph.settled.len());
        broken = graph.look(in_level).err();
    }
    let (core, stuck) = if broken.is_some() { (0, None) } else { graph.judge() };
    Seen {
        states: graph.states.len(),
        moves: graph.moves,
        core,
        depth: graph.depth,
        time: started.elapsed(),
        fault: broken.or_else(|| {
            let what = "what is wanted is never settled from here, although nothing fails any more".to_owned();
            Some(Finding { what, way: graph.way(stuck?) })
        }),
    }
}

impl Graph {
    fn new(scope: &Scope) -> Self {
        let start = World::new(scope);
        Self {
            scope: *scope,
            states: IndexSet::from_iter([fingerprint(&start)]),
            origins: vec![0],
            settled: Vec::new(),
            ahead: VecDeque::from([start]),
            moves: 0,
            own: Vec::new(),
            starts: vec![0],
            depth: 0,
        }
    }

    /// Looks at the next `count` states.
    fn look(&mut self, count: usize) -> Result<(), Finding> {
        let batch: Vec<World> = self.ahead.drain(..count).collect();
        let scope = self.scope;
        let moves: Vec<Moves> = batch.par_iter().map(|world| moves_of(world, &scope)).collect();
        for (world, moves) in batch.iter().zip(moves) {
            self.look_at(world, moves)?;
        }
        Ok(())
    }

    fn look_at(&mut self, world: &World, moves: Moves) -> Result<(), Finding> {
        let at = self.settled.len();
        self.settled.push(is_settled(world, &self.scope));
        for (made, after) in moves {
            let (fingerprint, after) = after.map_err(|broken| self.finding(at, made, &broken))?;
            let (place, new) = self.states.insert_full(fingerprint);
            if new {
                self.origins.push(at as u32);
                self.ahead.push_back(after);
            }
            self.moves += 1;
            if made.mover() == Mover::World {
                self.own.push(place as u32);
            }
        }
        self.starts.push(u32::try_from(self.own.len()).expect("fewer moves of the world than 2^32"));
        Ok(())
    }

    fn finding(&self, at: usize, made: Move, broken: &Broken) -> Finding {
        let mut way = self.way(at);
        let before = way.last().map_or_else(|| World::new(&self.scope), |(_, world)| world.clone());
        way.push((made, before));
        Finding { what: broken.to_string(), way }
    }

    /// The way to a state: only fingerprints are kept of those on it, so it is gone again.
    fn way(&self, to: usize) -> Vec<(Move, World)> {
        let mut places = vec![to];
        while let Some(&at) = places.last().filter(|at| **at != 0) {
            places.push(self.origins[at] as usize);
        }
        let mut world = World::new(&self.scope);
        let mut way = Vec::new();
        for place in places.into_iter().rev().skip(1) {
            let wanted = self.states[place];
            let moves = moves_of(&world, &self.scope).into_iter();
            let mut led = moves.filter_map(|(made, after)| Some((made, after.ok().filter(|(to, _)| *to == wanted)?.1)));
            let (made, after) = led.next().expect("it was reached by one of these");
            world = after.clone();
            way.push((made, after));
        }
        way
    }

    /// How many states are in the core, and the first from which it cannot be reached.
    fn judge(&self) -> (usize, Option<usize>) {
        let before = self.before();
        let mut core = self.settled.clone();
        let outside: Vec<u32> = (0..core.len() as u32).filter(|at| !core[*at as usize]).collect();
        // What can leave the core by itself was not in it.
        before.spread(outside, |at| std::mem::replace(&mut core[at], false));
        let mut reaches = core.clone();
        let inside: Vec<u32> = (0..core.len() as u32).filter(|at| core[*at as usize]).collect();
        before.spread(inside, |at| !std::mem::replace(&mut reaches[at], true));
        (core.iter().filter(|inside| **inside).count(), reaches.iter().position(|reaches| !reaches))
    }

    /// Who comes directly before each state.
    fn before(&self) -> Before {
        let mut starts = vec![0_u32; self.states.len() + 1];
        self.own.iter().for_each(|to| starts[*to as usize + 1] += 1);
        (1..starts.len()).for_each(|at| starts[at] += starts[at - 1]);
        let (mut free, mut from) = (starts.clone(), vec![0; self.own.len()]);
        for (at, bounds) in self.starts.windows(2).enumerate() {
            for to in &self.own[bounds[0] as usize..bounds[1] as usize] {
                from[free[*to as usize] as usize] = at as u32;
                free[*to as usize] += 1;
            }
        }
        Before { starts, from }
    }
}

/// States by the one behind them.
struct Before {
    starts: Vec<u32>,
    from: Vec<u32>,
}

impl Before {
    /// Goes back from `states` to whatever `enter` says is new.
    fn spread(&self, mut states: Vec<u32>, mut enter: impl FnMut(usize) -> bool) {
        while let Some(at) = states.pop() {
            let range = self.starts[at as usize] as usize..self.starts[at as usize + 1] as usize;
            states.extend(self.from[range].iter().filter(|before| enter(**before as usize)));
        }
    }
}
