# SPDX-License-Identifier: BSD-3-Clause
"""The benchmarks' GPT and its text: numbers stay comparable with those of earlier commits."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from preamp_bench.gpt import GPT, ModelConfig, attend, loss_of
from preamp_bench.text import held_out_batches, is_held_out, read_text, training_batches, windows

TEXT = torch.arange(4000, dtype=torch.int64).mul(7).remainder(251).to(torch.uint8)


def make(seed: int = 0, **size: int) -> GPT:
    config = ModelConfig(**size) if size else ModelConfig(layers=1, width=16, heads=2, context=8)
    return GPT(config, torch.Generator().manual_seed(seed))


def test_the_usual_model_is_untrained_and_has_a_few_million_parameters() -> None:
    model = make(layers=4)
    assert sum(param.numel() for param in model.parameters()) == 3_307_008
    loss = loss_of(model, windows(TEXT, torch.arange(0, 256, 32), 64)).item()
    assert loss == pytest.approx(math.log(256), rel=0.1)


def test_future_bytes_change_nothing() -> None:
    tokens = torch.arange(8)[None]
    other = tokens.clone()
    other[0, 5:] = 200
    before, after = make()(tokens), make()(other)
    assert before.shape == (1, 8, 256)
    torch.testing.assert_close(before[0, :5], after[0, :5])
    assert not torch.equal(before[0, 5:], after[0, 5:])


def test_written_out_attention_equals_torch_s() -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 8).unbind(0)
    future = torch.ones(6, 6, dtype=torch.bool).triu(1)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attend(q, k, v, future), expected)


def test_weights_and_batches_depend_on_the_seed_alone() -> None:
    def drawn(seed: int) -> list[torch.Tensor]:
        batches = training_batches(TEXT, steps=3, batch=2, context=8, seed=seed)
        return [*make(seed).parameters(), *(tokens for tokens, _ in batches)]

    torch.manual_seed(1)
    first = drawn(0)
    torch.manual_seed(2)
    assert all(map(torch.equal, first, drawn(0)))
    assert not torch.equal(first[-1], drawn(1)[-1])
    assert not torch.equal(first[0], drawn(1)[0])


def test_the_split_of_the_text_is_pinned() -> None:
    names = ["abc.py", "argparse.py", "ast.py", "asyncio/tasks.py", "typing.py", "zipfile.py"]
    assert [name for name in names if is_held_out(name)] == ["ast.py"]
    training, held_out = read_text()
    assert len(training) > 5 * len(held_out) > 1_000_000


def test_targets_are_the_bytes_after_the_inputs() -> None:
    inputs, targets = windows(TEXT, torch.tensor([0, 5]), 4)
    assert inputs.tolist() == [TEXT[0:4].tolist(), TEXT[5:9].tolist()]
    assert targets.tolist() == [TEXT[1:5].tolist(), TEXT[6:10].tolist()]


def test_held_out_windows_span_the_text_and_come_in_full_number() -> None:
    text = torch.arange(101, dtype=torch.uint8)
    batches = list(held_out_batches(text, count=5, batch=2, context=20))
    assert [len(inputs) for inputs, _ in batches] == [2, 2, 1]
    assert batches[0][0][0, 0] == 0
    assert batches[-1][1][-1, -1] == 100
