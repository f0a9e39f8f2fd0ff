# SPDX-License-Identifier: BSD-3-Clause
"""What `plan` may be given."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from preamp.core.errors import PreampStateError, message
from preamp.engine.lookup import bare, find_engine
from preamp.planning.layout import slots_of


def check_model(model: object) -> nn.Module:
    """Return the model, which has something to train and no engine.

    Raises `TypeError` for what is no module, `ValueError` if it is half already or has nothing to
    train, `PreampStateError` if it has an engine.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            message(
                f"Got {type(model).__name__} in place of a model",
                "plan runs the model, so it is an nn.Module",
                "Pass the module; preamp.estimate takes factories and numbers of parameters",
            )
        )
    if find_engine(model) is not None:
        raise PreampStateError(
            message(
                "The model is initialized already",
                "A plan starts from the float32 model as it is before initialize",
                "Plan first, or call preamp.engine_of(model).close()",
            )
        )
    if not any(slot.is_parameter and slot.is_trainable for slot in slots_of(model)):
        raise ValueError(
            message(
                f"The model, a {type(model).__name__}, has no parameter that requires a gradient",
                "A plan follows from gradients and updates",
                "Pass the model that is trained, with its parameters thawed",
            )
        )
    return model


def check_loss_fn(loss_fn: object, model: nn.Module, batch: Any) -> None:
    """Raise ``TypeError`` if ``loss_fn(model, batch)`` cannot be called."""
    got = ""
    if not callable(loss_fn):
        got = f"loss_fn is {type(loss_fn).__name__}, which cannot be called"
    else:
        try:
            inspect.signature(loss_fn).bind(model, batch)
        except TypeError as error:
            got = f"loss_fn cannot be called with a model and a batch: {error}"
        except ValueError:  # it has no signature, as some functions written in C
            pass
    if got:
        raise TypeError(
            message(
                got,
                "loss_fn(model, batch) returns a scalar loss",
                "Pass model, loss_fn, batch in this order, and bind other arguments by "
                "functools.partial",
            )
        )


def check_optimizer(optimizer: object, model: nn.Module) -> None:
    """Raise unless this is an optimizer over parameters of the model.

    `TypeError` for what is no optimizer, `ValueError` for one of other parameters or one that steps
    with a closure only.
    """
    found: object = bare(optimizer)
    if not isinstance(found, torch.optim.Optimizer):
        raise TypeError(
            message(
                f"Got {type(optimizer).__name__} in place of an optimizer",
                "plan steps the optimizer, so it is a torch.optim.Optimizer",
                "Make it over model.parameters(), or leave it out for AdamW",
            )
        )
    if _needs_closure(found):
        raise ValueError(
            message(
                f"{type(found).__name__}.step needs a closure",
                "plan takes steps from gradients that it has looked at, one backward for each",
                "Pass an optimizer that steps without a closure, or leave it out for AdamW",
            )
        )
    own = {id(param) for group in found.param_groups for param in group["params"]}
    if own.isdisjoint(map(id, model.parameters())):
        raise ValueError(
            message(
                "The optimizer has no parameter of the model",
                "A plan steps both together",
                "Make it over model.parameters(), or leave it out for AdamW",
            )
        )


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    try:
        inspect.signature(optimizer.step).bind()
    except TypeError:
        return True
    except ValueError:  # it has no signature, as some functions written in C
        pass
    return False


def check_count(name: str, value: int, least: int) -> None:
    """Raise ``ValueError`` if there are fewer than ``least``."""
    if value < least:
        raise ValueError(
            message(
                f"{name}={value} cannot be used",
                f"It is a whole number from {least}",
                f"Leave {name} out for the default",
            )
        )
