# SPDX-License-Identifier: BSD-3-Clause
"""Lightning's Trainer at opt levels: the numbers of a loop by hand, and its checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch

import preamp
from cases.levels import WITH_MASTERS
from cases.tolerances import assert_same
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
    make_optimizer,
    near,
    needs,
    plain_losses,
    without_skips,
)

needs("lightning.pytorch")
import lightning.pytorch as pl

from preamp.integrations.lightning import TrainerPrecision

pytestmark = WARNINGS


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.losses: list[float] = []
        self.seen: list[Any] = []
        self.factor = 1.0

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = loss_of(self.net, batch)
        self.losses.append(loss.item())
        return loss * self.factor

    def validation_step(self, batch: Any, index: int) -> None:
        self.seen.append(self.net.first.weight.dtype)
        self.log("val", loss_of(self.net, batch))

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=self.gamma)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    gamma = 1.0

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if preamp.engine.find_engine(self.optimizers()) is None:
            scheduler.step()
        else:
            preamp.step_scheduler(scheduler, self.optimizers())


def through(data: Any) -> Any:
    return torch.utils.data.DataLoader(data, batch_size=None)


def loader(count: int, seed: int = 0) -> Any:
    return through(batches(count, seed=seed))


def trainer_of(folder: Path, level: str | None, options: Any = None, **more: Any) -> pl.Trainer:
    plugins = [TrainerPrecision(level, {**START, **(options or {})})] if level else None
    given = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(folder),
        "gradient_clip_val": 0.5,
        "plugins": plugins,
    }
    return pl.Trainer(**{**given, **more})


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("level", LEVELS)
def test_a_run_is_that_of_a_loop_by_hand(level: str, every: int, tmp_path: Path) -> None:
    data = batches(12)
    module = Module()
    trainer_of(tmp_path, level, accumulate_grad_batches=every).fit(module, through(data))
    hand = ByHand(level).run(data, every=every, clip=0.5)
    assert module.losses == hand.losses
    assert_same_models(module.net, hand.model)
    assert {param.dtype for param in module.parameters()} == {torch.float32}  # given back


@pytest.mark.parametrize("level", LEVELS)
def test_losses_are_those_of_lightnings_own_float32_run(level: str, tmp_path: Path) -> None:
    data = batches(30)
    own, module = Module(), Module()
    trainer_of(tmp_path, None).fit(own, through(data))
    assert own.losses == plain_losses(data, 0.5)
    trainer_of(tmp_path, level, without_skips(level)).fit(module, through(data))
    assert module.losses == near(own.losses, level)


@pytest.mark.parametrize("level", LEVELS)
def test_a_resumed_run_goes_on_to_the_bit(level: str, tmp_path: Path) -> None:
    data = batches(6)
    whole = Module()
    trainer = trainer_of(tmp_path, level, max_epochs=2)
    trainer.fit(whole, through(data))
    module = Module()
    first = trainer_of(tmp_path, level, max_epochs=1)
    first.fit(module, through(data))
    file = tmp_path / "half.ckpt"
    first.save_checkpoint(file)
    saved = torch.load(file, weights_only=False)
    assert {v.dtype for v in saved["state_dict"].values()} == {torch.float32}
    assert "scale" in saved["TrainerPrecision"]
    rest = Module()
    again = trainer_of(tmp_path, level, max_epochs=2)
    again.fit(rest, through(data), ckpt_path=str(file), weights_only=False)
    assert rest.losses == whole.losses[6:]
    assert_same_models(rest.net, whole.net)
    assert again.precision_plugin.state_dict() == trainer.precision_plugin.state_dict()


def test_a_checkpoint_within_a_run_is_exact(tmp_path: Path) -> None:
    """As ModelCheckpoint writes it, while weights are half; a loader begins anew."""
    data = batches(4) * 2
    whole, module = Module(), Module()
    trainer_of(tmp_path, "O2", max_steps=8).fit(whole, through(data))
    keeper = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=4, filename="{step}")
    trainer_of(tmp_path, "O2", max_steps=6, enable_checkpointing=True, callbacks=[keeper]).fit(
        module, through(data)
    )
    file = tmp_path / "step=4.ckpt"
    rest = Module()
    trainer_of(tmp_path, "O2", max_steps=8).fit(
        rest, through(data), ckpt_path=file, weights_only=False
    )
    assert rest.losses == whole.losses[4:]
    assert_same_models(rest.net, whole.net)


def test_a_skipped_step_changes_nothing_and_a_schedule_waits(tmp_path: Path) -> None:
    module = Module()
    module.factor, module.gamma = 1e30, 0.5
    before = exact(module)
    trainer = trainer_of(tmp_path, "O2")
    trainer.fit(module, loader(1))
    for name, value in exact(module).items():
        assert_same(value, before[name])
    assert trainer.precision_plugin.state_dict()["preamp"]["steps"][0]["skipped"] == 1
    assert trainer.lr_scheduler_configs[0].scheduler.get_last_lr() == [0.02]


def test_hooks_see_unscaled_gradients_and_validation_runs_at_the_level(tmp_path: Path) -> None:
    class Looks(Module):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.largest = max(float(p.grad.abs().max()) for p in self.parameters())

    module = Looks()
    trainer_of(tmp_path, "O2", {"loss_scale": 1024.0}, gradient_clip_val=None).fit(
        module, loader(1), loader(1)
    )
    assert 0 < module.largest < 20
    assert module.seen[-1] is torch.float16
    found = trainer_of(tmp_path, "O2").validate(module, loader(1), verbose=False)
    assert module.seen[-1] is torch.float32
    assert found[0]["val"] > 0


def test_values_are_clipped_on_masters(tmp_path: Path) -> None:
    module = Module()
    trainer = trainer_of(
        tmp_path,
        "O2",
        {"loss_scale": 64.0},
        gradient_clip_val=2.0**-6,
        gradient_clip_algorithm="value",
    )
    trainer.fit(module, loader(1))
    (optimizer,) = trainer.optimizers
    largest = max(float(state["exp_avg"].abs().max()) for state in optimizer.state.values())
    assert 0 < largest <= 0.1 * 2.0**-6 * 1.001


class Manual(pl.LightningModule):
    """Two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.a, self.b = Net(), Net()
        self.values: list[float] = []

    def training_step(self, batch: Any, index: int) -> None:
        for net, optimizer in zip((self.a, self.b), self.optimizers(), strict=True):
            loss = loss_of(net, batch)
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            optimizer.zero_grad()
            self.values.append(loss.item())

    def configure_optimizers(self) -> Any:
        return [make_optimizer(net.parameters()) for net in (self.a, self.b)]


def test_two_optimizers_stepped_by_hand(tmp_path: Path) -> None:
    data, module = batches(8), Manual()
    trainer_of(tmp_path, "O2", {"loss_scale": 128.0}, gradient_clip_val=None).fit(
        module, through(data)
    )
    hand = ByHand("O2", loss_scale=128.0).run(data, clip=0.5)
    assert module.values[::2] == module.values[1::2] == hand.losses
    assert_same_models(module.a, hand.model)
    assert_same_models(module.b, hand.model)


class Discards(Manual):
    """Throws every second batch away."""

    def training_step(self, batch: Any, index: int) -> None:
        for net, optimizer in zip((self.a, self.b), self.optimizers(), strict=True):
            self.manual_backward(loss_of(net, batch))
            if index % 2:
                optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("level", LEVELS)
def test_a_discarded_batch_leaves_no_gradients(level: str, tmp_path: Path) -> None:
    data, module = batches(8), Discards()
    trainer_of(tmp_path, level, {"loss_scale": 128.0}, gradient_clip_val=None).fit(
        module, through(data)
    )
    hand = ByHand(level, loss_scale=128.0).run(data[1::2])
    assert_same_models(module.a, hand.model)
    assert_same_models(module.b, hand.model)


def test_lbfgs_is_refused(tmp_path: Path) -> None:
    class WithLBFGS(Module):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(preamp.PreampStateError, match="LBFGS"):
        trainer_of(tmp_path, "O2").fit(WithLBFGS(), loader(1))


class Sharded(Module):
    def train_dataloader(self) -> Any:
        return loader(4, seed=self.global_rank)


def on_two(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for level in ("O1", "O2"):
        module = Sharded()
        trainer = trainer_of(Path(), level, devices=2, strategy="ddp")
        trainer.fit(module)
        found[level] = list(bits(exact(module).values()))
        found[f"{level} state"] = dict(trainer.precision_plugin.state_dict()["preamp"])
    return found


def test_two_processes_train_one_model(tmp_path: Path) -> None:
    first, second = fork_ranks(on_two, tmp_path)
    assert first == second
    assert first["O2 state"]["steps"][0]["applied"] > 0
    alone = Sharded()
    assert list(bits(exact(alone).values())) != first["O2"]


class Keep(pl.Callback):
    """Keeps the exact weights as they are before other callbacks see them."""

    def __init__(self) -> None:
        self.values: list[dict[str, torch.Tensor]] = []
        self.validated: list[dict[str, torch.Tensor]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        self.values.append(exact(pl_module))

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        self.validated.append(exact(pl_module))


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_lightnings_averages_are_of_the_exact_weights(
    level: str, every: int, tmp_path: Path
) -> None:
    """Also where it validates with them, and where gradients accumulate meanwhile."""
    keep, module = Keep(), Module()
    average = pl.callbacks.EMAWeightAveraging(decay=0.75)
    trainer = trainer_of(
        tmp_path,
        level,
        without_skips(level),
        max_epochs=2,
        accumulate_grad_batches=every,
        callbacks=[keep, average],
        num_sanity_val_steps=0,
    )
    trainer.fit(module, loader(4), loader(1))
    wanted = keep.values[every - 1]
    for number in range(2 * every - 1, 8, every):
        if number == 4 + every - 1:
            assert_same_values(keep.validated[0], wanted)
        now = keep.values[number]
        wanted = {name: 0.75 * value + 0.25 * now[name] for name, value in wanted.items()}
    assert_same_values(keep.validated[1], wanted)
    assert_same_values(exact(module), wanted)
    plain = Module()
    trainer_of(
        tmp_path, level, without_skips(level), max_epochs=2, accumulate_grad_batches=every
    ).fit(plain, loader(4))
    assert module.losses == plain.losses  # training does not notice


@pytest.mark.parametrize("level", WITH_MASTERS)
def test_lightnings_stochastic_averages_are_of_the_exact_weights(
    level: str, tmp_path: Path
) -> None:
    keep, module = Keep(), Module()
    values = [exact(module)]
    average = pl.callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
    trainer = trainer_of(
        tmp_path, level, without_skips(level), max_epochs=3, callbacks=[keep, average]
    )
    trainer.fit(module, loader(2))
    values += [keep.values[1], keep.values[3]]  # as of the beginnings of epochs
    wanted = values[0]
    for number, now in enumerate(values[1:], 2):
        wanted = {name: mean + (now[name] - mean) / number for name, mean in wanted.items()}
    assert_same_values(exact(module), wanted)


def assert_same_values(mine: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, value in wanted.items():
        assert_same(mine[name], value, name)
