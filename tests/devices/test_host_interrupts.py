# SPDX-License-Identifier: BSD-3-Clause
"""Ctrl-C at the lines of a step that the host makes.

After each one every weight, its master and its moments are those from before the step or those
from after it, all of them together, and training goes on. Lines inside of a kernel are left out, as
for every place: what has been added in place there cannot be told from what has not.
"""

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import preamp
from devices.host_runs import Run
from engine.test_interrupts import Line, interrupt, lines_of, sample

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

Row = list[torch.Tensor]


@pytest.fixture(autouse=True)
def without_collector(small_runs: None) -> Iterator[None]:
    """Lets no finalizer be interrupted."""
    gc.disable()
    yield
    gc.enable()


def prepared(kept: tuple[str, str]) -> Run:
    """A run in its third step."""
    return Run("host", kept).play("iterate 0 1; backward 2; clip .5")


def rows(run: Run) -> list[Row]:
    """Of each weight: what the model has, its master and its moments, on the CPU."""
    found: list[Row] = []
    every = zip(run.model.parameters(), run.values(), run.masters(), strict=True)
    for half, exact, master in every:
        state = run.optimizer.state[master].values()
        kept = [half, exact, *(value for value in state if isinstance(value, torch.Tensor))]
        found.append([tensor.detach().cpu().clone() for tensor in kept])
    return found


def are_same(some: Row, other: Row) -> bool:
    return all(map(torch.equal, some, other))


def is_whole(line: Line) -> bool:
    """Whether a line is outside of kernels."""
    path = line.code.co_filename
    rooms = [os.sep + room + os.sep for room in ("engine", "optim")]
    return any(room in path for room in rooms) or path.endswith("staged.py")


def check(kept: tuple[str, str], chosen: Callable[[int], bool]) -> None:
    run = prepared(kept)
    before = rows(run)
    run.optimizer.step()
    after = rows(run)
    assert not any(map(are_same, before, after))
    whole = sample(
        [line for line in lines_of(prepared(kept).optimizer.step) if is_whole(line)], 1, 0
    )
    lines = [line for number, line in enumerate(whole) if chosen(number)]
    hits, kinds = 0, set[str]()
    for line in lines:
        run = prepared(kept)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            hits += interrupt(run.optimizer.step, line)
            for now, old, new in zip(rows(run), before, after, strict=True):
                is_old, is_new = are_same(now, old), are_same(now, new)
                assert is_old or is_new, f"after an interrupt at {line}"
                kinds.add("before" if is_old else "after")
            run.play("zero; iterate 3")
        for (half, master, *_), old in zip(rows(run), before, strict=True):
            assert not torch.equal(master, old[1])
            assert kept[1] == "split" or torch.equal(half, master.to(half.dtype))
    assert hits >= 0.8 * len(lines)
    assert kinds == {"before", "after"}


CASES: list[Any] = [("O5", "full"), ("O5", "split"), ("O2", "split"), ("O0", "full")]


@pytest.mark.parametrize("every", [25, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("kept", CASES, ids="-".join)
def test_lines_of_a_step(kept: tuple[str, str], every: int) -> None:
    check(kept, lambda number: number % every == 6 % every)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_some_lines_where_a_scaler_unscales_what_waits(level: str) -> None:
    """No script can read these gradients, so none is copied to be shown."""

    def prepared() -> tuple[Run, Callable[[], None]]:
        run = Run("released", (level, "split"))
        scaler = preamp.GradScaler(run.optimizer)
        scaler.scale(run.loss()).backward()
        return run, lambda: scaler.unscale_(run.optimizer)

    every = [line for line in lines_of(prepared()[1]) if line.code.co_name == "show"]
    assert every
    for line in every:
        run, unscale = prepared()
        assert interrupt(unscale, line)
        run.play("zero; iterate 3")
