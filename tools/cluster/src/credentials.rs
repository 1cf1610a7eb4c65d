//! What lets the parts of a cluster trust each other: a CA, the API server's certificate, the key that signs service
//! account tokens, one static token an identity, and kubeconfigs that carry them. All of it is made new for every
//! cluster, lies in the cluster's own folder, readable by its owner only, and dies with it.

use std::{
    fmt::Write as _,
    fs::{self, File, OpenOptions},
    io::{Read, Write as _},
    net::SocketAddr,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use serde_json::json;

use crate::{error::ClusterError, servers::Addresses};

/// The node that [`Identity::Kubelet`] speaks for.
pub const KUBELET_NODE: &str = "node1";

/// Who a client of the API server says it is.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Identity {
    /// `system:masters`: may do everything.
    Admin,
    /// The controller manager.
    ControllerManager,
    /// The scheduler.
    Scheduler,
    /// The process node and the Service proxy. Not a kubelet's restricted identity: this node also proxies Services.
    Node,
    /// The operator, as service account `stoker-operator` of namespace `stoker-system`: it may do what RBAC grants it.
    Operator,
    /// A real kubelet, restricted to its node.
    Kubelet,
    /// The Service proxy of a real node.
    KubeProxy,
}

impl Identity {
    const ALL: [Self; 7] = [
        Self::Admin,
        Self::ControllerManager,
        Self::Scheduler,
        Self::Node,
        Self::Operator,
        Self::Kubelet,
        Self::KubeProxy,
    ];

    /// Where [`Credentials::create`] puts its kubeconfig below `dir`.
    pub fn kubeconfig(self, dir: &Path) -> PathBuf {
        dir.join(self.file_stem()).with_extension("kubeconfig")
    }

    /// The name of the kubeconfig, without its ending.
    fn file_stem(self) -> &'static str {
        match self {
            Self::Admin => "admin",
            Self::ControllerManager => "controller-manager",
            Self::Scheduler => "scheduler",
            Self::Node => "node",
            Self::Operator => "operator",
            Self::Kubelet => "kubelet",
            Self::KubeProxy => "kube-proxy",
        }
    }

    /// User and groups, as the token file spells them.
    fn user_and_groups(self) -> (&'static str, &'static str) {
        match self {
            Self::Admin => ("admin", "system:masters"),
            Self::ControllerManager => ("system:kube-controller-manager", ""),
            Self::Scheduler => ("system:kube-scheduler", ""),
            Self::Node => ("process-node", "system:masters"),
            Self::Operator => (
                "system:serviceaccount:stoker-system:stoker-operator",
                "system:serviceaccounts,system:serviceaccounts:stoker-system",
            ),
            Self::Kubelet => ("system:node:node1", "system:nodes"),
            Self::KubeProxy => ("system:kube-proxy", ""),
        }
    }
}

/// The files of one cluster's credentials.
#[derive(Debug)]
pub struct Credentials {
    dir: PathBuf,
    tokens: Vec<(Identity, String)>,
    ca_pem: String,
}

impl Credentials {
    /// Makes everything below `dir`, for an API server at one of `addresses`.
    pub fn create(dir: &Path, addresses: &Addresses) -> Result<Self, ClusterError> {
        fs::create_dir_all(dir).map_err(ClusterError::file("create", dir))?;
        let tokens =
            Identity::ALL.iter().map(|&who| Ok((who, random_token()?))).collect::<Result<_, ClusterError>>()?;
        let ca_pem = write_certificates(dir, addresses)?;
        let credentials = Self { dir: dir.to_owned(), tokens, ca_pem };
        write_secret(&credentials.token_file(), &credentials.token_csv())?;
        let service_account = KeyPair::generate()?;
        write_secret(&credentials.service_account_key(), &service_account.serialize_pem())?;
        write_secret(&credentials.service_account_public_key(), &service_account.public_key_pem())?;
        for who in Identity::ALL {
            write_secret(&credentials.kubeconfig(who), &credentials.kubeconfig_text(who, addresses.api))?;
        }
        Ok(credentials)
    }

    /// Reads what [`Credentials::create`] put there.
    pub(crate) fn open(dir: &Path) -> Result<Self, ClusterError> {
        let read = |name: &str| {
            let path = dir.join(name);
            fs::read_to_string(&path).map_err(ClusterError::file("read", path))
        };
        let csv = read("tokens.csv")?;
        let tokens = csv.lines().filter_map(|line| line.split(',').next()).map(str::to_owned);
        Ok(Self {
            dir: dir.to_owned(),
            tokens: Identity::ALL.into_iter().zip(tokens).collect(),
            ca_pem: read("ca.crt")?,
        })
    }

    pub(crate) fn token(&self, who: Identity) -> &str {
        let (_, token) = self.tokens.iter().find(|(owner, _)| *owner == who).expect("every identity has a token");
        token
    }

    pub(crate) fn kubeconfig(&self, who: Identity) -> PathBuf {
        who.kubeconfig(&self.dir)
    }

    pub(crate) fn ca_certificate(&self) -> PathBuf {
        self.dir.join("ca.crt")
    }

    pub(crate) fn server_certificate(&self) -> PathBuf {
        self.dir.join("server.crt")
    }

    pub(crate) fn server_key(&self) -> PathBuf {
        self.dir.join("server.key")
    }

    pub(crate) fn token_file(&self) -> PathBuf {
        self.dir.join("tokens.csv")
    }

    pub(crate) fn service_account_key(&self) -> PathBuf {
        self.dir.join("service-account.key")
    }

    pub(crate) fn service_account_public_key(&self) -> PathBuf {
        self.dir.join("service-account.pub")
    }

    fn token_csv(&self) -> String {
        self.tokens.iter().fold(String::new(), |mut csv, (who, token)| {
            let (user, groups) = who.user_and_groups();
            writeln!(csv, "{token},{user},{user},\"{groups}\"").expect("a String takes every write");
            csv
        })
    }

    /// A kubeconfig is YAML, and JSON is YAML.
    fn kubeconfig_text(&self, who: Identity, api: SocketAddr) -> String {
        let name = who.file_stem();
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "stoker", "cluster": {"server": format!("https://{api}"), "certificate-authority-data": BASE64_STANDARD.encode(&self.ca_pem)}}],
            "users": [{"name": name, "user": {"token": self.token(who)}}],
            "contexts": [{"name": "stoker", "context": {"cluster": "stoker", "user": name}}],
            "current-context": "stoker",
        });
        serde_json::to_string_pretty(&config).expect("a JSON value prints")
    }
}

/// Writes CA and serving certificate; returns the CA in PEM.
fn write_certificates(dir: &Path, addresses: &Addresses) -> Result<String, ClusterError> {
    let (ca, ca_key) = (ca_params()?, KeyPair::generate()?);
    let ca_pem = ca.self_signed(&ca_key)?.pem();
    let server_key = KeyPair::generate()?;
    let server = server_params(addresses)?.signed_by(&server_key, &Issuer::new(ca, ca_key))?;
    write_secret(&dir.join("ca.crt"), &ca_pem)?;
    write_secret(&dir.join("server.crt"), &server.pem())?;
    write_secret(&dir.join("server.key"), &server_key.serialize_pem())?;
    Ok(ca_pem)
}

fn ca_params() -> Result<CertificateParams, ClusterError> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.distinguished_name.push(DnType::CommonName, "stoker-cluster-ca");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign, KeyUsagePurpose::DigitalSignature];
    Ok(params)
}

fn server_params(addresses: &Addresses) -> Result<CertificateParams, ClusterError> {
    let names = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "127.0.0.1"];
    let addresses = [addresses.api.ip(), addresses.first_service.into()].map(|address| address.to_string());
    let mut params = CertificateParams::new(names.map(str::to_owned).into_iter().chain(addresses).collect::<Vec<_>>())?;
    params.distinguished_name.push(DnType::CommonName, "kube-apiserver");
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    Ok(params)
}

fn random_token() -> Result<String, ClusterError> {
    let path = Path::new("/dev/urandom");
    let mut bytes = [0_u8; 16];
    File::open(path).and_then(|mut file| file.read_exact(&mut bytes)).map_err(ClusterError::file("read", path))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn write_secret(path: &Path, text: &str) -> Result<(), ClusterError> {
    let open = || OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(path);
    open().and_then(|mut file| file.write_all(text.as_bytes())).map_err(ClusterError::file("write", path))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::slot::Slot;

    #[test]
    fn a_kubelet_speaks_for_its_node() {
        assert_eq!(Identity::Kubelet.user_and_groups().0, format!("system:node:{KUBELET_NODE}"));
    }

    #[test]
    fn what_was_made_is_opened_again() {
        let dir = tempfile::tempdir().unwrap();
        let made = Credentials::create(dir.path(), &Slot::claim().unwrap().addresses()).unwrap();
        let opened = Credentials::open(dir.path()).unwrap();
        assert_eq!((&opened.tokens, &opened.ca_pem), (&made.tokens, &made.ca_pem));
    }

    #[test]
    fn every_file_is_readable_by_its_owner_only() {
        let dir = tempfile::tempdir().unwrap();
        Credentials::create(dir.path(), &Slot::claim().unwrap().addresses()).unwrap();
        for entry in fs::read_dir(dir.path()).unwrap() {
            let entry = entry.unwrap();
            assert_eq!(entry.metadata().unwrap().permissions().mode() & 0o077, 0, "{:?}", entry.path());
        }
    }
}
