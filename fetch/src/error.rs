//! Why a model does not come, in words that say what to change.

use std::{io, path::PathBuf};

use crate::{
    choose::Unfit,
    origin::{BucketRefusal, RegistryRefusal, WebRefusal},
    source::NotASource,
};

/// See the module.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The source has another form.
    #[error(transparent)]
    Source(#[from] NotASource),
    /// The endpoint is no URL.
    #[error("hub endpoint \"{endpoint}\": {reason}; use https://HOST")]
    Endpoint {
        /// What was given.
        endpoint: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The HTTP client does not start.
    #[error("HTTP client: {reason}")]
    Client {
        /// Why.
        reason: String,
    },
    /// Whoever answers cannot prove who it is.
    #[error(
        "{url}: {reason}; correct its name, or trust who issued it: SSL_CERT_FILE (spec.pod.env, with a volume that has the file)"
    )]
    Certificate {
        /// What was asked.
        url: String,
        /// What is wrong with its certificate.
        reason: String,
    },
    /// The token cannot be sent.
    #[error("the token{} has characters that no token has", of(.secret_name))]
    Token {
        /// What the user knows it as.
        secret_name: Option<String>,
    },
    /// A bucket says no.
    #[error(transparent)]
    Bucket(#[from] BucketRefusal),
    /// A registry says no.
    #[error(transparent)]
    Registry(#[from] RegistryRefusal),
    /// A web server says no.
    #[error(transparent)]
    Web(#[from] WebRefusal),
    /// 401.
    #[error("401 from {hub} for {model}: {}; {said}", token_fix(*.had_token, .token_name))]
    Unauthorized {
        /// Who refused.
        hub: String,
        /// What was asked for.
        model: String,
        /// Whether a token was sent.
        had_token: bool,
        /// What the user knows the token as.
        token_name: Option<String>,
        /// The hub's own words.
        said: String,
    },
    /// 403.
    #[error(
        "403 from {hub} for {model}: the token{} may not read it; if the model is gated, accept its terms at {hub}/{model} with the \
         token's account, or use a token with read access; {said}",
        of(.token_name)
    )]
    Forbidden {
        /// Who refused.
        hub: String,
        /// What was asked for.
        model: String,
        /// What the user knows the token as.
        token_name: Option<String>,
        /// The hub's own words.
        said: String,
    },
    /// 404 of the repository.
    #[error("404 from {hub}: there is no model {model}, or it is private and the token may not see it; {said}")]
    NoModel {
        /// Who was asked.
        hub: String,
        /// What was asked for.
        model: String,
        /// The hub's own words.
        said: String,
    },
    /// 404 of the revision.
    #[error("404 from {hub}: model {model} has no revision \"{revision}\"; {said}")]
    NoRevision {
        /// Who was asked.
        hub: String,
        /// The model.
        model: String,
        /// Branch, tag or commit.
        revision: String,
        /// The hub's own words.
        said: String,
    },
    /// Something that cannot be served.
    #[error("{model} (commit {commit}): {unfit}")]
    Unfit {
        /// The model.
        model: String,
        /// Its commit.
        commit: String,
        /// What is wrong with it.
        unfit: Unfit,
    },
    /// An answer is none.
    #[error("{url}: not an answer of such a server: {reason}")]
    Answer {
        /// What was asked.
        url: String,
        /// What is wrong with the answer.
        reason: String,
    },
    /// It failed again and again.
    #[error("{url}: {reason}; gave up after {tries} tries without progress")]
    Unreachable {
        /// What was asked.
        url: String,
        /// The last failure.
        reason: String,
        /// How often it was tried.
        tries: u32,
    },
    /// Bytes are not those that were published.
    #[error("{file}: the bytes that came have the hash {found}, published is {wanted}; fetched {tries} times")]
    WrongHash {
        /// The file.
        file: String,
        /// What was published.
        wanted: String,
        /// What came.
        found: String,
        /// How often.
        tries: u32,
    },
    /// No room on the disk.
    #[error(
        "the model needs {needed} more bytes in {} and its file system has {free} free; give the cache a larger volume, or free some",
        .dir.display()
    )]
    DiskFull {
        /// The cache.
        dir: PathBuf,
        /// Bytes that are still to come.
        needed: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// No room in the cache.
    #[error(
        "the model needs {needed} more bytes, the cache {} holds {used} of at most {limit}, and nothing more of it may go; raise its \
         size limit",
        .dir.display()
    )]
    CacheFull {
        /// The cache.
        dir: PathBuf,
        /// Bytes that are still to come.
        needed: u64,
        /// Bytes that are there.
        used: u64,
        /// What it may hold.
        limit: u64,
    },
    /// The file system.
    #[error("{what} {}: {error}{}", .path.display(), room_fix(error))]
    Io {
        /// What was tried.
        what: &'static str,
        /// With which file.
        path: PathBuf,
        /// Why it failed.
        error: io::Error,
    },
}

impl FetchError {
    /// For `map_err`.
    pub(crate) fn io(what: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |error| Self::Io { what, path, error }
    }
}

/// What the user knows it as.
pub(crate) fn of(name: &Option<String>) -> String {
    name.as_ref().map(|name| format!(" ({name})")).unwrap_or_default()
}

/// Others fill disks, too, after the room was looked at.
fn room_fix(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "; give the cache a larger volume, or free some: what is there of the model is gone on with"
        }
        _ => "",
    }
}

fn token_fix(had_token: bool, token_name: &Option<String>) -> String {
    match (had_token, token_name) {
        (true, Some(name)) => format!("the token of {name} is not valid there: put a valid one into it"),
        (true, None) => "the token is not valid there: use a valid one".to_owned(),
        (false, Some(name)) => format!("{name} holds no token: put one with read access into it"),
        (false, None) => {
            "there is no such model for people without a token: correct its name, or give a token with read access \
             (spec.model.tokenSecret)"
                .to_owned()
        }
    }
}
