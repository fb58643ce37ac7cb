"""A small GPT over bytes: a plain `nn.Module` that knows nothing of the engine, the ranks or the devices."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # one symbol a byte: no tokenizer
BYTES_SEEN = 3  # a byte alone says little: a position starts from its own byte and the two before it


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, head width]
        y = F.scaled_dot_product_attention(rotate(q, *rotation), rotate(k, *rotation), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention, then two linear layers; each reads a normalized copy of the stream and adds to it."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.norm1(x), rotation)
        # Squared ReLU: learns as well as GELU and costs a CPU a fraction of it.
        return x + self.down(F.relu(self.up(self.norm2(x))).square())


class GPT(nn.Module):
    """A decoder-only transformer over bytes.

    Args:
        width: size of the residual stream.
        num_layers: number of blocks.
        num_heads: attention heads of a block; divides `width`.
        context: the longest sequence `generate` feeds; training may use any length.
    """

    def __init__(self, width: int = 256, num_layers: int = 4, num_heads: int = 4, context: int = 128):
        super().__init__()
        self.context = context
        self.head_width = width // num_heads
        self.embeddings = nn.ModuleList(nn.Embedding(VOCABULARY, width) for _ in range(BYTES_SEEN))
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self._initialize(num_layers)

    def _initialize(self, num_layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue  # LayerNorm starts as the identity
            # What writes to the residual stream starts smaller, so that depth does not change its scale.
            writes = name.endswith(("out.weight", "down.weight"))
            nn.init.normal_(parameter, std=0.02 / (2 * num_layers) ** 0.5 if writes else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits [batch, length, 256], or with `targets` the mean cross-entropy in nats a byte.

        Args:
            tokens: int64 [batch, length].
            targets: int64 [batch, length], the byte after each of `tokens`.
        """
        length = tokens.shape[1]
        padded = F.pad(tokens, (BYTES_SEEN - 1, 0))  # before the first byte: NUL, which no source text has
        views = [padded[:, start : start + length] for start in range(BYTES_SEEN)]
        x = torch.stack([embed(view) for embed, view in zip(self.embeddings, views)]).sum(0)
        rotation = rotary(length, self.head_width, x)
        for block in self.blocks:
            x = block(x, rotation)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        # In fp32: the sum over the vocabulary loses too much in bf16.
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, prompt: Tensor, num_new: int, temperature: float = 0.8, seed: int = 0) -> Tensor:
        """`prompt` (int64 [length]) and `num_new` sampled bytes after it.

        The seed is explicit, so that every rank samples the same.
        """
        generator = torch.Generator().manual_seed(seed)
        tokens = prompt
        for _ in range(num_new):
            logits = self(tokens[None, -self.context :])[0, -1].float()
            probabilities = torch.softmax(logits / temperature, dim=-1).cpu()
            drawn = torch.multinomial(probabilities, 1, generator=generator)
            tokens = torch.cat([tokens, drawn.to(tokens.device)])
        return tokens


def rotary(length: int, head_width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, [length, head_width / 2], in the dtype and place of `like`.

    Computed at each call: a buffer would be cast to bf16 with the weights, and its angles with it.
    """
    rates = 10_000.0 ** -(torch.arange(0, head_width, 2, device=like.device) / head_width)
    angles = torch.outer(torch.arange(length, device=like.device), rates)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair of components of x [..., length, head width] by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
