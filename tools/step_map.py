# SPDX-License-Identifier: BSD-3-Clause
"""What one training step runs, from the loss to the next forward: files and functions, in order.

usage: python tools/step_map.py [--level O2] [--optimizer FusedAdam] [--no-clip] [--calls]

A reader of the code follows this list from top to bottom. ``tests/engine/test_fast_path.py`` holds
the number of files, and the number of Python calls that each further parameter costs.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import preamp
from preamp import optimizers

ROOT = str(Path(preamp.__file__).parent)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "FusedAdam": optimizers.FusedAdam,
    "FusedSGD": lambda params, lr: optimizers.FusedSGD(params, lr=lr, momentum=0.9),
    "FusedLAMB": optimizers.FusedLAMB,
    "AdamW": lambda params, lr: torch.optim.AdamW(params, lr=lr, fused=True),
}


def make_step(
    level: str, optimizer: str, tensors: int, *, clips: bool, storage: str = "full"
) -> Callable[[], None]:
    """Return one steady step of a model with that many weight matrices.

    Args:
        level: Opt level.
        optimizer: A key of `OPTIMIZERS`.
        tensors: How many parameters the model has.
        clips: Whether the step clips gradients.
        storage: How masters and moments are kept.
    """
    layers = [torch.nn.Linear(4, 4, bias=False) for _ in range(tensors)]
    model: Any = torch.nn.Sequential(*layers)
    made = OPTIMIZERS[optimizer](model.parameters(), lr=1e-3)
    model, made = preamp.initialize(model, made, opt_level=level, verbosity=0, storage=storage)
    params = list(model.parameters())
    grads = [torch.full_like(param, 2.0**-8) for param in params]
    start = torch.ones((), requires_grad=True)

    def step() -> None:
        # The forward and the backward are torch's: a short loss and ready gradients stand in.
        loss = start.square()
        with preamp.scale_loss(loss, made) as scaled:
            scaled.backward()
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
        if clips:
            preamp.clip_grad_norm_(made, 1.0)
        made.step()
        made.zero_grad()

    for _ in range(4):  # the first ones make state, and learn the order of gradients
        step()
    return step


def trace(step: Callable[[], None]) -> tuple[Counter[tuple[str, str]], int]:
    """Run ``step`` once.

    Returns:
        How often each function of preamp was entered, by file and name in the order of the first
        calls; and how many Python functions of any origin were.
    """
    entered: Counter[tuple[str, str]] = Counter()
    calls = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        if event != "call":
            return
        calls += 1
        code = frame.f_code
        if code.co_filename.startswith(ROOT):
            name = getattr(code, "co_qualname", code.co_name)
            entered[code.co_filename[len(ROOT) + 1 :], name] += 1

    gc.collect()  # what others left would be finalized, by calls that are not the step's
    gc.disable()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return entered, calls


def calls_per_parameter(
    level: str, optimizer: str, *, clips: bool = True, storage: str = "full"
) -> float:
    """How many Python calls a steady step makes for each parameter beyond the first hundred."""
    few, many = (make_step(level, optimizer, n, clips=clips, storage=storage) for n in (100, 200))
    return (trace(many)[1] - trace(few)[1]) / 100


def main() -> None:
    """Print the map."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--level", default="O2")
    parser.add_argument("--optimizer", default="FusedAdam", choices=OPTIMIZERS)
    parser.add_argument("--no-clip", action="store_true")
    parser.add_argument("--calls", action="store_true", help="functions called for each parameter")
    given = parser.parse_args()
    clips = not given.no_clip
    entered, _ = trace(make_step(given.level, given.optimizer, 100, clips=clips))
    if given.calls:
        for (path, name), count in entered.most_common():
            if count >= 50:
                print(f"{count:6d}  {path}:{name}")
        print(calls_per_parameter(given.level, given.optimizer, clips=clips), "per parameter")
        return
    latest = ""
    for path, name in entered:
        if path != latest:
            print(path)
        latest = path
        print(f"    {name}")
    print(f"{len({path for path, _ in entered})} files, {len(entered)} functions")


if __name__ == "__main__":
    main()
