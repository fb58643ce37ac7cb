"""The model every contender trains: a plain GPT of 23 million parameters, in torch alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTShape:
    """Sizes of the model and of one micro-batch."""

    num_layers: int = 6
    width: int = 512
    num_heads: int = 8
    vocabulary: int = 4096
    sequence: int = 128
    micro_batch: int = 4


class Block(nn.Module):
    """Attention and MLP, each normalised first and added to its input."""

    def __init__(self, shape: GPTShape):
        super().__init__()
        width = shape.width
        self.num_heads = shape.num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        # 3 × [batch, heads, length, width / heads]
        q, k, v = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.num_heads, -1).unbind(2)
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Token and position embeddings, blocks, an untied head. `forward` is the mean cross-entropy."""

    def __init__(self, shape: GPTShape):
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.sequence, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.apply(_initialise)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))  # [batch, length, vocabulary]
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def make_model(shape: GPTShape, seed: int = 0) -> GPT:
    """The same weights on every rank and for every contender."""
    torch.manual_seed(seed)
    return GPT(shape)


def make_batches(shape: GPTShape, rank: int, num_batches: int = 8) -> list[tuple[Tensor, Tensor]]:
    """A rank's micro-batches of (tokens, targets), the same for every contender; steps cycle through them."""
    generator = torch.Generator().manual_seed(1000 + rank)
    size = (num_batches, shape.micro_batch, shape.sequence + 1)
    data = torch.randint(0, shape.vocabulary, size, generator=generator)
    return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in data]
