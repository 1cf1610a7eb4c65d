//! Killing the operator, the API server or a pod at any moment loses no accepted spec and ends in the same state: the
//! one that a deployment reaches undisturbed.

use std::{collections::BTreeMap, thread::sleep, time::Duration};

use anyhow::{Context, Result};
use k8s_openapi::{api::rbac::v1::ClusterRoleBinding, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, PostParams},
};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};
use stoker_cluster::{Audit, NodeOptions};
use stoker_tests::operator::{Rig, is_ready, serves};

const KILLS: usize = 27;
const NAMES: [&str; 3] = ["amber", "birch", "cedar"];
const SETTLED_WITHIN: Duration = Duration::from_secs(120);
const REPEAT_WITHIN: Duration = Duration::from_secs(60);
/// So many that pauses that double would be longer than [`ACTS_WITHIN`].
const OUTAGES: usize = 8;
const BETWEEN_OUTAGES: Duration = Duration::from_secs(1);
/// Long enough for several rounds that fail.
const WITHOUT_RIGHTS: Duration = Duration::from_secs(5);
/// Two of the longest pauses of a watch, and time for a round on a busy machine.
const ACTS_WITHIN: Duration = Duration::from_secs(15);

/// What is killed.
#[derive(Clone, Copy, Debug)]
enum Victim {
    Operator,
    ApiServer,
    Pod,
}

#[test]
fn kills_at_random_moments_end_in_the_same_state() {
    let seed = std::env::var("STOKER_TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(20_261_121);
    println!("STOKER_TEST_SEED={seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let mut rig = Rig::start_own(NodeOptions::default()).unwrap();
    let mut accepted = BTreeMap::new();
    for name in NAMES {
        change_spec(&rig, name, &mut random, &mut accepted).unwrap();
    }
    for kill in 0..KILLS {
        let victim = [Victim::Operator, Victim::ApiServer, Victim::Pod][kill % 3];
        if random.random_bool(0.6) {
            change_spec(&rig, NAMES[random.random_range(0..NAMES.len())], &mut random, &mut accepted).unwrap();
        }
        sleep(Duration::from_millis(random.random_range(0..1500)));
        strike(&mut rig, victim, &mut random).with_context(|| format!("kill {kill}: {victim:?}")).unwrap();
    }
    rig.operator.restart().unwrap();
    // A scheduler whose binds failed while the API server was down may park a pod for its five-minute flush. What
    // Kubernetes' own controllers remember of the outages is not what this test is about.
    rig.cluster.control_plane.restart_controllers().unwrap();
    for (name, spec) in &accepted {
        rig.ends_as_asked(name, spec, SETTLED_WITHIN).unwrap();
    }
}

#[test]
fn after_many_outages_in_a_row_the_operator_acts_within_seconds() {
    let mut rig = Rig::start_own(NodeOptions::default()).unwrap();
    rig.apply("amber", json!({"model": {"source": "builtin://ember"}, "replicas": 0})).unwrap();
    rig.wait("amber is settled", REPEAT_WITHIN, |rig| Ok(is_ready(&rig.get("amber")?))).unwrap();
    for _ in 0..OUTAGES {
        rig.cluster.control_plane.kill_apiserver();
        rig.cluster.control_plane.restart_apiserver().unwrap();
        sleep(BETWEEN_OUTAGES);
    }
    rig.wait("the spec is accepted", REPEAT_WITHIN, |rig| Ok(rig.scale("amber", 1).is_ok())).unwrap();
    rig.wait("a pod is made", ACTS_WITHIN, |rig| Ok(rig.pods("amber")?.len() == 1)).unwrap();
}

/// Somebody takes the operator's rights away: replicas go on, and when it has them again what was asked for meanwhile is done.
#[test]
fn rights_that_were_taken_away_and_given_back_cost_no_replica_and_no_change() {
    let rig = Rig::start(Audit::Off).unwrap();
    let spec = |replicas: u32| json!({"model": {"source": "builtin://ember"}, "replicas": replicas, "drain": {}, "engine": {}});
    rig.apply("amber", spec(1)).unwrap();
    rig.ends_as_asked("amber", &spec(1), SETTLED_WITHIN).unwrap();
    let before = rig.pods("amber").unwrap()[0].uid();
    let roles = Api::<ClusterRoleBinding>::all(rig.client());
    let binding = rig.block_on(roles.get("stoker-operator")).unwrap();
    rig.block_on(roles.delete("stoker-operator", &DeleteParams::default())).unwrap();
    let operator = "system:serviceaccount:stoker-system:stoker-operator";
    let asked = ["auth", "can-i", "create", "pods", "--as", operator];
    rig.wait("the rights are gone", REPEAT_WITHIN, |rig| Ok(rig.cluster.try_kubectl(&asked).is_err())).unwrap();
    rig.apply("amber", spec(2)).unwrap();
    sleep(WITHOUT_RIGHTS);
    let pods = rig.pods("amber").unwrap();
    assert!(pods.len() == 1 && serves(&pods[0]), "{pods:?}");
    let metadata = ObjectMeta { name: binding.metadata.name.clone(), ..ObjectMeta::default() };
    rig.block_on(roles.create(&PostParams::default(), &ClusterRoleBinding { metadata, ..binding })).unwrap();
    rig.ends_as_asked("amber", &spec(2), SETTLED_WITHIN).unwrap();
    assert!(rig.pods("amber").unwrap().iter().any(|pod| pod.uid() == before), "the first replica was replaced");
}

/// Asks for something else and repeats it until the API server accepts it.
fn change_spec(
    rig: &Rig,
    name: &'static str,
    random: &mut StdRng,
    accepted: &mut BTreeMap<&'static str, Value>,
) -> Result<()> {
    let spec = json!({
        "model": {"source": "builtin://ember"},
        "replicas": random.random_range(0..4),
        "drain": {"withdrawSeconds": random.random_range(0..2), "deadlineSeconds": 5},
        "engine": {"maxNumSeqs": random.random_range(1..4)},
    });
    rig.wait("the spec is accepted", REPEAT_WITHIN, |rig| Ok(rig.apply(name, spec.clone()).is_ok()))?;
    accepted.insert(name, spec);
    Ok(())
}

fn strike(rig: &mut Rig, victim: Victim, random: &mut StdRng) -> Result<()> {
    match victim {
        Victim::Operator => {
            rig.operator.kill()?;
            sleep(Duration::from_millis(random.random_range(0..500)));
            rig.operator.restart()
        }
        Victim::ApiServer => {
            rig.cluster.control_plane.kill_apiserver();
            sleep(Duration::from_millis(random.random_range(0..500)));
            Ok(rig.cluster.control_plane.restart_apiserver()?)
        }
        Victim::Pod => {
            let pods = rig.pods(NAMES[random.random_range(0..NAMES.len())])?;
            if !pods.is_empty() {
                let pod = &pods[random.random_range(0..pods.len())];
                // It may have ended by itself since.
                let _ = rig.cluster.node.kill_pod(&pod.namespace().unwrap_or_default(), &pod.name_any());
            }
            Ok(())
        }
    }
}
