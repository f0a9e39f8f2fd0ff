# SPDX-License-Identifier: BSD-3-Clause
"""``estimate``: bytes by category, before anything is allocated."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, get_args

import torch
from torch import nn

from preamp.core.errors import PreampPolicyError, bad_value
from preamp.core.pytree import plain
from preamp.core.ranks import TOGETHER, share_of, unit_of_rows
from preamp.engine.lookup import bare
from preamp.planning.isolation import LossFn
from preamp.planning.layout import Factory, Slot, made, slots_of
from preamp.planning.optimizers import (
    Make,
    OptimizerLike,
    Shape,
    ShardSize,
    StateBytes,
    Updated,
    name_of,
    optimizer_factory,
    state_bytes,
)
from preamp.planning.peak import trace_pass
from preamp.policy import Policy, resolve
from preamp.policy.resolve import check_storage
from preamp.policy.storage import STORAGES, Storage, storage_code, storage_name

Sharding = Literal["none", "zero1", "fsdp"]
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
        parameters: Elements of all parameters, on all ranks together.
        weights: The model's parameters.
        buffers: The model's buffers.
        masters: float32 masters of half weights, or of split ones what lies beside the weights.
        gradients: What a backward leaves on every trainable parameter; nothing where they are
            released.
        optimizer_state: Tensors in the optimizer's state and in its groups.
        scaler: Scale, growth counter and overflow flag of one loss scaler.
        master_gradients: For the time of ``optimizer.step`` only: float32 gradients of the
            masters, for optimizers that are not fused ones of preamp, and the masters themselves
            where they are split.
        activations: What else lives at the worst moment of a forward and its backward:
            activations, temporary tensors of single operations, half copies of weights; with
            those new gradients that exist at that moment. ``None`` without ``loss_fn``.
        peak: The worst moment of a training step; ``None`` without ``loss_fn``.
        smaller: With ``storage="full"``, the total with each storage that takes less, as far as
            level and optimizer can have it, by what `initialize` is given for it. They are
            counted when they are first looked at.
    """

    opt_level: str
    optimizer: str
    world_size: int
    sharding: Sharding
    storage: str = "full"
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
    smaller: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def categories(self) -> dict[str, int]:
        """What stays from step to step, by the names of `preamp.count_memory`."""
        return {
            "weights": self.weights,
            "buffers": self.buffers,
            "masters": self.masters,
            "gradients": self.gradients,
            "optimizer state": self.optimizer_state,
            "loss scaler": self.scaler,
        }

    @property
    def total(self) -> int:
        """The sum of `categories`."""
        return sum(self.categories.values())

    def with_activations(self, activations: int) -> MemoryEstimate:
        """The same, with the most bytes that live in a forward and its backward."""
        in_passes = self.total - self.gradients + activations
        at_step = self.total + self.master_gradients
        return replace(self, activations=activations, peak=max(in_passes, at_step))

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {**plain(self), "total": self.total}


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
            ``OPT_LEVELS["O2"].replace(storage="compact")``.
        optimizer: A name (``"FusedAdam"``, ``"SGD(momentum=0.9)"``), a class, a function of the
            parameters, an optimizer, or ``None``. An optimizer has its own parameters, anything
            else all of the model's. Its state is found by one step on tensors of a few elements.
        world_size: Ranks.
        sharding: ``"none"``: every rank has everything. ``"zero1"``: each tensor's master and
            optimizer state are shared out, as by ``preamp.parallel.shard_optimizer``.
            ``"fsdp"``: weights and gradients too. Tensors are split by elements; told is what
            the rank with the largest shares has.
        loss_fn: ``loss_fn(model, batch)`` returns a scalar loss; adds ``activations`` and
            ``peak``, for one rank without sharding.
        batch: For ``loss_fn``: tensors, or containers of them.

    Returns:
        The estimate.

    Raises:
        PreampPolicyError: The level is not known, or has no masters that could be split.
        TypeError: Wrong kind of model or optimizer.
        ValueError: A half model, an optimizer whose state follows from more than the parameters'
            shapes, or whose moments are float32 only; a wrong number of ranks; or a ``loss_fn``
            that cannot be traced.
    """
    policy = opt_level if isinstance(opt_level, Policy) else resolve(opt_level, {})
    check_storage(policy)
    optimizer = bare(optimizer)
    releases = policy.storage.release_gradients
    _check_ranks(world_size, sharding, has_loss=loss_fn is not None, releases=releases)
    if not isinstance(model, (int, float)) or loss_fn is not None:
        model = made(model)
    training = _training_of(model, policy, optimizer, world_size, sharding)
    found = _count(training, policy)
    if storage_name(policy.storage) == "full":
        found = replace(found, smaller=_Smaller(training, policy, found.total))
    if loss_fn is None or not isinstance(model, nn.Module):
        return found
    return found.with_activations(trace_pass(model, policy, loss_fn, batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Training:
    """What is estimated, without tensors: enough to count it at any policy, at any time."""

    slots_in: Callable[[bool], list[Slot]]  # the model's tensors; of a number, in rows or not
    optimizer: str  # its name
    make: Make | None  # makes one over other parameters
    options: Sequence[Mapping[str, Any]]  # of its groups
    groups: Mapping[int, int] | None  # those of its parameters; ``None`` if it has all, in one
    world_size: int
    sharding: Sharding

    def of_optimizer(self, slots: Sequence[Slot]) -> list[Slot]:
        """Those that the optimizer has."""
        if self.make is None:
            return []
        return [slot for slot in slots if self.groups is None or slot.key in self.groups]


def _training_of(
    model: nn.Module | Factory | float,
    policy: Policy,
    optimizer: OptimizerLike | None,
    world_size: int,
    sharding: Sharding,
) -> _Training:
    slots_in = partial(_slots_of_number, model)
    if isinstance(model, nn.Module):
        slots = slots_of(model, policy.keep_fp32)
        slots_in = partial(_same, slots)
    groups: dict[int, int] | None = None
    options: list[Mapping[str, Any]] = [{}]
    if isinstance(optimizer, torch.optim.Optimizer):
        given = optimizer.param_groups
        groups = {id(p): index for index, group in enumerate(given) for p in group["params"]}
        # Copies: an update counts in tensors of its group, which are the caller's.
        options = [copy.deepcopy({k: group[k] for k in optimizer.defaults}) for group in given]
    return _Training(
        slots_in=slots_in,
        optimizer=name_of(optimizer),
        make=None if optimizer is None else optimizer_factory(optimizer),
        options=options,
        groups=groups,
        world_size=world_size,
        sharding=sharding,
    )


def _slots_of_number(model: Any, in_rows: bool) -> list[Slot]:
    return slots_of(model, in_rows=in_rows)


def _same(slots: list[Slot], in_rows: bool) -> list[Slot]:
    del in_rows
    return slots


def _count(training: _Training, policy: Policy) -> MemoryEstimate:
    """Count what stays from step to step; raises as `estimate` does."""
    world_size, sharding = training.world_size, training.sharding
    slots = training.slots_in(policy.storage.moments == "8bit")
    part = _part_of(sharding, world_size, policy.storage)
    state = _state_of(slots, policy, training, part)
    updated = [slot for slot in slots if slot.has_master_at(policy)]
    updated = training.of_optimizer(updated)
    fixed = _kept_bytes(slots, policy, world_size if sharding == "fsdp" else 1)
    return MemoryEstimate(
        opt_level=policy.opt_level,
        optimizer=training.optimizer,
        world_size=world_size,
        sharding=sharding,
        storage=storage_name(policy.storage),
        parameters=sum(slot.elements for slot in slots if slot.is_parameter),
        **fixed,
        masters=_master_bytes(slots, updated, policy, None if sharding == "none" else part),
        optimizer_state=state.bytes,
        scaler=_SCALER_BYTES,
        master_gradients=sum(part(slot.shape) for slot in updated)
        * (4 if policy.storage.masters == "float32" else 8)
        * state.reads_master_gradients,
    )


_FEWER_BYTES = (
    STORAGES["split"],
    STORAGES["compact"],
    replace(STORAGES["compact"], release_gradients=True),
)


def at_level(policy: Policy, storage: Storage) -> Storage:
    """What of ``storage`` a policy can have."""
    return replace(
        storage,
        masters=storage.masters if policy.master_weights else "float32",
        release_gradients=storage.release_gradients and not policy.is_dynamic,
    )


class _Smaller(Mapping[str, int]):
    """What other storages are written as, and the totals with them, counted when first asked for.

    Each is less than the ones before.
    """

    def __init__(self, training: _Training, policy: Policy, total: int) -> None:
        self._count = partial(_totals_below, training, policy, total)

    @cached_property
    def _found(self) -> dict[str, int]:
        return dict(self._count())

    def __getitem__(self, storage: str) -> int:
        return self._found[storage]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        return repr(self._found)

    def __reduce__(self) -> Any:
        """Be copied and pickled as the dictionary that it stands for."""
        return dict, (self._found,)


def _totals_below(training: _Training, policy: Policy, total: int) -> Iterator[tuple[str, int]]:
    for storage in dict.fromkeys(at_level(policy, storage) for storage in _FEWER_BYTES):
        if storage == policy.storage or (storage.release_gradients and training.world_size > 1):
            continue
        try:
            with_storage = policy.replace(storage=storage)
            check_storage(with_storage)
            found = _count(training, with_storage)
        except (ValueError, PreampPolicyError):  # the optimizer cannot have it
            continue
        if found.total < total:
            total = found.total
            yield storage_code(found.storage), total


def _check_ranks(world_size: int, sharding: str, *, has_loss: bool, releases: bool) -> None:
    if isinstance(world_size, bool) or world_size < 1 or world_size != int(world_size):
        raise bad_value(
            f"world_size={world_size!r} cannot be used",
            "It is a whole number from 1",
            "Pass the number of ranks",
        )
    if sharding not in get_args(Sharding):
        raise bad_value(
            f"sharding={sharding!r} is not known",
            "Allowed are 'none', 'zero1' (optimizer state and masters are shared out) and "
            "'fsdp' (weights and gradients too)",
            "Choose one of them",
        )
    if has_loss and sharding != "none":
        raise bad_value(
            f"loss_fn together with sharding={sharding!r}",
            "A step's peak is known for ranks that have everything",
            "Leave loss_fn out, or pass sharding='none'",
        )
    if releases and world_size > 1:
        raise bad_value(
            f"storage has release_gradients=True, and world_size is {world_size}",
            "Gradients that ranks reduce are final only when all of them have come",
            "Pass world_size=1, or a storage without it",
        )


def _part_of(sharding: Sharding, world_size: int, storage: Storage) -> ShardSize:
    """How many elements the rank with the most of a tensor has."""
    by_rows = storage.moments != "float32"

    def shared(shape: Shape) -> int:
        unit = unit_of_rows(shape) if by_rows and len(shape) > 1 else TOGETHER
        return share_of(math.prod(shape), world_size, unit)

    if sharding == "zero1":
        return shared
    return lambda shape: -(-math.prod(shape) // (world_size if sharding == "fsdp" else 1))


def _state_of(
    slots: Sequence[Slot], policy: Policy, training: _Training, part: ShardSize
) -> StateBytes:
    if training.make is None:
        return StateBytes(0, reads_master_gradients=False)
    tensors = [
        Updated(
            shape=slot.shape,
            dtype=torch.float32 if slot.has_master_at(policy) else slot.dtype_at(policy),
            has_gradient=slot.is_trainable,
            group=0 if training.groups is None else training.groups[slot.key],
        )
        for slot in training.of_optimizer([slot for slot in slots if slot.is_parameter])
    ]
    return state_bytes(training.make, tensors, training.options, part, policy.storage)


def _kept_bytes(slots: Sequence[Slot], policy: Policy, share: int) -> dict[str, Any]:
    """Weights, buffers and gradients; a storage that several tensors view counts once."""
    found = {"weights": 0, "buffers": 0, "gradients": 0}
    seen: set[int] = set()
    for slot in sorted(slots, key=lambda slot: not slot.is_parameter):
        dtype = slot.dtype_at(policy)
        parts = share if slot.is_parameter else 1
        name = "weights" if slot.is_parameter else "buffers"
        elements = -(-slot.elements // parts)
        if slot.is_parameter and slot.is_trainable and not policy.storage.release_gradients:
            found["gradients"] += elements * dtype.itemsize
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
