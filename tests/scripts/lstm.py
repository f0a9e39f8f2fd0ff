# SPDX-License-Identifier: BSD-3-Clause
"""Tell lines of code from lines of comment, with an LSTM over packed sequences.

python lstm.py --opt-level O1
"""

import argparse

import apex.amp as amp
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", default="O1")
parser.add_argument("--cell", default="LSTM", choices=("LSTM", "GRU", "RNN"))
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--lr", type=float, default=0.03)


class Tagger(nn.Module):
    def __init__(self, cell, hidden=16):
        super().__init__()
        self.embedding = nn.Embedding(128, 16)
        self.rnn = getattr(nn, cell)(16, hidden, bidirectional=True)
        self.out = nn.Linear(2 * hidden, 2)

    def forward(self, text, lengths):
        packed = pack_padded_sequence(self.embedding(text), lengths, enforce_sorted=False)
        output, _ = self.rnn(packed)
        padded, lengths = pad_packed_sequence(output)
        mask = torch.arange(len(padded))[:, None] < lengths[None]
        total = (padded * mask[:, :, None]).sum(0)
        return self.out(total / lengths[:, None])


def lines():
    """Lines of this library's argument parser; comments begin with a hash, which is cut off."""
    with open(argparse.__file__, encoding="utf-8") as file:
        stripped = [line.strip()[:20] for line in file]
    code = [line for line in stripped if line and not line.startswith(("#", '"'))]
    comments = [line.lstrip("# ") for line in stripped if line.startswith("# ")]
    comments = [line for line in comments if any(c.isalpha() for c in line)]
    return [(line, 0) for line in code] + [(line, 1) for line in comments] * (
        len(code) // len(comments)
    )


def batch(data, size, generator):
    picked = [data[i] for i in torch.randint(len(data), (size,), generator=generator)]
    rows = [torch.tensor([min(ord(c), 127) for c in text]) for text, _ in picked]
    lengths = torch.tensor([len(row) for row in rows])
    return pad_sequence(rows), lengths, torch.tensor([label for _, label in picked])


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Tagger(args.cell)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    criterion = nn.CrossEntropyLoss()
    data, generator = lines(), torch.Generator().manual_seed(1)
    losses = []
    for _ in range(args.steps):
        text, lengths, labels = batch(data, args.batch_size, generator)
        loss = criterion(model(text, lengths), labels)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    text, lengths, labels = batch(data, 256, generator)
    model.eval()
    with torch.no_grad():
        logits = model(text, lengths)
    print(f"output dtype {logits.dtype}")
    accuracy = (logits.argmax(1) == labels).float().mean().item()
    print(f"final loss {sum(losses[-10:]) / 10:.6f} final metric {accuracy:.6f}")


if __name__ == "__main__":
    main()
