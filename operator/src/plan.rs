//! Everything one round will do, as a value that can be printed, linted and compared. Pure.

use std::{
    collections::BTreeSet,
    fmt::{self, Display},
};

use jiff::Timestamp;
use k8s_openapi::{
    api::{
        core::v1::{ConfigMap, Service},
        discovery::v1::EndpointSlice,
    },
    apimachinery::pkg::api::resource::Quantity,
};
use kube::ResourceExt;
use serde::Serialize;
use serde_json::Value;
use stoker_crds::{InferenceDeployment, scaling::ScalingMode};
use stoker_replica::{Needs, Replica};

use crate::{
    adoption::{self, AdoptionPlan},
    course::{Course, kept_inputs},
    desired::{Desired, claims, config_map_name, labels},
    observe::{Child, Holder, Observed},
    rollout::{
        CanaryWanted, RolloutPlan, Strategy, Wanted, plan_rollout,
        prefetch::{ModelToCome, Prefetching},
    },
    standby::{self, StandbyPlan},
    validate::{ReplicaInputs, ValidatedDeployment},
};

/// Everything one round will do.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Write the Service: it is missing or was changed.
    pub apply_service: bool,
    /// EndpointSlices to write, by name: they are missing or were changed.
    pub apply_slices: Vec<String>,
    /// EndpointSlices to delete: the Service does not lead there any more.
    pub prune_slices: Vec<String>,
    /// Write the revision's ConfigMap: it is missing.
    pub apply_config_map: bool,
    /// Write the ConfigMap of the revision that is tried: it is missing.
    pub apply_canary_map: bool,
    /// Write the ConfigMap with the operator's public keys: it is missing or was changed.
    pub apply_keys: bool,
    /// Write the PodDisruptionBudget: it is missing or says another number.
    pub apply_budget: bool,
    /// What becomes of the InferencePool.
    pub pool: Upkeep,
    /// What becomes of the NetworkPolicy.
    pub network_policy: Upkeep,
    /// What to do with pods.
    pub pods: RolloutPlan,
    /// What to do with pods that keep the model in nodes' memory.
    pub standby: StandbyPlan,
    /// Revision of created pods.
    pub revision: String,
    /// The revision that is tried on one replica.
    pub canary: Option<String>,
    /// ConfigMaps that no pod needs any more.
    pub prune_config_maps: Vec<String>,
    /// What becomes of `spec.replicas`, when the number changes hands.
    pub handover: Option<Handover>,
    /// Names we need that belong to somebody else. While there are any nothing is written but what becomes ours.
    pub taken: Vec<Taken>,
    /// What a namesake left behind.
    pub adoption: AdoptionPlan,
}

/// What becomes of a child that there may be.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Upkeep {
    /// Nothing: it is as it should be.
    #[default]
    Leave,
    /// It is missing or was changed.
    Apply,
    /// It is there and should not be.
    Delete,
}

impl Upkeep {
    /// A plan's line of it.
    fn write(self, f: &mut fmt::Formatter<'_>, kind: &str) -> fmt::Result {
        match self {
            Self::Leave => Ok(()),
            Self::Apply => writeln!(f, "apply {kind}"),
            Self::Delete => writeln!(f, "delete {kind}"),
        }
    }
}

/// A change of `spec.replicas`, which is otherwise the user's. Bound to the version of the object it was decided on, so
/// that it never undoes what somebody says at the same moment.
#[derive(Clone, Debug, PartialEq)]
pub struct Handover {
    /// Name of the deployment.
    pub name: String,
    /// The version that was looked at.
    pub resource_version: String,
    /// The number from now on; `None` takes it out.
    pub replicas: Option<u32>,
}

/// An object in our way.
#[derive(Clone, Debug, PartialEq)]
pub struct Taken {
    /// Its kind.
    pub kind: &'static str,
    /// Its name.
    pub name: String,
    /// Who has it.
    pub holder: Holder,
}

/// Decides what to do so that `observed` becomes `desired`.
pub fn plan(deployment: &ValidatedDeployment, desired: &Desired, observed: &Observed, now: Timestamp) -> Plan {
    let taken = taken(desired, observed);
    let adoption = adoption::plan(observed, now);
    if !taken.is_empty() {
        return Plan { taken, adoption, revision: desired.revision.clone(), ..Plan::default() };
    }
    let wanted = wanted(deployment, desired, observed);
    let leads = matches!(&observed.service, Child::Own(service) if leads_where_it_should(service, &desired.service));
    Plan {
        apply_service: !leads,
        apply_slices: slices_to_write(desired, observed),
        // Kubernetes writes its own slices once the Service selects replicas: until then ours are the only ones.
        prune_slices: if leads { slices_to_delete(desired, observed) } else { Vec::new() },
        apply_config_map: own_config_map(&desired.config_map, observed).is_none(),
        apply_canary_map: desired
            .canary
            .as_ref()
            .is_some_and(|canary| own_config_map(&canary.config_map, observed).is_none()),
        apply_keys: own_config_map(&desired.keys, observed).is_none_or(|keys| !holds(&desired.keys, keys)),
        apply_budget: budget_moves(desired, observed),
        pool: pool(desired, observed),
        network_policy: network_policy(desired, observed),
        pods: one_asks_first(deployment, observed, plan_rollout(&wanted, &observed.replicas, now), &desired.revision),
        standby: StandbyPlan::default(),
        revision: desired.revision.clone(),
        canary: wanted.canary.map(|canary| canary.revision),
        prune_config_maps: prunable(desired, observed),
        handover: handover(deployment, &observed.deployment),
        taken,
        adoption,
    }
}

impl Plan {
    /// The same with what becomes of nodes that stand by; where names are taken nothing is written.
    #[must_use]
    pub fn with_standby(mut self, scene: &standby::Scene<'_>, now: Timestamp) -> Self {
        if self.taken.is_empty() {
            self.standby = standby::plan(scene, now);
        }
        self
    }

    /// The same without new pods of the revision that is asked for: each could only fail.
    #[must_use]
    pub fn without_hopeless(mut self, course: &Course) -> Self {
        match course {
            Course::AsAsked => self.pods.create.clear(),
            Course::Canary(_) => self.pods.create_canary = None,
            // What is worked towards served before.
            Course::Held { .. } | Course::RolledBack(_) => {}
        }
        self
    }
}

/// Until the commit of a branch or tag is known one replica of the revision asks for it; the others are made with it. Where one
/// serves already and said nothing, nobody will: then they are not kept from being made.
fn one_asks_first(
    deployment: &ValidatedDeployment,
    observed: &Observed,
    mut pods: RolloutPlan,
    revision: &str,
) -> RolloutPlan {
    let of_revision = |replica: &&Replica| replica.is_live() && replica.pod.revision == revision;
    let mut asking = observed.replicas.iter().filter(of_revision);
    if deployment.awaits_commit() && !asking.clone().any(Replica::serves) {
        pods.create.truncate(usize::from(asking.next().is_none()));
    }
    pods
}

/// A budget of this name that somebody else made stands in the place of ours: with two for one pod nobody could evict it.
fn budget_moves(desired: &Desired, observed: &Observed) -> bool {
    match &observed.budget {
        Child::Own(budget) => !holds(&desired.budget, budget.as_ref()),
        Child::Absent => true,
        Child::Foreign { .. } => false,
    }
}

/// One of this name that somebody else made stands in the place of ours: nothing but Gateways needs it.
fn pool(desired: &Desired, observed: &Observed) -> Upkeep {
    match (&desired.pool, &observed.pool) {
        (None, Child::Own(pool)) if pool.metadata.deletion_timestamp.is_none() => Upkeep::Delete,
        (Some(wanted), Child::Own(pool)) if holds(wanted, pool.as_ref()) => Upkeep::Leave,
        (Some(_), Child::Own(_) | Child::Absent) => Upkeep::Apply,
        (Some(_), Child::Foreign { .. }) | (None, _) => Upkeep::Leave,
    }
}

fn network_policy(desired: &Desired, observed: &Observed) -> Upkeep {
    match (&desired.network_policy, &observed.network_policy) {
        (None, Child::Own(policy)) if policy.metadata.deletion_timestamp.is_none() => Upkeep::Delete,
        (Some(wanted), Child::Own(policy)) if holds(wanted, policy.as_ref()) => Upkeep::Leave,
        (None, _) => Upkeep::Leave,
        (Some(_), _) => Upkeep::Apply,
    }
}

fn slices_to_write(desired: &Desired, observed: &Observed) -> Vec<String> {
    let is_there = |wanted: &&EndpointSlice| observed.slices.iter().any(|found| leads_as(found, wanted));
    desired.slices.iter().filter(|wanted| !is_there(wanted)).map(ResourceExt::name_any).collect()
}

fn slices_to_delete(desired: &Desired, observed: &Observed) -> Vec<String> {
    let is_wanted = |name: &String| desired.slices.iter().any(|wanted| wanted.name_any() == *name);
    let there = observed.slices.iter().filter(|slice| slice.metadata.deletion_timestamp.is_none());
    there.map(|slice| slice.name_any()).filter(|name| !is_wanted(name)).collect()
}

/// True when a slice has everything that we say, and no endpoint beside ours.
fn leads_as(found: &EndpointSlice, wanted: &EndpointSlice) -> bool {
    holds(wanted, found) && found.endpoints == wanted.endpoints
}

/// What the rollout has to reach.
pub fn wanted(deployment: &ValidatedDeployment, desired: &Desired, observed: &Observed) -> Wanted {
    Wanted {
        replicas: deployment.replicas as usize,
        revision: desired.revision.clone(),
        drain: deployment.replica.drain,
        replacing: deployment.replacing.of(deployment.replicas as usize),
        paused: deployment.paused,
        needs: needs(&deployment.replica),
        canary: canary(deployment, desired, observed),
        foreign_pods: observed.foreign_pods.clone(),
        prefetching: Prefetching {
            model: model_to_come(deployment, desired, observed),
            pods: observed.prefetches.clone(),
        },
    }
}

/// The model of the revision that replaces others, if nodes keep it.
fn model_to_come(deployment: &ValidatedDeployment, desired: &Desired, observed: &Observed) -> Option<ModelToCome> {
    let (newcomer, made) = match &deployment.course {
        Course::Canary(asked) => (&**asked, desired.canary.as_deref()?),
        Course::AsAsked | Course::Held { .. } | Course::RolledBack(_) => (deployment, desired),
    };
    let fetch = newcomer.kept_by_nodes()?;
    let is_same = |inputs: ReplicaInputs| inputs.fetch.is_some_and(|other| other.source == fetch.source);
    let others: BTreeSet<&String> = observed.replicas.iter().map(|replica| &replica.pod.revision).collect();
    let others = others.into_iter().filter(|revision| **revision != made.revision);
    let rollout = observed.deployment.status.as_ref().and_then(|status| status.rollout.as_ref());
    let written = rollout.and_then(|rollout| rollout.prefetch.as_ref());
    Some(ModelToCome {
        also_in: others.filter(|revision| kept_inputs(observed, revision).is_some_and(is_same)).cloned().collect(),
        patience: deployment.progress_deadline,
        is_refused: written.is_some_and(|written| written.revision == made.revision && written.refused.is_some()),
        revision: made.revision.clone(),
    })
}

/// Beside nobody there is none.
fn canary(deployment: &ValidatedDeployment, desired: &Desired, observed: &Observed) -> Option<CanaryWanted> {
    let Course::Canary(asked) = &deployment.course else { return None };
    let revision = desired.canary.as_ref().filter(|_| deployment.replicas > 0)?.revision.clone();
    let rollout = observed.deployment.status.as_ref().and_then(|status| status.rollout.as_ref());
    let announced = rollout.and_then(|rollout| rollout.canary.as_ref());
    let is_announced = announced.is_some_and(|announced| announced.revision == revision);
    Some(CanaryWanted { revision, needs: needs(&asked.replica), is_announced })
}

fn needs(inputs: &ReplicaInputs) -> Needs {
    let request = |(name, Quantity(amount)): (&String, &Quantity)| (name.clone(), amount.clone());
    let requests = inputs.resources.iter().map(request).chain(claims::quantities(inputs));
    Needs { requests: requests.collect(), node_selector: inputs.node_selector.clone() }
}

/// Somebody else's number has to be there before an HPA can read it; one that was left behind says nothing once the
/// operator decides.
fn handover(deployment: &ValidatedDeployment, observed: &InferenceDeployment) -> Option<Handover> {
    let replicas = match (deployment.scaling.as_ref()?.mode, observed.spec.replicas) {
        (ScalingMode::External, None) => Some(deployment.replicas),
        (ScalingMode::Native, Some(_)) => None,
        (ScalingMode::External, Some(_)) | (ScalingMode::Native, None) | (ScalingMode::Advisory, _) => return None,
    };
    Some(Handover { name: observed.name_any(), resource_version: observed.resource_version()?, replicas })
}

fn taken(desired: &Desired, observed: &Observed) -> Vec<Taken> {
    let of_canary = desired.canary.iter().map(|canary| &canary.config_map);
    let wanted_maps: Vec<String> =
        [&desired.config_map, &desired.keys].into_iter().chain(of_canary).map(ResourceExt::name_any).collect();
    let maps = observed.config_maps.iter().filter_map(|map| match map {
        Child::Foreign { name, holder } if wanted_maps.contains(name) => {
            Some(Taken { kind: "ConfigMap", name: name.clone(), holder: *holder })
        }
        _ => None,
    });
    let service = match &observed.service {
        Child::Foreign { name, holder } => Some(Taken { kind: "Service", name: name.clone(), holder: *holder }),
        Child::Own(_) | Child::Absent => None,
    };
    let policy = match &observed.network_policy {
        Child::Foreign { name, holder } if desired.network_policy.is_some() => {
            Some(Taken { kind: "NetworkPolicy", name: name.clone(), holder: *holder })
        }
        Child::Foreign { .. } | Child::Own(_) | Child::Absent => None,
    };
    service.into_iter().chain(maps).chain(policy).collect()
}

fn own_config_map<'a>(wanted: &ConfigMap, observed: &'a Observed) -> Option<&'a ConfigMap> {
    own_config_maps(observed).find(|map| map.metadata.name == wanted.metadata.name)
}

fn own_config_maps(observed: &Observed) -> impl Iterator<Item = &ConfigMap> {
    observed.config_maps.iter().filter_map(|map| match map {
        Child::Own(map) if map.metadata.deletion_timestamp.is_none() => Some(map.as_ref()),
        _ => None,
    })
}

/// ConfigMaps of revisions that are not wanted, that no pod may still read, and that are not kept for going back.
fn prunable(desired: &Desired, observed: &Observed) -> Vec<String> {
    let name = observed.deployment.name_any();
    let of_pods = observed.replicas.iter().map(|replica| &replica.pod.revision);
    let rollout = observed.deployment.status.as_ref().and_then(|status| status.rollout.as_ref());
    let kept = rollout.into_iter().flat_map(|rollout| rollout.revisions.iter().map(|entry| &entry.revision));
    let tried = desired.canary.iter().map(|canary| &canary.revision);
    let used: BTreeSet<String> =
        of_pods.chain(kept).chain(tried).map(|revision| config_map_name(&name, revision)).collect();
    let unused = own_config_maps(observed).filter(|map| map.labels().contains_key(labels::REVISION));
    let names = unused.map(|map| map.name_any());
    names.filter(|name| *name != desired.config_map.name_any() && !used.contains(name)).collect()
}

/// True when a Service has everything that we say, and its selector nothing else: one more label there and no pod is found.
fn leads_where_it_should(found: &Service, wanted: &Service) -> bool {
    let selector = |service: &Service| service.spec.as_ref().and_then(|spec| spec.selector.clone());
    holds(wanted, found) && selector(found) == selector(wanted)
}

/// True when `found` has everything that `wanted` says. What others added is theirs.
fn holds<K: Serialize>(wanted: &K, found: &K) -> bool {
    let value = |object: &K| serde_json::to_value(object).expect("a Kubernetes object is JSON");
    contains(&value(found), &value(wanted))
}

fn contains(found: &Value, wanted: &Value) -> bool {
    match (found, wanted) {
        (Value::Object(found), Value::Object(wanted)) => {
            wanted.iter().all(|(key, wanted)| found.get(key).is_some_and(|found| contains(found, wanted)))
        }
        (Value::Array(found), Value::Array(wanted)) => {
            wanted.iter().all(|wanted| found.iter().any(|found| contains(found, wanted)))
        }
        (found, wanted) => found == wanted,
    }
}

impl Plan {
    /// True when the round writes nothing.
    pub fn is_empty(&self) -> bool {
        let Self {
            apply_service,
            apply_slices,
            prune_slices,
            apply_config_map,
            apply_canary_map,
            apply_keys,
            apply_budget,
            pool,
            network_policy,
            pods,
            standby,
            revision: _,
            canary: _,
            prune_config_maps,
            handover,
            taken: _,
            adoption,
        } = self;
        let maps = *apply_config_map || *apply_canary_map || *apply_keys;
        let applies = maps || *apply_service || *apply_budget;
        !applies
            && [network_policy, pool].iter().all(|upkeep| **upkeep == Upkeep::Leave)
            && pods.is_empty()
            && standby.is_empty()
            && [apply_slices, prune_slices, prune_config_maps].iter().all(|names| names.is_empty())
            && handover.is_none()
            && adoption.adopt.is_empty()
    }
}

/// One line for each thing the round will do.
impl Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            apply_service,
            apply_slices,
            prune_slices,
            apply_config_map,
            apply_canary_map,
            apply_keys,
            apply_budget,
            pool,
            network_policy,
            pods,
            standby,
            revision,
            canary,
            prune_config_maps,
            handover,
            taken,
            adoption,
        } = self;
        for taken in taken {
            let how = match taken.holder {
                Holder::Leaving => "being deleted",
                Holder::Namesake => "left behind by a namesake",
                Holder::Other => "somebody else's",
            };
            writeln!(f, "blocked by {} {}: {how}", taken.kind, taken.name)?;
        }
        adoption.adopt.iter().try_for_each(|left| writeln!(f, "take over {} {}", left.resource.kind, left.name))?;
        apply_slices.iter().try_for_each(|name| writeln!(f, "apply EndpointSlice {name}"))?;
        if *apply_service {
            writeln!(f, "apply Service")?;
        }
        pool.write(f, "InferencePool")?;
        if *apply_config_map {
            writeln!(f, "apply ConfigMap of {revision}")?;
        }
        let canary = canary.as_deref().unwrap_or_default();
        if *apply_canary_map {
            writeln!(f, "apply ConfigMap of {canary}")?;
        }
        if *apply_keys {
            writeln!(f, "apply ConfigMap of public keys")?;
        }
        network_policy.write(f, "NetworkPolicy")?;
        if *apply_budget {
            writeln!(f, "apply PodDisruptionBudget")?;
        }
        write_pods(f, pods, Revisions { wanted: revision, canary })?;
        standby.end.iter().try_for_each(|pod| writeln!(f, "stand by no more: {}", pod.name))?;
        standby.begin.iter().try_for_each(|node| writeln!(f, "stand by for {} on {node}", standby.revision))?;
        prune_slices.iter().try_for_each(|name| writeln!(f, "prune EndpointSlice {name}"))?;
        prune_config_maps.iter().try_for_each(|name| writeln!(f, "prune ConfigMap {name}"))?;
        match handover.as_ref().map(|handover| handover.replicas) {
            None => Ok(()),
            Some(Some(replicas)) => writeln!(f, "set spec.replicas to {replicas}"),
            Some(None) => writeln!(f, "remove spec.replicas"),
        }
    }
}

/// Revisions of pods that are made.
#[derive(Clone, Copy)]
struct Revisions<'a> {
    wanted: &'a str,
    canary: &'a str,
}

fn write_pods(f: &mut fmt::Formatter<'_>, plan: &RolloutPlan, revisions: Revisions<'_>) -> fmt::Result {
    let RolloutPlan {
        create,
        create_canary,
        drain,
        undrain,
        reassert,
        delete,
        failures: _,
        held_until,
        strategy,
        prefetch,
        look_again,
    } = plan;
    undrain.iter().try_for_each(|pod| writeln!(f, "undrain {}", pod.name))?;
    delete.iter().try_for_each(|delete| writeln!(f, "delete {}: {}", delete.pod.name, delete.why.as_str()))?;
    create.iter().try_for_each(|ordinal| writeln!(f, "create {}-{ordinal}", revisions.wanted))?;
    create_canary.iter().try_for_each(|ordinal| writeln!(f, "create {}-{ordinal}, a canary", revisions.canary))?;
    held_until.iter().try_for_each(|until| writeln!(f, "create nothing before {until}: pods fail"))?;
    drain.iter().try_for_each(|pod| writeln!(f, "drain {}", pod.name))?;
    reassert.iter().try_for_each(|pod| writeln!(f, "reassert {}", pod.name))?;
    prefetch.end.iter().try_for_each(|pod| writeln!(f, "prefetch no more: {}", pod.name))?;
    prefetch.begin.iter().try_for_each(|node| writeln!(f, "prefetch {} on {node}", prefetch.revision))?;
    prefetch.awaited.iter().try_for_each(|node| writeln!(f, "keep who is on {node} until it has the model"))?;
    match strategy {
        Strategy::Settled => {}
        Strategy::Surge => writeln!(f, "rolling: surge")?,
        Strategy::ReplaceInPlace => writeln!(f, "rolling: replace in place")?,
        Strategy::Held => writeln!(f, "rolling: held")?,
    }
    look_again.iter().try_for_each(|moment| writeln!(f, "look again at {moment}"))
}
