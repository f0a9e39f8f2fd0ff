# SPDX-License-Identifier: BSD-3-Clause
"""What a loss function may return."""

from __future__ import annotations

import math

import torch

from preamp.core.errors import message


def checked_loss(loss: object) -> float:
    """The value of a loss; raises `ValueError` if it is no finite scalar tensor. Synchronises."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return check_finite(float(loss.item()))
    shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
    raise _bad_loss(f"loss_fn returned {type(loss).__name__}{shape}")


def check_finite(loss: float) -> float:
    """Return ``loss``, or raise ``ValueError`` if it is infinite or nan."""
    if math.isfinite(loss):
        return loss
    raise _bad_loss(f"The loss is {loss} in float32")


def _bad_loss(got: str) -> ValueError:
    return ValueError(
        message(
            got,
            "loss_fn(model, batch) returns a finite scalar tensor",
            "Reduce the loss, for example by mean(), and plan with a model that trains in float32",
        )
    )


def require_graph(loss: torch.Tensor) -> None:
    """Raise ``ValueError`` if autograd knows no way back from ``loss``."""
    if not loss.requires_grad:
        raise ValueError(
            message(
                "The loss has no gradient: it is detached from the model's parameters",
                "loss_fn(model, batch) computes its loss with the model, by operations that "
                "autograd records",
                "Leave out detach(), item() and torch.no_grad()",
            )
        )
