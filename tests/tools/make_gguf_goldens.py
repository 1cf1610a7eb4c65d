#!/usr/bin/env python3
"""Writes the goldens of GGUF files: headers made by the `gguf` package, and what their models compute.

    VENV/bin/pip install gguf==0.19.0     # into the environment of make_family_goldens.py, which runs first
    VENV/bin/python tests/tools/make_gguf_goldens.py

tests/goldens/gguf/NAME.header is the beginning of a GGUF file up to its data; NAME.json beside it has
- `tensors`: name, the tensor's name in Hugging Face checkpoints, ggml's format, its offset in the data, its bytes, and
  the heads whose rows the format stores in rotary pairs (or null). Data follows from the Hugging Face name by the formula
  of make_family_goldens.py: values for F32, and for quantised formats the bytes of blocks with their scales set by
  `block_bytes` here;
- `constants`: the data of tensors that are not weights;
- `file_sha256` of the whole file; `family`: the golden in tests/goldens/families whose logits it must give, or
  `tokens`, `ids` and `rows` of its own, computed by transformers from what `gguf.dequantize` gives;
- `noise_floor` of a quantised model: how far the rows move, relative to the largest logit, when what enters every matrix
  is rounded to blocks of 8 bits as Q8_0 has them, and matrices of K formats are too; `greedy`: the tokens that follow
  `tokens`;
- `texts`: texts and their tokens by transformers' reading of the same file.
dequantised.json has, for each format, the sha256 of 64 blocks dequantised by `gguf.dequantize`.
"""

import hashlib
import json
import pathlib
import tempfile

import gguf
import numpy
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import make_family_goldens as families

GOLDENS = pathlib.Path(__file__).resolve().parent.parent / "goldens" / "gguf"
N_BLOCKS = 64
N_GREEDY = 64
# Where a block has f16 scales, and the exponent they get: so that values are of the size of weights.
SCALES = {Type.Q8_0: [(0, 4)], Type.Q4_0: [(0, 9)], Type.Q4_K: [(0, 2), (2, 5)], Type.Q5_K: [(0, 1), (2, 5)],
          Type.Q6_K: [(208, 1)], Type.Q4_1: [(0, 8), (2, 10)], Type.Q5_0: [(0, 8)], Type.Q5_1: [(0, 7), (2, 10)]}
FAMILIES = {"llama2": "llama", "llama3": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3", "gemma2": "gemma2",
            "gemma3": "gemma3"}
MIXED = [("model.embed_tokens", Type.Q6_K), ("q_proj", Type.Q4_K), ("k_proj", Type.Q8_0), ("v_proj", Type.Q5_K),
         ("o_proj", Type.Q4_0), ("gate_proj", Type.Q4_K), ("up_proj", Type.Q8_0), ("down_proj", Type.Q6_K),
         ("lm_head", Type.Q5_K)]
TEXTS = ["", "the theme", "  two  spaces", "ünïcödé – 日本語 🔥", "line\nline\r\n\ttab", "</s> the <s>", "it's 1234 THE"]
LETTERS = "the nor"
PIECES = ["▁"] + sorted(set(LETTERS.replace(" ", ""))) + ["th", "▁th", "the", "▁the", "he", "no"]


def block_bytes(name, kind, n_blocks):
    """The bytes of a quantised tensor: the formula's, with the exponents of the scales set and their signs cleared."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    with numpy.errstate(over="ignore"):
        z = numpy.uint64(families.fnv1a64(name)) + numpy.arange(n_blocks * size, dtype=numpy.uint64) * numpy.uint64(
            0x9E3779B97F4A7C15)
        z = (z ^ (z >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
        z = z ^ (z >> numpy.uint64(31))
    blocks = (z >> numpy.uint64(56)).astype(numpy.uint8).reshape(n_blocks, size)
    for at, exponent in SCALES[kind]:
        blocks[:, at + 1] = (blocks[:, at + 1] & 3) | (exponent << 2)
    return blocks


def in_pairs(rows, heads):
    """From halves to pairs, as llama.cpp's converter orders queries and keys of Llama."""
    shape = rows.shape
    return rows.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def in_halves(rows, heads):
    shape = rows.shape
    return rows.reshape(heads, shape[0] // heads // 2, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def paired_heads(name, config, arch):
    if arch != "llama":
        return None
    return {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])


def add_settings(writer, config, arch):
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    if arch == "gemma3":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["full_attention"]["factor"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if arch in ("qwen3", "gemma2", "gemma3"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if arch in ("llama", "phi3"):
        writer.add_rope_dimension_count(head_dim)
    if arch in ("phi3", "gemma2", "gemma3"):
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def add_byte_level_tokenizer(writer):
    alphabet = sorted(families_alphabet())
    tokens = alphabet + ["<s>", "</s>"]
    merges = ["t h", "th e", "Ġ the", "h e"]
    tokens += [merge.replace(" ", "") for merge in merges]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * 4)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")


def families_alphabet():
    from tokenizers import pre_tokenizers
    return pre_tokenizers.ByteLevel.alphabet()


def add_sentence_piece_tokenizer(writer):
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + PIECES
    kinds = [gguf.TokenType.UNKNOWN] + [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.BYTE] * 256
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens[:families.VOCAB])
    writer.add_token_types((kinds + [gguf.TokenType.NORMAL] * len(PIECES))[:families.VOCAB])
    writer.add_token_scores([0.0] * 259 + [-float(rank) for rank in range(len(PIECES))][:families.VOCAB - 259])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def llama3_divisors(config):
    """What llama.cpp's converter makes of Llama 3's settings."""
    rope, head_dim = config.rope_parameters, config.hidden_size // config.num_attention_heads
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
    original = rope["original_max_position_embeddings"]
    divisors = []
    for frequency in frequencies:
        wavelength = 2 * torch.pi / frequency
        if wavelength < original / rope["high_freq_factor"]:
            divisors.append(1.0)
        elif wavelength > original / rope["low_freq_factor"]:
            divisors.append(rope["factor"])
        else:
            smooth = (original / wavelength - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"])
            divisors.append(float(1 / ((1 - smooth) / rope["factor"] + smooth)))
    return numpy.array(divisors, dtype=numpy.float32)


def write(name, arch, config, formats, state_of):
    """Writes file, header and description; `state_of(hf_name, shape)` is the value of an F32 tensor."""
    path = pathlib.Path(tempfile.mkdtemp()) / f"{name}.gguf"
    writer = gguf.GGUFWriter(path, arch)
    add_settings(writer, config, arch)
    if arch == "llama":
        add_sentence_piece_tokenizer(writer)
    else:
        add_byte_level_tokenizer(writer)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), config.num_hidden_layers)
    tensors, constants = [], {}
    shapes = AutoModelForCausalLM.from_config(config).state_dict()
    for hf_name in sorted(shapes):
        if hf_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        base, suffix = hf_name.rsplit(".", 1)
        theirs = f"{names.get_name(base)}.{suffix}"
        heads = paired_heads(hf_name, config, arch)
        kind = next((kind for part, kind in formats if part in hf_name), Type.F32)
        shape = tuple(shapes[hf_name].shape)
        if kind == Type.F32:
            values = state_of(hf_name, shape)
            writer.add_tensor(theirs, in_pairs(values, heads) if heads else values)
        else:
            per_block = gguf.GGML_QUANT_SIZES[kind][0]
            blocks = block_bytes(hf_name, kind, int(numpy.prod(shape)) // per_block)
            writer.add_tensor(theirs, blocks.reshape(shape[0], -1), raw_dtype=kind)
        tensors.append((theirs, hf_name, kind, heads))
    if name == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(config))
        constants["rope_freqs.weight"] = llama3_divisors(config).tobytes().hex()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader = gguf.GGUFReader(path)
    placed = {tensor.name: tensor for tensor in reader.tensors}
    start = reader.data_offset
    content = path.read_bytes()
    (GOLDENS / f"{name}.header").write_bytes(content[:start])
    rows = [[theirs, hf_name, kind.name, placed[theirs].data_offset - start, int(placed[theirs].n_bytes), heads]
            for theirs, hf_name, kind, heads in tensors]
    constants = [[key, placed[key].data_offset - start, value] for key, value in constants.items()]
    return path, dict(tensors=rows, constants=constants, n_bytes=len(content) - start,
                      file_sha256=hashlib.sha256(content).hexdigest())


def texts_of(path):
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return [[text, tokenizer(text).input_ids] for text in TEXTS]


def reading_difference(path, golden, config):
    """How far transformers' own reading of the file is from the golden: our file is what it takes for one."""
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32, config=config,
                                                 attn_implementation="eager").eval()
    exact = families.logits_of(model, golden["tokens"])
    return max(abs(float(exact[row["position"], id]) - logit)
               for row in golden["rows"] for id, logit in zip(golden["ids"], row["logits"]))


def dump(name, golden):
    (GOLDENS / f"{name}.json").write_text(families.dump(golden))


def make_family(name, arch):
    directory = families.GOLDENS / name
    config = AutoConfig.from_pretrained(directory)
    family = json.loads((directory / "golden.json").read_text())
    base_of = {tensor: base for tensor, _, base in family["tensors"]}
    # The converter adds the one that Gemma's norms lack.
    extra = lambda hf: 1.0 if arch.startswith("gemma") and "norm" in hf else 0.0
    value = lambda hf, shape: families.values_of(hf, shape, base_of[hf]).float().numpy() + numpy.float32(extra(hf))
    path, golden = write(name, arch, config, [], value)
    golden.update(family=name, texts=texts_of(path))
    if arch.startswith("gemma"):
        # The format has no place for another scale of attention than the heads' width gives.
        config.query_pre_attn_scalar = config.head_dim
        golden.update(rows_of_family(config, family))
    dump(name, golden)
    expected = golden if "rows" in golden else family
    print(f"{name}: transformers reads the file within {reading_difference(path, expected, config):.1e}")


def rows_of_family(config, family):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        families.fill(model, config.model_type)
    rows = families.rows_of(families.logits_of(model, family["tokens"]))
    return dict(tokens=family["tokens"], ids=families.IDS, rows=rows)


def in_8_bits(x):
    """Each 32 numbers as integers of one scale."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    return (torch.round(blocks / scale.clamp_min(1e-30)) * scale).reshape(x.shape)


def noise_floor(model, golden):
    """How far the rows move when matrices are multiplied in 8 bits."""
    exact = families.logits_of(model, golden["tokens"])
    for _, hf, kind, _, _, _ in golden["tensors"]:
        if kind.endswith("_K"):
            matrix = model.get_parameter(hf)
            matrix.data = in_8_bits(matrix.data)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, inputs: (in_8_bits(inputs[0]),))
    moved = (families.logits_of(model, golden["tokens"]) - exact).abs().amax(-1) / exact.abs().amax(-1)
    return float(moved.max())


def greedy(model, tokens):
    with torch.no_grad():
        generated = model.generate(torch.tensor([tokens]), do_sample=False, max_new_tokens=N_GREEDY, eos_token_id=None,
                                   pad_token_id=0)
    return generated[0, len(tokens):].tolist()


def make_quantised(name, formats, n_layers):
    config = AutoConfig.for_model("llama", **{**families.DEFAULTS, **dict(hidden_size=256, intermediate_size=256,
                                                                          num_hidden_layers=n_layers)})
    values = {}
    norm = lambda hf, shape: families.values_of(hf, shape, 1.0).float().numpy()
    path, golden = write(name, "llama", config, formats, norm)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for theirs, hf, kind, _, _, heads in golden["tensors"]:
        shape = tuple(model.state_dict()[hf].shape)
        if kind == "F32":
            values[hf] = norm(hf, shape)
            continue
        kind = Type[kind]
        blocks = block_bytes(hf, kind, int(numpy.prod(shape)) // gguf.GGML_QUANT_SIZES[kind][0])
        stored = gguf.dequantize(blocks.reshape(shape[0], -1), kind).reshape(shape)
        values[hf] = in_halves(stored, heads) if heads else stored
    model.load_state_dict({hf: torch.from_numpy(numpy.ascontiguousarray(v)) for hf, v in values.items()})
    tokens = torch.randint(0, families.VOCAB, (40,), generator=torch.Generator().manual_seed(7)).tolist()
    rows = [row for row in families.rows_of(families.logits_of(model, tokens))]
    golden.update(tokens=tokens, ids=families.IDS, rows=rows, texts=texts_of(path), greedy=greedy(model, tokens))
    golden.update(noise_floor=noise_floor(model, golden))
    dump(name, golden)
    print(f"{name}: transformers reads the file within {reading_difference(path, golden, config):.1e}, "
          f"8 bits move it by {golden['noise_floor']:.1e}")


def make_dequantised():
    formats = []
    for kind in SCALES:
        blocks = block_bytes(kind.name, kind, N_BLOCKS)
        values = gguf.dequantize(blocks, kind).astype(numpy.float32)
        formats.append([kind.name, hashlib.sha256(values.tobytes()).hexdigest(), values.reshape(-1)[:4].tolist()])
    dump("dequantised", dict(made_by="gguf 0.19.0", n_blocks=N_BLOCKS, formats=formats))


def main():
    GOLDENS.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(2)
    make_dequantised()
    make_quantised("llama-mixed", MIXED, 1)
    for kind in [Type.Q8_0, Type.Q4_0]:
        make_quantised(f"llama-{kind.name.lower()}", [("embed", kind), ("proj", kind), ("lm_head", kind)], 2)
    for name, arch in FAMILIES.items():
        make_family(name, arch)


if __name__ == "__main__":
    main()
