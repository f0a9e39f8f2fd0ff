# SPDX-License-Identifier: BSD-3-Clause
"""What the fused optimizers refuse, and in which words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import required

from preamp.core.dtypes import HALF_DTYPES, dtype_name
from preamp.core.errors import bad_state, bad_type, bad_value, message, with_article
from preamp.core.tensors import dtype_of, is_capturing, kinds_of, layout_of

DTYPES = (*HALF_DTYPES, torch.float32, torch.float64)
"""Parameter and gradient dtypes that the update rules know."""

NUMBERS = ("lr", "eps", "weight_decay", "momentum", "trust_coefficient", "max_grad_norm")
"""Options of a group that are zero or larger, for every class that has them."""


def refusal(got: str, allowed: str, do: str) -> RuntimeError:
    """The error where Apex raises a ``RuntimeError``; see `message`."""
    return RuntimeError(message(got, allowed, do))


def check_numbers(kind: str, **values: Any) -> None:
    """Raise ``ValueError`` for a hyper-parameter that is negative or nan.

    ``TypeError`` for one that is no number, such as the string that YAML makes of ``1e-3``. Tensors
    are not looked at, since that would synchronise, nor is what a group must say itself.
    """
    for name, value in values.items():
        if isinstance(value, torch.Tensor) or value is required:
            continue
        got, do = f"{kind} got {name}={value!r}", "Pass a number >= 0"
        try:
            is_valid = bool(value >= 0)
        except TypeError as error:
            raise bad_type(got, f"{name} must be a number", do) from error
        if not is_valid:
            raise bad_value(got, f"{name} must be zero or larger", do)


def check_betas(kind: str, betas: tuple[float, float]) -> None:
    """Raise ``ValueError`` unless there are two numbers, both at least 0 and below 1.

    ``TypeError`` for what has no length, or holds other things than numbers.
    """
    refuse = bad_value
    try:
        if len(betas) == 2 and all(0 <= beta < 1 for beta in betas):
            return
    except TypeError:
        refuse = bad_type
    raise refuse(
        f"{kind} got betas={betas!r}",
        "betas are two numbers, each at least 0 and below 1",
        "The usual choice is betas=(0.9, 0.999)",
    )


def check_group(kind: str, group: Mapping[str, Any]) -> None:
    """Check what a group says itself as the constructor checks its arguments."""
    check_numbers(kind, **{name: group[name] for name in NUMBERS if name in group})
    if "betas" in group:
        check_betas(kind, group["betas"])
    if group.get("norm_type", 2) not in (0, 2):
        raise refusal(
            f"{kind} got norm_type={group['norm_type']!r}",
            "It knows 2, the L2 norm, and 0, the largest magnitude",
            "Leave norm_type out for the L2 norm",
        )


def check_arguments(kind: str, given: Mapping[str, Any]) -> None:
    """Check what a constructor is given, as far as any optimizer knows it.

    ``RuntimeError`` for the AMSGrad variant, which no fused rule has, and for masters without the
    device counters they come with. ``ValueError`` for bad numbers (see `check_group`), and for a
    look-ahead along a momentum that is not there, or dampened.
    """
    if given.get("amsgrad"):
        raise refusal(
            f"{kind} got amsgrad=True",
            "It has no AMSGrad variant",
            "Leave amsgrad out, or use torch.optim.AdamW(..., amsgrad=True)",
        )
    if given.get("master_weights") and not given["capturable"]:
        raise refusal(
            f"{kind} got master_weights=True with capturable=False",
            "It keeps master weights only if it is capturable",
            "Pass capturable=True too, or leave both to preamp.initialize(model, optimizer, "
            "opt_level='O2')",
        )
    check_numbers(kind, step=given.get("step", 0))
    check_group(kind, given)
    if given.get("nesterov") and (given["momentum"] <= 0 or given["dampening"] != 0):
        raise bad_value(
            f"{kind} got nesterov=True with momentum={given['momentum']!r}, "
            f"dampening={given['dampening']!r}",
            "Nesterov momentum needs momentum > 0 and dampening 0",
            "Pass momentum=0.9 and no dampening, or leave nesterov out",
        )


def check_has_state(param: torch.Tensor) -> None:
    """Raise ``PreampStateError`` where state would be made while a CUDA graph is captured."""
    if is_capturing(param.device):
        raise bad_state(
            "optimizer.step() was captured in a CUDA graph for a parameter whose state it would "
            "make or convert",
            "Replays would begin with new state each time",
            "Take a step with gradients of all parameters before the capture",
        )


def check_gradients(
    kind: str,
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    *,
    are_alike: bool = False,
) -> None:
    """Raise ``RuntimeError`` for a gradient or parameter that no rule can take.

    ``are_alike`` says that all are of the first ones' dtypes.
    """
    some = 1 if are_alike else None
    dtypes = kinds_of(dtype_of, params[:some]) | kinds_of(dtype_of, grads[:some])
    if not dtypes <= set(DTYPES) or not kinds_of(layout_of, grads) <= {torch.strided}:
        for param, grad in zip(params, grads, strict=True):
            if grad.layout is not torch.strided:
                raise refusal(
                    f"{kind} got a sparse gradient of shape {tuple(grad.shape)}",
                    "Its update rule is dense",
                    "Use torch.optim.SparseAdam for this parameter, or sparse=False in the "
                    "embedding",
                )
            for dtype in map(dtype_of, (param, grad)):
                if dtype not in DTYPES:
                    raise refusal(
                        f"{kind} got {with_article(dtype_name(dtype))} tensor",
                        f"It updates {', '.join(map(dtype_name, DTYPES))}",
                        "Give this parameter to an optimizer of torch.optim",
                    )
