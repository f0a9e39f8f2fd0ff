# SPDX-License-Identifier: BSD-3-Clause
"""What the flat FP16_Optimizer refuses."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from preamp.core.errors import bad_state, bad_type, bad_value
from preamp.optim import LARC
from preamp.optim.fused.adam import FusedAdam
from preamp.optim.fused.kinds import KINDS

DEFAULTS: dict[str, Any] = {"init_scale": 2.0**16, "scale_factor": 2.0, "scale_window": 1000}

_NOT_ELEMENTWISE = (
    *(
        getattr(torch.optim, name)
        for name in ("Adafactor", "LBFGS", "Muon", "SparseAdam")
        if hasattr(torch.optim, name)  # Muon came with torch 2.9
    ),
    # These scale by norms of single parameters.
    *(kind for kind in KINDS if not kind.is_elementwise),
    LARC,
)


def check_elementwise(optimizer: Any) -> None:
    """Refuse optimizers that would compute something else on a flat parameter."""
    if isinstance(optimizer, _NOT_ELEMENTWISE):
        raise bad_type(
            f"init_optimizer is {type(optimizer).__name__}, which does not update each "
            "element by itself",
            "The flat FP16_Optimizer takes elementwise optimizers such as SGD and Adam",
            "Use preamp.fp16_utils.FP16_Optimizer, which keeps parameters apart",
        )
    needs_grads = "grads" in inspect.signature(optimizer.step).parameters
    if needs_grads and not isinstance(optimizer, FusedAdam):
        raise bad_type(
            f"init_optimizer is {type(optimizer).__name__}, whose step takes grads",
            "The flat FP16_Optimizer hands gradients over as those of its masters",
            "Wrap preamp.optimizers.FusedAdam, or an optimizer of torch.optim",
        )
    if optimizer.state:
        raise bad_state(
            "init_optimizer has state already",
            "The flat FP16_Optimizer takes an optimizer that has made no step",
            "Wrap it right after making it, and load a checkpoint into the wrapper",
        )


def check_scale_arguments(static_scale: float, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options of a dynamic scale, completed."""
    unknown = sorted(set(options or {}) - set(DEFAULTS))
    if unknown:
        raise bad_type(
            f"dynamic_loss_args has {', '.join(map(repr, unknown))}",
            f"The flat FP16_Optimizer knows {', '.join(DEFAULTS)}",
            "Leave the others out",
        )
    known = {**DEFAULTS, **(options or {})}
    values = {"static_loss_scale": static_scale, **known}
    wrong = {name: value for name, value in values.items() if not is_usable(value)}
    if wrong or float(known["scale_factor"]) < 1:
        raise bad_value(
            f"Got {wrong or {'scale_factor': known['scale_factor']}}",
            "Scales and the window are finite numbers above 0, scale_factor is 1 or more",
            "For a scale that finds itself pass dynamic_loss_scale=True",
        )
    # Options from a command line are texts.
    return {name: float(x) if isinstance(x, str) else x for name, x in known.items()}


def is_usable(value: Any) -> bool:
    """Whether ``value`` is, or reads as, a finite number above 0."""
    try:
        return math.isfinite(float(value)) and float(value) > 0
    except (TypeError, ValueError):
        return False


def check_groups_unchanged(
    groups: Sequence[Mapping[str, Any]], masters: Sequence[torch.Tensor]
) -> None:
    """Refuse groups that were added or changed behind the wrapper."""
    found = [list(group["params"]) for group in groups]
    if [list(map(id, params)) for params in found] != [[id(master)] for master in masters]:
        raise bad_state(
            f"The inner optimizer has {sum(map(len, found))} parameters in {len(found)} "
            f"groups, of which FP16_Optimizer made {len(masters)}",
            "Its groups are those it had when it was wrapped",
            "Add all groups before making FP16_Optimizer",
        )
