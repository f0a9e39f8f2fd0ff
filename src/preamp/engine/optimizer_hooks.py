# SPDX-License-Identifier: BSD-3-Clause
"""How an engine takes part in the calls a script makes on its optimizer.

``step`` is hooked twice. torch's own step hooks do the work: before it what the script did is taken
in, after it half weights are rounded, but for those that fused updates round themselves. A bound
method on the instance adds what hooks cannot do: not calling the step at all, and running it with
function casts off. So with a dynamic loss scale a bound ``optimizer.step`` from before
``initialize`` is refused. It is a method, not a function, because learning-rate schedulers take
``optimizer.step.__func__``.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from inspect import isfunction
from types import MethodType
from typing import Any, cast

import torch

from preamp.casting import CASTS, disable_casts, thread_casts_restored
from preamp.casting.autocast_state import untraced
from preamp.core.errors import LossScaleError
from preamp.core.torch_private.modules import add_hook, make_hook_tables, with_step_hooks
from preamp.core.undo import UndoStack, set_attribute
from preamp.engine import refusals
from preamp.engine.core import EngineCore, Late
from preamp.engine.session import OptimizerSession
from preamp.optim import leaves_of
from preamp.optim.fused.base import FusedOptimizer

Check = Callable[[Sequence[torch.Tensor]], None]
SCHEDULER_MARK = "_wrapped_by_lr_sched"


class OptimizerHooks:
    """Everything attached to one optimizer."""

    def __init__(self, engine: EngineCore, session: OptimizerSession, check_joins: Check) -> None:
        """Attach nothing yet; ``check_joins`` is asked about parameters that are to join."""
        self._check_joins = check_joins
        self._engine = engine
        self._session = session
        self._optimizer = session.optimizer
        self._is_called = False  # whether our own `step` is under way
        # Of the step under way, or of one that has raised: whether it may have written to weights
        self._stepping = False
        self._unread: torch.Tensor | None = None  # overflow flag of a step the device decides on

    def attach(self, undo: UndoStack) -> None:
        """Hook the optimizer; ``undo`` gets the steps that take it back."""
        optimizer = self._optimizer
        make_hook_tables(optimizer, undo)
        add_hook(optimizer, "register_step_pre_hook", self._before_step, undo)
        add_hook(optimizer, "register_step_post_hook", self._after_step, undo)
        for name, method in (
            ("step", self._make_step()),
            ("zero_grad", self._make_zero_grad()),
            ("add_param_group", self._make_add_param_group()),
            *((name, self._make_moving(name)) for name in _further_methods(optimizer)),
        ):
            set_attribute(optimizer, name, MethodType(method, optimizer), undo)

    # -- step --------------------------------------------------------------------------------

    def _make_step(self) -> Callable[..., Any]:
        previous = previous_method(self._optimizer, "step")
        inner = with_step_hooks(self._optimizer, previous)

        def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self._engine.closed:  # a scheduler may still hold this method
                return previous(optimizer, *args, **kwargs)
            self._closure_in(args, kwargs)
            self._stepping, self._unread = False, None  # whatever one that raised has left
            try:
                self._engine.ledger.settle(wait=False)
                is_held = self._session.is_open and self._session.end_backward is not None
                if is_held and self._engine.policy.is_dynamic and self._session.holds_raw():
                    raise refusals.passes_by_scaler()  # of whose gradients no loss scale would hear
                self._session.check_outside_block("optimizer.step()")
                if skips_step(self._engine, self._session, inner):
                    return None
            except LossScaleError as error:
                raise error.with_traceback(None) from None  # it ends at the script's line
            unread = self._session.found_inf
            try:
                self._is_called, self._unread = True, unread
                if unread is not None:  # the optimizer obeys it, as under torch's GradScaler
                    vars(optimizer).update(grad_scale=None, found_inf=unread)
                sees_casts = self._engine.casts_functions or CASTS.pushes
                with disable_casts() if sees_casts else nullcontext():
                    return inner(optimizer, *args, **kwargs)
            except BaseException:
                if self._stepping:
                    self._session.table.write_halves()  # some masters may have been updated
                raise
            finally:
                self._is_called, self._unread = False, None
                if unread is not None:
                    for name in ("grad_scale", "found_inf"):
                        vars(optimizer).pop(name, None)

        copy_identity(previous, step)
        return step

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Runs for every way of calling ``step``, twice where a subclass calls ``super().step``."""
        del optimizer
        closure = self._closure_in(args, kwargs)
        if not (self._is_called or isinstance(closure, _Evaluation)):
            if self._engine.policy.is_dynamic:
                raise refusals.step_from_before()
            self._stepping = False
        if self._engine.reductions.unasked:
            self._engine.reductions.compare_late(self._session.model_params)
        self._session.prepare_step()
        for tell in self._engine.events.update_begins:
            tell(self._session, closure is not None)
        self._stepping = True
        if closure is None or isinstance(closure, _Evaluation):
            return None
        return _replace_closure(args, kwargs, _Evaluation(closure, self._engine, self._session))

    def _closure_in(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], Any] | None:
        """The closure among the arguments of ``step``; hooks see the optimizer itself first.

        Raises `PreampStateError` where gradients that a closure makes could overflow.
        """
        given = args[1:] if args and isinstance(args[0], torch.optim.Optimizer) else args
        closure = kwargs.get("closure", given[0] if given else None)
        if not callable(closure):
            return None
        if self._engine.policy.is_dynamic:
            raise refusals.closure_may_overflow()
        return closure

    def _after_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        del optimizer, args, kwargs
        self._session.table.write_halves()
        if not self._stepping:  # called twice, as by ``super().step``
            return
        engine, unread = self._engine, self._unread
        self._stepping, self._unread = False, None
        if unread is None and not engine.has_scaled:
            if any(scaler.is_dynamic for scaler in engine.scalers) and self._session.holds_raw():
                engine.has_scaled = True  # or has been told once
                warnings.warn(refusals.never_scaled(), stacklevel=2)
        _end_step(engine, self._session)
        if unread is None:
            engine.ledger.applied(self._session)
        else:
            engine.ledger.decided_on_device(self._session, unread)

    # -- what a class of optimizers has besides ----------------------------------------------

    def _make_moving(self, name: str) -> Callable[..., Any]:
        """A method such as ``eval`` of schedule-free optimizers, which may write to masters."""
        inner = previous_method(self._optimizer, name)

        def move(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if not self._engine.closed:
                self._session.table.hand_out_all()
            return inner(optimizer, *args, **kwargs)

        copy_identity(inner, move)
        return move

    # -- zero_grad, add_param_group ----------------------------------------------------------

    def _make_zero_grad(self) -> Callable[..., Any]:
        inner = previous_method(self._optimizer, "zero_grad")
        is_own = "zero_grad" not in vars(self._optimizer)  # the class's

        def drop(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            def original() -> Any:
                return inner(optimizer, *args, **kwargs)

            if self._engine.closed:
                return original()
            for tell in self._engine.events.gradients_dropped:
                tell(self._session)
            to_none = args[0] if args else kwargs.get("set_to_none")
            if to_none is None:  # fused optimizers say it at construction
                to_none = getattr(optimizer, "set_grad_none", True)
            if not to_none:
                return self._session.fill_with_zeros(original)
            self._session.drop_gradients()
            if not is_own or type(optimizer).zero_grad not in _ONLY_DROP:
                return original()
            for param in self._session.direct_params():
                param.grad = None
            return None

        drop_untraced = untraced(drop)

        def zero_grad(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            # A graph would drop the half gradients and leave what is known of the masters'.
            is_traced = self._session.table.has_masters and torch.compiler.is_compiling()
            return (drop_untraced if is_traced else drop)(optimizer, *args, **kwargs)

        copy_identity(inner, zero_grad)
        return zero_grad

    def _make_add_param_group(self) -> Callable[..., Any]:
        inner = previous_method(self._optimizer, "add_param_group")

        def add_param_group(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self._engine.closed:
                return inner(optimizer, *args, **kwargs)
            params = _params_of_group(args[0] if args else kwargs.get("param_group"))
            self._check_joins(params)
            known, before = self._engine.updated_params(), len(optimizer.param_groups)
            added = set(map(id, params))
            sessions = [s for s in self._engine.sessions.values() if s is not self._session]
            others = [s for s in sessions if not added.isdisjoint(map(id, s.model_params()))]
            for session in (self._session, *others) if others else ():
                session.check_outside_block("add_param_group")
                if session.is_within_step():
                    raise refusals.within_step("add_param_group of another optimizer's weights")
            result = inner(optimizer, *args, **kwargs)
            joined = [p for group in optimizer.param_groups[before:] for p in group["params"]]
            if self._engine.scales_losses:  # nobody unscaled what they have
                for param in joined:
                    if id(param) not in known:
                        param.grad = None
            self._session.table.adopt()
            return result

        copy_identity(inner, add_param_group)
        return add_param_group


def _params_of_group(group: Any) -> list[torch.Tensor]:
    """The parameters of a new group, in which the model's half ones take their masters' places.

    Mutates the group, which torch does too. None where it is no group, which torch refuses.
    """
    given: Any = cast("dict[str, Any]", group).get("params") if isinstance(group, dict) else None
    if isinstance(given, torch.Tensor):
        given = [given]
    if not isinstance(given, Iterable) or isinstance(given, set):
        return []
    items = list(cast("Iterable[Any]", given))
    pairs: list[tuple[Any, Any]] = [i if isinstance(i, tuple) else (None, i) for i in items]
    params = leaves_of([param for _, param in pairs])
    named = zip(pairs, params, strict=True)
    group["params"] = [param if name is None else (name, param) for (name, _), param in named]
    return params


def _further_methods(optimizer: torch.optim.Optimizer) -> list[str]:
    """The public methods that only its class has; torch's and ours are known to move nothing."""
    kinds = [kind for kind in type(optimizer).__mro__ if not _is_known(kind)]
    names = {name for kind in kinds for name, value in vars(kind).items() if isfunction(value)}
    own = {name for name in names if not name.startswith("_")}
    return sorted(name for name in own if not hasattr(torch.optim.Optimizer, name))


def _is_known(kind: type) -> bool:
    return kind.__module__.startswith(("torch.", "preamp."))


_ONLY_DROP = torch.optim.Optimizer.zero_grad, FusedOptimizer.zero_grad
"""These set gradients to ``None`` and do no more: asking thousands of masters takes long."""


class _Evaluation:
    """The closure handed to the optimizer in place of the user's."""

    def __init__(
        self, closure: Callable[[], Any], engine: EngineCore, session: OptimizerSession
    ) -> None:
        self._closure = closure
        self._engine = engine
        self._session = session

    def __call__(self) -> Any:
        self._session.table.write_halves()  # the optimizer may have moved masters since last time
        with thread_casts_restored() if self._engine.casts_functions else nullcontext():
            loss = self._closure()
        self._session.check_outside_block("optimizer.step()")
        return loss


# -- methods put on an optimizer's instance, and the arguments they are called with -------------


def skips_step(engine: EngineCore, session: OptimizerSession, step: Any) -> bool:
    """Whether the host knows that ``step`` must not be called; takes note of that."""
    if not session.overflowed(may_stay_unread=True):
        return False
    excuse_scheduler(session.optimizer, step)
    _end_step(engine, session)
    engine.ledger.skipped(session)
    return True


def _end_step(engine: EngineCore, session: OptimizerSession) -> None:
    for scaler, late in tuple(engine.late_scalers.items()):
        if session not in late.sessions:
            continue
        del engine.late_scalers[scaler]  # nobody has reduced what it has not heard of
        if session.found_inf is not None:
            scaler.record(session.found_inf)
        others = {one for one in late.sessions if one is not session and one.awaits_step}
        if others:  # which may have found an overflow that this one has not
            engine.late_scalers[scaler] = Late(frozenset(others), is_due=late.is_due)
        elif late.is_due:
            scaler.react()
    for tell in engine.events.step_over:
        tell(session)


def excuse_scheduler(optimizer: torch.optim.Optimizer, step: Any) -> None:
    """Let a scheduler, which warns if stepped before the optimizer, count a skipped ``step``."""
    if getattr(step, SCHEDULER_MARK, False):
        setattr(optimizer, "_opt_called", True)  # noqa: B010


def previous_method(optimizer: torch.optim.Optimizer, name: str) -> Callable[..., Any]:
    """The method as a function of the optimizer: the instance's own if it has one."""
    is_own = name in vars(optimizer) or not hasattr(type(optimizer), name)  # mocks make theirs up
    own = getattr(optimizer if is_own else type(optimizer), name)

    def call(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if is_own:
            return own(*args, **kwargs)
        return getattr(type(optimizer), name)(optimizer, *args, **kwargs)

    copy_identity(own, call)
    return call


def copy_identity(source: Any, target: Callable[..., Any]) -> None:
    """Give ``target`` the name, text and signature of ``source``, and the scheduler's mark."""
    for attribute in ("__name__", "__qualname__", "__doc__"):
        if hasattr(source, attribute):
            setattr(target, attribute, getattr(source, attribute))
    try:
        setattr(target, "__signature__", inspect.signature(source))  # noqa: B010
    except (TypeError, ValueError):  # some callables have none
        pass
    if getattr(source, SCHEDULER_MARK, False):
        setattr(target, SCHEDULER_MARK, True)


def _replace_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], closure: Callable[[], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of ``step``, as hooks see them, with another closure."""
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    optimizer, _, *rest = args
    return (optimizer, closure, *rest), kwargs
