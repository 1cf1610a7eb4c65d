//! What a condition says, before it is dated. Pure.

use jiff::Timestamp;
use stoker_replica::Trouble;

/// Status, reason and message of a condition.
pub struct Verdict {
    /// True or False.
    pub value: bool,
    /// Reason and message.
    pub trouble: Trouble,
}

impl Verdict {
    /// A verdict of this reason.
    pub fn new(value: bool, reason: &str, message: impl Into<String>) -> Self {
        Self { value, trouble: Trouble::new(reason, message) }
    }
}

/// Times in objects have no fractions; what is written must equal what is read back.
pub fn whole_seconds(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).expect("the seconds of a timestamp are one")
}
