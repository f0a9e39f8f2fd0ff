# SPDX-License-Identifier: BSD-3-Clause
"""Lightning's Trainer and Fabric at opt levels: the contract of a loop, and what else they do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import preamp
from cases.tolerances import assert_same
from integrations.contract import (
    LEVELS,
    START,
    WARNINGS,
    ByHand,
    ByScript,
    Contract,
    Loop,
    Net,
    assert_same_models,
    batches,
    exact,
    loss_of,
    make_optimizer,
    needs,
    without_skips,
)
from kit.refusals import refused

needs("lightning.pytorch")
import lightning.pytorch as pl
from lightning.fabric import Fabric

from preamp.integrations.lightning import FabricPrecision, TrainerPrecision

pytestmark = WARNINGS


# -- Fabric ---------------------------------------------------------------------------------------


class FabricRun(ByScript):
    def build(self) -> None:
        self.precision = FabricPrecision()
        strategy: Any = "ddp" if self.world > 1 else "auto"
        self.fabric = Fabric(
            accelerator="cpu", strategy=strategy, devices=self.world, plugins=self.precision
        )
        self.fabric.launch()
        self.net = Net()
        optimizer = make_optimizer(self.net.parameters())
        preamp.initialize(self.net, optimizer, opt_level=self.level, **self.options)
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=self.gamma)
        self.model, self.optimizer = self.fabric.setup(self.net, optimizer)

    def run(self, data: Any, factor: float = 1.0) -> FabricRun:
        for number, batch in enumerate(data, 1):
            is_last = number % self.every == 0
            with self.fabric.no_backward_sync(self.model, enabled=not is_last):
                loss = loss_of(self.model, batch)
                self.losses.append(loss.item())
                self.fabric.backward(loss * factor / self.every)
            if is_last:
                if self.clip is not None:
                    self.fabric.clip_gradients(
                        self.model, self.optimizer, max_norm=self.clip, error_if_nonfinite=False
                    )
                self.optimizer.step()
                self.optimizer.zero_grad()
        return self

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def save(self, path: Path) -> None:
        self.fabric.save(path, {**self.parts(), "precision": self.precision.state_dict()})

    def load(self, path: Path) -> None:
        rest = self.fabric.load(path, self.parts())
        self.precision.load_state_dict(rest["precision"])

    def state(self) -> dict[str, Any]:
        return self.precision.state_dict()


class TestFabric(Contract):
    Loop = FabricRun
    clip_by_hand = None  # it clips half gradients, and preamp masters'
    # A script of Fabric that wants none does not pass the plugin.
    test_off_it_is_a_float32_run: Any = None


@pytest.mark.parametrize("level", LEVELS)
def test_a_batch_that_fabric_discards_leaves_no_gradients(level: str) -> None:
    data = batches(8)
    run = FabricRun(level, loss_scale=128.0)
    assert preamp.engine_of(run.model) is preamp.engine_of(run.optimizer)  # through its wrappers
    for number, batch in enumerate(data):
        run.fabric.backward(loss_of(run.model, batch))
        assert preamp.clip_grad_norm_(run.model.parameters(), 1e9) > 0
        if number % 2:
            run.optimizer.step()
        run.optimizer.zero_grad()
    assert_same_models(run.net, ByHand(level, loss_scale=128.0).run(data[1::2]).model)


def test_a_model_without_an_engine_is_refused() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, plugins=FabricPrecision())
    model = Net()
    model, _ = fabric.setup(model, make_optimizer(model.parameters()))
    with refused("integrations", "Fabric without an engine"):
        fabric.backward(loss_of(model, batches(1)[0]))


# -- the Trainer ----------------------------------------------------------------------------------


class Module(pl.LightningModule):
    def __init__(self, gamma: float = 1.0) -> None:
        super().__init__()
        self.net = Net()
        self.losses: list[float] = []
        self.seen: list[Any] = []
        self.factor, self.gamma = 1.0, gamma

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


class TrainerRun(Loop):
    """One call of ``fit``, after which weights are float32 again."""

    def build(self) -> None:
        more: Any = {"accumulate_grad_batches": self.every, "gradient_clip_val": self.clip}
        more |= {"devices": self.world, "strategy": "ddp"} if self.world > 1 else {}
        self.module = Module(self.gamma)
        self.trainer = trainer_of(self.folder, self.level, self.options, **more)
        self.net, self.losses = self.module.net, self.module.losses

    def run(self, data: Any, factor: float = 1.0) -> TrainerRun:
        self.module.factor = factor
        self.trainer.fit(self.module, through(data))
        assert {param.dtype for param in self.module.parameters()} == {torch.float32}
        return self

    def skipped(self) -> int:
        return self.trainer.precision_plugin.state_dict()["preamp"]["steps"][0]["skipped"]

    def rate(self) -> float:
        return self.trainer.lr_scheduler_configs[0].scheduler.get_last_lr()[0]


class TestTrainer(Contract):
    Loop = TrainerRun

    @pytest.mark.parametrize("level", LEVELS)
    def test_a_resumed_run_goes_on_to_the_bit(self, level: str, tmp_path: Path) -> None:
        data = batches(6)
        whole = Module()
        trainer = trainer_of(tmp_path, level, max_epochs=2)
        trainer.fit(whole, through(data))
        first = trainer_of(tmp_path, level, max_epochs=1)
        first.fit(Module(), through(data))
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
    data = through(batches(4) * 2)
    whole, rest = Module(), Module()
    trainer_of(tmp_path, "O2", max_steps=8).fit(whole, data)
    keeper = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=4, filename="{step}")
    first = trainer_of(tmp_path, "O2", max_steps=6, enable_checkpointing=True, callbacks=[keeper])
    first.fit(Module(), data)
    file = tmp_path / "step=4.ckpt"
    trainer_of(tmp_path, "O2", max_steps=8).fit(rest, data, ckpt_path=file, weights_only=False)
    assert rest.losses == whole.losses[4:]
    assert_same_models(rest.net, whole.net)


def test_hooks_see_unscaled_gradients_and_validation_runs_at_the_level(tmp_path: Path) -> None:
    class Looks(Module):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.largest = max(float(p.grad.abs().max()) for p in self.parameters())

    module = Looks()
    trainer = trainer_of(tmp_path, "O2", {"loss_scale": 1024.0}, gradient_clip_val=None)
    trainer.fit(module, loader(1), loader(1))
    assert 0 < module.largest < 20
    assert module.seen[-1] is torch.float16
    found = trainer_of(tmp_path, "O2").validate(module, loader(1), verbose=False)
    assert module.seen[-1] is torch.float32
    assert found[0]["val"] > 0


def test_values_are_clipped_on_masters(tmp_path: Path) -> None:
    clip: Any = {"gradient_clip_val": 2.0**-6, "gradient_clip_algorithm": "value"}
    trainer = trainer_of(tmp_path, "O2", {"loss_scale": 64.0}, **clip)
    trainer.fit(Module(), loader(1))
    (optimizer,) = trainer.optimizers
    largest = max(float(state["exp_avg"].abs().max()) for state in optimizer.state.values())
    assert 0 < largest <= 0.1 * 2.0**-6 * 1.001


class Manual(pl.LightningModule):
    """Two optimizers, stepped by hand; ``every`` second batch may be thrown away."""

    def __init__(self, every: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.a, self.b, self.every = Net(), Net(), every
        self.values: list[float] = []

    def training_step(self, batch: Any, index: int) -> None:
        for net, optimizer in zip((self.a, self.b), self.optimizers(), strict=True):
            loss = loss_of(net, batch)
            self.manual_backward(loss)
            if index % self.every == self.every - 1:
                self.clip_gradients(optimizer, 0.5, "norm")
                optimizer.step()
                self.values.append(loss.item())
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [make_optimizer(net.parameters()) for net in (self.a, self.b)]


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("level", LEVELS)
def test_two_optimizers_stepped_by_hand(level: str, every: int, tmp_path: Path) -> None:
    """A batch that is thrown away leaves no gradients."""
    data, module, scale = batches(8), Manual(every), {"loss_scale": 128.0}
    trainer_of(tmp_path, level, scale, gradient_clip_val=None).fit(module, through(data))
    hand = ByHand(level, loss_scale=128.0).run(data[every - 1 :: every], clip=0.5)
    assert module.values[::2] == module.values[1::2] == hand.losses
    assert_same_models(module.a, hand.model)
    assert_same_models(module.b, hand.model)


def test_lbfgs_is_refused(tmp_path: Path) -> None:
    class WithLBFGS(Module):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(preamp.PreampStateError, match="LBFGS"):
        trainer_of(tmp_path, "O2").fit(WithLBFGS(), loader(1))


class Keep(pl.Callback):
    """Keeps the exact weights as they are before other callbacks see them."""

    def __init__(self) -> None:
        self.values: list[dict[str, torch.Tensor]] = []
        self.validated: list[dict[str, torch.Tensor]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        self.values.append(exact(pl_module))

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        self.validated.append(exact(pl_module))


def assert_same_values(mine: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, value in wanted.items():
        assert_same(mine[name], value, name)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("level", LEVELS)
def test_lightnings_averages_are_of_the_exact_weights(
    level: str, every: int, tmp_path: Path
) -> None:
    """Also where it validates with them, and where gradients accumulate meanwhile."""
    keep, module, plain = Keep(), Module(), Module()
    average = pl.callbacks.EMAWeightAveraging(decay=0.75)
    more: Any = {"max_epochs": 2, "accumulate_grad_batches": every, "num_sanity_val_steps": 0}
    options = without_skips(level)
    trainer_of(tmp_path, level, options, callbacks=[keep, average], **more).fit(
        module, loader(4), loader(1)
    )
    wanted = keep.values[every - 1]
    for number in range(2 * every - 1, 8, every):
        if number == 4 + every - 1:
            assert_same_values(keep.validated[0], wanted)
        now = keep.values[number]
        wanted = {name: 0.75 * value + 0.25 * now[name] for name, value in wanted.items()}
    assert_same_values(keep.validated[1], wanted)
    assert_same_values(exact(module), wanted)
    trainer_of(tmp_path, level, options, **more).fit(plain, loader(4))
    assert module.losses == plain.losses  # training does not notice
