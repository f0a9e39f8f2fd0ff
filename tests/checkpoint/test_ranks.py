# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints of two ranks, and loading them into another number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import preamp
from checkpoint import rank_checks
from checkpoint.runs import Net
from distributed.ranks import assert_pass, checks_of
from preamp.checkpoint.gathering import fingerprints


def test_fingerprints_tell_tensors_apart() -> None:
    """One bit anywhere, order, and what lies at an odd address; more than is read at a time."""

    def of(tensor: torch.Tensor) -> object:
        return fingerprints({"it": tensor})["it"]

    generator = torch.Generator().manual_seed(0)
    for size in (1, 7, 8, 9, (1 << 20) + 3, (3 << 20) + 5):
        values = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        assert of(values) == of(values.clone())
        for place in {0, size // 2, size - 1}:
            other = values.clone()
            other[place] ^= 1
            assert of(other) != of(values)
        if size > 16:
            assert of(values.roll(8)) != of(values)
    halves = torch.ones(9, dtype=torch.bfloat16)
    assert of(halves[1:]) == of(halves[1:].clone())
    assert of(torch.ones(4, 2)) != of(torch.ones(2, 4))
    assert of(torch.zeros(0)) == of(torch.zeros(0))


def test_on_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PREAMP_TEST_FOLDER", str(tmp_path))
    assert_pass([*checks_of(rank_checks), rank_checks.save_from_two_ranks], 2, tmp_path)

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0625, eps=1e-4)
    preamp.initialize(model, optimizer, opt_level="O1", verbosity=0, loss_scale="dynamic")
    state = torch.get_rng_state()
    preamp.load_checkpoint(tmp_path / "reduced.pt", model, optimizer)
    assert model.last.weight.grad is not None
    assert (
        "has the random states of 2 ranks; those of 1 stay as they are" in capsys.readouterr().out
    )
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError, match="that 2 ranks had each for itself, and there are 1 now"):
        preamp.load_checkpoint(tmp_path / "local.pt", model, optimizer)
    preamp.load_checkpoint(tmp_path / "local.pt", model, optimizer, gradients=False)
    assert model.last.weight.grad is None
    engine = preamp.engine_of(model)
    assert engine.steps_applied + engine.steps_skipped == 1
