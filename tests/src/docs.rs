//! Keeps the docs true: every relative link and every file name in backticks leads to a file of the tree. Reads only.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

/// Endings by which a word in backticks is taken for a file of this tree.
const FILE_ENDINGS: [&str; 9] = [".rs", ".md", ".yaml", ".toml", ".sh", ".py", ".cu", ".json", ".jsonl"];

/// Every broken link or stale file name in the Markdown files git knows under `root`, as `FILE:LINE: what`.
pub fn broken(root: &Path) -> Result<Vec<String>> {
    let files = tracked(root)?;
    let mut found = Vec::new();
    for file in files.iter().filter(|file| file.extension().is_some_and(|ext| ext == "md")) {
        let text = fs::read_to_string(root.join(file)).with_context(|| format!("read {}", file.display()))?;
        for (idx, line) in text.lines().enumerate() {
            let here = |what: String| format!("{}:{}: {what}", file.display(), idx + 1);
            found.extend(
                links(line)
                    .filter(|link| !link_leads(root, file, link))
                    .map(|link| here(format!("broken link {link}"))),
            );
            found.extend(
                file_names(line)
                    .filter(|name| !name_exists(&files, name))
                    .map(|name| here(format!("no file `{name}`"))),
            );
        }
    }
    Ok(found)
}

fn tracked(root: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("git")
        .args(["-C", &root.to_string_lossy(), "ls-files", "--cached", "--others", "--exclude-standard"])
        .output()
        .context("list files with git")?;
    let listed = String::from_utf8_lossy(&output.stdout).lines().map(PathBuf::from).collect::<Vec<_>>();
    Ok(listed.into_iter().filter(|file| root.join(file).exists()).collect())
}

fn links(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| rest.split(')').next())
}

fn link_leads(root: &Path, file: &Path, link: &str) -> bool {
    let target = link.split('#').next().unwrap_or_default();
    if target.is_empty() || target.contains("://") {
        return true;
    }
    root.join(file).parent().is_some_and(|dir| dir.join(target).exists())
}

/// Words in backticks that name one file, such as `engine/src/ledger.rs`; patterns and placeholders are left alone.
fn file_names(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2).filter(|word| {
        word.contains('/')
            && FILE_ENDINGS.iter().any(|ending| word.ends_with(ending))
            && word.chars().all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c))
            && !word.starts_with('/')
            && !word.starts_with("..")
    })
}

fn name_exists(files: &[PathBuf], name: &str) -> bool {
    files.iter().any(|file| file.ends_with(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_names_are_single_files_of_the_tree() {
        let line = "see `engine/src/ledger.rs`, `src/{a,b}.rs`, `/etc/stoker/agent.json` and `make test`";
        assert_eq!(file_names(line).collect::<Vec<_>>(), ["engine/src/ledger.rs"]);
    }

    #[test]
    fn a_name_may_leave_out_leading_folders_but_not_part_of_one() {
        let files = [PathBuf::from("engine/src/ledger.rs")];
        assert!(name_exists(&files, "src/ledger.rs"));
        assert!(!name_exists(&files, "rc/ledger.rs"));
    }

    #[test]
    fn links_are_found_with_their_anchor() {
        assert_eq!(links("[a](b.md#c) and [d](e)").collect::<Vec<_>>(), ["b.md#c", "e"]);
    }
}
