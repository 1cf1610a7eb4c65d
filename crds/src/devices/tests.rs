//! Slices, claims and classes in, numbers of GPUs out; what drivers write wrong or are still writing, too.

use serde_json::{Value, json};

use super::*;

const DRIVER: &str = "gpu.nvidia.com";

/// What a cluster says.
#[derive(Clone, Default)]
struct World {
    slices: Vec<Value>,
    claims: Vec<Value>,
    classes: Vec<Value>,
}

impl World {
    /// Slices, and a class for whole GPUs of the driver.
    fn of(slices: &[Value]) -> Self {
        let expression = "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'";
        Self { slices: slices.to_vec(), claims: Vec::new(), classes: vec![class("gpu", expression, Value::Null)] }
    }

    /// The same with devices that claims hold.
    fn holding(mut self, devices: &[&str]) -> Self {
        self.claims = devices.iter().map(|device| claim(json!({"device": device}))).collect();
        self
    }

    fn published(&self) -> Published {
        fn all<K: serde::de::DeserializeOwned>(objects: &[Value]) -> Arc<Vec<K>> {
            Arc::new(objects.iter().map(|object| serde_json::from_value(object.clone()).unwrap()).collect())
        }
        Published { slices: all(&self.slices), claims: all(&self.claims), classes: all(&self.classes) }
    }

    /// GPUs of the class on a node: all and free.
    fn count(&self, on: &str) -> (u64, u64) {
        self.count_of(GpuName::Class("gpu"), on)
    }

    fn count_of(&self, asked: GpuName<'_>, on: &str) -> (u64, u64) {
        let published = self.published();
        let count = gpus(Some(&published), asked).unwrap().given(&node(on)).unwrap_or_default();
        (count.all, count.free)
    }

    fn cards(&self, on: &str) -> Option<Vec<(String, u64)>> {
        let published = self.published();
        let cards = gpus(Some(&published), GpuName::Class("gpu")).unwrap().cards(&node(on))?;
        Some(cards.into_iter().map(|(product, card)| (product, card.memory_mib)).collect())
    }
}

/// Nodes `a` and `b` are in zones of these names.
fn node(name: &str) -> Node {
    serde_json::from_value(json!({"metadata": {"name": name, "labels": {"zone": name}}})).unwrap()
}

fn class(name: &str, expression: &str, resource: Value) -> Value {
    let selectors = json!([{"cel": {"expression": expression}}]);
    json!({"metadata": {"name": name}, "spec": {"selectors": selectors, "extendedResourceName": resource}})
}

/// Of pool `a`, unless it says another one.
fn claim(more: Value) -> Value {
    let result = with(json!({"driver": DRIVER, "pool": "a", "request": "gpus"}), more);
    json!({"metadata": {"name": "c"}, "spec": {}, "status": {"allocation": {"devices": {"results": [result]}}}})
}

fn with(mut object: Value, more: Value) -> Value {
    object.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    object
}

fn gpu(name: &str, more: Value) -> Value {
    let attributes = json!({"type": {"string": "gpu"}, "productName": {"string": "NVIDIA H200"}});
    let memory = json!({"memory": {"value": "143771Mi"}});
    with(json!({"name": name, "attributes": attributes, "capacity": memory}), more)
}

fn plain(name: &str) -> Value {
    gpu(name, json!({}))
}

/// The only slice of the pool of a node.
fn slice(node: &str, devices: &[Value]) -> Value {
    slice_with(node, json!({"devices": devices}))
}

fn slice_with(node: &str, more: Value) -> Value {
    let pool = json!({"name": node, "generation": 1, "resourceSliceCount": 1});
    let spec = with(json!({"driver": DRIVER, "pool": pool, "nodeName": node}), more);
    json!({"metadata": {"name": node}, "spec": spec})
}

/// A slice whose pool says so.
fn of_pool(generation: i64, count: i64, devices: &[Value]) -> Value {
    let pool = json!({"name": "a", "generation": generation, "resourceSliceCount": count});
    slice_with("a", json!({"pool": pool, "devices": devices}))
}

#[test]
fn devices_of_a_node_count_less_those_that_claims_hold() {
    let world = World::of(&[slice("a", &[plain("0"), plain("1"), plain("2")]), slice("b", &[plain("0")])]);
    assert_eq!([world.count("a"), world.count("b"), world.count("c")], [(3, 3), (1, 1), (0, 0)]);
    let mut held = world.holding(&["0", "2"]);
    assert_eq!([held.count("a"), held.count("b")], [(3, 1), (1, 1)], "the device of that name in another pool is free");
    held.claims.push(claim(json!({"device": "1", "adminAccess": true})));
    held.claims.push(json!({"metadata": {"name": "waits"}, "spec": {}}));
    held.claims.push(claim(json!({"device": "1", "driver": "nic.example.com"})));
    held.claims.push(claim(json!({"device": "gone"})));
    assert_eq!(held.count("a"), (3, 1), "none of these takes one");
    held.claims.push(claim(json!({"device": "1"})));
    assert_eq!(held.count("a"), (3, 0));
}

#[test]
fn a_part_of_a_device_that_claims_share_is_no_whole_gpu() {
    let shared = gpu("0", json!({"allowMultipleAllocations": true}));
    let mut world = World::of(&[slice("a", &[shared])]);
    assert_eq!(world.count("a"), (1, 1));
    world.claims = vec![claim(json!({"device": "0", "shareID": "u", "consumedCapacity": {"memory": "10Gi"}}))];
    assert_eq!(world.count("a"), (1, 0));
}

#[test]
fn only_the_newest_generation_of_a_pool_counts_and_only_whole() {
    let old = || of_pool(1, 1, &[plain("0"), plain("1")]);
    let [first, second] = ["0", "1"].map(|name| of_pool(2, 2, &[plain(name)]));
    assert_eq!(World::of(&[old()]).count("a"), (2, 2));
    assert_eq!(World::of(&[old(), first.clone()]).count("a"), (0, 0), "its driver is writing it anew");
    assert_eq!(World::of(&[first.clone(), old(), second.clone()]).count("a"), (2, 2));
    assert_eq!(World::of(std::slice::from_ref(&first)).count("a"), (0, 0), "a slice is not there yet");
    assert_eq!(World::of(&[first.clone(), first]).count("a"), (0, 0), "two devices of one name");
    assert_eq!(World::of(&[of_pool(2, 1, &[plain("0")]), second]).count("a"), (0, 0), "they do not agree");
}

#[test]
fn other_drivers_and_kinds_of_devices_are_no_gpus() {
    let nic = slice_with("a", json!({"driver": "nic.example.com", "devices": [plain("0")]}));
    let mig = gpu("1", json!({"attributes": {"type": {"string": "mig"}}}));
    let bare = json!({"name": "2"});
    let world = World::of(&[nic, slice("a", &[plain("0"), mig, bare])]);
    assert_eq!(world.count("a"), (1, 1));
}

#[test]
fn devices_that_claims_are_kept_from_do_not_count() {
    let tainted = |name: &str, effect: &str| gpu(name, json!({"taints": [{"key": "broken", "effect": effect}]}));
    let devices = [tainted("0", "NoSchedule"), tainted("1", "NoExecute"), tainted("2", "None"), plain("3")];
    assert_eq!(World::of(&[slice("a", &devices)]).count("a"), (2, 2));
}

#[test]
fn partitions_and_the_gpu_that_they_are_of_are_not_there_together() {
    let takes = |slices: &str| json!({"consumesCounters": [{"counterSet": "gpu-0", "counters": {"slices": {"value": slices}}}]});
    let part = |name: &str, of: &str| with(gpu(name, json!({"attributes": {"type": {"string": "mig"}}})), takes(of));
    let devices = [gpu("0", takes("7")), part("0-a", "3"), part("0-b", "3"), part("0-c", "4")];
    let set = |slices: &str| json!([{"name": "gpu-0", "counters": {"slices": {"value": slices}}}]);
    let counters = |slices: &str| {
        let pool = json!({"name": "a", "generation": 1, "resourceSliceCount": 2});
        [
            slice_with("a", json!({"pool": pool, "sharedCounters": set(slices)})),
            slice_with("a", json!({"pool": pool, "devices": devices})),
        ]
    };
    let world = |slices: &str, expression: &str| World {
        classes: vec![class("gpu", expression, Value::Null)],
        ..World::of(&counters(slices))
    };
    let whole = "device.attributes['gpu.nvidia.com'].type == 'gpu'";
    let parts = "device.attributes['gpu.nvidia.com'].type == 'mig'";
    assert_eq!(world("7", whole).count("a"), (1, 1));
    assert_eq!(world("7", whole).holding(&["0-a"]).count("a"), (1, 0), "a part of it is somebody's");
    assert_eq!(world("7", parts).count("a"), (2, 2), "three would need more of it than there is");
    assert_eq!(world("7", parts).holding(&["0"]).count("a"), (2, 0));
    assert_eq!(world("7", parts).holding(&["0-c"]).count("a"), (2, 1));
    assert_eq!(world("6", whole).count("a"), (0, 0), "never enough");
    assert_eq!(world("", whole).count("a"), (0, 0), "no number");
    let without = World::of(&counters("7")[1..]);
    assert_eq!(without.count("a"), (0, 0), "the slice with the counters is not there");
}

#[test]
fn devices_that_several_nodes_reach_are_each_of_theirs() {
    let terms = |zone: &str| {
        let term = json!({"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]});
        json!({"nodeSelectorTerms": [term]})
    };
    let counts = |more: Value| {
        let spec = with(json!({"nodeName": null, "devices": [plain("0")]}), more);
        let world = World::of(&[slice_with("a", spec)]);
        ["a", "b"].map(|node| world.count(node).0)
    };
    assert_eq!(counts(json!({"allNodes": true})), [1, 1]);
    assert_eq!(counts(json!({"nodeSelector": terms("b")})), [0, 1]);
    assert_eq!(counts(json!({})), [0, 0], "a way to say it that is not known here");
    let each = json!([
        gpu("0", json!({"nodeName": "a"})),
        gpu("1", json!({"allNodes": true})),
        gpu("2", json!({"nodeSelector": terms("b")})),
        plain("3")
    ]);
    assert_eq!(counts(json!({"perDeviceNodeSelection": true, "devices": each})), [2, 2]);
}

#[test]
fn memory_is_what_the_devices_say_and_unknown_if_one_does_not() {
    let small = gpu("1", json!({"capacity": {"memory": {"value": "80Gi"}}}));
    let h200 = ("NVIDIA H200".to_owned(), 143_771);
    assert_eq!(World::of(&[slice("a", &[plain("0"), plain("1")])]).cards("a"), Some(vec![h200.clone()]));
    let both = Some(vec![("NVIDIA H200".to_owned(), 81_920), h200.clone()]);
    assert_eq!(World::of(&[slice("a", &[plain("0"), small])]).cards("a"), both, "the smallest first");
    let of_product = gpu("0", json!({"capacity": {}}));
    assert_eq!(World::of(&[slice("a", &[of_product])]).cards("a"), Some(vec![h200]), "by its name");
    let nameless = json!({"type": {"string": "gpu"}});
    let qualified = gpu("0", json!({"attributes": nameless, "capacity": {"gpu.nvidia.com/memory": {"value": "24Gi"}}}));
    let found = World::of(&[slice("a", &[qualified])]).cards("a");
    assert_eq!(found, Some(vec![("GPU of 24576 MiB".to_owned(), 24_576)]));
    for memory in [json!({}), json!({"memory": {"value": "0"}}), json!({"memory": {"value": "much"}})] {
        let dumb = gpu("1", json!({"attributes": nameless, "capacity": memory}));
        assert_eq!(World::of(&[slice("a", &[plain("0"), dumb])]).cards("a"), None);
    }
    assert_eq!(World::of(&[]).cards("a"), None);
}

#[test]
fn a_resource_is_given_by_its_class_and_without_one_only_described() {
    let mut world = World::of(&[slice("a", &[plain("0")])]);
    let resource = GpuName::Resource(GPU_RESOURCE);
    assert_eq!(world.count_of(resource, "a"), (0, 0), "pods that ask for it need a device plugin");
    let published = world.published();
    let described = gpus(Some(&published), resource).unwrap().cards(&node("a")).unwrap();
    assert_eq!(described[0].1.memory_mib, 143_771);
    assert_eq!(world.count_of(GpuName::Resource("deviceclass.resource.kubernetes.io/gpu"), "a"), (1, 1));

    let driver = |name: &str| format!("device.driver == '{name}'");
    let offered = |name: &str, of: &str, made: &str| {
        let mut class = class(name, &driver(of), GPU_RESOURCE.into());
        class["metadata"]["creationTimestamp"] = made.into();
        class
    };
    world.classes.push(offered("mine", DRIVER, "2026-11-27T10:00:00Z"));
    assert_eq!(world.count_of(resource, "a"), (1, 1));
    world.classes.push(offered("newer", "nic.example.com", "2026-11-27T11:00:00Z"));
    assert_eq!(world.count_of(resource, "a"), (0, 0), "the one that was made last counts");
    world.classes.push(offered("as-new", DRIVER, "2026-11-27T11:00:00Z"));
    assert_eq!(world.count_of(resource, "a"), (1, 1), "of two the first by name");
    world.classes.push(class("odd", "device.driver.startsWith('gpu')", "example.com/gpu".into()));
    assert_eq!(world.count_of(GpuName::Resource("example.com/gpu"), "a"), (0, 0));
}

#[test]
fn a_class_that_is_not_there_or_not_read_is_said_to_be() {
    let mut world = World::of(&[]);
    let why = |world: &World, name: &str| gpus(Some(&world.published()), GpuName::Class(name)).map(drop).unwrap_err();
    assert_eq!(why(&world, "none"), "the cluster has no DeviceClass none");
    world.classes.push(class("odd", "device.driver.startsWith('gpu')", Value::Null));
    assert!(why(&world, "odd").contains("selects devices by \"device.driver.startsWith('gpu')\""));
    assert!(gpus(None, GpuName::Class("gpu")).map(drop).unwrap_err().contains("serves no resource.k8s.io/v1"));
    assert!(gpus(None, GpuName::Resource(GPU_RESOURCE)).is_ok(), "a device plugin's are known without");
}
