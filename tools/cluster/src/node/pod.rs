//! The life of one pod on this node: an address, volumes, containers, its status in the API server, and its removal when
//! all containers have ended. Writes only this pod's status, and only when it changed; repeats a write that failed.

use std::{fs, net::Ipv4Addr, sync::Arc, time::Duration};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, Pod, PodStatus};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, Patch, PatchParams, Preconditions},
};
use serde_json::json;
use tokio::{
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use super::{
    container::{ContainerLoop, Role, StopAt},
    context::{EventKind, NodeContext},
    gpus::GpusOfPod,
    status::{PodFacts, is_ready, says_ready, status_of},
    view::ContainerView,
    volumes::{VolumeDirs, VolumeMaker, mounts},
};

/// Between two tries of a write that failed, or of volumes that could not be made.
const RETRY: Duration = Duration::from_secs(1);
/// One write; an API server that hangs must not hang the node.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// What the API server says about a pod.
#[derive(Clone, Debug)]
pub(crate) enum PodUpdate {
    Present(Arc<Pod>),
    Gone,
}

/// Why a write did not happen.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum NotWritten {
    NotNow,
    /// The pod is no more: there is nothing to write to.
    Gone,
}

/// One pod's run.
pub(crate) struct PodRun {
    ctx: Arc<NodeContext>,
    pod: Arc<Pod>,
    updates: watch::Receiver<PodUpdate>,
    address: Ipv4Addr,
    gpus: Arc<GpusOfPod>,
    started_at: Timestamp,
    /// In the order of `spec.initContainers`.
    init_views: watch::Receiver<Vec<ContainerView>>,
    /// In the order of `spec.containers`.
    views: watch::Receiver<Vec<ContainerView>>,
    published: Option<Published>,
    state: ApiState,
}

/// What was written last, and which version of the pod that made.
struct Published {
    status: PodStatus,
    version: u64,
}

/// Where containers show what they do.
struct Shows {
    init: Arc<watch::Sender<Vec<ContainerView>>>,
    main: Arc<watch::Sender<Vec<ContainerView>>>,
}

/// Whether the API server knows what we know.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum ApiState {
    Current,
    Behind,
    Gone,
}

/// Runs the pod that `updates` show until it is gone.
pub(crate) async fn run_pod(ctx: Arc<NodeContext>, updates: watch::Receiver<PodUpdate>) {
    let PodUpdate::Present(pod) = updates.borrow().clone() else { return };
    let Some(address) = ctx.addresses.take() else {
        return ctx.event(
            &pod,
            EventKind::Warning,
            "FailedCreatePodSandBox",
            "the node has no free address".to_owned(),
        );
    };
    let gpus = Arc::new(ctx.gpus.take(&pod).await);
    if !gpus.uuids().is_empty() {
        ctx.event(&pod, EventKind::Normal, "GPUsAllocated", gpus.uuids().join(", "));
    }
    let dir = ctx.pod_dir(&pod);
    let n_init = init_containers(&pod).len();
    let n_containers = pod.spec.as_ref().map_or(0, |spec| spec.containers.len());
    let first = if n_init == 0 { ContainerView::creating() } else { ContainerView::initializing() };
    let (show_init, init_views) = watch::channel(vec![ContainerView::creating(); n_init]);
    let (show, views) = watch::channel(vec![first; n_containers]);
    let run = PodRun {
        ctx: Arc::clone(&ctx),
        pod,
        updates,
        address,
        gpus,
        started_at: Timestamp::now(),
        init_views,
        views,
        published: None,
        state: ApiState::Behind,
    };
    run.live(Shows { init: Arc::new(show_init), main: Arc::new(show) }).await;
    ctx.addresses.give_back(address);
    // A folder that does not go is removed with the node's.
    let _left = fs::remove_dir_all(dir);
}

impl PodRun {
    async fn live(mut self, shows: Shows) {
        if !self.is_over() {
            self.publish().await;
            if let Some(volumes) = self.make_volumes().await {
                self.run_containers(&shows, &volumes).await;
            }
        }
        self.leave().await;
    }

    /// The pod ran to its end on an earlier run of this node.
    fn is_over(&self) -> bool {
        let phase = self.pod.status.as_ref().and_then(|status| status.phase.as_deref());
        matches!(phase, Some("Succeeded" | "Failed"))
    }

    /// `None` when the pod was deleted before they could be made.
    async fn make_volumes(&mut self) -> Option<VolumeDirs> {
        let dir = self.ctx.pod_dir(&self.pod).join("volumes");
        while self.stop_at().is_none() {
            let place = self.ctx.place(self.address);
            let maker = VolumeMaker { client: &self.ctx.client, pod: &self.pod, place, dir: &dir };
            let made = fs::create_dir_all(&dir).map_err(|error| format!("create {}: {error}", dir.display()));
            let made = match made {
                Ok(()) => maker.make_all().await,
                Err(problem) => Err(problem),
            };
            match made {
                Ok(volumes) => return Some(volumes),
                Err(problem) => self.ctx.event(&self.pod, EventKind::Warning, "FailedMount", problem),
            }
            self.wait_for_update(RETRY).await;
        }
        None
    }

    /// One init container after the other, then the others together.
    async fn run_containers(&mut self, shows: &Shows, volumes: &VolumeDirs) {
        let (stop, stopped) = watch::channel(self.stop_at());
        let pod = self.pod.clone();
        for (container_idx, container) in init_containers(&pod).iter().enumerate() {
            let init = self.container_loop((Role::Init, container_idx, container), &shows.init, &stopped, volumes);
            self.supervise(JoinSet::from_iter([init.run()]), &stop).await;
            if !self.init_views.borrow()[container_idx].succeeded() {
                return;
            }
        }
        shows.main.send_modify(|views| views.fill(ContainerView::creating()));
        let containers = pod.spec.iter().flat_map(|spec| &spec.containers).enumerate();
        let containers = containers.map(|(idx, container)| {
            self.container_loop((Role::Main, idx, container), &shows.main, &stopped, volumes).run()
        });
        let containers = containers.collect();
        self.supervise(containers, &stop).await;
    }

    /// Hears the API server and shows what containers do until they have ended.
    async fn supervise(&mut self, mut containers: JoinSet<()>, stop: &watch::Sender<StopAt>) {
        while !containers.is_empty() {
            tokio::select! {
                Some(_) = containers.join_next() => {}
                Ok(()) = self.init_views.changed() => {}
                Ok(()) = self.views.changed() => {}
                Ok(()) = self.updates.changed() => {
                    self.hear();
                    let wanted = self.stop_at();
                    stop.send_if_modified(|at| bring_forward(at, wanted));
                }
                () = sleep(RETRY), if self.state == ApiState::Behind => {}
            }
            self.publish().await;
        }
    }

    fn container_loop(
        &self,
        (role, container_idx, container): (Role, usize, &Container),
        show: &Arc<watch::Sender<Vec<ContainerView>>>,
        stop: &watch::Receiver<StopAt>,
        volumes: &VolumeDirs,
    ) -> ContainerLoop {
        ContainerLoop {
            ctx: Arc::clone(&self.ctx),
            pod: Arc::clone(&self.pod),
            role,
            container_idx,
            container: container.clone(),
            address: self.address,
            gpus: Arc::clone(&self.gpus),
            mounts: mounts(container, volumes),
            dir: self.ctx.pod_dir(&self.pod),
            views: Arc::clone(show),
            stop: stop.clone(),
            view: ContainerView::creating(),
        }
    }

    /// Writes the last status, waits for the deletion if nobody asked for it yet, and lets the API server forget the pod.
    async fn leave(&mut self) {
        while self.state == ApiState::Behind {
            self.wait_for_update(RETRY).await;
            self.publish().await;
        }
        while self.state != ApiState::Gone && self.stop_at().is_none() {
            self.wait_for_update(Duration::MAX).await;
        }
        while self.state != ApiState::Gone && self.delete().await == Err(NotWritten::NotNow) {
            self.wait_for_update(RETRY).await;
        }
    }

    async fn wait_for_update(&mut self, at_most: Duration) {
        // Both ends of the wait are good: an update, or time for another try.
        if let Ok(Ok(())) = timeout(at_most, self.updates.changed()).await {
            self.hear();
        }
    }

    fn hear(&mut self) {
        match &*self.updates.borrow_and_update() {
            PodUpdate::Present(pod) => self.pod = Arc::clone(pod),
            PodUpdate::Gone => self.state = ApiState::Gone,
        }
    }

    /// When the containers must be gone, if they must.
    fn stop_at(&self) -> StopAt {
        if self.state == ApiState::Gone {
            return Some(Instant::now());
        }
        self.pod.metadata.deletion_timestamp.as_ref()?;
        let seconds = self.pod.metadata.deletion_grace_period_seconds.unwrap_or(0);
        Some(Instant::now() + Duration::from_secs(u64::try_from(seconds).unwrap_or(0)))
    }

    async fn publish(&mut self) {
        let init_views = self.init_views.borrow_and_update().clone();
        let views = self.views.borrow_and_update().clone();
        let facts = PodFacts {
            host: self.ctx.host,
            address: self.address,
            node: &self.ctx.name,
            started_at: self.started_at,
            init_views: &init_views,
            views: &views,
            now: Timestamp::now(),
        };
        let status = status_of(&self.pod, &facts);
        if self.state == ApiState::Gone
            || self.published.as_ref().is_some_and(|published| published.still_says(&status, &self.pod))
        {
            return;
        }
        self.state = match self.write_status(&status).await {
            Ok(version) => {
                self.published = Some(Published { status, version });
                ApiState::Current
            }
            Err(NotWritten::NotNow) => ApiState::Behind,
            Err(NotWritten::Gone) => ApiState::Gone,
        };
    }

    /// The version of the pod after the write.
    async fn write_status(&self, status: &PodStatus) -> Result<u64, NotWritten> {
        self.ctx.speaking().await;
        // The uid makes the write fail when another pod has taken the name.
        let patch = json!({"metadata": {"uid": self.pod.uid()}, "status": status});
        let (api, name) = (self.api(), self.pod.name_any());
        let (params, patch) = (PatchParams::default(), Patch::Merge(&patch));
        let pod = written(timeout(WRITE_TIMEOUT, api.patch_status(&name, &params, &patch)).await, &name)?;
        Ok(version(&pod))
    }

    async fn delete(&self) -> Result<(), NotWritten> {
        self.ctx.speaking().await;
        let preconditions = Preconditions { uid: self.pod.uid(), resource_version: None };
        let params =
            DeleteParams { grace_period_seconds: Some(0), preconditions: Some(preconditions), ..Default::default() };
        let (api, name) = (self.api(), self.pod.name_any());
        written(timeout(WRITE_TIMEOUT, api.delete(&name, &params)).await, &name).map(drop)
    }

    fn api(&self) -> Api<Pod> {
        Api::namespaced(self.ctx.client.clone(), &self.pod.namespace().unwrap_or_default())
    }
}

impl Published {
    /// Whether it says `status`, and nobody has said otherwise since: when a node falls silent, the node lifecycle
    /// controller marks its pods as not ready, and leaves it to the node to take that back.
    fn still_says(&self, status: &PodStatus, seen: &Pod) -> bool {
        let overwritten = version(seen) > self.version && is_ready(seen) != says_ready(status);
        same(&self.status, status) && !overwritten
    }
}

/// Resource versions of one kind of object are numbers that grow.
fn version(pod: &Pod) -> u64 {
    pod.resource_version().and_then(|version| version.parse().ok()).unwrap_or(0)
}

fn written<T>(answer: Result<kube::Result<T>, tokio::time::error::Elapsed>, name: &str) -> Result<T, NotWritten> {
    match answer {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(kube::Error::Api(status))) if status.code == 404 || is_other_uid(&status.message) => {
            Err(NotWritten::Gone)
        }
        Ok(Err(error)) => {
            tracing::warn!(pod = name, %error, "the API server did not take a write; trying again");
            Err(NotWritten::NotNow)
        }
        Err(_) => Err(NotWritten::NotNow),
    }
}

/// A conflict has many causes; only this one says that the name belongs to another pod now.
fn is_other_uid(message: &str) -> bool {
    message.contains("UID in precondition")
}

/// Whether `at` changes to the earlier of both.
fn bring_forward(at: &mut StopAt, wanted: StopAt) -> bool {
    let earlier = wanted.is_some_and(|wanted| at.is_none_or(|at| wanted < at));
    if earlier {
        *at = wanted;
    }
    earlier
}

fn init_containers(pod: &Pod) -> &[Container] {
    pod.spec.as_ref().and_then(|spec| spec.init_containers.as_deref()).unwrap_or_default()
}

/// Equal but for the moment of the last change: a status is not written again because time has passed.
fn same(one: &PodStatus, other: &PodStatus) -> bool {
    let timeless = |status: &PodStatus| {
        let mut status = status.clone();
        status.conditions.iter_mut().flatten().for_each(|condition| condition.last_transition_time = None);
        status
    };
    timeless(one) == timeless(other)
}
