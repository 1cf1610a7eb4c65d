//! Wires watches, readings and rounds together. `reconcile` lists the steps of a round; each step lives in its own file.
//!
//! A round decides on the caches first. Only if that would write anything does it read the API server and decide again,
//! so a settled deployment costs no request and no decision that changes something rests on a stale cache.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use futures::{StreamExt, TryStreamExt, stream::BoxStream};
use jiff::Timestamp;
use k8s_openapi::{
    NamespaceResourceScope,
    api::{
        core::v1::{ConfigMap, Container, Node, ObjectReference, Pod, PodSpec, Service},
        discovery::v1::EndpointSlice,
        networking::v1::NetworkPolicy,
        policy::v1::PodDisruptionBudget,
    },
};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{Patch, PatchParams},
    runtime::{
        Config, Controller, WatchStreamExt,
        controller::Action,
        events::{Event, Recorder},
        reflector::{self, ObjectRef, Store, store::Writer},
        watcher,
    },
};
use serde::de::DeserializeOwned;
use serde_json::json;
use stoker_crds::{InferenceDeployment, InferenceDeploymentStatus, devices::Gpus};
use tokio::{
    sync::{Notify, mpsc},
    task::JoinSet,
};
use tracing::{Instrument, debug, error, info, info_span, warn};

use crate::{
    agent_client::AgentClient,
    apply::{Applied, Apply, FIELD_MANAGER, Refusal},
    budgets::{self, Granted, Grants, Treasurer},
    canary::{Examiner, Findings, gate::Finding},
    clock::Clock,
    course,
    desired::{Desired, config_map_name, desired, labels},
    devices::{self, Devices},
    endpoints::{Published, Publisher},
    error::ReconcileError,
    events::{events_of, old_crd},
    fits,
    gateways::{Gateways, ServiceName},
    image_volumes::{Ground, Release},
    intake,
    keys::{KeyStore, Keyring, renew},
    lease::Leadership,
    lines::{Asker, Waiting},
    lint,
    metrics::Metrics,
    nodes,
    observe::{Caches, Observed, PodIndex, observe_cached, observe_live},
    pages::{Board, Sources},
    pause::{NoPause, Pause, WatchPauses},
    plan::{self, Plan},
    pools::{PoolOptions, Pools},
    probe::Probe,
    readings::Readings,
    refused::{Attempt, RefusedWrites},
    revision::revision,
    rollback,
    scaling::{Autoscaler, Latest, Ledger},
    standby,
    status::{Outlook, Round, status_of, status_of_invalid},
    validate::{Defaults, SpecError, ValidatedDeployment, validate},
    vitals::Vitals,
    watched::Watched,
};

/// Deployments reconciled at the same time.
const CONCURRENT_ROUNDS: u16 = 8;
/// Pods that the probe may have found changed and that wait for a round.
const CHANGES_WAITING: usize = 1024;
/// A look at everything, even if no event asks for it.
const SAFETY_NET: Duration = Duration::from_secs(3600);
/// When to try again what somebody else's object blocks.
const RETRY_BLOCKED: Duration = Duration::from_secs(10);
/// Whether pods without our labels are gone: no event says so.
const LOOK_FOR_STRAYS: Duration = Duration::from_secs(300);
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
    /// What agents said, once they are asked.
    pub readings: Arc<OnceLock<Readings>>,
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
    /// Failures in a row by deployment, of those that there are.
    failures: Mutex<HashMap<ObjectRef<InferenceDeployment>, u32>>,
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
    let Shared { leadership, metrics, ledger, endpoints, readings: told, board, vitals } = shared;
    let scope = options.namespace.as_deref();
    let pods_of = PodIndex::default();
    let noted = pods_of.clone();
    let (pods, pod_events) = cached::<Pod>(&client, scope, move |pod| {
        slim(pod);
        noted.note(pod, Instant::now());
    });
    let (prefetches, prefetch_events) = cached_of::<Pod>(&client, scope, &labels::prefetch_selector(), slim);
    let (services, service_events) = cached::<Service>(&client, scope, strip);
    let made = labels::slices_selector();
    let (slices, slice_events) = cached_of::<EndpointSlice>(&client, scope, &made, strip);
    let (config_maps, config_map_events) = cached::<ConfigMap>(&client, scope, strip);
    let (budgets, budget_events) = cached::<PodDisruptionBudget>(&client, scope, strip);
    let (network_policies, network_policy_events) = cached::<NetworkPolicy>(&client, scope, strip);
    let (gateways, gateways_changed) = match &options.gateways {
        Some(service) => {
            let (gateways, changed) = Gateways::watch(client.clone(), service, scope)
                .await
                .context("read which ports of gateways are given")?;
            (Some(gateways), changed.boxed())
        }
        None => (None, futures::stream::pending().boxed()),
    };
    let (pools, pool_events, pools_listed) = Pools::watch(client.clone(), scope, options.pools);
    let (nodes, nodes_changed) = Watched::watch(Api::all(client.clone()), nodes::slim).await;
    let (devices, devices_changed) = Devices::watch(&client).await;
    let (given, given_changed) = Watched::watch(api(&client, scope), budgets::slim).await;
    let grants = Grants::of_budgets(given);
    let (deployments, writer) = reflector::store();
    let (clock, release) = (Clock::of(&client).await, Release::of_server(&client).await);
    let watched = intake::readable(api(&client, scope), client.clone(), clock);
    let listed = Arc::new(Notify::new());
    let all_listed = Arc::clone(&listed);
    let deployment_events = watched
        .modify(strip)
        .reflect(writer)
        .inspect_ok(move |event| {
            if matches!(event, watcher::Event::InitDone) {
                all_listed.notify_one();
            }
        })
        .applied_objects();

    let (changed, changes) = mpsc::channel(CHANGES_WAITING);
    let readings = Readings::by(clock);
    // It is set once a process.
    _ = told.set(readings.clone());
    let (key_store, keyring) = signing;
    let agents = AgentClient::default();
    let probe = Probe {
        pods: pods.clone(),
        agents: agents.clone(),
        keyring: keyring.clone(),
        leadership: leadership.clone(),
        give_bytes_per_second: options.defaults.models.give_bytes_per_second,
        readings: readings.clone(),
        changed: changed.clone(),
        metrics: metrics.clone(),
        vitals: vitals.clone(),
    };
    metrics.watch(deployments.clone())?;
    let waiting = Waiting::default();
    let autoscaler = Autoscaler {
        deployments: deployments.clone(),
        pods: pods.clone(),
        ahead: prefetches.clone(),
        readings: readings.clone(),
        gateways: gateways.clone(),
        waiting: waiting.clone(),
        ledger: ledger.clone(),
        changed: changed.clone(),
        metrics: metrics.clone(),
        vitals: vitals.clone(),
    };
    let asker = Asker {
        gateways: gateways.clone(),
        client: agents.clone(),
        leadership: leadership.clone(),
        waiting,
        vitals: vitals.clone(),
    };
    let treasurer = Treasurer {
        client: client.clone(),
        deployments: deployments.clone(),
        pods: pods.clone(),
        readings: readings.clone(),
        grants: grants.clone(),
        changed: changed.clone(),
        metrics: metrics.clone(),
        vitals: vitals.clone(),
    };
    let findings = Findings::default();
    let examiner = Examiner {
        deployments: deployments.clone(),
        pods: pods.clone(),
        readings: readings.clone(),
        agents: agents.clone(),
        leadership: leadership.clone(),
        findings: findings.clone(),
        changed: changed.clone(),
        vitals: vitals.clone(),
    };
    let publisher = Publisher {
        deployments: deployments.clone(),
        pods: pods.clone(),
        readings: readings.clone(),
        listed,
        published: endpoints,
        gateways: gateways.clone(),
        source: format!("{}-{}", options.identity, readings.now().as_millisecond()),
        vitals: vitals.clone(),
    };
    let mut parts = JoinSet::new();
    parts.spawn(probe.run());
    parts.spawn(autoscaler.run());
    parts.spawn(asker.run());
    parts.spawn(examiner.run());
    parts.spawn(treasurer.run());
    parts.spawn(publisher.run());
    if let Some(board) = board.clone() {
        let (deployments, pods) = (deployments.clone(), pods.clone());
        let sources = Sources { deployments, pods, readings: readings.clone(), ledger: ledger.clone() };
        parts.spawn(board.keep(sources, agents, vitals.clone()));
    }
    parts.spawn(renew(key_store, keyring.clone(), deployments.clone(), changed));

    let reporter =
        kube::runtime::events::Reporter { controller: FIELD_MANAGER.into(), instance: Some(options.identity) };
    let context = Arc::new(Context {
        recorder: Recorder::new(client.clone(), reporter),
        caches: Caches { pods, pods_of, services, slices, config_maps, budgets, network_policies, pools, prefetches },
        gateways,
        defaults: options.defaults,
        deployments: deployments.clone(),
        failures: Mutex::default(),
        refused: RefusedWrites::default(),
        client,
        readings,
        ledger,
        findings,
        nodes,
        devices,
        release,
        grants,
        board,
        keyring,
        metrics,
        leadership,
        vitals,
    });
    let rounds = Controller::for_stream(deployment_events, deployments)
        .with_config(Config::default().concurrency(CONCURRENT_ROUNDS))
        .trigger_backoff(NoPause)
        .owns_stream(pod_events)
        .owns_stream(prefetch_events)
        .owns_stream(service_events)
        .owns_stream(slice_events)
        .reconcile_all_on(gateways_changed)
        .owns_stream(pool_events)
        .reconcile_all_on(pools_listed)
        .reconcile_all_on(nodes_changed)
        .reconcile_all_on(devices_changed)
        .reconcile_all_on(given_changed)
        .owns_stream(config_map_events)
        .owns_stream(budget_events)
        .owns_stream(network_policy_events)
        .reconcile_on(futures::stream::unfold(changes, |mut changes| async { Some((changes.recv().await?, changes)) }))
        .graceful_shutdown_on(stop)
        .run(reconcile, error_policy, context)
        .for_each(|outcome| async move { log_outcome(outcome) });
    tokio::select! {
        () = rounds => Ok(()),
        // They run for as long as rounds ask for them: one that ends has panicked.
        ended = parts.join_next() => bail!("a part of the operator ended: {ended:?}"),
    }
}

/// A cache of what the operator made, and the events that fill it.
fn cached<K>(
    client: &Client,
    scope: Option<&str>,
    trim: impl Fn(&mut K) + Send + 'static,
) -> (Store<K>, BoxStream<'static, watcher::Result<K>>)
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned,
    K: std::fmt::Debug + Send + Sync + 'static,
{
    cached_of(client, scope, &labels::managed_selector(), trim)
}

/// The same of what this selects.
fn cached_of<K>(
    client: &Client,
    scope: Option<&str>,
    selector: &str,
    trim: impl Fn(&mut K) + Send + 'static,
) -> (Store<K>, BoxStream<'static, watcher::Result<K>>)
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned,
    K: std::fmt::Debug + Send + Sync + 'static,
{
    let writer = Writer::<K>::default();
    let store = writer.as_reader();
    let config = watcher::Config::default().labels(selector);
    let events = watcher(api::<K>(client, scope), config).backoff(WatchPauses::default());
    (store, events.modify(trim).reflect(writer).touched_objects().boxed())
}

fn api<K>(client: &Client, scope: Option<&str>) -> Api<K>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
{
    match scope {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    }
}

/// Bookkeeping of the API server that nobody here reads is most of an object's size.
fn strip<K: Resource>(object: &mut K) {
    object.managed_fields_mut().clear();
}

/// What the caches keep of a pod. Its volumes, probes and variables are most of the rest, and ours anyway.
fn slim(pod: &mut Pod) {
    strip(pod);
    let Some(spec) = pod.spec.take() else { return };
    let containers = spec.containers.into_iter();
    pod.spec = Some(PodSpec {
        node_name: spec.node_name,
        node_selector: spec.node_selector,
        resource_claims: spec.resource_claims,
        scheduling_gates: spec.scheduling_gates,
        containers: containers
            .map(|container| Container { name: container.name, resources: container.resources, ..Container::default() })
            .collect(),
        ..PodSpec::default()
    });
}

/// One round with its metrics and log fields.
async fn reconcile(deployment: Arc<InferenceDeployment>, context: Arc<Context>) -> Result<Action, ReconcileError> {
    let span = info_span!("round", namespace = deployment.namespace(), name = deployment.name_any());
    let started = Instant::now();
    let _under_way = context.vitals.round();
    let outcome = round(deployment.clone(), &context).instrument(span).await;
    context.metrics.reconcile_seconds.observe(started.elapsed().as_secs_f64());
    if outcome.is_ok() {
        let object = ObjectRef::from_obj(&*deployment);
        context.failures.lock().unwrap_or_else(PoisonError::into_inner).remove(&object);
    }
    outcome
}

/// Observe, validate, plan, apply, status.
async fn round(deployment: Arc<InferenceDeployment>, context: &Context) -> Result<Action, ReconcileError> {
    if deployment.metadata.deletion_timestamp.is_some() {
        // Children are owned: the garbage collector deletes them, SIGTERM drains them.
        return Ok(Action::await_change());
    }
    if !context.leadership.holds() {
        return Err(ReconcileError::NotLeading);
    }
    let cached = observe_cached(deployment.clone(), &context.caches, &context.readings);
    if let Some(settled) = context.settled(&cached, context.readings.now()) {
        return Ok(settled);
    }
    let revision_map = validate(&deployment, &context.defaults)
        .map(|valid| config_map_name(&valid.identity.name, &revision(&valid.replica)))
        .ok();
    let (client, caches) = (&context.client, &context.caches);
    let live = observe_live(&deployment, revision_map.as_deref(), client, caches, &context.readings).await;
    match live.map_err(ReconcileError::Observe)? {
        Some(live) => context.carry_out(&live, context.readings.now()).await,
        None => Ok(Action::await_change()),
    }
}

/// What was decided about a deployment.
struct Decision {
    deployment: ValidatedDeployment,
    desired: Desired,
    plan: Plan,
    /// On the number of replicas.
    scaling: Option<Latest>,
    /// What was found of its canary.
    finding: Option<Finding>,
    /// Whether its model fits.
    fit: fits::Outlook,
    /// What its namespace's budget grants.
    granted: Option<Granted>,
}

impl Context {
    fn decide(&self, observed: &Observed, now: Timestamp) -> Result<Decision, SpecError> {
        let granted = self.grants.of(&observed.deployment);
        let asked = validate(&observed.deployment, &self.defaults)?;
        let asked = asked.limited_to(granted.as_ref().map(|granted| granted.grant.replicas));
        let published = self.devices.seen();
        let devices = devices::gpus(published.as_ref(), &observed.deployment.spec);
        let settled = course::settle(asked, observed).delivered_on(&Ground {
            rule: self.defaults.models.image_volumes,
            server: self.release,
            nodes: &self.nodes.seen(),
            devices: devices.as_ref().ok(),
            spec: &observed.deployment.spec,
        });
        let deployment = self.among_others(settled).warm_on(&observed.standbys);
        let identity = &deployment.identity;
        let front = self.gateways.as_ref().and_then(|gateways| gateways.front(&identity.uid));
        let pools = self.caches.pools.kept();
        let desired =
            desired(&deployment, &self.keyring.public()).behind(identity, front.as_ref()).pooled(identity, pools);
        let fit = self.fit(&deployment, &desired, observed, &devices);
        let plan = plan::plan(&deployment, &desired, observed, now);
        let plan = if fit.opinion.is_hopeless { plan.without_hopeless(&deployment.course) } else { plan };
        let plan = plan.with_standby(&self.standby(&deployment, &desired, observed, &devices), now);
        let scaling = self.ledger.latest(&observed.deployment);
        let finding = self.findings.of(observed.deployment.metadata.uid.as_deref());
        Ok(Decision { deployment, desired, plan, scaling, finding, fit, granted })
    }

    fn fit(
        &self,
        deployment: &ValidatedDeployment,
        desired: &Desired,
        observed: &Observed,
        devices: &Result<Gpus<'_>, String>,
    ) -> fits::Outlook {
        fits::look(&fits::Scene {
            deployment: &observed.deployment,
            revision: rollback::asked(deployment, desired),
            replicas: &observed.replicas,
            descriptions: &observed.descriptions,
            nodes: &self.nodes.seen(),
            devices,
        })
    }

    /// Where its model could be kept in memory, if it is to be.
    fn standby<'a>(
        &self,
        deployment: &ValidatedDeployment,
        desired: &'a Desired,
        observed: &'a Observed,
        devices: &Result<Gpus<'_>, String>,
    ) -> standby::Scene<'a> {
        let wanted = deployment.nodes_on_standby();
        let written = observed.deployment.status.as_ref().and_then(|status| status.standby.as_ref());
        let is_refused =
            written.is_some_and(|written| written.revision == desired.revision && written.refused.is_some());
        let (revision, pods) = (desired.revision.as_str(), &*observed.standbys);
        // Others' pods are looked at for those alone that want it.
        let spots = if wanted == 0 { Ok(Vec::new()) } else { self.spots(deployment, observed, devices) };
        standby::Scene { wanted, revision, spots, pods, is_refused }
    }

    fn spots(
        &self,
        deployment: &ValidatedDeployment,
        observed: &Observed,
        devices: &Result<Gpus<'_>, String>,
    ) -> Result<Vec<standby::Spot>, String> {
        standby::spots(&standby::Ground {
            deployment,
            spec: &observed.deployment.spec,
            replicas: &observed.replicas,
            nodes: &self.nodes.seen(),
            devices: devices.as_ref().map_err(Clone::clone)?,
            pods: &self.caches.pods.state(),
        })
    }

    /// The same, knowing where others have its model, if nodes keep that.
    fn among_others(&self, deployment: ValidatedDeployment) -> ValidatedDeployment {
        if deployment.kept_by_nodes().is_none() {
            return deployment;
        }
        let others = self.deployments.state();
        deployment.among(others.iter().filter_map(|other| other.status.as_ref()?.model.as_ref()))
    }

    /// When to look again, if nothing is to be written; `None` if something is.
    fn settled(&self, observed: &Observed, now: Timestamp) -> Option<Action> {
        let before = observed.deployment.status.as_ref();
        match self.decide(observed, now) {
            Err(error) => {
                let status = invalid_status(&error, observed, now);
                (before == Some(&status)).then(|| Action::requeue(SAFETY_NET))
            }
            Ok(decision) => {
                let attempt = Attempt::of(&observed.deployment, &decision.plan);
                let standing = self.refused.standing(&attempt, Instant::now());
                let waits = standing.as_ref().and_then(|_| self.refused.wait(&attempt, Instant::now()));
                let idle = decision.plan.is_empty() || standing.is_some();
                let outlook = decision.outlook(observed, &standing.unwrap_or_default(), now);
                // Whether strays are still there is not in any cache.
                let settled = idle && decision.plan.taken.is_empty() && observed.strays.is_empty();
                (settled && before == Some(&outlook.status)).then(|| decision.next_look(&outlook, now, waits))
            }
        }
    }

    /// Plans from a fresh observation and writes what it takes.
    async fn carry_out(&self, observed: &Observed, now: Timestamp) -> Result<Action, ReconcileError> {
        let decision = match self.decide(observed, now) {
            Ok(decision) => decision,
            Err(error) => {
                warn!(%error, "cannot be deployed");
                let status = invalid_status(&error, observed, now);
                self.report(observed, &Applied::default(), &status).await?;
                return Ok(Action::requeue(SAFETY_NET));
            }
        };
        if let Err(refused) = self.lint(&decision, observed, now) {
            let refusal = Refusal { what: "this operator's own plan".to_owned(), message: refused.to_string() };
            let applied = Applied { refusals: vec![refusal], ..Applied::default() };
            self.report(observed, &applied, &decision.outlook(observed, &applied, now).status).await?;
            return Err(refused);
        }
        let attempt = Attempt::of(&observed.deployment, &decision.plan);
        let applied = match self.refused.standing(&attempt, Instant::now()) {
            Some(standing) => standing,
            None => self.attempt(&attempt, &decision, observed, now).await?,
        };
        let outlook = decision.outlook(observed, &applied, now);
        self.report(observed, &applied, &outlook.status).await?;
        let blocked = !decision.plan.taken.is_empty() || !applied.strays.is_empty();
        let strays = (!observed.strays.is_empty()).then_some(LOOK_FOR_STRAYS);
        let refused = self.refused.wait(&attempt, Instant::now());
        let at_most = [blocked.then_some(RETRY_BLOCKED), refused, strays].into_iter().flatten().min();
        Ok(decision.next_look(&outlook, now, at_most))
    }

    /// Writes, and keeps in mind what was refused.
    async fn attempt(
        &self,
        attempt: &Attempt,
        decision: &Decision,
        observed: &Observed,
        now: Timestamp,
    ) -> Result<Applied, ReconcileError> {
        let applied = match self.apply(decision, observed, now).await {
            Ok(applied) => applied,
            Err(error) => {
                let refusal = self.refused.in_error(attempt, &error, self.failures_of(&observed.deployment));
                Applied { refusals: vec![refusal.ok_or(error)?], ..Applied::default() }
            }
        };
        self.refused.note(attempt.clone(), &applied.refusals, Instant::now());
        if !applied.refusals.is_empty() {
            self.refused.keep_only(&self.deployments.state().iter().filter_map(|object| object.uid()).collect());
        }
        Ok(applied)
    }

    fn failures_of(&self, deployment: &InferenceDeployment) -> u32 {
        let failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        failures.get(&ObjectRef::from_obj(deployment)).copied().unwrap_or_default()
    }

    fn lint(&self, decision: &Decision, observed: &Observed, now: Timestamp) -> Result<(), ReconcileError> {
        let wanted = plan::wanted(&decision.deployment, &decision.desired, observed);
        let violations = lint::check(&decision.plan, &wanted, &observed.replicas, now);
        if violations.is_empty() {
            return Ok(());
        }
        self.metrics.plans_refused.inc();
        Err(ReconcileError::Lint(violations))
    }

    async fn apply(&self, decision: &Decision, observed: &Observed, now: Timestamp) -> Result<Applied, ReconcileError> {
        if decision.plan.is_empty() {
            return Ok(Applied::default());
        }
        info!(plan = %decision.plan.to_string().trim_end().replace('\n', "; "), "applying");
        let apply = Apply {
            client: self.client.clone(),
            metrics: self.metrics.clone(),
            namespace: decision.deployment.identity.namespace.clone(),
            drain: decision.deployment.replica.drain,
        };
        apply.run(&decision.plan, &decision.desired, observed, now).await
    }

    /// Writes the status if it moved, and tells what happened.
    async fn report(
        &self,
        observed: &Observed,
        applied: &Applied,
        status: &InferenceDeploymentStatus,
    ) -> Result<(), ReconcileError> {
        let deployment = &observed.deployment;
        let before = deployment.status.as_ref();
        if before != Some(status) {
            let written = self.write_status(deployment, status).await.map_err(ReconcileError::of_status);
            if let Err(ReconcileError::OldCrd(_)) = &written {
                self.publish(deployment, &old_crd()).await;
            }
            written?;
        }
        for event in events_of(&deployment.namespace().unwrap_or_default(), applied, before, status) {
            self.publish(deployment, &event).await;
        }
        Ok(())
    }

    async fn publish(&self, deployment: &InferenceDeployment, event: &Event) {
        self.metrics.wrote("Event", "create");
        if let Some(board) = &self.board {
            board.told(deployment, event, self.readings.now());
        }
        // The recorder counts an Event about the same object for the same reason as a repetition, and keeps the first
        // note. With its resource version the object is another one whenever there is something new to tell.
        let regarding =
            ObjectReference { resource_version: deployment.resource_version(), ..deployment.object_ref(&()) };
        if let Err(error) = self.recorder.publish(event, &regarding).await {
            debug!(%error, "event was not published");
        }
    }

    async fn write_status(
        &self,
        deployment: &InferenceDeployment,
        status: &InferenceDeploymentStatus,
    ) -> kube::Result<()> {
        let api =
            Api::<InferenceDeployment>::namespaced(self.client.clone(), &deployment.namespace().unwrap_or_default());
        // The UID keeps the status of a deleted namesake from landing here, the version that of an operator which was
        // stopped for a while.
        let patch = json!({
            "apiVersion": InferenceDeployment::api_version(&()),
            "kind": InferenceDeployment::kind(&()),
            "metadata": {"uid": deployment.uid(), "resourceVersion": deployment.resource_version()},
            "status": status,
        });
        self.metrics.wrote("InferenceDeployment", "apply_status");
        let params = PatchParams::apply(FIELD_MANAGER).force();
        match api.patch_status(&deployment.name_any(), &params, &Patch::Apply(&patch)).await {
            // Deleted meanwhile.
            Err(kube::Error::Api(answer)) if answer.code == 404 => Ok(()),
            result => result.map(drop),
        }
    }
}

impl Decision {
    fn outlook(&self, observed: &Observed, applied: &Applied, now: Timestamp) -> Outlook {
        let Self { deployment, desired, plan, scaling, finding, fit, granted } = self;
        let (decision, finding, fit) = (scaling.as_ref(), finding.as_ref(), Some(fit));
        status_of(
            &Round { deployment, desired, observed, plan, applied, decision, finding, fit, granted: granted.as_ref() },
            now,
        )
    }

    /// The earliest moment at which time alone changes plan or status.
    fn next_look(&self, outlook: &Outlook, now: Timestamp, at_most: Option<Duration>) -> Action {
        let safety_net = at_most.unwrap_or(SAFETY_NET);
        let moments = [self.plan.pods.look_again, self.plan.standby.look_again, outlook.look_again];
        let wait = moments.into_iter().flatten().min().map(|moment| moment.duration_since(now));
        let wait = wait.map(|wait| Duration::try_from(wait).unwrap_or_default());
        Action::requeue(wait.map_or(safety_net, |wait| wait.min(safety_net)))
    }
}

fn invalid_status(error: &SpecError, observed: &Observed, now: Timestamp) -> InferenceDeploymentStatus {
    let deployment = &observed.deployment;
    let previous = deployment.status.clone().unwrap_or_default();
    status_of_invalid(error, deployment.metadata.generation, &previous, now)
}

/// Later each time a deployment fails in a row.
fn error_policy(deployment: Arc<InferenceDeployment>, error: &ReconcileError, context: Arc<Context>) -> Action {
    context.metrics.reconcile_errors.with_label_values(&[error.step()]).inc();
    if matches!(error, ReconcileError::Lint(_)) {
        error!(%error, name = deployment.name_any(), "not carried out");
    }
    let mut failures = context.failures.lock().unwrap_or_else(PoisonError::into_inner);
    let in_a_row = failures.entry(ObjectRef::from_obj(&*deployment)).or_default();
    *in_a_row = in_a_row.saturating_add(1);
    let pause = PAUSE.after(*in_a_row);
    failures.retain(|object, _| context.deployments.get(object).is_some());
    Action::requeue(pause)
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
