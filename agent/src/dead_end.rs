//! A path to a model that leads nowhere: how far it leads, and where it could go on from there. An image that is mounted and a claim have
//! the folders that somebody gave them, and the source that names another one is not seen to be wrong before.

use std::{
    fs,
    path::{self, Path},
};

/// So many names are said at most.
const NAMES_MAX: usize = 8;

/// Where the path ends and what is there instead; `None` if it leads somewhere, or nobody may look.
pub(crate) fn dead_end(path: &Path) -> Option<String> {
    // A relative one may begin with what is missing, which then is in the folder that the process is in.
    let path = &path::absolute(path).ok()?;
    let is_there = |path: &Path| path.try_exists().unwrap_or(true);
    if is_there(path) {
        return None;
    }
    let missing = path.ancestors().take_while(|part| !is_there(part)).last()?;
    let (parent, name) = (missing.parent()?.display(), missing.file_name()?.display());
    if let Ok(target) = fs::read_link(missing) {
        return Some(format!("{} is a link to {}, which is not there", missing.display(), target.display()));
    }
    Some(format!("{parent} has no {name}{}", others(missing.parent()?)))
}

/// What a model could be: folders, and files that are one by themselves.
fn others(folder: &Path) -> String {
    let is_candidate = |path: &Path| path.is_dir() || path.extension().is_some_and(|ending| ending == "gguf");
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().filter(|entry| is_candidate(&entry.path()));
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    let more = if names.len() > NAMES_MAX { ", …" } else { "" };
    names.truncate(NAMES_MAX);
    if names.is_empty() {
        ", nor any other folder".to_owned()
    } else {
        format!("; there are {}{more}", names.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_path_is_followed_as_far_as_it_leads() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| dead_end(&root.path().join(path));
        let folder = root.path().display();
        for name in ["weights/chat", "weights/draft", "bin"] {
            fs::create_dir_all(root.path().join(name)).unwrap();
        }
        fs::write(root.path().join("weights/tiny.gguf"), "").unwrap();
        fs::write(root.path().join("weights/README.md"), "").unwrap();
        assert_eq!((at("weights/chat"), at("weights/tiny.gguf")), (None, None));
        assert_eq!(at("models/chat"), Some(format!("{folder} has no models; there are bin, weights")));
        let inside = format!("{folder}/weights has no chat-8b; there are chat, draft, tiny.gguf");
        assert_eq!(at("weights/chat-8b"), Some(inside));
        assert_eq!(at("weights/chat/8b"), Some(format!("{folder}/weights/chat has no 8b, nor any other folder")));
        for n in 0..NAMES_MAX {
            fs::create_dir(root.path().join(format!("bin/{n}"))).unwrap();
        }
        assert!(at("bin/x").unwrap().ends_with("there are 0, 1, 2, 3, 4, 5, 6, 7"));
        fs::create_dir(root.path().join("bin/9")).unwrap();
        assert!(at("bin/x").unwrap().ends_with("6, 7, …"));
        symlink("gone", root.path().join("latest")).unwrap();
        assert_eq!(at("latest/chat"), Some(format!("{folder}/latest is a link to gone, which is not there")));
        let here = std::env::current_dir().unwrap();
        let said = dead_end(Path::new("no-such-folder/chat")).unwrap();
        assert!(said.starts_with(&format!("{} has no no-such-folder", here.display())), "{said}");
    }
}
