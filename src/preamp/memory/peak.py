# SPDX-License-Identifier: BSD-3-Clause
"""What a forward and backward hold at their worst moment, from a run on tensors without memory."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from preamp.core.errors import bad_value
from preamp.core.pytree import map_leaves
from preamp.core.randomness import untouched_random
from preamp.core.torch_private.autograd import leaves_above
from preamp.core.torch_private.observe import ObservedOps, fake_tensors
from preamp.engine.initialize import create_engine
from preamp.kernels.wide_half import native_products
from preamp.policy import Policy

LossFn = Callable[[nn.Module, Any], torch.Tensor]


class Held:
    """While entered, counts memory of new tensors, but not inside kernels."""

    def __init__(self) -> None:
        self.live = 0  # bytes of the storages that were made since the start and still exist
        self.peak = 0  # the largest value of ``live`` so far
        self._known: dict[int, weakref.ref[Any]] = {}
        self._ops = ObservedOps(self._see)

    def __enter__(self) -> Held:
        """Begin to count."""
        self._ops.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop; storages that go later are not missed."""
        cast("Any", self._ops).__exit__(*error)

    def _see(
        self, op: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        held = {id(tensor.untyped_storage()) for tensor in inputs if _has_storage(tensor)}
        for tensor in filter(_has_storage, outputs):
            if id(tensor.untyped_storage()) not in held:
                self._hold(tensor.untyped_storage())

    def _hold(self, storage: Any) -> None:
        key, size = id(storage), int(storage.nbytes())
        known = self._known.get(key)
        if known is not None and known() is storage:
            return

        def gone(_: weakref.ref[Any]) -> None:
            self.live -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def trace_pass(model: nn.Module, policy: Policy, loss_fn: LossFn, batch: Any) -> int:
    """Trace ``loss_fn`` and backward at a policy without memory; meta counts as CPU.

    Returns the bytes of all tensors made in them at the worst moment, new gradients included.
    Model and batch are copies; ``loss_fn`` is called once as it is, and what it notes stays noted.

    Products are those of a device with units for them, whatever this machine's CPU has: where it
    computes them in float32, it makes copies of weights that no GPU needs.
    """
    mode = fake_tensors()
    with mode:
        memo: dict[int, Any] = {id(t): _fake(t) for t in [*model.parameters(), *model.buffers()]}
        values = map_leaves(lambda x: _fake(x) if isinstance(x, torch.Tensor) else x, batch)
    twin, given = _copy_of(model, memo), {p: p.grad for p in model.parameters()}
    others: dict[torch.Tensor, torch.Tensor | None] = {}  # that loss_fn closes over
    with untouched_random(), native_products(), mode:
        engine = create_engine(twin, None, policy)
        for param in twin.parameters() if policy.storage.release_gradients else ():
            if param.requires_grad:
                cast("Any", param).register_post_accumulate_grad_hook(_drop)
        try:
            with Held() as held:
                loss = cast("Any", loss_fn(twin, values).float())
                others |= {leaf: leaf.grad for leaf in leaves_above(loss) if leaf not in given}
                loss.backward()
            grads = [param.grad for param in twin.parameters() if param.requires_grad]
            are_kept = bool(grads) and not policy.storage.release_gradients
            misses = are_kept and all(grad is None for grad in grads)
        except Exception as error:
            failed = f"A step cannot be traced without running it: {_first_line(error)}"
            if batch is None:
                raise bad_value(
                    failed,
                    "loss_fn(model, batch) needs a batch, and got None",
                    "Pass batch=, a tensor or containers of tensors",
                ) from error
            raise bad_value(
                failed,
                "loss_fn(model, batch) returns a scalar loss, and its computation does not "
                "look at values of tensors, as .item() and if do",
                "Leave loss_fn and batch out; what stays from step to step is known without",
            ) from error
        finally:
            engine.close()
            reaches = _put_back(given)
            _put_back(others)
    if reaches or misses:
        raise bad_value(
            "loss_fn takes the loss of a model that it knows, not of the one that it is given",
            "A step is traced on a copy, which loss_fn(model, batch) gets as its first argument",
            "Use that argument in loss_fn",
        )
    return held.peak


def _copy_of(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise bad_value(
            f"The model cannot be copied: {_first_line(error)}",
            "A step is traced on a copy made by copy.deepcopy, so that the model does not change",
            "Move what cannot be copied (open files, locks, generators, graphs) out of it",
        ) from error


def _put_back(given: Mapping[Any, torch.Tensor | None]) -> bool:
    """Give parameters their gradients back; whether one had another."""
    changed = [param for param, grad in given.items() if param.grad is not grad]
    for param in changed:
        param.grad = given[param]
    return bool(changed)


def _drop(param: torch.Tensor) -> None:
    param.grad = None


def _first_line(error: BaseException) -> str:
    """The first line of an error's text, or its class where there is none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    device = "cpu" if tensor.device.type == "meta" else tensor.device
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(like, tensor.requires_grad)
    return like.requires_grad_(tensor.requires_grad)
