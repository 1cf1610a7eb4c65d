//! axe-core, which finds what keeps people out of a page: fetched once from npm into the cache, of one version with one hash.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result, ensure};
use ring::digest::{SHA256, digest};
use serde_json::Value;
use stoker_cluster::cache_dir;
use tokio::sync::OnceCell;

const PACKAGE: &str = "axe-core@4.14.1";
const HASH: &str = "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c";

/// The script to run in a page. An error is a reason to skip.
pub async fn script() -> Result<&'static str> {
    static SCRIPT: OnceCell<String> = OnceCell::const_new();
    let script = SCRIPT.get_or_try_init(|| async { tokio::task::spawn_blocking(read).await? }).await?;
    Ok(script)
}

/// What of its findings is serious or critical, a line a rule with the first elements that break it.
pub(crate) fn serious(found: &Value) -> Vec<String> {
    let rules = found.as_array().into_iter().flatten();
    rules.filter(|rule| matches!(rule["impact"].as_str(), Some("serious" | "critical"))).map(line).collect()
}

fn line(rule: &Value) -> String {
    let nodes = rule["nodes"].as_array().map(Vec::as_slice).unwrap_or_default();
    let places: Vec<String> =
        nodes.iter().take(3).map(|node| format!("{}: {}", node["html"], node["failureSummary"])).collect();
    format!("{} ({}, {} elements)\n{}", rule["id"], rule["help"], nodes.len(), places.join("\n"))
}

fn read() -> Result<String> {
    let home = cache_dir().join(PACKAGE);
    let script = home.join("node_modules/axe-core/axe.min.js");
    if !script.is_file() {
        install(&home)?;
    }
    let text = fs::read(&script).with_context(|| script.display().to_string())?;
    let hash: String = digest(&SHA256, &text).as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    ensure!(hash == HASH, "{} is not what was pinned: its SHA-256 is {hash}", script.display());
    Ok(String::from_utf8(text)?)
}

/// Into a folder of its own first: two tests may do this at once, and either may be killed.
fn install(home: &Path) -> Result<()> {
    fs::create_dir_all(cache_dir())?;
    let apart = tempfile::Builder::new().prefix("axe-").tempdir_in(cache_dir())?;
    let mut npm = Command::new("npm");
    npm.args(["install", "--ignore-scripts", "--no-audit", "--no-fund", "--silent", "--prefix"]);
    let output = npm.arg(apart.path()).arg(PACKAGE).output().context("npm")?;
    ensure!(output.status.success(), "npm install {PACKAGE}: {}", String::from_utf8_lossy(&output.stderr).trim());
    match fs::rename(apart.path(), home) {
        // Another was sooner.
        Err(_) if home.is_dir() => Ok(()),
        moved => Ok(moved?),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_what_keeps_people_out_is_reported() {
        let found = json!([
            {"id": "region", "impact": "moderate", "help": "", "nodes": []},
            {"id": "label", "impact": "critical", "help": "Fields have labels", "nodes": [{"html": "<input>", "failureSummary": "none"}]},
        ]);
        let lines = serious(&found);
        assert_eq!(lines.len(), 1);
        assert!(lines[0].contains("label") && lines[0].contains("<input>"), "{lines:?}");
    }
}
