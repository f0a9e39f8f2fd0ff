# SPDX-License-Identifier: BSD-3-Clause
"""``initialize``: one call that puts models and optimizers into mixed precision."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from preamp.casting import (
    CASTS,
    Conversion,
    attach_cast_region,
    attach_io_casts,
    attach_layer_casts,
    attach_plain_region,
    attach_state_hooks,
    install_function_casts,
    install_mixed_calls,
    install_wide_where_slow,
    push_thread_casts,
)
from preamp.core.dtypes import HALF_DTYPES
from preamp.core.log import say
from preamp.core.splits import Splits, splits_over
from preamp.core.torch_private.foreach_types import ForeachType
from preamp.core.torch_private.fsdp import gather_dtypes, has_sharded_parts, reshard
from preamp.core.torch_private.modules import add_hook
from preamp.core.torch_private.named_state import NamedMasters
from preamp.core.undo import UndoStack, run_all, set_attribute
from preamp.engine import checks, watchers
from preamp.engine.agreement import RankComparison
from preamp.engine.copies import Copies
from preamp.engine.engine import Engine, engines_in_use
from preamp.engine.explain import summary_of
from preamp.engine.lookup import bare, find_engine
from preamp.engine.optimizer_hooks import OptimizerHooks
from preamp.engine.recording import OFF, Numerics, Recording, make_recording
from preamp.engine.reductions import attach_reductions
from preamp.engine.sharding import check_fits, check_groups
from preamp.engine.storage import check_storage, check_updates, refuse_codes
from preamp.engine.waiting import Waiting
from preamp.engine.weights import attach_weight_doors, master_of, zeros_are_stepped
from preamp.kernels import Ops
from preamp.kernels import backend as ops_named
from preamp.optim import MasterParameter
from preamp.optim.fused.base import FusedOptimizer
from preamp.policy import OnOverflow, Policy, Scope, Storage, resolve


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | Literal[False] | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | str | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float | None = 2.0**24,
    *,
    patch_torch_functions_type: torch.dtype | None = None,
    scope: Scope | None = None,
    keep_fp32: Any = None,
    max_consecutive_skips: int | None = 50,
    allow_half_model: bool = False,
    hard_override: bool = False,
    backend: str = "auto",
    overflow: OnOverflow | None = None,
    numerics: Numerics = "off",
    numerics_every: int = 100,
    history: str | os.PathLike[str] | None = None,
    process_groups: Any = None,
    storage: str | Storage | None = None,
) -> Any:
    """Put models and optimizers into mixed precision, in place.

    Models are cast and hooked, optimizers get float32 masters and loss scaling, as the opt level
    says. A model that has an engine already changes over to the new one. Whatever was decided is
    on ``preamp.engine_of(optimizer)``, whose ``close()`` takes it all back. If the call raises,
    models and optimizers are as before.

    Args:
        models: A module, or a list of modules, with float32 parameters, on any device.
        optimizers: An optimizer over their parameters, or a list of them, or ``None``.
        enabled: False makes this call and everything after it a pass-through.
        opt_level: ``"O0"`` float32; ``"O1"`` function casts to float16; ``"O2"`` float16 weights
            with float32 masters; ``"O3"`` float16 throughout; ``"O4"`` and ``"O5"`` are O1 and O2
            in bfloat16. The arguments down to ``loss_scale`` default to the level's row in
            ``preamp.OPT_LEVELS``; ``None`` means that default.
        cast_model_type: dtype for the models' weights and inputs; ``False`` casts nothing.
        patch_torch_functions: Whether functions are cast one by one (O1 and O4 only).
        keep_batchnorm_fp32: Whether affine batch norms stay in float32.
        master_weights: Whether the optimizer updates float32 masters of half parameters.
        loss_scale: ``"dynamic"``, or a positive number.
        cast_model_outputs: dtype of the models' floating outputs. Left out, it is float32, but for
            ``scope="thread"`` at O1 and O4, where outputs are as the model makes them.
        num_losses: How many losses have a loss scale of their own.
        verbosity: 0 prints nothing but what ``overflow="trace"`` and `Engine.trace_overflow` find,
            1 also the decisions, in one line, and each skipped step, 2 also each cast of a
            function's argument (O1, O4).
        min_loss_scale: Floor of a dynamic scale. Without one, training stops with
            `LossScaleError` at 2**-24.
        max_loss_scale: Ceiling of a dynamic scale.
        patch_torch_functions_type: Half dtype of the function casts; follows from the level.
        scope: Where functions are cast at O1 and O4: with ``"model"`` (default) inside the
            models' forward only, on any thread; with ``"thread"``, as in Apex, in all that the
            calling thread runs, loss functions and other models included, until nothing refers to
            the models and optimizers any more.
        keep_fp32: What is not rounded where models are cast to half (O2, O3, O5): module types,
            patterns such as ``"rotary.*"`` for the names of parameters, buffers or modules,
            functions of ``(name, tensor)`` that return a bool; one of them or a list. Parameters
            stay float32, without masters; modules get their inputs in float32.
        max_consecutive_skips: Skipped steps in a row after which ``step`` raises
            `LossScaleError`; ``None`` for never.
        allow_half_model: Accept models that are half already; masters then start from the
            rounded values.
        hard_override: Warn instead of refusing an override that contradicts the level.
        backend: Kernels for gradients and fused updates: ``"triton"``, ``"jit"``
            (CPUs, with numba), ``"plain"`` (torch's operations), or ``"auto"`` for the fastest one
            on each device.
        overflow: ``"skip"`` (default), or ``"trace"``: every forward and backward is watched
            by module hooks, and a skipped step tells which module was the first to go wrong, at
            any ``verbosity``. See `Engine.trace_overflow`, which does so once.
        numerics: Statistics in `Engine.history`: ``"off"``; ``"light"`` of gradients; ``"full"``
            also histograms, of weights too, and how many weights a step left unchanged.
        numerics_every: They are taken at the first optimizer step and every so many after it.
        history: File that the records of the run are appended to as JSON lines.
        process_groups: Groups of ``torch.distributed`` that hold parts of one model in plain
            tensors: one, several, or a mapping from each to ``"tensor"`` (default) or
            ``"pipeline"``. Overflow and norms are agreed over them; see the page on distributed
            training. Groups of sharded tensors (``fully_shard``) are known without.
        storage: How masters and moments are kept between steps: ``"full"`` (default) in float32;
            ``"split"``, masters as half weights and the 16 bits that these lack, exactly;
            ``"compact"``, moments in 8 bits besides; or a `preamp.Storage`, which may also have
            masters and moments on the host, and gradients.

    Returns:
        The very objects passed in: ``models`` alone if ``optimizers`` is ``None``, else
        ``(models, optimizers)``.

    Raises:
        PreampPolicyError: Unknown level or contradictory override, or ``keep_fp32`` names
            something that the models do not have.
        PreampStateError: A model is half, wrapped already, lazy, or to be cast and scripted, or an
            optimizer is taken.
        PreampUnavailableError: The back end does not exist or does not run here.
        TypeError: Wrong kind of argument.
        ValueError: Right kind, wrong value.

    Mutates:
        Models (dtypes, hooks) and optimizers (parameter groups, state dtypes, hooks); for O1 and
        O4 also functions of torch, until the last such engine is closed. So for O2, O3 and O5 where
        anything but batch norms stays float32: products that mix it with half.
    """
    engine = start(locals())
    if engine.verbosity > 0 and enabled:
        say(summary_of(engine))
    return models if optimizers is None else (models, optimizers)


def start(
    arguments: Mapping[str, Any], tell: Callable[[Policy, Recording], None] | None = None
) -> Engine:
    """Do what `initialize` says, by its ``arguments``.

    ``tell`` is called once the decisions are made, before a model is looked at.
    """
    models, optimizers = arguments["models"], arguments["optimizers"]
    if not arguments["enabled"]:
        return _create_off(models, optimizers)
    arguments = {**arguments, **_asked}
    if "history" in _asked:
        arguments["history"] = path = _not_in_use(_asked["history"])
        say(f"preamp: records go to {path}")
    recording = make_recording(
        arguments["verbosity"],
        arguments.get("numerics", "off"),
        arguments.get("numerics_every", 100),
        arguments.get("history"),
    )
    policy = resolve(
        arguments["opt_level"], arguments, hard_override=arguments.get("hard_override", False)
    )
    kernels = (
        ops_named(arguments.get("backend", "auto"), policy.storage.place),
        splits_over(arguments.get("process_groups")),
    )
    if tell is not None:
        tell(policy, recording)
    engine = create_engine(
        models,
        optimizers,
        policy,
        arguments["num_losses"],
        recording,
        kernels,
        allow_half_model=arguments["allow_half_model"],
    )
    if engine.conversion.changed:
        warnings.warn(engine.conversion.changed, stacklevel=3)
    return engine


_asked: dict[str, Any] = {}
"""Arguments of all engines of this process, whatever the program says."""


def ask(**arguments: Any) -> None:
    """Have engines made with this ``history`` or ``numerics``, as ``preamp run`` was told.

    Where an engine writes to the history already, a number is added: ``run-2.jsonl``. Raises
    `TypeError` or `ValueError` as `initialize` does for them, and nothing is asked.
    """
    made = make_recording(0, arguments.get("numerics", "off"), 100, arguments.get("history"))
    if made.path is not None:
        arguments["history"] = made.path.absolute()  # the program may change its folder
    _asked.update(arguments)


def _not_in_use(path: Path) -> Path:
    used = {engine.recorder.history.path for engine in engines_in_use() if not engine.closed}
    further = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2))
    return next(free for free in itertools.chain((path,), further) if free not in used)


def create_engine(
    models: Any,
    optimizers: Any,
    policy: Policy,
    num_losses: int = 1,
    recording: Recording = OFF,
    kernels: tuple[Ops, Splits] | None = None,
    *,
    allow_half_model: bool = False,
) -> Engine:
    """Check, convert and hook; what `initialize` does once the policy is known."""
    if CASTS.pushes:  # perhaps of an engine that was dropped, and would cast around this one
        gc.collect()
    ops, splits = kernels or (ops_named(), Splits())
    model_list = checks.as_list(models, nn.Module, "model")
    optimizer_list: list[torch.optim.Optimizer] = []
    if optimizers is not None:
        optimizer_list = checks.as_list(optimizers, torch.optim.Optimizer, "optimizer")
    num_losses = checks.check_num_losses(num_losses)
    conversion = _checked(model_list, optimizer_list, policy, splits, allow_half_model)
    check_updates(optimizers, optimizer_list, policy, (ops, splits))
    reshard(model_list)
    earlier = [(model, find_engine(model)) for model in model_list]
    engine = Engine(policy, model_list, optimizer_list, (ops, splits), num_losses, recording)
    engine.tracer, engine.recorder = watchers.make_watchers(engine, recording)
    engine.conversion = conversion
    exact_state = UndoStack()
    is_attached = False
    try:
        if policy.enabled:
            _attach(engine)
        _mark_optimizers(engine, ops, splits)
        if policy.enabled:
            for session in engine.sessions.values():
                session.recast_state(exact_state)
            engine.recorder.start(engine)
        is_attached = True
        _take_over(engine, earlier)
    except BaseException:
        if is_attached:
            _take_over(engine, earlier)  # interrupted: to the end
        else:
            _roll_back(engine, exact_state)
        raise
    return engine


def _checked(
    models: list[nn.Module],
    optimizers: list[torch.optim.Optimizer],
    policy: Policy,
    splits: Splits,
    allow_half_model: bool,
) -> Conversion:
    """Refuse what does not fit, and return what is to be cast. Changes nothing."""
    checks.check_optimizers(optimizers)
    if not policy.enabled:
        return Conversion()
    checks.check_keeps_params(optimizers, has_masters=policy.master_weights)
    checks.check_not_shared(models, policy)
    checks.check_models(models, policy, allow_half_model=allow_half_model)
    check_fits(models, policy, splits)
    conversion = checks.planned_conversion(models, policy)
    check_storage(models, optimizers, policy, conversion.kept)
    return conversion


def _mark_optimizers(engine: Engine, ops: Ops, splits: Splits) -> None:
    for optimizer in engine.optimizers:
        engine.be_found_from(optimizer)
        if splits.given:
            set_attribute(optimizer, "splits", splits, engine.undo)
        if isinstance(optimizer, FusedOptimizer):
            set_attribute(optimizer, "backend", ops.name, engine.undo)
            set_attribute(optimizer, "storage", engine.policy.storage, engine.undo)
            optimizer.check_storage()


def _take_over(engine: Engine, earlier: Iterable[tuple[nn.Module, Engine | None]]) -> None:
    """Have the models, which earlier engines let go of; from here on nothing is taken back."""
    engine.conversion.forget_originals()
    for model, previous in earlier:
        if previous is not None and previous is not engine:
            previous.hand_over(model)
        engine.be_found_from(model)


def _create_off(models: Any, optimizers: Any) -> Engine:
    """Make an engine that lets everything through."""
    off = Policy(opt_level="O0", brief="off", enabled=False)
    own = checks.members_of(models, nn.Module)
    return create_engine(own, checks.members_of(optimizers, torch.optim.Optimizer), off)


def _attach(engine: Engine) -> None:
    policy = engine.policy
    if policy.cast_model_type is not None:
        for model in engine.models:
            engine.conversion.convert(
                model, policy.cast_model_type, keep_batchnorm_fp32=bool(policy.keep_batchnorm_fp32)
            )
    if policy.cast_model_type in HALF_DTYPES:
        engine.undo.push(engine.reductions.retire_wrappers)
    check_groups(engine.models)
    for session in reversed(engine.sessions.values()):
        checks.check_half_once(engine, session, session.model_params())
    for session in engine.sessions.values():
        session.table.adopt(engine.conversion.originals)
    if policy.master_weights:
        twins = [twin for session in engine.sessions.values() for twin in session.table.twins]
        for kind in map(ForeachType, {MasterParameter, *(type(twin.master) for twin in twins)}):
            engine.process_undo.hold(kind)
            kind.hold()
    is_sharded = any(map(has_sharded_parts, engine.models))
    if policy.master_weights or policy.is_dynamic or is_sharded:
        # Masters need names; a step with zeros, which makes an optimizer's state, is not counted
        weak = weakref.ref(engine)
        names = NamedMasters(
            functools.partial(master_of, weak), functools.partial(zeros_are_stepped, weak), bare
        )
        engine.process_undo.hold(names)
        names.hold()
    copies = Copies(engine)
    engine.reductions.comparison = RankComparison(engine)
    for model in engine.models:
        _hook_model(engine, model, copies)
    _install_function_casts(engine)
    for session in engine.sessions.values():
        check_joins = functools.partial(checks.check_joins, engine, session)
        OptimizerHooks(engine, session, check_joins).attach(engine.undo)
        loads = "register_load_state_dict_pre_hook"
        add_hook(session.optimizer, loads, refuse_codes, engine.undo)
    if policy.storage.release_gradients:
        Waiting(engine).attach()
    if policy.overflow == "trace":
        engine.tracer.arm(stays=True, is_first=True)


def _hook_model(engine: Engine, model: nn.Module, copies: Copies) -> None:
    policy, undo = engine.policy, engine.undo_of(model)
    undo.push(functools.partial(engine.tracer.release, model))
    target = policy.cast_model_type
    outputs = policy.cast_model_outputs
    if outputs is None and target is not None:
        outputs = torch.float32
    elif outputs is None and engine.casts_functions and policy.scope == "model":
        outputs = "widened"  # function casts leave float64 alone
    if engine.casts_functions and policy.patch_torch_functions_type is not None:
        types = device_types(engine)
        region = UndoStack()
        undo.push(region.unwind)
        engine.cast_undo.push(region.unwind)
        attach_cast_region(model, types, policy.patch_torch_functions_type, region)
    else:
        attach_plain_region(model, undo)
    inputs = target if target in HALF_DTYPES or not gather_dtypes(model) else None
    if id(model) in engine.conversion.kept.modules:
        inputs = torch.float32
    # fully_shard casts what it gathers for
    attach_io_casts(model, inputs, outputs, undo)
    attach_reductions(model, engine.reductions, undo)
    layers = [*model.modules()]
    if target in HALF_DTYPES:
        attach_layer_casts(layers, target, engine.conversion.kept, undo)
        attach_state_hooks(layers, engine.link, undo)
    if policy.master_weights or target not in HALF_DTYPES:
        copies.attach(layers, undo)
    if policy.master_weights:
        attach_weight_doors(model, engine.link, undo)


def _install_function_casts(engine: Engine) -> None:
    policy = engine.policy
    undo = engine.cast_undo if engine.casts_functions else engine.process_undo
    types, half = device_types(engine), policy.half_dtype
    if engine.casts_functions and policy.patch_torch_functions_type is not None:
        install_function_casts(undo, verbose=engine.verbosity >= 2)
        if policy.scope == "thread":
            push_thread_casts(types, policy.patch_torch_functions_type, undo)
    if half is not None and "cpu" in types:
        install_wide_where_slow(half, undo)
    if policy.cast_model_type in HALF_DTYPES:
        install_mixed_calls(undo)


def device_types(engine: Engine) -> frozenset[str]:
    """The kinds of device that the engine's parameters are on."""
    found = {param.device.type for model in engine.models for param in model.parameters()}
    return frozenset(found or {engine.device.type})


def _roll_back(engine: Engine, exact_state: UndoStack) -> None:
    """Undo a failed initialize; the exact values from before the cast are still there."""
    sessions = engine.sessions.values()
    run_all(
        (
            *engine.take_back(),
            *(session.release_masters for session in sessions),
            lambda: engine.conversion.revert(engine.conversion.originals),
            exact_state.unwind,
            *(session.recast_state for session in sessions),
            engine.be_forgotten,
            engine.recorder.close,  # last: a full disk may fail it
        )
    )
