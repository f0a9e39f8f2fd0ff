# SPDX-License-Identifier: BSD-3-Clause
"""The errors of a session, in words."""

from __future__ import annotations

from preamp.core.errors import PreampStateError, bad_state, message, with_article
from preamp.policy.storage import Storage


def nested(optimizer: object) -> PreampStateError:
    """An optimizer enters a ``scale_loss`` block inside another one."""
    return bad_state(
        f"scale_loss was entered for {with_article(type(optimizer).__name__)} that is in a "
        "scale_loss block already",
        "One backward at a time: blocks of the same optimizer must not be nested",
        "Leave the first block before entering the next, or add the losses up",
    )


def inside_block(what: str) -> PreampStateError:
    """Gradients are used where they still carry the loss scale."""
    return bad_state(
        f"{what} was called inside a scale_loss block",
        "Gradients are unscaled when the block ends, and only then mean anything",
        "Take the call out of the block, one level of indentation to the left",
    )


def within_step(what: str) -> PreampStateError:
    """A run is to be saved whose gradients no step has used yet."""
    return bad_state(
        f"{what} was called between a backward and optimizer.step()",
        "Gradients are not saved, nor what is known of them, so the run would go on without them",
        "Call it after optimizer.step(), or after optimizer.zero_grad() to do without that step",
    )


def passes_by_scaler() -> PreampStateError:
    """A step is taken past the `GradScaler` that scaled the loss."""
    return bad_state(
        "optimizer.step() was called where a GradScaler has scaled the loss",
        "The gradients still carry the loss scale; the scaler takes it off before a step",
        "Call scaler.step(optimizer), or scaler.unscale_(optimizer) before optimizer.step()",
    )


def backward_of_loss() -> PreampStateError:
    """The body of a block called ``backward`` on the loss instead of on what the block yielded."""
    return bad_state(
        "Inside scale_loss, backward() was called on the loss itself",
        "Gradients are unscaled when the block ends, so they must come from the scaled loss: "
        "with scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()",
        "Call backward() on the name behind 'as'; the gradients of this block were dropped",
    )


def check_gradients_stay(what: str, storage: Storage) -> None:
    """Raise `PreampStateError` if gradients are dropped, which ``what`` would look at later."""
    if storage.applies_at_once:
        raise needs_gradients(what)


def needs_gradients(what: str) -> PreampStateError:
    """Something is asked for that needs all gradients of a step, which are dropped."""
    return bad_state(
        f"{what} was called where storage has release_gradients=True",
        "Each gradient is applied as soon as it is made, and then dropped: none is left to clip, "
        "to add to, to look at or to unscale later",
        "Leave the call out, or pass preamp.initialize a storage without release_gradients",
    )


_APPLIED = "With release_gradients=True each gradient is applied as soon as it is made"


def second_backward() -> PreampStateError:
    """A step would have the updates of two backwards."""
    return bad_state(
        "scale_loss was entered for an optimizer whose updates of the backward before it no "
        "optimizer.step() has ended",
        f"{_APPLIED}, so a step has one backward and nothing is accumulated",
        "Call optimizer.step() after each block, or pass preamp.initialize a storage without it",
    )


def second_gradient(name: str) -> PreampStateError:
    """A block reaches a parameter again, whose gradient is applied already."""
    return bad_state(
        f"{name!r} got a second gradient in one scale_loss block",
        f"{_APPLIED}, so a block has one backward, and that reaches each parameter once; "
        "checkpoint(use_reentrant=True) reaches one for each segment that uses it",
        "Add losses up before one backward, pass use_reentrant=False, or a storage without it",
    )


def outside_block(name: str) -> PreampStateError:
    """Nobody has asked for the update that a gradient would be."""
    return bad_state(
        f"A backward outside of scale_loss blocks of its optimizer has made a gradient of {name!r}",
        f"{_APPLIED}, and the block says that it is meant",
        "Name the optimizer in scale_loss, or call requires_grad_(False) on what is not to be "
        "trained by this loss; the gradient was dropped",
    )


def other_gradient() -> PreampStateError:
    """A step would apply gradients besides those that were."""
    return bad_state(
        "An optimizer that releases gradients has some that its updates have not used",
        f"{_APPLIED}; none is there between blocks, or added by a script or a penalty on masters",
        "Call optimizer.zero_grad() to drop it, or pass a storage without release_gradients",
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
