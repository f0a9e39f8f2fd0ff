# SPDX-License-Identifier: BSD-3-Clause
"""Compare variants of the same work so that the machine's moods hit all of them alike.

A round runs each variant once, in an order that rotates from round to round. The best of many
rounds is what the code can do; p20, p50 and p80 are what the machine let it do; ratios are taken
within a round before they are summarised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import quantiles
from time import perf_counter

import torch

FEWEST_ROUNDS = 5
"""Fewer have no spread worth reporting, so a measurement has more unless it is told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to do the work."""

    name: str  # name in the rows
    group: str  # variants of one group do the same work; ratios are to the group's first
    seconds: Callable[[], float]  # does the work once and returns how long it took; see `stopwatch`


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long to measure."""

    seconds: float = 10.0  # no round begins later, once there are ``least``
    least: int = FEWEST_ROUNDS  # rounds at least
    most: int = 50  # rounds at most
    warmup: int = 1  # rounds before, which are not counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was measured of one variant, in milliseconds."""

    name: str  # the variant
    group: str  # its group
    baseline: str  # the variant to which the ratios are
    best: float  # shortest round
    p20: float  # a fifth of the rounds was shorter
    p50: float  # median
    p80: float  # a fifth of the rounds was longer
    best_ratio: float  # best over the baseline's best
    ratio_p20: float  # of the ratios within a round, lower end of the spread
    ratio_p50: float  # median ratio within a round
    ratio_p80: float  # upper end of the spread
    rounds: int  # number of rounds


def stopwatch(
    run: Callable[[], object],
    *,
    prepare: Callable[[], object] = lambda: None,
    synchronize: Callable[[], object] = lambda: None,
) -> Callable[[], float]:
    """Make a function that times ``run``, and returns seconds.

    ``prepare`` restores what ``run`` changes, untimed; ``synchronize`` waits for the device.
    """

    def seconds() -> float:
        prepare()
        synchronize()
        start = perf_counter()
        run()
        synchronize()
        return perf_counter() - start

    return seconds


def wait_for(device: torch.device) -> None:
    """Wait until the device has done all it was told to do; the CPU has nothing to wait for."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def measure(variants: Sequence[Variant], effort: Effort) -> list[Row]:
    """Time all variants, interleaved; return a row for each, over the first of its group."""
    seconds = time_rounds(variants, effort)
    baselines = {variant.group: variant.name for variant in reversed(variants)}
    return [compare(variant, baselines[variant.group], seconds) for variant in variants]


def time_rounds(variants: Sequence[Variant], effort: Effort) -> dict[str, list[float]]:
    """Return seconds by name, which differ; the n-th of each belong to one round."""
    taken: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for _ in range(effort.warmup):
        for variant in variants:
            variant.seconds()
    end = perf_counter() + effort.seconds
    for number in range(effort.most):
        if number >= effort.least and perf_counter() > end:
            break
        first = number % len(variants)
        for variant in (*variants[first:], *variants[:first]):
            taken[variant.name].append(variant.seconds())
    return taken


def compare(variant: Variant, baseline: str, seconds: dict[str, list[float]]) -> Row:
    """Summarise one variant."""
    own, base = seconds[variant.name], seconds[baseline]
    p20, p50, p80 = _spread([1e3 * value for value in own])
    ratio_p20, ratio_p50, ratio_p80 = _spread([a / b for a, b in zip(own, base, strict=True)])
    return Row(
        name=variant.name,
        group=variant.group,
        baseline=baseline,
        best=1e3 * min(own),
        p20=p20,
        p50=p50,
        p80=p80,
        best_ratio=min(own) / min(base),
        ratio_p20=ratio_p20,
        ratio_p50=ratio_p50,
        ratio_p80=ratio_p80,
        rounds=len(own),
    )


def _spread(values: list[float]) -> tuple[float, float, float]:
    """The 20th, 50th and 80th percentile."""
    cuts = quantiles(values, n=10, method="inclusive")
    return cuts[1], cuts[4], cuts[7]
