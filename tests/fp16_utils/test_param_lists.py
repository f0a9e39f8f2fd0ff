# SPDX-License-Identifier: BSD-3-Clause
"""Masters kept by the script: copies forth and back, flat and one by one."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from preamp.core.errors import PreampStateError
from preamp.fp16_utils import (
    clip_grad_norm,
    convert_network,
    master_params_to_model_params,
    model_grads_to_master_grads,
    prep_param_lists,
    to_python_float,
)

HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
FLAT = pytest.mark.parametrize("flat", [False, True])


def net(dtype: torch.dtype = torch.float16) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False)).to(dtype)
    model[1].weight.requires_grad_(False)
    model.append(nn.Linear(2, 1, bias=False).to(dtype))
    return model


@pytest.mark.apex(
    "0 apex.fp16_utils.prep_param_lists",
    "0 apex.fp16_utils.model_grads_to_master_grads",
    "0 apex.fp16_utils.master_params_to_model_params",
    "5.1 prep_param_lists",
    "5.1 model_grads_to_master_grads",
    "5.1 master_params_to_model_params",
)
@HALVES
@FLAT
def test_training_by_hand_is_training_of_float32_masters(dtype: torch.dtype, flat: bool) -> None:
    """The oracle lets autograd do the casts: f(p.to(half)) with float32 p."""
    model = net(dtype)
    x = torch.randn(4, 3).to(dtype)
    params, masters = prep_param_lists(model, flat_master=flat)
    assert all(master.dtype is torch.float32 and master.requires_grad for master in masters)
    oracle = {name: p.detach().float().requires_grad_() for name, p in model.named_parameters()}
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    ours = torch.optim.SGD(masters, lr=0.25, momentum=0.5)
    theirs = torch.optim.SGD([oracle[name] for name in trained], lr=0.25, momentum=0.5)
    for _ in range(3):
        model.zero_grad()
        model(x).float().pow(2).mean().backward()
        model_grads_to_master_grads(params, masters, flat_master=flat)
        ours.step()
        master_params_to_model_params(params, masters, flat_master=flat)
        theirs.zero_grad()
        halves = {name: value.to(dtype) for name, value in oracle.items()}
        torch.func.functional_call(model, halves, (x,)).float().pow(2).mean().backward()
        theirs.step()
        for name in trained:
            assert torch.equal(model.get_parameter(name), oracle[name].to(dtype))
    values = torch.cat([master.detach().reshape(-1) for master in masters])
    assert torch.equal(values, torch.cat([oracle[name].detach().reshape(-1) for name in trained]))


def test_masters_are_copies_even_of_float32_parameters() -> None:
    for flat in (False, True):
        model = nn.Linear(2, 1, bias=False)
        _, masters = prep_param_lists(model, flat_master=flat)
        masters[0].detach().zero_()
        assert model.weight.abs().sum() > 0


@pytest.mark.apex("5.1 prep_param_lists")
def test_a_flat_master_has_a_gradient_of_zeros() -> None:
    _, (master,) = prep_param_lists(net(), flat_master=True)
    assert master.shape == (3 * 2 + 2 + 2,)
    assert torch.equal(master.grad, torch.zeros_like(master))


@pytest.mark.apex("5.1 model_grads_to_master_grads")
def test_a_missing_gradient_clears_the_masters() -> None:
    params, masters = prep_param_lists(net())
    for master in masters:
        master.grad = torch.ones_like(master)
    params[0].grad = torch.full_like(params[0], 3.0)
    model_grads_to_master_grads(params, masters)
    assert masters[0].grad.unique().tolist() == [3.0]
    assert [master.grad for master in masters[1:]] == [None] * (len(masters) - 1)


@FLAT
def test_lists_may_be_generators(flat: bool) -> None:
    model = nn.Linear(2, 1, bias=False).half()
    _, masters = prep_param_lists(model, flat_master=flat)
    model.weight.grad = torch.full_like(model.weight, 3.0)
    model_grads_to_master_grads(model.parameters(), iter(masters), flat_master=flat)
    assert masters[0].grad is not None
    assert masters[0].grad.flatten().tolist() == [3.0, 3.0]

    masters[0].data.fill_(5.0)
    master_params_to_model_params(model.parameters(), iter(masters), flat_master=flat)
    assert model.weight.tolist() == [[5.0, 5.0]]


def test_sparse_gradients_reach_both_kinds_of_master() -> None:
    for flat in (False, True):
        model = nn.Embedding(4, 2, sparse=True).half()
        params, masters = prep_param_lists(model, flat_master=flat)
        model(torch.tensor([1, 1])).float().sum().backward()
        for _ in range(2):
            model_grads_to_master_grads(params, masters, flat_master=flat)
        grad = masters[0].grad
        dense = grad.to_dense() if grad.is_sparse else grad
        assert dense.reshape(4, 2).tolist() == [[0, 0], [2, 2], [0, 0], [0, 0]]


def refused(error: type[Exception], text: str) -> Any:
    return pytest.raises(error, match=f"^{re.escape(text)}$")


def test_a_flat_master_needs_every_gradient() -> None:
    params, masters = prep_param_lists(net(), flat_master=True)
    params[0].grad = torch.ones_like(params[0])
    with refused(
        PreampStateError,
        "Parameter 1 of 3 has no gradient. With flat_master=True every parameter needs one, as "
        "they share a master. Freeze unused parameters before prep_param_lists, or pass "
        "flat_master=False.",
    ):
        model_grads_to_master_grads(params, masters, flat_master=True)
    assert masters[0].grad.abs().sum() == 0


@pytest.mark.apex("5.1 prep_param_lists")
def test_a_flat_master_needs_one_dtype() -> None:
    model = convert_network(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), torch.float16)
    with refused(
        TypeError,
        "The model has parameters of torch.float16 on cpu, torch.float32 on cpu. With "
        "flat_master=True all share one dtype and device. Pass flat_master=False, or convert the "
        "whole model, batch norms included.",
    ):
        prep_param_lists(model, flat_master=True)


def test_a_flat_master_needs_a_parameter() -> None:
    with refused(
        ValueError,
        "The model has no trainable parameter. A flat master needs one at least. Pass "
        "flat_master=False, or unfreeze parameters before prep_param_lists.",
    ):
        prep_param_lists(nn.ReLU(), flat_master=True)
    assert prep_param_lists(nn.ReLU()) == ([], [])


@pytest.mark.apex("5.1 master_params_to_model_params")
@pytest.mark.parametrize(
    ("flat", "allowed"),
    [
        (False, "one master of the same shape for each parameter"),
        (True, "one flat master with as many elements as all parameters"),
    ],
)
@pytest.mark.parametrize("copy", [model_grads_to_master_grads, master_params_to_model_params])
def test_lists_that_do_not_belong_together(flat: bool, allowed: str, copy: Any) -> None:
    params, masters = prep_param_lists(net(), flat_master=flat)
    before = [param.detach().clone() for param in params]
    text = (
        f"Got 2 parameters with 8 elements and {len(masters)} masters with 10. Needed is "
        f"{allowed}. Pass both lists as prep_param_lists returned them, with the same flat_master."
    )
    with refused(ValueError, text):
        copy(params[:2], masters, flat_master=flat)
    assert all(map(torch.equal, params, before))


@pytest.mark.apex("0 apex.fp16_utils.to_python_float", "5.1 to_python_float")
def test_to_python_float() -> None:
    assert to_python_float(torch.tensor([2.5])) == 2.5
    assert to_python_float(np.float32(2.5)) == 2.5
    assert to_python_float([2.5, 1.0]) == 2.5


@pytest.mark.apex("0 apex.fp16_utils.clip_grad_norm", "5.1 clip_grad_norm")
def test_clip_grad_norm_is_torch_s() -> None:
    assert clip_grad_norm is torch.nn.utils.clip_grad_norm_
