# SPDX-License-Identifier: BSD-3-Clause
"""A byte-level GPT in float32, as ``examples/00_demo.py`` trains it, of any size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256  # every byte is a token, so there is no tokenizer and loss / ln 2 is bits per byte


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Size of the GPT."""

    layers: int = 4  # transformer blocks
    width: int = 256  # size of the residual stream, a multiple of ``heads``
    heads: int = 4  # attention heads
    context: int = 64  # bytes that the model sees at once


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    causal: Tensor  # (context, context), bool: True where a query may not look

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        future = torch.ones(config.context, config.context, dtype=torch.bool).triu(1)
        self.register_buffer("causal", future, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix each position with the ones before it; of shape (batch, length, width)."""
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = attend(q, k, v, self.causal[:length, :length])
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


def attend(q: Tensor, k: Tensor, v: Tensor, future: Tensor) -> Tensor:
    """Average the values that each position may see, weighted by how well key and query agree.

    All are of shape (batch, heads, length, head size); ``future``, of shape (length, length), is
    true where a query may not look. On CPUs this is written out: torch's fused attention is as fast
    there in float32, but its backward is slower in bfloat16 (batch 8, length 128, width 256, 4
    layers, 2 cores: 41 against 55 ms for a whole training step).
    """
    if q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    scores = (q * q.size(-1) ** -0.5) @ k.transpose(-2, -1)
    return F.softmax(scores.masked_fill(future, -torch.inf), dim=-1) @ v


class Block(nn.Module):
    """One pre-norm transformer block: attention, then a GELU MLP four times as wide."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Add the two sub-layers' outputs to the residual stream, shape (batch, length, width)."""
        x = x + self.attention(self.norm_attention(x))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class GPT(nn.Module):
    """Decoder-only transformer over bytes, with learned positions and an untied head."""

    def __init__(self, config: ModelConfig, random: torch.Generator) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self._initialize(random)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, length, 256) of the bytes after ``tokens``, int64 (batch, length)."""
        where = torch.arange(tokens.size(1), device=tokens.device)
        x = self.tokens(tokens) + self.positions(where)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def _initialize(self, random: torch.Generator) -> None:
        """Scale weights so that a short training gets far; biases and norms start neutral."""
        std = 0.8 * self.config.width**-0.5
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif name in ("tokens.weight", "positions.weight"):
                parameter.normal_(std=0.2, generator=random)
            elif name.endswith(("out.weight", "down.weight")):
                # What is added to the residual stream shrinks with the number of additions.
                added = std * (2 * self.config.layers) ** -0.5
                parameter.normal_(std=added, generator=random)
            elif "norm" not in name:
                parameter.normal_(std=std, generator=random)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean cross-entropy of the next byte, in nats; of tokens and those after them."""
    tokens, targets = batch
    logits: Tensor = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
