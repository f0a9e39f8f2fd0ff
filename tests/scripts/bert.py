# SPDX-License-Identifier: BSD-3-Clause
"""Fine-tune a small encoder: from which module of the standard library is this piece of text?

Warm-up and decay, gradient accumulation, and clipping through the masters.

    python bert.py --fp16 --fp16_opt_level O2 --optimizer fused_lamb
"""

import argparse
import encodings.cp437
import html.entities

import apex
import torch
from apex import amp
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

try:
    from apex.normalization import FusedLayerNorm as BertLayerNorm
except ImportError:
    print("Apex has no FusedLayerNorm here, using torch's.")
    from torch.nn import LayerNorm as BertLayerNorm

SOURCES = (argparse, encodings.cp437, html.entities)
LENGTH = 32


class Layer(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.attention = nn.MultiheadAttention(hidden, heads, batch_first=True)
        self.LayerNorm1 = BertLayerNorm(hidden, eps=1e-12)
        self.up = nn.Linear(hidden, 2 * hidden)
        self.down = nn.Linear(2 * hidden, hidden)
        self.LayerNorm2 = BertLayerNorm(hidden, eps=1e-12)

    def forward(self, x):
        x = self.LayerNorm1(x + self.attention(x, x, x, need_weights=False)[0])
        return self.LayerNorm2(x + self.down(nn.functional.gelu(self.up(x))))


class Encoder(nn.Module):
    def __init__(self, hidden=32, heads=2, layers=2):
        super().__init__()
        self.embed = nn.Embedding(128, hidden)
        self.position = nn.Embedding(LENGTH, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(layers))
        self.classifier = nn.Linear(hidden, len(SOURCES))

    def forward(self, input_ids, labels=None):
        places = torch.arange(input_ids.size(1), device=input_ids.device)
        x = self.embed(input_ids) + self.position(places)
        for layer in self.layers:
            x = layer(x)
        logits = self.classifier(x.mean(1))
        if labels is None:
            return (logits,)
        return nn.functional.cross_entropy(logits.float(), labels), logits


def features(seed):
    pieces, labels = [], []
    for label, module in enumerate(SOURCES):
        with open(module.__file__, encoding="utf-8") as file:
            codes = torch.tensor([min(ord(c), 127) for c in file.read()])
        rows = codes[: len(codes) // LENGTH * LENGTH].view(-1, LENGTH)[:200]
        pieces.append(rows)
        labels.append(torch.full((len(rows),), label))
    rows, labels = torch.cat(pieces), torch.cat(labels)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    return rows[order], labels[order]


def build_optimizer(name, model, lr):
    no_decay = ["bias", "LayerNorm"]
    named = list(model.named_parameters())
    groups = [
        {
            "params": [p for n, p in named if not any(d in n for d in no_decay)],
            "weight_decay": 0.01,
        },
        {"params": [p for n, p in named if any(d in n for d in no_decay)], "weight_decay": 0.0},
    ]
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=lr)
    if name == "fused_adam":
        return apex.optimizers.FusedAdam(groups, lr=lr, bias_correction=False)
    return apex.optimizers.FusedLAMB(groups, lr=lr)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--optimizer", default="adamw", choices=("adamw", "fused_adam", "fused_lamb")
    )
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--max_steps", type=int, default=24)
    parser.add_argument("--warmup_proportion", type=float, default=0.1)
    parser.add_argument("--train_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--fp16_opt_level", type=str, default="O1")
    parser.add_argument("--loss_scale", type=float, default=0, help="0 means dynamic")
    args = parser.parse_args()

    torch.manual_seed(42)
    model = Encoder()
    optimizer = build_optimizer(args.optimizer, model, args.learning_rate)
    if args.fp16:
        loss_scale = "dynamic" if args.loss_scale == 0 else args.loss_scale
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=args.fp16_opt_level, loss_scale=loss_scale
        )
        amp._amp_state.loss_scalers[0]._loss_scale = 2**12

    warmup = max(1, int(args.warmup_proportion * args.max_steps))
    scheduler = LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, (args.max_steps - step) / (args.max_steps - warmup)),
    )
    rows, labels = features(seed=1)
    held_out = len(rows) // 5
    size, parts = args.train_batch_size, args.gradient_accumulation_steps
    model.train()
    for global_step in range(args.max_steps):
        for part in range(parts):
            batch = torch.Generator().manual_seed(global_step * parts + part)
            index = held_out + torch.randint(len(rows) - held_out, (size,), generator=batch)
            loss, _ = model(rows[index], labels[index])
            loss = loss / parts
            if args.fp16:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
        params = amp.master_params(optimizer) if args.fp16 else model.parameters()
        torch.nn.utils.clip_grad_norm_(params, args.max_grad_norm)
        optimizer.step()
        scheduler.step()
        for param in model.parameters():
            param.grad = None

    model.eval()
    with torch.no_grad():
        loss, logits = model(rows[:held_out], labels[:held_out])
    accuracy = (logits.argmax(1) == labels[:held_out]).float().mean()
    print(f"final loss {loss.item():.6f} final metric {accuracy.item():.6f}")


if __name__ == "__main__":
    main()
