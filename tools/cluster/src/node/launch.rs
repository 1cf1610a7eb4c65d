//! What to execute for a container: program, arguments, environment. Pure; values that come from the API server are
//! fetched by [`super::environment`], which calls [`Expander`] for what they refer to.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use k8s_openapi::api::core::v1::Container;

use super::rewrite::{Mount, rewrite};

/// A process to start.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Launch {
    pub(crate) program: PathBuf,
    pub(crate) args: Vec<String>,
    pub(crate) env: Vec<(String, String)>,
}

/// The process of `container`, whose image has `entry_point`.
pub(crate) fn launch(
    container: &Container,
    entry_point: &Path,
    env: Vec<(String, String)>,
    mounts: &[Mount],
) -> Launch {
    let variables: BTreeMap<String, String> = env.iter().cloned().collect();
    let real = |text: &String| rewrite(&expand(text, &variables), mounts);
    let mut words = container.command.iter().flatten().map(real);
    let program = words.next().map_or_else(|| entry_point.to_owned(), |word| program(&word, entry_point));
    let args = words.chain(container.args.iter().flatten().map(real)).collect();
    let env = env.iter().map(|(name, value)| (name.clone(), rewrite(value, mounts))).collect();
    Launch { program, args, env }
}

/// A command that names the image's own program means the binary in its place; any other is looked for on this machine.
fn program(word: &str, entry_point: &Path) -> PathBuf {
    let word = Path::new(word);
    if word.file_name() == entry_point.file_name() { entry_point.to_owned() } else { word.to_owned() }
}

/// `$(NAME)` becomes the value of NAME, `$$` a single `$`, and an unknown name stays as it is written.
pub(crate) fn expand(text: &str, variables: &BTreeMap<String, String>) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(dollar) = rest.find('$') {
        out.push_str(&rest[..dollar]);
        rest = &rest[dollar..];
        let (piece, used) = expand_one(rest, variables);
        out.push_str(&piece);
        rest = &rest[used..];
    }
    out + rest
}

/// What the `$` that `text` begins with stands for, and how many bytes that takes.
fn expand_one(text: &str, variables: &BTreeMap<String, String>) -> (String, usize) {
    if text.starts_with("$$") {
        return ("$".to_owned(), 2);
    }
    let name = text.strip_prefix("$(").and_then(|rest| rest.split_once(')')).map(|(name, _)| name);
    match name.and_then(|name| Some((name, variables.get(name)?))) {
        Some((name, value)) => (value.clone(), name.len() + 3),
        None => ("$".to_owned(), 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(words: &[&str]) -> Option<Vec<String>> {
        Some(words.iter().map(|&word| word.to_owned()).collect())
    }

    #[test]
    fn references_are_expanded_as_kubernetes_does() {
        let variables = BTreeMap::from([("A".to_owned(), "1".to_owned())]);
        let cases = [("x$(A)y", "x1y"), ("$$(A)", "$(A)"), ("$(B)", "$(B)"), ("$A $", "$A $"), ("$(A", "$(A")];
        for (text, expected) in cases {
            assert_eq!(expand(text, &variables), expected, "{text}");
        }
    }

    #[test]
    fn args_follow_the_entry_point_and_see_real_paths() {
        let container = Container { args: strings(&["--config", "/etc/stoker/$(FILE)"]), ..Default::default() };
        let mounts = [Mount { inside: "/etc/stoker".to_owned(), outside: "/run/v".into() }];
        let env = vec![("FILE".to_owned(), "a.json".to_owned())];
        let launch = launch(&container, Path::new("/opt/agent"), env, &mounts);
        assert_eq!(launch.program, Path::new("/opt/agent"));
        assert_eq!(Some(launch.args), strings(&["--config", "/run/v/a.json"]));
    }

    #[test]
    fn a_command_replaces_the_entry_point_unless_it_names_it() {
        let command = |words| Container { command: strings(words), ..Default::default() };
        let entry_point = Path::new("/opt/agent");
        assert_eq!(
            launch(&command(&["/bin/sh", "-c", "x"]), entry_point, Vec::new(), &[]).program,
            Path::new("/bin/sh")
        );
        assert_eq!(launch(&command(&["/usr/bin/agent"]), entry_point, Vec::new(), &[]).program, entry_point);
    }
}
