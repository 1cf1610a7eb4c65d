//! What the address of the fleet's page asks for: which rows, in what order. Whatever it says, something is shown.

use std::cmp::Ordering;

use serde::{Deserialize, Deserializer};

use crate::{
    view::{Summary, Tone},
    words::encoded,
};

/// See the module.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub struct FleetQuery {
    /// Part of a name or of a model.
    #[serde(deserialize_with = "short")]
    pub q: String,
    /// A namespace, or all.
    #[serde(deserialize_with = "short")]
    pub ns: String,
    /// `trouble`: only what is not as it should be.
    #[serde(deserialize_with = "short")]
    pub state: String,
    /// In what order.
    #[serde(deserialize_with = "sort")]
    pub sort: Sort,
    /// Which page, from 1.
    #[serde(deserialize_with = "page")]
    pub page: usize,
}

/// An order and its direction.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Sort {
    /// By what.
    pub order: Order,
    /// The largest first.
    pub descending: bool,
}

/// By what rows are sorted.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Order {
    /// What somebody has to look at first.
    #[default]
    State,
    /// Namespace and name.
    Name,
    /// Replicas wanted.
    Replicas,
    /// KV in use.
    Kv,
    /// Requests.
    Running,
    /// Tokens a second.
    Tokens,
    /// 95th percentile of the time to first token.
    Ttft,
    /// 95th percentile between two tokens.
    Itl,
    /// Preemptions.
    Preemptions,
    /// GPUs, waited for first.
    Gpus,
}

const WORDS: [(Order, &str); 10] = [
    (Order::State, "state"),
    (Order::Name, "name"),
    (Order::Replicas, "replicas"),
    (Order::Kv, "kv"),
    (Order::Running, "running"),
    (Order::Tokens, "tokens"),
    (Order::Ttft, "ttft"),
    (Order::Itl, "itl"),
    (Order::Preemptions, "preemptions"),
    (Order::Gpus, "gpus"),
];

impl Sort {
    /// As the address has it: `kv`, or `-kv` for the largest first.
    pub fn word(self) -> String {
        let word = WORDS.iter().find(|(order, _)| *order == self.order).map_or("state", |(_, word)| word);
        if self.descending { format!("-{word}") } else { word.to_owned() }
    }

    fn parse(text: &str) -> Self {
        let (word, descending) = text.strip_prefix('-').map_or((text, false), |word| (word, true));
        let known = WORDS.iter().find(|(_, known)| *known == word);
        known.map(|(order, _)| Self { order: *order, descending }).unwrap_or_default()
    }

    /// Names decide what is equal otherwise, so that rows stay where they are.
    pub fn compare(self, a: &Summary, b: &Summary) -> Ordering {
        let by_name = || (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name));
        let ordering = match self.order {
            Order::Name => by_name(),
            Order::State => a.state.tone.cmp(&b.state.tone),
            order => value(order, a).total_cmp(&value(order, b)),
        };
        if self.descending { ordering.reverse() } else { ordering }.then_with(by_name)
    }
}

/// What is not known is less than anything.
fn value(order: Order, summary: &Summary) -> f64 {
    let Summary { replicas, load, gpus, .. } = summary;
    let value = match order {
        Order::State | Order::Name => None,
        Order::Replicas => Some(f64::from(replicas.wanted)),
        Order::Kv => load.kv,
        Order::Running => Some(f64::from(load.running) + f64::from(load.waiting)),
        Order::Tokens => load.tokens,
        Order::Ttft => load.ttft.p95,
        Order::Itl => load.itl.p95,
        Order::Preemptions => Some(load.preemptions as f64),
        Order::Gpus => Some(gpus.waiting as f64 * 1e9 + gpus.used as f64),
    };
    value.unwrap_or(-1.0)
}

impl FleetQuery {
    pub(super) fn takes(&self, summary: &Summary) -> bool {
        let Summary { namespace, name, model, state, .. } = summary;
        let says = |text: &str| text.to_lowercase().contains(&self.q.trim().to_lowercase());
        let fits = self.ns.is_empty() || *namespace == self.ns;
        fits && (self.q.trim().is_empty() || says(name) || says(model))
            && (!self.is_trouble_only() || matches!(state.tone, Tone::Bad | Tone::Wait))
    }

    pub(super) fn is_trouble_only(&self) -> bool {
        self.state == "trouble"
    }

    pub(super) fn is_narrow(&self) -> bool {
        !self.q.is_empty() || !self.ns.is_empty() || !self.state.is_empty()
    }

    /// The address without its path; empty for the usual page.
    pub fn address(&self) -> String {
        let page = if self.page > 1 { self.page.to_string() } else { String::new() };
        let sort = if self.sort == Sort::default() { String::new() } else { self.sort.word() };
        let parts =
            [("q", self.q.as_str()), ("ns", &self.ns), ("state", &self.state), ("sort", &sort), ("page", &page)];
        let said = parts.iter().filter(|(_, value)| !value.is_empty());
        let text: Vec<String> = said.map(|(name, value)| format!("{name}={}", encoded(value))).collect();
        if text.is_empty() { String::new() } else { format!("?{}", text.join("&")) }
    }

    /// Sorted by this, and the other way round if it is so already. Of numbers the largest first.
    pub(super) fn sorted_by(&self, order: Order) -> String {
        let descending =
            if self.sort.order == order { !self.sort.descending } else { !matches!(order, Order::Name | Order::State) };
        format!("/{}", Self { sort: Sort { order, descending }, page: 1, ..self.clone() }.address())
    }

    pub(super) fn on_page(&self, page: usize) -> String {
        format!("/{}", Self { page, ..self.clone() }.address())
    }
}

fn short<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Ok(String::deserialize(deserializer)?.chars().take(200).collect())
}

fn sort<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Sort, D::Error> {
    Ok(Sort::parse(&String::deserialize(deserializer)?))
}

fn page<'de, D: Deserializer<'de>>(deserializer: D) -> Result<usize, D::Error> {
    Ok(String::deserialize(deserializer)?.parse().unwrap_or(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_means_the_same_after_its_way_through_a_link() {
        let query = FleetQuery {
            q: "a&b=\"<c>".into(),
            ns: "team".into(),
            state: "trouble".into(),
            sort: Sort { order: Order::Kv, descending: true },
            page: 3,
        };
        assert_eq!(query.address(), "?q=a%26b%3D%22%3Cc%3E&ns=team&state=trouble&sort=-kv&page=3");
        assert_eq!(FleetQuery { page: 1, ..FleetQuery::default() }.address(), "");
    }

    #[test]
    fn an_order_that_there_is_not_is_the_usual_one() {
        assert_eq!(Sort::parse("-kv").word(), "-kv");
        assert_eq!([Sort::parse("--kv"), Sort::parse(""), Sort::parse("<")], [Sort::default(); 3]);
    }

    #[test]
    fn a_head_turns_the_order_round_and_begins_with_the_largest_number() {
        let query = FleetQuery { page: 4, ..FleetQuery::default() };
        assert_eq!(query.sorted_by(Order::Kv), "/?sort=-kv");
        assert_eq!(query.sorted_by(Order::State), "/?sort=-state");
        let by_kv = FleetQuery { sort: Sort::parse("-kv"), ..query };
        assert_eq!(by_kv.sorted_by(Order::Kv), "/?sort=kv");
    }
}
