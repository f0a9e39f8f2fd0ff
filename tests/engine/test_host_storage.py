# SPDX-License-Identifier: BSD-3-Clause
"""`Storage(place="host")` without a device: the same training, and what is refused.

What moves there, and the numbers, is in ``tests/devices/test_host_storage.py``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import preamp
import preamp.parallel
from cases.levels import LEVELS
from kit.compare import same
from kit.loops import everything, train_step
from kit.refusals import assert_refused, refused
from kit.run import Net
from preamp.optim import LARC
from preamp.optimizers import FusedAdam, FusedMixedPrecisionLamb, FusedSGD
from preamp.policy.storage import describe_storage, storage_name

HOST = preamp.Storage(place="host")
adam = partial(FusedAdam, lr=0.01)


def start(build: Callable[..., Any] = adam, **more: Any) -> tuple[Net, Any]:
    torch.manual_seed(0)
    model = Net()
    options: dict[str, Any] = {"opt_level": "O5", "verbosity": 0, "storage": HOST, **more}
    return preamp.initialize(model, build(model.parameters()), **options)


@pytest.mark.parametrize("level", [case.name for case in LEVELS])
def test_on_the_cpu_it_is_the_same_training(level: str) -> None:
    device, host = (start(opt_level=level, storage=preamp.Storage(place=p)) for p in PLACES)
    for step in range(3):
        train_step(*device, step, poison=step == 1)
        train_step(*host, step, poison=step == 1)
    assert same(everything(*device), everything(*host))


PLACES: Any = ("device", "host")


@pytest.mark.parametrize("masters", ["float32", "split"])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_gradients_are_released_beside_it(level: str, masters: Any) -> None:
    """Without a device nothing goes anywhere, and all works that needs gradients of a step."""
    runs: list[tuple[Net, Any]] = []
    for place, releases in (("device", False), ("host", True)):
        storage = preamp.Storage(masters=masters, place=place, release_gradients=releases)
        model, optimizer = start(opt_level=level, storage=storage)
        for step in range(4):
            train_step(model, optimizer, step, poison=step == 1)
            preamp.clip_grad_norm_(optimizer, 0.1)
        runs.append((model, optimizer))
    assert same(*[everything(*run) for run in runs])


def test_both_are_told() -> None:
    storage = preamp.Storage(place="host", release_gradients=True)
    model, _ = start(storage=storage)
    text = preamp.engine_of(model).explain()
    assert 'place="host" moved nothing, all is on the CPU' in text
    assert storage_name(storage) == "Storage(release_gradients=True, place='host')"


def test_one_line_says_that_nothing_was_moved(capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = start(verbosity=1)
    said = 'place="host" moved nothing, all is on the CPU'
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if said in line] == [printed.rstrip("\n")]
    text = preamp.engine_of(model).explain()
    assert f"storage: {said}" in text
    assert "no synchronisation" in text


def test_it_has_a_name() -> None:
    split = preamp.Storage(masters="split", place="host")
    assert storage_name(split) == "Storage(masters='split', place='host')"
    assert describe_storage("split", "8bit", place="host").endswith("place='host')")
    assert storage_name(preamp.Storage(place="device")) == "full"


def test_an_unknown_place_is_refused() -> None:
    with refused("host_storage", "an unknown place"):
        preamp.Storage(place="cpu")  # pyright: ignore[reportArgumentType]


REFUSED: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "AdamW of torch": (partial(torch.optim.AdamW, lr=0.01), {}),
    "LARC": (lambda params: LARC(FusedSGD(params, lr=0.1)), {}),
    "copies": (FusedMixedPrecisionLamb, {}),
    "own masters": (partial(FusedAdam, capturable=True, master_weights=True), {}),
    "triton": (adam, {"backend": "triton"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_host_cannot_update_is_refused(name: str) -> None:
    build, more = REFUSED[name]
    model = Net()
    optimizer = build(model.parameters())
    options = {"opt_level": "O5", "verbosity": 0, "storage": HOST, **more}
    with refused("host_storage", name, model):
        preamp.initialize(model, optimizer, **options)
    preamp.initialize(model, adam(model.parameters()), opt_level="O5", verbosity=0)


def test_larc_around_it_later_is_refused() -> None:
    model, optimizer = start(partial(FusedSGD, lr=0.1))
    assert_refused("host_storage", "LARC later", LARC(optimizer).step, model, optimizer)


def test_what_ranks_share_out_is_taken() -> None:
    """By one rank; more are in ``tests/distributed`` and ``tests/devices``."""
    store: Any = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.Linear(4, 4)
        fully_shard(model)
        sharded = adam(model.parameters())
        preamp.initialize(model, sharded, opt_level="O5", storage=HOST, verbosity=0)
        assert preamp.engine_of(model).policy.storage == HOST
    finally:
        dist.destroy_process_group()
