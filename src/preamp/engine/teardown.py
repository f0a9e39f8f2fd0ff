# SPDX-License-Identifier: BSD-3-Clause
"""Give models and optimizers back as they came, with what training has made of them."""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import contextmanager

import torch

from preamp.casting.modules import Conversion
from preamp.core.errors import PreampStateError
from preamp.engine.session import OptimizerSession
from preamp.optim import Twin
from preamp.scaling.scaler import Adjustments


@contextmanager
def weights_given_back(
    sessions: Collection[OptimizerSession], conversion: Conversion, adjustments: Adjustments
) -> Generator[None]:
    """Before the body, in which hooks are removed, take stock; afterwards give back.

    Args:
        sessions: Of all optimizers; gradients left scaled are unscaled.
        conversion: Of the models: half parameters become float32 again, with the exact values of
            their masters, and optimizer state moves back to them.
        adjustments: Of the loss scales.
    """
    claimed: set[int] = set()
    for session in sessions:
        session.settle_now(claimed, adjustments)
    twins = [twin for session in sessions for twin in session.masters or ()]
    grads = [(twin.half, _unscaled_gradient(twin)) for twin in twins]
    for twin in twins:
        if twin.half.dtype is not torch.float32:  # not after model.float()
            twin.settle()
    exact = {id(twin.half): twin.master.data for twin in twins}
    try:
        yield
    finally:  # a hook that cannot be removed is no reason to keep the weights
        for session in sessions:
            session.release_masters()
        conversion.revert(exact)
        for half, unscaled in grads:
            half.grad = None if unscaled is None else unscaled.to(half.dtype)  # float64 again?
        for session in sessions:
            session.recast_state()


def _unscaled_gradient(twin: Twin) -> torch.Tensor | None:
    """The master's gradient, or ``None`` also where it cannot be told any more."""
    try:
        return twin.gradient()
    except PreampStateError:  # changed in place while it was scaled: the gradient of nothing
        return None
