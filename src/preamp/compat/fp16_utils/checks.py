# SPDX-License-Identifier: BSD-3-Clause
"""What both FP16 optimizers refuse."""

from __future__ import annotations

from typing import Any

import torch

from preamp.core.errors import bad_state, bad_type, bad_value, with_article
from preamp.engine import find_engine

_MARK = "_preamp_is_wrapped"


def mark_wrapped(optimizer: Any) -> None:
    """Let `check_optimizer` refuse ``optimizer`` from now on. Mutates it."""
    setattr(optimizer, _MARK, True)


def check_optimizer(optimizer: Any) -> None:
    """Refuse what cannot be wrapped."""
    if hasattr(optimizer, "clip_master_grads") or hasattr(optimizer, "fp16_groups"):
        raise bad_state(
            f"init_optimizer is {with_article(type(optimizer).__name__)} already",
            "FP16_Optimizer wraps an optimizer once",
            "Use it as it is, or make a new optimizer from the model's parameters",
        )
    if not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")):
        raise bad_type(
            f"init_optimizer is of type {type(optimizer).__name__}",
            "FP16_Optimizer wraps an optimizer with param_groups and state",
            "Pass for example torch.optim.SGD(model.parameters(), lr=0.1)",
        )
    if getattr(optimizer, _MARK, False):
        raise bad_state(
            f"init_optimizer, {with_article(type(optimizer).__name__)}, is inside an "
            "FP16_Optimizer",
            "It holds the masters of that one, which no other can write to the model",
            "Make a new optimizer from the model's parameters, and wrap that",
        )
    if find_engine(optimizer) is not None:
        raise bad_state(
            "init_optimizer went through initialize and has loss scaling already",
            "An optimizer belongs to initialize or to FP16_Optimizer",
            "Leave FP16_Optimizer out: scale_loss and O2 or O5 do what it does",
        )


def check_loss(loss: object) -> None:
    """Refuse what has no backward."""
    if not (isinstance(loss, torch.Tensor) and loss.is_floating_point()):
        kind = loss.dtype if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise bad_type(
            f"optimizer.backward got a loss of {kind}",
            "The loss is a floating-point tensor with one element",
            "Pass the loss itself, not loss.item() or a tuple",
        )


def check_mapping(state: object) -> None:
    """Refuse a state that is not a dict."""
    if not hasattr(state, "keys"):
        raise bad_type(
            f"load_state_dict got {with_article(type(state).__name__)}",
            "A state is the dict that state_dict() returned",
            "Take it out of the checkpoint first, as in checkpoint['optimizer']",
        )


def missing_entries(missing: list[str], present: list[str], kind: str) -> ValueError:
    """Return the error for a state without what it needs."""
    return bad_value(
        f"The state has no {', '.join(map(repr, missing))}; it has "
        f"{', '.join(map(repr, present)) or 'nothing'}",
        f"Needed is the state of {kind}",
        "Pass what its state_dict() returned; nothing was loaded",
    )


def shape_mismatch(what: str, saved: object, own: object) -> ValueError:
    """Return the error for masters that belong to other parameters."""
    return bad_value(
        f"The state has {what} {saved}, this optimizer {own}",
        "Groups and parameters are those that the state was saved with, in the same order",
        "Build the model and the optimizer as in the saved run; nothing was loaded",
    )
