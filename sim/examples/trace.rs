use stoker_scaling::*;
use stoker_sim::{compare::run_ours, lottery::drawn};
fn main() {
    let seed: u64 = std::env::args().nth(1).unwrap().parse().unwrap();
    let every: usize = std::env::args().nth(2).map_or(30, |e| e.parse().unwrap());
    let d = drawn(seed, 0);
    println!("need {} max {} start {} itl promise {:?} replica {:?}", d.need, d.setting.max, d.world.replica.start_seconds, d.setting.promise, d.world.replica);
    let spec = ScalingSpec::between(d.setting.min, d.setting.max);
    let (o, recs) = run_ours(&d.world, &spec, &d.setting);
    println!("late {} of {} hours {}", o.misses, o.requests, o.gpu_hours());
    for (i, r) in recs.iter().enumerate() {
        if i % every == 0 || r.decision.desired != r.decision.previous {
            let s = &r.signals;
            let t = WorkTerm::of(s, &spec, r.decision.demand.mood);
            let terms: Vec<String> = r.decision.demand.terms.iter().map(|t| format!("{:?} {:.2}", t.cause, t.replicas)).collect();
            println!("{:5} {}->{} serving {} {:?} {:?} run {:.0} wait {:.0} kv {:.2} rate {:.2}/{:.2}/{:.2} disp {:.1} growth {:.5} [{}]", (r.at_ms - 1000000) / 1000, r.decision.previous, r.decision.desired, s.coverage.serving, r.decision.demand.mood, r.decision.bound, s.stable.running, s.panic.waiting, s.stable.referenced / (s.stable.serving * s.blocks_per_replica), s.arrivals.panic_rate, s.arrivals.stable_rate, s.arrivals.long_rate, s.dispersion, s.arrivals.growth_per_second, terms.join(", "));
            if let Some(t) = t { println!("      rate {:.2}+{:.2} req {:.3}s usable {:.2} work {:.2} mean {:.2} busy {:.2} hold {:.2} spare {:.2} itl {:.3} var {:.2} backlog {:.1}", t.rate, t.waiting_rate, t.request_seconds, t.usable, t.work(), t.mean_replicas(), t.busy_replicas(), t.holding_replicas(), t.spare, t.itl_seconds, t.variance, t.backlog_seconds); }
        }
    }
}
