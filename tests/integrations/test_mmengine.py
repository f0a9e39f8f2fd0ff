# SPDX-License-Identifier: BSD-3-Clause
"""mmengine's Runner at opt levels: the numbers of a loop by hand, and its checkpoints."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.levels import WITH_MASTERS
from cases.tolerances import assert_same
from code_blocks import blocks_of
from integrations.small import (
    LEVELS,
    START,
    WARNINGS,
    ByHand,
    Net,
    assert_same_models,
    batches,
    bits,
    exact,
    fork_ranks,
    loss_of,
    near,
    needs,
    plain_losses,
    without_skips,
)

needs("mmengine.runner")
from mmengine.evaluator import BaseMetric
from mmengine.hooks import EMAHook
from mmengine.model import BaseModel, is_model_wrapper
from mmengine.registry import HOOKS
from mmengine.runner import Runner

import preamp.integrations.mmengine as _registered

pytestmark = WARNINGS
assert _registered.PreampOptimWrapper


class Model(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.losses: list[float] = []
        self.factor = 1.0

    def forward(self, x: Any, y: Any = None, mode: str = "tensor") -> Any:
        if mode != "loss":
            return self.net(x)
        loss = loss_of(self.net, (x, y))
        self.losses.append(loss.item())
        return {"loss": loss * self.factor}

    def init_weights(self) -> None:
        pass


def loss_in_forward(model: Any, batch: Any) -> torch.Tensor:
    """As mmengine has it, so that targets are inputs, which are half where weights are."""
    return model(*batch, mode="loss")["loss"]


class Data(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def first(rows: Any) -> Any:
    return rows[0]


def loader(data: Any) -> dict[str, Any]:
    return {
        "dataset": Data(data),
        "sampler": {"type": "DefaultSampler", "shuffle": False},
        "collate_fn": first,
        "batch_size": 1,
        "num_workers": 0,
    }


def run(
    folder: Path, level: str | None, data: Any, resume: bool = False, **more: Any
) -> tuple[Model, Runner]:
    model = more.pop("model", None) or Model()
    wrapper = {"optimizer": {"type": "AdamW", "lr": 0.02}, "clip_grad": {"max_norm": 0.5}}
    wrapper.update(more.pop("wrapper", {}))
    if level is not None:
        options = {**START, **more.pop("options", {})}
        wrapper.update(type="PreampOptimWrapper", opt_level=level, options=options)
    runner = Runner(
        model=model,
        work_dir=str(folder),
        train_dataloader=loader(data),
        train_cfg={"by_epoch": True, "max_epochs": more.pop("epochs", 1)},
        optim_wrapper=wrapper,
        default_hooks={
            "checkpoint": {"type": "CheckpointHook", "interval": 1},
            **more.pop("default_hooks", {}),
        },
        resume=resume,
        experiment_name=f"run{id(model)}",
        log_level="ERROR",
        **more,
    )
    runner.train()
    return model, runner


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("level", LEVELS)
def test_a_run_is_that_of_a_loop_by_hand(level: str, every: int, tmp_path: Path) -> None:
    data = batches(12)
    model, _ = run(tmp_path, level, data, wrapper={"accumulative_counts": every})
    hand = ByHand(level, Model(), loss_in_forward).run(data, every=every, clip=0.5)
    assert model.losses == hand.losses
    assert_same_models(model, hand.model)


@pytest.mark.parametrize("level", LEVELS)
def test_losses_are_those_of_mmengines_own_float32_run(level: str, tmp_path: Path) -> None:
    data = batches(30)
    own, _ = run(tmp_path / "own", None, data)
    assert own.losses == pytest.approx(plain_losses(data, 0.5), rel=1e-5)
    model, _ = run(tmp_path / "ours", level, data, options=without_skips(level))
    assert model.losses == near(own.losses, level)


@pytest.mark.parametrize("level", LEVELS)
def test_a_resumed_run_goes_on_to_the_bit(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # it keeps classes in its files
    data = batches(6)
    whole, runner = run(tmp_path / "whole", level, data, epochs=2)
    run(tmp_path / "half", level, data)
    saved = torch.load(tmp_path / "half" / "epoch_1.pth", weights_only=False)
    assert {value.dtype for value in saved["state_dict"].values()} == {torch.float32}
    rest, again = run(tmp_path / "half", level, data, resume=True, epochs=2)
    assert rest.losses == whole.losses[6:]
    assert_same_models(rest.net, whole.net)
    ours, theirs = again.optim_wrapper.state_dict(), runner.optim_wrapper.state_dict()
    assert ours["preamp"] == theirs["preamp"]


def test_a_skipped_step_changes_nothing(tmp_path: Path) -> None:
    model = Model()
    model.factor = 1e30
    before = exact(model)
    run(tmp_path, "O2", batches(1), model=model)
    for name, value in exact(model).items():
        assert_same(value, before[name])
    assert preamp.engine_of(model).steps_skipped == 1


class Overflowing(Model):
    """Its loss overflows in some iterations."""

    def __init__(self, *iterations: int) -> None:
        super().__init__()
        self.iterations = iterations

    def forward(self, x: Any, y: Any = None, mode: str = "tensor") -> Any:
        self.factor = 1e30 if len(self.losses) in self.iterations else 1.0
        return super().forward(x, y, mode)


SCHEDULE = {
    "param_scheduler": {"type": "ExponentialLR", "gamma": 0.5, "by_epoch": False, "end": 99},
    "default_hooks": {"param_scheduler": {"type": "PreampParamSchedulerHook"}},
}


@pytest.mark.parametrize(
    ("every", "at", "waits"), [(1, (), 0), (1, (1,), 1), (1, (1, 5), 2), (2, (3,), 1), (2, (2,), 1)]
)
def test_schedules_wait_for_skipped_steps(
    every: int, at: tuple[int, ...], waits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    options = {"max_loss_scale": 128.0}  # without skips of its own
    more: Any = {**SCHEDULE, "wrapper": {"accumulative_counts": every}, "options": options}
    _, runner = run(tmp_path, "O2", batches(6), model=Overflowing(*at), **more)
    assert runner.optim_wrapper.get_lr()["lr"] == [0.02 * 0.5 ** (6 - waits)]
    _, again = run(tmp_path, "O2", batches(6), resume=True, epochs=2, **more)
    assert again.optim_wrapper.get_lr()["lr"] == [0.02 * 0.5 ** (12 - waits)]


def test_values_are_clipped_on_masters(tmp_path: Path) -> None:
    clip = {"type": "value", "clip_value": 2.0**-6}
    _, runner = run(
        tmp_path, "O2", batches(1), wrapper={"clip_grad": clip}, options={"loss_scale": 64.0}
    )
    states = runner.optim_wrapper.optimizer.state.values()
    assert 0 < max(float(s["exp_avg"].abs().max()) for s in states) <= 0.1 * 2.0**-6 * 1.001


def test_a_backward_before_the_first_forward_is_refused() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper = _registered.PreampOptimWrapper(optimizer)
    with pytest.raises(preamp.PreampStateError, match="optim_context"):
        wrapper.update_params(torch.ones((), requires_grad=True))


def apex_wrapper() -> dict[str, Any]:
    """The wrapper that mmengine has for Apex, found under the alias."""
    preamp.install_apex_alias()
    wrapper_file: Any = importlib.import_module("mmengine.optim.optimizer.apex_optimizer_wrapper")
    wrapper_file.apex_amp = importlib.import_module("apex.amp")  # what it tried when imported
    return {"type": "ApexOptimWrapper", "opt_level": "O2", "verbosity": 0, "clip_grad": None}


def as_with_apex(rank: int) -> bool:
    del rank
    wrapper = apex_wrapper()
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    data = batches(8)
    model, _ = run(Path(), None, data, wrapper=dict(wrapper))
    hand = ByHand("O2", Model(), loss_in_forward).run(data)
    assert_same_models(model, hand.model)
    rest, _ = run(Path(), None, data, wrapper=dict(wrapper), resume=True, epochs=2)
    return rest.losses == hand.run(data).losses[8:]


def test_mmengines_wrapper_for_apex_works_through_the_alias(tmp_path: Path) -> None:
    assert fork_ranks(as_with_apex, tmp_path, 1) == [True]


class MeanError(BaseMetric):
    """What a runner evaluates with; it gathers the results of all ranks."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        outputs = torch.stack(data_samples)  # it hands them over one by one
        assert outputs.dtype is torch.float32
        self.results.append(nn.functional.mse_loss(outputs, data_batch[1]).item())

    def compute_metrics(self, results: list[float]) -> dict[str, float]:
        return {"error": sum(results) / len(results)}


VALIDATION = {
    "val_dataloader": loader(batches(4, seed=3)),
    "val_cfg": {},
    "val_evaluator": {"type": MeanError},
}


@pytest.mark.parametrize("level", LEVELS)
def test_validation_is_that_of_the_model(level: str, tmp_path: Path) -> None:
    model, runner = run(tmp_path, level, batches(6), **VALIDATION)
    with torch.no_grad():
        errors = [nn.functional.mse_loss(model(x), y).item() for x, y in batches(4, seed=3)]
    found = runner.message_hub.get_scalar("val/error").current()
    assert found == pytest.approx(sum(errors) / 4, rel=1e-6)


@pytest.fixture
def hook_of_the_page() -> Iterator[str]:
    """The name under which the page's hook for averages is registered meanwhile."""
    page = Path(__file__).parents[2] / "docs" / "frameworks.md"
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    (code,) = [block.code for block in blocks if block.reason == "needs mmengine.hooks"]
    exec(compile(code, str(page), "exec"), {})
    yield "ExactEMAHook"
    del HOOKS.module_dict["ExactEMAHook"]


@pytest.mark.parametrize("level", WITH_MASTERS)
def test_the_hook_on_the_page_averages_exact_weights(
    level: str, hook_of_the_page: str, tmp_path: Path
) -> None:
    data, options = batches(20), without_skips(level)
    plain, _ = run(tmp_path / "plain", level, data, epochs=2, options=options)
    hook = {"type": hook_of_the_page, "momentum": 0.25}
    more: Any = {"epochs": 2, "options": options, "custom_hooks": [hook], **VALIDATION}
    model, runner = run(tmp_path / "averaged", level, data, **more)
    assert_same_models(model, plain)  # which validation with averages has left alone
    (found,) = [hook for hook in runner.hooks if isinstance(hook, EMAHook)]
    saved = torch.load(tmp_path / "averaged" / "epoch_2.pth", weights_only=False)
    for name, value in found.ema_model.module.state_dict().items():
        assert value.dtype is torch.float32
        assert_same(saved["state_dict"][name], value, name)
        assert_same(saved["ema_state_dict"][f"module.{name}"], exact(model)[name], name)


def on_ranks(wrapped: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Arguments of `run` on several processes, with a wrapper for models."""
    return {"launcher": "pytorch", "cfg": {"model_wrapper_cfg": wrapped}, **more}


def ours(**more: Any) -> dict[str, Any]:
    return on_ranks({"type": "PreampDistributedDataParallel"}, **more)


def theirs(**more: Any) -> dict[str, Any]:
    # Its runner gives it a device's number, for CPUs too, unless it is told otherwise
    return on_ranks({"type": "MMDistributedDataParallel", "device_ids": None}, **more)


def start_rank() -> None:
    torch.distributed.init_process_group("gloo")  # mmengine's own start asks for CUDA
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"


def by_hand_on_ranks(level: str, data: Any, every: int, clip: float | None = 0.5) -> ByHand:
    """The loop by hand with torch's own wrapper."""
    hand = ByHand(level, Model())
    wrapped = nn.parallel.DistributedDataParallel(hand.model, broadcast_buffers=False)
    calls = itertools.count(1)

    def loss(_: Any, batch: Any) -> torch.Tensor:
        with wrapped.no_sync() if next(calls) % every else contextlib.nullcontext():
            return loss_in_forward(wrapped, batch)

    hand.loss = loss
    return hand.run(data, every=every, clip=clip)


def on_two(rank: int, level: str) -> dict[str, Any]:
    start_rank()
    data = batches(24)
    accumulation = {"accumulative_counts": 3}
    whole, runner = run(
        Path("whole"), level, data, **ours(wrapper=accumulation, epochs=2), **VALIDATION
    )
    hand = by_hand_on_ranks(level, 2 * data[rank::2], every=3)
    assert whole.losses == hand.model.losses
    assert_same_models(whole, hand.model)
    run(Path("half"), level, data, **ours(wrapper=accumulation))
    rest, again = run(
        Path("half"), level, data, resume=True, **ours(wrapper=accumulation, epochs=2)
    )
    assert rest.losses == whole.losses[12:]
    assert_same_models(rest, whole)
    states = [each.optim_wrapper.state_dict()["preamp"] for each in (runner, again)]
    assert states[0] == states[1]
    return {
        "weights": list(bits(exact(whole).values())),
        "error": float(runner.message_hub.get_scalar("val/error").current()),
    }


@pytest.mark.parametrize("level", LEVELS)
def test_two_processes_train_one_model(level: str, tmp_path: Path) -> None:
    one, other = fork_ranks(functools.partial(on_two, level=level), tmp_path)
    assert one == other


def agree(rank: int) -> list[str]:
    del rank
    start_rank()
    data = batches(60)
    own, _ = run(Path("own"), None, data, **theirs())
    for level in LEVELS:
        model, runner = run(Path(level), level, data, **ours(options=without_skips(level)))
        assert model.losses == near(own.losses, level)
        assert is_model_wrapper(runner.model)
    run(Path("O1"), "O1", data, **theirs())
    refused: list[str] = []
    for level in WITH_MASTERS:
        with pytest.raises(preamp.PreampStateError) as raised:
            run(Path("refused"), level, data, **theirs())
        refused.append(str(raised.value))
    return refused


def as_with_apex_on_two(rank: int) -> list[list[int]]:
    start_rank()
    data = batches(24)
    model, _ = run(Path(), None, data, **ours(wrapper=apex_wrapper()))
    assert all(value.dtype is torch.float16 for value in model.parameters())
    hand = by_hand_on_ranks("O2", data[rank::2], every=1, clip=None)
    assert_same_models(model, hand.model)
    return list(bits(exact(model).values()))


def test_mmengines_wrapper_for_apex_trains_on_two_processes(tmp_path: Path) -> None:
    one, other = fork_ranks(as_with_apex_on_two, tmp_path)
    assert one == other


def test_on_two_processes_losses_are_those_of_mmengines_own_float32_run(tmp_path: Path) -> None:
    refused, _ = fork_ranks(agree, tmp_path)
    for message in refused:  # without our wrapper, at levels that cast weights
        assert 'model_wrapper_cfg = dict(type="PreampDistributedDataParallel")' in message
