# SPDX-License-Identifier: BSD-3-Clause
"""What `preamp_bench.train` trains: a GPT, and a small convolutional network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from preamp.core.errors import bad_value
from preamp_bench.gpt import GPT, VOCABULARY, ModelConfig

CLASSES = 10
PIXELS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig:
    """Size of a task."""

    name: str  # ``"gpt"`` or ``"convnet"``
    # Of the GPT's residual stream; the convolutions have a quarter, half and all of it as channels.
    width: int = 256
    batch: int = 8  # windows of text, or images, in a step
    device: str = "cpu"  # where to train, as ``torch.device`` spells it

    def __post_init__(self) -> None:
        """Refuse what cannot be built."""
        if self.width < 4 or self.width % 4:
            raise bad_value(
                f"Got width={self.width}",
                "It is divided by four, for attention heads and channels",
                "Pass for example --width 256",
            )
        if self.batch < 2:
            raise bad_value(
                f"Got batch={self.batch}",
                "Batch normalization needs two or more",
                "Pass for example --batch 8",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A float32 model, one batch, and the loss.

    The batch is the same in every step and random: it costs what any other costs.
    """

    model: nn.Module  # the model
    inputs: Tensor  # bytes, shape (batch, context), int64, or images, (batch, 3, 32, 32), float32
    targets: Tensor  # classes, int64; for bytes the shape of the inputs, for images (batch,)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.inputs.device

    def loss(self, outputs: Tensor) -> Tensor:
        """Compute the mean cross-entropy."""
        return F.cross_entropy(outputs.flatten(0, -2), self.targets.flatten())


def make_task(config: TaskConfig) -> Task:
    """Draw a task; equal configurations give equal ones."""
    return TASKS[config.name](config)


def _gpt(config: TaskConfig) -> Task:
    size = ModelConfig(width=config.width)
    random = torch.Generator().manual_seed(0)
    text = torch.randint(VOCABULARY, (config.batch, size.context + 1), generator=random)
    return Task(
        model=GPT(size, random).to(config.device),
        inputs=text[:, :-1].to(config.device),
        targets=text[:, 1:].to(config.device),
    )


def _convnet(config: TaskConfig) -> Task:
    random = torch.Generator().manual_seed(0)
    channels = (3, config.width // 4, config.width // 2, config.width)
    layers: list[nn.Module] = []
    for stride, (before, after) in enumerate(pairwise(channels), start=1):
        convolution = nn.Conv2d(before, after, 3, min(stride, 2), padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(after), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], CLASSES, bias=False)]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                fan_in = parameter[0].numel()
                parameter.copy_(torch.randn(parameter.shape, generator=random) * fan_in**-0.5)
    images = torch.randn(config.batch, 3, PIXELS, PIXELS, generator=random)
    classes = torch.randint(CLASSES, (config.batch,), generator=random)
    return Task(
        model=model.to(config.device),
        inputs=images.to(config.device),
        targets=classes.to(config.device),
    )


TASKS: dict[str, Callable[[TaskConfig], Task]] = {"gpt": _gpt, "convnet": _convnet}
"""By name, functions that make them."""
