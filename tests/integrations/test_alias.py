# SPDX-License-Identifier: BSD-3-Clause
"""The code that mmengine and timm have for Apex trains on preamp, as a loop by hand does."""

import functools
import importlib
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from integrations.contract import (
    LEVELS,
    WARNINGS,
    ByHand,
    Net,
    assert_same_models,
    batches,
    fork_ranks,
    loss_of,
    make_optimizer,
    needs,
)

needs("mmengine.runner")
needs("timm.models")
from mmengine.model import BaseModel
from mmengine.runner import Runner
from timm.models import resume_checkpoint
from timm.utils import ApexScaler, CheckpointSaver

pytestmark = WARNINGS


def apex(file: str, name: str) -> Any:
    """``apex.amp`` under the alias, in a framework's ``file`` that was imported without it."""
    preamp.install_apex_alias()
    amp = importlib.import_module("apex.amp")
    setattr(importlib.import_module(file), name, amp)
    return amp


def clip(optimizer: torch.optim.Optimizer, norm: float) -> None:
    """Clip as both frameworks do, by torch, which divides the gradients themselves."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    nn.utils.clip_grad_norm_(params, norm)


# -- mmengine ----------------------------------------------------------------------------------


class Model(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.losses: list[float] = []

    def forward(self, x: Any, y: Any = None, mode: str = "tensor") -> Any:
        if mode != "loss":
            return self.net(x)
        loss = loss_of(self.net, (x, y))
        self.losses.append(loss.item())
        return {"loss": loss}

    def init_weights(self) -> None:
        pass


def first(rows: Any) -> Any:
    return rows[0]


def run(level: str, data: Any, *, epochs: int = 1, **more: Any) -> Model:
    apex("mmengine.optim.optimizer.apex_optimizer_wrapper", "apex_amp")
    # mmengine keeps classes in its files
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    model = Model()
    runner = Runner(
        model=model,
        work_dir=level,
        train_dataloader={
            "dataset": data,
            "sampler": {"type": "DefaultSampler", "shuffle": False},
            "collate_fn": first,
            "batch_size": 1,
            "num_workers": 0,
        },
        train_cfg={"by_epoch": True, "max_epochs": epochs},
        optim_wrapper={
            "type": "ApexOptimWrapper",
            "opt_level": level,
            "verbosity": 0,
            "optimizer": {"type": "AdamW", "lr": 0.02},
            "clip_grad": {"max_norm": 0.5},
        },
        default_hooks={"checkpoint": {"type": "CheckpointHook", "interval": 1}},
        experiment_name=f"run{id(model)}",
        log_level="ERROR",
        **more,
    )
    runner.train()
    return model


def with_mmengine(rank: int, level: str) -> bool:
    data = batches(8)
    model = run(level, data)
    # A loss in the forward: targets are inputs, which are half where weights are.
    hand = ByHand(level, Model(), lambda model, batch: model(*batch, mode="loss")["loss"])
    hand.clip = clip
    hand.run(data, clip=0.5)
    assert model.losses == hand.losses
    assert_same_models(model, hand.model)
    rest = run(level, data, resume=True, epochs=2)
    return rest.losses == hand.run(data, clip=0.5).losses[8:]


@pytest.mark.parametrize("level", LEVELS)
def test_mmengines_wrapper_trains_and_resumes(level: str, tmp_path: Path) -> None:
    assert fork_ranks(functools.partial(with_mmengine, level=level), tmp_path, 1) == [True]


# -- timm --------------------------------------------------------------------------------------


def with_timm(rank: int, level: str) -> bool:
    amp = apex("timm.utils.cuda", "amp")
    data = batches(12)

    def start() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = Net()
        optimizer = make_optimizer(model.parameters())
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        return model, optimizer, ApexScaler()

    def train(model: Any, optimizer: Any, scaler: Any, data: Any) -> None:
        for batch in data:
            scaler(loss_of(model, batch), optimizer, clip_grad=0.5)
            optimizer.zero_grad()

    run = start()
    train(*run, data[:6])
    saver = CheckpointSaver(
        run[0],
        run[1],
        args=Namespace(model="net"),
        amp_scaler=run[2],
        checkpoint_dir=".",
        recovery_dir=".",
    )
    saver.save_checkpoint(0, metric=1.0)
    hand = ByHand(level)
    hand.clip = clip
    hand.run(data[:6], clip=0.5)
    assert_same_models(run[0], hand.model)
    preamp.engine_of(run[0]).close()  # whose loss scale amp.load_state_dict would look for first
    again = start()
    resume_checkpoint(again[0], "last.pth.tar", again[1], again[2])
    train(*again, data[6:])
    assert_same_models(again[0], hand.run(data[6:], clip=0.5).model)
    return True


@pytest.mark.parametrize("level", LEVELS)
def test_timms_scaler_trains_and_resumes(level: str, tmp_path: Path) -> None:
    assert fork_ranks(functools.partial(with_timm, level=level), tmp_path, 1) == [True]
