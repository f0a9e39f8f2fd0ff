# SPDX-License-Identifier: BSD-3-Clause
"""ZeRO-1: an optimizer whose masters and state are shared out among the ranks."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim

from preamp.core.errors import bad_state
from preamp.core.ranks import broadcast_from_first
from preamp.distributed.groups import default_group, group_is_ready, require_group
from preamp.distributed.sharing import Sharing
from preamp.engine.agreement import compare_ranks
from preamp.engine.lookup import bare, engine_of
from preamp.engine.session import OptimizerSession
from preamp.optim import LARC
from preamp.optim.fused.every import FusedAdagrad, FusedAdam, FusedSGD

ELEMENTWISE: frozenset[type] = frozenset(
    {
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.Adagrad,
        optim.Adadelta,
        optim.RMSprop,
        optim.Rprop,
        optim.ASGD,
        FusedSGD,
        FusedAdam,
        FusedAdagrad,
    }
)
"""Optimizers that compute each element from what belongs to it alone, so that parts are enough."""


def shard_optimizer(
    optimizer: optim.Optimizer,
    process_group: dist.ProcessGroup | None = None,
    *,
    is_elementwise: bool = False,
) -> None:
    """Share masters and optimizer state out among ranks: ZeRO's first stage.

    Every rank keeps the whole weights and gradients, which `DistributedDataParallel` averages as
    ever, and of each float32 master and each state tensor its own part: elements
    ``rank * s`` to ``(rank + 1) * s`` with ``s = ceil(n / world_size)``. ``step`` updates the
    part and then gathers the weights, one all-gather of their bytes in buckets. The weights are
    those of the same run without sharding, bit by bit. Call it on all ranks, after
    ``preamp.initialize``; a second call shares out what `add_param_group` has added since.

    ``preamp.clip_grad_norm_`` and schedulers work as ever. Between backward and step the masters'
    gradients cannot be read, since a part's norm is easily taken for all of it. Afterwards
    ``model.state_dict()`` needs `full_state_dicts`; ``load_state_dict`` of model and optimizer
    take whole states, on every rank. ``Engine.close`` puts everything together again, and is a
    matter of all ranks.

    Args:
        optimizer: Initialized.
        process_group: Its ranks share; all of them by default.
        is_elementwise: Vouches that an optimizer which is not torch's or preamp's own computes
            each element from that element's gradient, weight and state alone.

    Raises:
        PreampStateError: There is no process group or no engine, ranks do not train the same, the
            optimizer is not elementwise, or another one has the same masters.

    Mutates:
        Masters and state; with one rank nothing. Synchronises.
    """
    require_group("shard_optimizer")
    engine = engine_of(optimizer)
    _check_elementwise(optimizer, is_elementwise=is_elementwise)
    session = engine.sessions[id(optimizer)]
    if any(twin.is_shared for twin in session.masters or ()):
        raise bad_state(
            f"This {type(optimizer).__name__} shares masters with another optimizer",
            "A master whose parts lie on several ranks has one optimizer",
            "Give each parameter to one optimizer",
        )
    group = process_group or default_group()
    if group.size() == 1 or not engine.policy.enabled:
        return
    for model in engine.models:
        compare_ranks(engine, model, group)
    with torch.no_grad():
        for param in session.direct_params():
            broadcast_from_first(param.detach(), group)
    session.write_halves()
    if isinstance(session.sharing, Sharing):
        session.sharing.share_out()
        return
    sharing = Sharing(session, group)
    sharing.share_out()
    session.sharing = sharing
    engine.undo.hold(optimizer.register_load_state_dict_pre_hook(_TakePart(sharing)))
    engine.on_close(sharing.put_together)


def full_state_dicts(
    model: nn.Module, optimizer: optim.Optimizer, *, to: int = 0
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return ``model.state_dict()`` and ``optimizer.state_dict()`` as of a run without sharding.

    All ranks make this call, also those of a run that shares nothing. All load what it returned:
    ``model.load_state_dict`` and ``optimizer.load_state_dict`` take each rank's part of it.

    Args:
        model: In the engine of ``optimizer``; may be wrapped.
        optimizer: Initialized.
        to: The rank of the group that wants them.

    Returns:
        Both on that rank, what was shared on the CPU; ``None`` on the others.

    Raises:
        PreampStateError: ``optimizer`` has no engine.
    """
    sharing = _session_of(optimizer).sharing
    if not isinstance(sharing, Sharing):  # as with one process
        is_mine = not group_is_ready() or default_group().rank() == to
        return (model.state_dict(), optimizer.state_dict()) if is_mine else None
    is_mine = sharing.group.rank() == to
    for twin in sharing.twins():
        twin.absorb_external_write()
        whole = sharing.gather(twin.master.detach(), twin.half)
        twin.held.gathered = whole.cpu() if is_mine else None
    try:
        weights: dict[str, Any] = model.state_dict() if is_mine else {}
    finally:
        for twin in sharing.twins():
            twin.held.gathered = None
    state = optimizer.state_dict()
    whole_states = {
        place: sharing.whole_state(place, state["state"][place]) for place in sorted(state["state"])
    }
    return (weights, {**state, "state": whole_states}) if is_mine else None


class _TakePart:
    """Load-state-dict hook: each rank takes its part of a whole state."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing

    def __call__(self, optimizer: optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        del optimizer
        saved = itertools.chain.from_iterable(group["params"] for group in state["param_groups"])
        places = {number: place for place, number in enumerate(saved)}
        own = {
            number: self._sharing.part_of_state(places[number], entry)
            for number, entry in state["state"].items()
        }
        return {**state, "state": own}


def _session_of(optimizer: optim.Optimizer) -> OptimizerSession:
    return engine_of(optimizer).sessions[id(bare(optimizer))]


def _check_elementwise(optimizer: Any, *, is_elementwise: bool) -> None:
    if isinstance(optimizer, LARC) or not (type(optimizer) in ELEMENTWISE or is_elementwise):
        raise bad_state(
            f"{type(optimizer).__name__} is not known to be elementwise",
            "A rank has parts of the weights; LAMB, LARS, LARC, NovoGrad, Adafactor, Muon and "
            "LBFGS look at whole tensors. Allowed are "
            + ", ".join(sorted({kind.__name__ for kind in ELEMENTWISE})),
            "Use one of these, or fully_shard the model; for an elementwise optimizer of your "
            "own pass is_elementwise=True",
        )
