"""A small GPT: pre-normalised blocks, learned positions, tied embeddings."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name that everybody reads


class GPT(nn.Module):
    """1.9 M parameters with a vocabulary of 8192: small enough to learn something on two CPU cores."""

    def __init__(
        self,
        vocab_size: int,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        longest_sequence: int = 512,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(longest_sequence, width)
        block = nn.TransformerEncoderLayer(
            width,
            heads,
            4 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.blocks = nn.TransformerEncoder(
            block, depth, nn.LayerNorm(width), enable_nested_tensor=False
        )
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of predicting each label from what stands before it; labels of −100 do not count."""
        length = input_ids.shape[1]
        x = self.tokens(input_ids) + self.positions.weight[:length]
        x = self.blocks(x, nn.Transformer.generate_square_subsequent_mask(length), is_causal=True)
        logits = F.linear(x[:, :-1], self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
