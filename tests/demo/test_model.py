# SPDX-License-Identifier: BSD-3-Clause
"""The GPT: sizes, causality, a flat start."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch.nn import functional as F

from cases.demo import MODEL, TEXT
from preamp.demo.config import DemoConfig, ModelConfig
from preamp.demo.data import windows
from preamp.demo.measure import loss_of
from preamp.demo.model import GPT, attend


def make(config: ModelConfig = MODEL, seed: int = 0) -> GPT:
    return GPT(config, torch.Generator().manual_seed(seed))


def test_logits_have_one_entry_per_byte_value() -> None:
    assert make()(torch.zeros(3, 5, dtype=torch.int64)).shape == (3, 5, 256)


def test_default_model_has_a_few_million_parameters() -> None:
    count = sum(p.numel() for p in make(DemoConfig().model).parameters())
    assert 2_000_000 <= count <= 5_000_000


def test_untrained_model_knows_nothing() -> None:
    model = make(DemoConfig().model)
    loss = loss_of(model, windows(TEXT, torch.arange(0, 256, 32), 64)).item()
    assert loss == pytest.approx(math.log(256), rel=0.1)


def test_future_bytes_change_nothing() -> None:
    tokens = torch.arange(8)[None]
    other = tokens.clone()
    other[0, 5:] = 200
    before, after = make()(tokens), make()(other)
    torch.testing.assert_close(before[0, :5], after[0, :5])
    assert not torch.equal(before[0, 5:], after[0, 5:])


def test_written_out_attention_equals_torch_s() -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 8).unbind(0)
    future = torch.ones(6, 6, dtype=torch.bool).triu(1)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attend(q, k, v, future), expected)


def test_weights_depend_on_the_seed_alone() -> None:
    first, same, other = make(seed=0), make(seed=0), make(seed=1)
    for name, value in first.state_dict().items():
        assert torch.equal(value, same.state_dict()[name])
    assert not torch.equal(first.head.weight, other.head.weight)


@pytest.mark.parametrize(
    ("build", "got"),
    [
        (lambda: DemoConfig(steps=1), "Got steps=1"),
        (lambda: DemoConfig(levels=()), "Got levels (none)"),
        (lambda: DemoConfig(levels=("O0", "O0")), "Got levels O0,O0"),
    ],
)
def test_impossible_settings_are_refused(build, got: str) -> None:
    with pytest.raises(ValueError, match=re.escape(got)):
        build()
