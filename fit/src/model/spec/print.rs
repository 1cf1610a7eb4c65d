//! A description as text: layers that read alike are told once. The text is what goldens compare and what a command prints.

use std::fmt::{self, Display, Write};

use super::{
    Activation, AttentionLayer, AttentionSpec, FeedForwardLayer, LinearSpec, ModelSpec, NormSpec, RowOrder, WeightSpec,
};
use crate::model::{RopeScaling, RopeSettings, family::NormWeight};

/// A description, with what is known of each weight beside its shape.
#[derive(Clone, Copy)]
pub struct Description<'a> {
    /// What is described.
    pub spec: &'a ModelSpec,
    /// How a weight is stored; empty where nothing is known.
    pub stored: &'a dyn Fn(&WeightSpec) -> String,
}

impl Display for ModelSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Description { spec: self, stored: &|_| String::new() }.fmt(f)
    }
}

impl fmt::Debug for Description<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Display for Description<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ModelSpec { architecture, embedding, norm, head, rope_sets, .. } = self.spec;
        writeln!(
            f,
            "{architecture}: {} parameters in {} layers",
            grouped(self.spec.n_params()),
            self.spec.layers.len()
        )?;
        for (idx, rope) in rope_sets.iter().enumerate() {
            writeln!(f, "angles {idx}: {}", rope_text(rope))?;
        }
        let scale = embedding.scale.map(|scale| format!("x {scale}"));
        f.write_str(&self.weight("", "embedding", &embedding.weight, scale))?;
        for (layers, text) in self.layer_texts() {
            write!(f, "layers {layers}\n{text}")?;
        }
        f.write_str(&self.norm("", "norm", norm))?;
        let cap = head.softcap.map(|cap| format!("logits capped at {cap}"));
        match &head.weight {
            Some(weight) => f.write_str(&self.weight("", "head", weight, cap)),
            None => writeln!(f, "{:<15}the embedding{}", "head", cap.map_or(String::new(), |cap| format!(", {cap}"))),
        }
    }
}

impl Description<'_> {
    /// The texts of all layers, each with the layers that have it, in the order of their first ones.
    fn layer_texts(&self) -> Vec<(String, String)> {
        let mut texts: Vec<(String, Vec<usize>)> = Vec::new();
        for (idx, layer) in self.spec.layers.iter().enumerate() {
            let text = self.attention(&layer.attention) + &self.feed_forward(&layer.feed_forward);
            match texts.iter_mut().find(|(known, _)| *known == text) {
                Some((_, layers)) => layers.push(idx),
                None => texts.push((text, vec![idx])),
            }
        }
        texts.into_iter().map(|(text, layers)| (ranges(&layers), text)).collect()
    }

    fn attention(&self, layer: &AttentionLayer) -> String {
        let AttentionLayer { before, q, k, v, qk_norm, rope_set, attention, o, after } = layer;
        let mut text = format!("  attention: {}\n", attention_text(attention, *rope_set));
        text += &self.norm_if("norm", before);
        for (label, linear) in [("q", q), ("k", k), ("v", v)] {
            text += &self.linear(label, linear);
        }
        if let Some(norms) = qk_norm {
            text += &(self.norm("    ", "q norm", &norms.q) + &self.norm("    ", "k norm", &norms.k));
        }
        text + &self.linear("o", o) + &self.norm_if("norm", after)
    }

    fn feed_forward(&self, layer: &FeedForwardLayer) -> String {
        let FeedForwardLayer { before, gate, up, activation, down, after } = layer;
        let activation = match activation {
            Activation::Silu => "silu",
            Activation::GeluTanh => "gelu (tanh)",
        };
        let mut text = format!("  feed-forward: {activation}\n") + &self.norm_if("norm", before);
        for (label, linear) in [("gate", gate), ("up", up), ("down", down)] {
            text += &self.linear(label, linear);
        }
        text + &self.norm_if("norm", after)
    }

    fn linear(&self, label: &str, linear: &LinearSpec) -> String {
        let bias = linear.bias.as_ref().map(|bias| self.weight("    ", &format!("{label} bias"), bias, None));
        self.weight("    ", label, &linear.weight, None) + &bias.unwrap_or_default()
    }

    fn norm_if(&self, label: &str, norm: &Option<NormSpec>) -> String {
        norm.as_ref().map(|norm| self.norm("    ", label, norm)).unwrap_or_default()
    }

    fn norm(&self, indent: &str, label: &str, norm: &NormSpec) -> String {
        let plus = if norm.stored == NormWeight::OnePlusFactor { "1 + weight, " } else { "" };
        self.weight(indent, label, &norm.weight, Some(format!("{plus}eps {:e}", norm.eps)))
    }

    /// One line: what it is, where it lies, its shape, how ranks share it, and more.
    fn weight(&self, indent: &str, label: &str, weight: &WeightSpec, more: Option<String>) -> String {
        let mut line =
            format!("{:<15}{} {:?}", format!("{indent}{label}"), within_layer(&weight.tensor), weight.shape());
        if weight.rows.len() < weight.tensor_shape[0] {
            let _ = write!(line, " from row {} of {}", weight.rows.start, weight.tensor_shape[0]);
        }
        let order = (weight.order != RowOrder::AsNeeded).then(|| "rows in rotary pairs".to_owned());
        let stored = Some((self.stored)(weight)).filter(|stored| !stored.is_empty());
        for part in [stored, order, Some(weight.sharding.to_string()), more].into_iter().flatten() {
            let _ = write!(line, ", {part}");
        }
        line + "\n"
    }
}

/// A tensor's name without its layer, which the text is not about.
fn within_layer(tensor: &str) -> &str {
    let behind = |prefix| tensor.strip_prefix(prefix).and_then(|rest: &str| rest.split_once('.'));
    behind("model.layers.").or(behind("blk.")).map_or(tensor, |(_, part)| part)
}

fn attention_text(attention: &AttentionSpec, rope_set: Option<usize>) -> String {
    let AttentionSpec { heads, scale, window, softcap } = attention;
    let mut text = format!("{} query heads, {} KV heads of {}", heads.n_heads, heads.n_kv_heads, heads.head_dim);
    let _ = write!(text, ", scale {scale}");
    let _ = match window {
        Some(window) => write!(text, ", sees {window} tokens"),
        None => write!(text, ", sees all"),
    };
    if let Some(cap) = softcap {
        let _ = write!(text, ", scores capped at {cap}");
    }
    let _ = match rope_set {
        Some(idx) => write!(text, ", angles {idx}"),
        None => write!(text, ", not turned"),
    };
    text
}

fn rope_text(rope: &RopeSettings) -> String {
    let RopeSettings { theta, width, scaling } = rope;
    let scaling = match scaling {
        RopeScaling::Default => "not stretched".into(),
        RopeScaling::Linear { factor } => format!("linear, factor {factor}"),
        RopeScaling::Dynamic { factor, original_max_position_embeddings: original } => {
            format!("dynamic, factor {factor} of {original} positions")
        }
        RopeScaling::Llama3(s) => format!(
            "llama3, factor {}, frequencies {} to {} of {} positions",
            s.factor, s.low_freq_factor, s.high_freq_factor, s.original_max_position_embeddings
        ),
        RopeScaling::Yarn(s) => format!(
            "yarn, factor {}, turns {} to {} of {} positions, scaled by {}",
            s.factor, s.beta_slow, s.beta_fast, s.original_max_position_embeddings, s.attention_factor
        ),
        RopeScaling::LongRope(s) => format!(
            "longrope, {} divisors within and beyond {} positions, scaled by {}",
            s.short_factor.len(),
            s.original_max_position_embeddings,
            s.attention_factor
        ),
    };
    format!("theta {theta}, {width} of a head's numbers turn, {scaling}")
}

/// Ascending numbers in words: runs, evenly spaced ones, single ones, and how many.
fn ranges(numbers: &[usize]) -> String {
    let mut rest = numbers;
    let mut parts = Vec::new();
    while let [first, ..] = *rest {
        let step = rest.get(1).map_or(1, |second| second - first);
        let n = rest.iter().enumerate().take_while(|(at, number)| **number == first + at * step).count();
        // Two numbers far apart are no series.
        let n = if n == 2 && step > 1 { 1 } else { n };
        let (run, behind) = rest.split_at(n);
        parts.push(match (run, step) {
            ([only], _) => only.to_string(),
            (_, 1) => format!("{first}-{}", run[n - 1]),
            _ => format!("{first}-{} by {step}", run[n - 1]),
        });
        rest = behind;
    }
    format!("{} ({})", parts.join(", "), numbers.len())
}

/// A number with commas.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let comma = |(at, digit): (usize, char)| {
        let is_border = at > 0 && (digits.len() - at).is_multiple_of(3);
        is_border.then_some(',').into_iter().chain([digit])
    };
    digits.chars().enumerate().flat_map(comma).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_told_as_runs() {
        assert_eq!(ranges(&[0, 1, 2, 3]), "0-3 (4)");
        assert_eq!(ranges(&[0, 2, 4, 6]), "0-6 by 2 (4)");
        assert_eq!(ranges(&[0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12]), "0-4, 6-10, 12 (11)");
        assert_eq!(ranges(&[3, 9]), "3, 9 (2)");
        assert_eq!([7, 1_234, 8_030_261_248].map(grouped), ["7", "1,234", "8,030,261,248"]);
    }
}
