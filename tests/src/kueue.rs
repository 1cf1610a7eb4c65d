//! Kueue (`tools/kube/build.sh kueue`) beside a cluster of the tests, with its kinds and its webhook for pods.

use std::{
    fs::{self, File},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow, ensure};
use k8s_openapi::ByteString;
use rcgen::{CertifiedKey, generate_simple_self_signed};
use serde_json::{Value, json};
use stoker_cluster::Keeper;

use crate::cluster::{TestCluster, of_go};

/// Until its webhook listens.
const STARTED_WITHIN: Duration = Duration::from_secs(60);
/// Where it looks for the certificate of its metrics, whether it serves them or not. A file system of its own has one there.
const IN_ITS_OWN_ETC: &str =
    r#"mount -t tmpfs none /etc && mkdir -p /etc/kueue/metrics && cp -r "$0" /etc/kueue/metrics/certs && exec "$@""#;

/// See the module. It stops when it is dropped: its keeper kills it.
pub struct Kueue {
    child: Child,
    _keeper: Keeper,
    home: tempfile::TempDir,
}

impl Kueue {
    /// Starts it for `cluster`, with a queue `serving` in the namespace `default` that has room for so many GPUs. An error of
    /// [`program`] is a reason to skip.
    pub fn start(cluster: &TestCluster, gpus: u32) -> Result<Self> {
        let (program, kinds) = program()?;
        apply(cluster, &kinds)?;
        let are_known = ["wait", "--for", "condition=Established", "crd", "--all", "--timeout", "60s"];
        cluster.try_kubectl(&are_known).map_err(|complaint| anyhow!("kubectl wait: {complaint}"))?;
        let home = tempfile::tempdir()?;
        let certificates = home.path().join("certificates");
        fs::create_dir(&certificates)?;
        let CertifiedKey { cert, signing_key } = generate_simple_self_signed(vec!["127.0.0.1".to_owned()])?;
        fs::write(certificates.join("tls.crt"), cert.pem())?;
        fs::write(certificates.join("tls.key"), signing_key.serialize_pem())?;
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let config = home.path().join("config.json");
        fs::write(&config, configuration(port, &certificates).to_string())?;
        let keeper = Keeper::start()?;
        let child = keeper
            .command(Path::new("unshare"))?
            .args(["--mount", "sh", "-c", IN_ITS_OWN_ETC])
            .arg(&certificates)
            .arg(program)
            .arg("--config")
            .arg(&config)
            .arg("--kubeconfig")
            .arg(cluster.control_plane.kubeconfig_path())
            .stdout(Stdio::null())
            .stderr(File::create(home.path().join("log"))?)
            .spawn()?;
        let mut kueue = Self { child, home, _keeper: keeper };
        kueue.wait_for(port)?;
        kueue.resize(cluster, gpus)?;
        // Last: from now on no pod is made without it.
        kueue.apply(cluster, &webhook(port, &cert.pem()))?;
        Ok(kueue)
    }

    fn wait_for(&mut self, port: u16) -> Result<()> {
        let deadline = Instant::now() + STARTED_WITHIN;
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            let ended = self.child.try_wait()?;
            ensure!(ended.is_none() && Instant::now() < deadline, "Kueue does not start ({ended:?}):\n{}", self.log());
            sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Gives the queue room for so many GPUs.
    pub fn resize(&self, cluster: &TestCluster, gpus: u32) -> Result<()> {
        self.apply(cluster, &queue(gpus))
    }

    fn apply(&self, cluster: &TestCluster, manifest: &Value) -> Result<()> {
        let path = self.home.path().join("manifest.json");
        fs::write(&path, manifest.to_string())?;
        apply(cluster, &path)
    }

    /// What it logged so far.
    pub fn log(&self) -> String {
        fs::read_to_string(self.home.path().join("log")).unwrap_or_default()
    }
}

fn apply(cluster: &TestCluster, path: &Path) -> Result<()> {
    let applied = cluster.try_kubectl(&["apply", "--server-side", "--force-conflicts", "-f", &path.to_string_lossy()]);
    applied.map(drop).map_err(|complaint| anyhow!("kubectl apply: {complaint}"))
}

/// The program and its kinds, or why it cannot be run here.
pub fn program() -> Result<(PathBuf, PathBuf)> {
    let path = of_go("kueue")?;
    let kinds = path.with_file_name("kinds.yaml");
    let may_mount = Command::new("unshare").args(["--mount", "mount", "-t", "tmpfs", "none", "/etc"]).output();
    ensure!(may_mount.is_ok_and(|output| output.status.success()), "no right to a file system of its own, as root has");
    Ok((path, kinds))
}

fn configuration(port: u16, certificates: &Path) -> Value {
    json!({
        "apiVersion": "config.kueue.x-k8s.io/v1beta2", "kind": "Configuration", "namespace": "kueue-system",
        "health": {"healthProbeBindAddress": "0"}, "metrics": {"bindAddress": "0"},
        "webhook": {"host": "127.0.0.1", "port": port, "certDir": certificates},
        "leaderElection": {"leaderElect": false}, "internalCertManagement": {"enable": false},
        "integrations": {"frameworks": ["pod"]}, "featureGates": {"VisibilityOnDemand": false},
    })
}

/// A queue of so many GPUs, in which a more urgent workload takes the place of a less urgent one.
fn queue(gpus: u32) -> Value {
    let plenty = |name: &str| json!({"name": name, "nominalQuota": "1000G"});
    let resources = json!([plenty("cpu"), plenty("memory"), {"name": "nvidia.com/gpu", "nominalQuota": gpus}]);
    let group = json!({
        "coveredResources": ["cpu", "memory", "nvidia.com/gpu"], "flavors": [{"name": "gpus", "resources": resources}],
    });
    let version = "kueue.x-k8s.io/v1beta2";
    // What it lets in gets these labels of nodes to select by.
    let flavor = json!({"apiVersion": version, "kind": "ResourceFlavor", "metadata": {"name": "gpus"},
        "spec": {"nodeLabels": {"kubernetes.io/os": "linux"}}});
    let cluster_queue = json!({"apiVersion": version, "kind": "ClusterQueue", "metadata": {"name": "serving"}, "spec": {
        "namespaceSelector": {}, "resourceGroups": [group], "preemption": {"withinClusterQueue": "LowerPriority"},
    }});
    let local_queue = json!({"apiVersion": version, "kind": "LocalQueue",
        "metadata": {"name": "serving", "namespace": "default"}, "spec": {"clusterQueue": "serving"}});
    let urgent = json!({"apiVersion": version, "kind": "WorkloadPriorityClass", "metadata": {"name": "urgent"},
        "value": 1000});
    json!({"apiVersion": "v1", "kind": "List", "items": [flavor, cluster_queue, local_queue, urgent]})
}

/// Has it see each new pod of the namespace.
fn webhook(port: u16, certificate: &str) -> Value {
    json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": "kueue-mutating-webhook-configuration"},
        "webhooks": [{
            "name": "mpod.kb.io", "admissionReviewVersions": ["v1"], "sideEffects": "None", "failurePolicy": "Fail",
            "clientConfig": {
                "url": format!("https://127.0.0.1:{port}/mutate--v1-pod"), "caBundle": ByteString(certificate.as_bytes().to_vec()),
            },
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "default"}},
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
        }],
    })
}
