# SPDX-License-Identifier: BSD-3-Clause
"""``apex.multi_tensor_apply``: the caller of list operations that scripts import."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

import torch

from preamp.core.errors import unavailable

P = ParamSpec("P")
T = TypeVar("T")

TensorLists = Sequence[Sequence[torch.Tensor]]


class MultiTensorApply:
    """Call an operation on lists of tensors with a fixed chunk size.

    Attributes:
        available: Whether the operations can be used: always, on every device. Setting it to
            ``False`` sends scripts down the path they take without Apex's extensions.
        warned: Kept for scripts that read it.
        import_err: The exception of a failed import; ``None``, since none can fail.
        chunk_size: Elements per block in Apex. Has no effect on results, and none on speed here.
    """

    available: bool = True
    warned: bool = False
    import_err: ImportError | None = None

    def __init__(self, chunk_size: int) -> None:
        """Remember the elements per block; any number gives the same results."""
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Refuse to go on if `available` was set to ``False``.

        Raises:
            PreampUnavailableError: It was; a ``RuntimeError``, as in Apex.
        """
        if not self.available:
            raise unavailable(
                "MultiTensorApply.available is False",
                "preamp's operations are available everywhere unless a program says otherwise",
                "Set MultiTensorApply.available = True, or test it before calling",
            )

    def __call__(
        self,
        op: Callable[Concatenate[int, torch.Tensor, TensorLists, P], T],
        noop_flag_buffer: torch.Tensor,
        tensor_lists: TensorLists,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Return ``op(chunk_size, noop_flag_buffer, tensor_lists, *args)``.

        Args:
            op: An operation of ``amp_C``.
            noop_flag_buffer: int32, shape ``(1,)``; operations set it to 1 and never to 0.
            tensor_lists: Equally long lists of tensors.
            *args: The further arguments of ``op``.
            **kwargs: Likewise, by name.

        Raises:
            PreampUnavailableError: `available` was set to ``False``.
        """
        self.check_avail()
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args, **kwargs)


multi_tensor_applier = MultiTensorApply(2048 * 32)
"""The applier that scripts use."""

multi_tensor_applier_l2norm = MultiTensorApply(2048 * 32)
"""The applier that scripts written for ROCm's Apex use for norms."""
