//! `kubectl logs`: the output of a container.

use std::{
    fs,
    io::{Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::{
    io::{AsyncWrite, AsyncWriteExt},
    time::sleep,
};

use super::{context::NodeContext, kubelet::respond};

/// How soon a follower sees new lines.
const FOLLOW_INTERVAL: Duration = Duration::from_millis(200);

/// What `kubectl logs` wants.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Question {
    namespace: String,
    pod: String,
    container: String,
    tail_lines: Option<usize>,
    run: Run,
    end: End,
}

/// Which run of a container.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Run {
    Current,
    /// `--previous`: the one before the last restart.
    Previous,
}

/// When an answer ends.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum End {
    Now,
    /// `--follow`: with the container.
    WithContainer,
}

/// Answers `/containerLogs/NAMESPACE/POD/CONTAINER?follow=true&tailLines=5&previous=true`.
pub(super) async fn answer(
    stream: &mut (impl AsyncWrite + Unpin),
    ctx: &NodeContext,
    target: &str,
) -> std::io::Result<()> {
    match Question::parse(target).and_then(|question| Ok((find_log(&ctx.dir, &question)?, question))) {
        Ok((log, question)) => write_log(stream, ctx, &log, &question).await,
        Err(problem) => respond(stream, "400 Bad Request", problem.as_bytes()).await,
    }
}

async fn write_log(
    stream: &mut (impl AsyncWrite + Unpin),
    ctx: &NodeContext,
    log: &Path,
    question: &Question,
) -> std::io::Result<()> {
    let text = fs::read(log)?;
    let mut position = text.len() as u64;
    respond(stream, "200 OK", tail(&text, question.tail_lines)).await?;
    stream.flush().await?;
    while question.end == End::WithContainer && is_current(ctx, log, question) {
        sleep(FOLLOW_INTERVAL).await;
        let news = read_from(log, position)?;
        position += news.len() as u64;
        stream.write_all(&news).await?;
        stream.flush().await?;
    }
    // What was written between the last look and the end.
    stream.write_all(&read_from(log, position).unwrap_or_default()).await
}

/// Whether the run that writes `log` goes on.
fn is_current(ctx: &NodeContext, log: &Path, question: &Question) -> bool {
    let runs = !ctx.processes.of_pod(&question.namespace, &question.pod).is_empty();
    runs && find_log(&ctx.dir, question).is_ok_and(|latest| latest == log)
}

fn read_from(log: &Path, position: u64) -> std::io::Result<Vec<u8>> {
    let mut file = fs::File::open(log)?;
    file.seek(SeekFrom::Start(position))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn tail(text: &[u8], lines: Option<usize>) -> &[u8] {
    let Some(lines) = lines else { return text };
    let body = text.strip_suffix(b"\n").unwrap_or(text);
    let mut breaks = body.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n');
    match lines.checked_sub(1) {
        None => &[],
        Some(before) => &text[breaks.nth(before).map_or(0, |(idx, _)| idx + 1)..],
    }
}

impl Question {
    fn parse(target: &str) -> Result<Self, String> {
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let ["", "containerLogs", namespace, pod, container] = path.split('/').collect::<Vec<_>>()[..] else {
            return Err(format!("{path} names no container"));
        };
        let value = |key: &str| query.split('&').find_map(|pair| pair.strip_prefix(key)?.strip_prefix('='));
        if let Some(unknown) =
            ["timestamps", "sinceSeconds", "sinceTime", "limitBytes"].into_iter().find(|key| value(key).is_some())
        {
            return Err(format!("the process node does not support {unknown}"));
        }
        Ok(Self {
            namespace: namespace.to_owned(),
            pod: pod.to_owned(),
            container: container.to_owned(),
            tail_lines: value("tailLines").and_then(|lines| lines.parse().ok()),
            run: if value("previous") == Some("true") { Run::Previous } else { Run::Current },
            end: if value("follow") == Some("true") { End::WithContainer } else { End::Now },
        })
    }
}

/// `DIR/pods/NAMESPACE_POD_UID/logs/CONTAINER/RUN.log`; while an old pod of the same name still stops, the younger counts.
fn find_log(dir: &Path, question: &Question) -> Result<PathBuf, String> {
    let prefix = format!("{}_{}_", question.namespace, question.pod);
    let is_pod = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().starts_with(&prefix);
    let pods = fs::read_dir(dir.join("pods")).into_iter().flatten().flatten().filter(is_pod);
    let youngest = pods.max_by_key(|entry| entry.metadata().and_then(|metadata| metadata.created()).ok());
    let absent =
        || format!("container \"{}\" in pod \"{}\" has not run on this node", question.container, question.pod);
    let logs = youngest.ok_or_else(absent)?.path().join("logs").join(&question.container);
    let run_of = |entry: fs::DirEntry| entry.path().file_stem()?.to_str()?.parse::<u32>().ok();
    let last = fs::read_dir(&logs).into_iter().flatten().flatten().filter_map(run_of).max().ok_or_else(absent)?;
    let run = match question.run {
        Run::Current => Some(last),
        Run::Previous => last.checked_sub(1),
    };
    let run = run.ok_or_else(|| {
        format!("previous terminated container \"{}\" in pod \"{}\" not found", question.container, question.pod)
    })?;
    Ok(logs.join(format!("{run}.log")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tail_is_whole_lines() {
        assert_eq!(tail(b"a\nb\nc\n", Some(2)), b"b\nc\n");
        assert_eq!(tail(b"a\nb", Some(9)), b"a\nb");
        assert_eq!(tail(b"a\nb\n", Some(0)), b"");
        assert_eq!(tail(b"a\n", None), b"a\n");
    }

    #[test]
    fn questions_are_read_and_what_is_not_supported_is_said() {
        let question = Question::parse("/containerLogs/n/p/c?follow=true&tailLines=5").unwrap();
        assert_eq!(
            (question.pod.as_str(), question.tail_lines, question.run, question.end),
            ("p", Some(5), Run::Current, End::WithContainer)
        );
        assert_eq!(Question::parse("/containerLogs/n/p/c?previous=true").unwrap().run, Run::Previous);
        assert!(Question::parse("/containerLogs/n/p/c?timestamps=true").unwrap_err().contains("timestamps"));
        assert!(Question::parse("/containerLogs/n/p").is_err());
    }

    #[test]
    fn the_last_run_is_current_and_the_one_before_previous() {
        let dir = tempfile::tempdir().unwrap();
        let logs = dir.path().join("pods/n_p_uid/logs/c");
        fs::create_dir_all(&logs).unwrap();
        for run in ["9", "10"] {
            fs::write(logs.join(run).with_extension("log"), "").unwrap();
        }
        let found =
            |query: &str| find_log(dir.path(), &Question::parse(&format!("/containerLogs/n/p/c?{query}")).unwrap());
        assert_eq!(found("").unwrap(), logs.join("10.log"));
        assert_eq!(found("previous=true").unwrap(), logs.join("9.log"));
    }
}
