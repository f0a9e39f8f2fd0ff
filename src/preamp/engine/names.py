# SPDX-License-Identifier: BSD-3-Clause
"""Qualified names of parameters, for messages and reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn


class ParameterNames:
    """The models' names of parameters, as ``"1.decoder.weight"``, or places in optimizers."""

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Read the names once; parameters that come later are looked up by place."""
        self._optimizers = optimizers
        self._names: dict[int, str] = {}
        for index, model in enumerate(models):
            prefix = f"{index}." if len(models) > 1 else ""
            for name, param in model.named_parameters():
                self._names.setdefault(id(param), prefix + name)

    def of(self, param: torch.Tensor) -> str:
        """Return the name of ``param``."""
        known = self._names.get(id(param))
        if known is not None:
            return known
        for index, optimizer in enumerate(self._optimizers):
            for group_index, group in enumerate(optimizer.param_groups):
                for place, own in enumerate(group["params"]):
                    if own is param:
                        return f"optimizers[{index}].param_groups[{group_index}][{place}]"
        return f"a parameter of shape {tuple(param.shape)}"

    def is_owned(self, param: torch.Tensor) -> bool:
        """Whether a model has ``param``."""
        return id(param) in self._names

    def unowned(self, params: Iterable[torch.Tensor]) -> list[str]:
        """Names of those ``params`` that no model has."""
        return [self.of(param) for param in params if not self.is_owned(param)]
