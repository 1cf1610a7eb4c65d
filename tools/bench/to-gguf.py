"""Writes a checkpoint in Hugging Face's layout as one GGUF file with the same weights, for llama.cpp.

usage: to-gguf.py DIRECTORY OUT.gguf      needs the gguf and numpy packages

Families: Llama, Qwen2, Qwen3. Matrices keep their format; vectors become F32, as llama.cpp wants them.
"""

import json
import mmap
import sys
from pathlib import Path

import gguf
import numpy as np

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
FORMATS = {
    "BF16": (np.uint16, gguf.GGMLQuantizationType.BF16),
    "F16": (np.float16, gguf.GGMLQuantizationType.F16),
    "F32": (np.float32, gguf.GGMLQuantizationType.F32),
}


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    directory, out = Path(sys.argv[1]), sys.argv[2]
    config = json.loads((directory / "config.json").read_text())
    architecture = ARCHITECTURES.get(config["architectures"][0])
    if architecture is None:
        sys.exit(f"{config['architectures'][0]} is not one of {', '.join(ARCHITECTURES)}")
    writer = gguf.GGUFWriter(out, architecture)
    add_sizes(writer, config)
    add_vocabulary(writer, json.loads((directory / "tokenizer.json").read_text()), config)
    add_tensors(writer, directory / "model.safetensors", config, architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def head_dim(config: dict) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def add_sizes(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim(config))
    writer.add_value_length(head_dim(config))
    writer.add_rope_dimension_count(head_dim(config))
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def add_vocabulary(writer: gguf.GGUFWriter, tokenizer: dict, config: dict) -> None:
    """The byte-level BPE of tokenizer.json; ids without a token get a name nobody writes."""
    named = dict(tokenizer["model"]["vocab"])
    named.update({token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])})
    spelled = {idx: token for token, idx in named.items()}
    size = config["vocab_size"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    if not merges:
        # llama.cpp refuses a BPE without merges: the first two letters, as the first id that has no token.
        spelled[len(named)] = "ab"
        merges = ["a b"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([spelled.get(idx, f"[{idx}]") for idx in range(size)])
    writer.add_token_types([gguf.TokenType.NORMAL if idx in spelled else gguf.TokenType.UNUSED for idx in range(size)])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def add_tensors(writer: gguf.GGUFWriter, path: Path, config: dict, architecture: str) -> None:
    for name, fmt, shape, values in tensors(path):
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config["num_attention_heads" if ".q_proj" in name else "num_key_value_heads"]
            values = interleaved(values.reshape(shape), heads)
        values = values.reshape(shape)
        if len(shape) == 1:
            writer.add_tensor(gguf_name(name), as_f32(values, fmt))
        else:
            writer.add_tensor(gguf_name(name), values.view(np.uint8) if fmt == "BF16" else values, raw_dtype=FORMATS[fmt][1])
    factors = rope_factors(config)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)


def tensors(path: Path):
    """Name, format, shape and mapped values of every tensor of a safetensors file."""
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    begin = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:begin]).items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        dtype = np.dtype(FORMATS[entry["dtype"]][0])
        values = np.frombuffer(data, dtype, (end - start) // dtype.itemsize, begin + start)
        yield name, entry["dtype"], entry["shape"], values


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{LAYER[rest]}.{kind}"


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp rotates neighbours where Hugging Face rotates halves: the rows of each head are dealt accordingly."""
    rows, width = values.shape
    return values.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def as_f32(values: np.ndarray, fmt: str) -> np.ndarray:
    if fmt == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def rope_factors(config: dict):
    """Llama 3.1's divisors of the rotary frequencies, as llama.cpp reads them."""
    scaling = config.get("rope_scaling")
    if not scaling:
        return None
    dim, original = head_dim(config), scaling["original_max_position_embeddings"]
    wavelength = 2 * np.pi * config["rope_theta"] ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / scaling["factor"] + smooth)).astype(np.float32)


if __name__ == "__main__":
    main()
