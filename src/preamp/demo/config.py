# SPDX-License-Identifier: BSD-3-Clause
"""What a demo run was asked to do: frozen records, checked once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import cast

from preamp.core.errors import bad_value
from preamp.policy import level_defaults
from preamp.policy.resolve import at_level
from preamp.policy.storage import FULL, Place, Storage, parse_storage

DEFAULT_LEVELS = ("O0", "O4", "O5", "O1", "O2", "O3")
"""The baseline, then bf16, then fp16, and last what happens without fp32 weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Size of the byte-level GPT."""

    layers: int = 4  # transformer blocks
    width: int = 256  # size of the residual stream, a multiple of ``heads``
    heads: int = 4  # attention heads
    context: int = 64  # bytes that the model sees at once


SMALL = ModelConfig(layers=1, width=16, heads=2, context=8)
"""To see whether everything works, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW's settings, the same at every opt level."""

    learning_rate: float = 2e-3  # highest rate, reached after the warm-up
    final_fraction: float = 0.1  # part of it that is left when the cosine ends
    warmup_fraction: float = 0.05  # part of the steps in which the rate grows linearly
    betas: tuple[float, float] = (0.9, 0.95)  # decay rates of AdamW's moments
    # AdamW's eps. In pure fp16 (O3) averages of squared gradients underflow and leave eps alone in
    # the denominator: measured, 1e-8 (torch's default) diverges within 5 steps, 1e-6 within 130,
    # and 1e-5 trains. The other levels do as well with either.
    eps: float = 1e-5
    weight_decay: float = 0.1  # decoupled decay per unit of learning rate
    max_norm: float = 1.0  # norm that gradients are clipped to


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """One run of the demo."""

    levels: tuple[str, ...] = DEFAULT_LEVELS  # opt levels, in the order in which they are trained
    steps: int = 300  # optimizer steps for each of them
    batch: int = 8  # windows of text in a step
    seed: int = 0  # of the initial weights and of the batches
    device: str = "cpu"  # where to train, as ``torch.device`` spells it
    held_out_windows: int = 512  # windows of held-out text that are evaluated
    storage: str = "full"  # how masters and moments are kept between steps, by name
    place: str = "device"  # where they are, as `preamp.Storage` has it
    release_gradients: bool = False  # likewise; nothing is clipped where they are applied at once
    parallel: str = "none"  # what ranks share; see :mod:`preamp.demo.parallel`
    ranks: int = 1  # how many there are; each takes its part of every batch
    model: ModelConfig = field(default_factory=ModelConfig)  # size of the model
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)  # AdamW's settings

    def __post_init__(self) -> None:
        """Refuse what cannot be measured or shared out, and levels asked for twice."""
        kept = self.kept  # raises where storage or place is not known
        if self.steps < 2:
            raise bad_value(
                f"Got steps={self.steps}", "The smallest possible is 2", "Pass 2 or more"
            )
        if kept.release_gradients and self.ranks > 1:
            raise bad_value(
                f"Got released gradients and {self.ranks} ranks",
                "Gradients are released in one process only",
                "Leave --release-gradients out, or start one process",
            )
        if self.batch % self.ranks:
            raise bad_value(
                f"Got {self.ranks} ranks for batches of {self.batch} windows",
                "Every rank gets an equal part of each batch",
                "Start for example two: torchrun --nproc-per-node 2 -m preamp demo",
            )
        if not self.levels or len(set(self.levels)) != len(self.levels):
            raise bad_value(
                f"Got levels {','.join(self.levels) or '(none)'}",
                "Name one or more opt levels, each once",
                "Pass for example --levels O0,O2",
            )

    @property
    def kept(self) -> Storage:
        """How and where masters and moments are kept, and whether gradients are."""
        return replace(
            parse_storage(self.storage),
            place=cast("Place", self.place),
            release_gradients=self.release_gradients,
        )

    @property
    def has_fused_optimizer(self) -> bool:
        """Whether it is FusedAdam, which other storages than full need, or torch's AdamW."""
        return self.kept != FULL

    def storage_at(self, level: str) -> Storage:
        """What an opt level can have of the storage: without masters, that of moments alone."""
        return at_level(level_defaults(level), self.kept)
