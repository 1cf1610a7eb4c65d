//! Which images and ServiceAccounts deployments may name: lists of patterns that whoever runs the operator gives it. Pure.

/// What deployments may name.
#[derive(Clone, Debug, Default)]
pub struct Allowed {
    /// Images. The operator's own agent image is always allowed.
    pub images: AllowList,
    /// ServiceAccounts. Naming none is always allowed.
    pub service_accounts: AllowList,
}

/// Patterns in which `*` stands for any characters, `/` included. No pattern: everything is allowed.
#[derive(Clone, Debug, Default)]
pub struct AllowList(Vec<String>);

impl AllowList {
    /// What one of `patterns` matches, or everything if there is none.
    pub fn new(patterns: Vec<String>) -> Self {
        Self(patterns)
    }

    /// Whether the name is allowed.
    pub fn permits(&self, name: &str) -> bool {
        self.0.is_empty() || self.0.iter().any(|pattern| matches(pattern, name))
    }

    /// The patterns, for messages.
    pub fn text(&self) -> String {
        self.0.join(", ")
    }
}

/// Whether the whole name is what the pattern says.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return pattern == name };
    let (middle, last) = rest.rsplit_once('*').unwrap_or(("", rest));
    let Some(mut left) = name.strip_prefix(first).and_then(|name| name.strip_suffix(last)) else { return false };
    // Each piece as early as it can be, which leaves the most for those after it.
    middle.split('*').all(|piece| {
        let found = left.find(piece);
        left = found.map_or(left, |at| &left[at + piece.len()..]);
        found.is_some()
    })
}
