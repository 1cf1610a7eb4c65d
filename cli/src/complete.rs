//! What may follow `kubectl stoker …`, in the form that kubectl asks its plugins for: it runs `kubectl_complete-stoker` with the
//! words so far, the last one unfinished, and reads a candidate a line, then what else the shell may offer.
//!
//! Says nothing where a cluster does not answer: whoever presses a key wants no message.

use std::{path::Path, time::Duration};

use clap::{Arg, ArgAction, Command, ValueHint};
use kube::{Api, ResourceExt, api::ListParams};
use stoker_crds::InferenceDeployment;

use crate::cluster::{Cluster, ClusterArgs};

/// What this program is called when kubectl asks.
const ASKED_AS: &str = "kubectl_complete-stoker";
/// In the words of kubectl's shells: nothing but these.
const ONLY_THESE: &str = ":4";
/// Names of files.
const FILES: &str = ":0";
/// Longer nobody waits for a key.
const PATIENCE: Duration = Duration::from_secs(2);

/// What a shell may put in place of the unfinished word.
#[derive(Debug, PartialEq)]
enum Wanted {
    /// One of these, each with what it means behind a tab.
    These(Vec<String>),
    /// The name of a deployment.
    Deployment,
    /// The name of one of a deployment's pods.
    PodOf(String),
    /// A file.
    File,
}

/// Whether kubectl asks, by the name under which the program was started.
pub(crate) fn is_asked(program: &str) -> bool {
    Path::new(program).file_name().is_some_and(|name| name == ASKED_AS)
}

/// Prints what may follow `words`.
pub(crate) async fn complete(mut command: Command, words: &[String]) {
    command.build();
    let unfinished = words.last().map(String::as_str).unwrap_or_default();
    let candidates = match wanted(&command, words) {
        Wanted::File => return println!("{FILES}"),
        Wanted::These(these) => these,
        wanted => tokio::time::timeout(PATIENCE, of_cluster(&wanted, words)).await.ok().flatten().unwrap_or_default(),
    };
    candidates.iter().filter(|candidate| candidate.starts_with(unfinished)).for_each(|found| println!("{found}"));
    println!("{ONLY_THESE}");
}

fn wanted(command: &Command, words: &[String]) -> Wanted {
    let (mut command, mut valued, mut given) = (command, None, Vec::new());
    let (unfinished, before) = words.split_last().map_or(("", words), |(last, before)| (last.as_str(), before));
    for word in before {
        if valued.take().is_some() {
            continue;
        }
        match (flag(command, word), command.find_subcommand(word)) {
            (Some(flag), _) => valued = takes_value(flag).then_some(flag),
            (None, Some(word)) if given.is_empty() => command = word,
            _ => given.push(word),
        }
    }
    if let Some(flag) = valued {
        return value_of(flag);
    }
    if unfinished.starts_with('-') {
        return Wanted::These(command.get_arguments().filter_map(long).collect());
    }
    if command.has_subcommands() {
        return Wanted::These(command.get_subcommands().map(described).collect());
    }
    match (command.get_positionals().nth(given.len()), given.first()) {
        (Some(next), _) if next.get_id() == "name" => Wanted::Deployment,
        (Some(next), Some(name)) if next.get_id() == "pod" => Wanted::PodOf((*name).clone()),
        (Some(next), _) => value_of(next),
        (None, _) => Wanted::These(Vec::new()),
    }
}

/// The flag that a word names, unless it has its value with it.
fn flag<'a>(command: &'a Command, word: &str) -> Option<&'a Arg> {
    command.get_arguments().find(|arg| {
        let is_long = arg.get_long().is_some_and(|long| word.strip_prefix("--") == Some(long));
        is_long || arg.get_short().is_some_and(|short| word.strip_prefix('-') == Some(short.to_string().as_str()))
    })
}

fn takes_value(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Set | ArgAction::Append)
}

fn value_of(arg: &Arg) -> Wanted {
    match arg.get_value_hint() {
        ValueHint::AnyPath | ValueHint::FilePath | ValueHint::DirPath => Wanted::File,
        _ => Wanted::These(arg.get_possible_values().iter().map(|value| value.get_name().to_owned()).collect()),
    }
}

fn long(arg: &Arg) -> Option<String> {
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    arg.get_long().filter(|_| !arg.is_hide_set()).map(|long| meaning(&format!("--{long}"), &help))
}

fn described(word: &Command) -> String {
    meaning(word.get_name(), &word.get_about().map(ToString::to_string).unwrap_or_default())
}

fn meaning(word: &str, help: &str) -> String {
    format!("{word}\t{}", help.lines().next().unwrap_or_default())
}

/// Names in the cluster and the namespace that the words mean.
async fn of_cluster(wanted: &Wanted, words: &[String]) -> Option<Vec<String>> {
    let cluster = Cluster::find(&ClusterArgs::in_words(words)).await.ok()?;
    if let Wanted::PodOf(name) = wanted {
        let deployment = cluster.deployment(name).await.ok()?;
        return Some(cluster.pods_of(&deployment).await.ok()?.iter().map(ResourceExt::name_any).collect());
    }
    let deployments: Api<InferenceDeployment> = cluster.namespaced();
    Some(deployments.list(&ListParams::default()).await.ok()?.iter().map(ResourceExt::name_any).collect())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::Cli;

    fn after(words: &str) -> Wanted {
        let mut command = Cli::command();
        command.build();
        wanted(&command, &words.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    /// Without what each means.
    fn words_after(words: &str) -> Vec<String> {
        match after(words) {
            Wanted::These(these) => {
                these.iter().map(|found| found.split('\t').next().unwrap_or_default().to_owned()).collect()
            }
            other => panic!("{words}: {other:?}"),
        }
    }

    fn has(words: &str, expected: &[&str]) {
        let found = words_after(words);
        expected.iter().for_each(|word| assert!(found.iter().any(|found| found == word), "{words}: {found:?}"));
    }

    #[test]
    fn words_come_first_and_then_what_each_takes() {
        has("", &["status", "top", "rollout", "drain"]);
        has("rollout ", &["status", "pause", "resume", "undo"]);
        for words in ["status ", "rollout undo ", "logs --follow ", "logs -f ", "drain -n team "] {
            assert_eq!(after(words), Wanted::Deployment, "{words}");
        }
        assert_eq!(after("drain chat "), Wanted::PodOf("chat".to_owned()));
        assert_eq!(after("drain status "), Wanted::PodOf("status".to_owned()), "a deployment may be called so");
        assert_eq!(words_after("status chat "), [""; 0], "it takes one");
    }

    #[test]
    fn flags_are_those_of_their_word_and_values_those_of_their_flag() {
        has("rollout undo chat --", &["--to-revision", "--output", "--namespace"]);
        assert!(!words_after("status --").contains(&"--to-revision".to_owned()));
        assert_eq!(words_after("status chat --output "), ["text", "json"]);
        assert_eq!(words_after("completions "), ["bash", "elvish", "fish", "powershell", "zsh"]);
        assert_eq!(after("plan -f "), Wanted::File);
        assert_eq!(after("status --kubeconfig "), Wanted::File);
        assert_eq!(words_after("status --namespace "), [""; 0], "nobody knows them");
    }

    #[test]
    fn kubectl_asks_by_a_name() {
        assert!(is_asked("/usr/local/bin/kubectl_complete-stoker") && is_asked("kubectl_complete-stoker"));
        assert!(!is_asked("/usr/local/bin/kubectl-stoker") && !is_asked(""));
    }
}
