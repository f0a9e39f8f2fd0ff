# SPDX-License-Identifier: BSD-3-Clause
"""An optimizer, however it is named, as a function of parameters, and the bytes of its state."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from preamp.core.errors import bad_type, bad_value
from preamp.core.pytree import tensors_in
from preamp.kernels.stored import Format, can_be_blocks, scales_shape
from preamp.optim.fused import every as fused
from preamp.optim.fused.base import FusedOptimizer
from preamp.optim.fused.kinds import KEEP_FEWER_BITS, ON_HOST, closest_first
from preamp.optim.fused.moments import format_of
from preamp.policy.storage import FULL, Storage

_FORM = (
    "A factory is written package.module:name, or package.module:name(10, bias=False) with "
    "numbers, strings, True, False, None, and lists, tuples and dicts of them as arguments"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A function by its place, and what to call it with."""

    module: str  # dotted module; empty where the text named none
    name: str  # dotted name inside of it
    args: tuple[Any, ...] = ()  # positional arguments
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])  # keyword arguments

    def import_function(self) -> Callable[..., Any]:
        """Import the module and return the function in it."""
        if not self.module:
            raise _malformed(self.name)
        try:
            found: Any = importlib.import_module(self.module)
            for part in self.name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            raise bad_value(
                f"Cannot import {self.module}:{self.name}: {error}",
                _FORM,
                "Check the spelling, and that the module is on PYTHONPATH",
            ) from error
        if not callable(found):
            raise bad_value(f"{self.module}:{self.name} cannot be called", _FORM, "Name a function")
        return found


def parse_call(text: str) -> Call:
    """Read, but do not run, such as ``"AdamW(lr=1e-3)"`` or ``"torch.nn:Linear(10, 20)"``."""
    place, bracket, rest = text.strip().partition("(")
    module, _, name = place.rpartition(":")
    names = [*name.split("."), *(module.split(".") if module else [])]
    try:
        node = ast.parse(f"{name}({rest if bracket else ')'}", mode="eval").body
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) == name):
            raise ValueError("it has more than one call")
        args = tuple(map(ast.literal_eval, node.args))
        kwargs = {str(item.arg): ast.literal_eval(item.value) for item in node.keywords if item.arg}
        if len(kwargs) < len(node.keywords) or not all(map(str.isidentifier, names)):
            raise ValueError("a name is missing, is none, or is there twice")
    except (SyntaxError, ValueError) as error:
        raise _malformed(text) from error
    return Call(module=module, name=name, args=args, kwargs=kwargs)


def _malformed(text: str) -> ValueError:
    return bad_value(
        f"{text!r} does not name a factory", _FORM, 'Write for example "torch.nn:Linear(10, 20)"'
    )


Make = Callable[[Any], torch.optim.Optimizer]
OptimizerLike = str | Make | torch.optim.Optimizer
_DEFAULT_LR = 1e-3  # for classes that want one to be named; no size depends on it

NAMES = tuple(
    name
    for room in (fused, torch.optim)
    for name, kind in sorted(vars(room).items())
    if inspect.isclass(kind)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
)
"""What may stand for an optimizer by itself: preamp's fused ones, and torch's."""


def optimizer_factory(optimizer: OptimizerLike) -> Make:
    """Return what makes such an optimizer over other parameters.

    Given is a name in `NAMES`, with arguments if need be (``"SGD(lr=0.1, momentum=0.9)"``);
    ``"package.module:Name(...)"``; a class or other function of the parameters; or an optimizer, of
    whose class another one is made with the same options.
    """
    if isinstance(optimizer, str):
        return _named(optimizer)
    if isinstance(optimizer, torch.optim.Optimizer):
        return _again(optimizer)
    if callable(optimizer):
        return _complete(optimizer, {})
    raise bad_type(
        f"Got {type(optimizer).__name__} in place of an optimizer",
        "Allowed are a name such as 'AdamW', a class, a function of the parameters, an "
        "optimizer, or None",
        "Pass for example optimizer='FusedAdam'",
    )


def name_of(optimizer: OptimizerLike | None) -> str:
    """The word that reports have for it."""
    if optimizer is None:
        return "none"
    if isinstance(optimizer, str):
        return parse_call(optimizer).name.rpartition(".")[2]
    if isinstance(optimizer, torch.optim.Optimizer):
        return type(optimizer).__name__
    function = getattr(optimizer, "func", optimizer)
    return str(getattr(function, "__name__", type(function).__name__))


def _named(text: str) -> Make:
    call = parse_call(text)
    if call.module:
        kind: Any = call.import_function()
    elif call.name in NAMES:
        kind = getattr(fused, call.name, None) or getattr(torch.optim, call.name)
    else:
        raise bad_value(
            f"The optimizer {text!r} is not known",
            f"Known by name are {', '.join(NAMES)}",
            "Write others as package.module:Name",
        )
    if call.args:
        raise bad_value(
            f"{text!r} has arguments without a name",
            "Arguments of an optimizer are written name=value",
            f"Write for example {call.name}(lr=0.1)",
        )
    return _complete(kind, call.kwargs)


def _complete(kind: Callable[..., torch.optim.Optimizer], kwargs: dict[str, Any]) -> Make:
    """Add a learning rate where it is wanted and not given."""
    options = dict(kwargs)
    lr = inspect.signature(kind).parameters.get("lr")
    if lr is not None and "lr" not in options and _is_required(lr):
        options["lr"] = _DEFAULT_LR
    return lambda params: kind(params, **options)


def _is_required(parameter: inspect.Parameter) -> bool:
    # FusedSGD's and FusedLARS's default is torch's own mark for "must be given".
    default: Any = parameter.default
    return default is inspect.Parameter.empty or not (
        default is None or isinstance(default, (int, float, torch.Tensor))
    )


def _again(optimizer: torch.optim.Optimizer) -> Make:
    kind = type(optimizer)
    accepted = [name for name in inspect.signature(kind).parameters if name != "params"]
    known = {name: getattr(optimizer, name) for name in accepted if hasattr(optimizer, name)}
    known |= optimizer.defaults
    options = {name: known[name] for name in accepted if name in known}
    return _complete(kind, copy.deepcopy(options))


_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)
Shape = tuple[int, ...]
ShardSize = Callable[[Shape], int]
"""How many elements of a tensor of this shape the rank with the most has."""


@dataclass(frozen=True, slots=True)
class Updated:
    """A tensor that an optimizer updates."""

    shape: Shape  # its sizes
    dtype: torch.dtype  # float32 for a master
    has_gradient: bool = True  # whether it takes part in the step
    group: int = 0  # index of its parameter group


@dataclass(frozen=True, slots=True)
class StateBytes:
    """What an optimizer keeps."""

    bytes: int  # of all tensors in its state and its groups, for one rank
    reads_master_gradients: bool  # whether it reads gradients of masters and thereby has them made


def state_bytes(
    make: Make,
    tensors: Sequence[Updated],
    options: Sequence[Mapping[str, Any]] = ({},),
    part: ShardSize = math.prod,
    storage: Storage = FULL,
) -> StateBytes:
    """Count the state that an optimizer has after its first step over ``tensors``.

    ``options`` are of each group; ``part`` is applied to state of the parameter's size; moments are
    kept as ``storage`` says.
    """
    small = {tensor: _small_parameter(tensor) for tensor in dict.fromkeys(tensors)}
    optimizer = _stepped(make, small, options)
    _check_storage(optimizer, storage)
    moments: Mapping[str, Format] = getattr(optimizer, "moments", {})
    kept: dict[Updated, int] = {}
    for tensor, param in small.items():
        state = cast("dict[Any, dict[str, Any]]", optimizer.state).get(param, {})
        kept[tensor] = 0
        for key, value in state.items():
            for item in tensors_in(value):
                size = _bytes_of(tensor, tuple(item.shape), item.element_size(), part)
                if key in moments:
                    size = _moment_bytes(tensor, moments[key], storage, part) or size
                kept[tensor] += size
    total = sum(kept[tensor] for tensor in tensors)
    for group in optimizer.param_groups:
        others = {key: value for key, value in group.items() if key != "params"}
        total += sum(item.numel() * item.element_size() for item in tensors_in(others))
    return StateBytes(total, not isinstance(optimizer, FusedOptimizer))


def _moment_bytes(tensor: Updated, kind: Format, storage: Storage, part: ShardSize) -> int | None:
    """Of a moment that is kept in fewer bits, with its scales; ``None`` of any other."""
    has_blocks = can_be_blocks(tensor.shape)
    kept = format_of(kind, tensor.dtype, storage, has_blocks=has_blocks)
    if kept.dtype is None:
        return None
    elements = part(tensor.shape)
    if not kept.has_scales:
        return elements * kept.dtype.itemsize
    rows = -(-elements // math.prod(tensor.shape[1:]))
    return elements * kept.dtype.itemsize + 4 * rows * scales_shape(tensor.shape)[1]


def _check_storage(optimizer: torch.optim.Optimizer, storage: Storage) -> None:
    if storage.place == "host" and getattr(optimizer, "keeps_copies", True):
        kind = type(optimizer).__name__
        others = ", ".join(closest_first(kind, ON_HOST))
        raise bad_value(
            f"storage has place='host', and the optimizer is {kind}",
            f"Masters and moments may lie on the host with {others}",
            "Choose one of these, or a storage without it",
        )
    if storage.masters == "split" or storage.moments != "float32":
        if isinstance(optimizer, FusedOptimizer) and optimizer.moments:
            return
        what = f"moments={storage.moments!r}" if storage.moments != "float32" else "masters='split'"
        raise bad_value(
            f"storage has {what}, and the optimizer is {type(optimizer).__name__}",
            f"Masters and moments are kept in fewer bits by {', '.join(KEEP_FEWER_BITS)}",
            'Choose one of these, or storage="full"',
        )


def _small_shape(shape: Shape) -> Shape:
    if len(shape) > len(_PRIMES):
        raise bad_value(
            f"A parameter of {len(shape)} dimensions",
            f"Up to {len(_PRIMES)} can be estimated",
            "Reshape it, or count a real engine with preamp.count_memory",
        )
    return tuple(p if size > 1 else size for size, p in zip(shape, _PRIMES, strict=False))


def _small_parameter(tensor: Updated) -> torch.nn.Parameter:
    value = torch.ones(_small_shape(tensor.shape), dtype=tensor.dtype, device="cpu")
    return torch.nn.Parameter(value, requires_grad=tensor.has_gradient)


def _stepped(
    make: Make, small: Mapping[Updated, torch.nn.Parameter], options: Sequence[Mapping[str, Any]]
) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [p for t, p in small.items() if t.group == index], **own}
        for index, own in enumerate(options)
    ]
    try:
        optimizer = make(groups)
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("LBFGS keeps a history of the whole model, of a length that grows")
        is_sparse = isinstance(optimizer, torch.optim.SparseAdam)
        for group in optimizer.param_groups:
            if isinstance(group.get("lr"), (int, float)):
                # No size depends on it, and float16 may not hold it.
                group["lr"] = min(group["lr"], 1.0)
        for tensor, param in small.items():
            if tensor.has_gradient:
                grad = torch.full_like(param, 0.5)
                param.grad = grad.to_sparse() if is_sparse and grad.dim() else grad
        cast("Any", optimizer).step()
    except Exception as error:  # whatever an optimizer of anyone's raises
        empty = [t.shape for t in small if not math.prod(t.shape)]
        is_division = isinstance(error, ArithmeticError) and empty
        hint = f", with a parameter of shape {empty[0]}" if is_division else ""
        raise bad_value(
            f"The optimizer's state cannot be told: {type(error).__name__}: {error}{hint}",
            "Estimated are optimizers that keep state for each parameter, made from these "
            "parameters alone",
            "Pass another optimizer, or the model in place of a number of parameters",
        ) from error
    return optimizer


def _bytes_of(tensor: Updated, shape: Shape, item_bytes: int, part: ShardSize) -> int:
    small = _small_shape(tensor.shape)
    if shape == small and math.prod(shape) > 1:
        return part(tensor.shape) * item_bytes
    sizes = list(zip(shape, small, tensor.shape, strict=False))
    if len(shape) > len(small) or any(size > 1 and size != own for size, own, _ in sizes):
        raise bad_value(
            f"The optimizer keeps a state of shape {shape} for a parameter of shape {small}",
            "Estimated is state whose sizes are those of the parameter, or one",
            "Count a real engine with preamp.count_memory",
        )
    return math.prod(whole if size == own else size for size, own, whole in sizes) * item_bytes
