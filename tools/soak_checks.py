# SPDX-License-Identifier: BSD-3-Clause
"""What must have come out of the trainings of `soak`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

from attack_targets import same
from soak_training import (
    MAX_NORM,
    MEMBERS,
    SCALE,
    SIZE,
    UNIT,
    Lattice,
    Memory,
    Options,
    Step,
    lattice_lr,
)

WARM_UP_STEPS = 2000  # what is bounded has filled by then
RSS_SLACK, OBJECT_SLACK = 2 << 20, 400
# An engine's history keeps what it tells of the latest 100,000 overflows, one in some 16 steps.
RECORD_BYTES, STEPS_PER_OVERFLOW = 1 << 10, 16


def expected_counters(options: Options) -> dict[str, Any]:
    """What `preamp.engine.Engine.state_dict` must return, computed without torch."""
    scales, clean = [SCALE.init_scale] * len(MEMBERS), [0] * len(MEMBERS)
    steps = [{"applied": 0, "skipped": 0, "skips_in_row": 0} for _ in range(2)]
    for number in range(options.steps):
        step = Step.of(options.seed, number)
        for loss, poisoned in zip(step.losses, step.poisoned, strict=True):
            clean[loss] = 0 if poisoned else clean[loss] + 1
            if poisoned:
                scales[loss] = max(scales[loss] / 2, 1.0)
            elif clean[loss] == SCALE.growth_interval:
                scales[loss], clean[loss] = min(scales[loss] * 2, SCALE.max_scale), 0
        for model, counts in enumerate(steps):
            is_skipped = step.skipped(model)
            counts["skipped" if is_skipped else "applied"] += 1
            counts["skips_in_row"] = counts["skips_in_row"] + 1 if is_skipped else 0
    found: dict[str, Any] = {
        f"loss_scaler{loss}": {"loss_scale": scales[loss], "unskipped": clean[loss]}
        for loss in range(len(MEMBERS))
    }
    return {**found, "steps": steps}


def expected_lattice(options: Options) -> torch.Tensor:
    """The lattice's weights, by plain torch: in float64, at O3 in its float16."""
    dtype = torch.float16 if options.level == "O3" else torch.float64
    weight = nn.Parameter(Lattice().weight.detach().to(dtype))
    optimizer = torch.optim.SGD([weight], lr=lattice_lr(options.level))
    for number in range(options.steps):
        step = Step.of(options.seed, number)
        if step.skipped(1):
            continue
        backwards = zip(step.losses, step.signs[1], strict=False)
        total = UNIT * sum(sign for loss, sign in backwards if 1 in MEMBERS[loss])
        norm = abs(total) * SIZE**0.5
        clip = MAX_NORM / norm if step.clips[1] and norm > MAX_NORM else 1.0
        weight.grad = (torch.tensor(step.signs[0], dtype=torch.float64) * total * clip).to(dtype)
        optimizer.step()
    return weight.detach()


def differences(one: Any, other: Any, place: str = "") -> Iterator[str]:
    """Yield the places of what is not bitwise the same in two contents."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        one, other = (dict(enumerate(cast("list[Any]", items))) for items in (one, other))
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key, item in cast("dict[Any, Any]", one).items():
            yield from differences(item, other[key], f"{place}/{key}".lstrip("/"))
    elif not same(one, other):
        yield place


def growth(samples: list[Memory]) -> str | None:
    """What has grown since the warm-up, if that can be told."""
    flat = [sample for sample in samples if sample.step >= WARM_UP_STEPS]
    if len(flat) < 9:
        return None
    third = len(flat) // 3
    records = RECORD_BYTES * (flat[-1].step - flat[0].step) // STEPS_PER_OVERFLOW
    slacks = {
        "rss": RSS_SLACK + records,
        "tensors": 0,
        "objects": OBJECT_SLACK,
        "files": 0,
        "threads": 0,
    }
    for what, slack in slacks.items():
        early, late = (
            sorted(getattr(sample, what) for sample in part)[third // 2]
            for part in (flat[:third], flat[-third:])
        )
        if late > early + slack:
            return f"{what} grew from {early:,} to {late:,}"
    return None


def check(options: Options, contents: dict[str, dict[str, Any]]) -> None:
    """Compare the ends of all runs with each other and with what they must be.

    Raises:
        SystemExit: One is different.
    """
    straight = contents["straight"]
    for name, content in contents.items():
        if names := [*differences(straight, content)]:
            raise SystemExit(f"{options.level}, {name}: other than straight in {names[:5]}")
    found, wanted = straight["engines"][0]["scalers"], expected_counters(options)
    if found != wanted:
        raise SystemExit(f"{options.level}: counters are {found}, and should be {wanted}")
    weight = straight["models"][1]["state"]["weight"]
    if not torch.equal(weight.double(), expected_lattice(options).double()):
        raise SystemExit(f"{options.level}: the lattice's weights are not what they should be")
