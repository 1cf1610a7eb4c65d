//! The model that is served: its commit, its size and the nodes that keep it.

use stoker_crds::{
    contract::{ModelReport, is_commit},
    status::ModelStatus,
};
use stoker_replica::Replica;

use super::Round;
use crate::desired::preference::NODES_WITH_MODEL_MAX;

/// The commit of a source that is fetched: what was written down stands, else what a replica of the revision says first.
pub(super) fn model(round: &Round<'_>) -> Option<ModelStatus> {
    let fetch = round.deployment.replica.fetch.as_ref()?;
    let of_revision = |replica: &&Replica| replica.pod.revision == round.desired.revision;
    let replicas = round.observed.replicas.iter().filter(of_revision);
    let said: Vec<&ModelReport> = replicas
        .filter_map(|replica| replica.reading.report()?.model.as_ref())
        .filter(|said| is_commit(&said.commit))
        .collect();
    let told = || said.first().map(|said| said.commit.clone());
    let of_image = || round.deployment.mounted().map(|image| image.digest.clone());
    let commit = round.deployment.commit.clone().or_else(told).or_else(of_image)?;
    let bytes = said.iter().filter(|said| said.commit == commit).map(|said| said.bytes).find(|bytes| *bytes > 0);
    let before = round.deployment.nodes_with_model();
    let nodes = match round.deployment.kept_by_nodes() {
        Some(_) => nodes_with(&commit, before, &round.observed.replicas),
        None => Vec::new(),
    };
    let bytes = round.deployment.model_bytes().or(bytes).and_then(|bytes| i64::try_from(bytes).ok());
    let delivery = round.deployment.delivery.as_ref().map(ToString::to_string);
    Some(ModelStatus { source: fetch.source.clone(), commit, bytes, nodes, delivery })
}

/// Nodes that had the model before, and those where a replica serves it now at the end; of too many the first ones go.
fn nodes_with(commit: &str, before: &[String], replicas: &[Replica]) -> Vec<String> {
    let serves_it = |replica: &&Replica| {
        let model = replica.reading.report().and_then(|report| report.model.as_ref());
        replica.serves() && model.is_some_and(|model| model.commit == commit)
    };
    let mut nodes = before.to_vec();
    for node in replicas.iter().filter(serves_it).filter_map(|replica| replica.pod.node.as_ref()) {
        if !nodes.contains(node) {
            nodes.push(node.clone());
        }
    }
    nodes.split_off(nodes.len().saturating_sub(NODES_WITH_MODEL_MAX))
}

#[cfg(test)]
mod tests {
    use stoker_crds::contract::LoadReport;
    use stoker_replica::{ObservedPod, Reading, Stage};

    use super::*;
    use crate::observe::fixture::observed_pod;

    fn serving(node: &str, commit: &str) -> Replica {
        let model = Some(ModelReport { commit: commit.to_owned(), ..ModelReport::default() });
        let report = LoadReport { model, ..LoadReport::idle(10) };
        let pod = ObservedPod { node: Some(node.to_owned()), ..observed_pod(Stage::Serving) };
        Replica { pod, reading: Reading::of(&report), intent: None }
    }

    #[test]
    fn nodes_with_a_model_are_those_that_served_it_the_latest_last() {
        let nodes = |before: &[&str], replicas: &[Replica]| {
            let before: Vec<String> = before.iter().map(|node| (*node).to_owned()).collect();
            nodes_with("c", &before, replicas)
        };
        let here = [serving("b", "c"), serving("c", "c"), serving("d", "another"), serving("c", "c")];
        assert_eq!(nodes(&["a", "b"], &here), ["a", "b", "c"], "who had it stays, and keeps its place");
        let starting = Replica { reading: Reading::missing(), ..serving("e", "c") };
        assert_eq!(nodes(&[], &[starting]), [""; 0]);
        let many: Vec<Replica> = (0..20).map(|idx| serving(&format!("n{idx}"), "c")).collect();
        assert_eq!(nodes(&["a"], &many).len(), NODES_WITH_MODEL_MAX);
        assert_eq!(nodes(&["a"], &many).last().unwrap(), "n19");
    }
}
