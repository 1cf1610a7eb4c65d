//! A process sees the machine's file system, not an image's: what a pod mounts at `/etc/stoker` lies somewhere below the
//! node's folder. So mount paths are rewritten wherever a container is told about them: arguments, environment, text
//! files of ConfigMaps. Pure; a program that has a mount path compiled in is out of reach, and a limit of this node.

use std::path::PathBuf;

/// Where one mount of a container really is.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Mount {
    /// Inside the container.
    pub(crate) inside: String,
    /// On this machine.
    pub(crate) outside: PathBuf,
}

/// `text` with every mount path replaced by its real place; the longest path that fits wins.
pub(crate) fn rewrite(text: &str, mounts: &[Mount]) -> String {
    let mut mounts: Vec<&Mount> = mounts.iter().filter(|mount| mount.inside.len() > 1).collect();
    mounts.sort_by_key(|mount| std::cmp::Reverse(mount.inside.len()));
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(next) = rest.chars().next() {
        if let Some(mount) = mounts.iter().find(|mount| mount_starts_here(&out, rest, &mount.inside)) {
            out.push_str(&mount.outside.to_string_lossy());
            rest = &rest[mount.inside.len()..];
        } else {
            out.push(next);
            rest = &rest[next.len_utf8()..];
        }
    }
    out
}

/// Whether `rest` begins with the path `inside` as whole path components, and `before` does not end inside a path.
fn mount_starts_here(before: &str, rest: &str, inside: &str) -> bool {
    let Some(after) = rest.strip_prefix(inside) else { return false };
    let in_name = |c: char| c.is_alphanumeric() || "._-".contains(c);
    let begins = before.ends_with("://") || !before.ends_with(|c| in_name(c) || c == '/');
    begins && !after.starts_with(in_name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: &str) {
        let mount = |inside: &str, outside: &str| Mount { inside: inside.to_owned(), outside: outside.into() };
        let mounts =
            [mount("/etc/stoker", "/run/v/config"), mount("/models", "/run/v/m"), mount("/models/small", "/run/v/s")];
        assert_eq!(rewrite(text, &mounts), expected);
    }

    #[test]
    fn a_mount_path_is_replaced_wherever_a_path_can_start() {
        check("/etc/stoker/agent.json", "/run/v/config/agent.json");
        check("--config=/etc/stoker/agent.json", "--config=/run/v/config/agent.json");
        check(r#"{"source":"file:///models/x","b":"/models"}"#, r#"{"source":"file:///run/v/m/x","b":"/run/v/m"}"#);
        check("/etc/stoker:/models", "/run/v/config:/run/v/m");
    }

    #[test]
    fn the_longest_mount_wins() {
        check("/models/small/w", "/run/v/s/w");
    }

    #[test]
    fn a_part_of_another_path_stays() {
        check("/etc/stoker2 /opt/etc/stoker a/models", "/etc/stoker2 /opt/etc/stoker a/models");
    }
}
