use stoker_scaling::*;
use stoker_sim::{compare::run_ours, *};
use stoker_workload::Trace;
fn main() {
    let which = std::env::args().nth(1).unwrap();
    let (world, max) = if which.starts_with("code") {
        let text = std::fs::read_to_string("azure_code.csv").unwrap();
        let trace = Trace::read("code", &text).unwrap().trace;
        let t = if which == "code4" { trace.copied(4, 1) } else { trace };
        (World::of(t, ReplicaModel::default()).unwrap(), 40)
    } else { (named_world(&which, 1).unwrap(), 32) };
    let setting = Setting { min: 1, max, seed: 1, promise: Promise::default() };
    let spec = ScalingSpec::between(1, max);
    let (o, recs) = run_ours(&world, &spec, &setting);
    println!("initial {} start {}", world.initial, world.replica.start_seconds);
    for c in o.samples.chunks(std::env::args().nth(2).map_or(12, |n| n.parse().unwrap())) {
        let at = c[0].at;
        let late: u32 = c.iter().map(|s| s.misses).sum();
        let arr: u32 = c.iter().map(|s| s.arrivals).sum();
        let r = recs.iter().find(|r| (r.at_ms - 1_000_000) as f64 / 1000.0 >= at).unwrap();
        let t = WorkTerm::of(&r.signals, &spec, r.decision.demand.mood);
        let tt = t.map(|t| format!("rate {:.2} req {:.3} work {:.2} mean {:.2} busy {:.2} hold {:.2} spare {:.2} b {:.2} ", t.rate, t.request_seconds, t.work(), t.mean_replicas(), t.busy_replicas(), t.holding_replicas(), t.spare, t.backlog_seconds));
        println!("{at:6.0} arr {arr:5} late {late:4} desired {} serving {} kv {:.2} disp {:.1} wait {} {}", c[0].desired, c[0].serving, c[0].kv, r.signals.dispersion, c.iter().map(|s| s.waiting).max().unwrap(), tt.unwrap_or_default());
    }
}
