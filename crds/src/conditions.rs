//! Names of conditions and their reasons: what `kubectl wait`, dashboards and our tests spell the same way.
//!
//! Reasons that Kubernetes itself coined for a pod (`Unschedulable`, `ErrImagePull`, `CrashLoopBackOff`, …) are passed
//! through as they are and not listed here. Nothing here decides.

/// True when every replica runs the revision of the current generation and serves.
pub const READY: &str = "Ready";
/// True when at least one replica serves.
pub const AVAILABLE: &str = "Available";
/// True while replicas are created, loaded, drained or replaced.
pub const PROGRESSING: &str = "Progressing";
/// True when something stays wrong until somebody, or the cluster, changes it.
pub const DEGRADED: &str = "Degraded";
/// True, or absent: the object is on its way to what was asked for. For tools that read kstatus.
pub const RECONCILING: &str = "Reconciling";
/// True, or absent: what was asked for was not reached within `rollout.progressDeadlineSeconds`. For tools that read kstatus.
pub const STALLED: &str = "Stalled";
/// True when the model fits all GPUs that its pods may land on, False when some or all are too small, Unknown while its size or the
/// nodes are.
pub const FITS: &str = "Fits";
/// True when an InferenceBudget grants all replicas that are wanted. Only in namespaces with one, and with GPUs.
pub const GRANTED: &str = "Granted";
/// True when every serving replica has a fresh, believable reading. Only with `spec.scaling`.
pub const METRICS_HEALTHY: &str = "MetricsHealthy";
/// True when the operator acts on its decisions. Only with `spec.scaling`.
pub const SCALING: &str = "Scaling";

/// `Ready`: all replicas serve the current revision.
pub const REASON_SERVING: &str = "Serving";
/// `Ready`, `Available`: the deployment asks for no replica.
pub const REASON_SCALED_TO_ZERO: &str = "ScaledToZero";
/// `Available`: some replica serves.
pub const REASON_REPLICA_SERVES: &str = "ReplicaServes";
/// `Available`: no replica serves.
pub const REASON_NO_REPLICA_SERVES: &str = "NoReplicaServes";
/// A replica is on its way: pod created, image or weights being read.
pub const REASON_STARTING: &str = "Starting";
/// Replicas of an older revision are being replaced, one more pod than asked for at a time.
pub const REASON_ROLLING: &str = "RollingOut";
/// As [`REASON_ROLLING`], but the surplus pod does not fit the cluster: one replica goes before its successor starts.
pub const REASON_REPLACING: &str = "ReplacingInPlace";
/// `Ready`, `Progressing`: `rollout.paused` holds a change.
pub const REASON_PAUSED: &str = "Paused";
/// `Ready`, `Progressing`: the revision that is asked for is tried on one replica.
pub const REASON_CANARY: &str = "Canary";
/// `Ready`, `Degraded`: that replica does not pass its gate, and `rollout.autoRollback: false` keeps it.
pub const REASON_CANARY_FAILED: &str = "CanaryFailed";
/// `Ready`, `Degraded`: the revision that is asked for was given up, an older one serves.
pub const REASON_ROLLED_BACK: &str = "RolledBack";
/// Surplus replicas are drained.
pub const REASON_DRAINING: &str = "Draining";
/// Nothing is on its way.
pub const REASON_SETTLED: &str = "Settled";
/// `Degraded`: nothing is wrong.
pub const REASON_AS_EXPECTED: &str = "AsExpected";
/// The object was accepted by the API server but cannot be deployed; the message names field and fix.
pub const REASON_INVALID_SPEC: &str = "InvalidSpec";
/// A Service, ConfigMap or Pod that we need exists and belongs to somebody else.
pub const REASON_NAME_TAKEN: &str = "NameTaken";
/// The API server refused a write of ours (quota, admission, permissions, a namespace that ends), or what it asks before it
/// writes fails again and again; the message is its own.
pub const REASON_REFUSED: &str = "ChildRefused";
/// The agent could not load the model; the message has path and reason.
pub const REASON_MODEL_LOAD_FAILED: &str = "ModelLoadFailed";
/// A replica's agent is of an older release than the operator: it cannot be read, or does not come to serve; the message says what to do.
pub const REASON_OLDER_AGENT: &str = "OlderAgent";
/// A replica's agent is of a newer release than the operator: what it says is not believed.
pub const REASON_NEWER_AGENT: &str = "NewerAgent";
/// The model is on its way from its hub; the message says how far.
pub const REASON_FETCHING: &str = "FetchingModel";
/// The model could not be fetched; the message says what to change.
pub const REASON_MODEL_FETCH_FAILED: &str = "ModelFetchFailed";
/// A pod has waited for its image, volumes or network for longer than `rollout.progressDeadlineSeconds`.
pub const REASON_DEADLINE_EXCEEDED: &str = "ProgressDeadlineExceeded";
/// Pods fail soon after they are made; the next one waits. The message has the last one's reason.
pub const REASON_PODS_FAIL: &str = "PodsFail";
/// A pod has the name of a replica and not its labels.
pub const REASON_STRAY_POD: &str = "StrayPod";
/// A replica was serving and is not ready now.
pub const REASON_NOT_READY: &str = "ReplicaNotReady";
/// `MetricsHealthy`: all serving replicas are fresh.
pub const REASON_ALL_FRESH: &str = "AllFresh";
/// `MetricsHealthy`: all are fresh, and some do not say what their steps cost: replicas are reckoned from totals.
pub const REASON_COSTS_UNTOLD: &str = "CostsUntold";
/// `MetricsHealthy`: some serving replica is stale, absurd or missing; nothing goes down.
pub const REASON_NOT_ALL_FRESH: &str = "NotAllFresh";
/// `MetricsHealthy`: no replica serves, so there is nothing to read.
pub const REASON_NOTHING_TO_READ: &str = "NothingToRead";
/// `Scaling`: the operator decides and acts.
pub const REASON_NATIVE: &str = "Native";
/// `Scaling`: the number is what the scale subresource says.
pub const REASON_EXTERNAL: &str = "External";
/// `Scaling`: decisions are recorded, the number is `spec.replicas`.
pub const REASON_ADVISORY: &str = "Advisory";
/// `Scaling`: `scaling.max` keeps the number below what load wants.
pub const REASON_AT_MAX: &str = "AtMax";
/// `Scaling`: `scaling.toZero` is refused, because no gateway leads the deployment's Service.
pub const REASON_NO_GATEWAY: &str = "NoGateway";
/// `Scaling`: an idle deployment keeps a replica, because the next request would wait for longer than `scaling.toZero` allows.
pub const REASON_SLOW_WAKE: &str = "SlowWake";
/// `Scaling`: too few fresh readings to move at all.
pub const REASON_BLIND: &str = "TooFewFresh";
/// `Fits`: on every node that its pods may land on.
pub const REASON_FITS: &str = "Fits";
/// `Fits`: on some of these nodes, and not on others.
pub const REASON_FITS_SOME_NODES: &str = "FitsSomeNodes";
/// `Fits`: on none of these nodes. `Ready`, `Degraded`: and no pod is made that could only fail there.
pub const REASON_DOES_NOT_FIT: &str = "DoesNotFit";
/// `Fits`: nobody knows yet how large the model is.
pub const REASON_MODEL_UNKNOWN: &str = "ModelUnknown";
/// `Fits`: its pods may land on no node, or on nodes that do not say what GPUs they have.
pub const REASON_NODES_UNKNOWN: &str = "NodesUnknown";
/// `Granted`: as many as are wanted.
pub const REASON_GRANTED: &str = "Granted";
/// `Granted`: claims are looked at together every two seconds.
pub const REASON_GRANT_PENDING: &str = "Pending";
/// `Granted`, and with fewer than are owed `Ready`, `Degraded`: the namespace has what it may have.
pub const REASON_BUDGET_SPENT: &str = "BudgetSpent";
/// As before: its own GPUs are lent to namespaces whose priority is no lower.
pub const REASON_BUDGET_LENT: &str = "BudgetLent";
/// As before: it has its own, and nobody has anything left to lend.
pub const REASON_NOTHING_TO_BORROW: &str = "NothingToBorrow";
