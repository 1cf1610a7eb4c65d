"""The Llama architecture in plain PyTorch, with the names of Hugging Face's checkpoints, so that saving is renaming nothing.

Training only: no KV cache, no generation. `check.py` holds it equal to transformers' LlamaForCausalLM.
"""

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, by the names of config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int = 4096
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    def asdict(self):
        return asdict(self)


# Sizes divide by 2 for tensor parallelism and by 128 for block-quantised weights.
SHAPES = {
    "ember": Shape(
        hidden_size=256, intermediate_size=768, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2
    ),
    "ember-draft": Shape(
        hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1
    ),
    # What formats of weights cost a model of some size; its weights are not kept.
    "ember-100m": Shape(
        hidden_size=768, intermediate_size=2304, num_hidden_layers=14, num_attention_heads=12, num_key_value_heads=4
    ),
    # For checks on a CPU.
    "tiny": Shape(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
    ),
}


def rotary_tables(shape, length, device):
    """cos and sin of shape [length, head_dim]; the two halves of a head are rotated against each other."""
    frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2, device=device).float() / shape.head_dim)
    angles = torch.outer(torch.arange(length, device=device).float(), frequencies)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    left, right = x.chunk(2, dim=-1)
    turned = torch.cat([-right, left], dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        heads, kv_heads = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, heads, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_heads, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_heads, bias=False)
        self.o_proj = nn.Linear(heads, shape.hidden_size, bias=False)

    def forward(self, x, cos, sin, mask):
        q, k, v = (self.split(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        out = attend(q, k, v, mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def split(self, x):
        """[batch, length, heads × head_dim] -> [batch, heads, length, head_dim]"""
        return x.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)


def attend(q, k, v, mask):
    """Attention under a block mask (CUDA) or a plain boolean mask (CPU, where flex_attention is slow)."""
    if isinstance(mask, torch.Tensor):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


class Mlp(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x, cos, sin, mask):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(self, ids, mask):
        cos, sin = rotary_tables(self.shape, ids.shape[1], ids.device)
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return self.norm(x)


class Llama(nn.Module):
    """Tied embeddings: the same matrix reads tokens and writes logits."""

    def __init__(self, shape, generator=None):
        super().__init__()
        self.model = Decoder(shape)
        self.initialise(generator)

    def initialise(self, generator):
        """Normal weights; the matrices that write into the residual stream are smaller the more layers there are."""
        residual = (2 * len(self.model.layers)) ** -0.5
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                std = 0.02 * (residual if name.endswith(("o_proj.weight", "down_proj.weight")) else 1)
                nn.init.normal_(weight, std=std, generator=generator)

    def forward(self, ids, mask):
        return F.linear(self.model(ids, mask), self.model.embed_tokens.weight)

    def loss(self, ids, targets, mask):
        """Mean cross entropy of the positions with a target (others are -100)."""
        return F.cross_entropy(self(ids, mask).flatten(0, 1).float(), targets.flatten(), ignore_index=-100)


def dense_mask(document):
    """Who may look at whom, as booleans [batch, 1, length, length]: earlier tokens of the same conversation."""
    same = document[:, :, None] == document[:, None, :]
    return (same & torch.ones_like(same).tril()).unsqueeze(1)
