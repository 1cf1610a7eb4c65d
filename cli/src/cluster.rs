//! Which cluster and namespace: as kubectl decides it. Owns the flags; reads nothing but the kubeconfig.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, Config,
    api::ListParams,
    config::{KubeConfigOptions, Kubeconfig},
};
use serde::de::DeserializeOwned;
use stoker_crds::InferenceDeployment;

/// Where to look.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Cluster")]
pub(crate) struct ClusterArgs {
    /// Namespace of the deployment. Default: that of the kubeconfig's context.
    #[arg(long, short)]
    namespace: Option<String>,
    /// Context of the kubeconfig.
    #[arg(long)]
    context: Option<String>,
    /// Kubeconfig file. Default: $KUBECONFIG, then ~/.kube/config.
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

impl ClusterArgs {
    /// As a line says that is not finished, and so no command yet.
    pub(crate) fn in_words(words: &[String]) -> Self {
        let after = |flags: [&str; 2]| {
            let is_flag = |pair: &&[String]| flags.contains(&pair[0].as_str());
            words.windows(2).find(is_flag).map(|pair| pair[1].clone())
        };
        Self {
            namespace: after(["--namespace", "-n"]),
            context: after(["--context"; 2]),
            kubeconfig: after(["--kubeconfig"; 2]).map(PathBuf::from),
        }
    }
}

/// A cluster and a namespace in it.
#[derive(Clone)]
pub(crate) struct Cluster {
    /// Its API server.
    pub(crate) client: Client,
    /// The namespace meant.
    pub(crate) namespace: String,
}

impl Cluster {
    /// Finds the API server; asks it nothing yet.
    pub(crate) async fn find(args: &ClusterArgs) -> Result<Self> {
        let options = KubeConfigOptions { context: args.context.clone(), ..KubeConfigOptions::default() };
        let config = match &args.kubeconfig {
            Some(path) => {
                let file = Kubeconfig::read_from(path).with_context(|| format!("read {}", path.display()))?;
                Config::from_custom_kubeconfig(file, &options).await
            }
            None => Config::from_kubeconfig(&options).await,
        };
        let config = config.context("find the API server: set KUBECONFIG, or give --kubeconfig")?;
        let namespace = args.namespace.clone().unwrap_or_else(|| config.default_namespace.clone());
        Ok(Self { client: Client::try_from(config).context("make a client of the API server")?, namespace })
    }

    /// The deployment of this name, or which ones there are.
    pub(crate) async fn deployment(&self, name: &str) -> Result<InferenceDeployment> {
        let deployments: Api<InferenceDeployment> = self.namespaced();
        let found = deployments.get_opt(name).await.with_context(|| format!("read InferenceDeployment {name}"))?;
        if let Some(found) = found {
            return Ok(found);
        }
        let others = deployments.list(&ListParams::default()).await.context("list InferenceDeployments")?;
        let names: Vec<_> = others.items.into_iter().filter_map(|other| other.metadata.name).collect();
        let there = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        anyhow::bail!("no InferenceDeployment {name} in namespace {}; there is: {there}", self.namespace)
    }

    /// The pods that a deployment's status selects.
    pub(crate) async fn pods_of(&self, deployment: &InferenceDeployment) -> Result<Vec<Pod>> {
        let selector = deployment.status.as_ref().map(|status| status.selector.clone()).unwrap_or_default();
        if selector.is_empty() {
            return Ok(Vec::new());
        }
        let pods = self.namespaced::<Pod>().list(&ListParams::default().labels(&selector)).await;
        Ok(pods.context("list its pods")?.items)
    }

    /// Objects of a kind in the namespace.
    pub(crate) fn namespaced<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()> + Clone + DeserializeOwned,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }
}
