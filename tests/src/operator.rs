//! A cluster with a node and the operator in it, for tests and benchmarks of the control plane: everything real but the
//! engine. Agents are stand-ins, so that tests say what an agent does.

use std::{
    fs::{self, File},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::{
    api::{
        core::v1::{ConfigMap, Namespace, Pod, Service},
        rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding},
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, Client, Config, ResourceExt,
    api::{ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams, ValidationDirective},
    config::{KubeConfigOptions, Kubeconfig},
};
use serde_json::{Value, json};
use stoker_cluster::{
    Audit, ControlPlane, ControlPlaneOptions, Controllers, Identity, Keeper, NodeOptions, ProcessNode, is_running,
};
use stoker_crds::{InferenceDeployment, scaling_status::RECORDS_PATH};
use stoker_operator::{
    desired::config_map_name,
    observe,
    revision::revision,
    validate::{Defaults, validate},
};
use stoker_scaling::DecisionRecord;
use tokio::{runtime::Runtime, task::JoinHandle};

use crate::{
    cluster::{TestCluster, Waited, lendable},
    gateway::GatewayProcess,
    process::busy_seconds,
};

/// The image that deployments get by default: the stand-in agent.
pub const AGENT_IMAGE: &str = "stand-in/agent:1";
/// Namespace of the tests' deployments.
pub const NAMESPACE: &str = "default";
/// Namespace of the operator's Lease.
const OPERATOR_NAMESPACE: &str = "stoker-system";
const POLL: Duration = Duration::from_millis(50);

/// A cluster with an operator. Everything stops when it is dropped.
pub struct Rig {
    /// The operator's process.
    pub operator: Operator,
    /// Control plane, node and Service proxy, with their faults.
    pub cluster: TestCluster,
    client: Client,
    runtime: Runtime,
}

impl Rig {
    /// Starts everything and waits until the CRD can be used.
    pub fn start(audit: Audit) -> Result<Self> {
        let options = ControlPlaneOptions { controllers: Controllers::all(), audit, ..ControlPlaneOptions::default() };
        Self::start_with(options, NodeOptions::default())
    }

    /// The same with another control plane and node.
    pub fn start_with(options: ControlPlaneOptions, node: NodeOptions) -> Result<Self> {
        Self::on(TestCluster::start_with(ControlPlaneOptions { kinds: kinds(), ..options }, node))
    }

    /// With a control plane whose servers a test stops, or that other kinds and webhooks come to.
    pub fn start_own(node: NodeOptions) -> Result<Self> {
        Self::on(TestCluster::start_own(lendable(), node)?)
    }

    fn on(cluster: TestCluster) -> Result<Self> {
        cluster.node.add_image(AGENT_IMAGE, program("stand-in-agent")?);
        let runtime = Runtime::new()?;
        let client = runtime.block_on(client_of(&cluster.control_plane.kubeconfig_path()))?;
        runtime.block_on(prepare(&client))?;
        let operator = Operator::start(&cluster.control_plane)?;
        Ok(Self { operator, cluster, client, runtime })
    }

    /// Another node.
    pub fn add_node(&self, options: NodeOptions) -> Result<ProcessNode> {
        let node = ProcessNode::start(&self.cluster.control_plane, options)?;
        node.add_image(AGENT_IMAGE, program("stand-in-agent")?);
        Ok(node)
    }

    /// Creates or changes a deployment, as `kubectl apply --server-side` does.
    pub fn apply(&self, name: &str, spec: Value) -> Result<()> {
        self.try_apply(name, spec)?;
        Ok(())
    }

    /// The same; the spec that is stored then, or why none is.
    pub fn try_apply(&self, name: &str, spec: Value) -> kube::Result<Value> {
        let kind = ApiResource::erase::<InferenceDeployment>(&());
        let deployments = Api::<DynamicObject>::namespaced_with(self.client.clone(), NAMESPACE, &kind);
        let stored =
            self.runtime.block_on(deployments.patch(name, &strictly_applying(), &Patch::Apply(object(name, spec))))?;
        Ok(stored.data["spec"].clone())
    }

    /// Scales through the scale subresource.
    pub fn scale(&self, name: &str, replicas: i32) -> Result<()> {
        let patch = Patch::Merge(json!({"spec": {"replicas": replicas}}));
        self.runtime.block_on(self.deployments().patch_scale(name, &PatchParams::default(), &patch))?;
        Ok(())
    }

    /// Causes a round: an annotation that means nothing changes.
    pub fn nudge(&self, name: &str) -> Result<()> {
        let patch = Patch::Merge(json!({"metadata": {"annotations": {"nudge": jiff::Timestamp::now().to_string()}}}));
        self.runtime.block_on(self.deployments().patch(name, &PatchParams::default(), &patch))?;
        Ok(())
    }

    /// Deletes a deployment; its children are the garbage collector's.
    pub fn delete(&self, name: &str) -> Result<()> {
        self.runtime.block_on(self.deployments().delete(name, &DeleteParams::default()))?;
        Ok(())
    }

    /// Deletes a pod, as `kubectl delete pod` does.
    pub fn delete_pod(&self, name: &str) -> Result<()> {
        self.runtime.block_on(self.api::<Pod>().delete(name, &DeleteParams::default()))?;
        Ok(())
    }

    /// The deployment as it is now.
    pub fn get(&self, name: &str) -> Result<InferenceDeployment> {
        Ok(self.runtime.block_on(self.deployments().get(name))?)
    }

    /// Pods of a deployment, those being deleted included, by name.
    pub fn pods(&self, name: &str) -> Result<Vec<Pod>> {
        let found = self.runtime.block_on(self.api::<Pod>().list(&of(name)))?;
        Ok(found.items)
    }

    /// ConfigMaps with the configurations of a deployment's revisions.
    pub fn config_maps(&self, name: &str) -> Result<Vec<ConfigMap>> {
        let revisions = ListParams::default().labels(&format!("app.kubernetes.io/instance={name},stoker.dev/revision"));
        Ok(self.runtime.block_on(self.api::<ConfigMap>().list(&revisions))?.items)
    }

    /// Everything in the namespace that carries the deployment's name.
    pub fn children(&self, name: &str) -> Result<usize> {
        let services = self.runtime.block_on(self.api::<Service>().list(&of(name)))?.items.len();
        let config_maps = self.runtime.block_on(self.api::<ConfigMap>().list(&of(name)))?.items.len();
        Ok(self.pods(name)?.len() + config_maps + services)
    }

    /// The deployment's Service.
    pub fn service(&self, name: &str) -> Result<Service> {
        Ok(self.runtime.block_on(self.api::<Service>().get(name))?)
    }

    /// A client with all rights.
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// Lets something go on beside the test.
    pub fn spawn<T: Send + 'static>(&self, future: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
        self.runtime.spawn(future)
    }

    /// A gateway that the operator finds by its [`slice`](GatewayProcess::slice), as only one does.
    pub fn led_gateway(&self, args: &[&str]) -> Result<GatewayProcess> {
        let url = self.cluster.control_plane.url();
        let address: SocketAddr = url.trim_start_matches("https://").parse()?;
        GatewayProcess::start_led(&self.operator.url(), address.ip(), args)
    }

    /// Runs a future on the rig's runtime.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.runtime.block_on(future)
    }

    /// An API with all rights.
    pub fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    fn deployments(&self) -> Api<InferenceDeployment> {
        self.api()
    }

    /// Waits until `holds` is true; errors of it count as not yet. Fails with the state it was left in.
    pub fn wait(&self, what: &str, limit: Duration, mut holds: impl FnMut(&Self) -> Result<bool>) -> Result<Duration> {
        let started = Instant::now();
        loop {
            let looked = Instant::now();
            let outcome = holds(self);
            match outcome {
                Ok(true) => return Ok(started.elapsed()),
                _ if started.elapsed() < limit => {
                    let waited = Waited { look: looked.elapsed(), in_all: started.elapsed() };
                    std::thread::sleep(waited.pause(POLL));
                }
                Ok(false) => bail!("{what}: not within {limit:?}\n{}", self.describe()),
                Err(error) => return Err(error.context(format!("{what}: not within {limit:?}"))),
            }
        }
    }

    /// Waits until a deployment is ready for its own generation.
    pub fn wait_ready(&self, name: &str, limit: Duration) -> Result<Duration> {
        self.wait(&format!("{name} is ready"), limit, |rig| Ok(is_ready(&rig.get(name)?)))
    }

    /// Waits for the end state of an undisturbed deployment: what was accepted last, and nothing else.
    pub fn ends_as_asked(&self, name: &str, spec: &Value, limit: Duration) -> Result<()> {
        let replicas = usize::try_from(spec["replicas"].as_u64().context("a number")?)?;
        self.wait(&format!("{name} settles"), limit, |rig| {
            let pods = rig.pods(name)?;
            // A Service that was deleted a moment ago may not be there yet.
            let selector = rig.service(name)?.spec.and_then(|service| service.selector).unwrap_or_default();
            let is_selected = |pod: &Pod| selector.iter().all(|(key, value)| pod.labels().get(key) == Some(value));
            Ok(is_ready(&rig.get(name)?)
                && pods.len() == replicas
                && pods.iter().all(|pod| serves(pod) && is_selected(pod))
                && rig.keeps_what_it_says(name)?)
        })?;
        let deployment = self.get(name)?;
        let stored = serde_json::to_value(&deployment.spec)?;
        ensure!(
            stored["engine"] == spec["engine"] && stored["drain"] == spec["drain"],
            "{name}: {stored} is not {spec}"
        );
        let defaults = Defaults { agent_image: AGENT_IMAGE.to_owned(), ..Defaults::default() };
        let undisturbed = revision(&validate(&deployment, &defaults)?.replica);
        for pod in self.pods(name)? {
            ensure!(revision_of(&pod) == undisturbed, "{}: not of revision {undisturbed}", pod.name_any());
            ensure!(intent_of(&pod).is_none_or(|(_, drains)| !drains), "{}: still draining", pod.name_any());
        }
        Ok(())
    }

    /// Whether there are the configuration of the revision that serves and of older ones that the status names, no more of them than
    /// are kept, and no others.
    fn keeps_what_it_says(&self, name: &str) -> Result<bool> {
        const KEPT: usize = 3;
        let status = self.get(name)?.status.unwrap_or_default();
        let revisions = status.rollout.map(|rollout| rollout.revisions).unwrap_or_default();
        let named: Vec<String> = revisions.iter().map(|entry| config_map_name(name, &entry.revision)).collect();
        let there: Vec<String> = self.config_maps(name)?.iter().map(ResourceExt::name_any).collect();
        let serving = config_map_name(name, &status.revision);
        Ok(named.len() <= KEPT + 1 && there.contains(&serving) && there.iter().all(|map| named.contains(map)))
    }

    /// What there is, for failures.
    fn describe(&self) -> String {
        let kubectl = |args: &[&str]| {
            let output = self.cluster.control_plane.kubectl().ok()?.args(args).output().ok()?;
            Some(String::from_utf8_lossy(&output.stdout).into_owned())
        };
        let objects = kubectl(&["get", "infd,pods,services,configmaps", "-A", "-o", "wide"]).unwrap_or_default();
        format!("{objects}\noperator's last words:\n{}", self.operator.last_words())
    }
}

/// True when the deployment's status says ready, about the generation that it has.
pub fn is_ready(deployment: &InferenceDeployment) -> bool {
    let generation = deployment.metadata.generation;
    condition(deployment, "Ready").is_some_and(|(status, _, _)| status == "True")
        && deployment.status.as_ref().is_some_and(|status| status.observed_generation == generation)
}

/// Status, reason and message of a condition.
pub fn condition(deployment: &InferenceDeployment, type_: &str) -> Option<(String, String, String)> {
    let conditions = &deployment.status.as_ref()?.conditions;
    let found = conditions.iter().find(|condition| condition.type_ == type_)?;
    Some((found.status.clone(), found.reason.clone(), found.message.clone()))
}

/// True when requests reach the pod.
pub fn serves(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.clone()).unwrap_or_default();
    pod.metadata.deletion_timestamp.is_none()
        && conditions.iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// What the operator wants of the replica in the pod: its number and whether it drains.
pub fn intent_of(pod: &Pod) -> Option<(u64, bool)> {
    let intent = observe::intent_of(pod)?;
    Some((intent.number, intent.drain_since().is_some()))
}

/// A pod's revision.
pub fn revision_of(pod: &Pod) -> String {
    pod.labels().get("stoker.dev/revision").cloned().unwrap_or_default()
}

/// The operator as a process, with a rights-limited identity. Killed when dropped.
pub struct Operator {
    child: Option<Child>,
    /// Kills the process when this one is killed.
    keeper: Arc<Keeper>,
    kubeconfig: PathBuf,
    log: PathBuf,
    port: u16,
    /// What deployments get that name no image.
    agent_image: String,
    /// Arguments beside those that every test gives.
    more: Vec<String>,
    /// Environment variables beside those of the test.
    environment: Vec<(String, String)>,
}

impl Operator {
    /// Starts an operator beside those that run.
    pub fn start(control_plane: &ControlPlane) -> Result<Self> {
        Self::start_with(control_plane, control_plane.kubeconfig_of(Identity::Operator))
    }

    /// The same, led to the API server by another file.
    pub fn start_with(control_plane: &ControlPlane, kubeconfig: PathBuf) -> Result<Self> {
        let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let log = control_plane.dir().join(format!("operator-{port}.log"));
        let keeper = control_plane.keeper().clone();
        let agent_image = AGENT_IMAGE.to_owned();
        let mut operator =
            Self { child: None, keeper, kubeconfig, log, port, agent_image, more: Vec::new(), environment: Vec::new() };
        operator.restart()?;
        Ok(operator)
    }

    /// Starts the process, if it does not run.
    pub fn restart(&mut self) -> Result<()> {
        if self.is_running() {
            return Ok(());
        }
        // Its port is free once all of it has ended.
        self.child.as_mut().map(Child::wait).transpose()?;
        let log = File::options().create(true).append(true).open(&self.log)?;
        let child = self
            .keeper
            .command(&program("stoker-operator")?)?
            .arg("--kubeconfig")
            .arg(&self.kubeconfig)
            .args(["--agent-image", &self.agent_image, "--lease-namespace", OPERATOR_NAMESPACE])
            .args(["--listen", &format!("127.0.0.1:{}", self.port)])
            // As a container that restarts in its pod: it finds its own Lease.
            .args(["--identity", &self.identity()])
            .args(&self.more)
            .envs(self.environment.iter().cloned())
            .stderr(log)
            .stdout(Stdio::null())
            .spawn()
            .context("start the operator")?;
        self.child = Some(child);
        Ok(())
    }

    /// Ends the process and starts it again, with these arguments beside the usual ones.
    pub fn restart_with(&mut self, more: &[&str]) -> Result<()> {
        self.kill()?;
        self.more = more.iter().map(|&argument| argument.to_owned()).collect();
        self.restart()
    }

    /// Ends the process and starts it again with another image for agents, as an upgrade of the chart does.
    pub fn upgrade(&mut self, agent_image: &str) -> Result<()> {
        self.terminate()?;
        self.wait_for_end(Duration::from_secs(40))?;
        self.agent_image = agent_image.to_owned();
        self.restart()
    }

    /// Ends the process and starts it again, with these variables in its environment.
    pub fn restart_in(&mut self, environment: &[(&str, String)]) -> Result<()> {
        self.kill()?;
        self.environment = environment.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
        self.restart()
    }

    /// Its name in Lease and audit log.
    pub fn identity(&self) -> String {
        format!("operator-{}", self.port)
    }

    /// The process, while it runs.
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// True while the process lives. One whose memory is gone is dying, though some of its threads may have to be waited for.
    pub fn is_running(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)) && is_running(child.id()))
    }

    /// SIGKILL.
    pub fn kill(&mut self) -> Result<()> {
        if let Some(mut child) = self.child.take() {
            child.kill()?;
            child.wait()?;
            self.keeper.forget(child.id());
        }
        Ok(())
    }

    /// SIGTERM.
    pub fn terminate(&self) -> Result<()> {
        self.signal("TERM")
    }

    /// SIGSTOP.
    pub fn freeze(&self) -> Result<()> {
        self.signal("STOP")
    }

    /// SIGCONT.
    pub fn thaw(&self) -> Result<()> {
        self.signal("CONT")
    }

    fn signal(&self, signal: &str) -> Result<()> {
        let pid = self.child.as_ref().context("the operator does not run")?.id().to_string();
        ensure!(Command::new("kill").args(["-s", signal, &pid]).status()?.success(), "cannot signal the operator");
        Ok(())
    }

    /// Its exit code once it has ended by itself.
    pub fn wait_for_end(&mut self, limit: Duration) -> Result<Option<i32>> {
        let started = Instant::now();
        while self.is_running() {
            ensure!(started.elapsed() < limit, "the operator still runs\n{}", self.last_words());
            std::thread::sleep(POLL);
        }
        let mut child = self.child.take().context("the operator does not run")?;
        self.keeper.forget(child.id());
        Ok(child.wait()?.code())
    }

    /// Its URL without a path.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// The text of `/metrics`.
    pub fn metrics(&self) -> Result<String> {
        get(&format!("{}/metrics", self.url()))
    }

    /// Whether it says that it leads.
    pub fn leads(&self) -> bool {
        self.metrics().is_ok_and(|text| text.lines().any(|line| line == "stoker_operator_leader 1"))
    }

    /// Full records of the decisions about a deployment, made after a Unix time in milliseconds.
    pub fn records(&self, name: &str, after_ms: u64) -> Result<Vec<DecisionRecord>> {
        let path = format!("{RECORDS_PATH}/{NAMESPACE}/{name}?after={after_ms}");
        let text = get(&format!("{}{path}", self.url()))?;
        text.lines().map(|line| Ok(DecisionRecord::parse(line)?)).collect()
    }

    /// Processor time that it took so far.
    pub fn cpu_seconds(&self) -> Result<f64> {
        busy_seconds(self.child.as_ref().context("the operator does not run")?.id())
    }

    /// Resident memory in MB.
    pub fn rss_mb(&self) -> Result<f64> {
        let pid = self.child.as_ref().context("the operator does not run")?.id();
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
        let kib: f64 = line.trim().trim_end_matches(" kB").trim().parse()?;
        Ok(kib * 1024.0 / 1e6)
    }

    /// The end of its log.
    pub fn last_words(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }
}

impl Drop for Operator {
    fn drop(&mut self) {
        // Nothing is left to do about a process that cannot be killed.
        let _ = self.kill();
    }
}

/// A GET with curl: the tests' own HTTP must not share bugs with what they test.
pub fn get(url: &str) -> Result<String> {
    let output = Command::new("curl").args(["-sS", "--max-time", "5", url]).output().context("run curl")?;
    ensure!(output.status.success(), "GET {url}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A program of this workspace: the operator that `$STOKER_OPERATOR_BIN` names, or what was built beside the running program.
fn program(name: &str) -> Result<PathBuf> {
    let named = (name == "stoker-operator").then(|| std::env::var_os("STOKER_OPERATOR_BIN")).flatten();
    if let Some(path) = named {
        return Ok(path.into());
    }
    let own = std::env::current_exe()?;
    let folders = own.ancestors().skip(1).take(2);
    let found = folders.map(|folder| folder.join(name)).find(|path| path.is_file());
    found.with_context(|| {
        format!("{name} is not built; build it with: cargo build -p stoker-operator -p stoker-tests --bins")
    })
}

/// A client with the rights of a kubeconfig.
pub async fn client_of(kubeconfig: &Path) -> Result<Client> {
    let file = Kubeconfig::read_from(kubeconfig)?;
    Ok(Client::try_from(Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?)?)
}

/// The kinds of ours that an operator needs.
pub fn kinds() -> Vec<CustomResourceDefinition> {
    vec![stoker_crds::crd::crd(), stoker_crds::crd::budget_crd()]
}

/// Gives the operator the chart's rights, and waits until our kinds can be used.
pub async fn prepare(client: &Client) -> Result<()> {
    let namespace: Namespace = serde_json::from_value(json!({"metadata": {"name": OPERATOR_NAMESPACE}}))?;
    Api::<Namespace>::all(client.clone()).create(&PostParams::default(), &namespace).await?;
    grant(client).await?;
    let deployments = Api::<InferenceDeployment>::namespaced(client.clone(), NAMESPACE);
    while deployments.list(&ListParams::default()).await.is_err() {
        tokio::time::sleep(POLL).await;
    }
    Ok(())
}

/// Gives the operator the rights that the chart gives it, and no other.
async fn grant(client: &Client) -> Result<()> {
    let subject = json!({"kind": "ServiceAccount", "name": "stoker-operator", "namespace": OPERATOR_NAMESPACE});
    let own = json!([
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update"]},
        {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get", "create"]},
    ]);
    let metadata = json!({"name": "stoker-operator"});
    let role: ClusterRole = serde_json::from_value(json!({"metadata": metadata, "rules": chart_rules()?}))?;
    let own: Role = serde_json::from_value(json!({"metadata": metadata, "rules": own}))?;
    let own_binding: RoleBinding = serde_json::from_value(json!({
        "metadata": metadata,
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "stoker-operator"},
        "subjects": [subject],
    }))?;
    let binding: ClusterRoleBinding = serde_json::from_value(json!({
        "metadata": {"name": "stoker-operator"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "stoker-operator"},
        "subjects": [subject],
    }))?;
    Api::<ClusterRole>::all(client.clone()).create(&PostParams::default(), &role).await?;
    Api::<ClusterRoleBinding>::all(client.clone()).create(&PostParams::default(), &binding).await?;
    let (roles, bindings) =
        (Api::namespaced(client.clone(), OPERATOR_NAMESPACE), Api::namespaced(client.clone(), OPERATOR_NAMESPACE));
    roles.create(&PostParams::default(), &own).await?;
    bindings.create(&PostParams::default(), &own_binding).await?;
    Ok(())
}

/// The rules in the chart's helper `stoker.rules`: plain YAML between its define and its end.
fn chart_rules() -> Result<Vec<Value>> {
    let helpers = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../charts/stoker/templates/_helpers.tpl"))?;
    let (_, rest) = helpers.split_once("{{- define \"stoker.rules\" -}}").context("the chart has rules")?;
    let (rules, _) = rest.split_once("{{- end }}").context("the rules end")?;
    Ok(serde_norway::from_str(rules)?)
}

fn object(name: &str, spec: Value) -> Value {
    json!({"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "metadata": {"name": name}, "spec": spec})
}

fn strictly_applying() -> PatchParams {
    let field_validation = Some(ValidationDirective::Strict);
    PatchParams { field_validation, ..PatchParams::apply("test").force() }
}

fn of(name: &str) -> ListParams {
    ListParams::default().labels(&format!("app.kubernetes.io/instance={name}"))
}
