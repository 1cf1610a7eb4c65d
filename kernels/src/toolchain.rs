//! How kernels are compiled: where nvcc is, for which chips, with which arguments. Used by `build.rs` and tested like
//! any module; decides from values and runs nothing.

use std::{
    collections::hash_map::DefaultHasher,
    hash::{Hash, Hasher},
    path::{Path, PathBuf},
};

/// Chips of a release: A100, L4 and L40S, H100 and H200, B200.
const ALL_CHIPS: &[&str] = &["80", "89", "90a", "100a"];
/// A development build compiles for the reference machine only; four chips cost 1.5 times as long.
const ONE_CHIP: &[&str] = &["90a"];

/// What the environment says, read once by `build.rs`.
#[derive(Clone, Debug, Default)]
pub(crate) struct BuildEnv {
    /// `$NVCC`: a compiler to use instead of ours.
    pub nvcc: Option<String>,
    /// `$STOKER_CACHE`.
    pub stoker_cache: Option<String>,
    /// `$XDG_CACHE_HOME`.
    pub xdg_cache_home: Option<String>,
    /// `$HOME`.
    pub home: Option<String>,
    /// `$STOKER_CUDA_ARCHS`: chips, comma-separated, e.g. `80,90a`.
    pub archs: Option<String>,
    /// Cargo's profile, `release` or `debug`.
    pub profile: String,
}

/// The nvcc to try: `$NVCC`, else where `kernels/tools/cuda.sh` installs it.
pub(crate) fn nvcc_path(env: &BuildEnv) -> Option<PathBuf> {
    if let Some(nvcc) = &env.nvcc {
        return Some(PathBuf::from(nvcc));
    }
    let cache = env.stoker_cache.as_ref().map(PathBuf::from).or_else(|| {
        let base = env.xdg_cache_home.as_ref().map(PathBuf::from);
        base.or_else(|| env.home.as_ref().map(|home| Path::new(home).join(".cache"))).map(|base| base.join("stoker"))
    })?;
    Some(cache.join("cuda/nvidia/cu13/bin/nvcc"))
}

/// Chips to compile for.
pub(crate) fn chips(env: &BuildEnv) -> Vec<String> {
    if let Some(list) = &env.archs {
        return list.split(',').map(str::trim).filter(|chip| !chip.is_empty()).map(str::to_owned).collect();
    }
    let chips = if env.profile == "release" { ALL_CHIPS } else { ONE_CHIP };
    chips.iter().map(|&chip| chip.to_owned()).collect()
}

/// nvcc's arguments for one source. With more than one chip, portable code for the oldest is added, which the driver
/// compiles for chips that we do not know.
pub(crate) fn arguments(source: &Path, output: &Path, chips: &[String]) -> Vec<String> {
    let code = |chip: &str, kind: &str| format!("-gencode=arch=compute_{chip},code={kind}_{chip}");
    let mut arguments = vec!["-O3".to_owned(), "-std=c++17".to_owned(), "--threads=2".to_owned()];
    arguments.extend(chips.iter().map(|chip| code(chip, "sm")));
    if let [oldest, _, ..] = chips {
        arguments.push(code(oldest, "compute"));
    }
    arguments.extend([
        "-fatbin".to_owned(),
        "-o".to_owned(),
        output.display().to_string(),
        source.display().to_string(),
    ]);
    arguments
}

/// Names a compilation by all that it depends on: an equal key means that the output may be kept.
pub(crate) fn build_key(compiler: &Path, arguments: &[String], sources: &[&[u8]]) -> String {
    let mut hasher = DefaultHasher::new();
    (compiler, arguments, sources).hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env() -> BuildEnv {
        BuildEnv { home: Some("/h".into()), profile: "debug".into(), ..BuildEnv::default() }
    }

    #[test]
    fn the_compiler_comes_from_nvcc_then_the_cache_then_home() {
        let nvcc = BuildEnv { nvcc: Some("/x/nvcc".into()), ..env() };
        let cache = BuildEnv { stoker_cache: Some("/c".into()), ..env() };
        let xdg = BuildEnv { xdg_cache_home: Some("/d".into()), ..env() };
        let found: Vec<_> = [nvcc, cache, xdg, env()].iter().map(|env| nvcc_path(env).unwrap()).collect();
        let tail = "cuda/nvidia/cu13/bin/nvcc";
        let expected =
            ["/x/nvcc".into(), format!("/c/{tail}"), format!("/d/stoker/{tail}"), format!("/h/.cache/stoker/{tail}")];
        assert_eq!(found, expected.map(PathBuf::from));
        assert_eq!(nvcc_path(&BuildEnv::default()), None);
    }

    #[test]
    fn a_release_has_every_chip_and_portable_code_for_the_oldest() {
        let release = BuildEnv { profile: "release".into(), ..env() };
        let arguments = arguments(Path::new("a.cu"), Path::new("a.fatbin"), &chips(&release)).join(" ");
        assert!(arguments.contains("arch=compute_80,code=sm_80") && arguments.contains("code=sm_100a"));
        assert!(arguments.contains("arch=compute_80,code=compute_80"));
    }

    #[test]
    fn a_development_build_has_one_chip_unless_told() {
        assert_eq!(chips(&env()), ["90a"]);
        let told = BuildEnv { archs: Some("80, 90a,".into()), ..env() };
        assert_eq!(chips(&told), ["80", "90a"]);
        assert!(!arguments(Path::new("a.cu"), Path::new("o"), &chips(&env())).join(" ").contains("code=compute_"));
    }

    #[test]
    fn a_changed_header_changes_the_key() {
        let key = |header: &[u8]| build_key(Path::new("nvcc"), &["-O3".into()], &[b"kernel", header]);
        assert_eq!(key(b"a"), key(b"a"));
        assert_ne!(key(b"a"), key(b"b"));
    }
}
