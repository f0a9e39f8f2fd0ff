# SPDX-License-Identifier: BSD-3-Clause
"""Records made up by hand, and names that were made to deceive."""

from dataclasses import replace
from typing import Any

from preamp.numerics import (
    NumericsRecord,
    OverflowRecord,
    Record,
    RunRecord,
    StepRecord,
    TensorStatistics,
    TraceRecord,
)

HOSTILE = (
    "<script>document.title = 'owned'</script>",
    "<img src=x onerror=\"document.title = 'owned'\">",
    "\"'><svg onload=document.title='owned'>",
    "</style></title></svg><script>document.title = 'owned'</script>",
    "{{ 7 * 7 }}{% raw %}&lt;&amp;",
    "weight\nof\ttwo\rlines\x00\x1b[31m",
    "\u202egnp.thgiew\u202c\u2066\ufeff",
    "משקל.שכבה",
    "\ud800lonely",
    "x" * 10_000,
    "ends.alike." + "y" * 5_000 + ".weight",
    "javascript:document.title='owned'",
    "",
)


def start(**changes: Any) -> RunRecord:
    made = RunRecord(
        preamp="0.1",
        torch="2.13",
        device="cpu",
        opt_level="O2",
        policy={"loss_scale": "dynamic", "max_loss_scale": "16777216.0"},
        parameters={"fc.weight": 100},
        dtypes={"fc.weight": "float16"},
        started="2026-01-02T03:04:05+00:00",
    )
    return replace(made, **changes)


def step(number: int, loss: float = 1.0, **changes: Any) -> StepRecord:
    made = StepRecord(step=number, losses={0: loss}, scales={0: 2.0**16}, skipped=False)
    return replace(made, **changes)


def overflow(number: int, name: str = "fc.weight", **changes: Any) -> OverflowRecord:
    made = OverflowRecord(
        step=number,
        loss_id=0,
        parameters=[name],
        loss_was_finite=True,
        old_scale=2.0**16,
        new_scale=2.0**15,
    )
    return replace(made, **changes)


def tensor(name: str = "fc.weight", **changes: Any) -> TensorStatistics:
    made = TensorStatistics(
        name=name,
        what="gradient",
        dtype="float16",
        form="float16",
        elements=100,
        zeros=0,
        nonfinite=0,
        below_subnormal=0,
        below_normal=0,
        unscaled_below_subnormal=0,
        unscaled_below_normal=0,
        max_abs=1.0,
        rms=0.5,
        scale=2.0**16,
        headroom=16.0,
    )
    return replace(made, **changes)


def look(number: int, *tensors: TensorStatistics) -> NumericsRecord:
    return NumericsRecord(step=number, loss_id=0, tensors=list(tensors))


def trace(module: str) -> TraceRecord:
    return TraceRecord(
        module=module,
        type=module,
        phase="forward",
        input_max_abs=7.0,
        output_found="inf",
        dtype="float16",
    )


def named(name: str) -> list[Record]:
    """A record of every kind that shows ``name`` wherever a name can be."""
    policy = {"loss_scale": "dynamic", name: name}
    return [
        start(policy=policy, device=name, started=name, preamp=name, torch=name, opt_level=name),
        step(1),
        step(2, 0.5, skipped=True),
        overflow(2, name, parameters=[name, "other", name], trace=trace(name)),
        look(1, tensor(f"{name}.weight", histogram={-3: 4, 1: 2}), tensor(name, stalled=9)),
    ]
