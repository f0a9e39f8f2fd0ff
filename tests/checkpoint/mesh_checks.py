# SPDX-License-Identifier: BSD-3-Clause
"""What four ranks check about checkpoints of tensors over meshes of several dimensions."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import preamp
from checkpoint.rank_checks import shared_folder
from checkpoint.sharded_runs import Run
from engine.harness import same
from preamp.checkpoint import gathering
from preamp.core.tensors import local_of

RANKS = 4


def check_blocks_of_every_kind() -> None:
    """Uneven, empty and copied ones; each is on the disk once, and comes back whole."""
    mesh, folder = init_device_mesh("cpu", (2, 2)), shared_folder()
    kinds = [Shard(0), Shard(1), Replicate()]
    given = {
        f"{shape} {one} {two}": distribute_tensor(
            torch.arange(shape[0] * shape[1]).reshape(shape), mesh, [one, two]
        )
        for shape in ((5, 3), (1, 2), (4, 4), (0, 2))
        for one in kinds
        for two in kinds
        if not (one == two and one.is_shard() and (shape[0] % 4 or shape[1] % 4))
    }
    preamp.save_checkpoint(folder / "a", extra=given)
    back = preamp.load_checkpoint(folder / "a")
    for name, value in given.items():
        assert torch.equal(back[name], value.full_tensor()), name
    elements = sum(
        value.numel()
        for file in (folder / "a").iterdir()
        for name, value in torch.load(file, weights_only=True)["tensors"].items()
        if name.startswith("extra")
    )
    assert elements == sum(value.numel() for value in given.values())


def check_what_is_no_block_is_refused() -> None:
    mesh, folder = init_device_mesh("cpu", (RANKS,)), shared_folder()
    terms = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(preamp.PreampStateError, match="do not hold one block"):
        preamp.save_checkpoint(folder / "a", extra=terms)
    copies = distribute_tensor(torch.ones(2), mesh, [Replicate()])
    if dist.get_rank() == 2:
        local_of(copies)[0] = 2.0
    with pytest.raises(preamp.PreampStateError, match="Rank 2 has other values"):
        preamp.save_checkpoint(folder / "a", extra=copies)
    dist.barrier()  # the first rank takes its folder away
    assert list(folder.iterdir()) == []


def check_pieces_of_several_tensors_are_refused() -> None:
    """Stages of a pipeline whose tensors have the same names: no rank could load what was saved."""
    mesh, folder = (
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data")),
        shared_folder(),
    )
    stage = mesh.get_local_rank("stage")
    rows = distribute_tensor(torch.ones(4, 4), mesh["data"], [Shard(0)])
    others = {
        "rank 0 has another tensor than rank 2": (
            distribute_tensor(torch.ones(6, 4), mesh["data"], [Shard(0)]),
            distribute_tensor(torch.ones(4, 4).double(), mesh["data"], [Shard(0)]),
            torch.ones(4, 4),
        ),
        "what the ranks have overlaps": (
            distribute_tensor(torch.ones(4, 4), mesh["data"], [Shard(1)]),
        ),
    }
    for reason, tensors in others.items():
        for other in tensors:
            with pytest.raises(preamp.PreampStateError, match=f"'extra' do not .*: {reason}"):
                preamp.save_checkpoint(folder / "a", extra=(rows, other)[stage])
    own = {f"stage {stage}": (rows, others["what the ranks have overlaps"][0])[stage]}
    preamp.save_checkpoint(folder / "a", extra=own)
    back = preamp.load_checkpoint(folder / "a")  # on as many ranks
    assert {key: value.sum() for key, value in back.items()} == {f"stage {stage}": 16.0}


def check_groups_that_hold_copies() -> None:
    """``fully_shard`` over one dimension of a mesh, copies along the other."""
    folder, mesh = shared_folder(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "cut"))
    run = Run("O2", "fsdp", mesh=mesh)
    run.step()
    run.save(folder / "a")
    before = run.numbers()
    run.step()
    other = Run("O2", "fsdp", seed=1, mesh=mesh)
    other.load(folder / "a")
    assert same(other.numbers(), before)
    other.step()
    assert same(other.numbers(), run.numbers())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering, "gathered", None)  # details of all tensors are not needed
        run.save(folder / "b")
    over_all = Run("O2", "fsdp", seed=2)
    over_all.load(folder / "a")
    other.load(folder / "a")
    assert same(over_all.whole(), other.whole())
    for one in (run, other, over_all):
        one.close()
