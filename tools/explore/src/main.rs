//! Explores one scope after the other and says what was seen.

use std::process::ExitCode;

use clap::Parser;
use stoker_explore::{explore::explore, world::Scope};

/// Looks at every state that rollout, drain and scaling can reach, whatever fails meanwhile.
///
/// Without options: the scopes of docs/faults.md. With `--replicas`: that one.
#[derive(Debug, Parser)]
struct Args {
    /// Replicas wanted at most.
    #[arg(long)]
    replicas: Option<u8>,
    /// How often the user may change the number or the revision.
    #[arg(long, default_value_t = 1)]
    changes: u8,
    /// How many faults may happen.
    #[arg(long, default_value_t = 1)]
    faults: u8,
    /// Pods that nodes have room for; by default one more than replicas.
    #[arg(long)]
    room: Option<u8>,
    /// `rollout.maxUnavailable`.
    #[arg(long, default_value_t = 0)]
    max_unavailable: u8,
    /// `rollout.maxSurge`.
    #[arg(long, default_value_t = 1)]
    max_surge: u8,
    /// Agents that the operator cannot reach may never be reached again.
    #[arg(long)]
    mute_for_ever: bool,
    /// The user may pause changes, and go on.
    #[arg(long)]
    pauses: bool,
    /// A change is tried on one replica first, and its gate passes or fails.
    #[arg(long)]
    canaries: bool,
}

fn main() -> ExitCode {
    let Args { replicas, changes, faults, room, max_unavailable, max_surge, mute_for_ever, pauses, canaries } =
        Args::parse();
    let scopes = match replicas {
        Some(replicas) => {
            let room = room.unwrap_or(replicas + 1);
            vec![Scope { replicas, changes, faults, room, max_unavailable, max_surge, mute_for_ever, pauses, canaries }]
        }
        None => Scope::recorded(),
    };
    println!(
        "| Replicas | Changes | Faults | Room | May be missing | Too many | Mute for ever | Pauses | Canaries | States | Moves | Depth | Seconds | Found |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|");
    let found = scopes.iter().filter(|scope| finds(scope)).count();
    ExitCode::from(u8::from(found > 0))
}

/// Explores one scope and prints its row; true if something is wrong.
fn finds(scope: &Scope) -> bool {
    let seen = explore(scope, |seen, left| eprint!("\r{seen} states seen, {left} to go   "));
    eprint!("\r\x1b[K");
    let Scope { replicas, changes, faults, room, max_unavailable, max_surge, mute_for_ever, pauses, canaries } = scope;
    let found = seen.fault.as_ref().map_or("nothing", |finding| &finding.what);
    println!(
        "| {replicas} | {changes} | {faults} | {room} | {max_unavailable} | {max_surge} | {mute_for_ever} | {pauses} | {canaries} | {} | {} | {} | {:.1} | {found} |",
        seen.states,
        seen.moves,
        seen.depth,
        seen.time.as_secs_f64(),
    );
    if let Some(finding) = &seen.fault {
        for (made, world) in &finding.way {
            println!("{made}\n    wanted {} of r{}, round {:?}", world.replicas, world.revision, world.round);
            world.pods.iter().for_each(|pod| println!("    {pod:?}"));
        }
    }
    seen.fault.is_some()
}
