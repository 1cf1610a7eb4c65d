//! Clients that stream from real agents through a Service, and count every answer that is not whole.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{JoinHandle, sleep},
    time::{Duration, Instant},
};

use stoker_loadgen::{
    client::{Ask, Client, Connections, Ending, Form, Options, Prompt, Sampling},
    shape::Shape,
};

/// For one answer, on a busy machine.
const ANSWERED_WITHIN: Duration = Duration::from_secs(120);

/// Where a model is served.
#[derive(Clone, Debug)]
pub struct Service {
    /// URL without a path.
    pub base: String,
    /// Name of the model.
    pub model: String,
}

/// Clients that ask one request after the other until they are told to stop.
pub struct Clients {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Vec<String>>>,
    answered: Arc<AtomicUsize>,
}

impl Clients {
    /// `count` clients of a model, each with requests of this many completion tokens, and a pause between two of them.
    pub fn start(service: &Service, count: usize, max_tokens: u32, pause: Duration) -> Self {
        let (stop, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let threads = (0..count as u64).map(|seed| {
            let (stop, answered, service) = (stop.clone(), answered.clone(), service.clone());
            let ask = Ask {
                prompt: Prompt::Text("Tell me a story about the sea.".into()),
                max_tokens,
                seed,
                shape: Shape::Text,
            };
            std::thread::spawn(move || client(&service, &ask, pause, &stop, &answered))
        });
        Self { threads: threads.collect(), stop, answered }
    }

    /// Lets each finish what it asked; every failure they saw.
    pub fn stop(self) -> (usize, Vec<String>) {
        self.stop.store(true, Ordering::SeqCst);
        let failures =
            self.threads.into_iter().flat_map(|thread| thread.join().expect("a client does not panic")).collect();
        (self.answered.load(Ordering::SeqCst), failures)
    }
}

/// Asks until told to stop; each request has a connection of its own, so that the Service spreads them.
fn client(service: &Service, ask: &Ask, pause: Duration, stop: &AtomicBool, answered: &AtomicUsize) -> Vec<String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let options = Options {
        url: service.base.clone(),
        form: Form::Chat,
        connections: Connections::Fresh,
        ending: Ending::AtMaxTokens,
        sampling: Sampling::OfModel,
        api_key: None,
    };
    let http = runtime.block_on(async { Client::new(options) }).expect("a client");
    let mut failures = Vec::new();
    while !stop.load(Ordering::SeqCst) {
        let answer =
            runtime.block_on(async { http.ask(&service.model, ask, (Instant::now() + ANSWERED_WITHIN).into()).await });
        match answer.map(|answer| answer.usage.map(|usage| usage.completion_tokens)) {
            Ok(Some(tokens)) if tokens == ask.max_tokens => _ = answered.fetch_add(1, Ordering::SeqCst),
            Ok(tokens) => failures.push(format!("{tokens:?} of {} tokens", ask.max_tokens)),
            Err(failure) => failures.push(failure.to_string()),
        }
        sleep(pause);
    }
    failures
}
