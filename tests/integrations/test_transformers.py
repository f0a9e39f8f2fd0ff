# SPDX-License-Identifier: BSD-3-Clause
"""The Trainer at opt levels: a loop by hand's numbers, its checkpoints, saved configurations."""

import json
import os
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
    assert_same_models,
    be_accelerators,
    bits,
    exact,
    fork_ranks,
    needs,
)
from kit.refusals import refused

needs("accelerate")
needs("transformers.trainer")
import transformers

from preamp.integrations.transformers import Trainer, TrainerMixin

pytestmark = WARNINGS


def make_model() -> Any:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    return transformers.LlamaForCausalLM(config)


def sequences(count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, 32, (count, 1), generator=generator)
    tokens = (starts + torch.arange(12)) % 32
    return [{"input_ids": row, "labels": row} for row in tokens]


class Losses(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.found: list[float] = []
        self.norms: list[float] = []
        self.rates: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        if "loss" in logs:
            self.found.append(logs["loss"])
            self.norms.append(float(logs["grad_norm"]))
            self.rates.append(logs["learning_rate"])


def arguments(folder: Path, **more: Any) -> Any:
    given = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_steps": 8,
        "learning_rate": 0.02,
        "logging_steps": 1,
        "save_steps": 4,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "linear",
        "seed": 11,
        "optim": "adamw_torch",
    }
    return transformers.TrainingArguments(**{**given, **more})


def train(
    folder: Path,
    level: str | None,
    resume: Any = None,
    options: Any = None,
    kind: Any = Trainer,
    **more: Any,
) -> tuple[Any, Losses]:
    losses = Losses()
    given: dict[str, Any] = {
        "model": make_model(),
        "args": arguments(folder, **more),
        "train_dataset": sequences(64),
        "callbacks": [losses],
    }
    if level is None:
        trainer = transformers.Trainer(**given)
    else:
        trainer = kind(**given, opt_level=level, options={**START, **(options or {})})
    trainer.train(resume_from_checkpoint=resume)
    return trainer, losses


@pytest.mark.parametrize(
    ("level", "clip"), [*((level, 0.5) for level in LEVELS), ("O2", 0.0), ("O2", 1e9)]
)
def test_losses_and_norms_are_those_of_the_float32_run(
    level: str, clip: float, tmp_path: Path
) -> None:
    """Norms are reported where nothing is clipped, too."""
    options = {"loss_scale": 256.0} if level in ("O1", "O2") else {}
    more = {"save_strategy": "no", "max_grad_norm": clip}
    _, wanted = train(tmp_path / "own", None, **more)
    trainer, losses = train(tmp_path / "ours", level, None, options, **more)
    rough = 0.01 if level in ("O1", "O2") else 0.08
    assert losses.found == pytest.approx(wanted.found, rel=rough)
    assert losses.norms == pytest.approx(wanted.norms, rel=10 * rough)
    assert wanted.found[-1] < 0.9 * wanted.found[0]
    weight = trainer.model.lm_head.weight
    assert weight.dtype is {"O2": torch.float16, "O5": torch.bfloat16}.get(level, torch.float32)
    assert preamp.engine_of(trainer.model).steps_applied == 8


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_resumed_run_goes_on_to_the_bit(level: str, tmp_path: Path) -> None:
    more = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    trainer, losses = train(tmp_path / "a", level, **more)
    middle = tmp_path / "a" / "checkpoint-4"
    again, rest = train(tmp_path / "b", level, str(middle), **more)
    assert rest.found == losses.found[4:]
    assert rest.norms == losses.norms[4:]
    assert_same_models(again.model, trainer.model)
    one, other = preamp.engine_of(trainer.model), preamp.engine_of(again.model)
    assert one.state_dict() == other.state_dict()
    assert one.steps_applied > 0


def test_the_schedule_waits_for_a_skipped_step(tmp_path: Path) -> None:
    trainer, losses = train(tmp_path, "O2", options={"max_loss_scale": 2.0**24}, save_steps=8)
    engine = preamp.engine_of(trainer.model)
    if engine.steps_skipped == 0:  # make sure that there is one to be seen
        trainer, losses = train(tmp_path, "O2", learning_rate=0.01, save_steps=8)
    assert engine.steps_applied + engine.steps_skipped == 8
    assert len(set(losses.rates)) == 8 - engine.steps_skipped


@pytest.mark.parametrize("level", ["O2", "O5", "O1"])
def test_a_trained_model_is_saved_exactly_evaluated_and_trained_on(
    level: str, tmp_path: Path
) -> None:
    trainer, _ = train(tmp_path / "run", level, max_steps=2, save_strategy="no")
    for folder, save in (
        (tmp_path / "model", trainer.model.save_pretrained),
        (tmp_path / "trainer", trainer.save_model),
    ):
        save(str(folder))
        config = json.loads((folder / "config.json").read_text("utf-8"))
        assert config["dtype"] == "float32"
        loaded = transformers.AutoModelForCausalLM.from_pretrained(str(folder))
        for (name, a), b in zip(exact(loaded).items(), exact(trainer.model).values(), strict=True):
            assert_same(a, b, name)
    assert "save_pretrained" not in vars(trainer.model.config)
    assert 0 < trainer.evaluate(sequences(8, seed=1))["eval_loss"] < 10
    assert trainer.predict(sequences(4, seed=2)).predictions.dtype.name == "float32"
    engine = preamp.engine_of(trainer.model)
    trainer.train()
    assert preamp.engine_of(trainer.model) is engine
    assert engine.steps_applied + engine.steps_skipped == 4
    preamp.engine_of(trainer.model).close()
    assert "save_pretrained" not in vars(trainer.model)


def test_other_precisions_are_refused(tmp_path: Path) -> None:
    with refused("integrations", "Trainer with bf16", changes=True):
        Trainer(model=make_model(), args=arguments(tmp_path, bf16=True), opt_level="O5")


def test_the_mixin_serves_other_trainers(tmp_path: Path) -> None:
    kind: Any = type("Own", (TrainerMixin, transformers.Seq2SeqTrainer), {})
    args = transformers.Seq2SeqTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, max_steps=1, report_to=[], disable_tqdm=True
    )
    own = kind(
        model=make_model(), args=args, train_dataset=sequences(8), opt_level="O5", options=START
    )
    own.train()
    assert preamp.engine_of(own.model).policy.opt_level == "O5"


def on_two(rank: int) -> dict[str, Any]:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    trainer, losses = train(Path(), "O2", save_strategy="no", max_steps=4, ddp_backend="gloo")
    return {
        "wrapped": type(trainer.model_wrapped).__name__,
        "weights": list(bits(exact(trainer.model).values())),
        "norms": losses.norms,
    }


def test_two_processes_train_one_model(tmp_path: Path) -> None:
    first, second = fork_ranks(on_two, tmp_path)
    assert first["weights"] == second["weights"]
    assert first["wrapped"] == "DistributedDataParallel"


def train_sharded(
    folder: Path,
    level: str,
    resume: Any = None,
    kind: Any = Trainer,
    max_steps: int = 8,
    save_strategy: str = "steps",
    **config: Any,
) -> tuple[Any, Losses]:
    """With ``fsdp`` in the arguments, and micro-batches of two sequences on each rank."""
    told = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", **config}
    more: dict[str, Any] = {"use_cpu": False, "ddp_backend": "gloo", "fsdp": True}
    more |= {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    more |= {"max_steps": max_steps, "save_strategy": save_strategy}
    return train(folder, level, resume, kind=kind, fsdp_config=told, **more)


def resume_sharded(rank: int) -> bool:
    del rank
    be_accelerators()
    for level, kind in (("O2", "FULL_STATE_DICT"), ("O5", "SHARDED_STATE_DICT")):
        trainer, losses = train_sharded(Path(level), level, state_dict_type=kind)
        assert type(trainer.model).__name__.startswith("FSDP")
        middle = f"{level}/checkpoint-4"
        again, rest = train_sharded(Path("again", level), level, middle, state_dict_type=kind)
        assert rest.found == losses.found[4:]
        assert rest.norms == losses.norms[4:]
        engine, other = preamp.engine_of(trainer.model), preamp.engine_of(again.model)
        assert engine.state_dict() == other.state_dict()
        assert engine.steps_applied > 4
        for half, its in zip(trainer.model.parameters(), again.model.parameters(), strict=True):
            master, same = engine.master_of(half), other.master_of(its)
            assert_same(half.detach().to_local(), master.detach().to_local().to(half.dtype))
            assert_same(same.detach().to_local(), master.detach().to_local())
    return True


def test_sharded_and_resumed_losses_are_those_without_the_interruption(tmp_path: Path) -> None:
    fork_ranks(resume_sharded, tmp_path)


def train_and_save_sharded(rank: int) -> bool:
    be_accelerators()
    trainer, _ = train_sharded(Path("run"), "O5", max_steps=2, save_strategy="no")
    trainer.save_model("saved")
    state = trainer.accelerator.get_state_dict(trainer.model)
    if rank == 0:
        config = json.loads(Path("saved", "config.json").read_text("utf-8"))
        assert config["dtype"] == "float32"
        loaded = transformers.AutoModelForCausalLM.from_pretrained("saved")
        for (name, a), b in zip(exact(loaded).items(), state.values(), strict=True):
            assert_same(a, b, name)
    assert 0 < trainer.evaluate(sequences(8, seed=1))["eval_loss"] < 10
    trainer.train()
    assert preamp.engine_of(trainer.model).steps_applied == 4
    return True


def test_a_sharded_model_is_saved_evaluated_and_trained_on(tmp_path: Path) -> None:
    fork_ranks(train_and_save_sharded, tmp_path)
