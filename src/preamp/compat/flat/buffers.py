# SPDX-License-Identifier: BSD-3-Clause
"""One group's parameters as views of one buffer, and the float32 master of that buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from preamp.compat.fp16_utils.skips import dense_gradient
from preamp.compat.multi_tensor.apex_C import flatten, unflatten
from preamp.core.dtypes import HALF_DTYPES, is_half
from preamp.core.errors import bad_state, bad_type
from preamp.kernels import Ops
from preamp.optim.table import WeightPairs

DTYPES = (*HALF_DTYPES, torch.float32)


class FlatGroup(WeightPairs):
    """A parameter group in two buffers of shape ``(n,)``; the rows are views of both."""

    def __init__(self, params: Sequence[torch.Tensor], ops: Ops) -> None:
        """Lay ``params``, which `check_group` lets through, out in one buffer. Mutates them."""
        super().__init__(ops)
        self.params = self.halves  # the model's parameters; their data are views of ``flat``
        # their values, in their dtype
        self.flat = flatten([param.detach() for param in params]) if params else torch.zeros(0)
        # float32 parameter, what the optimizer updates
        self.master = torch.nn.Parameter(self.flat.to(torch.float32, copy=True))
        self._views = unflatten(self.flat, params)
        masters = unflatten(self.master.detach(), params)
        for param, view, master in zip(params, self._views, masters, strict=True):
            param.data = view
            self.add_row(param, master)

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

    def come_along(self, row: int) -> None:
        """Nothing moves: see `check_bound`."""

    def take_over(self, rows: Sequence[int]) -> None:
        """Let the master have what parameters hold, which become views of ``flat`` again."""
        for row in rows:
            param, view = self.params[row], self._views[row]
            if param.data_ptr() != view.data_ptr():
                view.copy_(param.detach())
                param.data = view
        if is_half(self.flat):
            super().take_over(rows)
        else:
            self.master.detach().data.copy_(self.flat)

    def write_flat(self) -> None:
        """Round the master into the buffer, and so into the model."""
        with torch.no_grad():
            self.ops.cast_copy_([self.master.detach()], [self.flat])
        self.note_written(range(len(self)))

    # -- gradients -----------------------------------------------------------------------------

    def flat_gradient(self) -> torch.Tensor | None:
        """All gradients, still scaled, in one tensor with zeros for those missing, or ``None``."""
        if all(param.grad is None for param in self.params):
            return None
        return flatten(list(map(dense_gradient, self.params)))

    def idle_values(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the slices of the master that have no gradient, and copies of their values."""
        pairs = zip(self.params, self.masters, strict=True)
        return [(piece, piece.clone()) for param, piece in pairs if param.grad is None]


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
