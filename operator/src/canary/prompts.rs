//! The prompts on which a new revision is compared with the old one where a deployment names none: short, of several kinds, and none that a
//! model could know the answer to by heart alone.

/// See the module.
pub(super) const PROMPTS: [&str; 8] = [
    "The lighthouse keeper closed his book, looked at the sea and",
    "To make bread you need flour, water, salt and",
    "fn largest(numbers: &[i64]) -> Option<i64> {\n    let mut best =",
    "{\"name\": \"Ada\", \"born\": 1815, \"languages\": [",
    "One plus one is two, two plus two is four, four plus four is",
    "Die Straße war leer, und am Ende stand",
    "在很久很久以前,有一座",
    "Q: Why does ice float on water?\nA:",
];
