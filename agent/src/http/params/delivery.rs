//! How an answer travels: as a whole or streamed, and where its counts are.

use serde::Deserialize;

use crate::http::{error::ApiError, fields::Fields};

/// How the answer travels.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Delivery {
    /// One JSON body.
    Whole,
    /// Server-sent events.
    Stream {
        /// Which chunks carry token counts.
        usage: UsageIn,
    },
}

/// Chunks of a stream that carry token counts.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct UsageIn {
    /// Each that tells of the answer.
    pub(crate) every: bool,
    /// One more behind the last.
    pub(crate) last: bool,
}

impl UsageIn {
    /// Any of them does.
    pub(crate) fn any(self) -> bool {
        self.every || self.last
    }
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct StreamOptions {
    include_usage: Option<bool>,
    include_obfuscation: Option<bool>,
    continuous_usage_stats: Option<bool>,
}

/// Takes it out of `fields`.
pub(super) fn delivery(fields: &mut Fields) -> Result<Delivery, ApiError> {
    let stream = fields.take("stream")?.unwrap_or(false);
    let options = fields.object::<StreamOptions>("stream_options")?;
    if options.as_ref().is_some_and(|options| options.include_obfuscation == Some(true)) {
        let (field, message) = ("stream_options.include_obfuscation", "chunks are not padded here: use false");
        return Err(ApiError::unsupported(field, message));
    }
    match (stream, options) {
        (true, options) => Ok(Delivery::Stream { usage: usage_in(&options.unwrap_or_default()) }),
        (false, None) => Ok(Delivery::Whole),
        (false, Some(_)) => Err(ApiError::invalid(
            "stream_options",
            "`stream_options` needs `stream: true`: set it or remove this field",
        )),
    }
}

/// Who asks for counts all along and does not say whether they are wanted wants them: in the chunks that come anyway, since one without
/// choices surprises a client that has not asked for it. To say that none are wanted is to say it of all.
fn usage_in(options: &StreamOptions) -> UsageIn {
    let every = options.continuous_usage_stats.unwrap_or(false);
    match options.include_usage {
        Some(true) => UsageIn { every, last: true },
        Some(false) => UsageIn::default(),
        None => UsageIn { every, last: false },
    }
}
