# SPDX-License-Identifier: BSD-3-Clause
"""Held-out losses of the demo's GPT with and without torchao's float8 linears, over seeds.

Products in fp8 are emulated where the device has no units for them, so the losses hold anywhere
and the times nowhere: none is taken. Writes ``benchmarks/results/fp8.jsonl``; docs/fp8.md has the
table. Needs the extra ``preamp[bench]``.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path

import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

import preamp
from preamp.demo.config import ModelConfig
from preamp.demo.data import Corpus, held_out_batches, read_corpus, training_batches
from preamp.demo.measure import held_out_bits, loss_of
from preamp.demo.model import GPT
from preamp_bench import records

RESULTS = Path(__file__).parent / "results" / "fp8.jsonl"
RECIPES = ("none", "tensorwise", "rowwise", "rowwise_with_gw_hp")


def train(corpus: Corpus, recipe: str, level: str, seed: int, steps: int) -> float:
    """Train a small GPT over bytes and return its held-out loss in bits per byte."""
    size = ModelConfig(layers=2, width=128, heads=4, context=64)
    model = GPT(size, torch.Generator().manual_seed(seed))
    if recipe != "none":
        config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
        convert_to_float8_training(
            model, config=config, module_filter_fn=lambda module, name: name != "head"
        )
    optimizer = preamp.optimizers.FusedAdam(
        model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1
    )
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for step, batch in enumerate(
        training_batches(corpus.train, steps=steps, batch=16, context=size.context, seed=seed)
    ):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 20, 1.1 - step / steps)
        with preamp.scale_loss(loss_of(model, batch), optimizer) as scaled:
            scaled.backward()
        preamp.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    held_out = held_out_batches(corpus.held_out, count=256, batch=64, context=size.context)
    return held_out_bits(model, held_out)


def main() -> None:
    """Train, print, and append the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--levels", default="O5")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    corpus = read_corpus()
    where = records.provenance(torch.device("cpu"))
    for level in options.levels.split(","):
        losses = {
            recipe: [
                train(corpus, recipe, level, seed, options.steps) for seed in range(options.seeds)
            ]
            for recipe in RECIPES
        }
        for recipe, found in losses.items():
            apart = [own - plain for own, plain in zip(found, losses["none"], strict=True)]
            row = {"benchmark": "fp8", "name": recipe, "group": level, "status": "measured"}
            row |= {"steps": options.steps, "losses": found, "from_no_fp8": apart}
            records.append(options.out, [row | where])
            spread = statistics.stdev(apart) if len(apart) > 1 else 0.0
            print(
                f"{level} {recipe:20} {statistics.fmean(found):.4f} bits per byte, "
                f"{statistics.fmean(apart):+.4f} ± {spread:.4f} from no fp8"
            )


if __name__ == "__main__":
    main()
