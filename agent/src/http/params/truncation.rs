//! How much of a prompt is kept where it may be cut.

use crate::http::{error::ApiError, fields::Fields};

/// How much of a prompt is kept, and which end.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Truncation {
    /// Tokens; `None` for what leaves room for one token of completion.
    pub(crate) tokens: Option<u32>,
    /// Which end is kept.
    pub(crate) keeps: Kept,
}

/// One end of a prompt.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kept {
    /// Cut on the right side.
    Beginning,
    /// Cut on the left side.
    End,
}

/// How much of a prompt is kept, if not all.
pub(crate) fn truncation(fields: &mut Fields) -> Result<Option<Truncation>, ApiError> {
    let sent = fields.checked::<i64>("truncate_prompt_tokens", "-1, or 1 or more", |k| *k == -1 || *k > 0)?;
    let sides = |side: &String| ["left", "right"].contains(&side.as_str());
    let side = fields.checked("truncation_side", "`left` or `right`", sides)?;
    let keeps = if side.as_deref() == Some("right") { Kept::Beginning } else { Kept::End };
    // What is never cut is not cut on its left side, which is the default.
    if sent.is_none() && keeps == Kept::Beginning {
        let message = "`truncation_side` says which end of a prompt is cut off, and `truncate_prompt_tokens`, how many tokens are \
                       kept, is not there: send it, or remove `truncation_side`";
        return Err(ApiError::invalid("truncation_side", message));
    }
    Ok(sent.map(|k| Truncation { tokens: u32::try_from(k).ok(), keeps }))
}
