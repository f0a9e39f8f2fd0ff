# SPDX-License-Identifier: BSD-3-Clause
"""The errors of a session, in words."""

from __future__ import annotations

from preamp.core.errors import PreampStateError, bad_state, message


def inside_block(what: str) -> PreampStateError:
    """Gradients are used where they still carry the loss scale."""
    return bad_state(
        f"{what} was called inside a scale_loss block",
        "Gradients are unscaled when the block ends, and only then mean anything",
        "Take the call out of the block, one level of indentation to the left",
    )


def within_step(what: str) -> PreampStateError:
    """A run is to be saved, or weights shared, whose gradients no step has used yet."""
    return bad_state(
        f"{what} was called between a backward and optimizer.step()",
        "Gradients, and what is known of them, are neither saved nor handed over",
        "Call it after optimizer.step(), or after optimizer.zero_grad() to do without that step",
    )


def backward_of_loss() -> PreampStateError:
    """The body of a block called ``backward`` on the loss instead of on what the block yielded."""
    return bad_state(
        "Inside scale_loss, backward() was called on the loss itself",
        "Gradients are unscaled when the block ends, so they must come from the scaled loss: "
        "with scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()",
        "Call backward() on the name behind 'as'; the gradients of this block were dropped",
    )


def passes_by_scaler() -> PreampStateError:
    """A step is taken past the `GradScaler` that scaled the loss."""
    return bad_state(
        "optimizer.step() was called where a GradScaler has scaled the loss",
        "The gradients still carry the loss scale; the scaler takes it off before a step",
        "Call scaler.step(optimizer), or scaler.unscale_(optimizer) before optimizer.step()",
    )


def never_scaled() -> str:
    """Warning: an optimizer steps without any ``scale_loss``."""
    return message(
        "optimizer.step() was called with gradients that no scale_loss block has made, at an opt "
        "level with a dynamic loss scale",
        "Without it small float16 gradients become zero, and nobody looks for overflow",
        "Write: with preamp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()",
    )


def closure_may_overflow() -> PreampStateError:
    """A step is to make its gradients itself, and a loss scale may have to fall meanwhile."""
    return bad_state(
        "optimizer.step() was called with a closure at a dynamic loss scale",
        "A step whose gradients overflow is skipped, which cannot be done from within it; closures "
        "work where the loss scale is static, as it is by default at O0, O3, O4 and O5",
        "Pass loss_scale=128.0, or another number, to preamp.initialize, or choose O4 or O5",
    )


def step_from_before() -> PreampStateError:
    """A step that cannot be left out, as it does not come through the optimizer's own method."""
    return bad_state(
        "optimizer.step was called by a method that was looked up before preamp.initialize",
        "With a dynamic loss scale a step may have to be left out, which only the method can do "
        "that the optimizer has since then",
        "Write optimizer.step() where the step is taken, or look the method up after initialize",
    )


def no_such_loss(loss_id: object, count: int) -> IndexError:
    """Return the error for a loss that has no scaler."""
    return IndexError(
        message(
            f"loss_id={loss_id!r} with {count} loss scaler(s)",
            f"Allowed are 0 to {count - 1}" if count else "There is none",
            "Pass num_losses to preamp.initialize, one for each loss with a scale of its own",
        )
    )


_HOOKED = (
    "It hooks parameters when it is built, and a cast takes the hooks off: gradients would not be "
    "reduced, and each rank would train alone"
)


def wrapped_before_cast() -> PreampStateError:
    """A wrapper's reducer has lost the parameters it was made for, or is about to."""
    return bad_state(
        "DistributedDataParallel was built before preamp.initialize, which casts parameters at "
        "this level",
        _HOOKED,
        "Call preamp.initialize(model, optimizer) first and wrap the model afterwards",
    )


def wrapped_for_closed() -> PreampStateError:
    """The same after the engine has given float32 parameters back."""
    return bad_state(
        "A DistributedDataParallel was called whose model's parameters Engine.close has cast",
        _HOOKED,
        "Wrap the model again after engine.close()",
    )
