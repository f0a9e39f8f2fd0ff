# SPDX-License-Identifier: BSD-3-Clause
"""`Storage(place="host")` without a device: the same training, and what is refused.

What moves there, and the numbers, is in ``tests/devices/test_host_storage.py``.
"""

from __future__ import annotations

import re
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
from kit.run import Net
from preamp.core.errors import PreampError, PreampStateError
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
    words = "Storage got place='cpu'. It takes 'device', 'host'. Check the spelling."
    with pytest.raises(ValueError, match=re.escape(words)):
        preamp.Storage(place="cpu")  # pyright: ignore[reportArgumentType]


def larc(params: Any) -> Any:
    return LARC(FusedSGD(params, lr=0.1))


REFUSED: dict[str, tuple[Callable[..., Any], dict[str, Any], type[Exception], str]] = {
    "torch's": (
        partial(torch.optim.AdamW, lr=0.01),
        {},
        TypeError,
        'storage has place="host", and an optimizer is an AdamW. Masters and moments lie on the '
        "host with FusedAdam, FusedADOPT, FusedAdagrad, FusedLAMB, FusedLARS, FusedLion, "
        "FusedNovoGrad, FusedSGD, which take gradients and half weights there in one pass. "
        'Choose one of these, or a storage with place="device".',
    ),
    "LARC": (larc, {}, TypeError, "an optimizer is a LARC"),
    "copies": (FusedMixedPrecisionLamb, {}, TypeError, "is a FusedMixedPrecisionLamb"),
    "own masters": (
        partial(FusedAdam, capturable=True, master_weights=True),
        {},
        TypeError,
        "is a FusedAdam with master_weights=True",
    ),
    "triton": (
        adam,
        {"backend": "triton"},
        PreampError,
        "storage has place=\"host\" beside backend='triton'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_host_cannot_update_is_refused(case: str) -> None:
    build, more, kind, words = REFUSED[case]
    model = Net()
    optimizer = build(model.parameters())
    before = [(param, param.dtype) for param in model.parameters()]
    with pytest.raises(kind, match=re.escape(words)):
        preamp.initialize(
            model, optimizer, **{"opt_level": "O5", "verbosity": 0, "storage": HOST, **more}
        )
    assert [param.dtype for param, _ in before] == [dtype for _, dtype in before]
    preamp.initialize(model, adam(model.parameters()), opt_level="O5", verbosity=0)


def test_larc_around_it_later_is_refused() -> None:
    model, optimizer = start(partial(FusedSGD, lr=0.1))
    before = [param.detach().clone() for param in model.parameters()]
    wrapped = LARC(optimizer)
    with pytest.raises(PreampStateError, match='LARC was used with storage that has place="host"'):
        wrapped.step()
    now = list(model.parameters())
    assert [torch.equal(a, b) for a, b in zip(now, before, strict=True)] == [True] * len(now)


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
