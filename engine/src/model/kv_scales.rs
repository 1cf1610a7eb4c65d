//! Scales that a checkpoint has for keys and values in a cache of e4m3: a number is its code's times the scale. Whoever quantises with a
//! calibration text leaves them beside the projections, under one of these names:
//!
//! ```text
//! model.layers.0.self_attn.k_scale         model.layers.0.self_attn.v_scale            compressed-tensors, Quark
//! model.layers.0.self_attn.k_proj.k_scale  model.layers.0.self_attn.v_proj.v_scale     ModelOpt
//! model.layers.0.self_attn.k_proj.output_scale  ... v_proj.output_scale                compressed-tensors before 0.9
//! model.layers.0.self_attn.kv_scale                                                    AutoFP8: one for both
//! ```

use super::{
    ModelError, ModelSpec,
    spec::LayerSpec,
    tensor::Tensor,
    weights::{BoundWeights, WeightStore},
};

/// Ends of names of such tensors.
pub(super) const ENDS: [&str; 4] = [".k_scale", ".v_scale", ".kv_scale", ".output_scale"];

impl WeightStore {
    /// Of each layer the scales of keys and of values, if it has both.
    fn kv_scales(&self, spec: &ModelSpec) -> Result<Vec<Option<[f32; 2]>>, ModelError> {
        spec.layers.iter().map(|layer| self.kv_scales_of(layer)).collect()
    }

    fn kv_scales_of(&self, layer: &LayerSpec) -> Result<Option<[f32; 2]>, ModelError> {
        let (k, v) = (layer.attention.k.weight.module(), layer.attention.v.weight.module());
        let Some((attention, _)) = k.rsplit_once('.') else { return Ok(None) };
        let candidates = [
            [format!("{attention}.k_scale"), format!("{attention}.v_scale")],
            [format!("{k}.k_scale"), format!("{v}.v_scale")],
            [format!("{k}.output_scale"), format!("{v}.output_scale")],
            [format!("{attention}.kv_scale"), format!("{attention}.kv_scale")],
        ];
        for names in candidates {
            let [Some(k), Some(v)] = names.map(|name| self.tensor(&name)) else { continue };
            return Ok(Some([number(k)?, number(v)?]));
        }
        Ok(None)
    }
}

impl BoundWeights {
    /// Of each layer of the model that these were found for the scales of keys and of values, if it has both.
    pub(crate) fn kv_scales(&self, spec: &ModelSpec) -> Result<Vec<Option<[f32; 2]>>, ModelError> {
        self.store().kv_scales(spec)
    }
}

/// The one number of a tensor.
fn number(tensor: &Tensor) -> Result<f32, ModelError> {
    let refused =
        |problem: String| ModelError::Quantised { file: tensor.file.to_string(), tensor: tensor.name.clone(), problem };
    if tensor.n_values() != 1 {
        return Err(refused(format!("has shape {:?}, a scale of keys or values is one number", tensor.shape)));
    }
    let format = tensor.format.map_err(|dtype| refused(format!("is {dtype}, a scale is F32, BF16 or F16")))?;
    match format.unpack(tensor.bytes())[0] {
        scale if scale.is_finite() && scale > 0.0 => Ok(scale),
        scale => Err(refused(format!("is {scale}, a scale is a number above 0"))),
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, sync::Arc};

    use serde_json::json;
    use stoker_fit::format::WeightFormat;

    use super::*;
    use crate::model::{CheckpointFormat, FileBytes, ModelConfig};

    fn found(tensors: &[(&str, &[f32])]) -> Result<Vec<Option<[f32; 2]>>, String> {
        let config = json!({"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 10, "max_position_embeddings": 128});
        let config = ModelConfig::from_json(&config, "config.json").unwrap();
        let spec = ModelSpec::new(&config, CheckpointFormat::HuggingFace).unwrap();
        let tensor = |(name, values): &(&str, &[f32])| {
            let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            let tensor = Tensor {
                file: "model.safetensors".into(),
                name: (*name).into(),
                format: Ok(WeightFormat::F32),
                shape: vec![values.len()],
                range: 0..bytes.len(),
                content: Arc::new(FileBytes::Owned(bytes)),
            };
            ((*name).to_owned(), tensor)
        };
        let tensors: BTreeMap<String, Tensor> = tensors.iter().map(tensor).collect();
        let store = WeightStore::new(tensors, "model.safetensors".into(), CheckpointFormat::HuggingFace);
        store.kv_scales(&spec).map_err(|error| error.to_string())
    }

    #[test]
    fn scales_are_found_under_the_names_of_all_who_leave_them() {
        let layer = "model.layers.1.self_attn.";
        for [k, v] in [
            ["k_scale", "v_scale"],
            ["k_proj.k_scale", "v_proj.v_scale"],
            ["k_proj.output_scale", "v_proj.output_scale"],
        ] {
            let (k, v) = (format!("{layer}{k}"), format!("{layer}{v}"));
            assert_eq!(found(&[(&k, &[0.25]), (&v, &[0.5])]), Ok(vec![None, Some([0.25, 0.5])]), "{k}");
            assert_eq!(found(&[(&k, &[0.25])]), Ok(vec![None, None]), "{k} alone");
        }
        assert_eq!(found(&[("model.layers.0.self_attn.kv_scale", &[2.0])]), Ok(vec![Some([2.0, 2.0]), None]));
    }

    #[test]
    fn what_is_no_scale_is_refused_by_name() {
        let refusal = |scale: &[f32]| {
            let names = ["model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_scale"];
            found(&[(names[0], &[1.0]), (names[1], scale)]).unwrap_err()
        };
        let at = "model.safetensors: tensor model.layers.0.self_attn.v_scale";
        assert_eq!(refusal(&[1.0, 2.0]), format!("{at} has shape [2], a scale of keys or values is one number"));
        for (scale, said) in [(f32::NAN, "NaN"), (-1.0, "-1"), (0.0, "0"), (f32::INFINITY, "inf")] {
            assert_eq!(refusal(&[scale]), format!("{at} is {said}, a scale is a number above 0"));
        }
    }
}
