# SPDX-License-Identifier: BSD-3-Clause
"""The half parameters of an optimizer and their float32 masters, group by group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from preamp.core.dtypes import is_half
from preamp.core.errors import bad_type
from preamp.kernels import Ops
from preamp.optim import WeightPairs, cast_state

Params = list[torch.Tensor]

_DIRECT = (torch.float32, torch.float64)


class HalfParams:
    """Parameters by what becomes of them; all lists run parallel to ``param_groups``."""

    def __init__(self, optimizer: Any, ops: Ops) -> None:
        """Make masters for what is trainable now."""
        self._optimizer = optimizer
        self._known: set[int] = set()
        self._pairs = WeightPairs(ops)
        self.fp16_groups: list[Params] = []  # the model's half parameters
        # Their masters, which the optimizer has in their place
        self.fp32_from_fp16_groups: list[Params] = []
        # Parameters that the optimizer updates itself
        self.fp32_from_fp32_groups: list[Params] = []
        self.adopt()

    # -- the parameters ------------------------------------------------------------------------

    @property
    def halves(self) -> Params:
        """All half parameters."""
        return [param for group in self.fp16_groups for param in group]

    @property
    def masters(self) -> Params:
        """All masters, in the order of `halves`."""
        return [param for group in self.fp32_from_fp16_groups for param in group]

    @property
    def directs(self) -> Params:
        """All parameters without a master."""
        return [param for group in self.fp32_from_fp32_groups for param in group]

    def adopt(self) -> None:
        """Take in the trainable parameters that are new to the optimizer, or newly trainable.

        Without this a parameter unfrozen later would be updated by its scaled gradient. If one has
        a dtype that cannot be trained, nothing is taken in.
        """
        news = list(self._new_params())
        for _, _, param in news:
            if not (is_half(param) or param.dtype in _DIRECT):
                raise bad_type(
                    f"A parameter of shape {tuple(param.shape)} has dtype {param.dtype}",
                    "FP16_Optimizer takes float16, bfloat16, float32 and float64 parameters",
                    "Convert it, or leave it out of the optimizer",
                )
        for groups in (self.fp16_groups, self.fp32_from_fp16_groups, self.fp32_from_fp32_groups):
            groups += [[] for _ in range(len(self._optimizer.param_groups) - len(groups))]
        for index, place, param in news:
            self._known.add(id(param))
            if is_half(param):
                self._adopt_half(index, place, param)
            else:
                self.fp32_from_fp32_groups[index].append(param)

    def _new_params(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        for index, group in enumerate(self._optimizer.param_groups):
            for place, param in enumerate(group["params"]):
                if param.requires_grad and id(param) not in self._known:
                    yield index, place, param

    def _adopt_half(self, index: int, place: int, half: torch.Tensor) -> None:
        master = torch.nn.Parameter(half.detach().float())
        self._known.add(id(master))
        self._optimizer.param_groups[index]["params"][place] = master
        self.fp16_groups[index].append(half)
        self.fp32_from_fp16_groups[index].append(master)
        self._pairs.add_row(half, master)
        state = self._optimizer.state
        if half in state:
            state[master] = cast_state(state.pop(half), master)

    # -- weights -------------------------------------------------------------------------------

    def write_halves(self) -> None:
        """Round every master into its half parameter. Mutates the model."""
        self._pairs.write_halves()

    def absorb(self) -> None:
        """Let the masters see what was written to half parameters since `write_halves`.

        Loading a model, clipping weights and ``p.data = …`` count; writes *through* ``p.data``
        leave no trace in torch. A half parameter that is not half any more is refused.
        """
        self._pairs.absorb()
