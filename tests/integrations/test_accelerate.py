# SPDX-License-Identifier: BSD-3-Clause
"""Accelerate at opt levels: the contract of a loop, what else its script calls, and FSDP2."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.tolerances import assert_same
from distributed.ranks import needs_fully_shard
from integrations.contract import (
    START,
    WARNINGS,
    Contract,
    Loop,
    Net,
    batches,
    be_accelerators,
    fork_ranks,
    loss_of,
    make_optimizer,
    needs,
)
from kit.refusals import refused
from preamp.optimizers import FusedAdam

accelerate = needs("accelerate")
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from preamp.integrations.accelerate import Accelerator

pytestmark = WARNINGS


def forget_accelerators() -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


@pytest.fixture(autouse=True)
def no_accelerator_left() -> Iterator[None]:
    yield
    forget_accelerators()


class Run(Loop):
    """A training script as Accelerate's documentation has it; the ``plugin`` may shard it."""

    def build(self) -> None:
        forget_accelerators()
        if self.world > 1:
            os.environ["ACCELERATE_USE_CPU"] = "true"
        plugin, make = self.options.pop("plugin", None), self.options.pop("make", make_optimizer)
        self.accelerator = Accelerator(
            cpu=plugin is None,
            opt_level=self.level,
            options=self.options,
            gradient_accumulation_steps=self.every,
            fsdp_plugin=plugin,
        )
        self.net: Any = Net()
        optimizer = make(self.net.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=self.gamma)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            self.net, optimizer, scheduler
        )
        name = "Net" if self.world == 1 else "DistributedDataParallel"
        assert plugin is not None or type(self.model).__name__ == name
        self.norms: list[float] = []

    def run(self, data: Any, factor: float = 1.0) -> Run:
        for batch in data:
            with self.accelerator.accumulate(self.model):
                loss = loss_of(self.model, batch)
                self.losses.append(loss.item())
                self.accelerator.backward(loss * factor)
                if self.clip is not None and self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                    assert norm.dtype is torch.float32
                    self.norms.append(float(norm))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        assert len(self.norms) == (len(self.losses) // self.every if self.clip else 0)
        return self

    def save(self, path: Path) -> None:
        self.accelerator.save_state(str(path))

    def load(self, path: Path) -> None:
        self.accelerator.load_state(str(path))

    def state(self) -> dict[str, Any]:
        engine = preamp.engine_of(self.optimizer)
        assert engine.steps_applied > 0
        return engine.state_dict()

    def skipped(self) -> int:
        assert self.accelerator.optimizer_step_was_skipped
        return preamp.engine_of(self.net).steps_skipped

    def rate(self) -> float:
        return self.scheduler.get_last_lr()[0]


class TestAccelerate(Contract):
    Loop = Run


def test_after_a_skipped_step_the_schedule_goes_on() -> None:
    run = Run("O2", gamma=0.5, max_loss_scale=2.0**24).run(batches(1), factor=1e30)
    rate = run.rate()
    run.run(batches(8))
    assert not run.accelerator.optimizer_step_was_skipped
    assert run.rate() < rate


def test_values_are_clipped_after_unscaling() -> None:
    run = Run("O2", loss_scale=64.0)
    run.accelerator.backward(loss_of(run.model, batches(1)[0]))
    run.accelerator.clip_grad_value_(run.model.parameters(), 2.0**-6)
    run.optimizer.step()
    assert preamp.engine_of(run.model).steps_applied == 1
    for param in preamp.master_params(run.optimizer):
        state = run.optimizer.state[param]["exp_avg"]
        assert float(state.abs().max()) <= 0.1 * 2.0**-6 * 1.001


def test_evaluation_and_the_model_without_wrappers() -> None:
    run = Run("O2").run(batches(4))
    run.model.eval()
    with torch.no_grad():
        assert run.model(batches(1)[0][0]).dtype is torch.float32
    state = run.accelerator.get_state_dict(run.accelerator.unwrap_model(run.model))
    assert {value.dtype for value in state.values()} == {torch.float32}


def test_what_cannot_work_is_refused() -> None:
    with refused("integrations", "Accelerate with mixed_precision"):
        Accelerator(cpu=True, mixed_precision="fp16")
    run, model = Run("O2"), Net()
    optimizer = make_optimizer(model.parameters())
    with refused("integrations", "an optimizer without its model", model, optimizer):
        run.accelerator.prepare(optimizer)
    with refused("integrations", "a second prepare", model, optimizer):
        run.accelerator.prepare(model, optimizer)


# -- sharded by the plugin ----------------------------------------------------------------------

Plugin = accelerate.utils.FullyShardedDataParallelPlugin
SHARDED, WHOLE = "SHARDED_STATE_DICT", "FULL_STATE_DICT"
RESUMED = (
    ("O2", SHARDED),
    ("O2", WHOLE),
    ("O5", SHARDED),
    ("O5", WHOLE),
    ("O1", WHOLE),
    ("O4", SHARDED),
)


def fused(params: Any) -> Any:
    return FusedAdam(params, lr=0.02)


def assert_halves_are_rounded_masters(model: nn.Module) -> None:
    engine = preamp.engine_of(model)
    if engine.policy.storage.masters != "float32":  # those round ties in another way
        return
    for name, half in model.named_parameters():
        local = half.detach().to_local()
        master = engine.master_of(half)
        if master is not None:
            assert_same(local, master.detach().to_local().to(local.dtype), name)


def sharded(level: str, *, make: Any = make_optimizer, **how: Any) -> Run:
    """A run whose linear layers the plugin shards; ``how`` has its arguments and ``options``."""
    options = how.pop("options", {})
    wraps: dict[str, Any] = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap"}
    plugin = Plugin(**wraps, transformer_cls_names_to_wrap=["Linear"], **how)
    run = Run(level, every=2, clip=0.5, gamma=0.9, plugin=plugin, make=make, **options)
    assert run.accelerator.is_fsdp2
    return run


def by_hand(level: str, data: Any, make: Any, options: Any, **how: Any) -> tuple[Any, Any]:
    """Losses and norms with `fully_shard`, `preamp.initialize` and `preamp.scale_loss`."""
    model: Any = Net()
    for part in (model.first, model.last):
        fully_shard(part, **how)
    fully_shard(model, **how)
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    preamp.initialize(model, optimizer, opt_level=level, **START, **options)
    losses, norms = [], []
    for number, batch in enumerate(data, 1):
        is_last = number % 2 == 0
        model.set_requires_gradient_sync(is_last)
        loss = loss_of(model, batch)
        losses.append(loss.item())
        with preamp.scale_loss(loss / 2, optimizer) as scaled:
            scaled.backward()
        if is_last:
            norms.append(float(preamp.clip_grad_norm_(optimizer, 0.5)))
            optimizer.step()
            for _ in range(2):  # Accelerate's schedules count batches of all ranks
                preamp.step_scheduler(schedule, optimizer)
            optimizer.zero_grad()
    return losses, norms


IN_FLOAT32 = MixedPrecisionPolicy(reduce_dtype=torch.float32)
CASES: dict[str, dict[str, Any]] = {
    "plain, O2": {"level": "O2"},
    "plain": {},
    "recomputed": {"activation_checkpointing": True},
    "read on one rank": {"cpu_ram_efficient_loading": True},
    "kept gathered": {"reshard_after_forward": False},
    "reduced in float32": {"mixed_precision_policy": IN_FLOAT32},
    "split, O2": {"level": "O2", "make": fused, "options": {"storage": "split"}},
    "split": {"make": fused, "options": {"storage": "split"}},
    "compact": {"make": fused, "options": {"storage": "compact"}},
}


def compare_with_fully_shard(rank: int) -> bool:
    be_accelerators()
    data = batches(8, seed=rank)
    for name, case in CASES.items():
        run = sharded(**{"level": "O5", **case}).run(data)
        policy = case.get("mixed_precision_policy")
        how = {} if policy is None else {"mp_policy": policy}
        level, make = case.get("level", "O5"), case.get("make", make_optimizer)
        hand = by_hand(level, data, make, case.get("options", {}), **how)
        assert (run.losses, run.norms) == hand, name
        assert_halves_are_rounded_masters(run.model)
        assert preamp.engine_of(run.model).steps_applied >= 2
    return True


@needs_fully_shard
def test_losses_and_norms_are_those_of_fully_shard_by_hand(tmp_path: Path) -> None:
    fork_ranks(compare_with_fully_shard, tmp_path)


def weights_of(run: Run) -> list[torch.Tensor]:
    return [param.detach().to_local().clone() for param in run.model.parameters()]  # type: ignore[union-attr]


def resume(rank: int) -> bool:
    """Before the first step torch makes an optimizer's state by one with zeros, and so saves."""
    be_accelerators()
    data = batches(12, seed=rank)
    for level, kind in RESUMED:
        folder = f"{level} {kind}"
        one = sharded(level, state_dict_type=kind)
        before, engine = weights_of(one), preamp.engine_of(one.model)
        one.save(Path(f"first {folder}"))
        assert (engine.steps_applied, engine.steps_skipped) == (0, 0)
        assert all(map(torch.equal, weights_of(one), before))
        one.run(data[:6]).save(Path(folder))
        one.run(data[6:])
        other = sharded(level, state_dict_type=kind)
        with torch.no_grad():
            for param in other.model.parameters():
                param.zero_()
        other.load(Path(folder))
        other.run(data[6:])
        assert (other.losses, other.norms) == (one.losses[6:], one.norms[3:]), folder
        assert other.state() == one.state()
        states = [run.accelerator.get_state_dict(run.model) for run in (one, other)]
        for key, value in states[0].items():
            assert value.dtype is torch.float32
            assert_same(value, states[1][key], key)
        assert len(states[0]) == (len(list(one.model.parameters())) if rank == 0 else 0)
    return True


@needs_fully_shard
def test_resumed_by_its_own_calls_a_sharded_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    fork_ranks(resume, tmp_path)


HOST = {"storage": preamp.Storage(place="host")}
PLUGINS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {  # its arguments, options
    "FSDP1": ({"fsdp_version": 1}, None),
    "FSDP on the CPU": ({"cpu_offload": True}, None),
    "FSDP with a param_dtype": ({"mixed_precision_policy": "bf16"}, None),
    "FSDP with an output_dtype": (
        {"mixed_precision_policy": MixedPrecisionPolicy(output_dtype=torch.float32)},
        None,
    ),
    "FSDP with masters on the host": ({}, HOST),
}


@pytest.mark.parametrize("name", PLUGINS)
def test_what_a_plugin_cannot_ask_for_is_refused_first(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    arguments, options = PLUGINS[name]
    given = Plugin(**{"fsdp_version": 2, **arguments})
    with refused("integrations", name):
        Accelerator(opt_level="O5", options=options, fsdp_plugin=given)
    assert accelerate.state.AcceleratorState._shared_state == {}


@pytest.mark.parametrize("strategy", ["DEEPSPEED", "MEGATRON_LM"])
def test_strategies_with_steps_of_their_own_are_refused(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = accelerate.state
    monkeypatch.setattr(state.AcceleratorState, "mixed_precision", "no")  # asks DeepSpeed's file
    state.PartialState(cpu=True)
    state.PartialState._shared_state["distributed_type"] = state.DistributedType[strategy]
    with refused("integrations", "Accelerate with other steps", strategy=strategy):
        Accelerator(cpu=True, opt_level="O5")


def refuse_second(rank: int) -> bool:
    del rank
    be_accelerators()
    run = sharded("O5")
    params = list(run.model.parameters())
    for given in ((run.model, run.optimizer), (run.optimizer,)):
        with refused("integrations", "prepare of what has an engine", run.optimizer):
            run.accelerator.prepare(*given)
    model = Net()
    optimizer = make_optimizer(model.parameters())
    with refused("integrations", "a second sharded prepare", model, optimizer):
        run.accelerator.prepare(model, optimizer)
    assert all(map(lambda a, b: a is b, run.model.parameters(), params))
    assert type(model) is Net
    return True


@needs_fully_shard
def test_a_second_call_of_prepare_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    fork_ranks(refuse_second, tmp_path)
