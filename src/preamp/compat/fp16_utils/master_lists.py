# SPDX-License-Identifier: BSD-3-Clause
"""The lists of parameters that scripts read from an FP16_Optimizer."""

from __future__ import annotations

from typing import Any

import torch

from preamp.compat.fp16_utils.checks import mark_wrapped
from preamp.compat.fp16_utils.half_params import HalfParams
from preamp.compat.wrapper import OptimizerWrapper
from preamp.core.log import say
from preamp.kernels import Ops

Params = list[torch.Tensor]


class WithMasters(OptimizerWrapper):
    """An optimizer that updates masters in place of half parameters.

    Attributes:
        fp16_groups: The model's half parameters, by group.
        fp32_from_fp16_groups: Their masters.
        fp32_from_fp32_groups: The parameters without a master.
    """

    def __init__(self, optimizer: Any, ops: Ops) -> None:
        """Make the masters."""
        super().__init__(optimizer)
        self._params = HalfParams(optimizer, ops)
        mark_wrapped(optimizer)
        self.fp16_groups = self._params.fp16_groups
        self.fp32_from_fp16_groups = self._params.fp32_from_fp16_groups
        self.fp32_from_fp32_groups = self._params.fp32_from_fp32_groups

    @property
    def all_fp16_params(self) -> Params:
        """The model's half parameters."""
        return self._params.halves

    @property
    def all_fp32_from_fp16_params(self) -> Params:
        """Their masters."""
        return self._params.masters

    @property
    def all_fp32_from_fp32_params(self) -> Params:
        """The parameters without a master."""
        return self._params.directs

    def _optimizer_params(self) -> Params:
        return [param for group in self.param_groups for param in group["params"]]

    def _tell_parameters(self) -> None:
        for index, group in enumerate(self.param_groups):
            say(f"FP16_Optimizer processing param group {index}:")
            for param in group["params"]:
                say(f"FP16_Optimizer received {param.dtype} with {tuple(param.shape)}")
