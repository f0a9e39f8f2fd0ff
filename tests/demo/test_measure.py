# SPDX-License-Identifier: BSD-3-Clause
"""Counting against counts by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preamp
from cases.demo import CORPUS, MODEL, config
from preamp.demo.measure import activation_bytes, dtypes_of, held_out_bits, memory_of
from preamp.demo.model import GPT
from preamp.demo.records import Dtypes
from preamp.demo.run import Setting, prepare
from preamp.demo.train import make_optimizer

HAND_COUNT = {  # weights, masters, gradients, Adam's two averages, in bytes per parameter
    "O0": (4, 0, 4, 8),
    "O1": (4, 0, 4, 8),
    "O2": (2, 4, 2, 8),
    "O3": (2, 0, 2, 4),
    "O4": (4, 0, 4, 8),
    "O5": (2, 4, 2, 8),
}

FORMATS = {
    "O0": ("fp32", "fp32", "none"),
    "O1": ("fp32", "fp16", "none"),
    "O2": ("fp16", "fp16", "fp32"),
    "O3": ("fp16", "fp16", "none"),
    "O4": ("fp32", "bf16", "none"),
    "O5": ("bf16", "bf16", "fp32"),
}


@pytest.mark.parametrize("level", preamp.OPT_LEVELS)
def test_bytes_equal_the_hand_count(level: str) -> None:
    model: nn.Module = nn.Linear(8, 16, bias=False)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model, optimizer = preamp.initialize(model, optimizer, opt_level=level, verbosity=0)

    def backward() -> None:
        with preamp.scale_loss(model(torch.ones(4, 8)).float().mean(), optimizer) as scaled:
            scaled.backward()

    backward()
    optimizer.step()
    optimizer.zero_grad()
    backward()
    weights, masters, gradients, state = HAND_COUNT[level]
    counted = memory_of(model, optimizer)
    assert (counted.weights, counted.masters, counted.gradients) == (weights, masters, gradients)
    # AdamW also has one counter of 4 bytes for each tensor.
    assert counted.optimizer_state == pytest.approx(state, abs=4 / 128)
    assert counted.total == weights + masters + gradients + counted.optimizer_state


def test_looking_at_masters_does_not_make_their_gradients() -> None:
    model = nn.Linear(8, 16, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    preamp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    with preamp.scale_loss(model(torch.ones(4, 8)).mean(), optimizer) as scaled:
        scaled.backward()
    first = memory_of(model, optimizer)
    assert memory_of(model, optimizer) == first
    (master,) = preamp.master_params(optimizer)
    assert master.grad is not None  # now it exists, and is counted
    assert memory_of(model, optimizer).gradients == first.gradients + 4


def started(level: str) -> tuple[Setting, GPT, torch.optim.Optimizer]:
    setting = prepare(config(level), CORPUS)
    optimizer = make_optimizer(setting.start, setting.config.optimizer)
    preamp.initialize(setting.start, optimizer, opt_level=level, verbosity=0)
    return setting, setting.start, optimizer


@pytest.mark.parametrize("level", preamp.OPT_LEVELS)
def test_formats_are_those_of_the_level(level: str) -> None:
    setting, model, optimizer = started(level)
    found = dtypes_of(model, optimizer, next(setting.training_batches()))
    weights, compute, masters = FORMATS[level]
    assert found == Dtypes(weights=weights, compute=compute, masters=masters)


def test_two_formats_are_both_named_the_more_frequent_first() -> None:
    setting, model, optimizer = started("O0")
    model.norm.bfloat16()
    model.norm.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
    model.norm.register_forward_hook(lambda _module, _args, output: output.float())
    found = dtypes_of(model, optimizer, next(setting.training_batches()))
    assert found.weights == "fp32+bf16"


def test_activations_equal_the_hand_count() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(256, 256)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.table(tokens).exp()

    setting = prepare(config("O0"), CORPUS)
    batch = next(setting.training_batches())
    tokens = batch.inputs.numel()
    # Outputs of exp and of log_softmax; for the loss the flattened targets, and one number.
    assert activation_bytes(Two(), batch) == 2 * tokens * 256 * 4 + tokens * 8 + 4


def test_held_out_bits_are_the_mean_over_all_bytes() -> None:
    setting = prepare(config("O0"), CORPUS)
    batches = list(setting.held_out_batches())
    model = setting.start
    with torch.no_grad():
        logits = torch.cat([model(batch.inputs).flatten(0, 1) for batch in batches])
        targets = torch.cat([batch.targets.flatten() for batch in batches])
        expected = F.cross_entropy(logits, targets).item() / math.log(2)
    assert held_out_bits(model, batches) == pytest.approx(expected, rel=1e-6)
    assert len(targets) == 8 * MODEL.context
