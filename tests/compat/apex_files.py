# SPDX-License-Identifier: BSD-3-Clause
"""Files as scripts wrote them with Apex, made without Apex.

Classes under Apex's module names exist only while a file is written; a reader that imported them
would fail.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

AMP = "apex.amp.scaler"
OLD = "apex.fp16_utils.loss_scaler"


@contextmanager
def apex_class(module: str, name: str, **members: Any) -> Iterator[Callable[..., Any]]:
    """Let a class exist under Apex's name; calling what is yielded makes an object of it."""
    parts = module.split(".")
    names = [".".join(parts[: end + 1]) for end in range(len(parts))]
    assert not set(names) & set(sys.modules)
    modules = {each: ModuleType(each) for each in names}
    made = type(name, (), {"__module__": module, **members})
    setattr(modules[module], name, made)
    sys.modules.update(modules)

    def make(**attributes: Any) -> Any:
        thing = made()
        thing.__dict__.update(attributes)
        return thing

    try:
        yield make
    finally:
        for each in names:
            del sys.modules[each]


AMP_ATTRIBUTES: dict[str, Any] = {
    "dynamic": True,
    "_loss_scale": 512.0,
    "_max_loss_scale": 2.0**20,
    "_min_loss_scale": None,
    "_scale_seq_len": 100,
    "_unskipped": 42,
    "_has_overflow": False,
    "_overflow_buf": torch.zeros(1, dtype=torch.int32),
}
DYNAMIC_ATTRIBUTES: dict[str, Any] = {
    "cur_scale": 2.0**32,
    "cur_iter": 1234,
    "last_overflow_iter": 33,
    "scale_factor": 2.0,
    "scale_window": 1000,
}
STATIC_ATTRIBUTES: dict[str, Any] = {"cur_scale": 128}

SCALERS = {
    "amp": (AMP, "LossScaler", AMP_ATTRIBUTES),
    "dynamic": (OLD, "DynamicLossScaler", DYNAMIC_ATTRIBUTES),
    "static": (OLD, "LossScaler", STATIC_ATTRIBUTES),
}


def optimizer_state(kind: str, make: Callable[..., Any]) -> dict[str, Any]:
    """The dict that Apex's per-parameter FP16_Optimizer saved for a `Weights` model with SGD."""
    return {
        "loss_scaler": make(**SCALERS[kind][2]),
        "dynamic_loss_scale": kind != "static",
        "overflow": False,
        "first_closure_call_this_step": True,
        "optimizer_state_dict": {
            "state": {0: {"momentum_buffer": torch.tensor([0.5, 0.25])}},
            "param_groups": [
                {
                    "lr": 0.5,
                    "momentum": 0.5,
                    "dampening": 0,
                    "weight_decay": 0,
                    "nesterov": False,
                    "params": [0, 1],
                }
            ],
        },
        "fp32_from_fp16": [[torch.tensor([1.0 + 2.0**-20, 3.0], requires_grad=True)]],
    }


def write_run(path: Path, kind: str, *, zipped: bool) -> None:
    """A whole training script's checkpoint."""
    module, name, _ = SCALERS[kind]
    with apex_class(module, name) as make:
        content = {
            "epoch": 3,
            "model": {"low": torch.ones(2).half(), "wide": torch.tensor([5.0, 6.0])},
            "optimizer": optimizer_state(kind, make),
            "amp": {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 7}},
            "history": [0.5, (1, "two")],
        }
        torch.save(content, path, _use_new_zipfile_serialization=zipped)


def write_flat(path: Path, *, dynamic: bool) -> None:
    """The state of the flat FP16_Optimizer of early 2019 around its FusedAdam, after 7 steps."""
    options = {"lr": 0.125, "bias_correction": False, "betas": (0.5, 0.5), "eps": 0.0}
    group = {**options, "weight_decay": 0.0, "max_grad_norm": 1.0, "params": [0]}
    moments = {"exp_avg": torch.full((3,), 0.5), "exp_avg_sq": torch.full((3,), 0.25)}
    content: dict[str, Any] = {
        "dynamic_loss_scale": dynamic,
        "cur_scale": 512.0,
        "cur_iter": 7,
        "optimizer_state_dict": {"state": {0: {"step": 7, **moments}}, "param_groups": [group]},
        "fp32_groups_flat": [torch.tensor([1.0 + 2.0**-20, 2.0, 3.0], requires_grad=True)],
    }
    if dynamic:
        content |= {"last_overflow_iter": -1, "scale_factor": 2.0, "scale_window": 1000}
    torch.save(content, path)
