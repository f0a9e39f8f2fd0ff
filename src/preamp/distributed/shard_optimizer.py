# SPDX-License-Identifier: BSD-3-Clause
"""ZeRO-1: an optimizer whose masters and state are shared out among the ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn, optim

from preamp.core.errors import bad_state
from preamp.core.ranks import (
    TOGETHER,
    broadcast_from_first,
    has_process_group,
    share_of,
    unit_of_rows,
)
from preamp.core.tensors import in_memory_order, memory_order
from preamp.distributed.groups import collectives, default_group, require_group
from preamp.engine.agreement import compare_ranks
from preamp.engine.lookup import bare, engine_of
from preamp.engine.session import OptimizerSession
from preamp.kernels.stored import scales_shape
from preamp.optim import LARC, Twin, leaf_of, pair_of
from preamp.optim.fused.base import FusedOptimizer
from preamp.optim.fused.kinds import KINDS
from preamp.optim.fused.moments import is_scales, without_codes
from preamp.optim.part import Gate, Part, Span
from preamp.policy.storage import FULL, Storage

_BUCKET_BYTES = 32 * 2**20  # of all ranks' parts: what an exchange needs beside the weights


def span_of(elements: int, rank: int, world_size: int, unit: int = TOGETHER) -> tuple[int, int]:
    """The first element that ``rank`` has, and the one after its last."""
    share = share_of(elements, world_size, unit)
    return min(rank * share, elements), min((rank + 1) * share, elements)


def exchange_parts(
    tensors: Sequence[torch.Tensor], units: Sequence[int], group: dist.ProcessGroup
) -> None:
    """Complete ``tensors``, of which each rank has written a span; all call this in one order.

    ``units`` are those of `share_of`.
    """
    for bucket in _buckets(list(zip(tensors, units, strict=True))):
        _exchange(bucket, group)


def gather_parts(
    part: torch.Tensor, like: torch.Tensor, unit: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Put all ranks' vectors together in the form of ``like``; all of ``group`` call this.

    Ranks exchange them where ``like`` is, which the group reaches; the result is where ``part`` is.
    """
    whole = torch.empty_like(like, dtype=part.dtype)
    start, stop = span_of(whole.numel(), group.rank(), group.size(), unit)
    in_memory_order(whole)[start:stop] = part
    exchange_parts([whole], [unit], group)
    return whole.to(part.device)


_Bucket = list[tuple[torch.Tensor, int]]


def _buckets(tensors: _Bucket) -> Iterator[_Bucket]:
    open_ones: dict[tuple[torch.dtype, torch.device], _Bucket] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor, unit in tensors:
        key = (tensor.dtype, tensor.device)
        size = tensor.numel() * tensor.element_size()
        if key in open_ones and sizes[key] + size > _BUCKET_BYTES:
            yield open_ones.pop(key)
        sizes[key] = size if key not in open_ones else sizes[key] + size
        open_ones.setdefault(key, []).append((tensor, unit))
    yield from open_ones.values()


def _exchange(bucket: _Bucket, group: dist.ProcessGroup) -> None:
    rank, world_size = group.rank(), group.size()
    flat = [in_memory_order(tensor) for tensor, _ in bucket]
    units = [unit for _, unit in bucket]
    shares = [share_of(t.numel(), world_size, unit) for t, unit in zip(flat, units, strict=True)]
    own: Any = flat[0].new_zeros(sum(shares))
    for tensor, unit, place in zip(flat, units, own.split(shares), strict=True):
        start, stop = span_of(tensor.numel(), rank, world_size, unit)
        place[: stop - start] = tensor[start:stop]
    found: Any = own.new_empty(world_size, own.numel())
    collectives.all_gather(
        [row.view(torch.uint8) for row in found.unbind(0)], own.view(torch.uint8), group=group
    )
    for tensor, columns in zip(flat, found.split(shares, dim=1), strict=True):
        tensor.copy_(columns.reshape(-1)[: tensor.numel()])


State = dict[str, Any]


class Sharing:
    """How the ranks of a group share one optimizer's work; a `StepSharing`.

    Half weights have masters of which each rank keeps its part. Other parameters are updated as
    they are: while the optimizer steps, it sees this rank's part of them.
    """

    def __init__(self, session: OptimizerSession, group: dist.ProcessGroup) -> None:
        self.group = group
        self._session = session
        self._gate = Gate()
        storage: Storage = getattr(session.optimizer, "storage", FULL)
        self._by_rows = storage.moments != "float32"  # their blocks and noise go by rows
        self._direct: dict[int, tuple[torch.Tensor, Part]] = {}
        self._away: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []

    # -- what is shared ----------------------------------------------------------------------

    def share_out(self) -> None:
        """Keep this rank's part of everything that is whole. Mutates masters and state."""
        for param in self._session.params():
            twin, whole = pair_of(param), leaf_of(param)
            if whole.numel() <= 1 or self._part_of(param) is not None:
                continue
            span = span_of(
                whole.numel(), self.group.rank(), self.group.size(), self._unit_of(whole)
            )
            part = Part(*span, self._gate)
            state = self._state(param)
            own = self._own_state(state, whole, part)
            state.clear()
            state.update(own)
            if twin is None:
                self._direct[id(param)] = (param, part)
            else:
                twin.keep_part(part, part.of(twin.master.detach(), twin.half).clone())
        self._tell_spans()

    def put_together(self) -> None:
        """Give this rank back what the others have. All ranks call this."""
        for param, whole, part in list(self.shared()):
            state = self._state(param)
            state.update(self._gathered_state(state, whole, part))
            twin = pair_of(param)
            if twin is not None:
                twin.keep_part(None, self.gathered_master(twin))
        self._direct.clear()
        self._tell_spans()

    def _unit_of(self, whole: torch.Tensor) -> int:
        return unit_of_rows(whole.shape) if self._by_rows and whole.dim() > 1 else TOGETHER

    def _tell_spans(self) -> None:
        """Let a fused optimizer know what its vectors are parts of."""
        if isinstance(self._session.optimizer, FusedOptimizer):
            spans = {id(param): Span.of(part, whole) for param, whole, part in self.shared()}
            self._session.optimizer.spans = spans

    def shared(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, Part]]:
        """What is shared: what the optimizer has, the weight, and this rank's part of it."""
        for param in self._session.params():
            part = self._part_of(param)
            if part is not None:
                yield param, leaf_of(param), part

    def twins(self) -> list[Twin]:
        """Those of which this rank has a part."""
        return [twin for twin in self._session.masters or () if twin.part is not None]

    def part_of_state(self, place: int, state: State) -> State:
        """This rank's part of a parameter's loaded state; ``place`` is counted over all groups."""
        param = list(self._session.params())[place]
        part, whole = self._part_of(param), leaf_of(param)
        return state if part is None else self._own_state(state, whole, part)

    def whole_state(self, place: int, state: State) -> State:
        """Return such a state put together of all ranks' parts, on the CPU. All ranks call this."""
        param = list(self._session.params())[place]
        found = {id(p): (whole, part) for p, whole, part in self.shared()}
        if id(param) not in found:
            return state
        gathered = self._gathered_state(state, *found[id(param)])
        return {**state, **{key: value.cpu() for key, value in gathered.items()}}

    def gathered_master(self, twin: Twin) -> torch.Tensor:
        """All of a master. All ranks call this."""
        unit = self._unit_of(twin.half)
        return gather_parts(twin.master.detach(), twin.half, unit, self.group)

    def _part_of(self, param: torch.Tensor) -> Part | None:
        twin = pair_of(param)
        if twin is not None:
            return twin.part
        return self._direct.get(id(param), (param, None))[1]

    def _state(self, param: torch.Tensor) -> State:
        state = cast("dict[torch.Tensor, State]", self._session.optimizer.state)
        return state[param] if param in state else {}

    def _own_state(self, state: State, whole: torch.Tensor, part: Part) -> State:
        """This rank's part of a whole state, copied."""
        span, own = Span.of(part, whole), state
        if not span.has_whole_rows:
            own = without_codes(state)
        found: State = {}
        for key, value in own.items():
            if is_scales(own, key) and value.shape == scales_shape(whole.shape):
                found[key] = value[span.first_row : span.first_row + span.rows].clone()
            else:
                is_whole = _is_whole(key, value, whole)
                found[key] = part.of(value, whole).clone() if is_whole else value
        return found

    def _gathered_state(
        self, state: State, whole: torch.Tensor, part: Part
    ) -> dict[str, torch.Tensor]:
        """What of a state other ranks have parts of, put together. All ranks call this."""
        found: dict[str, torch.Tensor] = {}
        unit = self._unit_of(whole)
        for key, value in state.items():
            if is_scales(state, key):
                like = whole.new_empty(scales_shape(whole.shape), dtype=value.dtype)
                rows = unit * whole.shape[0] // whole.numel()
                unit_here = rows * like.shape[1]
                found[key] = gather_parts(value.view(-1), like, unit_here, self.group)
            elif _is_part(key, value, part):
                found[key] = gather_parts(value, whole, unit, self.group)
        return found

    # -- a step ------------------------------------------------------------------------------

    def begin(self, *, has_closure: bool) -> None:
        """Show the optimizer this rank's parts."""
        if has_closure:
            raise bad_state(
                "optimizer.step was called with a closure while ranks share its work",
                "During the step each rank has parts of the parameters, which no forward can "
                "run on",
                "Call the backward before optimizer.step(), without a closure",
            )
        if self._gate.is_open:
            return
        if any(p.grad is not None and p.grad.is_sparse for p, _ in self._direct.values()):
            raise bad_state(
                "A parameter has a sparse gradient while ranks share the optimizer's work",
                "Only dense gradients have parts",
                "Build the embedding with sparse=False",
            )
        for param, part in self._direct.values():
            data, grad = param.data, param.grad
            self._away.append((param, data, grad))
            param.grad = None
            param.data = in_memory_order(data)[part.start : part.stop]
            param.grad = None if grad is None else part.of(grad, data)
        self._gate.is_open = True

    def end(self) -> None:
        """Show everybody the whole parameters again."""
        for param, data, grad in self._away:
            param.grad = None
            param.data = data
            param.grad = grad
        self._away.clear()
        self._gate.is_open = False

    def exchange(self) -> None:
        """Complete the weights by the other ranks' parts. All ranks call this."""
        twins = self.twins()
        halves = [twin.half.detach() for twin in twins]
        direct = [param.detach() for param, _ in self._direct.values()]
        whole = [*halves, *direct]
        with torch.no_grad():
            exchange_parts(whole, list(map(self._unit_of, whole)), self.group)
        for twin in twins:
            twin.note_written()


def _is_whole(key: str, value: object, whole: torch.Tensor) -> bool:
    return key != "step" and isinstance(value, torch.Tensor) and value.shape == whole.shape


def _is_part(key: str, value: object, part: Part) -> bool:
    size = (part.stop - part.start,)
    return key != "step" and isinstance(value, torch.Tensor) and value.shape == size


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
        *(kind for kind in KINDS if kind.is_elementwise),
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
    _check_rows(session)
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
    sharing = engine_of(optimizer).sessions[id(bare(optimizer))].sharing
    if not isinstance(sharing, Sharing):  # as with one process
        is_mine = not has_process_group() or default_group().rank() == to
        return (model.state_dict(), optimizer.state_dict()) if is_mine else None
    is_mine = sharing.group.rank() == to
    for twin in sharing.twins():
        twin.settle()
        whole = sharing.gathered_master(twin)
        twin.gathered = whole.cpu() if is_mine else None
    try:
        weights: dict[str, Any] = model.state_dict() if is_mine else {}
    finally:
        for twin in sharing.twins():
            twin.gathered = None
    state = optimizer.state_dict()
    whole_states = {
        place: sharing.whole_state(place, state["state"][place]) for place in sorted(state["state"])
    }
    return (weights, {**state, "state": whole_states}) if is_mine else None


def _check_rows(session: OptimizerSession) -> None:
    """Refuse moments in fewer bits of weights whose rows are not one after the other."""
    storage: Storage = getattr(session.optimizer, "storage", FULL)
    for whole in map(leaf_of, session.params() if storage.moments != "float32" else ()):
        if whole.numel() > 1 and memory_order(whole)[0] != 0:
            raise bad_state(
                f"A weight {tuple(whole.shape)} with the strides {whole.stride()} got moments="
                f"{storage.moments!r}",
                "Ranks share out moments in fewer bits by rows, which must lie one after the other",
                "Make the weight contiguous before preamp.initialize, or keep float32 moments",
            )


class _TakePart:
    """Load-state-dict hook: each rank takes its part of a whole state."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing

    def __call__(self, optimizer: optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        saved = itertools.chain.from_iterable(group["params"] for group in state["param_groups"])
        places = {number: place for place, number in enumerate(saved)}
        own = {
            number: self._sharing.part_of_state(places[number], entry)
            for number, entry in state["state"].items()
        }
        return {**state, "state": own}


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
