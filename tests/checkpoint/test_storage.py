# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints of masters and moments in fewer bits: bits come back, or are refused."""

from pathlib import Path

import pytest
import torch

import preamp
from distributed.storage_checks import STORAGES
from distributed.storage_checks import MomentRun as Run
from kit.compare import same
from preamp.checkpoint import read_checkpoint
from preamp.kernels.stored import Format, decode


def save(run: Run, path: Path) -> None:
    preamp.save_checkpoint(path, run.model, run.optimizer)


def load(run: Run, path: Path) -> None:
    preamp.load_checkpoint(path, run.model, run.optimizer)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_a_resumed_run_is_the_uninterrupted_one(storage: str, kind: str, tmp_path: Path) -> None:
    run = Run(storage, kind=kind)
    run.step(0)
    run.step(1)
    run.optimizer.zero_grad()
    save(run, tmp_path / "a")
    saved = read_checkpoint(tmp_path / "a")["optimizers"][0]["state"]["state"]
    live = run.optimizer.state_dict()["state"]
    assert same({n: dict(s) for n, s in saved.items()}, {n: dict(s) for n, s in live.items()})
    resumed = Run(storage, seed=1, kind=kind)
    resumed.step(7)
    load(resumed, tmp_path / "a")
    assert same(resumed.whole(), run.whole())
    for number in (2, 3):
        run.step(number)
        resumed.step(number)
    assert same(resumed.whole(), run.whole())


def values(run: Run) -> list[torch.Tensor]:
    """The moments of all parameters as float32."""
    found: list[torch.Tensor] = []
    for state in run.optimizer.state.values():
        for key, kind in (("exp_avg", Format.SIGNED), ("exp_avg_sq", Format.UNSIGNED)):
            codes = state.get(key + "_scales") is not None
            found.append(decode(state[key], state[key + "_scales"], kind) if codes else state[key])
    return [value.float().clone() for value in found]


@pytest.mark.product
@pytest.mark.parametrize("saved", STORAGES)
@pytest.mark.parametrize("loaded", STORAGES)
def test_into_another_storage(saved: str, loaded: str, tmp_path: Path) -> None:
    run = Run(saved)
    run.step(0)
    save(run, tmp_path / "a")
    other = Run(loaded, seed=1)
    other.step(7)
    if STORAGES[loaded].moments not in ("float32", STORAGES[saved].moments):
        before = other.whole()
        with pytest.raises(preamp.PreampStateError, match="and its storage keeps it in"):
            load(other, tmp_path / "a")
        assert same(other.whole(), before)
        return
    load(other, tmp_path / "a")
    assert same(other.whole()["weights"], run.whole()["weights"])
    assert same(values(other), values(run))
    other.step(1)


def test_a_file_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    run = Run("compact")
    run.step(0)
    scales = next(iter(run.optimizer.state.values()))
    scales["exp_avg_scales"] = scales["exp_avg_scales"][:-1]
    save(run, tmp_path / "a")
    other = Run("compact", seed=1)
    other.step(7)
    before = other.whole()
    with pytest.raises(ValueError, match=r"that does not fit: .* nothing was loaded"):
        load(other, tmp_path / "a")
    assert same(other.whole(), before)
