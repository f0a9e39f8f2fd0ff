# SPDX-License-Identifier: BSD-3-Clause
"""Training runs that ranks share in one way or another."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import preamp
from checkpoint.runs import params_of
from preamp.core.tensors import local_of, stored_grad
from preamp.optimizers import FusedAdam
from preamp.parallel import DistributedDataParallel

Parallel = Literal["none", "ddp", "fsdp"]


def net(seed: int) -> nn.Sequential:
    """Rows that two, three and four ranks share unevenly, or not all of them."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7), nn.Dropout(0.25), nn.Linear(7, 1))


EXTRA = {"seed": 7}


def fused_adam(params: Any) -> torch.optim.Optimizer:
    return FusedAdam(params, lr=0.0625, eps=1e-4)


def torch_adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.0625, eps=1e-4)


class Run:
    """A model in training, shared by ranks in one way or another."""

    make = staticmethod(net)
    batch = (4, 5)

    def __init__(
        self, level: str, parallel: Parallel, seed: int = 0, build: Any = fused_adam, **kinds: Any
    ) -> None:
        self.inner: Any = self.make(seed)
        if parallel == "fsdp":
            for part in self.inner:
                if not isinstance(part, nn.Dropout):
                    fully_shard(part, **kinds)
            fully_shard(self.inner, **kinds)
        self.optimizer = build(self.inner.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        preamp.initialize(
            self.inner, self.optimizer, opt_level=level, verbosity=0, loss_scale="dynamic"
        )
        self.engine = preamp.engine_of(self.inner)
        self.model = self.inner
        if parallel == "ddp":
            self.model = DistributedDataParallel(self.inner)
        torch.manual_seed(100 * seed + (dist.get_rank() if dist.is_initialized() else 0))

    def backward(self, *, poison: bool = False) -> None:
        loss = self.model(torch.randn(self.batch)).float().square().mean()
        with preamp.scale_loss(loss, self.optimizer) as scaled:
            (scaled * float("inf") if poison else scaled).backward()

    def step(self, *, poison: bool = False) -> None:
        self.backward(poison=poison)
        self.update()

    def update(self) -> None:
        preamp.clip_grad_norm_(self.optimizer, 0.25)
        self.optimizer.step()
        preamp.step_scheduler(self.scheduler, self.optimizer)
        self.optimizer.zero_grad()

    def save(self, path: Path, extra: Any = EXTRA, **options: Any) -> Any:
        return preamp.save_checkpoint(
            path, self.model, self.optimizer, self.scheduler, extra, **options
        )

    def load(self, path: Path, **options: Any) -> Any:
        return preamp.load_checkpoint(path, self.model, self.optimizer, self.scheduler, **options)

    def numbers(self) -> dict[str, Any]:
        """Copies of all that this rank goes on from."""
        params = [*self.inner.parameters(), *params_of(self.optimizer)]
        grads = [stored_grad(param) for param in params]
        return {
            "weights": [local_of(t).detach().clone() for t in (*params, *self.inner.buffers())],
            "optimizer": [
                local_of(t).clone() if isinstance(t, torch.Tensor) else t
                for s in self.optimizer.state.values()
                for t in s.values()
            ],
            "groups": [
                {k: v for k, v in group.items() if k != "params"}
                for group in self.optimizer.param_groups
            ],
            "gradients": [None if g is None else local_of(g).clone() for g in grads],
            "engine": self.engine.state_dict(),
            "counters": (self.engine.steps_applied, self.engine.steps_skipped),
            "flags": [float(scaler.found_inf) for scaler in self.engine.scalers],
            "scheduler": self.scheduler.state_dict(),
            "random": torch.get_rng_state(),
        }

    def whole(self) -> dict[str, Any]:
        """Float32 values and optimizer state, whole, on every rank."""
        weights, state = self.inner.state_dict(), self.optimizer.state_dict()
        return {
            "weights": [full(value) for value in weights.values()],
            "optimizer": [
                full(value)
                for number in sorted(state["state"])
                for _, value in sorted(state["state"][number].items())
            ],
            "groups": [
                {k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]
            ],
            "gradients": [
                None if p.grad is None else full(p.grad) for p in self.inner.parameters()
            ],
            "engine": self.engine.state_dict(),
        }

    def close(self) -> None:
        self.engine.close()


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value
