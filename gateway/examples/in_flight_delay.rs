//! How late a gateway knows what another one has sent: two of them in one process, on connections over the loopback, and requests that begin
//! and end at one of them at random moments. And what it costs.
//!
//! ```text
//! cargo run --release -p stoker-gateway --example in_flight_delay -- 500
//! ```
//!
//! The number is of requests a second at the one that tells.

#![expect(clippy::unwrap_used, reason = "an example ends by panicking")]

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use stoker_crds::endpoints::{DeploymentEndpoints, EndpointState, Endpoints, ReplicaEndpoint, WHOLE_WEIGHT};
use stoker_gateway::{
    gateway::{Gateway, Settings},
    peers,
    server::admin_router,
    vital::{Flight, Vital},
};
use tokio::net::TcpListener;

const N_REPLICAS: usize = 16;
const SAMPLES: usize = 2000;
/// Requests under way.
const FLIGHTS: usize = 128;

fn main() {
    let rate: f64 = std::env::args().nth(1).map_or(500.0, |rate| rate.parse().unwrap());
    let runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    // Each has a thread of its own, as a process would.
    let runtimes = [runtime(), runtime()];
    let gateways: Vec<Arc<Gateway>> = runtimes.iter().map(|_| Gateway::new(Settings::default()).unwrap()).collect();
    let served = runtimes.iter().zip(&gateways).map(|(runtime, gateway)| runtime.block_on(serve(gateway)));
    let addresses: Vec<String> = served.collect();
    gateways.iter().for_each(|gateway| gateway.learn(endpoints(&addresses)));
    while gateways.iter().any(|gateway| gateway.metrics.peers.get() == 0) {
        std::thread::sleep(Duration::from_millis(10));
    }
    let (here, there) = (vitals(&gateways[0]), vitals(&gateways[1]));
    let begin = |at: usize| Flight::begin(&here[at % N_REPLICAS], 100);
    let pause = || std::thread::sleep(Duration::from_secs_f64(-(1.0 - rand::random::<f64>()).ln() / rate));
    let mut late: Vec<f64> = Vec::with_capacity(SAMPLES);
    let mut flights = VecDeque::from_iter((0..FLIGHTS).map(begin));
    for at in 0..SAMPLES {
        pause();
        let there = &there[at % N_REPLICAS];
        let before = there.of_all().requests;
        flights.push_back(begin(at));
        let sent = Instant::now();
        while there.of_all().requests == before {
            std::thread::yield_now();
        }
        late.push(1e3 * sent.elapsed().as_secs_f64());
        flights.pop_front();
    }
    late.sort_by(f64::total_cmp);
    let at = |share: f64| late[((SAMPLES - 1) as f64 * share) as usize];

    // Without anybody who waits; what the pauses alone cost is taken off.
    let mut cost = |is_idle: bool| {
        let (begun, busy) = (Instant::now(), busy_seconds());
        for at in 0..SAMPLES {
            pause();
            if !is_idle {
                flights.push_back(begin(at));
                flights.pop_front();
            }
        }
        let seconds = begun.elapsed().as_secs_f64();
        ((busy_seconds() - busy) / seconds, SAMPLES as f64 / seconds)
    };
    let ((busy, rate), (idle, _)) = (cost(false), cost(true));
    println!(
        "known after p50 {:.2} ms, p95 {:.2}, p99 {:.2}; at {rate:.0} requests/s {:.3} of a core, for one that tells and one that hears",
        at(0.5),
        at(0.95),
        at(0.99),
        busy - idle,
    );
}

async fn serve(gateway: &Arc<Gateway>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let routes = admin_router(Arc::clone(gateway));
    tokio::spawn(async move { axum::serve(listener, routes).await });
    tokio::spawn(peers::follow(Arc::clone(gateway)));
    address
}

fn endpoints(gateways: &[String]) -> Endpoints {
    let replica = |place: usize| ReplicaEndpoint {
        pod: place.to_string(),
        uid: format!("00000000-0000-0000-0000-{place:012}"),
        address: Some("127.0.0.1:1".into()),
        events: None,
        revision: "r".into(),
        weight: WHOLE_WEIGHT,
        state: EndpointState::Serving,
        load: None,
    };
    let chat =
        DeploymentEndpoints { replicas: (0..N_REPLICAS).map(replica).collect(), ..DeploymentEndpoints::default() };
    Endpoints { source: "example".into(), number: 1, gateways: gateways.to_vec(), deployments: vec![chat] }
}

fn vitals(gateway: &Gateway) -> Vec<Arc<Vital>> {
    gateway.fleet().vitals().map(|(_, vital)| Arc::clone(vital)).collect()
}

/// Processor time of this process.
fn busy_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let times = stat.rsplit_once(") ").unwrap().1.split(' ').skip(11).take(2);
    times.map(|ticks| ticks.parse::<f64>().unwrap() / 100.0).sum()
}
