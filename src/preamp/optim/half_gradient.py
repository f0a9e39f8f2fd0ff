# SPDX-License-Identifier: BSD-3-Clause
"""What a twin knows of the half gradient that autograd left on the model's parameter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from preamp.core.dtypes import dtype_name
from preamp.core.errors import PreampStateError, message
from preamp.core.ranks import has_process_group
from preamp.core.tensors import local_of, version_of


@dataclass(slots=True, eq=False)
class HalfGradient:
    """A half gradient as it was last seen.

    Attributes:
        tensor: The gradient itself.
        version: Its version then; another one means that it was changed in place since.
        factor: What unscales it, a float32 scalar; ``None`` once the master's gradient has it.
        is_plain: Whether no loss scale is on it, so that what the script does to it means what
            it says.
        is_alone: Whether the master's gradient, if there is one, was made of it alone.
        is_spent: Whether a step has used it up.
        is_zeroed: Whether the script zeroed it.
        unclipped: The factor that it had before it was clipped, if it was.
    """

    tensor: torch.Tensor
    version: int
    factor: torch.Tensor | None
    is_plain: bool
    is_alone: bool = True
    is_spent: bool = False
    is_zeroed: bool = False
    unclipped: torch.Tensor | None = None

    def clip(self, factor: torch.Tensor) -> None:
        """Unscale and clip it by ``factor``, if the master's gradient has it not yet."""
        if self.factor is not None:
            self.unclipped = self.unscales
            self.factor = factor

    @property
    def unscales(self) -> torch.Tensor | None:
        """What takes the loss scale from it and clips nothing."""
        return self.factor if self.unclipped is None else self.unclipped

    def spend(self, now: torch.Tensor) -> None:
        """A step has used up ``now``, this gradient as it is by now."""
        self.tensor, self.version = now, version_of(now)
        self.factor = self.unclipped = None
        self.is_alone = self.is_spent = True
        self.is_zeroed = False

    def follow(self, now: torch.Tensor) -> bool:
        """Go on with ``now`` if it is a bitwise copy of this gradient; tell whether it is.

        DistributedDataParallel with ``gradient_as_bucket_view`` moves gradients into new memory
        when it rebuilds its buckets, and nobody else replaces them by copies. Synchronises, but
        only where there is a process group and the tensor is another one.
        """
        moved = now is not self.tensor and now.dtype is self.tensor.dtype and has_process_group()
        if not moved or version_of(self.tensor) != self.version:
            return False
        mine, given = local_of(self.tensor), local_of(now)
        if not torch.equal(given.view(torch.int16), mine.view(torch.int16)):
            return False
        self.tensor, self.version = now, version_of(now)
        return True

    def may_be_read_again(self, now: torch.Tensor) -> bool:
        """Whether the new content simply is the gradient, with no loss scale on it."""
        if self.is_spent and now is not self.tensor:
            return True  # a backward outside scale_loss after the step
        return self.is_plain and (self.factor is not None or self.is_alone or self.is_spent)


@dataclass(frozen=True, slots=True, eq=False)
class TwinMemo:
    """What a twin knows of its gradients besides these, to go on in another process.

    Attributes:
        seen: The half gradient as it is now.
        is_raw: Whether it still is what a block left scaled; ``None`` if none did.
        is_open: Whether a backward is under way.
        is_carried: Whether the half gradient holds the earlier one too.
        zeros_aside: Whether zeros are away meanwhile.
    """

    seen: HalfGradient | None
    is_raw: bool | None
    is_open: bool
    is_carried: bool
    zeros_aside: bool


def unscaled(tensor: torch.Tensor, *, is_zeroed: bool = False) -> HalfGradient:
    """Return the record of a gradient that has no loss scale on it."""
    one = local_of(tensor).new_ones((), dtype=torch.float32)
    return HalfGradient(tensor, version_of(tensor), one, is_plain=True, is_zeroed=is_zeroed)


def nothing_more(zeros: torch.Tensor) -> HalfGradient:
    """Return the record of zeros that stand beside a gradient which the master has already."""
    return HalfGradient(zeros, version_of(zeros), None, is_plain=False)


def zero_(grad: torch.Tensor) -> None:
    """What ``zero_grad(set_to_none=False)`` does to a gradient."""
    if grad.grad_fn is not None:  # of create_graph; a view, as in DDP's buckets, has none
        grad.detach_()
    grad.requires_grad_(False).zero_()


def changed_in_place(tensor: torch.Tensor, name: str) -> PreampStateError:
    """Return the error for a half gradient that was rewritten while it was scaled."""
    return PreampStateError(
        message(
            f"The {dtype_name(tensor.dtype)} gradient of {name!r} was changed in place or "
            "replaced after scale_loss, while it was still multiplied by the loss scale",
            "After scale_loss the unscaled gradients are those of "
            "preamp.master_params(optimizer); on the model's parameters they may be read, "
            "zeroed or set to None",
            "Clip with preamp.clip_grad_norm_(optimizer, max_norm) or with "
            "torch.nn.utils.clip_grad_norm_(preamp.master_params(optimizer), max_norm), and call "
            "every backward inside scale_loss",
        )
    )


def is_at(version: int | None, grad: torch.Tensor | None) -> bool | None:
    """Whether ``grad`` has that version; ``None`` where there is no version to compare with."""
    return None if version is None else grad is not None and version_of(grad) == version


def version_if(is_same: bool | None, grad: torch.Tensor | None) -> int | None:
    """A version that makes `is_at` say ``is_same`` of ``grad``."""
    if is_same is None:
        return None
    return -1 if grad is None or not is_same else version_of(grad)
