//! The cgroups of a run: one per hierarchy, under which the kubelet keeps its pods. They are the only thing of a run
//! outside its namespaces, so each is named after the process that owns it and a later run removes what is orphaned.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::Result;

const ROOT: &str = "/sys/fs/cgroup";
const PREFIX: &str = "stoker-e2e-";
/// The weight of eight processes.
const CPU_SHARES: &str = "8192";
/// Where containers find themselves limited in version 1; the kubelet refuses to start when one of them lacks its root.
const V1_HIERARCHIES: [&str; 9] =
    ["cpu", "cpuacct", "cpuset", "memory", "pids", "systemd", "blkio", "devices", "freezer"];

/// The cgroups of one run.
#[derive(Clone, Debug)]
pub(crate) struct Slot(String);

impl Slot {
    /// The slot of this very process.
    pub(crate) fn own() -> Self {
        Self(format!("{PREFIX}{}", std::process::id()))
    }

    /// The slot that an outer process chose.
    pub(crate) fn named(name: &str) -> Self {
        Self(name.to_owned())
    }

    /// Its name, which is also the kubelet's `cgroupRoot` without the slash.
    pub(crate) fn name(&self) -> &str {
        &self.0
    }

    /// Makes the cgroups, empty and usable.
    pub(crate) fn create(&self) -> Result<()> {
        for hierarchy in hierarchies() {
            fs::create_dir_all(hierarchy.join(&self.0))?;
        }
        self.inherit_cpuset()?;
        self.weigh_in()
    }

    /// Removes the cgroups. What still holds a process stays, for a later sweep.
    pub(crate) fn remove(&self) {
        for hierarchy in subdirectories(Path::new(ROOT)).into_iter().chain([ROOT.into()]) {
            remove_tree(&hierarchy.join(&self.0));
        }
    }

    /// A cgroup of version 1 weighs as much as one process beside it: on a machine that also builds, all pods together
    /// would get a few percent of a CPU.
    fn weigh_in(&self) -> Result<()> {
        let file = Path::new(ROOT).join("cpu").join(&self.0).join("cpu.shares");
        if file.exists() {
            fs::write(file, CPU_SHARES)?;
        }
        Ok(())
    }

    /// A cpuset of version 1 starts empty and then refuses every process.
    fn inherit_cpuset(&self) -> Result<()> {
        let parent = Path::new(ROOT).join("cpuset");
        for file in ["cpuset.cpus", "cpuset.mems"].iter().filter(|file| parent.join(file).exists()) {
            fs::write(parent.join(&self.0).join(file), fs::read(parent.join(file))?)?;
        }
        Ok(())
    }
}

/// Removes the cgroups of runs whose process is gone.
pub(crate) fn sweep() {
    for hierarchy in subdirectories(Path::new(ROOT)).into_iter().chain([ROOT.into()]) {
        for directory in subdirectories(&hierarchy).iter().filter(|directory| is_orphan(directory)) {
            remove_tree(directory);
        }
    }
}

/// One tree in version 2, several in version 1.
fn hierarchies() -> Vec<PathBuf> {
    if Path::new(ROOT).join("cgroup.controllers").exists() {
        return vec![ROOT.into()];
    }
    V1_HIERARCHIES.iter().map(|name| Path::new(ROOT).join(name)).filter(|path| path.is_dir()).collect()
}

fn is_orphan(directory: &Path) -> bool {
    let name = directory.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.strip_prefix(PREFIX).is_some_and(|pid| !Path::new("/proc").join(pid).exists())
}

/// Deepest first; a cgroup's own files are not ours to delete, `rmdir` is enough.
fn remove_tree(directory: &Path) {
    for child in subdirectories(directory) {
        remove_tree(&child);
    }
    let _busy_or_absent: io::Result<()> = fs::remove_dir(directory);
}

fn subdirectories(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    entries.flatten().filter(|entry| entry.file_type().is_ok_and(|t| t.is_dir())).map(|entry| entry.path()).collect()
}
