# SPDX-License-Identifier: BSD-3-Clause
"""Float32 steps on a copy, watched: what may become half, and what does at a level."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from preamp.core.dtypes import HALF_DTYPES, is_half
from preamp.core.errors import bad_value
from preamp.core.pytree import map_leaves
from preamp.core.randomness import untouched_random
from preamp.core.tensors import is_sharded, storage_key
from preamp.engine.initialize import create_engine
from preamp.kernels.observe import ObservedOps
from preamp.kernels.vectors import norm
from preamp.numerics import count_exponents
from preamp.numerics.records import What
from preamp.planning.forecast import Range
from preamp.planning.isolation import Task
from preamp.planning.layout import named_modules
from preamp.policy import Policy


def checked_loss(loss: object) -> float:
    """The value of a loss; raises `ValueError` if it is no finite scalar tensor. Synchronises."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return check_finite(float(loss.item()))
    shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
    raise _bad_loss(f"loss_fn returned {type(loss).__name__}{shape}")


def check_finite(loss: float) -> float:
    """Return ``loss``, or raise ``ValueError`` if it is infinite or nan."""
    if math.isfinite(loss):
        return loss
    raise _bad_loss(f"The loss is {loss} in float32")


def _bad_loss(got: str) -> ValueError:
    return bad_value(
        got,
        "loss_fn(model, batch) returns a finite scalar tensor",
        "Reduce the loss, for example by mean(), and plan with a model that trains in float32",
    )


def require_graph(loss: torch.Tensor) -> None:
    """Raise ``ValueError`` if autograd knows no way back from ``loss``."""
    if not loss.requires_grad:
        raise bad_value(
            "The loss has no gradient: it is detached from the model's parameters",
            "loss_fn(model, batch) computes its loss with the model, by operations that "
            "autograd records",
            "Leave out detach(), item() and torch.no_grad()",
        )


_HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class ModulePath:
    """The module whose forward runs now, and the operations in it so far.

    All modules of ``model`` have hooks until `remove`. ``on_output`` is told of a module's
    qualified name and each tensor it returns.
    """

    def __init__(self, model: nn.Module, on_output: Callable[[str, torch.Tensor], None]) -> None:
        self._stack: list[str] = []
        self._ops: Counter[str] = Counter()
        self._handles: list[Any] = []
        for name, module in named_modules(model):
            enter, leave = partial(self._enter, name), partial(self._leave, name, on_output)
            self._handles.append(module.register_forward_pre_hook(enter))
            self._handles.append(module.register_forward_hook(leave, always_call=True))

    def start(self) -> None:
        """A forward of the whole model begins."""
        self._stack.clear()
        self._ops.clear()

    def next_op(self, op: str) -> str:
        """A name for the operation ``op`` that is the same in every forward."""
        place = self._stack[-1] if self._stack else "loss"
        name = f"{place or 'model'}: {op.removeprefix('aten.')}"
        self._ops[name] += 1
        return name if self._ops[name] == 1 else f"{name} {self._ops[name]}"

    def observed(self, on_values: Callable[[str, torch.Tensor], None]) -> ObservedOps:
        """While entered, tells of the values that operations compute, by the operation's name."""

        def watch(func: Any, ins: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
            op = str(func.overloadpacket)
            values = new_values(op, ins, outs)
            if values is not None:
                on_values(self.next_op(op), values)

        return ObservedOps(watch)

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, name: str, *_: Any) -> None:
        self._stack.append(name)

    def _leave(
        self, name: str, on_output: Callable[[str, torch.Tensor], None], *given: Any
    ) -> None:
        if self._stack and self._stack[-1] == name:
            self._stack.pop()

        def note(leaf: Any) -> Any:
            if is_measurable(leaf):
                on_output(name or "model", leaf)
            return leaf

        map_leaves(note, given[-1])  # the output, behind the module and its input


def is_measurable(value: object) -> bool:
    """Whether ``value`` is a dense tensor of real floating-point numbers.

    Those that wrap others, such as torchao's fp8 ones, refuse most questions about their values.
    """
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.layout is torch.strided
        and value.numel() > 0
        and (is_sharded(value) or not hasattr(value, "__tensor_flatten__"))
    )


def new_values(
    op: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> torch.Tensor | None:
    """The tensor of values that an operation has computed, if that is what it did.

    Views, casts, copies and fresh memory are none; of several results the first one counts, since
    the others are statistics that kernels keep in float32.
    """
    if not inputs or not outputs or not is_measurable(outputs[0]):
        return None
    if any(word in op for word in ("empty", "_to_copy", "clone", "copy_", "detach")):
        return None
    first = outputs[0]
    if not any(first is tensor for tensor in inputs):
        held = {storage_key(t.untyped_storage()) for t in inputs if t.layout is torch.strided}
        if storage_key(first.untyped_storage()) in held:
            return None
    return first


@dataclass(slots=True)
class _Tally:
    what: What
    counts: torch.Tensor
    max_abs: torch.Tensor
    acting: torch.Tensor | None


ACTING = 0.1  # share of the root mean square from which an element counts as doing something


class Recorder:
    """Collects magnitudes by name; nothing synchronises until they are read."""

    def __init__(self) -> None:
        self._tallies: dict[tuple[str, What], _Tally] = {}
        self._stalled: dict[str, dict[str, torch.Tensor]] = {}

    def add(
        self, name: str, what: What, values: torch.Tensor, effect: torch.Tensor | None = None
    ) -> None:
        """Count the values of a tensor; ``effect`` says which of a gradient's do something."""
        values = values.detach()
        finite = torch.where(torch.isfinite(values), values.abs(), 0).max()
        acting = None
        if effect is not None:
            effect = effect.detach().abs()
            is_acting = effect >= ACTING * effect.square().mean().sqrt()
            acting = count_exponents(torch.where(is_acting, values, 0))
        tally = self._tallies.get((name, what))
        if tally is None:
            self._tallies[name, what] = _Tally(what, count_exponents(values), finite, acting)
        else:
            tally.counts += count_exponents(values)
            tally.max_abs = torch.maximum(tally.max_abs, finite)
            if tally.acting is not None and acting is not None:
                tally.acting += acting

    def add_update(self, name: str, before: torch.Tensor, after: torch.Tensor) -> None:
        """Count an update, and how much of it a half weight would not have noticed."""
        update = after - before
        self.add(name, "update", update)
        counts = self._stalled.setdefault(name, {})
        for form, dtype in _HALVES.items():
            half = before.to(dtype)
            same = (half.float() + update).to(dtype)
            lost = ((same == half) & (update != 0)).sum()
            counts[form] = counts.get(form, lost.new_zeros(())) + lost

    def read(self) -> tuple[Range, ...]:
        """Everything that was collected. Synchronises."""
        return tuple(
            Range(
                name=name,
                what=what,
                counts=_as_ints(tally.counts),
                max_abs=float(tally.max_abs.item()),
                acting=() if tally.acting is None else _as_ints(tally.acting),
                stalled=tuple(
                    (form, int(count.item()))
                    for form, count in self._stalled.get(name, {}).items()
                    if what == "update"
                ),
            )
            for (name, what), tally in self._tallies.items()
        )


def _as_ints(counts: torch.Tensor) -> tuple[int, ...]:
    return tuple(cast("list[int]", cast("Any", counts).tolist()))


def record_ranges(task: Task, steps: int) -> tuple[Range, ...]:
    """Train ``steps`` steps and watch. Mutates all of the task, a copy in float32."""
    model, recorder = task.model, Recorder()
    is_backward = False

    def watch_gradient(name: str, output: torch.Tensor) -> None:
        if output.requires_grad:

            def note(grad: torch.Tensor) -> None:
                if is_backward:  # not one that the loss takes itself: no loss scale is on that
                    recorder.add(f"{name} output", "gradient", grad, effect=grad)

            cast("Any", output).register_hook(note)

    path = ModulePath(model, watch_gradient)

    try:
        for _ in range(steps):
            path.start()
            with path.observed(lambda name, values: recorder.add(name, "activation", values)):
                loss = task.loss_fn(model, task.batch)
            checked_loss(loss)
            require_graph(loss)
            is_backward = True
            cast("Any", loss).backward()
            is_backward = False
            _record_step(model, task.optimizer, recorder)
    finally:
        path.remove()
    ranges = recorder.read()
    _require_gradients(ranges, {name for name, _ in model.named_parameters()}, steps)
    return ranges


def _require_gradients(ranges: Sequence[Range], params: set[str], steps: int) -> None:
    """Refuse to conclude anything about half formats from zeros, which all of them hold."""
    seen = [values for values in ranges if values.what == "gradient" and values.name in params]
    if not any(values.nonzero for values in seen):
        raise bad_value(
            f"Nothing can be concluded: every gradient was zero, or not finite, in {steps} "
            "float32 step" + "s" * (steps > 1),
            "Levels and loss scales follow from the magnitudes of gradients",
            "Pass a batch and a loss from which the model learns, and look for dead "
            "activations and factors of zero",
        )


def _record_step(model: nn.Module, optimizer: torch.optim.Optimizer, recorder: Recorder) -> None:
    params = {name: param for name, param in model.named_parameters() if is_measurable(param)}
    graded = {name: param for name, param in params.items() if param.grad is not None}
    if not graded:
        raise bad_value(
            "No parameter of the model got a gradient",
            "loss_fn(model, batch) computes its loss with the model that it is given, which "
            "is a copy",
            "Use the argument in place of a model from outside",
        )
    for name, param in params.items():
        recorder.add(name, "weight", param)
    before = {name: param.detach().clone() for name, param in graded.items()}
    optimizer.step()
    for name, param in graded.items():
        recorder.add_update(name, before[name], param.detach())
        grad = cast("torch.Tensor", param.grad).to_dense()  # as strided ones are already
        if is_measurable(grad):
            recorder.add(name, "gradient", grad, effect=param - before[name])
    for name, buffer in model.named_buffers():
        if is_measurable(buffer):
            recorder.add(name, "weight", buffer)
    optimizer.zero_grad()


_NUDGE = 2.0**-20  # some units of the last digit of float32
_SAME = 1e-3  # relative difference of losses that such a nudge does not make


def nudge(model: nn.Module, share: float) -> None:
    """Change every weight by about this share of itself, drawn from the default generators."""
    for param in filter(is_measurable, model.parameters()):
        param.data.mul_(1 + share * torch.randn_like(param))


def find_noise(task: Task) -> frozenset[str]:
    """Name the parameters whose gradients are rounding error, as of a bias before a batch norm.

    Such a gradient changes by as much as itself when weights change in their last digits. Nothing
    is mutated; the random state is put back.
    """
    found, losses = list[dict[str, torch.Tensor]](), list[float]()
    for share in (0.0, _NUDGE):
        twin = task.copy()
        model = twin.model
        with untouched_random():
            nudge(model, share)
            loss = twin.loss_fn(model, twin.batch)
            losses.append(float(loss.item()))
            cast("Any", loss).backward()
        grads = {name: param.grad for name, param in model.named_parameters()}
        found.append({n: g.to_dense() for n, g in grads.items() if g is not None})
    if not math.isclose(*losses, rel_tol=_SAME):
        return frozenset()  # it draws random numbers of its own, which explain every difference
    exact, nudged = found
    return frozenset(
        name
        for name, grad in exact.items()
        if name in nudged and bool(norm(grad) < 2 * norm(grad - nudged[name]))
    )


def in_bfloat16(policy: Policy) -> Policy:
    """The same casts in bfloat16, which nothing overflows."""
    is_cast = policy.cast_model_type in HALF_DTYPES
    return policy.replace(
        cast_model_type=torch.bfloat16 if is_cast else policy.cast_model_type,
        patch_torch_functions_type=torch.bfloat16 if policy.patch_torch_functions else None,
        loss_scale=1.0,
    )


@dataclass(frozen=True, slots=True)
class Places:
    """Where a level computes or stores in half."""

    half: frozenset[str]  # names of operations, and of parameters and buffers, that are half
    known: frozenset[str]  # names of all operations that were seen
    # float32 parameters that are cast to half where they are used, so that their gradients are half
    # until they arrive.
    passing: frozenset[str]
    half_outputs: frozenset[str]  # modules that return half tensors
    computing: frozenset[str]  # modules in which something is computed in half

    def holds(self, values: Range) -> bool:
        """Whether the level has these values in half."""
        name = values.name
        if values.what == "activation":
            owner = name.partition(": ")[0]
            return name in self.half if name in self.known else owner in self.computing
        if values.what == "gradient" and name.endswith(" output"):
            return name.removesuffix(" output") in self.half_outputs
        return name in self.half or (values.what != "update" and name in self.passing)


NOWHERE = Places(*[frozenset[str]()] * 5)  # of a level that cannot run


def find_places(task: Task, policy: Policy) -> Places:
    """Run one forward at a policy; ``task`` is a float32 copy whose model comes back in float32."""
    model = task.model
    engine = create_engine(model, None, policy)
    half, known, outputs, computing = set[str](), set[str](), set[str](), set[str]()

    def note_output(name: str, output: torch.Tensor) -> None:
        if is_half(output):
            outputs.add(name)

    path = ModulePath(model, note_output)

    def note(name: str, values: torch.Tensor) -> None:
        known.add(name)
        if is_half(values):
            half.add(name)
            place, op = name.split(": ", 1)
            if "norm" not in op:  # norms take half inputs with float32 weights as they are
                computing.add(place)

    try:
        path.start()
        with path.observed(note):
            task.loss_fn(model, task.batch)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if is_half(tensor):
                half.add(name)
    finally:
        path.remove()
        engine.close()
    passing = {
        name
        for name, _ in model.named_parameters()
        if policy.patch_torch_functions and (name.rpartition(".")[0] or "model") in computing
    }
    return Places(*map(frozenset, (half, known, passing, outputs, computing)))
