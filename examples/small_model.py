"""A small language model over bytes for the other examples. Any torch.nn.Module is used in the same way."""

from __future__ import annotations

import torch


class SmallModel(torch.nn.Module):
    """Predicts the next byte of a text. Input and output share their weights."""

    def __init__(self, width: int = 512, layers: int = 4) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(256, width)
        self.memory = torch.nn.GRU(width, width, layers, batch_first=True)
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, 256, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.memory(self.embedding(tokens))
        scores: torch.Tensor = self.head(self.norm(hidden))
        return scores

    def continue_text(self, text: bytes, count: int) -> bytes:
        """Returns the text and `count` more bytes, each the most likely one."""
        device = self.embedding.weight.device
        with torch.no_grad():
            for _ in range(count):
                scores = self(torch.tensor([list(text)], device=device))
                text += bytes([int(scores[0, -1].argmax())])
        return text


def an_empty_model() -> SmallModel:
    """Returns the model without memory for its weights."""
    with torch.device("meta"):
        return SmallModel().eval()
