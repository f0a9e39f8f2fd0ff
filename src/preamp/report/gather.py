# SPDX-License-Identifier: BSD-3-Clause
"""The records of one run, sorted by what they tell."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from preamp.numerics import (
    History,
    NumericsRecord,
    OverflowRecord,
    Record,
    RunRecord,
    StepRecord,
    TensorStatistics,
)

Point = tuple[int, float]  # step and value
_NAMES = re.compile("'([^']*)'")
_HALF_OF = {"O0": "", "O4": "bfloat16", "O5": "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is known of one run."""

    name: str = ""  # what to call it; empty if there is only one
    # How it was set up, when it was started last; ``None`` if that is not recorded.
    start: RunRecord | None = None
    # Calls of ``optimizer.step``, oldest first.
    steps: list[StepRecord] = field(default_factory=list[StepRecord])
    # Causes of skipped steps, oldest first.
    overflows: list[OverflowRecord] = field(default_factory=list[OverflowRecord])
    # Statistics of gradients and weights, oldest first.
    numerics: list[NumericsRecord] = field(default_factory=list[NumericsRecord])
    # Modules that keep_fp32 named.
    kept: frozenset[str] = frozenset()

    @property
    def skipped(self) -> list[StepRecord]:
        """Steps that left the weights as they were."""
        return [step for step in self.steps if step.skipped]

    @property
    def is_dynamic(self) -> bool:
        """Whether the loss scale follows overflows, as far as the records tell."""
        if self.start is not None and "loss_scale" in self.start.policy:
            return self.start.policy["loss_scale"] == "dynamic"
        return len({value for step in self.steps for value in step.scales.values()}) > 1

    @property
    def half(self) -> str:
        """The half format that it computes in, ``"float16"`` as a rule; empty in float32."""
        if self.start is None:
            return "float16"
        policy = self.start.policy
        for name in ("patch_torch_functions_type", "cast_model_type"):
            if policy.get(name) in ("float16", "bfloat16"):
                return policy[name]
        return _HALF_OF.get(self.start.opt_level, "float16")

    @property
    def static_scale(self) -> float | None:
        """The constant loss scale; ``None`` where it is dynamic or not known."""
        return None if self.is_dynamic else self.limit("loss_scale")

    @property
    def has_masters(self) -> bool:
        """Whether float32 masters keep what half weights round away."""
        return self.start is not None and self.start.policy.get("master_weights") == "True"

    @property
    def is_traced(self) -> bool:
        """Whether the modules were watched all the time."""
        return self.start is not None and self.start.policy.get("overflow") == "trace"

    def limit(self, name: str) -> float | None:
        """A number among the decisions; ``None`` where there is none."""
        try:
            return float(self.start.policy[name]) if self.start else None
        except (KeyError, ValueError):
            return None

    def by_optimizer(self) -> Iterator[tuple[list[StepRecord], str]]:
        """Yield the steps of each optimizer, and how to tell it from others."""
        found: dict[int, list[StepRecord]] = {}
        for step in self.steps:
            found.setdefault(step.optimizer, []).append(step)
        for optimizer, steps in sorted(found.items()):
            yield steps, f" of optimizer {optimizer}" if len(found) > 1 else ""

    @property
    def first_losses(self) -> list[Point]:
        """Step and loss of the first loss; empty if there is none."""
        return next(iter(self.losses().values()), list[Point]())

    @property
    def first_scales(self) -> list[Point]:
        """Step and loss scale of the first loss id; empty if there is none."""
        return next(iter(self.scales().values()), list[Point]())

    def losses(self) -> dict[str, list[Point]]:
        """Step and loss, by loss id; apart by optimizer where several record different ones."""
        found: dict[int, dict[int, list[Point]]] = {}
        for step in self.steps:
            for loss_id, loss in step.losses.items():
                rows = found.setdefault(loss_id, {})
                rows.setdefault(step.optimizer, []).append((step.step, loss))
        return dict(pair for loss_id in sorted(found) for pair in _named(loss_id, found[loss_id]))

    def scales(self) -> dict[str, list[Point]]:
        """Step and loss scale after it, by loss id; one optimizer's, since each tells them all."""
        counts = Counter(step.optimizer for step in self.steps)
        asked: dict[int, int] = {}
        for step in self.steps:
            for loss_id in step.losses:
                asked.setdefault(loss_id, step.optimizer)
        busiest = max(counts, key=lambda optimizer: counts[optimizer], default=0)
        found: dict[int, list[Point]] = {}
        for step in self.steps:
            for loss_id, value in step.scales.items():
                is_asked = step.optimizer == asked.get(loss_id, busiest)
                if is_asked and value > 0 and math.isfinite(value):
                    found.setdefault(loss_id, []).append((step.step, value))
        return {str(loss_id): found[loss_id] for loss_id in sorted(found)}


def _named(loss_id: int, rows: dict[int, list[Point]]) -> list[tuple[str, list[Point]]]:
    """Name one loss's rows; optimizers that step on the same losses have one row together."""
    different: dict[int, list[Point]] = {}
    for optimizer in sorted(rows):
        if not any(_is_same(rows[optimizer], other) for other in different.values()):
            different[optimizer] = rows[optimizer]
    if len(different) == 1:
        return [(str(loss_id), row) for row in different.values()]
    return [(f"{loss_id} of optimizer {index}", row) for index, row in different.items()]


def _is_same(a: list[Point], b: list[Point]) -> bool:
    """Whether two rows are equal; nan equals nan."""
    return len(a) == len(b) and all(
        step == other and (loss == found or (math.isnan(loss) and math.isnan(found)))
        for (step, loss), (other, found) in zip(a, b, strict=True)
    )


def gradients_of(records: Iterable[NumericsRecord]) -> list[TensorStatistics]:
    """Return the statistics of gradients."""
    return [t for record in records for t in record.tensors if t.what == "gradient"]


def latest(run: Run) -> list[TensorStatistics]:
    """Return the latest statistics of each tensor, in the order of the last record that has it."""
    found: dict[tuple[str, str], TensorStatistics] = {}
    for record in run.numerics:
        for tensor in record.tensors:
            found.pop((tensor.what, tensor.name), None)
            found[tensor.what, tensor.name] = tensor
    return list(found.values())


def gather(records: History | Iterable[Record], name: str = "") -> Run:
    """Sort the records of a run as written, without those that a checkpoint took back."""
    history = records if isinstance(records, History) else _replay(records)
    starts = history.of(RunRecord)
    return Run(
        name=name,
        start=starts[-1] if starts else None,
        steps=history.of(StepRecord),
        overflows=history.of(OverflowRecord),
        numerics=history.of(NumericsRecord),
        kept=frozenset(n for s in starts for n in _NAMES.findall(s.policy.get("keep_fp32", ""))),
    )


def _replay(records: Iterable[Record]) -> History:
    history = History(kept=sys.maxsize)
    for record in records:
        history.add(record)
    return history
