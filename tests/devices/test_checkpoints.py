# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints of tensors on a device: few large copies, nothing that the host need not wait for."""

import gc
import weakref
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import preamp
from cases.waits import waits_refused
from devices.host_runs import without_pinned_memory
from kit import run as kit
from kit.compare import same
from kit.run import assert_alike, assert_same_program
from preamp.checkpoint import read_checkpoint, staging

IS_PRETENDED = torch.cuda.is_available() and torch.cuda.get_device_name() == "pretended"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
LEVELS = ("O1", "O2", "O5")
SMALL = 512  # bytes of a chunk, so that tensors are cut


def image() -> nn.Module:
    """Six parameters, and buffers that a forward changes."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(128, 7))
    return cast("Any", model).to(memory_format=torch.channels_last)


def wide() -> nn.Module:
    """16 equal weights, of which neither chunks nor single tensors are much."""
    return nn.Sequential(*(nn.Linear(128, 128) for _ in range(16)))


class Run(kit.Run):
    """A training on a device."""

    def __init__(
        self, level: str = "O2", make: Any = image, device: str = "cuda", **options: Any
    ) -> None:
        super().__init__(level, "FusedAdam", lambda: make().to(device), loss_scale=64.0, **options)
        batch = torch.linspace(-1, 1, 432).view(4, 3, 6, 6) if make is image else torch.ones(2, 128)
        self.batch = batch.to(device)

    def loss(self, index: int = 0) -> torch.Tensor:
        return self.model(self.batch).float().square().mean()

    def save(self, path: Any = None, **options: Any) -> Any:
        return preamp.save_checkpoint(path, self.model, self.optimizer, **options)

    def load(self, path: Any = None) -> Any:
        # The pretended device has no random generators.
        return preamp.load_checkpoint(path, self.model, self.optimizer, rng=False)

    def peak(self, call: Any, path: Path) -> float:
        """How many bytes for each parameter are allocated meanwhile, beyond those before."""
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call(path)
        elements = sum(param.numel() for param in self.model.parameters())
        return (torch.cuda.max_memory_allocated() - before) / elements


def _odd_tensors(device: str) -> dict[str, torch.Tensor]:
    """Each form of a tensor that is stored in a way of its own."""
    numbers = torch.arange(960.0, device=device)
    return {
        "bool": numbers > 5,
        "complex": torch.complex(numbers, -numbers).conj(),
        "double": numbers.double() / 3,
        "float8": numbers.to(torch.float8_e4m3fn),
        "half": numbers.half(),
        "empty": numbers[:0],
        "scalar": numbers[7].clone(),
        "odd bytes": torch.arange(13, device=device).to(torch.uint8),
        "channels last": numbers.view(2, 6, 8, 10).to(memory_format=torch.channels_last),
        "gaps": numbers.view(30, 32)[::2, 1:9],
        "spread": numbers[:4].view(4, 1).expand(4, 5),
        "twice": numbers,
        "again": numbers,
    }


def _content(path: Path) -> Any:
    content = read_checkpoint(path)
    return {key: value for key, value in content.items() if key != "rng"}


@pytest.mark.parametrize("chunk", [SMALL, staging.CHUNK])
def test_every_form_arrives_bitwise(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "CHUNK", chunk)
    here, there = _odd_tensors("cpu"), _odd_tensors("cuda:0")
    also_there = _odd_tensors("cuda:1") if torch.cuda.device_count() > 1 else {}
    extra = [here, there, also_there]
    preamp.save_checkpoint(tmp_path / "a", extra=extra)
    preamp.save_checkpoint(tmp_path / "b", extra=extra, asynchronous=True).wait()
    for name in ("a", "b"):
        first, second, third = _content(tmp_path / name)["extra"]
        assert same(first, second)
        assert same(first, third) or not also_there
        orders = {key: value.stride() for key, value in first.items()}
        assert {key: value.stride() for key, value in second.items()} == orders


@pytest.mark.parametrize("level", LEVELS)
def test_a_run_is_saved_and_loaded_bitwise(level: str, tmp_path: Path) -> None:
    run = Run(level).play("iterate")
    run.save(tmp_path / "device")
    other, host = Run(level, seed=1), Run(level, seed=2, device="cpu")
    for one in (other, host):
        one.iterate()
        one.load(tmp_path / "device")
    assert_alike(other, run)
    host.save(tmp_path / "host")
    assert same(_content(tmp_path / "host"), _content(tmp_path / "device"))
    assert_same_program("iterate", other, run)
    assert next(other.model.parameters()).is_cuda
    assert other.optimizer.state_dict()["state"][0]["exp_avg"].is_cuda


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("chunk", [SMALL, staging.CHUNK])
def test_training_goes_on_while_it_is_saved(
    level: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "CHUNK", chunk)
    run = Run(level).play("iterate")
    run.save(tmp_path / "before")
    saving = run.save(tmp_path / "meanwhile", asynchronous=True)
    run.iterate(*range(3))
    with torch.no_grad():
        for tensor in (*run.model.parameters(), *run.model.buffers()):
            tensor.zero_()
    saving.wait()
    assert same(_content(tmp_path / "meanwhile"), _content(tmp_path / "before"))


def test_copies_are_queued_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "CHUNK", SMALL)
    tensors = [torch.full((n,), float(n), device="cuda") for n in (3, 700, 5)]
    with waits_refused():
        finish = staging.download(tensors, waits=False)
        for tensor in tensors:
            tensor.zero_()
    assert [value.tolist() for value in finish()] == [[float(n)] * n for n in (3, 700, 5)]


@pytest.mark.skipif(not IS_PRETENDED, reason="waits are counted on the pretended device")
def test_waits_do_not_grow_with_the_tensors(tmp_path: Path) -> None:
    from devices.pretended.plugin import waits_counted

    def waits(layers: int) -> list[list[str]]:
        run = Run("O5", lambda: nn.Sequential(*(nn.Linear(128, 128) for _ in range(layers))))
        run.play("backward; step")
        path = tmp_path / str(layers)
        with waits_counted() as saved:
            run.save(path)
        with waits_counted() as queued:
            saving = run.save(path, asynchronous=True)
        saving.wait()
        return [saved, queued]

    saved, queued = waits(3)
    assert waits(30) == [saved, queued]
    # Only numbers of the manifest, such as the loss scale, are waited for before the copies.
    assert saved == [*queued, "Event.synchronize"]
    assert queued == ["_to_copy between cuda:0 and cpu"]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chunk, alive, most, sizes = 1 << 16, [], 0, []
    monkeypatch.setattr(staging, "CHUNK", chunk)
    empty = torch.empty

    def noted(*args: Any, **options: Any) -> torch.Tensor:
        nonlocal most, alive
        made = empty(*args, **options)
        if options.get("pin_memory"):
            alive = [ref for ref in alive if ref() is not None] + [weakref.ref(made)]
            most = max(most, len(alive))
            sizes.append(made.nbytes)
        return made

    run = {"large": torch.randn(300_000).cuda(), "small": torch.randn(100).cuda()}
    total = sum(tensor.nbytes for tensor in run.values())
    monkeypatch.setattr(torch, "empty", noted)
    for asynchronous in (False, True):
        sizes.clear()
        most = 0
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        preamp.save_checkpoint(tmp_path / "a", extra=run, asynchronous=asynchronous).wait()
        assert torch.cuda.max_memory_allocated() - before <= staging.AT_ONCE * chunk
        assert torch.cuda.memory_allocated() == before
        assert max(sizes) <= chunk
        assert sum(sizes) == total
        assert most == (len(sizes) if asynchronous else staging.AT_ONCE)


@pytest.mark.parametrize("storage", ["full", "split", "compact"])
def test_a_device_needs_no_room_for_a_second_copy_of_weights(
    storage: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(staging, "CHUNK", 1 << 13)
    run, path = Run("O5", wide, storage=storage).play("iterate 0 1"), tmp_path / "a"
    states = run.optimizer.state_dict()["state"].values()
    moments = sum(v.nbytes for own in states for v in own.values() if isinstance(v, torch.Tensor))
    elements = sum(param.numel() for param in run.model.parameters())
    # All that may be added, but a tensor's temporary values: of 16 tensors that is a sixteenth.
    some = 1.5
    assert run.peak(run.save, path) < some
    run.play("iterate")
    other = Run("O5", wide, storage=storage, seed=1)
    for one in (run, other):
        assert one.peak(one.load, path) < moments / elements + some
    assert_same_program("iterate", run, other)


def test_a_load_that_fails_puts_back_what_it_wrote_to(tmp_path: Path) -> None:
    run, path = Run("O5", wide, storage="compact").play("iterate 0 1"), tmp_path / "a"
    run.save(path)
    other, twin = (
        Run("O5", wide, storage="compact", seed=1).play("iterate 0 1 2") for _ in range(2)
    )

    def fail(_: Any) -> None:
        raise RuntimeError("planted")

    handle = other.optimizer.register_load_state_dict_post_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        other.load(path)
    handle.remove()
    assert_same_program(" | iterate 0 1", other, twin)


def test_a_default_device_changes_nothing(tmp_path: Path) -> None:
    run = Run("O5").play("iterate")
    run.save(tmp_path / "before", extra=[torch.arange(3)])
    with torch.device("cuda:0"):
        run.save(tmp_path / "a", extra=[torch.arange(3)])
        run.save(tmp_path / "b", extra=[torch.arange(3)], asynchronous=True).wait()
        other = Run("O5", seed=1)
        extra = other.load(tmp_path / "a")
    assert_alike(other, run)
    assert extra[0].device.type == "cpu"
    for name in ("a", "b"):
        assert same(_content(tmp_path / name), _content(tmp_path / "before"))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_host_without_pinned_memory_is_refused(
    asynchronous: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = Run()
    run.save(tmp_path / "a")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", without_pinned_memory)
        for call in (lambda path: run.save(path, asynchronous=asynchronous), run.load):
            with pytest.raises(preamp.PreampUnavailableError, match=r"no \d+ bytes of pinned"):
                call(tmp_path / "a")
    run.load(tmp_path / "a")


class Offloading(torch.optim.Optimizer):
    """Keeps what it is given."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("mean", torch.ones(3, device="cpu"))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        for number, entry in state_dict["state"].items():
            self.state[params[number]] = dict(entry)


def test_state_that_an_optimizer_keeps_on_the_host_is_not_of_the_file(tmp_path: Path) -> None:
    weight = nn.Linear(3, 1, bias=False).cuda()
    optimizer = Offloading(weight.parameters())
    optimizer.step()
    path = tmp_path / "a"
    preamp.save_checkpoint(path, weight, optimizer)
    preamp.load_checkpoint(path, weight, optimizer, rng=False)
    path.write_bytes(b"\xff" * path.stat().st_size)
    (entry,) = optimizer.state.values()
    assert entry["mean"].tolist() == [1.0, 1.0, 1.0]
