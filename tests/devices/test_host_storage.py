# SPDX-License-Identifier: BSD-3-Clause
"""Masters and moments on the host: the numbers of the same storage on the device, bit by bit.

What only concerns gradients that wait there too is in ``test_release_on_the_host.py``.
"""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

import preamp
import preamp.kernels
from cases.plain import counted
from cases.waits import waits_refused
from devices.host_runs import (
    KINDS,
    LOOPS,
    STORAGES,
    Kept,
    Run,
    assert_same,
    carry_over,
    every_level,
    ids,
    overflowing,
    plain,
    there,
    with_masters,
    without_pinned_memory,
)
from preamp.core.errors import PreampStateError, PreampUnavailableError
from preamp.kernels import Update, staged
from preamp.kernels.rules import LambRule
from preamp.optimizers import FusedAdam, FusedLion, FusedSGD

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.usefixtures("small_runs"),
]


def both(
    train: Callable[[Run], None], place: str, kept: Kept, kind: str = "FusedLion"
) -> tuple[Run, Run]:
    """Train on the device and at ``place``, compare, and return the runs.

    A batch norm stays float32. Where others' gradients are added up on the host, and its own are
    not, the norm of all is added up in another order than on the device.
    """
    norm = nn.LayerNorm if place == "host" else nn.BatchNorm1d
    device, host = (Run(one, kept, kind, norm=norm) for one in ("device", place))
    for run in (device, host):
        train(run)
    assert_same(device, host)
    return device, host


# -- numbers, wherever gradients are ------------------------------------------------------------


@pytest.mark.parametrize("train", LOOPS)
@pytest.mark.parametrize("kind", KINDS)
@every_level
@there
def test_the_host_trains_as_the_device(
    place: str, kept: Kept, kind: str, train: Callable[[Run], None]
) -> None:
    if kind == "FusedLARS":
        kept = kept[0], "full"  # it keeps nothing in fewer bits
    device, host = both(train, place, kept, kind)
    assert {tensor.device.type for tensor in host.state()} <= {"cpu"}
    assert {p.device.type for p in host.net.parameters()} == {"cuda"}
    skipped = train is overflowing and host.engine.policy.is_dynamic
    assert host.engine.steps_skipped == device.engine.steps_skipped == int(skipped)


# -- states from one place to another ------------------------------------------------------------

WAYS = [("host", "device"), ("device", "host"), ("host", "host")]
WAYS_OF_RELEASED = [("released", "device"), ("device", "released"), ("released", "released")]


@pytest.mark.parametrize("way", WAYS + WAYS_OF_RELEASED, ids=ids)
@with_masters
def test_a_checkpoint_goes_on_at_either_place(
    kept: Kept, way: tuple[str, str], tmp_path: Path
) -> None:
    first, second = Run(way[0], kept), Run(way[1], kept)
    first.steps()
    second.steps(1)
    carry_over(first, second, tmp_path)
    for run in (first, second):
        run.backward()
        run.backward()
        preamp.clip_grad_norm_(run.optimizer, 0.5)
        run.end()
        run.steps()
    assert_same(first, second)
    assert {t.device.type for t in second.state()} == {"cuda" if way[1] == "device" else "cpu"}


@pytest.mark.parametrize("way", WAYS, ids=ids)
@with_masters
def test_state_dicts_go_on_at_either_place(kept: Kept, way: tuple[str, str]) -> None:
    first, second = Run(way[0], kept), Run(way[1], kept)
    first.steps()
    saved = first.net.state_dict(), first.optimizer.state_dict(), first.engine.state_dict()
    saved = tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, saved)
    first.steps()
    second.steps(1)
    second.net.load_state_dict(saved[0])
    second.optimizer.load_state_dict(saved[1])
    assert {t.device.type for t in second.state()} == {"cpu" if way[1] == "host" else "cuda"}
    second.engine.load_state_dict(saved[2])
    second.number = 3
    second.steps()
    assert_same(first, second)


def test_state_made_before_initialize_moves_there_and_back() -> None:
    net = nn.Linear(4, 4).cuda()
    optimizer = FusedAdam(net.parameters())
    net(torch.ones(2, 4).cuda()).sum().backward()
    optimizer.step()
    before = [entry["exp_avg"].cpu() for entry in optimizer.state.values()]
    preamp.initialize(
        net, optimizer, opt_level="O5", storage=preamp.Storage(place="host"), verbosity=0
    )
    there = [entry["exp_avg"] for entry in optimizer.state.values()]
    assert {tensor.device.type for tensor in there} == {"cpu"}
    preamp.engine_of(net).close()
    back = [entry["exp_avg"] for entry in optimizer.state.values()]
    assert {tensor.device.type for tensor in back} == {"cuda"}
    assert [torch.equal(a.cpu(), b) for a, b in zip(back, before, strict=True)] == [True, True]


# -- around the step -----------------------------------------------------------------------------


@with_masters
def test_nothing_waits_but_the_step(kept: Kept) -> None:
    run = Run("host", kept)
    for _ in range(2):
        run.backward()
        preamp.clip_grad_norm_(run.optimizer, 0.5)
        run.end()
    inputs, targets = torch.ones(32, 16).cuda(), torch.ones(32, 4).cuda()
    for _ in range(2):
        with waits_refused():
            loss = nn.functional.mse_loss(run.net(inputs).float(), targets)
            with preamp.scale_loss(loss, run.optimizer) as scaled:
                scaled.backward()
            preamp.clip_grad_norm_(run.optimizer, 0.5)
        run.optimizer.step()
        with waits_refused():
            run.optimizer.zero_grad()


@pytest.mark.parametrize("storage", ["full", "split"])
def test_a_model_that_moves_after_initialize_leaves_masters_there(storage: str) -> None:
    nets: list[nn.Module] = []
    for place in ("device", "host"):
        torch.manual_seed(0)
        net = nn.Linear(16, 4)
        optimizer = FusedLion(net.parameters(), lr=1e-2)
        keeps: Any = preamp.Storage(place=place, **STORAGES[storage])  # pyright: ignore
        preamp.initialize(
            net, optimizer, opt_level="O5", storage=keeps, backend="reference", verbosity=0
        )
        nets.append(net.cuda())
        for number in range(3):
            loss = net(torch.full((2, 16), 0.5**number).cuda()).float().square().mean()
            with preamp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
        masters = {p.device.type for p in preamp.master_params(optimizer)}
        assert masters == {"cpu" if place == "host" else "cuda"}
    pairs = zip(*(net.parameters() for net in nets), strict=True)
    assert [torch.equal(a, b) for a, b in pairs] == [True, True]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device")
def test_a_model_on_two_devices() -> None:
    found: list[list[torch.Tensor]] = []
    for place in ("device", "host"):
        torch.manual_seed(0)
        first, last = nn.Linear(16, 64).to("cuda:0"), nn.Linear(64, 4).to("cuda:1")
        net = nn.ModuleList([first, last])
        optimizer = FusedLion(net.parameters(), lr=1e-2)
        keeps: Any = preamp.Storage(place=place)  # pyright: ignore
        preamp.initialize(
            net, optimizer, opt_level="O2", storage=keeps, backend="reference", verbosity=0
        )
        for number in range(3):
            inputs = torch.full((2, 16), 0.5**number, dtype=torch.float16, device="cuda:0")
            loss = last(first(inputs).to("cuda:1")).float().square().mean()
            with preamp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            preamp.clip_grad_norm_(optimizer, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        found.append([p.detach().cpu() for p in preamp.master_params(optimizer)])
    assert [torch.equal(a, b) for a, b in zip(*found, strict=True)] == [True] * 4


# -- exact weights, copies, words ----------------------------------------------------------------


@with_masters
def test_exact_weights_and_copies_are_on_the_device(kept: Kept) -> None:
    run = Run("host", kept)
    run.steps()
    exact = [value.detach().cpu().clone() for value in run.values()]
    assert_are(exact, copy.deepcopy(run.net))
    with run.engine.exact_weights():
        assert_are(exact, run.net)
        with torch.no_grad():
            for param in run.net.parameters():
                param.mul_(1.5)
    written = [value.detach().cpu().clone() for value in run.values()]
    assert [torch.equal(a * 1.5, b) for a, b in zip(exact, written, strict=True)] == [True] * 6
    run.steps()
    exact = [value.detach().cpu().clone() for value in run.values()]
    run.engine.close()
    assert_are(exact, run.net)
    run.net(torch.ones(2, 16).cuda()).sum().backward()
    run.end()  # its moments came back as well


def assert_are(exact: list[torch.Tensor], found: nn.Module) -> None:
    params = list(found.parameters())
    assert {(p.device.type, p.dtype) for p in params} == {("cuda", torch.float32)}
    assert [torch.equal(p.cpu(), e) for p, e in zip(params, exact, strict=True)] == [True] * 6


def test_a_copied_model_is_one_of_the_device() -> None:
    _, host = both(plain, "host", ("O5", "split"))
    net = copy.deepcopy(host.net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    before = [param.detach().clone() for param in net.parameters()]
    net(torch.ones(2, 16).cuda()).sum().backward()
    optimizer.step()
    changed = [not torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True)]
    assert changed == [True] * 6


@there
def test_explain_says_where_things_are(place: str) -> None:
    text = Run(place, ("O2", "full")).engine.explain()
    assert "storage: masters and moments lie on the host, which makes the update" in text
    behind = ", and for gradients behind the last two" if place == "released" else ""
    assert f"one host synchronisation per step{behind}" in text
    goes = "storage: each gradient goes to the host as soon as it is made" in text
    assert goes == (place == "released")
    assert "on the host" not in Run("device", ("O2", "full")).engine.explain()


# -- refusals ------------------------------------------------------------------------------------


def test_a_graph_is_refused_and_nothing_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    for level in ("O2", "O5"):
        run = Run("host", (level, "full"))
        run.steps()
        run.backward()
        before = run.everything()
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(PreampStateError, match=r"captured in a CUDA graph.*place=\"device\""):
            run.optimizer.step()
        monkeypatch.undo()
        assert_unchanged(run, before)


@there
@with_masters
def test_pinned_memory_that_cannot_be_had_changes_nothing(
    kept: Kept, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, other = Run(place, kept), Run(place, kept)
    for one in (run, other):
        one.steps()
        one.backward()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", without_pinned_memory)
        with pytest.raises(PreampUnavailableError, match=r"no \d+ bytes of pinned memory"):
            run.optimizer.step()
    for one in (run, other):
        one.end()
    assert_same(run, other)


def test_without_pinned_memory_there_is_no_such_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", without_pinned_memory)
    with pytest.raises(PreampUnavailableError, match="no 16384 bytes of pinned memory"):
        Run("host", ("O5", "full"))  # whose largest weight has 16 x 256 elements


def assert_unchanged(run: Run, before: list[torch.Tensor]) -> None:
    pairs = zip(run.everything(), before, strict=True)
    assert [torch.equal(now, then) for now, then in pairs] == [True] * len(before)


# -- ops -----------------------------------------------------------------------------------------


def test_pinned_memory_is_that_of_three_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    make = staged.pinned

    def counted(size: int, *words: str) -> torch.Tensor:
        sizes.append(size)
        return make(size, *words)

    monkeypatch.setattr(staged, "pinned", counted)
    ops = preamp.kernels.backend("reference", "host")
    sources = [torch.randn(512) for _ in range(9)]
    targets = [torch.empty(512, dtype=torch.bfloat16, device="cuda") for _ in sources]
    ops.cast_copy_(sources, targets)
    assert sizes == [4096] * 3
    assert [torch.equal(t.cpu(), s.bfloat16()) for t, s in zip(targets, sources, strict=True)] == [
        True
    ] * 9
    sizes.clear()
    ops.cast_copy_([torch.randn(4097)], [torch.empty(4097, dtype=torch.bfloat16, device="cuda")])
    assert sizes == [8256]  # of a tensor that is larger than a run


def test_memory_is_used_again_once_it_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pretended device does not show it: there copies to the device are never late."""
    events, streams = list[str](), list[str]()
    synchronize, wait_stream = torch.cuda.Event.synchronize, torch.cuda.Stream.wait_stream

    def note_synchronize(event: Any) -> None:
        events.append("waited for")
        synchronize(event)

    def note_wait(stream: Any, other: Any) -> None:
        current = torch.cuda.current_stream()
        streams.append("training waits" if stream == current else "copies wait")
        wait_stream(stream, other)

    monkeypatch.setattr(torch.cuda.Event, "synchronize", note_synchronize)
    monkeypatch.setattr(torch.cuda.Stream, "wait_stream", note_wait)
    ops = preamp.kernels.backend("reference", "host")
    wides = [torch.zeros(2048) for _ in range(9)]
    halves = [torch.ones(2048, dtype=torch.bfloat16, device="cuda") for _ in wides]
    lows = [torch.zeros(2048, dtype=torch.int16) for _ in wides]
    ops.join_(halves, lows, wides)
    # Nine have come, and three times three shared memory, of which the last three did not wait.
    assert events == ["waited for"] * (9 + 6)
    assert streams == ["copies wait", "copies wait", "training waits"]
    assert torch.equal(torch.stack(wides), torch.ones(9, 2048))


@pytest.mark.parametrize("form", ["rows", "transposed", "channels last", "with gaps"])
def test_forms_of_memory_are_kept(form: str) -> None:
    make: dict[str, Callable[[], torch.Tensor]] = {
        "rows": lambda: torch.randn(4, 6, 2, 3),
        "transposed": lambda: torch.randn(4, 6, 2, 3).transpose(0, 1),
        "channels last": lambda: torch.randn(4, 6, 2, 3).to(memory_format=torch.channels_last),
        "with gaps": lambda: torch.randn(4, 6, 2, 8)[..., :3],
    }
    wide = make[form]()
    half = wide.bfloat16().cuda()
    strides = half.stride()
    low = torch.empty_like(wide, dtype=torch.int16)
    ops = preamp.kernels.backend("reference", "host")
    ops.split_([wide], [half], [low])
    joined = torch.zeros_like(wide)
    ops.join_([half], [low], [joined])
    assert torch.equal(joined, wide)
    assert half.stride() == strides


def test_norms_of_parts_are_taken_there() -> None:
    """As where LAMB's tensors are parts of larger ones."""
    rule = LambRule(
        lr=0.1,
        weight_decay=0.1,
        beta1=0.9,
        beta2=0.99,
        eps=1e-6,
        decoupled=True,
        bias_correction=True,
        grad_averaging=True,
        uses_trust_ratio=True,
    )
    lists = [[torch.randn(600) for _ in range(5)] for _ in range(4)]
    lists[3] = [squares.abs() for squares in lists[3]]
    update = Update(step=3, inv_scale=torch.tensor(0.5))
    expected = preamp.kernels.backend("reference").lamb_norms(*lists, rule=rule, update=update)
    grads = [grad.cuda() for grad in lists[1]]
    there = replace(update, inv_scale=torch.tensor(0.5).cuda())
    ops = preamp.kernels.backend("reference", "host")
    found = ops.lamb_norms(lists[0], grads, *lists[2:], rule=rule, update=there)
    assert torch.equal(found, expected)


def test_places_of_one_device_are_left_to_it() -> None:
    ops = preamp.kernels.backend("reference", "host")
    sources = [torch.ones(3), torch.ones(3), torch.ones(3).cuda()]
    targets = [torch.zeros(3), torch.zeros(3).cuda(), torch.zeros(3).cuda()]
    ops.cast_copy_(sources, targets)
    assert [target.tolist() for target in targets] == [[1.0] * 3] * 3


def test_a_step_that_finds_no_pinned_memory_is_not_half_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.BatchNorm1d(256)).cuda()
    groups = [{"params": [*layer.parameters()]} for layer in model]
    optimizer = FusedAdam(groups, lr=1e-2)
    storage = preamp.Storage(place="host")
    preamp.initialize(model, optimizer, opt_level="O5", storage=storage, verbosity=0)
    for number in range(2):
        with preamp.scale_loss(model(torch.randn(8, 16, device="cuda")).sum(), optimizer) as loss:
            loss.backward()
        before = [param.detach().cpu().clone() for param in model.parameters()]
        if number == 0:
            optimizer.step()
            optimizer.zero_grad()
    given, empty = [1], torch.empty  # how many times there is some

    def scarce(*sizes: Any, **options: Any) -> torch.Tensor:
        if options.get("pin_memory") and not given:
            raise RuntimeError("out of memory")
        if options.get("pin_memory"):
            given.pop()
        return empty(*sizes, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", scarce)
        with contextlib.suppress(PreampUnavailableError):
            optimizer.step()
    taken = [
        not torch.equal(p.detach().cpu(), b)
        for p, b in zip(model.parameters(), before, strict=True)
    ]
    assert taken in ([True] * len(before), [False] * len(before))
    assert [group["step"] for group in optimizer.param_groups] == [1 + taken[0]] * 2


# -- bytes ---------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Any] = {
    "FusedAdam": FusedAdam,
    "FusedLion": FusedLion,
    "FusedSGD(lr=0.1, momentum=0.9)": lambda params: FusedSGD(params, lr=0.1, momentum=0.9),
}
KEPT = [(level, "float32") for level in ("O0", "O1", "O2", "O4", "O5")]
KEPT += [(level, "split") for level in ("O2", "O5")]


@pytest.mark.parametrize(("level", "masters"), KEPT)
@pytest.mark.parametrize("text", OPTIMIZERS)
@pytest.mark.parametrize("moments", ["float32", "bfloat16", "8bit"])
def test_both_places_are_counted_as_estimated(
    moments: Any, text: str, level: str, masters: Any
) -> None:
    storage = preamp.Storage(masters=masters, moments=moments, place="host")
    model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.Linear(128, 64)).cuda()
    policy = preamp.OPT_LEVELS[level].replace(storage=storage)
    found = preamp.estimate(model, policy, text)
    optimizer = OPTIMIZERS[text](model.parameters())
    batch = torch.ones(4, 64, device="cuda")
    assert counted(model, optimizer, level, batch, storage=storage) == found.categories
    assert found.on_device < found.total
