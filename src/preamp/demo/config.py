# SPDX-License-Identifier: BSD-3-Clause
"""What a demo run was asked to do: frozen records, checked once."""

from __future__ import annotations

from dataclasses import dataclass, field

from preamp.core.errors import bad_value

DEFAULT_LEVELS = ("O0", "O4", "O5", "O1", "O2", "O3")
"""The baseline, then bf16, then fp16, and last what happens without fp32 weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Size of the byte-level GPT.

    Attributes:
        layers: Transformer blocks.
        width: Size of the residual stream, a multiple of ``heads``.
        heads: Attention heads.
        context: Bytes that the model sees at once.
    """

    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 64

    def __post_init__(self) -> None:
        """Refuse sizes that no model can have."""
        for name in ("layers", "width", "heads", "context"):
            _require_at_least(name, getattr(self, name), 1)
        if self.width % self.heads:
            raise bad_value(
                f"Got width={self.width} with heads={self.heads}",
                "The width is a multiple of heads",
                f"Pass for example --width {self.heads * max(1, self.width // self.heads)}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW's settings, the same at every opt level.

    Attributes:
        learning_rate: Highest rate, reached after the warm-up.
        final_fraction: Part of it that is left when the cosine ends.
        warmup_fraction: Part of the steps in which the rate grows linearly.
        betas: Decay rates of AdamW's moments.
        eps: AdamW's eps. In pure fp16 (O3) averages of squared gradients underflow and leave eps
            alone in the denominator: measured, 1e-8 (torch's default) diverges within 5 steps,
            1e-6 within 130, and 1e-5 trains. The other levels do as well with either.
        weight_decay: Decoupled decay per unit of learning rate.
        max_norm: Norm that gradients are clipped to.
    """

    learning_rate: float = 2e-3
    final_fraction: float = 0.1
    warmup_fraction: float = 0.05
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-5
    weight_decay: float = 0.1
    max_norm: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a rate that cannot train."""
        if not 0 < self.learning_rate < float("inf"):
            raise bad_value(
                f"Got learning rate {self.learning_rate}",
                "It is positive and finite",
                "Pass for example --lr 0.002",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """One run of the demo.

    Attributes:
        levels: Opt levels, in the order in which they are trained.
        steps: Optimizer steps for each of them.
        batch: Windows of text in a step.
        seed: Of the initial weights and of the batches.
        device: Where to train, as ``torch.device`` spells it.
        held_out_windows: Windows of held-out text that are evaluated.
        parallel: What ranks share; see :mod:`preamp.demo.parallel`.
        ranks: How many there are; each takes its part of every batch.
        model: Size of the model.
        optimizer: AdamW's settings.
    """

    levels: tuple[str, ...] = DEFAULT_LEVELS
    steps: int = 300
    batch: int = 8
    seed: int = 0
    device: str = "cpu"
    held_out_windows: int = 512
    parallel: str = "none"
    ranks: int = 1
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        """Refuse counts too small to measure anything, and levels asked for twice."""
        _require_at_least("steps", self.steps, 2)
        _require_at_least("batch", self.batch, 1)
        _require_at_least("held_out_windows", self.held_out_windows, 1)
        _require_at_least("ranks", self.ranks, 1)
        if self.batch % self.ranks:
            raise bad_value(
                f"Got batch={self.batch} with {self.ranks} ranks",
                "Every rank gets an equal part of each batch",
                f"Pass for example --batch {self.ranks * max(1, self.batch // self.ranks)}",
            )
        if not self.levels or len(set(self.levels)) != len(self.levels):
            raise bad_value(
                f"Got levels {','.join(self.levels) or '(none)'}",
                "Name one or more opt levels, each once",
                "Pass for example --levels O0,O2",
            )


def _require_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise bad_value(
            f"Got {name}={value}",
            f"The smallest possible is {least}",
            f"Pass {least} or more",
        )
