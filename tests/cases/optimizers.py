# SPDX-License-Identifier: BSD-3-Clause
"""One row per torch optimizer: how to build it and what it can do."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import optim

Build = Callable[..., optim.Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerCase:
    """How to make one kind of optimizer for a test.

    Attributes:
        name: Id in test names.
        kind: The class.
        options: Keyword arguments besides the parameters.
        variants: Further keyword arguments that select torch's other implementations.
        skips: Reasons by opt level where it cannot work; torch's reasons, not ours.
    """

    name: str
    kind: Build
    options: Mapping[str, Any] = field(default_factory=dict)
    variants: tuple[str, ...] = ("foreach",)
    skips: Mapping[str, str] = field(default_factory=dict)

    def build(self, params: Iterable[Any], **extra: Any) -> optim.Optimizer:
        """Make the optimizer over ``params``."""
        return self.kind(params, **{**self.options, **extra})


SGD = OptimizerCase(
    name="sgd",
    kind=optim.SGD,
    options={"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    variants=("foreach", "fused"),
)
ADAM = OptimizerCase(
    name="adam", kind=optim.Adam, options={"lr": 0.05, "eps": 1e-4}, variants=("foreach", "fused")
)
ADAMW = OptimizerCase(
    name="adamw",
    kind=optim.AdamW,
    options={"lr": 0.05, "eps": 1e-4, "weight_decay": 0.1},
    variants=("foreach", "fused"),
)
MAIN = (SGD, ADAM, ADAMW)
"""The optimizers that every axis of the training matrix is crossed with."""

OTHERS = (
    OptimizerCase(
        name="adagrad", kind=optim.Adagrad, options={"lr": 0.1}, variants=("foreach", "fused")
    ),
    OptimizerCase(name="rmsprop", kind=optim.RMSprop, options={"lr": 0.01, "momentum": 0.5}),
    OptimizerCase(name="nadam", kind=optim.NAdam, options={"lr": 0.05}),
    OptimizerCase(name="radam", kind=optim.RAdam, options={"lr": 0.05}),
    OptimizerCase(name="adamax", kind=optim.Adamax, options={"lr": 0.05}),
    OptimizerCase(name="adadelta", kind=optim.Adadelta, options={"lr": 1.0}),
    OptimizerCase(name="asgd", kind=optim.ASGD, options={"lr": 0.1}),
    OptimizerCase(name="rprop", kind=optim.Rprop, options={"lr": 0.1}),
    OptimizerCase(name="adafactor", kind=optim.Adafactor, options={"lr": 0.05}),
)
ALL = (*MAIN, *OTHERS)
NO_ROW = {
    "LBFGS": "needs a closure: tests of its own",
    "SparseAdam": "needs sparse gradients: tests of its own",
    "Muon": "takes two-dimensional parameters only: a test of its own",
}
"""Optimizers of torch without a row, each with its reason."""


def clone_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A copy of the optimizer's state that later steps do not change."""
    return {
        f"{index}.{key}": value.clone() if isinstance(value, torch.Tensor) else value
        for index, param in enumerate(p for g in optimizer.param_groups for p in g["params"])
        for key, value in optimizer.state.get(param, {}).items()
    }
