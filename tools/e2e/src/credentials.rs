//! Keys, certificates, tokens and kubeconfigs of one cluster. They live as long as the namespaces, so nothing is secret
//! and nothing expires in time to matter.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};

use crate::namespaces::{NODE_IP, STATE};

/// The port of the API server. The network is this run's own, so it is free.
pub(crate) const API_PORT: u16 = 6443;
/// The node's name, and part of the name it authenticates with.
pub(crate) const NODE_NAME: &str = "node1";
/// First address of the Service range: pods reach the API server there.
const KUBERNETES_SERVICE_IP: &str = "10.96.0.1";

/// Who talks to the API server: file name, user, groups.
const USERS: [(&str, &str, &str); 5] = [
    ("admin", "admin", "system:masters"),
    ("kube-controller-manager", "system:kube-controller-manager", ""),
    ("kube-scheduler", "system:kube-scheduler", ""),
    ("kube-proxy", "system:kube-proxy", ""),
    ("kubelet", "system:node:node1", "system:nodes"),
];

/// A file of the credentials, by the name the flags use.
pub(crate) fn path(name: &str) -> PathBuf {
    Path::new(STATE).join("pki").join(name)
}

/// The kubeconfig of one of [`USERS`].
pub(crate) fn kubeconfig(user: &str) -> PathBuf {
    path(&format!("{user}.kubeconfig"))
}

/// Writes all of them.
pub(crate) fn write() -> Result<()> {
    fs::create_dir_all(path("")).context("create folder")?;
    write_certificates().context("make certificates")?;
    write_service_account_key().context("make service account key")?;
    let lines: Vec<String> = USERS
        .iter()
        .enumerate()
        .map(|(id, (name, user, groups))| format!("{name},{user},{id},\"{groups}\"\n"))
        .collect();
    save("tokens.csv", &lines.concat())?;
    USERS.iter().try_for_each(|(name, ..)| save(&format!("{name}.kubeconfig"), &render_kubeconfig(name)))
}

fn write_certificates() -> Result<()> {
    let (ca_params, ca_key) = (ca_params(), KeyPair::generate()?);
    save("ca.crt", &ca_params.self_signed(&ca_key)?.pem())?;
    save("ca.key", &ca_key.serialize_pem())?;
    let key = KeyPair::generate()?;
    let certificate = server_params()?.signed_by(&key, &Issuer::from_params(&ca_params, &ca_key))?;
    save("apiserver.crt", &certificate.pem())?;
    save("apiserver.key", &key.serialize_pem())
}

fn ca_params() -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "stoker-e2e");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign, KeyUsagePurpose::DigitalSignature];
    params
}

fn server_params() -> Result<CertificateParams> {
    let names = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"];
    let addresses = ["127.0.0.1", NODE_IP, KUBERNETES_SERVICE_IP];
    let mut params = CertificateParams::new(names.into_iter().chain(addresses).map(str::to_owned).collect::<Vec<_>>())?;
    params.distinguished_name.push(DnType::CommonName, "kube-apiserver");
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    Ok(params)
}

fn write_service_account_key() -> Result<()> {
    let key = KeyPair::generate()?;
    save("service-account.key", &key.serialize_pem())?;
    save("service-account.pub", &key.public_key_pem())
}

/// The token of a user is its file name: nobody outside can reach the API server.
fn render_kubeconfig(user: &str) -> String {
    let ca = path("ca.crt");
    format!(
        "apiVersion: v1
kind: Config
clusters: [{{name: e2e, cluster: {{server: 'https://{NODE_IP}:{API_PORT}', certificate-authority: {}}}}}]
users: [{{name: {user}, user: {{token: {user}}}}}]
contexts: [{{name: e2e, context: {{cluster: e2e, user: {user}}}}}]
current-context: e2e
",
        ca.display()
    )
}

fn save(name: &str, text: &str) -> Result<()> {
    fs::write(path(name), text).with_context(|| format!("write {name}"))
}
