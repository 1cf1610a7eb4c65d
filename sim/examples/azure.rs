use stoker_scaling::*;
use stoker_sim::{compare::run_ours, *};
use stoker_workload::{Trace, TRACE_NAMES};
fn main() {
    for (name, copies) in [("code", 1), ("conv", 1), ("code", 4), ("conv", 4)] {
        let text = std::fs::read_to_string(format!("azure_{name}.csv")).unwrap();
        let trace = Trace::read(name, &text).unwrap().trace;
        for seed in 1..=3u64 {
            let t = if copies > 1 { trace.copied(copies, seed) } else { trace.clone() };
            let world = World::of(t, ReplicaModel::default()).unwrap();
            let setting = Setting { min: 1, max: 40, seed, promise: Promise::default() };
            let (o, _) = run_ours(&world, &ScalingSpec::between(1, 40), &setting);
            println!("{name} x{copies} seed {seed}: late {} of {} ({:.2} %) hours {:.2} reversals {:.1} pre {}", o.misses, o.requests, 100.0 * o.misses as f64 / o.requests as f64, o.gpu_hours(), o.reversals_per_hour(), o.preemptions);
        }
    }
    for seed in 1..=2u64 {
        let (mut late, mut hours) = (0, 0.0);
        for name in TRACE_NAMES {
            let world = named_world(name, seed).unwrap();
            let setting = Setting { min: 1, max: 32, seed, promise: Promise::default() };
            let (o, _) = run_ours(&world, &ScalingSpec::between(1, 32), &setting);
            late += o.misses; hours += o.gpu_hours();
            println!("{name} seed {seed}: late {} of {} hours {:.2} reversals {:.1} pre {}", o.misses, o.requests, o.gpu_hours(), o.reversals_per_hour(), o.preemptions);
        }
        println!("sum late {late} hours {hours:.1}");
    }
}
