//! etcd, kube-apiserver and, on demand, kube-controller-manager and kube-scheduler on loopback addresses of their own.
//!
//! Owns their processes, their folder and their addresses; all three are gone when it is dropped, and also when the
//! process that owns it is killed (see [`crate::keeper`]). Needs no root and touches nothing outside its folder. Never
//! talks about nodes or pods.
//!
//! Another process may use one for a while ([`ControlPlane::borrow`]), and its owner makes it as new after that
//! ([`ControlPlane::restore`]).

use std::{
    fs,
    path::{Path, PathBuf, absolute},
    process::Command,
    sync::Arc,
    thread::sleep,
    time::{Duration, Instant},
};

use http::Request;
use k8s_openapi::{
    api::core::v1::ServiceAccount, apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{Api, Client, Config, config::KubeConfigOptions, config::Kubeconfig};
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use crate::{
    baseline::Baseline,
    binaries::Binaries,
    blocking::block_on,
    component::{Component, ComponentSpec},
    credentials::{Credentials, Identity},
    error::ClusterError,
    keeper::Keeper,
    kinds,
    servers::{Servers, flag},
    slot::Slot,
};

/// Long enough for two busy cores; a healthy start takes about 3 s.
const READY_TIMEOUT: Duration = Duration::from_secs(90);
/// One look at a server that may hang.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Which control plane to start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ControlPlaneOptions {
    /// What runs beside etcd and the API server.
    pub controllers: Controllers,
    /// Whether every request is written to [`ControlPlane::audit_log`].
    pub audit: Audit,
    /// Where data, credentials and logs go. It is removed in the end. Default: a new temporary folder.
    pub dir: Option<PathBuf>,
    /// Addresses of Services. Default: 254 that no other cluster on this machine has.
    pub services: Option<String>,
    /// Kinds beside Kubernetes' own. The garbage collector looks for new ones every 30 s, but at its start at once: these are there before.
    pub kinds: Vec<CustomResourceDefinition>,
    /// APIs that the API server does not serve, as those of older releases do not, such as `resource.k8s.io/v1`. Controllers may need them.
    pub without: Vec<String>,
    /// Controllers of the controller manager that do nothing, such as `garbage-collector-controller`.
    pub idle: Vec<String>,
}

/// What runs beside etcd and the API server.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Controllers {
    /// Nothing: objects are stored and validated, and that is all. Pods need no service account then.
    #[default]
    None,
    /// The controller manager and the scheduler. Nodes that fall silent become NotReady after this long.
    All {
        /// kubelet renews every 10 s and Kubernetes' default is 40 s; fault tests want less.
        node_grace: Duration,
    },
}

impl Controllers {
    /// All controllers, with the node grace period of a stock cluster.
    pub fn all() -> Self {
        Self::All { node_grace: Duration::from_secs(40) }
    }
}

/// Whether requests are recorded.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Audit {
    /// Not recorded.
    #[default]
    Off,
    /// One JSON line a request: user, verb, object, status.
    Metadata,
}

/// A running control plane. Dropping it stops everything that it started.
#[derive(Debug)]
pub struct ControlPlane {
    /// `None`: they are somebody else's, who lends them.
    servers: Option<Running>,
    credentials: Credentials,
    slot: Slot,
    keeper: Arc<Keeper>,
    binaries: Binaries,
    dir: Dir,
}

/// The servers that were started.
#[derive(Debug)]
struct Running {
    // In the order of their end: without etcd an API server takes half a minute to stop.
    scheduler: Option<Component>,
    controller_manager: Option<Component>,
    apiserver: Component,
    etcd: Component,
}

/// What another process needs to use a control plane that was lent to it.
#[derive(Debug, Deserialize, Serialize)]
struct Lease {
    dir: PathBuf,
    slot: u8,
}

impl ControlPlane {
    /// Starts everything `options` ask for and waits until it is ready.
    pub fn start(options: ControlPlaneOptions) -> Result<Self, ClusterError> {
        let binaries = Binaries::find();
        let keeper = Arc::new(Keeper::start().map_err(ClusterError::process("start", "keeper"))?);
        let dir = Dir::create(options.dir.as_deref())?;
        keeper.remove_at_end(dir.path());
        let slot = Slot::claim()?;
        let mut addresses = slot.addresses();
        addresses.service_range = options.services.clone().unwrap_or(addresses.service_range);
        let credentials = Credentials::create(&credentials_dir(dir.path()), &addresses)?;
        let servers = Servers { dir: dir.path(), addresses: &addresses, credentials: &credentials };
        let layout = Layout { binaries: &binaries, servers };
        let etcd = Component::start(layout.etcd()?, &keeper)?;
        let apiserver = Component::start(layout.apiserver(&options)?, &keeper)?;
        let specs = layout.controllers(&options)?;
        let mut servers = Running { scheduler: None, controller_manager: None, apiserver, etcd };
        let kubeconfig = credentials.kubeconfig(Identity::Admin);
        servers.wait_until_ready(&kubeconfig)?;
        servers.make_kinds(&kubeconfig, &options.kinds)?;
        if let Some((controller_manager, scheduler)) = specs {
            servers.controller_manager = Some(Component::start(controller_manager, &keeper)?);
            servers.scheduler = Some(Component::start(scheduler, &keeper)?);
            servers.wait_for_service_account(&kubeconfig)?;
        }
        Ok(Self { servers: Some(servers), credentials, slot, keeper, binaries, dir })
    }

    /// Words by which another process [borrows](Self::borrow) it.
    pub fn lease(&self) -> String {
        let lease = Lease { dir: self.dir().to_owned(), slot: self.slot.number() };
        serde_json::to_string(&lease).expect("a path of ours is text")
    }

    /// The one that another process [lends](Self::lease). That one looks after its servers: they cannot be stopped here.
    pub fn borrow(lease: &str) -> Result<Self, ClusterError> {
        let Lease { dir, slot } = serde_json::from_str(lease).map_err(ClusterError::Lease)?;
        let keeper = Arc::new(Keeper::start().map_err(ClusterError::process("start", "keeper"))?);
        let credentials = Credentials::open(&credentials_dir(&dir))?;
        let dir = Dir::create(None)?;
        keeper.remove_at_end(dir.path());
        Ok(Self { servers: None, credentials, slot: Slot::lent(slot), keeper, binaries: Binaries::find(), dir })
    }

    /// What it holds now, to come [back](Self::restore) to.
    pub fn baseline(&self) -> Result<Baseline, ClusterError> {
        block_on(Baseline::of(self.slot.addresses().etcd_client, READY_TIMEOUT))
    }

    /// Makes it hold what it held, and nothing else. Whoever used it must be gone.
    pub fn restore(&mut self, baseline: &mut Baseline) -> Result<(), ClusterError> {
        block_on(baseline.restore(READY_TIMEOUT))?;
        let kubeconfig = self.kubeconfig_path();
        self.own_servers().wait_until_ready(&kubeconfig)
    }

    /// A kubeconfig with all rights.
    pub fn kubeconfig_path(&self) -> PathBuf {
        self.credentials.kubeconfig(Identity::Admin)
    }

    /// A kubeconfig of `who`.
    pub fn kubeconfig_of(&self, who: Identity) -> PathBuf {
        self.credentials.kubeconfig(who)
    }

    /// Where the API server listens.
    pub fn url(&self) -> String {
        format!("https://{}", self.slot.addresses().api)
    }

    /// The administrator's bearer token.
    pub fn token(&self) -> &str {
        self.credentials.token(Identity::Admin)
    }

    /// Where data, credentials and logs are.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The log of one component that it started: `etcd`, `kube-apiserver`, `kube-controller-manager` or `kube-scheduler`.
    pub fn log_path(&self, component: &str) -> PathBuf {
        log_path(self.dir(), component)
    }

    /// One JSON line a request, when [`Audit::Metadata`] was asked for.
    pub fn audit_log(&self) -> PathBuf {
        self.dir().join("audit.log")
    }

    /// The keeper of everything that belongs to this cluster.
    pub fn keeper(&self) -> &Arc<Keeper> {
        &self.keeper
    }

    /// The binaries in use.
    pub fn binaries(&self) -> &Binaries {
        &self.binaries
    }

    pub(crate) fn slot(&self) -> &Slot {
        &self.slot
    }

    /// `kubectl` as administrator. Its discovery cache lies in the cluster's folder.
    pub fn kubectl(&self) -> Result<Command, ClusterError> {
        let mut command = Command::new(self.binaries.path("kubectl")?);
        command.env("KUBECONFIG", self.kubeconfig_path()).env("KUBECACHEDIR", self.dir().join("kubectl-cache"));
        Ok(command)
    }

    /// The client configuration of `who`, for kube.
    pub async fn config_of(&self, who: Identity) -> Result<Config, ClusterError> {
        read_config(&self.kubeconfig_of(who)).await
    }

    /// A client with all rights.
    pub async fn client(&self) -> Result<Client, ClusterError> {
        client_of(self.config_of(Identity::Admin).await?)
    }

    /// Kills the API server without warning (SIGKILL). Its data stays.
    pub fn kill_apiserver(&mut self) {
        self.own_servers().apiserver.kill();
    }

    /// Starts the API server again, same address, same data, and waits until it is ready.
    pub fn restart_apiserver(&mut self) -> Result<(), ClusterError> {
        let kubeconfig = self.kubeconfig_path();
        let servers = self.own_servers();
        servers.apiserver.restart()?;
        servers.wait_until_ready(&kubeconfig)
    }

    /// Kills controller manager and scheduler and starts them again.
    pub fn restart_controllers(&mut self) -> Result<(), ClusterError> {
        let servers = self.own_servers();
        [&mut servers.controller_manager, &mut servers.scheduler].into_iter().flatten().try_for_each(Component::restart)
    }

    /// Process ids of everything that runs, by component name; none of servers that are lent.
    pub fn pids(&self) -> Vec<(&'static str, u32)> {
        self.servers.as_ref().map(Running::pids).unwrap_or_default()
    }

    fn own_servers(&mut self) -> &mut Running {
        self.servers.as_mut().expect("who stops servers starts them: these are lent")
    }
}

impl Running {
    fn pids(&self) -> Vec<(&'static str, u32)> {
        let components = [
            ("etcd", Some(&self.etcd)),
            ("kube-apiserver", Some(&self.apiserver)),
            ("kube-controller-manager", self.controller_manager.as_ref()),
            ("kube-scheduler", self.scheduler.as_ref()),
        ];
        components.into_iter().filter_map(|(name, component)| Some((name, component?.pid()?))).collect()
    }

    fn wait_until_ready(&mut self, kubeconfig: &Path) -> Result<(), ClusterError> {
        let deadline = Instant::now() + READY_TIMEOUT;
        while !block_on(is_ready(kubeconfig))? {
            for component in [&mut self.etcd, &mut self.apiserver] {
                if component.has_exited() {
                    return Err(component.not_ready("ended"));
                }
            }
            if Instant::now() >= deadline {
                return Err(self.apiserver.not_ready(format!("was not ready after {} s", READY_TIMEOUT.as_secs())));
            }
            sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    fn make_kinds(&self, kubeconfig: &Path, kinds: &[CustomResourceDefinition]) -> Result<(), ClusterError> {
        if kinds.is_empty() {
            return Ok(());
        }
        let made = async { kinds::make(&client_of(read_config(kubeconfig).await?)?, kinds, READY_TIMEOUT).await };
        if !block_on(made)? {
            return Err(self.apiserver.not_ready("tells nobody of the kinds that it was given"));
        }
        Ok(())
    }

    /// Pods are refused until the controller manager has made the namespace's service account.
    fn wait_for_service_account(&mut self, kubeconfig: &Path) -> Result<(), ClusterError> {
        let deadline = Instant::now() + READY_TIMEOUT;
        let controller_manager = self.controller_manager.as_mut().expect("started just before");
        while !block_on(has_service_account(kubeconfig))? {
            if controller_manager.has_exited() {
                return Err(controller_manager.not_ready("ended"));
            }
            if Instant::now() >= deadline {
                return Err(controller_manager.not_ready("made no default service account"));
            }
            sleep(POLL_INTERVAL);
        }
        Ok(())
    }
}

fn credentials_dir(dir: &Path) -> PathBuf {
    dir.join("credentials")
}

/// The cluster's folder, removed at the end whoever named it.
#[derive(Debug)]
struct Dir(TempDir);

impl Dir {
    fn create(wanted: Option<&Path>) -> Result<Self, ClusterError> {
        let Some(path) = wanted else {
            return TempDir::with_prefix("stoker-cluster-")
                .map(Self)
                .map_err(ClusterError::file("create a folder in", std::env::temp_dir()));
        };
        let path = &absolute(path).map_err(ClusterError::file("make absolute", path))?;
        let parent = path.parent().unwrap_or(Path::new("."));
        let name = path.file_name().unwrap_or_default();
        fs::create_dir_all(parent).map_err(ClusterError::file("create", parent))?;
        // An exact name instead of a random one: a folder that exists already belongs to somebody else and is refused.
        tempfile::Builder::new()
            .prefix(name)
            .rand_bytes(0)
            .tempdir_in(parent)
            .map(Self)
            .map_err(ClusterError::file("create", path))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

/// The servers as components, with what process nodes on loopback addresses need.
struct Layout<'a> {
    binaries: &'a Binaries,
    servers: Servers<'a>,
}

impl Layout<'_> {
    fn etcd(&self) -> Result<ComponentSpec, ClusterError> {
        self.component("etcd", self.servers.etcd())
    }

    fn apiserver(&self, options: &ControlPlaneOptions) -> Result<ComponentSpec, ClusterError> {
        let mut args = self.servers.api_server();
        args.extend([
            flag("authorization-mode", "RBAC"),
            // Endpoints may not hold loopback addresses, and this API server has no other.
            flag("endpoint-reconciler-type", "none"),
        ]);
        if options.controllers == Controllers::None {
            args.push(flag("disable-admission-plugins", "ServiceAccount"));
        }
        args.extend(options.without.iter().map(|api| flag("runtime-config", format!("{api}=false"))));
        if options.audit == Audit::Metadata {
            args.extend(self.audit_flags()?);
        }
        self.component("kube-apiserver", args)
    }

    fn audit_flags(&self) -> Result<[String; 2], ClusterError> {
        let dir = self.servers.dir;
        let policy = dir.join("audit-policy.json");
        let text = r#"{"apiVersion":"audit.k8s.io/v1","kind":"Policy","omitStages":["RequestReceived"],"rules":[{"level":"Metadata"}]}"#;
        fs::write(&policy, text).map_err(ClusterError::file("write", &policy))?;
        Ok([flag("audit-policy-file", policy.display()), flag("audit-log-path", dir.join("audit.log").display())])
    }

    fn controllers(
        &self,
        options: &ControlPlaneOptions,
    ) -> Result<Option<(ComponentSpec, ComponentSpec)>, ClusterError> {
        let Controllers::All { node_grace } = options.controllers else { return Ok(None) };
        let scheduler = self.component("kube-scheduler", self.servers.scheduler())?;
        Ok(Some((self.controller_manager(node_grace, &options.idle)?, scheduler)))
    }

    fn controller_manager(&self, node_grace: Duration, idle: &[String]) -> Result<ComponentSpec, ClusterError> {
        // Endpoint objects refuse 127.0.0.0/8; the Service proxy of this crate reads pods instead.
        let of_endpoints = ["endpoints-controller", "endpointslice-controller", "endpointslice-mirroring-controller"];
        let off = of_endpoints.into_iter().chain(idle.iter().map(String::as_str)).map(|name| format!(",-{name}"));
        let mut args = self.servers.controller_manager();
        args.extend([
            flag("node-monitor-period", "1s"),
            flag("node-monitor-grace-period", format!("{}s", node_grace.as_secs())),
            flag("controllers", format!("*{}", off.collect::<String>())),
        ]);
        self.component("kube-controller-manager", args)
    }

    fn component(&self, name: &'static str, args: Vec<String>) -> Result<ComponentSpec, ClusterError> {
        Ok(ComponentSpec {
            name,
            program: self.binaries.path(name)?,
            args,
            env: Vec::new(),
            log: log_path(self.servers.dir, name),
        })
    }
}

fn log_path(dir: &Path, component: &str) -> PathBuf {
    dir.join(component).with_extension("log")
}

pub(crate) async fn read_config(kubeconfig: &Path) -> Result<Config, ClusterError> {
    let doing = || format!("read {}", kubeconfig.display());
    let file = Kubeconfig::read_from(kubeconfig).map_err(|error| ClusterError::api(doing())(error.into()))?;
    let options = KubeConfigOptions::default();
    Config::from_custom_kubeconfig(file, &options).await.map_err(|error| ClusterError::api(doing())(error.into()))
}

pub(crate) fn client_of(config: Config) -> Result<Client, ClusterError> {
    Client::try_from(config).map_err(ClusterError::api("build a client"))
}

/// Whether the API server answers `ok`; a server that is not there yet is not ready, and no error.
async fn is_ready(kubeconfig: &Path) -> Result<bool, ClusterError> {
    let client = probe_client(kubeconfig).await?;
    let request = Request::get("/readyz").body(Vec::new()).expect("a constant path is valid");
    Ok(client.request_text(request).await.is_ok_and(|body| body == "ok"))
}

async fn has_service_account(kubeconfig: &Path) -> Result<bool, ClusterError> {
    let accounts: Api<ServiceAccount> = Api::namespaced(probe_client(kubeconfig).await?, "default");
    Ok(accounts.get_opt("default").await.is_ok_and(|account| account.is_some()))
}

async fn probe_client(kubeconfig: &Path) -> Result<Client, ClusterError> {
    let mut config = read_config(kubeconfig).await?;
    config.connect_timeout = Some(PROBE_TIMEOUT);
    config.read_timeout = Some(PROBE_TIMEOUT);
    client_of(config)
}
