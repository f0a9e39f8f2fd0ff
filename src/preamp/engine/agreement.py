# SPDX-License-Identifier: BSD-3-Clause
"""Whether all ranks train the same thing, and that copies of masters begin equal.

`DistributedDataParallel` gives all ranks the first one's weights. Masters hold what weights were
before the cast; where each rank drew its own, or one alone loaded a file, they are made equal as
well. What cannot be made equal is refused: levels, policies, parameters.
"""

from __future__ import annotations

import dataclasses
import hashlib
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from preamp.core.dtypes import dtype_name
from preamp.core.errors import PreampStateError, bad_state
from preamp.core.ranks import answered, broadcast_from_first, gather_objects, gather_tensors
from preamp.core.splits import Group, Groups, meshes_of
from preamp.core.torch_private import fsdp
from preamp.optim import Twin

if TYPE_CHECKING:
    from preamp.engine.core import EngineCore

Facts = Mapping[str, str]
_SHOWN = 4  # differences in a message
_ABSENT = "missing"


class RankComparison:
    """Compares the ranks that train one model; does not keep the engine alive."""

    def __init__(self, engine: EngineCore) -> None:
        """Compare what is known of ``engine``."""
        self._engine = weakref.ref(engine)

    def of_wrapper(self, wrapper: Any) -> None:
        """Compare, on all ranks of ``wrapper`` at once; one all-gather of 40 bytes if all agree."""
        engine = self._engine()
        if engine is not None:
            compare_ranks(engine, wrapper.module, wrapper.process_group)

    def of_shards(self, model: nn.Module) -> None:
        """Compare the ranks that ``fully_shard`` has spread ``model`` over, all of them at once.

        One all-gather of 32 bytes for each dimension of a mesh if all agree. Masters are not made
        equal: each rank has parts of its own.
        """
        engine = self._engine()
        if engine is None or not fsdp.has_sharded_parts(model):
            return
        fsdp.reshard((model,))  # an evaluation leaves gathered weights, which tell of no mesh
        facts = {**_facts(engine, model), "what fully_shard was called on": _sharded_parts(model)}
        own = _vector(_digest(facts), model)
        meshes = meshes_of(model.parameters())
        # First all questions: whoever raised after one would not take part in the next.
        answers = [_gather(own, groups) for groups in meshes]
        unequal = [
            groups
            for groups, found in zip(meshes, answers, strict=True)
            if any(not torch.equal(other, found[0]) for other in found)
        ]
        details = [_gather_facts(facts, groups) for groups in unequal]
        if details:
            raise _refusal(details[0], "fully_shard")


def compare_ranks(engine: EngineCore | None, module: nn.Module, group: Group) -> None:
    """Check that all ranks of ``group`` train ``module`` alike; make its masters equal.

    All of them make this call, also a rank without an engine, and all of them raise
    `PreampStateError`. Mutates masters on all ranks but the first, where they are not equal.
    Synchronises.
    """
    if group.size() == 1:
        return
    facts: Facts = {} if engine is None else _facts(engine, module)
    twins = [] if engine is None else _twins(engine, module)
    found = _gather(_vector([*_digest(facts), _checksum(twins)], module), (group,))
    if any(not torch.equal(other[:-1], found[0][:-1]) for other in found):
        raise _refusal(_gather_facts(facts, (group,)), "DistributedDataParallel")
    if any(other[-1] != found[0][-1] for other in found):
        with torch.no_grad():
            for twin in twins:
                value = twin.value().to(twin.half.device)  # where the group reaches it
                broadcast_from_first(value, group)
                twin.table.set_value(twin.row, value)


def _vector(numbers: Sequence[int], module: nn.Module) -> torch.Tensor:
    device = next((param.device for param in module.parameters()), torch.device("cpu"))
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def _gather(own: torch.Tensor, groups: Groups) -> list[torch.Tensor]:
    """Return ``own`` of all ranks that the groups, one for each dimension, lead to; on the CPU."""
    found = own[None]
    with answered(
        "the ranks were compared",
        "All ranks run the first forward in training, and the first one after a state was loaded "
        "into an engine, together",
        "See why that rank ended or did something else; load on all ranks or on none",
    ):
        for group in reversed(groups):
            found = torch.cat(gather_tensors(found, group))
        return [*found.cpu()]


def _gather_facts(facts: Facts, groups: Groups) -> list[Facts]:
    found = [dict(facts)]
    for group in reversed(groups):
        found = [one for several in gather_objects(found, group) for one in several]
    return [*found]


def _sharded_parts(model: nn.Module) -> str:
    parts = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
    return ", ".join(repr(name) for name, part in parts if fsdp.is_fully_sharded(part))


def _facts(engine: EngineCore, module: nn.Module) -> Facts:
    """What must be the same on all ranks, by a name for each."""
    policy = engine.policy
    facts = {
        field.name: repr(getattr(policy, field.name))
        for field in dataclasses.fields(policy)
        if field.name != "brief"
    }
    for index, scaler in enumerate(engine.scalers):
        facts[f"the loss scale of loss {index}"] = repr(scaler.value())
        if scaler.is_dynamic:  # ranks let their scales grow together
            clean = int(scaler.growth_tracker.item())
            facts[f"the count of loss {index} towards a higher scale"] = repr(clean)
    owners = {
        id(twin.half if (twin := getattr(param, "twin", None)) is not None else param): (
            f"{type(optimizer).__name__} {number}, group {place}"
        )
        for number, optimizer in enumerate(engine.optimizers)
        for place, group in enumerate(optimizer.param_groups)
        for param in group["params"]
    }
    for place, (name, param) in enumerate(module.named_parameters()):
        trains = "updated by " + owners.get(id(param), "nobody")
        shape = "×".join(map(str, param.shape)) or "scalar"
        facts[f"parameter {name!r}"] = (
            f"number {place}, {shape}, {dtype_name(param.dtype)}, "
            f"{trains if param.requires_grad else 'frozen'}"
        )
    return facts


def _twins(engine: EngineCore, module: nn.Module) -> list[Twin]:
    twins = (engine.twin_of(param) for param in module.parameters())
    return [twin for twin in twins if twin is not None]


def _digest(facts: Facts) -> list[int]:
    text = "\n".join(f"{name}={value}" for name, value in facts.items())
    found = hashlib.sha256(text.encode()).digest()
    return [int.from_bytes(found[i : i + 8], "big", signed=True) for i in range(0, 32, 8)]


def _checksum(twins: Iterable[Twin]) -> int:
    """A number that differs where any bit does, but for chance."""
    total = 0
    for place, twin in enumerate(twins):
        bits = twin.value().view(torch.int32).sum(dtype=torch.int64)
        total += (2 * place + 1) * int(bits.item())
    return (total + 2**63) % 2**64 - 2**63


def _refusal(ranks: Sequence[Facts], wrapper: str) -> PreampStateError:
    names = list(dict.fromkeys(name for facts in ranks for name in facts))
    if not all(ranks):
        without = [rank for rank, facts in enumerate(ranks) if not facts]
        differences = [f"preamp.initialize was not called on {_ranks(without)}"]
    else:
        every = (_difference(name, [f.get(name, _ABSENT) for f in ranks]) for name in names)
        differences = [difference for difference in every if difference]
    more = len(differences) - _SHOWN
    shown = "; ".join(differences[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
    return bad_state(
        f"The ranks do not train the same: {shown}",
        f"Under {wrapper} all ranks have the same level, policy, loss scale and parameters",
        "Build the model and call preamp.initialize in the same way on every rank, and load "
        "checkpoints on all of them",
    )


def _difference(name: str, values: Sequence[str]) -> str:
    by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(value, []).append(rank)
    if len(by_value) == 1:
        return ""
    return f"{name} is " + " and ".join(f"{v} on {_ranks(r)}" for v, r in by_value.items())


def _ranks(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
