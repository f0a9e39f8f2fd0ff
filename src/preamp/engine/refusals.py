# SPDX-License-Identifier: BSD-3-Clause
"""The errors of a session, in words."""

from __future__ import annotations

from preamp.core.errors import PreampStateError, message


def known_parameter(name: str) -> ValueError:
    """A parameter is added to an optimizer that has its master."""
    return ValueError(
        message(
            f"Parameter {name!r} is in this optimizer already",
            "A parameter may appear in one parameter group only",
            "Leave it out of the new group",
        )
    )


def nested(optimizer: object) -> PreampStateError:
    """An optimizer enters a ``scale_loss`` block inside another one."""
    return PreampStateError(
        message(
            f"scale_loss was entered for a {type(optimizer).__name__} that is in a scale_loss "
            "block already",
            "One backward at a time: blocks of the same optimizer must not be nested",
            "Leave the first block before entering the next, or add the losses up",
        )
    )


def sparse_with_master(name: str) -> PreampStateError:
    """A parameter with a master has a sparse gradient."""
    return PreampStateError(
        message(
            f"The gradient of {name!r} is sparse and the parameter has a float32 master",
            "Masters take dense gradients; sparse ones work at O0, O1 and O4",
            "Build the embedding with sparse=False, or choose O1 (O4 for bfloat16)",
        )
    )


def still_scaled() -> PreampStateError:
    """A step is taken on gradients that carry the loss scale."""
    return PreampStateError(
        message(
            "optimizer.step() with gradients left scaled by delay_unscale=True",
            "The last scale_loss before a step must unscale",
            "Call scale_loss without delay_unscale for the last backward before step()",
        )
    )
