# SPDX-License-Identifier: BSD-3-Clause
"""torch's ``GradScaler`` in front of an engine, for loops and frameworks written for that one."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch.amp.grad_scaler import OptState
from torch.autograd.graph import Node

from preamp.core.errors import (
    LossScaleError,
    PreampStateError,
    bad_state,
    bad_type,
    bad_value,
    message,
    with_article,
)
from preamp.core.ranks import has_process_group
from preamp.core.tensors import version_of, versions_of
from preamp.core.torch_private.autograd import after_backward
from preamp.core.undo import run_to_end
from preamp.engine.block import Block, check_loss
from preamp.engine.lookup import as_optimizers, bare, common_engine
from preamp.engine.optimizer_hooks import skips_step
from preamp.engine.order import released
from preamp.engine.overflow import GradientNote
from preamp.engine.session import OptimizerSession
from preamp.optim.rewritten import has_nonzero
from preamp.scaling import DynamicScale
from preamp.scaling.scaler import larger

_RULE = ("growth_factor", "backoff_factor", "growth_interval")
_STATE = ("scale", *_RULE, "_growth_tracker")


def _in_rule(name: str, static: float) -> Any:
    """A number that torch keeps in an attribute: the loss scale's; ``static`` of a static one."""

    def read(scaler: GradScaler) -> Any:
        return getattr(scaler.loss_scaler.rule, name, static)

    def write(scaler: GradScaler, value: Any) -> None:
        scaler.take({name: value})

    return property(read, write)


class GradScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` for optimizers that went through ``preamp.initialize``.

    A loop written for ``torch.amp`` keeps its ``scale``, ``unscale_``, ``step`` and ``update``, and
    gets what the opt level says: half weights with float32 masters, steps skipped without waiting
    for the device where that is possible, overflows that are told with the parameter that had them.

    What differs from torch's, besides that gradients of half weights are allowed:

    - Backwards of different calls of ``scale`` add up in float32, also where weights are half.
      Until `unscale_` or `step`, gradients on the model's parameters are those of the latest one.
    - After `unscale_` half parameters show their unscaled gradients, rounded. What the script does
      to them counts: a factor on all of a gradient, as ``torch.nn.utils.clip_grad_norm_`` has, is
      applied to the float32 gradients that masters get. Anything else is taken as it was written
      in bfloat16 and at a scale of 1, and refused in float16, since unscaled float16 gradients lose
      what is small; so is a clip whose norm overflowed float16. All this takes 4 bytes per
      parameter more, and lets the host wait for the device.
    - ``preamp.clip_grad_norm_(optimizer, max_norm)`` needs no `unscale_`, and no further pass, and
      ``preamp.clip_grad_value_`` no `unscale_`.
    - The loss scale has the floor and the ceiling that ``preamp.initialize`` gave it, and
      `preamp.LossScaleError` ends what cannot go on.
    - ``is_enabled()`` is true at levels whose loss scale is static, too; `update` leaves that one
      as it is.

    Args:
        optimizers: One optimizer, or several of one engine. Several ``GradScaler`` may share an
            engine; each needs a loss of its own.
        loss_id: Which loss scale of the engine to use, below ``num_losses`` of
            ``preamp.initialize``.
        init_scale: Scale to begin with; left out, that of the engine. This and the following
            three need a dynamic loss scale.
        growth_factor: Multiplier after ``growth_interval`` updates without an overflow.
        backoff_factor: Multiplier after an overflow.
        growth_interval: Updates without an overflow before the scale grows.
        enabled: False makes all methods pass through, as torch's do.

    Raises:
        PreampStateError: An optimizer has no engine, or they have several, or share parameters.
        IndexError: The engine has no loss ``loss_id``.
        TypeError: ``optimizers`` is a device, as torch's first argument is, or a model.
        ValueError: A number cannot be used.
    """

    def __init__(
        self,
        optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        loss_id: int = 0,
        *,
        init_scale: float | None = None,
        growth_factor: float | None = None,
        backoff_factor: float | None = None,
        growth_interval: int | None = None,
        enabled: bool = True,
    ) -> None:
        """Stand in front of the optimizers' engine. Mutates its loss scale where told to."""
        if isinstance(optimizers, (str, torch.device)):
            raise bad_type(
                f"preamp.GradScaler was given {optimizers!r}",
                "Its first argument is the optimizer, or a list of them; the device follows",
                "Write scaler = preamp.GradScaler(optimizer)",
            )
        members = as_optimizers(optimizers, "GradScaler")
        self._engine = common_engine(members, "GradScaler")
        for one in members:
            if id(one) not in self._engine.sessions:
                raise bad_type(
                    f"preamp.GradScaler was given {with_article(type(one).__name__)}",
                    "It takes the optimizer, or a list of them",
                    "Write scaler = preamp.GradScaler(optimizer)",
                )
        self._sessions = [self._engine.sessions[id(one)] for one in members]
        self._refuse_shared()
        self._loss_id = loss_id
        self.loss_scaler = self._engine.scaler(loss_id)  # which it stands for
        self._enabled = enabled and self._engine.policy.enabled
        self._device = self.loss_scaler.device.type
        # By ``id`` of the session: backwards left open
        self._blocks: dict[int, Block] = {}
        # What they have found and the loss scale has yet to hear of
        self._found: dict[int, torch.Tensor] = {}
        # Gradients that others have joined or will, with their versions when they were made
        self._parts: dict[int, list[tuple[torch.Tensor, int]]] = {}
        self._has_warned = False
        self._forget_steps()
        given = {
            "scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
        }
        if self._enabled:
            self.take({name: value for name, value in given.items() if value is not None})

    def _refuse_shared(self) -> None:
        params = [id(p) for session in self._sessions for p in session.model_params()]
        if len(params) != len(set(params)):
            raise bad_state(
                "GradScaler was given optimizers that share parameters",
                "unscale_ and step take one optimizer at a time, and a gradient is unscaled once",
                "Use preamp.scale_loss(loss, [optimizer_a, optimizer_b]) for these",
            )

    # -- what torch keeps in attributes --------------------------------------------------------

    @property
    def _scale(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.loss_scaler.scale

    @property
    def _growth_tracker(  # pyright: ignore[reportIncompatibleVariableOverride]
        self,
    ) -> torch.Tensor:
        return self.loss_scaler.growth_tracker

    _growth_factor = _in_rule("growth_factor", 1.0)
    _backoff_factor = _in_rule("backoff_factor", 1.0)
    # Where as many clean updates have been counted already, the next one grows; torch's own scaler
    # would not grow again before an overflow.
    _growth_interval = _in_rule("growth_interval", 1)

    def take(self, given: Mapping[str, Any]) -> None:
        """Set numbers of the rule and the scale, all or none."""
        rule = self.loss_scaler.rule
        if given and not isinstance(rule, DynamicScale):
            raise bad_value(
                f"{_listed(given)} was given to a GradScaler whose loss scale is static",
                f"It stays {self.loss_scaler.value()} at this level",
                'Leave it out, or pass loss_scale="dynamic" to preamp.initialize',
            )
        numbers = {name: _number(name, value) for name, value in given.items()}
        if "growth_interval" in numbers:  # larger ones are never reached, and not counted to
            numbers["growth_interval"] = min(numbers["growth_interval"], 2**31 - 1)
        scale = numbers.pop("scale", None)
        if numbers:
            self.loss_scaler.rule = replace(cast("DynamicScale", rule), **cast("Any", numbers))
        if scale is not None:
            self.loss_scaler.set_scale(scale)

    # -- a backward ----------------------------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or each tensor of a list, a tuple or an iterator, by the loss scale.

        The next backward is expected to be of the result. Gradients of half weights from earlier
        ones are kept apart until then, in float32. Those of float32 weights stay in place and are
        scaled, as by torch.

        Args:
            outputs: Floating tensors of any shape and device.

        Returns:
            The same in float32 (float64 stays) times the scale; ``outputs`` if not enabled.

        Raises:
            ValueError: Something is no tensor.
            TypeError: A tensor is not floating.
            PreampStateError: The engine was closed, or gradients of one of its optimizers, unscaled
                by `unscale_`, wait for their step.

        Mutates:
            Gradients, as above. Synchronises only where a script has changed unscaled
            half gradients and taken no step since.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Iterator):
            return iter(self.scale(list(cast("Iterator[Any]", outputs))))
        losses = list(_tensors_in([outputs]))
        for loss in losses:
            check_loss(loss, "GradScaler.scale")
        return self._scaled(outputs, self._begin(losses[0])) if losses else outputs

    def _scaled(self, value: Any, scale: torch.Tensor) -> Any:
        if not isinstance(value, torch.Tensor):
            return type(value)(self._scaled(item, scale) for item in value)
        scaled = self.loss_scaler.scale_loss(value, scale)
        if scaled.requires_grad and scaled.grad_fn is not None:
            # The result is there until its backward ends, as a loss need not be until `step`.
            cast("Any", scaled).register_hook(partial(self._follow, weakref.ref(scaled)))
        for tell in self._engine.events.loss_scaled:
            tell(scaled)
        return scaled

    def _follow(self, scaled: weakref.ref[torch.Tensor], grad: torch.Tensor) -> None:
        """A backward has begun: note its graph when it is over, so that it keeps nothing alive."""
        del grad
        notes = [block.note for block in self._blocks.values()]
        if (tensor := scaled()) is not None and notes:
            after_backward(partial(self._backward_over, notes, tensor.grad_fn))

    def _backward_over(self, notes: Sequence[GradientNote], root: Node | None) -> None:
        for note in notes:
            note.graphs = released((*note.graphs, root))
        sessions = [session for session in self._sessions if id(session) in self._blocks]
        for session in sessions:
            session.gradients.note_reached()
        if has_process_group():
            return  # ranks may exchange gradients after this
        for session in sessions:
            if session.gradients.has_earlier:
                grads = [p.grad for p in session.model_params() if p.grad is not None]
                self._parts[id(session)] = list(zip(grads, versions_of(grads), strict=True))

    def _warn_of_changed_parts(self, session: OptimizerSession) -> None:
        """Say once that a script has changed a part of what was accumulated, and that alone."""
        parts = self._parts.pop(id(session), None)
        if parts is None or self._has_warned:
            return
        now = {id(param.grad) for param in session.model_params()}
        changed = (g for g, version in parts if id(g) in now and version_of(g) != version)
        if any(map(has_nonzero, changed)):
            self._has_warned = True
            warnings.warn(_changed_part(), stacklevel=5)

    def _begin(self, loss: torch.Tensor) -> torch.Tensor:
        """Open a block for every optimizer; returns the scale that holds in it."""
        if self._engine.closed:
            raise bad_state(
                "GradScaler.scale was called after Engine.close",
                "The engine that it stands in front of has ended",
                "Call preamp.initialize again, and make a GradScaler of that optimizer",
            )
        sessions = self._sessions
        for session in sessions:
            if self._is_unscaled(session):
                raise _unscaled_already(session.optimizer)
        # Asks how ranks reduce before blocks that end forget the forwards
        optimizers = [session.optimizer for session in sessions]
        # Of the loss its value alone: a block that stays open must not keep activations alive.
        block = Block(self._engine, optimizers, loss.detach(), self._loss_id)
        for session in sessions:
            session.end_left_open()
            session.end_backward = partial(self._end, session)  # also after an interrupt from here
        try:
            block.begin(is_held_open=True)
        except BaseException:
            for session in sessions:
                if not session.is_open:  # or a later block of others would be ended for this one
                    session.end_backward = None
            raise
        for session in sessions:
            self._blocks[id(session)] = block.part(session)
        return block.note.scale

    def _is_unscaled(self, session: OptimizerSession) -> bool:
        """Whether it has gradients that `unscale_` has unscaled, and no step has used."""
        state = self._per_optimizer_states[id(session.optimizer)]
        if state["stage"] is not OptState.UNSCALED:
            return False
        if session.awaits_step and session.holds_raw():
            return True
        state["stage"] = OptState.READY  # dropped or zeroed, as after an exception
        return False

    def _end(self, session: OptimizerSession) -> None:
        """Unscale what has come since `scale`; the loss scale reacts in `update`."""
        self._warn_of_changed_parts(session)
        block = self._blocks.get(id(session))
        try:
            if block is None:
                session.undo()
            else:
                block.finish(adjust=False, record=partial(self._keep_found, session))
        finally:
            if not session.is_open:
                self._blocks.pop(id(session), None)
                session.end_backward = None

    def _keep_found(self, session: OptimizerSession, found_inf: torch.Tensor) -> None:
        self._found[id(session)] = larger(found_inf, self._found.get(id(session)))

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients of ``optimizer``, so that a script can read and change them.

        Not needed before `step`, or before ``preamp.clip_grad_norm_``.

        Raises:
            RuntimeError: It was called already since the last `update`, or after `step`.
            AssertionError: `scale` was never called.

        Mutates:
            Gradients, those of half parameters as well. Synchronises with the device: never.
        """
        if not self._enabled:
            return
        self._check_scaled("unscale_")
        session = self._session_of(optimizer)
        state = self._per_optimizer_states[id(session.optimizer)]
        if state["stage"] is OptState.UNSCALED:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update()."
            )
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        self._unscale(session, state)
        session.gradients.show()
        state["stage"] = OptState.UNSCALED

    def _unscale(self, session: OptimizerSession, state: dict[str, Any]) -> None:
        session.end_left_open()
        # What other optimizers have found, and not used yet, is no business of the coming update;
        # what a block of scale_loss has found, the loss scale has heard of.
        found = self._found.get(id(session))
        if found is not None and session.found_inf is not None:  # nor what was dropped since
            self.loss_scaler.record(torch.minimum(found, session.found_inf.to(found.device)))
        self._found.pop(id(session), None)
        found_inf = larger(torch.zeros((), device=self.loss_scaler.device), session.found_inf)
        state["found_inf_per_device"] = {self.loss_scaler.device: found_inf}

    # -- a step --------------------------------------------------------------------------------

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Take a step with ``optimizer`` unless its gradients overflowed; unscales them if needed.

        Args:
            optimizer: One of those that the scaler was made for.
            *args: For ``optimizer.step``, but no closure.
            **kwargs: For ``optimizer.step``.

        Returns:
            What ``optimizer.step`` does; ``None`` if the step was skipped.

        Raises:
            RuntimeError: It was called already since the last `update`, or with a closure.
            AssertionError: `scale` was never called.
            LossScaleError: Scaling cannot go on; see ``preamp.initialize``.

        Mutates:
            Weights, optimizer state and gradients. Synchronises where the optimizer cannot obey an
            overflow on the device, and after `unscale_` where weights are half.
        """
        if not self._enabled:
            return cast("Any", optimizer.step)(*args, **kwargs)
        if "closure" in kwargs or any(map(callable, args)):
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        self._check_scaled("step")
        session = self._session_of(optimizer)
        state = self._per_optimizer_states[id(session.optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if state["stage"] is OptState.READY:
            self._unscale(session, state)
        # Not called at all where it would be skipped: frameworks see by that what became of it.
        result = None
        try:
            if not skips_step(self._engine, session, optimizer.step):
                result = cast("Any", optimizer.step)(*args, **kwargs)
        except LossScaleError as error:
            raise error.with_traceback(None) from None  # it ends at the script's line
        state["stage"] = OptState.STEPPED
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Let the loss scale react to what the steps since the last update have found.

        Call it once for each iteration, after the steps of all optimizers.

        Args:
            new_scale: Scale to go on with instead: a float, or a tensor of one element.

        Raises:
            AssertionError: No optimizer was unscaled or stepped; ``new_scale`` is no such tensor.
            ValueError: ``new_scale`` is not a positive number.

        Mutates:
            The loss scale. Synchronises with the device: never; a tensor is read.
        """
        if not self._enabled:
            return
        self._check_scaled("update")
        if new_scale is not None:
            if isinstance(new_scale, torch.Tensor) and (
                new_scale.numel() != 1 or new_scale.requires_grad
            ):
                raise AssertionError(
                    "new_scale should be a float or a 1-element tensor with requires_grad=False."
                )
            number = _number("scale", new_scale)
            react = partial(self._set_scale, number)
        else:
            states = self._per_optimizer_states.values()
            if not any(state["found_inf_per_device"] for state in states):
                raise AssertionError("No inf checks were recorded prior to update.")
            react = partial(self._react, self.loss_scaler.reaction())
        run_to_end(react, self._forget_steps)

    def _react(self, reaction: Callable[[], None]) -> None:
        self._engine.late_scalers.pop(self.loss_scaler, None)
        reaction()

    def _set_scale(self, value: float) -> None:
        self.loss_scaler.found_inf.zero_()
        self.loss_scaler.set_scale(value)

    def _forget_steps(self) -> None:
        self._per_optimizer_states = _States()

    def _check_scaled(self, name: str) -> None:
        if not self._engine.has_scaled:
            raise AssertionError(
                f"Attempted {name} but _scale is None.  This may indicate your script did not use "
                "scaler.scale(loss or outputs) earlier in the iteration."
            )

    def _session_of(self, optimizer: Any) -> OptimizerSession:
        for session in self._sessions:
            if session.optimizer is bare(optimizer):
                return session
        raise bad_state(
            f"GradScaler got {with_article(type(optimizer).__name__)} that it was not made for",
            "It scales for the optimizers that it was given, and for no others",
            "Pass all of them: preamp.GradScaler([optimizer_a, optimizer_b])",
        )

    # -- checkpoints ---------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned, of this class or of torch's.

        A static loss scale stays what it is.

        Raises:
            RuntimeError: ``state_dict`` is empty, as a disabled scaler's is.
            ValueError: It cannot be read; nothing was taken over.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError(
                "The source state dict is empty, possibly because it was saved from a disabled "
                "instance of GradScaler."
            )
        missing = [name for name in _STATE if name not in state_dict]
        if missing:
            raise bad_value(
                f"The state of a GradScaler has {_listed(state_dict)}, and not {_listed(missing)}",
                "Needed is what state_dict() of torch.amp.GradScaler or of this class returned",
                "For states of preamp or Apex call "
                "preamp.engine_of(optimizer).load_state_dict(state)",
            )
        tracker = _number("_growth_tracker", state_dict["_growth_tracker"])
        if self.loss_scaler.is_dynamic:
            self.take({name: state_dict[name] for name in ("scale", *_RULE)})
        self.loss_scaler.set_clean_steps(tracker)
        self.loss_scaler.found_inf.zero_()

    def __getstate__(self) -> NoReturn:
        """Refuse: a copy would have no engine.

        Raises:
            PreampStateError: Always.
        """
        raise bad_state(
            "A preamp.GradScaler was copied or pickled",
            "It stands in front of one engine, which lives in this process",
            "Save scaler.state_dict(), and load it into one made for the other engine",
        )


def _unscaled_already(optimizer: torch.optim.Optimizer) -> PreampStateError:
    return bad_state(
        f"GradScaler.scale was called where unscale_ has unscaled the gradients of "
        f"{with_article(type(optimizer).__name__)} that no step has used",
        "The sum with a scaled gradient would be neither",
        "Call unscale_ after the last backward, and step() or update() before the next scale; "
        "after an exception in between optimizer.zero_grad(). Losses that take turns need a "
        "GradScaler each, made for their own optimizer",
    )


class _States(dict[int, dict[str, Any]]):
    """What torch notes of each optimizer since the last update."""

    def __missing__(self, key: int) -> dict[str, Any]:
        state = self[key] = {"stage": OptState.READY, "found_inf_per_device": {}}
        return state


def _changed_part() -> str:
    return message(
        "Gradients were changed before GradScaler.unscale_, while those of earlier backwards were "
        "kept in float32 beside them",
        "Until unscale_ or step, grad holds what the latest backward has made, and clipping it "
        "clips that alone",
        "Call scaler.unscale_(optimizer) before torch.nn.utils.clip_grad_norm_, at levels without "
        "a loss scale too, or use preamp.clip_grad_norm_(optimizer, max_norm)",
    )


def _tensors_in(items: Iterable[Any]) -> Iterator[torch.Tensor]:
    for item in items:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from _tensors_in(cast("Iterable[Any]", item))
        else:
            raise ValueError("outputs must be a Tensor or an iterable of Tensors")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "nothing"


_ALLOWED = {
    "scale": (0.0, 2.0**127, "a number above 0"),
    "growth_factor": (math.nextafter(1, 0), 2.0**127, "a number from 1"),
    "backoff_factor": (0.0, math.nextafter(1, 0), "a number between 0 and 1"),
    "growth_interval": (0, 2**63 - 1, "a whole number from 1"),
    "_growth_tracker": (-1, 2**31 - 1, "a whole number from 0"),
}
"""Numbers above the first and up to the second; whole ones where these are."""


def _number(name: str, value: Any) -> Any:
    above, highest, allowed = _ALLOWED[name]
    try:
        if above < value <= highest and float(value) == type(above)(value):
            return type(above)(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # of tensors, too
        pass
    raise bad_value(
        f"{name}={value!r} was given to a GradScaler", f"It is {allowed}", "Pass such a number"
    )
