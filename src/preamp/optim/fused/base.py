# SPDX-License-Identifier: BSD-3-Clause
"""What all fused optimizers share: what a step has to do, sorted for the op table.

They follow Apex where scripts can tell: the step counter lies in the group, ``zero_grad`` obeys
``set_grad_none``, and sparse gradients are refused. Everything is collected and checked before
weights are changed, so a refused step leaves none half-updated.

``torch.amp.GradScaler.step`` looks for ``_step_supports_amp_scaling`` on the optimizer. If it is
there, gradients are handed over scaled, and the scale and the overflow flag lie on the optimizer
as ``grad_scale`` and ``found_inf`` for the time of the step (`Signals`). Nothing is read back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch.optim.optimizer import required

from preamp.core.dtypes import math_dtype
from preamp.core.errors import PreampStateError, PreampUnavailableError, bad_state, bad_type
from preamp.core.splits import Splits
from preamp.core.tensors import has_sharded, host_reaches, is_capturing
from preamp.core.torch_private.shards import place_gradients
from preamp.kernels import (
    Ops,
    Rule,
    Standing,
    Update,
    at_hand,
    backend,
    check_not_captured,
    holding,
)
from preamp.optim.fused.checks import check_arguments, check_gradients, check_group, check_has_state
from preamp.optim.fused.entries import Entries, Entry, Kept, batches, entries_of, kept_of
from preamp.optim.fused.moments import KeepsMoments
from preamp.optim.fused.norms import Call, norms_of_wholes
from preamp.optim.master_parameter import without_masters
from preamp.optim.split import form_of
from preamp.policy.storage import FULL

Group = dict[str, Any]
MASTER = "master_param"
"""State key of the float32 copy of a half parameter that an optimizer keeps by itself."""

Closure = Callable[[], Any]
R = TypeVar("R", bound=Rule)
REQUIRED: Any = required
"""Default of a hyper-parameter that a group has to say if the constructor does not."""


@dataclass(frozen=True, slots=True)
class Signals:
    """What a ``GradScaler`` says about the gradients at hand."""

    # Float32 scalar that unscales them; ``None`` if they are not scaled
    inv_scale: torch.Tensor | None
    # Float32 scalar, not zero if one is infinite or nan; ``None`` if nobody looked
    found_inf: torch.Tensor | None

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Signals:
        """Read what lies on the optimizer now."""
        scale: Any = getattr(optimizer, "grad_scale", None)
        found_inf: Any = getattr(optimizer, "found_inf", None)
        # Without any gradient the scaler leaves the number 0 here.
        found_inf = found_inf if isinstance(found_inf, torch.Tensor) else None
        if found_inf is not None and getattr(optimizer, "storage", FULL).place == "host":
            found_inf = at_hand(found_inf)  # who makes the update has to know
        return cls(scale.reciprocal() if isinstance(scale, torch.Tensor) else None, found_inf)

    def unscale_(self, grads: Sequence[torch.Tensor], ops: Ops) -> None:
        """Leave the gradients unscaled after the step, as torch's fused optimizers do.

        After it, not before: a half gradient would lose its small values. Gradients of a
        skipped step stay as they are.
        """
        if self.inv_scale is None:
            return
        factor = self.inv_scale
        if self.found_inf is not None:
            is_lost = (self.found_inf != 0).to(factor.device)
            factor = torch.where(is_lost, torch.ones_like(factor), factor)
        ops.scale_add_(grads, factor, [None] * len(grads))


Work = Sequence[tuple[Group, Entries]]
"""All groups that have parameters, with the entries of those that have gradients."""


class FusedOptimizer(KeepsMoments):
    """Base of the optimizers in `preamp.optimizers`; implements everything but the update."""

    set_grad_none: bool
    backend: str = "auto"
    """Name of the kernels that compute the update; see ``preamp.kernels.backend``."""

    splits: Splits = Splits()
    """Over which ranks parameters are split; ``DTensor`` parameters say so themselves."""

    _step_supports_amp_scaling = True
    """Tells torch's ``GradScaler`` to hand over what it knows instead of reading it."""

    is_elementwise: ClassVar[bool] = False
    """Whether an element is updated from its own gradient, value and state alone."""

    keeps_copies: ClassVar[bool] = False
    """Whether it keeps float32 copies of half parameters itself, beside them."""

    _counts: ClassVar[bool] = True
    """Whether ``group["step"]`` counts updates; rounding by chance counts them in any case."""

    _starts_apart: ClassVar[bool] = False
    """Whether the first update of a parameter is another one, whenever it comes."""

    _options: ClassVar[tuple[str, ...]]
    """Arguments of the constructor that each group has."""

    _settings: ClassVar[tuple[str, ...]] = ("set_grad_none",)
    """Those that are attributes, which copies and pickles keep; torch's carry groups only."""

    def __init__(self, params: Any, given: Mapping[str, Any], more: tuple[str, ...] = ()) -> None:
        """Check the arguments that a constructor was ``given``, and keep them.

        `_settings` become attributes, `_options` and ``more`` what groups have.
        """
        check_arguments(type(self).__name__, given)
        vars(self).update({name: given[name] for name in self._settings})
        super().__init__(params, {name: given[name] for name in (*self._options, *more)})

    # ``grad_scaler`` is not named in the signature: torch's GradScaler warns about optimizers
    # that name it, and hands the same over as attributes otherwise.
    def step(self, closure: Closure | None = None, **scaling: Any) -> Any:
        """Update the parameters that have gradients.

        Args:
            closure: Re-evaluates the model with gradients enabled and returns the loss.
            scaling: ``grad_scaler=scaler`` does what ``scaler.step(optimizer)`` does.

        Returns:
            The closure's loss, or ``None``.

        Raises:
            RuntimeError: A gradient is sparse or of a dtype that is not updated.
        """
        if scaling:
            return self._step_by(scaling, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            work, signals = self._collect(), Signals.of(self)
            storage = self.storage
            may_refuse = storage.moments != "float32" or storage.place == "host"
            with self._counters_kept(work) if may_refuse else nullcontext():
                self._take_step(work, signals)
            if signals.inv_scale is not None:
                grads = [grad for _, entries in work for grad in entries.grads]
                signals.unscale_(grads, self._ops)
        return loss

    def _step_by(self, given: dict[str, Any], closure: Closure | None) -> Any:
        """`step` with other keyword arguments: a ``grad_scaler`` that takes it, and no more."""
        unknown = sorted(given.keys() - {"grad_scaler"})
        if unknown:
            raise bad_type(
                f"{type(self).__name__}.step() got {', '.join(map(repr, unknown))}",
                "Its only other keyword argument is 'grad_scaler'",
                "Check the spelling",
            )
        scaler = given.get("grad_scaler")
        if scaler is None:
            return FusedOptimizer.step(self, closure)
        return scaler.step(self, **({} if closure is None else {"closure": closure}))

    @contextmanager
    def _counters_kept(self, work: Work) -> Generator[None]:
        """Set counters back where there is no pinned memory, or state that cannot be kept.

        Nothing else has changed by then.
        """
        counters = [group.get("step") for group, _ in work]
        values: list[Any] = [c.clone() if isinstance(c, torch.Tensor) else c for c in counters]
        try:
            yield
        except (PreampStateError, PreampUnavailableError):
            for (group, _), counter, value in zip(work, counters, values, strict=True):
                if counter is None:
                    group.pop("step", None)
                    continue
                group["step"] = counter
                if isinstance(counter, torch.Tensor):
                    counter.copy_(value)
            raise

    def _take_step(self, work: Work, signals: Signals) -> None:
        """Update what has been collected; gradients stay as they are."""
        if signals.found_inf is not None and self._must_skip(work, signals.found_inf):
            return
        inv_scale = self._unscaling(work, signals)
        apart = self._have_started if self._starts_apart else None
        if self.storage.moments == "8bit":
            apart = self._apart(apart)
        calls: list[Call] = []
        for group, entries in work:
            step, rule = self._count(group, signals), self._rule(group)
            for batch in batches(entries, apart):
                is_first = self._starts_apart and not self._have_started(batch.params[:1])[0]
                update = batch.update(
                    step=1 if is_first else step, inv_scale=inv_scale, found_inf=signals.found_inf
                )
                calls.append(self._call(group, batch, rule, update))
        self._update(calls)

    def _must_skip(self, work: Work, found_inf: torch.Tensor) -> bool:
        """Whether nothing may happen; waits for the device where a first step depends on it.

        Where a parameter's first update is another one, whether it was taken must be known.
        """
        must_know = host_reaches(found_inf) or (
            self._starts_apart
            and any(
                entries.params
                and self._first_differs(group)
                and not all(self._have_started(entries.params))
                for group, entries in work
            )
        )
        return must_know and bool(found_inf != 0)

    def _first_differs(self, group: Group) -> bool:
        """Whether a first update and a later one from zeros differ, where `_starts_apart`."""
        return True

    def _unscaling(self, work: Work, signals: Signals) -> torch.Tensor | None:
        """What all gradients are multiplied by."""
        return signals.inv_scale

    def _count(self, group: Group, signals: Signals) -> int | torch.Tensor:
        """Advance the group's counter unless skipped, and return the number of the update.

        A number while the host knows what is skipped, else a tensor; where `_starts_apart` not that
        of parameters without state.
        """
        if not (self._counts or self._has_fewer_bits):
            return 1
        found_inf, step = signals.found_inf, group.get("step", 0)
        if not isinstance(step, torch.Tensor):
            check_counter(group)
            if found_inf is None or host_reaches(found_inf):
                group["step"] = int(step) + 1
                return group["step"]
            group["step"] = scalar_on(step, torch.int32, group["params"][0].device)
        return count_on_device(group, found_inf)

    def _rule(self, group: Group) -> Rule:
        """The rule of a group."""
        raise NotImplementedError

    def _call(self, group: Group, batch: Entries, rule: Rule, update: Update) -> Call:
        """The update of a batch, which makes the state that is missing."""
        kept, states = kept_of(self, batch.params)
        state: list[list[torch.Tensor]] = []
        for key in (*self.moments, *self._more_state):
            state.append(self._state(kept, batch.params, states, key, group))
        targets = batch.params
        if self.storage.moments != "float32":
            update = self._told(batch.params, update)
        if self._has_copy(targets[0]):
            copies = list(map(_copy_of, targets, states))
            update = replace(update, halves=batch.params, halves_lead=True)
            return Call(batch, [copies, batch.grads, *state], rule, update)
        kept.note("lows", batch.lows)
        if batch.lows is not None:  # split masters are their half weights
            targets = batch.targets
        update = replace(update, standing=kept.standing)
        kept.standing = kept.standing or Standing()
        return Call(batch, [targets, batch.grads, *state], rule, update)

    def _update(self, calls: Sequence[Call]) -> None:
        ops = self._ops
        if not self.is_elementwise:
            calls = norms_of_wholes(calls, ops, self.splits)
        on_host = self.storage.place == "host"
        with holding((c.lists, c.update) for c in calls) if on_host else nullcontext():
            for call in calls:
                try:
                    ops.update_(*call.lists, rule=call.rule, update=call.update)
                    call.batch.note_written()
                except BaseException:  # as Ctrl-C, which may come at any line
                    call.batch.note_interrupted()
                    raise

    @property
    def _ops(self) -> Ops:
        """The kernels that compute the update."""
        return backend(self.backend, self.storage.place)

    def _has_copy(self, param: torch.Tensor) -> bool:
        """Whether the optimizer itself keeps a float32 copy of ``param``; a question of dtype."""
        return False

    def _have_started(self, params: Sequence[torch.Tensor]) -> list[bool]:
        """Which of ``params`` have state."""
        key = next(iter(self.moments))
        return [state.get(key) is not None for state in kept_of(self, params)[1]]

    def add_param_group(self, param_group: Group) -> None:
        """Add ``param_group``; refuses numbers that the constructor refuses.

        Where steps are counted on the device its ``lr`` and ``step`` become tensors of its own.
        """
        if isinstance(param_group, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
            names = param_group.keys() - ({"norm_type"} - {*self._options})
            check_group(type(self).__name__, {name: param_group[name] for name in names})
        super().add_param_group(param_group)
        if self._counts_on_device:
            place_on_device(self.param_groups[-1])

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients.

        Args:
            set_to_none: Drop them rather than fill them with zeros; by default as the
                constructor's ``set_grad_none`` says.
        """
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data.

        A counter that moved to the device, where only that knows of skipped steps, is a number
        again, unless the optimizer is ``capturable``. Synchronises in this case.
        """
        state = super().state_dict()
        if not self._counts_on_device:
            for group in state["param_groups"]:
                if isinstance(group.get("step"), torch.Tensor):
                    group["step"] = int(group["step"])
        return state

    @property
    def _counts_on_device(self) -> bool:
        """Whether ``group["step"]`` is a tensor by the user's choice."""
        return False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` returned.

        torch casts loaded state to the parameter's dtype on the way. State that is kept in
        float32 or in fewer bits here is taken from ``state_dict`` itself. Moments in fewer bits
        become float32 where `storage` keeps them so.

        Raises:
            ValueError: Its groups do not match those of this optimizer, or its moments in fewer
                bits have other shapes than the parameters.
            PreampStateError: `storage` keeps moments in fewer bits than the state has.
        """
        own: dict[torch.Tensor, Entry] = {}

        def take_out(_: torch.optim.Optimizer, final: dict[str, Any]) -> dict[str, Any]:
            # ``final`` is what the user's own hooks have made of it.
            found, rest = self._own_state(final)
            own.update(found)
            return {**final, "state": rest}

        def put_back(_: torch.optim.Optimizer) -> None:
            for param, entry in own.items():
                self.state[param].update(entry)

        handles = (
            self.register_load_state_dict_pre_hook(take_out),
            self.register_load_state_dict_post_hook(put_back, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        names = (*self._settings, "backend", "storage")
        return super().__getstate__() | {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # from a file that did not know an option yet
            for name, default in self.defaults.items():
                if default is not REQUIRED and name != "differentiable":  # which torch puts there
                    group.setdefault(name, default)
            if self._counts_on_device:
                place_on_device(group)

    def _collect(self) -> Work:
        if self.storage.moments != "float32":
            self.check_storage()
        work: list[tuple[Group, Entries]] = []
        for group in self.param_groups:
            if has_sharded(group["params"]):
                place_gradients(without_masters(group["params"]))
            entries = entries_of(group["params"])
            if not entries.are_alike or entries.twins is None:  # else looked at when they came
                params, grads, are_alike = entries.targets, entries.grads, entries.are_alike
                check_gradients(type(self).__name__, params, grads, are_alike=are_alike)
            if self.storage.place == "host" and entries.params:
                check_not_captured(entries.owners[0].device)
            if group["params"]:
                work.append((group, entries))
        return work

    def _state(
        self,
        kept: Kept,
        params: Sequence[torch.Tensor],
        states: Sequence[dict[str, Any]],
        key: str,
        group: Group,
    ) -> list[torch.Tensor]:
        """One of the rule's lists of state, made where there is none."""
        dtype = self._dtype_of(key, params[0])
        if self.storage.moments != "float32":
            home = self._homes().by_id[id(params[0])]
            dtype = self._kept_as(key, params[0], home).dtype or dtype
        column = kept.column(states, key, dtype)
        if column is not None:
            return column
        check_has_state(params[0])
        if key in self.moments:
            self._make_moments(params, states, key)
        else:
            for param, state in zip(params, states, strict=True):
                if state.get(key) is None:
                    made = self._started(key, form_of(param), dtype, group)
                    state[key] = made.to(self._state_device or made.device)
                elif state[key].dtype is not dtype:  # the model was cast, and the state with it
                    state[key] = state[key].to(dtype)
        made = [state[key] for state in states]
        kept.dtypes[key] = dtype
        kept.note(key, made)
        return made

    def _dtype_of(self, key: str, param: torch.Tensor) -> torch.dtype:
        return math_dtype(param.dtype) if key in self._wide_state else param.dtype

    def _started(
        self, key: str, param: torch.Tensor, dtype: torch.dtype, group: Group
    ) -> torch.Tensor:
        """State that is no moment, before the first step."""
        return torch.zeros_like(param, dtype=dtype)


def _copy_of(param: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    """The float32 copy of ``param`` in its ``state``, and so in checkpoints, beside the parameter.

    Made at the first step rather than at construction, so that weights loaded or broadcast in
    between count. Later writes to the parameter count as well, however they are made, since updates
    take half weights for the truth.
    """
    if MASTER not in state:
        check_has_state(param)
        state[MASTER] = param.detach().float()
    state[MASTER] = state[MASTER].to(param.device)
    return state[MASTER]


def scalar_on(
    value: float | torch.Tensor, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """``value`` as a 0-dim tensor; a number is filled in, since copying it would synchronise."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device, dtype).reshape(())
    return torch.full((), value, dtype=dtype, device=device)


def rate_of(group: Group) -> float | torch.Tensor:
    """The group's learning rate; of a tensor with one element, whatever its shape, a scalar."""
    lr: float | torch.Tensor = group["lr"]
    return lr.reshape(()) if isinstance(lr, torch.Tensor) else lr


def rule_of(kind: type[R], group: Group, **others: Any) -> R:
    """The rule of a group: its hyper-parameters by the rule's names for them, and ``others``."""
    given: dict[str, Any] = {**group, "lr": rate_of(group), **others}
    if "betas" in group:
        given["beta1"], given["beta2"] = group["betas"]
    for name in given.keys() - _fields_of(kind):
        del given[name]
    return kind(**given)


@functools.cache
def _fields_of(kind: type[Rule]) -> frozenset[str]:
    return frozenset(field.name for field in fields(kind))


def place_on_device(group: Group) -> None:
    """Make ``lr`` and ``step`` of a group 0-dim tensors of its own, where its parameters are."""
    if not group["params"]:
        return
    param: torch.Tensor = group["params"][0]
    for name, dtype in (("lr", math_dtype(param.dtype)), ("step", torch.int32)):
        group[name] = scalar_on(group.get(name, 0), dtype, param.device).clone()


def check_counter(group: Group) -> None:
    """Raise ``PreampStateError`` for a counter on the host in a step that a CUDA graph captures."""
    if is_capturing(group["params"][0].device):
        step = group.get("step", 0)
        raise bad_state(
            f"optimizer.step() was captured in a CUDA graph with group['step']={step}",
            "Replays see numbers of the host as they were at the capture, so all of them would be "
            "the same step",
            "Pass capturable=True to FusedAdam; of another optimizer make it a tensor before: "
            "group['step'] = torch.tensor(group['step'], dtype=torch.int32, device='cuda')",
        )


def count_on_device(group: Group, found_inf: torch.Tensor | None) -> torch.Tensor:
    """Advance the group's counter unless the step is skipped, and return it."""
    if not isinstance(group.get("step"), torch.Tensor):  # a number that a script has put there
        check_counter(group)
        place_on_device(group)
    step: torch.Tensor = group["step"]
    step += 1 if found_inf is None else (found_inf == 0).to(step.device)
    return step
