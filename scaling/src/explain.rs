//! A record in a person's words: who could be believed, each term with its numbers, and the bound that held.
//!
//! Owns the words. Everything it says is in the record or follows from it by the functions that decided.

use std::fmt::Write as _;

use stoker_replica::NotFresh;

use crate::{
    decide::{Bound, ScaleDecision, Wanted},
    demand::{ArrivalTerm, Cause, Regime, Term, preemptions_per_minute, referenced},
    held::Holders,
    record::DecisionRecord,
    rhythm::Foreseen,
    signals::{Coverage, Signals, Untold},
    standby::Standby,
    work::WorkTerm,
};

/// Several lines; the first is the answer, the last the counterfactual.
pub fn explain(record: &DecisionRecord) -> String {
    let mut text = headline(record);
    line(&mut text, "readings", &coverage(&record.signals.coverage));
    let warm = within_a_warm_start(record);
    for term in &record.decision.demand.terms {
        let marker = if Some(term.cause) == record.decision.cause { "*" } else { " " };
        let words = term_words(record, warm.as_ref(), *term);
        let _ = writeln!(text, "{marker} {:<11} {:>7.2}  {words}", name(term.cause), term.replicas);
    }
    if let Some(words) = record.signals.standby.map(|standby| start_words(record, warm.as_ref(), standby)) {
        line(&mut text, "start", &words);
    }
    line(&mut text, "wanted", &wanted(record));
    if let Some(words) = zero(record) {
        line(&mut text, "zero", &words);
    }
    line(&mut text, "bound", bound(record).as_str());
    text
}

fn line(text: &mut String, label: &str, words: &str) {
    let _ = writeln!(text, "  {label:<11} {words}");
}

fn headline(record: &DecisionRecord) -> String {
    let decision = &record.decision;
    let change = match decision.desired.cmp(&decision.previous) {
        std::cmp::Ordering::Equal => format!("stays at {}", count(decision.desired)),
        _ => format!("{} -> {}", decision.previous, count(decision.desired)),
    };
    let cause = decision.cause.map_or("nothing known", name);
    format!("{change}: pressure {:.2} from {cause}, bound by {}\n", decision.pressure, bound_name(decision.bound))
}

fn count(replicas: u32) -> String {
    if replicas == 1 { "1 replica".to_owned() } else { format!("{replicas} replicas") }
}

/// How many of the serving replicas could be believed.
pub fn fresh_words(fresh: u32, serving: u32) -> String {
    format!("{fresh} of {serving} serving {} fresh", if serving == 1 { "replica" } else { "replicas" })
}

/// Who does not say what its steps cost, and what follows.
pub fn untold_words(untold: &Untold, serving: u32) -> String {
    let Untold { replicas, example } = untold;
    let who = if *replicas == 1 { "does not say what its" } else { "do not say what their" };
    let one = if *replicas == 1 { "an older agent" } else { "older agents, one of them" };
    let of = count(serving);
    format!("{replicas} of {of} {who} steps cost ({one}: {example}): replicas are reckoned from totals")
}

fn coverage(coverage: &Coverage) -> String {
    let Coverage { serving, fresh, starting, draining, broken, not_fresh, untold, window_seconds } = coverage;
    let broken = if *broken > 0 { format!(", {broken} crashed and given up") } else { String::new() };
    let mut words = format!(
        "{}, {starting} starting, {draining} draining{broken}, {window_seconds:.0} s of history",
        fresh_words(*fresh, *serving)
    );
    if let Some(untold) = untold {
        let _ = write!(words, "; {}", untold_words(untold, *serving));
    }
    for (replica, why) in not_fresh {
        let _ = write!(words, "; {replica}: {}", not_fresh_words(*why));
    }
    words
}

fn not_fresh_words(why: NotFresh) -> String {
    match why {
        NotFresh::Missing => "never answered".to_owned(),
        NotFresh::Stale { age_ms } => format!("silent for {:.0} s", age_ms as f64 / 1000.0),
        NotFresh::Absurd { why } => why.words().to_owned(),
    }
}

/// The record as if all replicas started warm; `None` where the next one does not.
fn within_a_warm_start(record: &DecisionRecord) -> Option<DecisionRecord> {
    let DecisionRecord { spec, after, decision, at_ms, .. } = record;
    let signals = record.signals.warm()?;
    let Wanted { demand, .. } = Wanted::within_a_start(spec, &signals, after, decision.demand.regime, *at_ms);
    Some(DecisionRecord { signals, decision: ScaleDecision { demand, ..decision.clone() }, ..record.clone() })
}

/// True if a term wants what it wants within a warm start.
fn is_of(warm: &DecisionRecord, term: Term) -> bool {
    warm.decision.demand.replicas_of(term.cause).to_bits() == term.replicas.to_bits()
}

fn term_words(record: &DecisionRecord, warm: Option<&DecisionRecord>, term: Term) -> String {
    match warm {
        None => words(record, term),
        Some(warm) if is_of(warm, term) => words(warm, term),
        Some(_) => {
            let nodes = record.signals.standby.unwrap_or_default().nodes;
            format!("{}; {nodes} of them put off, for which nodes stand by", words(record, term))
        }
    }
}

/// By which start time the number was planned, and why.
fn start_words(record: &DecisionRecord, warm: Option<&DecisionRecord>, standby: Standby) -> String {
    let cold = format!("{:.0} s", record.signals.start_seconds);
    let nodes = match standby.nodes {
        0 => return format!("{cold}, cold: no node has the model in memory and room for a replica"),
        1 => "1 node has the model in memory".to_owned(),
        nodes => format!("{nodes} nodes have the model in memory"),
    };
    let Some(warm) = warm else { return format!("{cold}, cold: {nodes}, but no start there was seen yet") };
    let seconds = warm.signals.start_seconds;
    if record.decision.demand.largest().is_none_or(|term| is_of(warm, term)) {
        format!("{seconds:.0} s, warm: {nodes}, enough for what would be wanted beyond that if starts took {cold}")
    } else {
        format!("{cold}, cold: {nodes} (starts of {seconds:.0} s), and more are wanted than can start there")
    }
}

fn words(record: &DecisionRecord, term: Term) -> String {
    let DecisionRecord { signals, spec, .. } = record;
    let targets = &spec.targets;
    match term.cause {
        Cause::Kv => format!(
            "{:.0} blocks referenced / ({:.0} blocks per replica x {} kv target)",
            referenced(signals, record.decision.demand.regime),
            signals.blocks_per_replica,
            targets.kv
        ),
        Cause::Arrivals => arrival_words(record).unwrap_or_else(|| "nothing learned yet".to_owned()),
        Cause::Work => work_words(record).unwrap_or_else(|| "engines did not say".to_owned()),
        Cause::Queue => {
            format!("{:.2} s of prefill wait per replica / {} s target", signals.queue_seconds, targets.queue_seconds)
        }
        Cause::Preemptions => format!(
            "{:.1} preemptions per minute and replica / {} target",
            preemptions_per_minute(signals),
            targets.preemptions_per_minute
        ),
        Cause::Ttft => latency_words("time to first token", signals.ttft_p95_ms, targets.ttft_ms),
        Cause::Itl => latency_words("inter-token latency", signals.itl_p95_ms, targets.itl_ms),
        Cause::Period => period_words(record).unwrap_or_else(|| "no edge is expected".to_owned()),
        Cause::Held => held_words(record),
    }
}

fn latency_words(what: &str, measured: Option<f64>, target: Option<f64>) -> String {
    format!("p95 {what} {:.0} ms / {:.0} ms target", measured.unwrap_or(0.0), target.unwrap_or(0.0))
}

fn arrival_words(record: &DecisionRecord) -> Option<String> {
    let regime = record.decision.demand.regime;
    let term = ArrivalTerm::of(&record.signals, &record.after.law, &record.spec, regime)?;
    Some(format!(
        "({:.1} requests/s {} + {:.1} waiting) x {:.0} blocks x {:.1} s stay / ({:.0} blocks at {:.0} % kv) + {:.2} for \
         chance + {:.2} to spare",
        term.rate,
        regime_words(regime),
        term.waiting_rate,
        term.blocks_per_request,
        term.residence_seconds,
        term.carried,
        term.kv * 100.0,
        term.chance_replicas(),
        term.spare_replicas()
    ))
}

fn work_words(record: &DecisionRecord) -> Option<String> {
    let regime = record.decision.demand.regime;
    let term = WorkTerm::of(&record.signals, &record.spec, regime)?;
    let (busy, holding) = (term.busy_replicas(), term.holding_replicas());
    let limit = if busy >= holding {
        format!(
            "do it in steps of {:.0} ms at most, {:.2} of {busy:.2} for chance",
            term.itl_seconds * 1000.0,
            busy - term.mean_replicas()
        )
    } else {
        format!("hold what is in flight, {:.2} of {holding:.2} for chance", term.held_by_chance)
    };
    Some(format!(
        "({:.1} requests/s {} + {:.1} waiting) x {:.3} s of work: {:.2} {limit}; {:.2} to spare",
        term.rate,
        regime_words(regime),
        term.waiting_rate,
        term.request_seconds,
        busy.max(holding),
        term.spare
    ))
}

/// How many requests gateways hold.
pub fn held_requests_words(held: u32) -> String {
    if held == 1 { "1 request held".to_owned() } else { format!("{held} requests held") }
}

fn held_words(record: &DecisionRecord) -> String {
    let DecisionRecord { signals, after, .. } = record;
    let held = format!("{} by gateways", held_requests_words(signals.held_requests));
    match after.learned.work.filter(|_| signals.coverage.serving == 0) {
        Some(work) => format!("{held} x {:.3} s of work, by what requests took before", work.request_seconds),
        None => held,
    }
}

/// What is to be said of a deployment without replicas, or that had none a moment ago.
fn zero(record: &DecisionRecord) -> Option<String> {
    let DecisionRecord { signals, decision, after, .. } = record;
    let held = held_requests_words(signals.held_requests);
    if let Some(woken_ms) = after.woken_ms {
        let ago = record.at_ms.saturating_sub(woken_ms) as f64 / 1000.0;
        return Some(format!("woken {ago:.0} s ago, {held}; a start takes {}", either_start(signals)));
    }
    let words = || {
        let start = match signals.next_start_seconds() {
            Some(seconds) => format!("takes {seconds:.0} s to start"),
            None => format!(
                "starts where the model is in memory, which nobody saw yet; elsewhere it takes {:.0} s",
                signals.start_seconds
            ),
        };
        format!("scaled to zero, {held}; the next one brings a replica, which {start}")
    };
    (decision.desired == 0 && signals.coverage.serving == 0).then(words)
}

/// Of one that is on its way already, and may have taken the last warm node.
fn either_start(signals: &Signals) -> String {
    let cold = signals.start_seconds;
    match signals.standby.and_then(|standby| standby.start_seconds) {
        Some(warm) => format!("{warm:.0} s where the model is in memory, {cold:.0} s elsewhere"),
        None => format!("{cold:.0} s"),
    }
}

fn period_words(record: &DecisionRecord) -> Option<String> {
    let Foreseen { period_seconds, in_seconds, rate } = record.after.rhythm.foreseen(&record.signals, record.at_ms)?;
    let when = if in_seconds >= 0.0 {
        format!("next in {in_seconds:.0} s")
    } else {
        format!("{:.0} s late and waited for", -in_seconds)
    };
    Some(format!("load jumps every {:.1} minutes, {when}: {rate:.1} requests/s then", period_seconds / 60.0))
}

fn regime_words(regime: Regime) -> &'static str {
    match regime {
        Regime::Calm => "by the time a start takes",
        Regime::Onset | Regime::Jump => "in a jump",
        Regime::AfterJump => "after a jump",
    }
}

fn wanted(record: &DecisionRecord) -> String {
    let decision = &record.decision;
    format!(
        "{} by load alone, {:.2} before rounding; between min {} and max {}",
        decision.unbounded,
        decision.demand.replicas(),
        record.spec.min,
        record.spec.max
    )
}

fn bound(record: &DecisionRecord) -> String {
    let decision = &record.decision;
    let reason = match decision.bound {
        Bound::Nothing => return "nothing: the number is what load wants".to_owned(),
        Bound::Min => "scaling.min keeps it up",
        Bound::Max => "scaling.max keeps it down: raise it to follow the load",
        Bound::UpStep => "behavior.up: the rest follows with the next decision",
        Bound::DownStep => "behavior.down: the rest follows with the next decision",
        Bound::QuorumUp => "too few fresh readings to move at all",
        Bound::QuorumDown => "a serving replica cannot be seen, so nothing goes down",
        Bound::ShortHistory => "less history than the stable window, so nothing goes down",
        Bound::Panic => "a jump was seen within the stable window, so nothing goes down",
        Bound::Preemptions => "sequences are being preempted, so nothing goes down",
        Bound::Stabilisation => "the higher number was needed lately",
        Bound::DownPressure => "one replica less would be loaded above behavior.downPressure",
        Bound::Slowest => "one replica less would not do it if the slowest stays",
        Bound::NotIdleYet => "idle, but not yet for toZero.afterSeconds",
        Bound::SlowWake => {
            let start = record.signals.next_start_seconds().unwrap_or(record.signals.start_seconds);
            let most = record.spec.to_zero.unwrap_or_default().max_wake_seconds;
            return format!("toZero.maxWakeSeconds: coming back takes {start:.0} s, {most} s are allowed");
        }
        Bound::NoGateway => {
            "no gateway leads the Service, so nobody would hold the first request: enable the gateway, or remove toZero"
        }
        Bound::GatewaySilent => return silent_words(record),
        Bound::Waking => "the first replica after none is on its way; until it serves there is nobody to read",
    };
    format!("{reason}; without it: {}", count(decision.unbounded))
}

fn silent_words(record: &DecisionRecord) -> String {
    let Holders::Silent(gateway) = &record.signals.holders else { return "a gateway is silent".to_owned() };
    format!("idle, but gateway {gateway} does not say what it has in line, which may be a request")
}

fn name(cause: Cause) -> &'static str {
    match cause {
        Cause::Kv => "kv",
        Cause::Arrivals => "arrivals",
        Cause::Work => "work",
        Cause::Queue => "queue",
        Cause::Preemptions => "preemptions",
        Cause::Ttft => "ttft",
        Cause::Itl => "itl",
        Cause::Period => "period",
        Cause::Held => "held",
    }
}

/// The word that status, records and metrics use.
fn bound_name(bound: Bound) -> String {
    let word = serde_json::to_value(bound).expect("an enumeration is plain data");
    word.as_str().unwrap_or_default().to_owned()
}
