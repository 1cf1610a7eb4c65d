//! How far real agents are apart on the prompts that canaries are compared by, for weights that are more and more wrong: what the default
//! bound of `rollout.canary.analysis.prompts.maxMeanDrift` lies between.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::path::Path;

use stoker_crds::canary::{AnalysisSpec, CanarySpec, PromptsSpec};
use stoker_operator::{
    agent_client::AgentClient,
    canary::{
        Canary,
        drift::{Drift, Position, drift},
    },
};
use stoker_tests::{agent::AgentProcess, drifted::ember_with_noise};

/// Noise on every weight, in shares of it: of rounding to bf16, and more.
const NOISES: [f32; 5] = [0.004, 0.01, 0.05, 0.2, 0.5];

async fn said(directory: &Path, texts: &[String]) -> Vec<Vec<Position>> {
    let model = directory.to_str().unwrap();
    let agent = AgentProcess::ready(&["--model", model, "--threads", "1", "--max-model-len", "512"]).await.unwrap();
    AgentClient::default().continuations(agent.base().trim_start_matches("http://"), texts).await.unwrap()
}

#[tokio::test]
async fn the_more_weights_are_wrong_the_farther_apart_and_the_default_bound_is_in_the_middle() {
    let prompts = Some(PromptsSpec::default());
    let spec = CanarySpec { weight: None, seconds: None, analysis: AnalysisSpec { prompts, traffic: None } };
    let gate = Canary::of(&spec).gate.prompts.unwrap();
    let models = tempfile::tempdir().unwrap();
    let directory = |noise: f32| models.path().join(noise.to_string());
    ember_with_noise(0.0, &directory(0.0)).unwrap();
    let older = said(&directory(0.0), &gate.texts).await;
    let again = drift(&older, &said(&directory(0.0), &gate.texts).await).unwrap();
    assert_eq!((again.mean, again.equal), (0.0, 8 * 32), "the same weights say the same bits");

    let mut means = Vec::new();
    for noise in NOISES {
        ember_with_noise(noise, &directory(noise)).unwrap();
        let Drift { tokens, equal, mean, max } = drift(&older, &said(&directory(noise), &gate.texts).await).unwrap();
        println!("| {noise} | {mean:.3} | {max:.3} | {equal} of {tokens} |");
        means.push(mean);
    }
    assert!(means.is_sorted(), "{means:?}");
    assert!(means[2] < gate.max_mean_drift && means[3] > gate.max_mean_drift, "{means:?}");
}
