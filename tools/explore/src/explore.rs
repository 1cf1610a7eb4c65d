//! Every state, breadth first, and whether what is wanted is eventually always so.
//!
//! *Eventually always*, whenever faults and users rest: the settled states from which no move of the world leads away are
//! the core; from every state some moves of the world must lead there. Since the core is never left, a world in which every move that
//! stays possible is made at some time cannot stay outside.

use std::time::{Duration, Instant};

use indexmap::IndexSet;

use crate::{
    moves::{Move, Mover, next},
    promises::{Broken, is_settled},
    world::{Scope, World},
};

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

/// How a state was reached first.
#[derive(Clone, Copy)]
struct Origin {
    from: u32,
    made: Move,
    depth: u32,
}

/// All states and the moves of the world between them.
struct Graph {
    states: IndexSet<World>,
    origins: Vec<Option<Origin>>,
    moves: usize,
    /// `(from, to)` of moves that neither a user nor a fault makes.
    own: Vec<(u32, u32)>,
}

/// Looks at every state within `scope`; `progress` hears of states seen and states left to look at.
pub fn explore(scope: &Scope, mut progress: impl FnMut(usize, usize)) -> Seen {
    let started = Instant::now();
    let mut graph =
        Graph { states: IndexSet::from([World::new(scope)]), origins: vec![None], moves: 0, own: Vec::new() };
    let mut broken = None;
    let mut at = 0;
    while at < graph.states.len() && broken.is_none() {
        if at % 50_000 == 0 {
            progress(at, graph.states.len() - at);
        }
        broken = graph.look_at(at, scope).err();
        at += 1;
    }
    let (core, stuck) = if broken.is_some() { (0, None) } else { graph.judge(scope) };
    Seen {
        states: graph.states.len(),
        moves: graph.moves,
        core,
        depth: graph.origins.iter().flatten().map(|origin| origin.depth).max().unwrap_or(0),
        time: started.elapsed(),
        fault: broken.or_else(|| {
            let what = "what is wanted is never settled from here, although nothing fails any more".to_owned();
            Some(Finding { what, way: graph.way(stuck?) })
        }),
    }
}

impl Graph {
    fn look_at(&mut self, at: usize, scope: &Scope) -> Result<(), Finding> {
        let depth = self.origins[at].map_or(0, |origin| origin.depth) + 1;
        for (made, after) in next(&self.states[at], scope) {
            let after = after.map_err(|broken: Broken| self.finding(at, made, &broken))?;
            let (place, new) = self.states.insert_full(after);
            if new {
                self.origins.push(Some(Origin { from: at as u32, made, depth }));
            }
            self.moves += 1;
            if made.mover() == Mover::World {
                self.own.push((at as u32, place as u32));
            }
        }
        Ok(())
    }

    fn finding(&self, at: usize, made: Move, broken: &Broken) -> Finding {
        let mut way = self.way(at);
        way.push((made, self.states[at].clone()));
        Finding { what: broken.to_string(), way }
    }

    fn way(&self, to: usize) -> Vec<(Move, World)> {
        let mut way = Vec::new();
        let mut at = to;
        while let Some(origin) = self.origins[at] {
            way.push((origin.made, self.states[at].clone()));
            at = origin.from as usize;
        }
        way.reverse();
        way
    }

    /// How many states are in the core, and the first from which it cannot be reached.
    fn judge(&self, scope: &Scope) -> (usize, Option<usize>) {
        let before = self.before();
        let mut core: Vec<bool> = self.states.iter().map(|world| is_settled(world, scope)).collect();
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
        self.own.iter().for_each(|(_, to)| starts[*to as usize + 1] += 1);
        (1..starts.len()).for_each(|at| starts[at] += starts[at - 1]);
        let (mut free, mut from) = (starts.clone(), vec![0; self.own.len()]);
        for (before, to) in &self.own {
            from[free[*to as usize] as usize] = *before;
            free[*to as usize] += 1;
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
