"""A small GPT, in the usual form: pre-normalised blocks, rotary positions, tied embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name that everybody reads


class GPT(nn.Module):
    """1.8 M parameters with a vocabulary of 8192: small enough to learn something on two CPU cores."""

    def __init__(self, vocab_size: int, width: int = 128, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.head_width = width // heads
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of predicting each label from what stands before it; labels of −100 do not count."""
        x = self.embedding(input_ids)
        rotation = rotary(input_ids.shape[1], self.head_width)
        for block in self.blocks:
            x = block(x, rotation)
        logits = F.linear(self.norm(x)[:, :-1], self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.head_width = width // heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attend(self.norm_1(x), rotation)
        result: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return result

    def attend(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, self.head_width).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q, rotation), rotate(k, rotation), v, is_causal=True)
        result: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return result


def rotary(length: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles."""
    rates = 10_000.0 ** (-torch.arange(0, head_width, 2) / head_width)
    angles = torch.outer(torch.arange(length), rates)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turns each pair of a head's features by its position's angle."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
