# SPDX-License-Identifier: BSD-3-Clause
"""``plan``: watch float32, forecast every level, recommend one, and try it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from preamp.core.dtypes import dtype_name
from preamp.core.errors import (
    PreampError,
    PreampUnavailableError,
    bad_state,
    bad_type,
    bad_value,
    with_article,
    worded,
)
from preamp.core.program import line_of_error, shown
from preamp.core.randomness import untouched_random
from preamp.engine.lookup import bare, find_engine
from preamp.kernels.wide_half import native_products
from preamp.numerics import FORMATS
from preamp.planning import recommend
from preamp.planning.forecast import Range
from preamp.planning.isolation import LossFn, Task, is_out_of_memory
from preamp.planning.layout import slots_of
from preamp.planning.memory import MemoryEstimate, estimate
from preamp.planning.peak import first_line, trace_pass
from preamp.planning.ranges import (
    NOWHERE,
    Places,
    find_noise,
    find_places,
    in_bfloat16,
    record_ranges,
)
from preamp.planning.recommend import candidates, is_slow_in_bfloat16, reasons_for
from preamp.planning.report import LevelPlan, PlanProblem, PlanReport, storages_text
from preamp.planning.verify import Expected, compare, train_at, train_expected
from preamp.policy import OPT_LEVELS, Policy, level_defaults
from preamp.policy.resolve import at_level, check_storage
from preamp.policy.storage import FULL, Storage, parse_storage


def check_model(model: object) -> nn.Module:
    """Return the model, which has something to train and no engine."""
    if not isinstance(model, nn.Module):
        raise bad_type(
            f"Got {type(model).__name__} in place of a model",
            "plan runs the model, so it is an nn.Module",
            "Pass the module; preamp.estimate takes factories and numbers of parameters",
        )
    if find_engine(model) is not None:
        raise bad_state(
            "The model is initialized already",
            "A plan starts from the float32 model as it is before initialize",
            "Plan first, or call preamp.engine_of(model).close()",
        )
    if not any(slot.is_parameter and slot.is_trainable for slot in slots_of(model)):
        raise bad_value(
            f"The model, {with_article(type(model).__name__)}, has no parameter that requires a "
            "gradient",
            "A plan follows from gradients and updates",
            "Pass the model that is trained, with its parameters thawed",
        )
    return model


def why_not_called(function: Callable[..., Any], *args: Any) -> str:
    """Why ``function(*args)`` cannot be called; empty if its signature has nothing against it."""
    try:
        inspect.signature(function).bind(*args)
    except TypeError as error:
        return str(error)
    except ValueError:  # it has no signature, as some functions written in C
        pass
    return ""


def check_loss_fn(loss_fn: object, model: nn.Module, batch: Any) -> None:
    """Raise ``TypeError`` if ``loss_fn(model, batch)`` cannot be called."""
    got = ""
    if not callable(loss_fn):
        got = f"loss_fn is {type(loss_fn).__name__}, which cannot be called"
    elif reason := why_not_called(loss_fn, model, batch):
        got = f"loss_fn cannot be called with a model and a batch: {reason}"
    if got:
        raise bad_type(
            got,
            "loss_fn(model, batch) returns a scalar loss",
            "Pass model, loss_fn, batch in this order, and bind other arguments by "
            "functools.partial",
        )


def check_optimizer(optimizer: object, model: nn.Module) -> None:
    """Raise unless this is an optimizer of the model that steps without a closure."""
    found: object = bare(optimizer)
    if not isinstance(found, torch.optim.Optimizer):
        raise bad_type(
            f"Got {type(optimizer).__name__} in place of an optimizer",
            "plan steps the optimizer, so it is a torch.optim.Optimizer",
            "Make it over model.parameters(), or leave it out for AdamW",
        )
    if why_not_called(found.step):
        raise bad_value(
            f"{type(found).__name__}.step needs a closure",
            "plan takes steps from gradients that it has looked at, one backward for each",
            "Pass an optimizer that steps without a closure, or leave it out for AdamW",
        )
    own = {id(param) for group in found.param_groups for param in group["params"]}
    if own.isdisjoint(map(id, model.parameters())):
        raise bad_value(
            "The optimizer has no parameter of the model",
            "A plan steps both together",
            "Make it over model.parameters(), or leave it out for AdamW",
        )


def check_count(name: str, value: int, least: int) -> None:
    """Raise ``ValueError`` if there are fewer than ``least``."""
    if value < least:
        raise bad_value(
            f"{name}={value} cannot be used",
            f"It is a whole number from {least}",
            f"Leave {name} out for the default",
        )


PURE_BFLOAT16 = "O5 without masters"
"""Not a level, but what O5 is when ``master_weights=False``; planned to see whether masters pay."""

POLICIES = {
    **{name: policy for name, policy in OPT_LEVELS.items() if name != "O0"},
    PURE_BFLOAT16: OPT_LEVELS["O5"].replace(master_weights=False),
}
"""What is planned by default."""


def plan(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    levels: Sequence[str] | Mapping[str, Policy] | None = None,
    steps: int = 4,
    verify_steps: int = 8,
) -> PlanReport:
    """Recommend an opt level and a loss scale to start with, by watching and trying.

    Some float32 steps on a copy record the magnitudes of module outputs, of what operations inside
    of modules compute, of gradients, weights, buffers and updates. From these follows what would
    overflow, vanish or stall at each level, since one forward at the level shows what is half
    there. Each level is then trained on further copies, and its losses and weights compared with
    float32's; what was tried decides over what was forecast. Of the levels that fit O5 is
    recommended, then O2, which is first where products in bfloat16 are slow on the model's device.
    Nothing of the caller's changes: model, optimizer, loss function, batch and random states are as
    before, also if the call raises.

    Args:
        model: A float32 module as it is before `initialize`, in training mode, on its device.
        loss_fn: ``loss_fn(model, batch)`` returns a scalar loss; it uses the model it is given. Of
            a function is copied what it closes over and the globals that it reads, of an object
            all that it has; shared by all levels stays what methods of classes read as globals.
        batch: Whatever ``loss_fn`` takes; used for every step.
        optimizer: Over the model's parameters; AdamW with a learning rate of 1e-3 if left out. Its
            own state, learning rate included, is where the steps start.
        levels: Which to look at; O1 to O5 and `PURE_BFLOAT16` if left out. Or policies by these
            names, such as those of `policies_of`.
        steps: float32 steps to watch.
        verify_steps: Steps to train each level and float32 with; 0 leaves it at the forecast.

    Returns:
        The report; ``print`` shows it.

    Raises:
        ValueError: A half model, one without anything to train or that the loss does not use,
            something that cannot be copied, a loss that is no finite scalar, gradients that are
            all zero, an optimizer of another model or one that needs a closure, or a wrong number
            of steps.
        TypeError: ``model`` is no module, ``optimizer`` no optimizer, or ``loss_fn`` cannot be
            called with a model and a batch.
        PreampPolicyError: A level is not known.
        PreampStateError: The model is initialized already.
        PreampUnavailableError: There is no memory for a float32 copy of the model.
    """
    policies = dict(levels) if isinstance(levels, Mapping) else policies_of(levels)
    for policy in policies.values():
        check_storage(policy)
    check_count("steps", steps, 1)
    check_count("verify_steps", verify_steps, 0)
    check_model(model)
    check_loss_fn(loss_fn, model, batch)
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    check_optimizer(optimizer, model)
    task = Task(model, optimizer, loss_fn, batch)
    with torch.enable_grad():
        ranges, noise = _watch(task, steps)
        found = {n: _look_at(task, n, policy, ranges, noise) for n, policy in policies.items()}
        losses: tuple[float, ...] = ()
        if verify_steps:
            expected = train_expected(task, verify_steps, noise)
            losses = expected.trained.losses
            for name, level in found.items():
                if level.rests_on != "an error":
                    found[name] = _try(task, policies[name], level, expected)
    is_slow = is_slow_in_bfloat16(next(model.parameters()).device)
    order = candidates(found, is_slow=is_slow)
    recommended = order[0] if order else "O0"
    return PlanReport(
        recommended=recommended,
        loss_scale=found[recommended].loss_scale if order else 1.0,
        reasons=reasons_for(recommended, found, is_slow=is_slow),
        levels=found,
        runner_up=order[1] if len(order) > 1 else None,
        fp32_losses=losses,
        steps=steps,
    )


def _watch(task: Task, steps: int) -> tuple[tuple[Range, ...], frozenset[str]]:
    """What float32 steps on a copy show, and which parameters' gradients are rounding error."""
    try:
        with untouched_random():
            return record_ranges(task.copy(), steps), find_noise(task)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        kept = [estimate(task.model, level, task.optimizer) for level in ("O0", "O5")]
        raise worded(
            PreampUnavailableError,
            f"There is no memory for a float32 copy beside the model: {first_line(error)}",
            " ".join(map(storages_text, kept)),
            "Take a level and a storage by these numbers, or plan a smaller model of the kind",
        ) from error


def policies_of(
    levels: Sequence[str] | None = None, storage: str | Storage = FULL
) -> dict[str, Policy]:
    """The policies of ``levels``, or those planned by default, with a storage.

    At levels without masters it is that of moments alone, and with a dynamic loss scale gradients
    are not released. Raises as `plan` does.
    """
    storage = parse_storage(storage)
    names = [levels] if isinstance(levels, str) else POLICIES if levels is None else levels
    found = {name: POLICIES.get(name) or level_defaults(name) for name in names}
    if found and "O0" not in found:
        return {
            name: policy.replace(storage=at_level(policy, storage))
            for name, policy in found.items()
        }
    raise bad_value(
        f"levels={levels!r} leaves nothing to plan",
        f"Allowed are {', '.join(map(repr, POLICIES))}; O0 is what they are compared with",
        "Name at least one of them, or leave levels out",
    )


def _look_at(
    task: Task, name: str, policy: Policy, ranges: tuple[Range, ...], noise: frozenset[str]
) -> LevelPlan:
    form = FORMATS[dtype_name(policy.half_dtype)]
    memory = estimate(task.model, policy, task.optimizer)
    places, refused = _places(task, policy, memory)
    held = recommend.held_ranges(ranges, places, policy)
    scale = 1.0 if refused else recommend.scale_for(held, form)
    tensors = recommend.forecasts(held, form, scale)
    if not refused:
        try:
            traced = trace_pass(task.model, in_bfloat16(policy), task.loss_fn, task.batch)
        except ValueError:  # the forward looks at values: what only a real step could tell is open
            pass
        else:
            memory = memory.with_activations(traced)
    return LevelPlan(
        level=name,
        half=form.name,
        loss_scale=scale,
        problems=refused
        or (
            *recommend.problems_of(tensors, form, scale, noise),
            *recommend.eps_problem(task.optimizer, policy),
        ),
        is_tight=recommend.is_tight(tensors, form, noise),
        tensors=tensors,
        memory=memory,
    )


def _places(
    task: Task, policy: Policy, memory: MemoryEstimate
) -> tuple[Places, tuple[PlanProblem, ...]]:
    """Where a level is half; nowhere if its forward raises, though float32's does not."""
    failure: Exception | None = None
    # An operation may take float16 only.
    for like in dict.fromkeys((in_bfloat16(policy), policy.replace(loss_scale=1.0))):
        try:
            with untouched_random(), native_products():
                return find_places(task.copy(), like), ()
        except Exception as error:  # whatever an operation of anyone's raises
            failure = error
    assert failure is not None
    return NOWHERE, (_refused(failure, memory),)


def _refused(error: Exception, memory: MemoryEstimate) -> PlanProblem:
    if is_out_of_memory(error):
        text = (
            "It could not be tried: with the caller's own model and this copy there is no memory "
            f"left. {storages_text(memory)} {first_line(error)}"
        )
        return PlanProblem(kind="memory", name="", text=text)
    line = line_of_error(error)
    place = f" (at {shown(line)})" if line else ""
    is_ours = isinstance(error, PreampError)
    text = str(error) if is_ours else f"{type(error).__name__}: {first_line(error)}{place}"
    return PlanProblem(kind="refused", name="", text=text)


def _try(task: Task, policy: Policy, plan: LevelPlan, expected: Expected) -> LevelPlan:
    """Train at a level, and judge it by that."""
    steps = len(expected.trained.losses)
    try:
        trained = train_at(task.copy(), policy, steps=steps, scale=plan.loss_scale)
    except Exception as error:  # float32 took these steps, from the same state, without one
        return dataclasses.replace(plan, problems=(_refused(error, plan.memory),))
    return recommend.settle(plan, trained, compare(trained, expected))
