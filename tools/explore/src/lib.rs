//! Every state that a small deployment can reach, whatever fails meanwhile, and what must hold in each of them.
//!
//! The decisions are the operator's own (`plan_rollout`, `lint::check`, the judge of readings); everything around them is a
//! model: the API server with its versions, kubelets, agents, clients, users, time and faults. Where Anvil (OSDI '24) proves
//! that what is wanted is *eventually always* so, this looks: at every state of a bounded world, by brute force.

pub mod explore;
pub mod moves;
pub mod pod;
pub mod promises;
pub mod rollouts;
pub mod round;
pub mod view;
pub mod world;
