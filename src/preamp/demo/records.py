# SPDX-License-Identifier: BSD-3-Clause
"""What a demo run measured: frozen records, and the same as plain JSON data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Literal

from preamp.core.pytree import plain
from preamp.demo.config import DemoConfig
from preamp.demo.parallel import RankResult
from preamp.numerics import Record

SCHEMA_VERSION = 4

DERIVED = ("best_seconds", "median_seconds", "tokens_per_second")
"""What a level has in the file besides its fields, computed from them."""

COMPARED = {
    "best_ratio": "best_seconds",
    "median_ratio": "median_seconds",
    "held_out_ratio": "held_out_bits",
}
"""The same, over what O0 has."""

Status = Literal["finished", "diverged", "refused", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtypes:
    """Number formats found in the live objects; the most frequent one first."""

    weights: str  # of the model's parameters
    compute: str  # of what the linear layers put out
    masters: str  # of the optimizer's own copies of the weights, or ``"none"``


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes per model parameter, counted between a backward and its step."""

    weights: float  # the model's parameters
    masters: float  # the optimizer's own copies of them
    gradients: float  # gradients that exist, of both
    optimizer_state: float  # tensors in ``optimizer.state``

    @property
    def total(self) -> float:
        """All categories together."""
        return self.weights + self.masters + self.gradients + self.optimizer_state


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelResult:
    """One opt level's row."""

    level: str  # the opt level
    status: Status  # how the training ended
    reason: str  # why, when it did not finish
    steps_done: int  # optimizer steps attempted, skipped ones included
    steps_skipped: int  # steps not taken because gradients overflowed
    loss_scale: float  # at the end
    # Training loss of each step in bits per byte; not finite where it diverged.
    losses: tuple[float, ...]
    step_seconds: tuple[float, ...]  # duration of each step, warm-up included
    warmup_steps: int  # how many of the first ones the statistics leave out
    tokens_per_step: int  # bytes of text in a step
    held_out_bits: float | None = None  # held-out bits per byte; None unless it finished
    dtypes: Dtypes | None = None  # number formats; None when no step was done
    memory: Memory | None  # bytes per parameter; None when the optimizer never stepped
    activation_bytes: int | None = None  # what autograd kept for one backward besides parameters
    peak_bytes: int | None  # highest allocation on the device; None where torch does not count it
    ranks: tuple[RankResult, ...] = ()  # what each rank says, where there are several
    # What happened to the numbers, as the report reads it; not in ``results.json``.
    records: tuple[Record, ...] = ()

    @property
    def timed_seconds(self) -> tuple[float, ...]:
        """Durations of the steps after the warm-up; all of them where there are no others."""
        return self.step_seconds[self.warmup_steps :] or self.step_seconds

    @property
    def best_seconds(self) -> float | None:
        """Shortest step; the least disturbed by whatever else the machine did."""
        return min(self.timed_seconds, default=None)

    @property
    def median_seconds(self) -> float | None:
        """The step in the middle."""
        return median(self.timed_seconds) if self.timed_seconds else None

    @property
    def tokens_per_second(self) -> float | None:
        """Speed of the median step."""
        return self.tokens_per_step / self.median_seconds if self.median_seconds else None


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """A whole run."""

    config: DemoConfig  # what was asked for
    versions: dict[str, str]  # of Python, torch and preamp
    device: str  # what it ran on, in words, and with how many threads
    parameters: int  # number of model parameters
    train_bytes: int  # size of the training text
    held_out_bytes: int  # size of the held-out text
    interrupted: bool  # whether Ctrl-C ended the run early
    levels: tuple[LevelResult, ...]  # one row per opt level that was started

    @property
    def baseline(self) -> LevelResult | None:
        """The row of O0, which the others are compared with."""
        return next((row for row in self.levels if row.level == "O0"), None)


def to_json(result: DemoResult) -> dict[str, Any]:
    """The content of ``results.json``, which ``json.dumps(allow_nan=False)`` accepts."""
    document = {"schema_version": SCHEMA_VERSION, **asdict(replace(result, levels=()))}
    document["levels"] = [_level_to_json(row, result.baseline) for row in result.levels]
    return plain(document, nonfinite=lambda _: None)


def ratio(value: float | None, base: float | None) -> float | None:
    """``value / base``, or ``None`` where either is missing."""
    return None if value is None or not base else value / base


def _level_to_json(row: LevelResult, base: LevelResult | None) -> dict[str, Any]:
    document = asdict(replace(row, records=()))
    del document["records"]
    if row.memory is not None:
        document["memory"]["total"] = row.memory.total
    document |= {name: getattr(row, name) for name in DERIVED}
    for name, of in COMPARED.items():
        document[name] = ratio(getattr(row, of), base and getattr(base, of))
    return document
