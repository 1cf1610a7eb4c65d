//! What settings are called by whoever reads a message. The engine has its own words for them; a person gave flags, and an
//! `InferenceDeployment` has fields. Owns the table of names; knows no value of a setting.

use crate::config::StartedBy;

/// A setting under each of its names.
struct Setting {
    /// The engine's, and ours before it is known who reads.
    ours: &'static str,
    /// Below `spec` of an `InferenceDeployment`, and in the file that the operator writes.
    field: &'static str,
    /// On the command line.
    flag: &'static str,
}

/// Every setting that a message may name. None is part of another's name.
const SETTINGS: [Setting; 17] = [
    Setting { ours: "model_source", field: "model.source", flag: "--model" },
    Setting { ours: "served_names", field: "model.servedNames", flag: "--served-name" },
    Setting { ours: "tool_call_format", field: "model.toolCallFormat", flag: "--tool-call-format" },
    Setting { ours: "reasoning_format", field: "model.reasoningFormat", flag: "--reasoning-format" },
    Setting { ours: "max_model_len", field: "engine.maxModelLen", flag: "--max-model-len" },
    Setting { ours: "max_num_seqs", field: "engine.maxNumSeqs", flag: "--max-num-seqs" },
    Setting { ours: "max_batched_tokens", field: "engine.maxBatchedTokens", flag: "--max-batched-tokens" },
    Setting { ours: "max_waiting", field: "engine.maxWaiting", flag: "--max-waiting" },
    Setting { ours: "kv_cache_tokens", field: "engine.kvCacheTokens", flag: "--kv-cache-tokens" },
    Setting { ours: "tensor_parallel", field: "parallelism.tensor", flag: "--tensor-parallel" },
    Setting { ours: "pipeline_parallel", field: "parallelism.pipeline", flag: "--pipeline-parallel" },
    Setting { ours: "memory_fraction", field: "engine.memoryFraction", flag: "--memory-fraction" },
    Setting { ours: "batch_invariant", field: "engine.batchInvariant", flag: "--batch-invariant" },
    Setting { ours: "itl_target_ms", field: "engine.itlTargetMs", flag: "--itl-target-ms" },
    Setting { ours: "kv_cache_dtype", field: "engine.kvCacheDtype", flag: "--kv-cache-dtype" },
    Setting { ours: "quantization", field: "engine.quantization", flag: "--quantization" },
    Setting {
        ours: "trust_request_chat_template",
        field: "engine.trustRequestChatTemplate",
        flag: "--trust-request-chat-template",
    },
];

/// The message with every setting called as its reader wrote it. Not for messages that name files.
pub fn in_words_of(reader: StartedBy, message: &str) -> String {
    SETTINGS.iter().fold(message.to_owned(), |message, setting| {
        let theirs = match reader {
            StartedBy::Operator => setting.field,
            StartedBy::Person => setting.flag,
        };
        message.replace(setting.ours, theirs)
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use stoker_crds::contract::{EngineSettings, KvCacheDtype, Quantization};

    use super::*;

    #[test]
    fn a_setting_is_called_as_its_reader_wrote_it() {
        let message = "lower max_model_len to 1280, or raise memory_fraction to at least 0.39";
        assert_eq!(
            in_words_of(StartedBy::Operator, message),
            "lower engine.maxModelLen to 1280, or raise engine.memoryFraction to at least 0.39"
        );
        assert_eq!(
            in_words_of(StartedBy::Person, message),
            "lower --max-model-len to 1280, or raise --memory-fraction to at least 0.39"
        );
    }

    #[test]
    fn every_name_is_a_flag_there_is() {
        let command = crate::args::Args::command();
        let flags: Vec<_> = command.get_arguments().filter_map(|argument| argument.get_long()).collect();
        for Setting { flag, .. } in &SETTINGS {
            assert!(flags.contains(&flag.trim_start_matches('-')), "{flag}");
        }
    }

    #[test]
    fn every_size_of_the_engine_whose_name_has_several_words_is_known() {
        let fields = serde_json::to_value(EngineSettings {
            batch_invariant: Some(true),
            itl_target_ms: Some(40),
            quantization: Some(Quantization::Fp8),
            kv_cache_dtype: Some(KvCacheDtype::Fp8),
            trust_request_chat_template: Some(true),
            ..EngineSettings::default()
        });
        for field in fields.unwrap().as_object().unwrap().keys() {
            // Switched on or off, it cannot be wrong; and a name of one word is the same for everybody.
            let is_named = !["prefixCaching", "threads"].contains(&field.as_str());
            let is_known = SETTINGS.iter().any(|setting| setting.field == format!("engine.{field}"));
            assert_eq!(is_known, is_named, "{field}");
        }
    }
}
