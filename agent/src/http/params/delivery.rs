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
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum UsageIn {
    /// None of them.
    No,
    /// One more behind the last.
    Last,
    /// Each of them, and one more.
    Every,
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
    let counts_alone =
        |options: &StreamOptions| options.continuous_usage_stats == Some(true) && options.include_usage != Some(true);
    if stream && options.as_ref().is_some_and(counts_alone) {
        let (field, message) = (
            "stream_options.continuous_usage_stats",
            "`continuous_usage_stats` needs `include_usage: true`: send both",
        );
        return Err(ApiError::invalid(field, message));
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

fn usage_in(options: &StreamOptions) -> UsageIn {
    match (options.include_usage.unwrap_or(false), options.continuous_usage_stats.unwrap_or(false)) {
        (false, _) => UsageIn::No,
        (true, false) => UsageIn::Last,
        (true, true) => UsageIn::Every,
    }
}
