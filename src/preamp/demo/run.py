# SPDX-License-Identifier: BSD-3-Clause
"""One training for each opt level, all from the same start on the same text."""

from __future__ import annotations

import copy
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

import preamp
from preamp.core.errors import bad_value
from preamp.demo.config import DemoConfig
from preamp.demo.data import Batch, Corpus, held_out_batches, part_of_batch, training_batches
from preamp.demo.measure import activation_bytes, dtypes_of, held_out_bits
from preamp.demo.model import GPT
from preamp.demo.parallel import RankResult, digest, shard_before, wrap_after
from preamp.demo.records import DemoResult, LevelResult, Status
from preamp.demo.train import DivergedError, Tape, Watcher, make_optimizer, train
from preamp.distributed.groups import gather_to_all, own_rank
from preamp.policy.resolve import level_hint


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all opt levels share."""

    config: DemoConfig  # what was asked for
    corpus: Corpus  # the text
    start: GPT  # the float32 model that every level starts from; never trained itself

    @property
    def device(self) -> torch.device:
        """Where to train."""
        return torch.device(self.config.device)

    def training_batches(self) -> Iterator[Batch]:
        """Yield this rank's part of the training batches, at every call the same ones."""
        return self._on_device(
            part_of_batch(batch, own_rank(), self.config.ranks)
            for batch in training_batches(
                self.corpus.train,
                steps=self.config.steps,
                batch=self.config.batch,
                context=self.config.model.context,
                seed=self.config.seed,
            )
        )

    def held_out_batches(self) -> Iterator[Batch]:
        """Yield the held-out batches, at every call the same ones."""
        return self._on_device(
            held_out_batches(
                self.corpus.held_out,
                count=self.config.held_out_windows,
                batch=4 * self.config.batch,
                context=self.config.model.context,
            )
        )

    def _on_device(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            yield Batch(inputs=batch.inputs.to(self.device), targets=batch.targets.to(self.device))


def prepare(config: DemoConfig, corpus: Corpus) -> Setting:
    """Create what all levels share; raises `ValueError` if a level is unknown."""
    for level in config.levels:
        if level not in preamp.OPT_LEVELS:
            raise bad_value(
                f"Opt level {level!r} is not known",
                f"Choose from {', '.join(preamp.OPT_LEVELS)}",
                f"{level_hint(level)}. Pass for example --levels O0,O2",
            )
    random = torch.Generator().manual_seed(config.seed)
    return Setting(config=config, corpus=corpus, start=GPT(config.model, random))


def run(setting: Setting, watcher: Watcher) -> DemoResult:
    """Train every level; Ctrl-C ends the run and keeps what was measured."""
    rows: list[LevelResult] = []
    interrupted = False
    try:
        for level in setting.config.levels:
            watcher.level_started(level)
            rows.append(run_level(level, setting, watcher))
            watcher.level_done(rows[-1])
            interrupted = rows[-1].status == "interrupted"
            if interrupted:
                break
    except KeyboardInterrupt:  # between two trainings
        interrupted = True
    return DemoResult(
        config=setting.config,
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "preamp": preamp.__version__,
        },
        device=describe_device(setting.device),
        parameters=sum(p.numel() for p in setting.start.parameters()),
        train_bytes=len(setting.corpus.train),
        held_out_bytes=len(setting.corpus.held_out),
        interrupted=interrupted,
        levels=tuple(rows),
    )


def run_level(level: str, setting: Setting, watcher: Watcher) -> LevelResult:
    """Train and evaluate one opt level; there is a row also if that failed or was interrupted."""
    config = setting.config
    if setting.device.type == "cuda":  # where torch counts allocations
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(setting.device)
    model = copy.deepcopy(setting.start).to(setting.device)
    shard_before(model, config.parallel)
    optimizer = make_optimizer(model, config.optimizer, is_fused=config.has_fused_optimizer)
    storage, on_gpu = config.storage_at(level), setting.device.type == "cuda"
    # Where peak memory is measured, the stall meter's copies must not be in it.
    numerics = "full" if setting.device.type == "cpu" else "light"
    model, optimizer = preamp.initialize(
        model,
        optimizer,
        opt_level=level,
        storage=storage,
        verbosity=0,
        numerics="off" if storage.applies_at_once else numerics,
        numerics_every=max(config.steps // 12, 1),
    )
    engine = preamp.engine_of(optimizer)
    wrapped = wrap_after(model, config.parallel)
    tape = Tape(level=level)
    tape.begin(engine, describe_device(setting.device))
    try:
        status, reason = outcome_of(
            lambda: train(
                wrapped, optimizer, setting.training_batches(), config, tape=tape, watcher=watcher
            )
        )
        row = LevelResult(
            level=level,
            status=status,
            reason=reason,
            steps_done=len(tape.losses),
            steps_skipped=engine.steps_skipped,
            loss_scale=engine.loss_scale(0),
            losses=tuple(tape.losses),
            step_seconds=tuple(tape.seconds),
            warmup_steps=warmup_steps(config.steps),
            tokens_per_step=config.batch * config.model.context,
            memory=tape.memory,
            peak_bytes=torch.cuda.max_memory_allocated(setting.device) if on_gpu else None,
            records=tape.records(engine),
        )
        if status != "interrupted":
            row = look_closer(with_ranks(row, model), setting, model, optimizer)
        return row
    finally:
        engine.close()


def look_closer(
    row: LevelResult, setting: Setting, model: GPT, optimizer: torch.optim.Optimizer
) -> LevelResult:
    """Add formats, kept activations and, if finished, held-out bits; Ctrl-C may interrupt it."""
    try:
        batch = next(setting.training_batches())
        formats, kept = dtypes_of(model, optimizer, batch), activation_bytes(model, batch)
        row = replace(row, dtypes=formats, activation_bytes=kept)
        if row.status != "finished":
            return row
        return replace(row, held_out_bits=held_out_bits(model, setting.held_out_batches()))
    except KeyboardInterrupt:
        return replace(row, status="interrupted", reason="Ctrl-C during the evaluation")


def outcome_of(training: Callable[[], None]) -> tuple[Status, str]:
    """Run a training; returns how it ended, and why where it did not finish."""
    try:
        training()
    except KeyboardInterrupt:
        return "interrupted", "Ctrl-C"
    except DivergedError as error:
        return "diverged", str(error)
    except preamp.LossScaleError as error:
        return "refused", str(error)
    return "finished", ""


def warmup_steps(steps: int) -> int:
    """Steps too early to time, since allocators and caches fill up: at most five, and never all."""
    return min(5, steps // 2)


def describe_device(device: torch.device) -> str:
    """Such as ``"cpu (AVX512, 2 threads)"`` or ``"cuda:0 (NVIDIA H200)"``."""
    if device.type == "cpu":
        capability = torch.backends.cpu.get_cpu_capability()
        threads = torch.get_num_threads()
        return f"cpu ({capability}, {threads} thread{'s' * (threads != 1)})"
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return str(device)


def with_ranks(row: LevelResult, model: GPT) -> LevelResult:
    """Add what each rank says, where there are several. All of them call this."""
    own = RankResult(
        rank=own_rank(),
        steps_skipped=row.steps_skipped,
        loss_scale=row.loss_scale,
        losses=digest(row.losses),
        weights=digest(model),
    )
    found = gather_to_all(own)
    return replace(row, ranks=tuple(found)) if len(found) > 1 else row
