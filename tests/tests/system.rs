//! The tests of the whole system: each file beside this one is a module of it, and `cargo test --test system NAME` runs that file's.
//! One program for all: each of them would be a minute of linking.

mod agent_abuse;
mod agent_clients;
mod agent_forged;
mod agent_frameworks;
mod agent_http;
mod canary_drift;
mod chart;
mod cluster_demo;
mod cluster_node;
mod control_plane_lent;
mod fault_suite;
mod fetch;
mod fetch_bucket;
mod fetch_registry;
mod fetch_resident;
mod fetch_web;
mod gateway_envoy;
mod gateway_events;
mod gateway_feeds;
mod gateway_http;
mod gateway_line;
mod gateway_operator;
mod gateway_peers;
mod gateway_picker;
mod gateway_resume;
mod gateway_services;
mod gateway_tenants;
mod gateway_tls;
mod kubectl_stoker;
mod kubectl_words;
mod load_generator;
mod model_holders;
mod model_prefetch;
mod model_sources;
mod model_standby;
mod monitoring;
mod operator_api;
mod operator_budgets;
mod operator_canary;
mod operator_canary_weights;
mod operator_clock;
mod operator_devices;
mod operator_faults;
mod operator_fits;
mod operator_gpus;
mod operator_guards;
mod operator_kueue;
mod operator_leftovers;
mod operator_lifecycle;
mod operator_node_loss;
mod operator_pools;
mod operator_process;
mod operator_refused;
mod operator_releases;
mod operator_repairs;
mod operator_rollback;
mod operator_rollouts;
mod operator_rolls;
mod operator_upgrade;
mod pages_dashboard;
mod pages_demo;
mod pages_fleet;
mod pages_playground;
mod pages_report;
mod pages_walk;
mod scale_to_zero;
mod scaling_control;
mod scaling_faults;
mod scaling_load;

use std::{collections::BTreeSet, fs, path::Path};

#[test]
fn every_file_beside_this_one_is_a_module_of_it() {
    every_file_in_a_folder_is_a_module_of(Path::new("tests/system.rs"), Path::new("tests"));
}

/// What a folder holds is named by the file it belongs to, and so does every folder below it.
#[expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]
fn every_file_in_a_folder_is_a_module_of(file: &Path, folder: &Path) {
    let text = fs::read_to_string(file).unwrap();
    let modules = text.lines().filter_map(|line| line.strip_prefix("mod ")?.strip_suffix(';'));
    let modules: BTreeSet<_> = modules.map(|module| folder.join(module)).collect();
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let (folders, mut files): (BTreeSet<_>, BTreeSet<_>) = entries.partition(|path| path.is_dir());
    files.remove(file);
    assert_eq!(files, modules.iter().map(|module| module.with_extension("rs")).collect());
    for folder in folders {
        every_file_in_a_folder_is_a_module_of(&folder.with_extension("rs"), &folder);
    }
}
