# SPDX-License-Identifier: BSD-3-Clause
"""A run as `torch.distributed.checkpoint` saves and loads it, sharded over any number of ranks."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from preamp.checkpoint.random_states import prepare_random_states, random_states
from preamp.checkpoint.ranks import exchanged, rank, world_size
from preamp.checkpoint.subjects import Subjects
from preamp.core.errors import bad_state, bad_type, bad_value, with_article
from preamp.core.log import say
from preamp.core.torch_private import fsdp
from preamp.engine.resume import drop_gradients, engine_state, prepare_engine


class RunState:
    """All that training goes on from, for ``torch.distributed.checkpoint``.

    ``dcp.save({"run": run}, checkpoint_id=folder)`` writes it, ``dcp.async_save`` in the
    background, and ``dcp.load({"run": run}, checkpoint_id=folder)`` puts it into the objects given
    here, on any number of ranks. It has the methods of torch's protocol ``Stateful``.

    In a folder are, by the model's names, the float32 weights (masters, where there are some) and
    the optimizers' state, each rank's part of them; loss scales and counters; schedulers; and for
    each rank its random states and ``extra``. A run that loads it on as many ranks goes on bitwise.
    On another number of ranks the random states stay as they are, and each rank gets the first
    one's ``extra``.

    Args:
        model: The model, after ``preamp.initialize``; wrappers are looked through. Several are one
            ``torch.nn.ModuleList``.
        optimizer: One or several; all of the ``preamp.initialize`` call.
        scheduler: One or several objects with ``state_dict`` and ``load_state_dict``, or ``None``.
        extra: Small plain data of your own: numbers, strings, tensors and containers of them. Each
            rank has its own. Assign to ``run.extra`` before a save; a load replaces it.

    Raises:
        TypeError: Something is of another kind.
        PreampStateError: An optimizer has no engine, or others of its ``initialize`` call are
            missing; or ranks hold parts in plain tensors (``process_groups=``), which
            ``torch.distributed.checkpoint`` would take for copies of each other.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        scheduler: Any = None,
        extra: Any = None,
    ) -> None:
        self._subjects = _subjects(model, optimizer, scheduler)
        self.extra = extra

    def state_dict(self) -> dict[str, Any]:
        """Return what ``dcp.save`` writes; all ranks call this.

        Weights and state are the live tensors or made of them. Optimizers that have no state yet
        get some, as ``torch.distributed.checkpoint`` needs. Synchronises: loss scales are read, and
        the ranks' own data are gathered.

        Raises:
            PreampStateError: Inside of a ``scale_loss`` block, or before the step that uses its
                gradients; or gradients lie unreduced inside of ``fully_shard``.
            TypeError: ``extra`` or a scheduler's state is no plain data.
        """
        own = self._subjects
        for engine in own.engines:
            engine.check_between_steps("preamp.RunState.state_dict")
        _check_reduced(own.models)
        fsdp.reshard(own.models)
        weights, states = get_state_dict(own.models[0], own.optimizers)
        # One value on all ranks, since of what is no tensor ``dcp`` writes one rank's.
        ranks = _bytes_of({"ranks": exchanged(self._of_this_rank)})
        return {"model": weights, "optimizer": states, "ranks": ranks}

    def _of_this_rank(self) -> bytes:
        own = self._subjects
        return _bytes_of(
            {
                "engines": [engine_state(engine) for engine in own.engines],
                "schedulers": [scheduler.state_dict() for scheduler in own.schedulers],
                "random": random_states(),
                "extra": self.extra,
            }
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned; ``dcp.load`` calls this on all ranks.

        Mutates the model, optimizers, schedulers, loss scales, random generators and ``extra``.

        Raises:
            ValueError: It is of other schedulers or loss scales; these are as they were then, while
                ``dcp.load`` has written to weights and optimizer state.
        """
        own, saved = self._subjects, _data_of(state_dict["ranks"])["ranks"]
        count = world_size()
        mine = _data_of(saved[rank() if len(saved) == count else 0])
        _check_counts(mine, own)
        set_random_states = None
        if len(saved) == count:
            set_random_states = prepare_random_states(mine["random"])
        else:
            say(
                f"preamp: the checkpoint has the random states of {len(saved)} ranks; those of "
                f"{count} stay as they are"
            )
        pairs = zip(own.engines, mine["engines"], strict=True)
        set_engines = [prepare_engine(engine, state) for engine, state in pairs]
        model, given = own.models[0], state_dict["optimizer"]
        set_model_state_dict(model, state_dict["model"])
        # Some optimizers have no state, as SGD without momentum; dcp has compared the names.
        options = StateDictOptions(strict=False)
        set_optimizer_state_dict(model, own.optimizers, given, options=options)
        for engine, set_engine in zip(own.engines, set_engines, strict=True):
            drop_gradients(engine)
            set_engine()
        for scheduler, state in zip(own.schedulers, mine["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        self.extra = mine["extra"]
        if set_random_states is not None:
            set_random_states()


def _subjects(model: Any, optimizer: Any, scheduler: Any) -> Subjects:
    if not isinstance(model, nn.Module):
        raise bad_type(
            f"RunState got {with_article(type(model).__name__)} as its model",
            "It saves one torch.nn.Module, whose names the files have",
            "Pass the model that preamp.initialize returned, or torch.nn.ModuleList of several",
        )
    subjects = Subjects.of(model, optimizer, scheduler)
    known = {id(o) for engine in subjects.engines for o in engine.optimizers}
    strange = [type(o).__name__ for o in subjects.optimizers if id(o) not in known]
    if strange or not subjects.optimizers:
        raise bad_state(
            f"RunState got {', '.join(strange) or 'no optimizer'} without an engine",
            "It saves runs that preamp.initialize has prepared, with their loss scales",
            "Make it after preamp.initialize, of the optimizers that this returned",
        )
    if any(session.splits.given for e in subjects.engines for session in e.sessions.values()):
        raise bad_state(
            "RunState got an engine with process_groups, where ranks hold parts in plain tensors",
            "torch.distributed.checkpoint takes plain tensors of one name for copies of each other",
            "Use preamp.save_checkpoint with a path for each rank",
        )
    return subjects


def _check_reduced(models: Sequence[nn.Module]) -> None:
    """Raise `PreampStateError` if ``fully_shard`` keeps gradients that were not reduced yet."""
    if any(map(fsdp.holds_unreduced, models)):
        raise bad_state(
            "preamp.RunState.state_dict was called while gradients lie unreduced inside of "
            "fully_shard, after set_requires_gradient_sync(False)",
            "Gradients are not saved, so the run would go on without them",
            "Save after optimizer.step(), or before the accumulation",
        )


def _bytes_of(data: Mapping[str, Any]) -> bytes:
    """Plain data as bytes that load without running anything; `TypeError` for other data."""
    file = io.BytesIO()
    try:
        torch.save(dict(data), file)
        _data_of(file.getvalue())
    except Exception as error:  # pickle and torch say in many ways what they do not take
        raise bad_type(
            f"The run has data that torch.load(weights_only=True) does not read: {error}",
            "extra and the states of schedulers are numbers, strings, tensors, and lists, tuples "
            "and dicts of them",
            "Save other objects beside the run, as dcp.save({'run': run, 'other': other})",
        ) from error
    return file.getvalue()


def _data_of(data: bytes) -> dict[str, Any]:
    return cast("dict[str, Any]", torch.load(io.BytesIO(data), "cpu", weights_only=True))


def _check_counts(saved: Mapping[str, Any], own: Subjects) -> None:
    for kind, mine in (("engines", own.engines), ("schedulers", own.schedulers)):
        if len(saved[kind]) != len(mine):
            raise bad_value(
                f"The checkpoint has {len(saved[kind])} {kind}, and the run has {len(mine)}",
                "A run loads what a RunState of the same objects has saved",
                "Pass as many optimizers and schedulers, initialized in as many calls",
            )
