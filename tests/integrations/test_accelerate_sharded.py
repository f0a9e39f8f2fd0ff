# SPDX-License-Identifier: BSD-3-Clause
"""Accelerate with FSDP2 at opt levels: numbers of `fully_shard` by hand, and its checkpoints."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.tolerances import assert_same
from distributed.ranks import RUNS_ON_CPUS
from integrations.small import (
    START,
    WARNINGS,
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

pytestmark = [
    WARNINGS,
    pytest.mark.skipif(not RUNS_ON_CPUS, reason="fully_shard of this torch needs GPUs"),
]
Plugin = accelerate.utils.FullyShardedDataParallelPlugin
EVERY = 2
SHARDED, WHOLE = "SHARDED_STATE_DICT", "FULL_STATE_DICT"
RESUMED = (
    ("O2", SHARDED),
    ("O2", WHOLE),
    ("O5", SHARDED),
    ("O5", WHOLE),
    ("O1", WHOLE),
    ("O4", SHARDED),
)


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, 2 * size)
        self.down = nn.Linear(2 * size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Deep(nn.Module):
    """Blocks that are sharded one by one, between layers that are sharded with the whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(6, 16)
        self.blocks = nn.ModuleList([Block(16), Block(16)])
        self.last = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def no_state_left() -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


@pytest.fixture(autouse=True)
def no_accelerator_left() -> Iterator[None]:
    yield
    no_state_left()


def fused(params: Any) -> Any:
    return FusedAdam(params, lr=0.02)


def schedule_of(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)


def assert_halves_are_rounded_masters(model: nn.Module) -> None:
    engine = preamp.engine_of(model)
    if engine.policy.storage.masters != "float32":  # those round ties in another way
        return
    for name, half in model.named_parameters():
        local = half.detach().to_local()
        master = engine.master_of(half)
        if master is not None:
            assert_same(local, master.detach().to_local().to(local.dtype), name)


class Run:
    """A training script as Accelerate's documentation has it, sharded by the plugin."""

    def __init__(
        self, level: str, make: Any = make_optimizer, options: Any = None, **plugin: Any
    ) -> None:
        no_state_left()
        self.accelerator = Accelerator(
            opt_level=level,
            options={**START, **(options or {})},
            gradient_accumulation_steps=EVERY,
            step_scheduler_with_optimizer=True,
            fsdp_plugin=Plugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["Block"],
                **plugin,
            ),
        )
        assert self.accelerator.is_fsdp2
        model = Deep()
        optimizer = make(model.parameters())
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(
            model, optimizer, schedule_of(optimizer)
        )

    def run(self, data: Any, factor: float = 1.0) -> list[tuple[float, float]]:
        """Losses, and norms before clipping, over all ranks."""
        found: list[tuple[float, float]] = []
        for batch in data:
            with self.accelerator.accumulate(self.model):
                loss = loss_of(self.model, batch)
                self.accelerator.backward(loss * factor)
                norm = torch.zeros(())
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            found.append((loss.item(), float(norm)))
            assert_halves_are_rounded_masters(self.model)
        return found


def by_hand(level: str, data: Any, make: Any, options: Any) -> list[tuple[float, float]]:
    """The same with `fully_shard`, `preamp.initialize` and `preamp.scale_loss`."""
    model: Any = Deep()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = make(model.parameters())
    schedule = schedule_of(optimizer)
    preamp.initialize(model, optimizer, opt_level=level, **START, **(options or {}))
    found: list[tuple[float, float]] = []
    for number, batch in enumerate(data, 1):
        is_last = number % EVERY == 0
        model.set_requires_gradient_sync(is_last)
        loss = loss_of(model, batch)
        with preamp.scale_loss(loss / EVERY, optimizer) as scaled:
            scaled.backward()
        norm = torch.zeros(())
        if is_last:
            norm = preamp.clip_grad_norm_(optimizer, 0.5)
            optimizer.step()
            for _ in range(2):  # Accelerate's schedules count batches of all ranks
                preamp.step_scheduler(schedule, optimizer)
            optimizer.zero_grad()
        found.append((loss.item(), float(norm)))
    return found


CASES: dict[str, dict[str, Any]] = {
    "plain, O2": {"level": "O2"},
    "plain": {},
    "recomputed": {"activation_checkpointing": True},
    "read on one rank": {"cpu_ram_efficient_loading": True},
    "kept gathered": {"reshard_after_forward": False},
    "split, O2": {"level": "O2", "make": fused, "options": {"storage": "split"}},
    "split": {"make": fused, "options": {"storage": "split"}},
    "compact": {"make": fused, "options": {"storage": "compact"}},
}


def compare_with_fully_shard(rank: int) -> bool:
    be_accelerators()
    data = batches(8, seed=rank)
    for name, case in CASES.items():
        run = Run(**{"level": "O5", **case})
        found = run.run(data)
        level, make = case.get("level", "O5"), case.get("make", make_optimizer)
        assert found == by_hand(level, data, make, case.get("options")), name
        assert preamp.engine_of(run.model).steps_applied >= 2
    return True


def test_losses_and_norms_are_those_of_fully_shard_by_hand(tmp_path: Path) -> None:
    fork_ranks(compare_with_fully_shard, tmp_path)


def resume(rank: int) -> bool:
    be_accelerators()
    data = batches(12, seed=rank)
    for level, kind in RESUMED:
        folder = f"{level} {kind}"
        one = Run(level, state_dict_type=kind)
        one.run(data[:6])
        one.accelerator.save_state(folder)
        wanted = one.run(data[6:])
        other = Run(level, state_dict_type=kind)
        with torch.no_grad():
            for param in other.model.parameters():
                param.zero_()
        other.accelerator.load_state(folder)
        assert other.run(data[6:]) == wanted, folder
        engines = preamp.engine_of(one.model), preamp.engine_of(other.optimizer)
        assert engines[0].state_dict() == engines[1].state_dict()
        states = [run.accelerator.get_state_dict(run.model) for run in (one, other)]
        for key, value in states[0].items():
            assert value.dtype is torch.float32
            assert_same(value, states[1][key], key)
        assert len(states[0]) == (len(list(one.model.parameters())) if rank == 0 else 0)
    return True


def test_resumed_by_its_own_calls_a_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    fork_ranks(resume, tmp_path)


def save_first(rank: int) -> bool:
    """Before the first step torch makes an optimizer's state by one with zeros."""
    be_accelerators()
    for level in ("O2", "O4", "O5"):
        run = Run(level)
        before = [param.detach().to_local().clone() for param in run.model.parameters()]
        run.accelerator.save_state(level)
        engine = preamp.engine_of(run.model)
        assert (engine.steps_applied, engine.steps_skipped) == (0, 0)
        for param, value in zip(run.model.parameters(), before, strict=True):
            assert_same(param.detach().to_local(), value)
        run.run(batches(EVERY, seed=rank))
    return True


def test_saving_before_the_first_step_changes_no_weight_and_no_counter(tmp_path: Path) -> None:
    fork_ranks(save_first, tmp_path)


def reduce_in_float32(rank: int) -> list[float]:
    be_accelerators()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    data = batches(12, seed=rank)
    return [loss for loss, _ in Run("O5", mixed_precision_policy=policy).run(data)]


def test_gradients_may_be_reduced_in_float32(tmp_path: Path) -> None:
    first, _ = fork_ranks(reduce_in_float32, tmp_path)
    assert first[-1] < first[0]


def overflow_on_one(rank: int) -> dict[str, Any]:
    be_accelerators()
    run = Run("O2", options={"max_loss_scale": 2.0**24})
    before = [param.detach().to_local().clone() for param in run.model.parameters()]
    rate = run.schedule.get_last_lr()
    run.run(batches(EVERY, seed=rank), factor=1e30 if rank == 1 else 1.0)
    found = {
        "skipped": run.accelerator.optimizer_step_was_skipped,
        "scale": preamp.engine_of(run.model).loss_scale(),
        "rate": run.schedule.get_last_lr() == rate,
    }
    for param, value in zip(run.model.parameters(), before, strict=True):
        assert_same(param.detach().to_local(), value)
    run.run(batches(8 * EVERY, seed=rank))
    assert run.schedule.get_last_lr() < rate
    return found


def test_all_ranks_skip_what_overflowed_on_one(tmp_path: Path) -> None:
    first, second = fork_ranks(overflow_on_one, tmp_path)
    assert first == second == {"skipped": True, "scale": 2.0**15, "rate": True}


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
    run = Run("O5")
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


def test_a_second_call_of_prepare_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    fork_ranks(refuse_second, tmp_path)
