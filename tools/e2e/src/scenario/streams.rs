//! Streams that are held open while something else happens. Owns one process and one reading thread for each: an unread
//! pipe would hold the server up, and a stream that is held up proves nothing.

use std::{
    io::{self, BufRead, BufReader, Read},
    process::{Child, Command, Stdio},
    thread::{self, JoinHandle},
    time::Instant,
};

use anyhow::{Context, Result, ensure};

use crate::transcript::Transcript;

/// Streams that are being received.
pub(crate) struct Streams {
    n_tokens: u64,
    readers: Vec<JoinHandle<io::Result<Received>>>,
}

/// A stream that ended, whole or not.
struct Received {
    body: String,
    ended: Instant,
}

impl Streams {
    /// Starts `n_streams` commands that print a streamed answer of `n_tokens` tokens; returns when each has begun.
    pub(crate) fn open(n_streams: usize, n_tokens: u64, command: impl Fn() -> Command) -> Result<Self> {
        let start = |_| command().stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let children = (0..n_streams).map(start).collect::<io::Result<Vec<Child>>>().context("start client")?;
        let readers = children.into_iter().map(begin).collect::<io::Result<_>>().context("read first event")?;
        Ok(Self { n_tokens, readers })
    }

    /// Waits for every stream to end and checks that each is whole and ended after `moment`: one that was over by then
    /// was not held through anything.
    pub(crate) fn finish_after(self, moment: Instant) -> Result<()> {
        for (idx, reader) in self.readers.into_iter().enumerate() {
            let received = reader.join().expect("the reader does not panic").context("read stream")?;
            let transcript = Transcript::parse(&received.body).with_context(|| format!("stream {idx}"))?;
            transcript.check_whole(self.n_tokens).with_context(|| format!("stream {idx}"))?;
            ensure!(received.ended > moment, "stream {idx} was over too early to prove anything");
        }
        Ok(())
    }
}

/// Waits for the first line, then leaves the rest to a thread.
fn begin(mut child: Child) -> io::Result<JoinHandle<io::Result<Received>>> {
    let mut output = BufReader::new(child.stdout.take().expect("stdout is piped"));
    let mut body = String::new();
    output.read_line(&mut body)?;
    Ok(thread::spawn(move || {
        output.read_to_string(&mut body)?;
        let ended = Instant::now();
        child.wait()?;
        Ok(Received { body, ended })
    }))
}
