# SPDX-License-Identifier: BSD-3-Clause
"""Maps that moments in 8 bits were chosen from: each rounds to a neighbour, right on average."""

from __future__ import annotations

import sys

import pytest
import torch

import bench_maps
from bench_maps import FIRST, SECOND, ours, small_float
from cases.stored import chance
from preamp.kernels.stored import BINADES, MANTISSA, Format


@pytest.mark.parametrize("kind", [Format.SIGNED, Format.UNSIGNED])
def test_small_floats_are_the_packages(kind: Format) -> None:
    wide = torch.randn(40, 256).pow(5)
    wide = wide if kind is Format.SIGNED else wide.abs()
    theirs = small_float(MANTISSA, BINADES[kind], may_be_zero=kind is Format.SIGNED)
    # Above the largest code of their power of two the package takes the next one.
    is_below = torch.frexp(wide.abs().view(-1, 128).amax(1)).mantissa < 63 / 64
    noise = chance(wide.numel())  # the package rounds up where much of it is
    found = ours(kind)(wide, noise), theirs(wide, 0xFFFF - noise)
    one, other = (value.view(-1, 128)[is_below] for value in found)
    assert int(is_below.sum()) > 60
    assert torch.equal(one, other)


@pytest.mark.parametrize("maps", [FIRST, SECOND], ids=["first", "second"])
def test_every_map_is_right_on_average(maps: dict[str, bench_maps.Map]) -> None:
    wide = torch.rand(32, 128).clamp(min=0.1)
    for name, keep in maps.items():
        found = torch.stack([keep(wide, chance(4096, step=step)) for step in range(64)])
        error, spread = found.mean(0) - wide, found.std(0) / 8
        assert (spread > 0).float().mean() > 0.9, name
        assert error.mean().abs() <= 4 * (spread.square().sum().sqrt() / 4096 + 1e-8), name


def test_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_maps.py", "--steps", "2"])
    bench_maps.main()
    rows = capsys.readouterr().out.splitlines()
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows[2:]] == list(SECOND)
    assert all(row.count("%") in (2, 4) for row in rows[2:])
