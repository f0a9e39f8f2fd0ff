# SPDX-License-Identifier: BSD-3-Clause
"""Which parameters ranks hold parts of, and the sums that they take together."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist

from preamp.core.errors import bad_type, bad_value, with_article
from preamp.core.tensors import has_sharded, is_sharded

Group = Any  # dist.ProcessGroup, a name that builds of torch without torch.distributed lack
Groups = tuple[Group, ...]
Kind = Literal["tensor", "pipeline"]
KINDS = get_args(Kind)
TENSOR: Kind = "tensor"


class Splits:
    """Over which process groups parameters are split, so that sums over them are incomplete.

    A ``DTensor`` says so itself: the groups are those of the mesh dimensions it is sharded along.
    Along the others ranks hold copies, whose sums are complete. Plain tensors are told apart by
    the marks that Megatron and Apex set: ``param.tensor_model_parallel`` on a part of a larger
    weight, ``param.shared`` on a pipeline stage's copy of a weight that counts in another stage.
    """

    def __init__(self, given: Mapping[Group, Kind] | None = None) -> None:
        """Take the parameters as they are, and further groups that are ``given``.

        ``"tensor"`` where ranks hold parts or copies of the same parameters, ``"pipeline"`` where
        each rank has parameters of its own.
        """
        self.given: Mapping[Group, Kind] = given or {}
        self._tensor = tuple(g for g, kind in self.given.items() if kind == "tensor")
        self._pipeline = tuple(g for g, kind in self.given.items() if kind == "pipeline")
        self._of_mesh: dict[Hashable, tuple[Any, Groups]] = {}  # with the mesh: its id is its own
        self._device_of: dict[Group, str] = {}  # that its collectives run on, if it is known

    def concern(self, params: Sequence[torch.Tensor]) -> bool:
        """Whether any of ``params`` can be split at all; cheap where none is."""
        return bool(self.given) or has_sharded(params)

    def of(self, param: torch.Tensor) -> Groups:
        """The groups that ``param`` itself is cut over, always in one order."""
        own = self._meshes_of(param) if is_sharded(param) else ()
        if self._tensor and getattr(param, "tensor_model_parallel", False):
            return tuple(dict.fromkeys((*own, *self._tensor)))
        return own

    def sums_of(self, param: torch.Tensor) -> Groups | None:
        """Groups over which sums need `sum_`; ``None`` for a copy that is not counted here."""
        if self._pipeline and getattr(param, "shared", False):
            return None
        return tuple(dict.fromkeys((*self.of(param), *self._pipeline)))

    def kinds(self, over: Iterable[Groups | None]) -> dict[Groups, list[int]]:
        """Sort places by their groups.

        Ranks may have different parameters where groups are given, yet must add up alike: so
        there is an entry for every combination that another rank might have.
        """
        found: dict[Groups, list[int]] = {(): []}
        if self._tensor or self._pipeline:
            found[self._pipeline] = []
            found[(*self._tensor, *self._pipeline)] = []
        for place, groups in enumerate(over):
            if groups is not None:
                found.setdefault(groups, []).append(place)
        return found

    def every(self, over: Iterable[Groups]) -> Groups:
        """All groups in ``over`` and those given, in one order."""
        return tuple(dict.fromkeys([*(group for own in over for group in own), *self.given]))

    def _meshes_of(self, param: Any) -> Groups:
        mesh, placements = param.device_mesh, param.placements
        key = (id(mesh), placements)
        if key not in self._of_mesh:
            found = tuple(
                mesh.get_group(dim)
                for dim, placement in enumerate(placements)
                if not placement.is_replicate() and mesh.size(dim) > 1
            )
            self._of_mesh[key] = mesh, found
            self._device_of.update(dict.fromkeys(found, mesh.device_type))
        return self._of_mesh[key][1]

    def sum_(self, vectors: Sequence[torch.Tensor], over: Sequence[Groups]) -> None:
        """Add vectors of one dtype up over their groups, in place; all ranks call this alike."""
        self._reduce_(vectors, over, dist.ReduceOp.SUM)

    def max_(self, vectors: Sequence[torch.Tensor], over: Sequence[Groups]) -> None:
        """Take the largest value of each place instead; see `sum_`."""
        self._reduce_(vectors, over, dist.ReduceOp.MAX)

    def agree(self, vectors: list[torch.Tensor], params: Sequence[torch.Tensor]) -> None:
        """`max_` of vectors that were found in the parts of ``params``, one for each."""
        self.max_(vectors, [self.of(param) for param in params])

    def _reduce_(self, vectors: Sequence[torch.Tensor], over: Sequence[Groups], op: Any) -> None:
        places: dict[Group, list[int]] = {}
        for place, groups in enumerate(over):
            for group in groups:
                places.setdefault(group, []).append(place)
        for group, own in places.items():
            joined = torch.cat([vectors[place].reshape(-1) for place in own])
            there = joined.to(self._device_of.get(group, joined.device))
            cast("Any", dist).all_reduce(there, op=op, group=group)
            sizes = [vectors[place].numel() for place in own]
            pieces: Sequence[torch.Tensor] = cast("Any", there.to(joined.device)).split(sizes)
            for place, piece in zip(own, pieces, strict=True):
                vectors[place].copy_(piece.view_as(vectors[place]))


def meshes_of(params: Iterable[torch.Tensor]) -> list[Groups]:
    """The meshes of sharded ``params``: for each a group for each dimension with several ranks."""
    found: dict[int, Groups] = {}
    for param in params:
        if is_sharded(param):
            mesh = cast("Any", param).device_mesh
            if id(mesh) not in found:
                dims = (dim for dim in range(mesh.ndim) if mesh.size(dim) > 1)
                found[id(mesh)] = tuple(map(mesh.get_group, dims))
    return list(dict.fromkeys(groups for groups in found.values() if groups))


def splits_over(process_groups: Any) -> Splits:
    """Return the splits that ``initialize(process_groups=…)`` asks for.

    Given is ``None``; a group; several; or a mapping from groups to what they are for. Raises
    `TypeError` for anything else, and `ValueError` if this process is not in one of the groups, or
    a group is for something else.
    """
    if process_groups is None:
        return Splits()
    given: dict[Group, Kind]
    if isinstance(process_groups, Mapping):
        given = dict(cast("Mapping[Group, Kind]", process_groups))
    elif isinstance(process_groups, (list, tuple)):
        given = dict.fromkeys(cast("Sequence[Group]", process_groups), TENSOR)
    else:
        given = {process_groups: TENSOR}
    for group, kind in given.items():
        _check_group(group, kind)
    return Splits(given)


def _check_group(group: Group, kind: Any) -> None:
    if dist.is_available() and group is dist.GroupMember.NON_GROUP_MEMBER:
        raise bad_value(
            "process_groups has a group that this process is not in",
            "Each rank names the groups it is a member of",
            "Pass the group that torch.distributed.new_group made for this rank",
        )
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        raise bad_type(
            f"process_groups has {with_article(type(group).__name__)}",
            "Allowed are a torch.distributed.ProcessGroup, a list of them, or a mapping from "
            "each to 'tensor' or 'pipeline'",
            "Pass what torch.distributed.new_group or mesh.get_group() returned",
        )
    if kind not in KINDS:
        raise bad_value(
            f"process_groups says {kind!r} of a group",
            "Allowed are 'tensor', where ranks hold parts or copies of the same parameters, "
            "and 'pipeline', where each rank has parameters of its own",
            "Pass for example process_groups={tensor_group: 'tensor', stages: 'pipeline'}",
        )
