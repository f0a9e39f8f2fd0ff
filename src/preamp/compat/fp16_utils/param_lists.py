# SPDX-License-Identifier: BSD-3-Clause
"""Master parameters kept by the script itself: lists, and copies between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from preamp.compat.multi_tensor.apex_C import flatten, unflatten
from preamp.core.errors import bad_state, bad_type, bad_value
from preamp.kernels import backend

Params = list[nn.Parameter]

clip_grad_norm = nn.utils.clip_grad_norm_
"""``torch.nn.utils.clip_grad_norm_`` under its former name."""


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[Params, Params]:
    """List a model's trainable parameters, and make float32 masters of them.

    Args:
        model: Not mutated.
        flat_master: Make one master that holds all parameters one after the other; they must
            share dtype and device.

    Returns:
        Model parameters and masters. The masters are float32 copies that require gradients; a
        flat one has the shape ``(n,)`` and a gradient of zeros.

    Raises:
        TypeError: ``flat_master`` and the parameters differ in dtype or device.
        ValueError: ``flat_master`` and there is no trainable parameter.
    """
    model_params = [param for param in model.parameters() if param.requires_grad]
    if not flat_master:
        return model_params, [nn.Parameter(_widened(param)) for param in model_params]
    _check_uniform(model_params)
    master = nn.Parameter(_widened(flatten([param.detach() for param in model_params])))
    master.grad = torch.zeros_like(master)
    return model_params, [master]


def model_grads_to_master_grads(
    model_params: Iterable[torch.Tensor],
    master_params: Iterable[torch.Tensor],
    flat_master: bool = False,
) -> None:
    """Copy the gradients of the model's parameters to their masters, widened.

    Args:
        model_params: Not mutated.
        master_params: Their ``grad`` is overwritten; it becomes ``None`` where the model's
            parameter has none.
        flat_master: As given to `prep_param_lists`.

    Raises:
        PreampStateError: ``flat_master`` and a parameter has no gradient.
        ValueError: The lists do not belong together; nothing was copied.
    """
    model_params, master_params = list(model_params), list(master_params)
    if not flat_master:
        _check_pairs(model_params, master_params)
        for model, master in zip(model_params, master_params, strict=True):
            _copy_grad(model.grad, master)
        return
    master = _flat_master(model_params, master_params)
    missing = [index for index, param in enumerate(model_params) if param.grad is None]
    if missing:
        raise bad_state(
            f"Parameter {missing[0]} of {len(model_params)} has no gradient",
            "With flat_master=True every parameter needs one, as they share a master",
            "Freeze unused parameters before prep_param_lists, or pass flat_master=False",
        )
    if master.grad is None:
        master.grad = torch.zeros_like(master)
    for param, piece in zip(model_params, unflatten(master.grad, model_params), strict=True):
        _copy_grad_into(param.grad, piece)


def master_params_to_model_params(
    model_params: Iterable[torch.Tensor],
    master_params: Iterable[torch.Tensor],
    flat_master: bool = False,
) -> None:
    """Round the masters into the model's parameters.

    Args:
        model_params: Mutated.
        master_params: Not mutated.
        flat_master: As given to `prep_param_lists`.

    Raises:
        ValueError: The lists do not belong together; nothing was copied.
    """
    model_params, master_params = list(model_params), list(master_params)
    if flat_master:
        sources = unflatten(_flat_master(model_params, master_params).detach(), model_params)
    else:
        _check_pairs(model_params, master_params)
        sources = [master.detach() for master in master_params]
    with torch.no_grad():
        backend().cast_copy_(sources, [param.detach() for param in model_params])


def to_python_float(t: Any) -> Any:
    """Return the number in a tensor of one element, or the first item of a sequence.

    ``t`` may be a numpy scalar too. Reading a tensor synchronises with its device.
    """
    return t.item() if hasattr(t, "item") else t[0]


def _widened(param: torch.Tensor) -> torch.Tensor:
    return param.detach().to(torch.float32, memory_format=torch.preserve_format, copy=True)


def _copy_grad(grad: torch.Tensor | None, master: torch.Tensor) -> None:
    if grad is None:
        master.grad = None
    elif master.grad is None or grad.is_sparse or master.grad.is_sparse:
        master.grad = grad.detach().to(master.dtype, copy=True)
    else:
        _copy_grad_into(grad, master.grad)


def _copy_grad_into(grad: torch.Tensor | None, target: torch.Tensor) -> None:
    if grad is not None:
        dense = grad.to_dense() if grad.is_sparse else grad
        target.detach().copy_(dense.detach().reshape(target.shape))


def _check_uniform(params: Params) -> None:
    if not params:
        raise bad_value(
            "The model has no trainable parameter",
            "A flat master needs one at least",
            "Pass flat_master=False, or unfreeze parameters before prep_param_lists",
        )
    kinds = {f"{param.dtype} on {param.device}" for param in params}
    if len(kinds) > 1:
        raise bad_type(
            f"The model has parameters of {', '.join(sorted(kinds))}",
            "With flat_master=True all share one dtype and device",
            "Pass flat_master=False, or convert the whole model, batch norms included",
        )


def _check_pairs(models: Sequence[torch.Tensor], masters: Sequence[torch.Tensor]) -> None:
    if [param.shape for param in models] != [param.shape for param in masters]:
        raise _mismatch(models, masters, "one master of the same shape for each parameter")


def _flat_master(models: Sequence[torch.Tensor], masters: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(masters) != 1 or masters[0].numel() != sum(param.numel() for param in models):
        raise _mismatch(models, masters, "one flat master with as many elements as all parameters")
    return masters[0]


def _mismatch(
    models: Sequence[torch.Tensor], masters: Sequence[torch.Tensor], allowed: str
) -> ValueError:
    return bad_value(
        f"Got {len(models)} parameters with {sum(p.numel() for p in models)} elements and "
        f"{len(masters)} masters with {sum(p.numel() for p in masters)}",
        f"Needed is {allowed}",
        "Pass both lists as prep_param_lists returned them, with the same flat_master",
    )
