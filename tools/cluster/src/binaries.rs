//! Where the Kubernetes binaries are. Builds nothing: `tools/kube/build.sh` does, from the same `go.mod`.

use std::{
    env,
    path::{Path, PathBuf},
};

use crate::error::ClusterError;

/// The pins. One definition for the build script, which parses the same file, and for this crate.
const GO_MOD: &str = include_str!("../../kube/go.mod");

/// A folder that holds `etcd`, `kube-apiserver` and so on.
#[derive(Clone, Debug)]
pub struct Binaries {
    dir: PathBuf,
}

impl Binaries {
    /// `KUBEBUILDER_ASSETS` when set, else the folder `tools/kube/build.sh` fills.
    pub fn find() -> Self {
        let var = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        Self { dir: var("KUBEBUILDER_ASSETS").unwrap_or_else(|| cache_dir().join(folder_name(GO_MOD))) }
    }

    /// The path of one binary; an error that names the command which builds it when it is absent.
    pub fn path(&self, name: &str) -> Result<PathBuf, ClusterError> {
        let path = self.dir.join(name);
        if path.is_file() {
            return Ok(path);
        }
        Err(ClusterError::BinaryMissing { name: name.to_owned(), dir: self.dir.clone() })
    }

    /// The folder itself.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

/// The per-user cache of this project: `STOKER_CACHE`, else `stoker` in the user's cache folder.
pub fn cache_dir() -> PathBuf {
    let var = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let user_cache = || var("XDG_CACHE_HOME").or_else(|| var("HOME").map(|home| home.join(".cache")));
    var("STOKER_CACHE")
        .or_else(|| user_cache().map(|dir| dir.join("stoker")))
        .unwrap_or_else(|| env::temp_dir().join("stoker"))
}

fn folder_name(go_mod: &str) -> String {
    let pinned = |module: &str| {
        let of_module = |line: &str| {
            let mut words = line.split_whitespace();
            (words.next() == Some(module))
                .then(|| words.next())
                .flatten()
                .filter(|word| word.starts_with('v'))
                .map(str::to_owned)
        };
        go_mod.lines().find_map(of_module).expect("go.mod pins the module")
    };
    format!("kube-{}-etcd-{}", pinned("k8s.io/kubernetes"), pinned("go.etcd.io/etcd/server/v3"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_carries_both_pins() {
        let go_mod = "tool (\n\tk8s.io/kubernetes/cmd/kubectl\n)\nrequire (\n\tgo.etcd.io/etcd/server/v3 v3.6.8\n\tk8s.io/kubernetes v1.36.4\n)\n";
        assert_eq!(folder_name(go_mod), "kube-v1.36.4-etcd-v3.6.8");
    }

    #[test]
    fn the_committed_go_mod_pins_both() {
        assert!(folder_name(GO_MOD).starts_with("kube-v1."));
    }

    #[test]
    fn a_missing_binary_names_the_command_that_builds_it() {
        let binaries = Binaries { dir: PathBuf::from("/nonexistent") };
        let error = binaries.path("etcd").unwrap_err().to_string();
        assert_eq!(error, "no etcd in /nonexistent; build it with: tools/kube/build.sh etcd");
    }
}
