# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers of other packages that train bfloat16 weights without float32 masters.

Their arithmetic is not that of masters: each keeps less, and makes up for it in its own way. They
are compared with torch's AdamW on the same bfloat16 weights, which makes up for nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

from preamp_bench.weights import MAX_NORM, SETTINGS, Gradients, StepCase, Weights, Work


def of_module(
    module: str, name: str, *, least: int = 1, **options: object
) -> Callable[[StepCase, Gradients], Work]:
    """Make the variant of an optimizer on bfloat16 weights.

    Below ``least`` elements it treats a tensor as torch's AdamW does. Making it imports ``module``,
    and raises what the package raises where it is missing or does not run.
    """

    def build(case: StepCase, gradients: Gradients) -> Work:
        if min(case.sizes) < least:
            raise ValueError(f"tensors below {least} elements are treated as torch treats them")
        kind: Any = getattr(importlib.import_module(module), name)
        parameters = list(Weights(case).to(torch.bfloat16).parameters())
        optimizer = kind(parameters, **SETTINGS, **options)

        def step() -> None:
            gradients.attach(parameters)
            if case.clip:
                clip_grad_norm_(parameters, MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()

        return Work(step=step, weights=parameters)

    return build
