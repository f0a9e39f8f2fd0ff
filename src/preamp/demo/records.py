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

SCHEMA_VERSION = 2

Status = Literal["finished", "diverged", "refused", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtypes:
    """Number formats found in the live objects; the most frequent one first.

    Attributes:
        weights: Of the model's parameters.
        compute: Of what the linear layers put out.
        masters: Of the optimizer's own copies of the weights, or ``"none"``.
    """

    weights: str
    compute: str
    masters: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes per model parameter, counted between a backward and its step.

    Attributes:
        weights: The model's parameters.
        masters: The optimizer's own copies of them.
        gradients: Gradients that exist, of both.
        optimizer_state: Tensors in ``optimizer.state``.
    """

    weights: float
    masters: float
    gradients: float
    optimizer_state: float

    @property
    def total(self) -> float:
        """All categories together."""
        return self.weights + self.masters + self.gradients + self.optimizer_state


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelResult:
    """One opt level's row.

    Attributes:
        level: The opt level.
        status: How the training ended.
        reason: Why, when it did not finish.
        steps_done: Optimizer steps attempted, skipped ones included.
        steps_skipped: Steps not taken because gradients overflowed.
        loss_scale: At the end.
        losses: Training loss of each step in bits per byte; not finite where it diverged.
        step_seconds: Duration of each step, warm-up included.
        warmup_steps: How many of the first ones the statistics leave out.
        tokens_per_step: Bytes of text in a step.
        held_out_bits: Held-out bits per byte; None when the training did not finish.
        dtypes: Number formats; None when no step was done.
        memory: Bytes per parameter; None when the optimizer never stepped.
        activation_bytes: What autograd kept for one backward besides the parameters.
        peak_bytes: Highest allocation on the device; None where torch does not count it.
        ranks: What each rank says, where there are several.
        records: What happened to the numbers, as the report reads it; not in ``results.json``.
    """

    level: str
    status: Status
    reason: str
    steps_done: int
    steps_skipped: int
    loss_scale: float
    losses: tuple[float, ...]
    step_seconds: tuple[float, ...]
    warmup_steps: int
    tokens_per_step: int
    held_out_bits: float | None
    dtypes: Dtypes | None
    memory: Memory | None
    activation_bytes: int | None
    peak_bytes: int | None
    ranks: tuple[RankResult, ...] = ()
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
    """A whole run.

    Attributes:
        config: What was asked for.
        versions: Of Python, torch and preamp.
        device: What it ran on, in words, and with how many threads.
        parameters: Number of model parameters.
        train_bytes: Size of the training text.
        held_out_bytes: Size of the held-out text.
        interrupted: Whether Ctrl-C ended the run early.
        levels: One row per opt level that was started.
    """

    config: DemoConfig
    versions: dict[str, str]
    device: str
    parameters: int
    train_bytes: int
    held_out_bytes: int
    interrupted: bool
    levels: tuple[LevelResult, ...]

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
    plain = asdict(replace(row, records=()))
    del plain["records"]
    return plain | {
        "memory": row.memory and asdict(row.memory) | {"total": row.memory.total},
        "best_seconds": row.best_seconds,
        "median_seconds": row.median_seconds,
        "tokens_per_second": row.tokens_per_second,
        "best_ratio": ratio(row.best_seconds, base and base.best_seconds),
        "median_ratio": ratio(row.median_seconds, base and base.median_seconds),
        "held_out_ratio": ratio(row.held_out_bits, base and base.held_out_bits),
    }
