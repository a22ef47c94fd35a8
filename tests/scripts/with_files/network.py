"""The model, in a file beside the script."""

from torch import nn


class Tagger(nn.Module):
    """An LSTM that says at each place whether the sum so far is odd."""

    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(2, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 2)

    def forward(self, bits):
        hidden, _ = self.lstm(self.embedding(bits))
        return self.head(self.norm(hidden))
