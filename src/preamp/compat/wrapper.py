# SPDX-License-Identifier: BSD-3-Clause
"""What both FP16 optimizers show of the optimizer inside, and what both refuse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from preamp.core.errors import bad_state, bad_type, bad_value, with_article
from preamp.engine import find_engine

_MARK = "_preamp_is_wrapped"


class OptimizerWrapper:
    """An optimizer inside another object that belongs to one model.

    Attributes:
        optimizer: The inner optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        """Wrap ``optimizer``, which `check_optimizer` refuses from now on. Mutates it."""
        self.optimizer = optimizer
        setattr(optimizer, _MARK, True)

    @property
    def state(self) -> Any:
        """The inner optimizer's ``state``."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's ``param_groups``, with the masters in them."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    def _refuse_copies(self, state: object = None) -> NoReturn:
        raise bad_state(
            "An FP16_Optimizer cannot be pickled or copied",
            "Its masters belong to one model",
            "Save optimizer.state_dict(), and load it into one made for the other model",
        )

    __getstate__ = __setstate__ = _refuse_copies


def check_optimizer(optimizer: Any) -> None:
    """Refuse what cannot be wrapped."""
    if isinstance(optimizer, OptimizerWrapper):
        raise bad_state(
            "init_optimizer is an FP16_Optimizer already",
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


def check_state(state: Any, needed: Sequence[str], kind: str) -> None:
    """Refuse a state that is no dict, or lacks one of the ``needed`` entries."""
    if not hasattr(state, "keys"):
        raise bad_type(
            f"load_state_dict got {with_article(type(state).__name__)}",
            "A state is the dict that state_dict() returned",
            "Take it out of the checkpoint first, as in checkpoint['optimizer']",
        )
    missing = [key for key in needed if key not in state]
    if missing:
        raise bad_value(
            f"The state has no {', '.join(map(repr, missing))}; it has "
            f"{', '.join(repr(str(key)) for key in state) or 'nothing'}",
            f"Needed is the state of {kind}",
            "Pass what its state_dict() returned; nothing was loaded",
        )


def check_masters(what: str, saved: object, own: object) -> None:
    """Refuse masters that belong to other parameters, by what tells them apart."""
    if saved != own:
        raise bad_value(
            f"The state has {what} {saved}, this optimizer {own}",
            "Groups and parameters are those that the state was saved with, in the same order",
            "Build the model and the optimizer as in the saved run; nothing was loaded",
        )
