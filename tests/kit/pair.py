# SPDX-License-Identifier: BSD-3-Clause
"""One model trained twice: by preamp, and by plain torch on weights of the optimizer's dtype.

Gradients are exact at every level here (`cases.models`), so that both are equal to the bit where
runs of other models are not (`kit.run.assert_same_program`).
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import preamp
from cases.levels import BY_NAME
from cases.models import Parts, batch, values
from cases.optimizers import clone_state
from cases.tolerances import assert_same

Build = Callable[[Iterable[Any]], torch.optim.Optimizer]


def sgd(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5, momentum=0.9, weight_decay=0.01)


def adam(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.05, eps=1e-4)


class Pair:
    """The same steps for both; afterwards both must be equal to the bit.

    Attributes:
        model, optimizer, engine: Of preamp.
        plain, plain_optimizer: Of torch alone.
    """

    def __init__(
        self, level: str, build: Build = sgd, make: Callable[[], nn.Module] = Parts, **options: Any
    ) -> None:
        row = BY_NAME[level]
        self.model = make()
        self.plain = copy.deepcopy(self.model).to(torch.float32 if row.has_masters else row.weight)
        self.optimizer = build(self.model.parameters())
        self.plain_optimizer = build(self.plain.parameters())
        options = {"opt_level": level, "verbosity": 0, **options}
        preamp.initialize(self.model, self.optimizer, **options)
        self.engine = preamp.engine_of(self.model)

    @property
    def masters(self) -> list[Any]:
        """What the optimizer updates."""
        return list(preamp.master_params(self.optimizer))

    def loss(self, index: int, parts: str = "ab") -> torch.Tensor:
        x, coefficients = batch(index)
        return (self.model(x, parts) * coefficients).sum()

    def plain_loss(self, index: int, parts: str = "ab") -> torch.Tensor:
        x, coefficients = batch(index)
        dtype = next(self.plain.parameters()).dtype
        with preamp.disable_casts():
            return (self.plain(x.to(dtype), parts).float() * coefficients).sum()

    def ours(self, index: int, parts: str = "ab", **scaling: Any) -> None:
        """A backward of preamp's side."""
        with preamp.scale_loss(self.loss(index, parts), self.optimizer, **scaling) as scaled:
            scaled.backward()

    def theirs(self, index: int, parts: str = "ab") -> None:
        """A backward of torch's side."""
        self.plain_loss(index, parts).backward()

    def overflow(self) -> None:
        """A backward of preamp's side with an infinite loss, hence nan and inf everywhere."""
        with preamp.scale_loss(self.loss(0) * torch.inf, self.optimizer) as scaled:
            scaled.backward()

    def plain_step(self) -> None:
        """A step of torch's side."""
        with preamp.disable_casts():
            self.plain_optimizer.step()

    # -- both sides -----------------------------------------------------------------------------

    def backward(self, index: int, parts: str = "ab", **scaling: Any) -> None:
        self.ours(index, parts, **scaling)
        self.theirs(index, parts)

    def step(self) -> None:
        self.optimizer.step()
        self.plain_step()

    def zero(self) -> None:
        self.optimizer.zero_grad()
        self.plain_optimizer.zero_grad()

    def train(self, index: int, parts: str = "ab") -> None:
        """A whole iteration."""
        self.backward(index, parts)
        self.step()
        self.zero()

    def check(self, where: str = "") -> None:
        """Parameters, optimizer state and half weights are what they should be."""
        mine = preamp.master_params(self.optimizer)
        for number, (param, b) in enumerate(zip(mine, values(self.plain_optimizer), strict=True)):
            # What is frozen has no master: the half value is all there is.
            a = param.detach() if param.requires_grad else param.detach().to(b.dtype)
            assert_same(a, b, f"{where} parameter {number}")
        state, wanted = clone_state(self.optimizer), clone_state(self.plain_optimizer)
        assert state.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_same(state[key], value, f"{where} state {key}")
        for name, param in self.model.named_parameters():
            master = self.engine.master_of(param)
            if master is not None:
                assert_same(param.detach(), master.detach().to(param.dtype), f"{where} {name}")

    def check_grads(self) -> None:
        """The gradients that scripts see are those of plain torch."""
        plain = (p for g in self.plain_optimizer.param_groups for p in g["params"])
        for ours, theirs in zip(preamp.master_params(self.optimizer), plain, strict=True):
            assert_same(ours.grad, theirs.grad, "gradient")
