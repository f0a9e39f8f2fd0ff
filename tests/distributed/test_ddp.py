# SPDX-License-Identifier: BSD-3-Clause
"""DistributedDataParallel, Reducer, groups and SyncBatchNorm, as far as one process shows them."""

import inspect
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cases.tolerances import assert_same
from kit.refusals import assert_approved, assert_refused
from preamp.parallel import (
    DistributedDataParallel,
    ReduceOp,
    Reducer,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)

SIGNATURES: dict[str, Any] = {
    "the signature of DistributedDataParallel": DistributedDataParallel,
    "the signature of SyncBatchNorm": SyncBatchNorm,
    "the signature of convert_syncbn_model": convert_syncbn_model,
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_apex(name: str) -> None:
    parameters = inspect.signature(SIGNATURES[name]).parameters.values()
    bare = [str(parameter.replace(annotation=parameter.empty)) for parameter in parameters]
    assert_approved("distributed", name, ", ".join(bare))
    assert ReduceOp is torch.distributed.ReduceOp
    assert "channel_last=False, fuse_relu=True" in repr(SyncBatchNorm(3, fuse_relu=True))


REFUSED: dict[str, dict[str, Any]] = {
    "shared_param": {"shared_param": True},
    "a trigger while delaying": {"allreduce_trigger_params": [], "delay_allreduce": True},
    "streams while delaying": {"num_allreduce_streams": 2, "delay_allreduce": True},
    "no stream": {"num_allreduce_streams": 0},
    "communicators for one stream": {"allreduce_communicators": ([None], [None])},
    "one communicator for two": {
        "allreduce_communicators": ([None, None], [None]),
        "num_allreduce_streams": 2,
    },
    "a size below zero": {"message_size": -1},
    "a factor of zero": {"gradient_predivide_factor": 0.0},
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_arguments(name: str) -> None:
    model = nn.Linear(1, 1)
    assert_refused(
        "distributed", name, lambda: DistributedDataParallel(model, **REFUSED[name]), model
    )


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("DistributedDataParallel", lambda: DistributedDataParallel(nn.Linear(1, 1))),
        ("Reducer", lambda: Reducer([torch.zeros(1)])),
        ("create_syncbn_process_group", lambda: create_syncbn_process_group(1)),
    ],
)
def test_without_a_process_group(what: str, call: Any) -> None:
    assert_refused("distributed", "no process group", call, what=what)
    assert create_syncbn_process_group(0) is None  # which needs none


# -- SyncBatchNorm on one process is a plain batch norm to the bit ----------------------------


def filled(layer: Any) -> Any:
    for name, value in layer.state_dict().items():
        if value.is_floating_point():
            value.copy_(torch.rand(value.shape) + 0.5 + ("bias" in name))
    return layer


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (2, 3, 2, 2), (2, 3, 2, 1, 2)], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}], ids=str
)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("channel_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_alone_it_is_a_plain_batch_norm(
    shape: tuple[int, ...],
    options: dict[str, Any],
    training: bool,
    channel_last: bool,
    dtype: torch.dtype,
    relu: bool,
    residual: bool,
) -> None:
    """A-33: evaluation works with channels last, two dimensions and without statistics."""
    options = {"channel_last": channel_last, "fuse_relu": relu, **options}
    layer = filled(SyncBatchNorm(3, **options)).train(training)
    kinds = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
    arguments = layer.eps, layer.momentum, layer.affine, layer.track_running_stats
    plain = kinds[len(shape)](3, *arguments).train(training)
    plain.load_state_dict(layer.state_dict())
    for _ in range(2):
        x, z = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
        ours = layer(*[t.movedim(1, -1) if channel_last else t for t in (x, z)[: 1 + residual]])
        wanted = plain(x) + z if residual else plain(x)
        found = ours.movedim(-1, 1) if channel_last else ours
        assert_same(found, F.relu(wanted) if relu else wanted)
    for name, value in plain.state_dict().items():
        assert_same(layer.state_dict()[name], value, name)


def test_alone_it_can_be_differentiated_twice() -> None:
    layer = SyncBatchNorm(2).double()
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(layer, (x,))


REFUSED_NORMS: dict[str, tuple[dict[str, Any], tuple[torch.Tensor, ...]]] = {
    "one value per channel": ({}, (torch.ones(1, 3),)),
    "fewer channels": ({}, (torch.ones(4, 2),)),
    "a vector": ({}, (torch.ones(3),)),
    "channels in front": ({"channel_last": True}, (torch.ones(4, 3, 2),)),
    "z of another shape": ({}, (torch.ones(4, 3), torch.ones(3))),
}


@pytest.mark.parametrize("name", REFUSED_NORMS)
def test_refused_inputs(name: str) -> None:
    arguments, given = REFUSED_NORMS[name]
    layer = SyncBatchNorm(3, **arguments)
    assert_refused("distributed", name, lambda: layer(*given), layer)


# -- conversion --------------------------------------------------------------------------------


def test_conversion_carries_everything_over() -> None:
    shared: Any = nn.BatchNorm1d(3, momentum=None)
    model: Any = nn.ModuleDict(
        {
            "a": nn.Sequential(nn.Linear(3, 3), shared),
            "b": nn.Sequential(shared, nn.BatchNorm3d(3, eps=0.5, affine=False)),
            "c": nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
            "d": nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False), nn.LayerNorm(3)),
        }
    )
    filled(shared).weight.requires_grad_(False)
    model["b"].eval()
    before = dict(model.state_dict())
    instance_norm, running = model["c"], shared.running_mean
    assert convert_syncbn_model(model, channel_last=True) is model
    new = model["a"][1]
    assert type(new) is type(model["b"][1]) is type(model["d"][0]) is SyncBatchNorm
    assert model["b"][0] is new
    assert model["c"] is instance_norm
    assert type(model["d"][1]) is nn.LayerNorm
    assert new.weight is not shared.weight
    assert new.running_mean is running
    assert (new.momentum, new.training, new.channel_last) == (None, False, True)
    assert (new.weight.requires_grad, new.bias.requires_grad) == (False, True)
    assert (model["b"][1].eps, model["b"][1].weight) == (0.5, None)
    assert (model["d"][0].running_mean, model["d"][0].training) == (None, True)
    assert model.state_dict().keys() == before.keys()
    for name, value in model.state_dict().items():
        assert_same(value, before[name], name)


def test_conversion_of_a_batch_norm_returns_its_replacement() -> None:
    """Again it changes the arguments only."""
    first = filled(SyncBatchNorm(3, fuse_relu=True))
    again = convert_syncbn_model(first, channel_last=True)
    assert (again.fuse_relu, again.channel_last) == (True, True)
    assert_same(again.weight.detach(), first.weight.detach())
    old = nn.BatchNorm1d(2, dtype=torch.float64)
    new = convert_syncbn_model(old)
    assert type(new) is SyncBatchNorm
    assert new.weight.dtype is torch.float64


def test_lazy_batch_norms_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.6 tells that they are new
        model = nn.Sequential(nn.BatchNorm1d(2), nn.LazyBatchNorm1d())
    assert_refused("distributed", "a lazy batch norm", lambda: convert_syncbn_model(model))
    assert type(model[0]) is nn.BatchNorm1d
