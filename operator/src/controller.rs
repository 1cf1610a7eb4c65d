//! Wires watches, readings and rounds together. `round::reconcile` lists the steps of a round; each step lives in its own file.

mod decision;
mod failures;
mod parts;
mod report;
mod round;
mod watches;

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use anyhow::bail;
use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::Node;
use kube::{
    Client, ResourceExt,
    runtime::{
        Config,
        controller::Action,
        events::{Recorder, Reporter},
        reflector::{ObjectRef, Store},
        watcher,
    },
};
use stoker_crds::InferenceDeployment;
use tokio::sync::mpsc;
use tracing::{debug, error, warn};

use self::{failures::Failures, parts::Parts, watches::Watches};
use crate::{
    agent_client::AgentClient,
    apply::FIELD_MANAGER,
    budgets::Grants,
    canary::Findings,
    clock::Clock,
    devices::Devices,
    endpoints::Published,
    error::ReconcileError,
    fleet::Fleet,
    gateways::{Gateways, ServiceName},
    image_volumes::Release,
    keys::{KeyStore, Keyring},
    lease::Leadership,
    lines::Waiting,
    metrics::Metrics,
    observe::Caches,
    pages::Board,
    pause::{NoPause, Pause},
    pools::PoolOptions,
    readings::Readings,
    refused::RefusedWrites,
    scaling::Ledger,
    validate::Defaults,
    vitals::Vitals,
    watched::Watched,
};

/// Deployments reconciled at the same time.
const CONCURRENT_ROUNDS: u16 = 8;
/// Pods that the probe may have found changed and that wait for a round.
const CHANGES_WAITING: usize = 1024;
/// A look at everything, even if no event asks for it.
const SAFETY_NET: Duration = Duration::from_secs(3600);
/// Between rounds of a deployment that fail.
const PAUSE: Pause = Pause { first: Duration::from_millis(200), longest: Duration::from_secs(20) };

/// What a controller needs to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Only this namespace, or all.
    pub namespace: Option<String>,
    /// What deployments fall back to.
    pub defaults: Defaults,
    /// The gateways that Services lead to; `None`: they lead to replicas.
    pub gateways: Option<ServiceName>,
    /// Whether InferencePools are made, where there can be any.
    pub pools: PoolOptions,
    /// Name of this process in Events.
    pub identity: String,
}

/// What rounds share with the rest of the process.
#[derive(Clone, Debug)]
pub struct Shared {
    /// Whether we may write.
    pub leadership: Leadership,
    /// Counts.
    pub metrics: Arc<Metrics>,
    /// Decisions on numbers of replicas.
    pub ledger: Ledger,
    /// What gateways are told.
    pub endpoints: Published,
    /// What all replicas say, once they are asked.
    pub fleet: Arc<OnceLock<Fleet>>,
    /// What pages look at, if there are any.
    pub board: Option<Board>,
    /// Signs of life.
    pub vitals: Vitals,
}

/// What all rounds share.
struct Context {
    client: Client,
    caches: Caches,
    gateways: Option<Gateways>,
    readings: Readings,
    ledger: Ledger,
    findings: Findings,
    nodes: Watched<Node>,
    devices: Devices,
    /// The API server's.
    release: Option<Release>,
    grants: Grants,
    board: Option<Board>,
    keyring: Keyring,
    defaults: Defaults,
    metrics: Arc<Metrics>,
    leadership: Leadership,
    vitals: Vitals,
    recorder: Recorder,
    deployments: Store<InferenceDeployment>,
    failures: Failures,
    /// What the API server refused, and when to ask again.
    refused: RefusedWrites,
}

/// Runs until `stop` resolves; rounds under way are finished. An error: a part that must go on has ended.
pub async fn run(
    client: Client,
    options: Options,
    shared: Shared,
    signing: (KeyStore, Keyring),
    stop: impl Future<Output = ()> + Send + Sync + 'static,
) -> anyhow::Result<()> {
    let (clock, release) = (Clock::of(&client).await, Release::of_server(&client).await);
    let (watches, events) = Watches::begin(&client, &options, clock).await?;
    let readings = Readings::by(clock);
    let (deployments, pods) = (watches.deployments.clone(), watches.caches.pods.clone());
    // It is set once a process.
    let waiting = Waiting::default();
    _ = shared.fleet.set(Fleet { deployments, pods, readings: readings.clone(), waiting: waiting.clone() });
    shared.metrics.watch(watches.deployments.clone())?;
    let (changed, changes) = mpsc::channel(CHANGES_WAITING);
    let (findings, keyring) = (Findings::default(), signing.1.clone());
    let parts = Parts {
        client: &client,
        options: &options,
        shared: &shared,
        watches: &watches,
        readings: &readings,
        findings: &findings,
        agents: AgentClient::default(),
        waiting,
        changed,
    };
    let mut parts = parts.begin(signing);

    let reporter = Reporter { controller: FIELD_MANAGER.into(), instance: Some(options.identity) };
    let context = Arc::new(Context {
        recorder: Recorder::new(client.clone(), reporter),
        caches: watches.caches,
        gateways: watches.gateways,
        defaults: options.defaults,
        deployments: watches.deployments.clone(),
        failures: Failures::default(),
        refused: RefusedWrites::default(),
        client,
        readings,
        ledger: shared.ledger,
        findings,
        nodes: watches.nodes,
        devices: watches.devices,
        release,
        grants: watches.grants,
        board: shared.board,
        keyring,
        metrics: shared.metrics,
        leadership: shared.leadership,
        vitals: shared.vitals,
    });
    let rounds = events
        .controller(watches.deployments)
        .with_config(Config::default().concurrency(CONCURRENT_ROUNDS))
        .trigger_backoff(NoPause)
        .reconcile_on(stream::unfold(changes, |mut changes| async { Some((changes.recv().await?, changes)) }))
        .graceful_shutdown_on(stop)
        .run(round::reconcile, error_policy, context)
        .for_each(|outcome| async move { log_outcome(outcome) });
    tokio::select! {
        () = rounds => Ok(()),
        ended = parts.join_next() => bail!("a part of the operator ended: {ended:?}"),
    }
}

/// Later each time a deployment fails in a row.
fn error_policy(deployment: Arc<InferenceDeployment>, error: &ReconcileError, context: Arc<Context>) -> Action {
    context.metrics.reconcile_errors.with_label_values(&[error.step()]).inc();
    if matches!(error, ReconcileError::Lint(_)) {
        error!(%error, name = deployment.name_any(), "not carried out");
    }
    Action::requeue(PAUSE.after(context.failures.count(&deployment, &context.deployments)))
}

type Outcome =
    Result<(ObjectRef<InferenceDeployment>, Action), kube::runtime::controller::Error<ReconcileError, watcher::Error>>;

fn log_outcome(outcome: Outcome) {
    use kube::runtime::controller::Error;
    match outcome {
        Ok((object, action)) => debug!(%object, ?action, "round done"),
        // The object went between event and round.
        Err(Error::ObjectNotFound(object)) => debug!(%object, "gone"),
        Err(Error::ReconcilerFailed(error, object)) => warn!(%object, %error, "round failed, will be tried again"),
        Err(error) => warn!(%error, "watch"),
    }
}
