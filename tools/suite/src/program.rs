//! Programs of tests, as cargo says that it built them and as they list what they have. Builds nothing, runs no test.

use std::{fs, path::PathBuf, process::Command};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// A program that holds tests.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Program {
    /// Of the target: `system`, `stoker_engine`.
    pub(crate) name: String,
    /// The file that it was built from, from the folder of its crate.
    pub(crate) source: String,
    pub(crate) path: PathBuf,
    /// Of its crate: where cargo would run it.
    pub(crate) folder: PathBuf,
}

/// What cargo says that it built, one JSON object a line.
pub(crate) fn messages(said: &str) -> Result<Vec<Value>> {
    Ok(said.lines().map(serde_json::from_str).collect::<Result<_, _>>()?)
}

/// Programs of tests among it.
pub(crate) fn of_tests(messages: &[Value]) -> Result<Vec<Program>> {
    messages.iter().filter(|message| message["profile"]["test"] == true).map(program).collect()
}

/// Where a program that is no test lies.
pub(crate) fn path(messages: &[Value], name: &str) -> Option<PathBuf> {
    let others =
        messages.iter().filter(|message| message["target"]["name"] == name && message["profile"]["test"] == false);
    others.into_iter().find_map(|message| message["executable"].as_str()).map(PathBuf::from)
}

fn program(artifact: &Value) -> Result<Program> {
    let text = |value: &Value| value.as_str().map(str::to_owned).with_context(|| format!("cargo says {artifact}"));
    let folder = PathBuf::from(text(&artifact["manifest_path"])?).with_file_name("");
    let source = PathBuf::from(text(&artifact["target"]["src_path"])?);
    Ok(Program {
        name: text(&artifact["target"]["name"])?,
        source: source.strip_prefix(&folder)?.display().to_string(),
        path: text(&artifact["executable"])?.into(),
        folder,
    })
}

impl Program {
    /// Names of its tests.
    pub(crate) fn tests(&self) -> Result<Vec<String>> {
        let listing = Command::new(&self.path).args(["--list", "--format", "terse"]).current_dir(&self.folder).output();
        let listing = listing.with_context(|| format!("run {}", self.path.display()))?;
        ensure!(listing.status.success(), "{} does not list its tests", self.path.display());
        let listing = String::from_utf8(listing.stdout)?;
        Ok(listing.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
    }

    /// Whether tests of a module share something that one of them starts, by its text: a static of the standard library's lazy kinds.
    pub(crate) fn shares(&self, module: &str) -> bool {
        let text = fs::read_to_string(self.folder.join("tests").join(module).with_extension("rs")).unwrap_or_default();
        is_shared(&text)
    }
}

fn is_shared(text: &str) -> bool {
    let statics = text.lines().map(str::trim_start).filter(|line| line.starts_with("static "));
    statics.into_iter().any(|line| line.contains("LazyLock<") || line.contains("OnceLock<"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_share_what_a_static_holds() {
        assert!(is_shared("use x;\nstatic RIG: LazyLock<Rig> = LazyLock::new(|| Rig::start());\n"));
        assert!(is_shared("fn cluster() {\n    static CLUSTER: OnceLock<Cluster> = OnceLock::new();\n}\n"));
        assert!(!is_shared("use std::sync::LazyLock;\nconst SOON: u32 = 1;\nfn f(of: &'static str) {}\n"));
    }

    #[test]
    fn programs_of_tests_are_those_that_cargo_built_to_test() {
        let message = |test: bool, executable: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"/w/fit/Cargo.toml","profile":{{"test":{test}}},
                "target":{{"name":"periods","src_path":"/w/fit/tests/periods.rs"}},"executable":{executable}}}"#
            )
            .replace('\n', " ")
        };
        let built = ["null", "\"/t/periods\""].map(|executable| message(false, executable));
        let said = [&built[..], &[message(true, "\"/t/periods-1\""), r#"{"reason":"build-finished"}"#.into()]].concat();
        let program = Program {
            name: "periods".into(),
            source: "tests/periods.rs".into(),
            path: "/t/periods-1".into(),
            folder: "/w/fit/".into(),
        };
        let built = messages(&said.join("\n")).unwrap();
        assert_eq!(of_tests(&built).unwrap(), [program]);
        assert_eq!(path(&built, "periods"), Some("/t/periods".into()), "and others by their names");
        assert_eq!(path(&built, "stoker-fit"), None);
        assert!(messages("no JSON").is_err());
        let unbuilt = messages(&message(true, "null")).unwrap();
        assert!(of_tests(&unbuilt).is_err(), "what is to be tested can be run");
    }
}
