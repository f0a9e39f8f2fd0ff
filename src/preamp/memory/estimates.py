# SPDX-License-Identifier: BSD-3-Clause
"""``estimate``: bytes by category, before anything is allocated."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import nn

from preamp.core.errors import PreampPolicyError, bad_value
from preamp.core.pinned import bytes_reserved
from preamp.core.pytree import plain
from preamp.engine.lookup import bare
from preamp.engine.waiting import AT_ONCE
from preamp.kernels.staged import AT_ONCE as BUFFERS
from preamp.kernels.staged import RUN, buffers_for
from preamp.memory.layout import Factory, Slot, made, slots_of
from preamp.memory.optimizers import (
    OptimizerLike,
    ShardSize,
    StateBytes,
    Updated,
    name_of,
    optimizer_factory,
    state_bytes,
)
from preamp.memory.peak import LossFn, trace_pass
from preamp.policy import Policy, resolve
from preamp.policy.resolve import at_level, check_storage
from preamp.policy.storage import STORAGES, Storage, storage_code, storage_name
from preamp.watch.inventory import CATEGORIES, ON_HOST

Sharding = Literal["none", "fsdp"]
_SCALER_BYTES = 12  # scale (float32), growth tracker (int32), overflow flag (float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes on one rank, by category.

    The categories are those of `preamp.count_memory`, which counts the same in a real engine
    between a backward and its step, from the second step on.

    Attributes:
        opt_level: ``"O0"`` to ``"O5"``.
        optimizer: Its name.
        world_size: Ranks.
        sharding: What they share out.
        storage: How masters and moments are kept between steps, as `preamp.Storage` has it.
        place: ``"device"``, or ``"host"``, where masters and optimizer state lie then.
        parameters: Elements of all parameters, on all ranks together.
        weights: The model's parameters.
        buffers: The model's buffers.
        masters: float32 masters of half weights, or of split ones what lies beside the weights.
        gradients: What a backward leaves on every trainable parameter.
        optimizer_state: Tensors in the optimizer's state and in its groups.
        scaler: Scale, growth counter and overflow flag of one loss scaler.
        master_gradients: For the time of ``optimizer.step`` only: float32 gradients of the
            masters, for optimizers that are not fused ones of preamp, and the masters themselves
            where they are split.
        activations: What else lives at the worst moment of a forward and its backward:
            activations, temporary tensors of single operations, half copies of weights; with
            those new gradients that exist at that moment. ``None`` without ``loss_fn``.
        peak: The worst moment of a training step; ``None`` without ``loss_fn``.
        gradients_on_host: Of ``gradients`` those that wait there: all, where they are released with
            ``place="host"``, else none.
        staging: Pinned memory of the host for weights and gradients on their way to it and back;
            no category has it.
        smaller: With ``storage="full"``, what is kept on the device with each storage that takes
            less of it, as far as level and optimizer can have it, by what `initialize` is given
            for it. With the last ones, masters and optimizer state lie on the host.
    """

    opt_level: str
    optimizer: str
    world_size: int
    sharding: Sharding
    storage: str = "full"
    place: str = "device"
    parameters: int
    weights: int
    buffers: int
    masters: int
    gradients: int
    optimizer_state: int
    scaler: int
    master_gradients: int
    activations: int | None = None
    peak: int | None = None
    gradients_on_host: int = 0
    staging: int = 0
    smaller: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def categories(self) -> dict[str, int]:
        """What stays from step to step, by the names of `preamp.count_memory`."""
        sizes = self.weights, self.buffers, self.masters
        sizes += self.gradients, self.optimizer_state, self.scaler
        found: dict[str, int] = dict(zip(CATEGORIES, sizes, strict=True))
        if self.place == "host":
            for name in filter(found.get, ("masters", "optimizer state")):
                found[ON_HOST.format(name)], found[name] = found[name], 0
        if self.gradients_on_host:
            found[ON_HOST.format("gradients")] = self.gradients_on_host
        return found

    @property
    def total(self) -> int:
        """The sum of `categories`."""
        return sum(self.categories.values())

    @property
    def on_device(self) -> int:
        """What of the `total` lies on the device: all of it with ``place="device"``."""
        return sum(self.categories[name] for name in CATEGORIES)

    @property
    def on_host(self) -> int:
        """What lies on the host with ``place="host"``, ``staging`` included."""
        return self.total - self.on_device + self.staging

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        sums = {"total": self.total, "on_device": self.on_device, "on_host": self.on_host}
        return {**plain(self), **sums}


def estimate(
    model: nn.Module | Factory | float,
    opt_level: str | Policy = "O1",
    optimizer: OptimizerLike | None = "AdamW",
    *,
    world_size: int = 1,
    sharding: Sharding = "none",
    loss_fn: LossFn | None = None,
    batch: Any = None,
) -> MemoryEstimate:
    """Tell how much memory training takes on one rank, without allocating it.

    Gradients are counted as dense, and for every trainable parameter. With ``loss_fn`` a forward
    and a backward are traced on tensors without memory; what a kernel allocates inside of itself,
    an optimizer's temporary tensors and an allocator's rounding are not known. Not counted either
    are what data-parallel wrappers keep for communication (buckets, gathered weights) and the
    batch.

    Args:
        model: A float32 module on any device, a function without arguments that makes one (called
            under ``torch.device("meta")``), or a number of parameters, taken as one tensor (of rows
            where moments are kept in 8 bits).
            Not mutated.
        opt_level: A level, or a `Policy` with overrides such as
            ``OPT_LEVELS["O2"].replace(storage="compact")``; with ``Storage(place="host")`` what
            lies on the device and on the host is told apart.
        optimizer: A name (``"FusedAdam"``, ``"SGD(momentum=0.9)"``), a class, a function of the
            parameters, an optimizer of this very model, or ``None``. An optimizer has its own
            parameters, anything else all of the model's. Its state is found by one step on tensors
            of a few elements.
        world_size: Ranks.
        sharding: ``"none"``: every rank has everything. ``"fsdp"``: weights, gradients, masters
            and optimizer state are shared out, as by ``fully_shard``. Tensors are split by
            elements; told is what the rank with the largest shares has.
        loss_fn: ``loss_fn(model, batch)`` returns a scalar loss of the model that it gets, a copy;
            called once, with tensors that have no memory. Adds ``activations`` and ``peak``, for
            one rank without sharding.
        batch: For ``loss_fn``: tensors, or containers of them.

    Returns:
        The estimate.

    Raises:
        PreampPolicyError: The level is not known, or has no masters that could be split.
        TypeError: Wrong kind of model or optimizer.
        ValueError: A half model, an optimizer of another one, one whose state follows from more
            than the parameters' shapes, or whose moments are float32 only; a wrong number of
            ranks; or a ``loss_fn`` that cannot be traced.
    """
    policy = opt_level if isinstance(opt_level, Policy) else resolve(opt_level, {})
    optimizer = bare(optimizer)
    if not isinstance(model, (int, float)) or loss_fn is not None:
        model = made(model)
    count = partial(_count, model, optimizer, world_size, sharding)
    found = count(policy)
    if loss_fn is not None and sharding != "none":
        raise bad_value(
            f"loss_fn together with sharding={sharding!r}",
            "A step's peak is known for ranks that have everything",
            "Leave loss_fn out, or pass sharding='none'",
        )
    if found.storage == "full":
        found = replace(found, smaller=dict(_smaller(count, policy, found.total)))
    if loss_fn is None or not isinstance(model, nn.Module):
        return found
    activations = trace_pass(model, policy, loss_fn, batch)
    in_passes = found.on_device - found.gradients + activations
    at_step = found.on_device + found.master_gradients
    return replace(found, activations=activations, peak=max(in_passes, at_step))


def _count(
    model: nn.Module | Factory | float,
    optimizer: OptimizerLike | None,
    world_size: int,
    sharding: Sharding,
    policy: Policy,
) -> MemoryEstimate:
    """Count what stays from step to step; raises as `estimate` does."""
    storage = policy.storage
    check_storage(policy)
    _check_ranks(world_size, sharding, storage)
    slots = slots_of(model, policy.keep_fp32, in_rows=storage.moments == "8bit")
    part = _part_of(sharding, world_size)
    groups = dict.fromkeys((slot.key for slot in slots), 0)
    options: list[Mapping[str, Any]] = [{}]
    if isinstance(optimizer, torch.optim.Optimizer):
        given = optimizer.param_groups
        groups = {id(p): index for index, group in enumerate(given) for p in group["params"]}
        _check_own(groups, slots)
        # Copies: an update counts in tensors of its group, which are the caller's.
        options = [copy.deepcopy({k: group[k] for k in optimizer.defaults}) for group in given]
    trained = [slot for slot in slots if slot.is_parameter and slot.key in groups]
    state = StateBytes(0, reads_master_gradients=False)
    updated: list[Slot] = []
    if optimizer is not None:
        tensors = [_updated(slot, policy, groups[slot.key]) for slot in trained]
        make = optimizer_factory(optimizer)
        state = state_bytes(make, tensors, options, part, storage)
        updated = [slot for slot in trained if slot.has_master_at(policy)]
    shares = world_size if sharding == "fsdp" else 1
    return MemoryEstimate(
        opt_level=policy.opt_level,
        optimizer=name_of(optimizer),
        world_size=world_size,
        sharding=sharding,
        storage=storage_name(storage),
        place=storage.place,
        parameters=sum(slot.elements for slot in slots if slot.is_parameter),
        **_kept_bytes(slots, policy, shares),
        masters=_master_bytes(slots, updated, policy, None if sharding == "none" else part),
        optimizer_state=state.bytes,
        scaler=_SCALER_BYTES,
        master_gradients=sum(4 * part(slot.shape) for slot in updated)
        * state.reads_master_gradients,
        staging=_staging_bytes(trained, policy, part) if storage.place == "host" else 0,
    )


def _check_own(groups: Mapping[int, int], slots: Sequence[Slot]) -> None:
    if groups.keys().isdisjoint(slot.key for slot in slots):
        raise bad_value(
            "The optimizer has none of the model's parameters",
            "An optimizer is given with the model that it was made for",
            "Pass that model, or the optimizer's name or class",
        )


def _updated(slot: Slot, policy: Policy, group: int) -> Updated:
    dtype = torch.float32 if slot.has_master_at(policy) else slot.dtype_at(policy)
    return Updated(slot.shape, dtype, has_gradient=slot.is_trainable, group=group)


def _staging_bytes(trained: Sequence[Slot], policy: Policy, part: ShardSize) -> int:
    """Weights and gradients on their way in a step, and in a backward gradients that go to wait."""
    trained = [slot for slot in trained if slot.is_trainable]
    grads = [part(slot.shape) * slot.dtype_at(policy).itemsize for slot in trained]
    if not grads:
        return 0
    waiting = (max(grads), AT_ONCE if policy.storage.release_gradients else 0)
    if not trained[0].name:  # a number of parameters: nothing is known of its tensors
        pieces, rest = divmod(grads[0], RUN // 2)
        pieces = min(pieces, BUFFERS)  # more of them need no more buffers
        grads, waiting = [RUN // 2] * pieces + [rest], (0, 0)
    return bytes_reserved(buffers_for([2 * size for size in grads]), waiting)


_ON_DEVICE = tuple(STORAGES.values())
_ON_HOST = tuple(
    replace(storage, place="host", release_gradients=releases)
    for releases in (False, True)
    for storage in STORAGES.values()
)
"""With gradients on the device, and without; each takes less than those before with as many."""


Count = Callable[[Policy], MemoryEstimate]


def _possible(
    count: Count, policy: Policy, storages: Iterable[Storage]
) -> Iterator[MemoryEstimate]:
    """Count a policy with those of the storages that level, ranks and optimizer can have."""
    for storage in dict.fromkeys(at_level(policy, storage) for storage in storages):
        try:
            found = count(policy.replace(storage=storage))
        except (ValueError, PreampPolicyError):
            continue
        yield found


def fitting(
    model: nn.Module | Factory | float,
    optimizer: OptimizerLike | None,
    levels: Iterable[str],
    *,
    card: float,
    host: float = math.inf,
    world_size: int = 1,
    sharding: Sharding = "none",
) -> Iterator[MemoryEstimate]:
    """Yield what of a training fits ``card`` bytes of a device and ``host`` bytes of the host.

    Of each level there are the storages on the device, and those on the host. Each group begins
    with the one that changes least; each after it takes less of one place than all before.
    Activations are not counted. Raises as `estimate` does.
    """
    for level in levels:
        policy = resolve(level, {})
        count = partial(_count, model, optimizer, world_size, sharding)
        count(policy)  # what cannot be counted at all is refused, not left out
        for storages in (_ON_DEVICE, _ON_HOST):
            least = (math.inf, math.inf)
            for one in _possible(count, policy, storages):
                sizes = one.on_device, one.on_host
                takes_less = any(size < known for size, known in zip(sizes, least, strict=True))
                if takes_less and one.on_device <= card and one.on_host <= host:
                    least = sizes
                    yield one


def _smaller(count: Count, policy: Policy, most: int) -> Iterator[tuple[str, int]]:
    for found in _possible(count, policy, (*_ON_DEVICE, _ON_HOST[1], _ON_HOST[4])):
        if found.on_device < most:
            most = found.on_device
            yield storage_code(found.storage), most


def _check_ranks(world_size: int, sharding: str, storage: Storage) -> None:
    if isinstance(world_size, bool) or world_size < 1 or world_size != int(world_size):
        raise bad_value(
            f"world_size={world_size!r} cannot be used",
            "It is a whole number from 1",
            "Pass the number of ranks",
        )
    if sharding not in get_args(Sharding):
        raise bad_value(
            f"sharding={sharding!r} is not known",
            "Allowed are 'none' and 'fsdp' (weights, gradients, masters and optimizer state are "
            "shared out)",
            "Choose one of them",
        )
    if storage.release_gradients and world_size > 1:
        raise bad_value(
            f"storage has release_gradients=True, and world_size is {world_size}",
            "Gradients that ranks reduce are final only when all of them have come",
            "Pass world_size=1, or a storage without it",
        )


def _part_of(sharding: Sharding, world_size: int) -> ShardSize:
    """How many elements the rank with the most of a tensor has."""
    return lambda shape: -(-math.prod(shape) // (world_size if sharding == "fsdp" else 1))


def _kept_bytes(slots: Sequence[Slot], policy: Policy, share: int) -> dict[str, Any]:
    """Weights, buffers and gradients; a storage that several tensors view counts once."""
    found = {"weights": 0, "buffers": 0, "gradients": 0, "gradients_on_host": 0}
    seen: set[int] = set()
    for slot in slots:
        dtype = slot.dtype_at(policy)
        parts = share if slot.is_parameter else 1
        name = "weights" if slot.is_parameter else "buffers"
        elements = -(-slot.elements // parts)
        if slot.is_parameter and slot.is_trainable:
            waits = policy.storage.release_gradients
            found["gradients_on_host" if waits else "gradients"] += elements * dtype.itemsize
        if dtype is not slot.dtype or parts > 1:
            found[name] += elements * dtype.itemsize
        elif slot.storage not in seen:
            seen.add(slot.storage)
            found[name] += slot.storage_bytes
    return found


def _master_bytes(
    slots: Sequence[Slot], updated: Sequence[Slot], policy: Policy, part: ShardSize | None
) -> int:
    """A master takes over the storage that its weight had before the cast."""
    if policy.storage.masters == "split":
        return sum(2 * (slot.elements if part is None else part(slot.shape)) for slot in updated)
    taken = {slot.storage for slot in slots if slot.dtype_at(policy) is slot.dtype}
    total = 0
    for slot in updated:
        if slot.dtype is not torch.float32 or part is not None:
            total += 4 * (slot.elements if part is None else part(slot.shape))
        elif slot.storage not in taken:
            taken.add(slot.storage)
            total += slot.storage_bytes
    return total
