//! `kubectl stoker plan`: does a model fit, with what numbers, and what to change where it does not. From a manifest, the model's
//! `config.json` and a kind of GPU; without one, from the nodes of a cluster. Writes nothing.

mod gguf;
mod nodes;
mod words;

use std::{
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result, bail};
use clap::Args;
use kube::ResourceExt;
use serde_json::Value;
use stoker_crds::{
    InferenceDeployment, InferenceDeploymentSpec, fit,
    nodes::{GpuKind, Placement},
    quantity,
};
use stoker_fit::{
    gpu::{CARDS, Card},
    plan::{Fit, Misfit, Model, Place, Remedy, plan as plan_of, remedies},
};

use crate::{
    cluster::{Cluster, ClusterArgs},
    output::Output,
};

/// Memory of a pod that limits none, for want of better.
const HOST_BYTES: u64 = 16 << 30;

/// What to plan, and for what.
#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// Manifest with the InferenceDeployment; `-` is standard input.
    #[arg(long, short, value_name = "FILE")]
    filename: PathBuf,
    /// The model's config.json, as its hub shows it, or its .gguf file, of which the first megabytes are enough. Default: of a builtin://
    /// or file:// model its own.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Kind of GPU, such as H200, H100-80GB, A100-40GB, L40S: nothing is asked of a cluster.
    #[arg(long, conflicts_with = "gpu_memory")]
    gpu: Option<String>,
    /// Memory of a GPU of any kind, such as 80GiB: nothing is asked of a cluster.
    #[arg(long, value_name = "SIZE")]
    gpu_memory: Option<String>,
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// A question and its answer.
struct Planned {
    deployment: String,
    source: String,
    place: Place,
    /// GPUs of a replica; one where none is asked for, and one is looked at.
    gpus: u32,
    /// How many nodes have room for a replica now; `None` where no cluster was asked.
    kind: Option<GpuKind>,
    answer: Result<Fit, (Misfit, Vec<Remedy>)>,
}

/// Prints the plan of every InferenceDeployment of the manifest; fails if one fits nowhere.
pub(crate) async fn plan(args: &PlanArgs) -> Result<ExitCode> {
    let mut all_fit = true;
    let mut plans = Vec::new();
    for deployment in manifest(&args.filename)? {
        let model = model(args, &deployment.spec)?;
        let planned = plan_deployment(args, &deployment, &model).await?;
        all_fit &= planned.iter().any(|planned| planned.answer.is_ok());
        plans.extend(planned);
    }
    args.output.print(&words::text(&plans), || words::json(&plans));
    Ok(if all_fit { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn plan_deployment(args: &PlanArgs, deployment: &InferenceDeployment, model: &Model) -> Result<Vec<Planned>> {
    let places = places(args, &deployment.spec).await?;
    let asked = fit::asked(&deployment.spec);
    Ok(places
        .into_iter()
        .map(|(place, kind)| Planned {
            deployment: deployment.name_any(),
            source: deployment.spec.model.source.clone(),
            place,
            gpus: deployment.spec.gpus().max(1),
            kind,
            answer: plan_of(model, &asked, place).map_err(|misfit| (misfit, remedies(model, &asked, place))),
        })
        .collect())
}

/// Where a replica could run, by what is said; else by what the cluster has.
async fn places(args: &PlanArgs, spec: &InferenceDeploymentSpec) -> Result<Vec<(Place, Option<GpuKind>)>> {
    if let Some(card) = card(args)? {
        return Ok(vec![(Place::Gpu(card), None)]);
    }
    if spec.gpus() == 0 {
        return Ok(vec![(Place::Host { limit_bytes: fit::host_bytes(spec).unwrap_or(HOST_BYTES) }, None)]);
    }
    let cluster =
        Cluster::find(&args.cluster).await.context("say the GPU with --gpu or --gpu-memory, or name a cluster")?;
    let placement = Placement::of(spec);
    let kinds = nodes::kinds(&cluster, &placement, spec.gpus()).await?;
    if kinds.is_empty() {
        bail!(
            "no node of the cluster that its pods may run on has {}: say the GPU with --gpu or --gpu-memory",
            placement.gpus
        );
    }
    Ok(kinds.into_iter().map(|kind| (Place::Gpu(kind.card), Some(kind))).collect())
}

fn card(args: &PlanArgs) -> Result<Option<Card>> {
    if let Some(name) = &args.gpu {
        let known: Vec<&str> = CARDS.iter().map(|card| card.name).collect();
        let card = Card::named(name);
        return card.map(Some).with_context(|| {
            format!("{name:?} is no GPU known here: take one of {}, or --gpu-memory", known.join(", "))
        });
    }
    let Some(size) = &args.gpu_memory else { return Ok(None) };
    let text = size.trim().trim_end_matches('B');
    let bytes = quantity::amount(text).filter(|bytes| *bytes >= (1u64 << 30) as f64);
    let bytes = bytes.with_context(|| format!("{size:?} is no size of a GPU's memory, such as 80GiB"))?;
    Ok(Some(Card::of_memory(bytes as u64 >> 20)))
}

/// The InferenceDeployments of a file.
fn manifest(path: &Path) -> Result<Vec<InferenceDeployment>> {
    let text = if path == Path::new("-") {
        let mut text = String::new();
        io::stdin().read_to_string(&mut text).context("read standard input")?;
        text
    } else {
        fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?
    };
    let mut found = Vec::new();
    for document in serde_norway::Deserializer::from_str(&text) {
        let value = <Value as serde::Deserialize>::deserialize(document)
            .with_context(|| format!("{} is no YAML", path.display()))?;
        if value["kind"] == "InferenceDeployment" {
            let name = value["metadata"]["name"].as_str().unwrap_or("?").to_owned();
            found.push(serde_json::from_value(value).with_context(|| format!("read InferenceDeployment {name}"))?);
        }
    }
    if found.is_empty() {
        bail!("{} has no InferenceDeployment", path.display());
    }
    Ok(found)
}

/// The model by its configuration, or by the file that describes itself.
fn model(args: &PlanArgs, spec: &InferenceDeploymentSpec) -> Result<Model> {
    let source = spec.model.source.as_str();
    if let Some(path) = &args.config {
        return model_of(path);
    }
    if let Some(config) = source.strip_prefix("builtin://").and_then(Model::builtin) {
        return model_of_text(config, &format!("config.json of {source}"));
    }
    match source.strip_prefix("file://").and_then(own) {
        Some(path) => model_of(&path),
        None => bail!("nobody here knows how large {source} is: give {}", what_to_give(source)),
    }
}

fn what_to_give(source: &str) -> &'static str {
    let path = source.split(['@', '?', '#']).next().unwrap_or(source);
    if path.ends_with(".gguf") {
        "that file or its first megabytes (curl -L -r 0-67108863) with --config"
    } else {
        "its config.json with --config, as its hub shows it among the model's files"
    }
}

/// What describes a model of this machine: its config.json, or the file itself.
fn own(path: &str) -> Option<PathBuf> {
    let path = Path::new(path);
    let candidates = [path.join("config.json"), path.to_owned()];
    candidates.into_iter().find(|candidate| candidate.is_file()).or_else(|| gguf::only_one(path))
}

fn model_of(path: &Path) -> Result<Model> {
    if gguf::is_one(path)? {
        return Ok(Model::from_json(&gguf::planning_config(path)?, &path.display().to_string())?);
    }
    let text = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    model_of_text(&text, &path.display().to_string())
}

fn model_of_text(text: &str, file: &str) -> Result<Model> {
    let config: Value = serde_json::from_str(text).with_context(|| format!("{file} is not JSON"))?;
    Ok(Model::from_json(&config, file)?)
}
