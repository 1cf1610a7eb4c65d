//! What gateways call beginnings of a request's prompt. They have no tokenizer and name text, by a hash and where it ends; which
//! tokens that is follows from how long text and prompt are. So an end is wrong by as much as the text is dense in tokens before it,
//! compared with after it: what a gateway believes to be cached is then a little too long or too short, and what is cached is not changed.

use std::sync::Arc;

use stoker_crds::kv_events::PREFIXES_MAX;
use stoker_engine::PrefixMark;

/// Beginnings of a prompt by their names, the shortest first.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Prefixes {
    /// Of the whole prompt's text.
    n_bytes: u32,
    /// Where each ends, and its name.
    ends: Vec<(u32, u64)>,
}

impl Prefixes {
    /// Reads `BYTES END:NAME END:NAME …`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut words = text.split(' ');
        let n_bytes = words.next()?.parse().ok()?;
        let end = |word: &str| {
            let (end, name) = word.split_once(':')?;
            Some((end.parse().ok()?, u64::from_str_radix(name, 16).ok()?))
        };
        let ends: Vec<(u32, u64)> = words.map(end).collect::<Option<_>>()?;
        let rise = ends.is_sorted_by(|(a, _), (b, _)| a < b) && ends.last().is_none_or(|(last, _)| *last <= n_bytes);
        (rise && ends.len() <= PREFIXES_MAX).then_some(Self { n_bytes, ends })
    }

    /// They as tokens of a prompt.
    pub(crate) fn marks(&self, prompt_tokens: usize) -> Arc<[PrefixMark]> {
        let tokens = |end: u32| u64::from(end) * prompt_tokens as u64 / u64::from(self.n_bytes.max(1));
        self.ends.iter().map(|(end, name)| PrefixMark { name: *name, n_tokens: tokens(*end) as u32 }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_become_tokens_in_proportion() {
        let prefixes = Prefixes::parse("1000 256:00ff 512:fffffffffffffff0 1000:1").unwrap();
        let marks: Vec<(u64, u32)> = prefixes.marks(200).iter().map(|mark| (mark.name, mark.n_tokens)).collect();
        assert_eq!(marks, [(255, 51), (u64::MAX - 15, 102), (1, 200)]);
        assert_eq!(Prefixes::parse("0").unwrap().marks(7).len(), 0);
    }

    #[test]
    fn what_names_no_beginnings_is_refused() {
        let many: String = (1..=PREFIXES_MAX + 1).map(|end| format!(" {end}:1")).collect();
        let many = format!("9999{many}");
        for text in [
            "",
            "x",
            "-1",
            "9 5",
            "9 5:",
            "9 5:g",
            "9 5:1 5:2",
            "9 6:1 5:2",
            "9 10:1",
            "9  5:1",
            "9 5:11112222333344445",
            &many,
        ] {
            assert_eq!(Prefixes::parse(text), None, "{text}");
        }
    }
}
