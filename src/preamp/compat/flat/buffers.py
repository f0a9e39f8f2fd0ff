# SPDX-License-Identifier: BSD-3-Clause
"""One group's parameters as views of one buffer, and the float32 master of that buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from preamp.core.dtypes import HALF_DTYPES
from preamp.core.errors import bad_state, bad_type
from preamp.core.tensors import WeightMarks
from preamp.kernels import Ops
from preamp.optim.table import take_over

DTYPES = (*HALF_DTYPES, torch.float32)


class FlatGroup:
    """A parameter group in two buffers of shape ``(n,)``."""

    def __init__(self, params: Sequence[torch.Tensor], ops: Ops) -> None:
        """Lay ``params``, which `check_group` lets through, out in one buffer. Mutates them."""
        self.params = list(params)  # the model's parameters; their data are views of ``flat``
        self._ops = ops
        pieces = [param.detach().reshape(-1) for param in self.params]
        self.flat = torch.cat(pieces) if pieces else torch.zeros(0)  # their values, in their dtype
        # float32 parameter, what the optimizer updates
        self.master = torch.nn.Parameter(self.flat.to(torch.float32, copy=True))
        self._starts: list[int] = []
        start = 0
        for param in self.params:
            self._starts.append(start)
            start += param.numel()
        self._marks = WeightMarks(self.params)
        for place in range(len(self.params)):
            self._bind(place)

    def _slice(self, flat: torch.Tensor, place: int) -> torch.Tensor:
        param, start = self.params[place], self._starts[place]
        return flat.detach()[start : start + param.numel()].view(param.shape)

    def _bind(self, place: int) -> None:
        param = self.params[place]
        param.data = self._slice(self.flat, place)
        self._marks.renew(self.params, (place,))

    # -- writes from outside -------------------------------------------------------------------

    def check_bound(self) -> None:
        """Refuse parameters that left for another dtype or device."""
        for param in self.params:
            if (param.dtype, param.device) != (self.flat.dtype, self.flat.device):
                raise bad_state(
                    f"A parameter of shape {tuple(param.shape)} became {param.dtype} on "
                    f"{param.device} after FP16_Optimizer was made",
                    f"It stays {self.flat.dtype} on {self.flat.device}, a view of the "
                    "optimizer's flat buffer",
                    "Move and convert the model before making the optimizer",
                )

    def absorb(self) -> None:
        """Bring back parameters that were given other data, and let the master see what changed.

        Loading a model and ``p.data = …`` count; writes *through* ``p.data`` leave no trace.
        """
        for place in self._marks.changed(self.params):
            param, view = self.params[place], self._slice(self.flat, place)
            if param.data_ptr() != view.data_ptr():
                view.copy_(param.detach())
            take_over(view, self._slice(self.master, place))
            self._bind(place)

    def write_flat(self) -> None:
        """Round the master into the buffer, and so into the model."""
        with torch.no_grad():
            self._ops.cast_copy_([self.master.detach()], [self.flat])

    # -- gradients -----------------------------------------------------------------------------

    def flat_gradient(self) -> torch.Tensor | None:
        """Return all gradients, still scaled, as one tensor ``(n,)``, with zeros for those missing.

        ``None`` if no parameter has any.
        """
        if all(param.grad is None for param in self.params):
            return None
        return torch.cat([_dense(param).reshape(-1) for param in self.params])

    def idle_values(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the slices of the master that have no gradient, and copies of their values."""
        idle = [place for place, param in enumerate(self.params) if param.grad is None]
        slices = [self._slice(self.master, place) for place in idle]
        return [(piece, piece.clone()) for piece in slices]


def _dense(param: torch.Tensor) -> torch.Tensor:
    grad = param.grad
    if grad is None:
        return torch.zeros_like(param)
    return grad.to_dense() if grad.is_sparse else grad.detach()


def check_group(params: Sequence[torch.Tensor], index: int) -> None:
    """Refuse a group that does not fit into one buffer."""
    kinds = sorted({f"{param.dtype} on {param.device}" for param in params})
    if len(kinds) > 1 or any(param.dtype not in DTYPES for param in params):
        raise bad_type(
            f"Parameter group {index} has {' and '.join(kinds)}",
            "The flat FP16_Optimizer takes groups of one device and one dtype: float16, "
            "bfloat16 or float32",
            "Give each dtype a group of its own, or use preamp.fp16_utils.FP16_Optimizer",
        )
