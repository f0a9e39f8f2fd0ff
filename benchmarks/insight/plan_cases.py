# SPDX-License-Identifier: BSD-3-Clause
"""Small trainings of many kinds, whose verdicts are found by training them at every level."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from preamp.optimizers import FusedAdam, FusedLAMB

WIDTH, ROWS = 24, 48
Parts = Callable[[nn.Module, Any], tuple[torch.Tensor, ...]]


def normal(*shape: int, seed: int, std: float = 1.0) -> torch.Tensor:
    return std * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pairs(scale: float = 1.0, target: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    x = normal(ROWS, WIDTH, seed=1)
    y = torch.tanh(x @ normal(WIDTH, WIDTH, seed=2, std=WIDTH**-0.5))
    return scale * x, target * y


def images() -> tuple[torch.Tensor, torch.Tensor]:
    x = normal(16, 3, 8, 8, seed=1)
    return x, x.mean((1, 2, 3)).argsort().argsort() % 4


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    steps = torch.arange(8 * 12).view(8, 12)
    text = (steps * steps // 3 + steps) % 30
    return text, text.roll(-1, 1)


def square(model: nn.Module, batch: Any) -> tuple[torch.Tensor, ...]:
    return (F.mse_loss(model(batch[0]).float(), batch[1]),)


def summed(model: nn.Module, batch: Any) -> tuple[torch.Tensor, ...]:
    return (F.mse_loss(model(batch[0]).float(), batch[1], reduction="sum"),)


def classes(model: nn.Module, batch: Any) -> tuple[torch.Tensor, ...]:
    logits = model(batch[0]).float()
    return (F.cross_entropy(logits.flatten(0, -2), batch[1].flatten()),)


def each_head(model: nn.Module, batch: Any) -> tuple[torch.Tensor, ...]:
    return tuple(F.mse_loss(out.float(), batch[1]) for out in model(batch[0]))


@dataclass(frozen=True, slots=True)
class Training:
    """A training whose loss is a weighted sum of parts."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    parts: Parts = square
    batch: Callable[[], Any] = pairs
    weights: tuple[float, ...] = (1.0,)

    def make(self) -> tuple[nn.Module, Any, Any, torch.optim.Optimizer]:
        """Model, loss function, batch and optimizer, the same every time."""
        torch.manual_seed(0)
        model = self.model()
        return model, self.loss, self.batch(), self.optimizer(model.parameters())

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The loss that is minimized."""
        parts = self.parts(model, batch)
        weighted = (weight * part for weight, part in zip(self.weights, parts, strict=True))
        return cast("torch.Tensor", sum(weighted))


def mlp(*middle: Callable[[], nn.Module], act: Any = nn.GELU, gain: float = 1.0) -> nn.Module:
    inner = [make() for make in middle]
    layers = (nn.Linear(WIDTH, 2 * WIDTH), *inner, act(), nn.Linear(2 * WIDTH, WIDTH))
    with torch.no_grad():
        layers[0].weight.mul_(gain)
    return nn.Sequential(*layers)


class Heads(nn.Module):
    """Several networks on one input."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(mlp() for _ in range(heads))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [head(x) for head in self.heads]


class Softmax(nn.Module):
    """Attention with a softmax written by hand, without taking the maximum off."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.qkv.weight.mul_(gain)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = torch.exp(q @ k.transpose(-2, -1))
        return self.out(weights / weights.sum(-1, keepdim=True) @ v)


class Tokens(nn.Module):
    """A small language model; what mixes the positions is given."""

    def __init__(self, mixer: str, *, tied: bool = False, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, WIDTH, sparse=sparse)
        self.mixer: Any = None
        if mixer == "attention":
            self.mixer = nn.TransformerEncoderLayer(
                WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True
            )
        elif mixer:
            self.mixer = getattr(nn, mixer)(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 30)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(text)
        if self.mixer is not None:
            hidden = self.mixer(hidden)
        return self.head(hidden[0] if isinstance(hidden, tuple) else hidden)


class RmsNorm(nn.Module):
    """A norm written by hand, whose squares leave float16 where values pass 256."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2 * WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class _Power(nn.Module):
    def __init__(self, exponent: int) -> None:
        super().__init__()
        self.exponent = exponent

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x**self.exponent


class Masked(nn.Module):
    """Attention whose mask is a large negative number."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        mask = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-2, -1)).masked_fill(mask, self.value)
        return self.out(torch.softmax(scores / WIDTH**0.5, -1) @ v)


class Vae(nn.Module):
    """A variational autoencoder without sampling."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, 16)
        self.decode = nn.Linear(8, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, log_variance = self.encode(x).chunk(2, -1)
        return self.decode(mean), mean, log_variance


def variational(model: nn.Module, batch: Any) -> tuple[torch.Tensor, ...]:
    out, mean, log_variance = (value.float() for value in model(batch[0]))
    divergence = (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    return F.mse_loss(out, batch[1]), divergence


def convolutions(norm: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        norm(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        norm(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


def deep(gain: float) -> nn.Module:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(6)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.mul_(gain)
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))[:-1]


def groups_of(params: Any) -> torch.optim.Optimizer:
    first, *rest = params
    groups = [{"params": [first], "lr": 1e-5}, {"params": rest}]
    return torch.optim.AdamW(groups, lr=3e-3)


adam = partial(torch.optim.Adam, lr=3e-3)
adamw = partial(torch.optim.AdamW, lr=3e-3)
safe_adam = partial(torch.optim.Adam, lr=3e-3, eps=1e-4)
sgd = partial(torch.optim.SGD, lr=0.1)
momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


# fmt: off
DESCRIBED = {
    "unequal heads": Training(partial(Heads, 2), partial(adam, eps=1e-16), parts=each_head,
        weights=(2e3, 1e-9)),
    "Adam's eps": Training(mlp, adam),
    "AdamW in a transformer": Training(partial(Tokens, "attention"), adamw, parts=classes,
        batch=tokens),
    "Adam in a convolution": Training(partial(convolutions, nn.BatchNorm2d), adam, parts=classes,
        batch=images),
    "RMSprop": Training(mlp, partial(torch.optim.RMSprop, lr=1e-3)),
    "softmax by hand": Training(partial(Softmax, 1.0), adam,
        batch=lambda: tuple(t.view(4, 12, WIDTH) for t in pairs())),
    "softmax by hand, large": Training(partial(Softmax, 3.0), adam,
        batch=lambda: tuple(t.view(4, 12, WIDTH) for t in pairs())),
    "sparse embedding": Training(partial(Tokens, "", sparse=True), partial(torch.optim.SGD, lr=1.0),
        parts=classes, batch=tokens),
    "near the limit": Training(partial(deep, 2.5), partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "bias before a norm": Training(partial(mlp, partial(nn.BatchNorm1d, 2 * WIDTH)), safe_adam),
}
# fmt: on
"""Kinds that the planner was known to be wrong about."""


class Penalty(nn.Module):
    """What has to be differentiated twice."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def equation(model: nn.Module, batch: Any) -> tuple[torch.Tensor, ...]:
    """Solve u' = cos x by the residual."""
    x = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return ((slope.float() - batch[1]).square().mean(),)


def absolute(model: nn.Module, batch: Any) -> tuple[torch.Tensor, ...]:
    return (F.l1_loss(model(batch[0]).float(), batch[1]),)


def likelihood(model: nn.Module, batch: Any) -> tuple[torch.Tensor, ...]:
    return (
        F.binary_cross_entropy_with_logits(model(batch[0]).float(), (batch[1] > 0).to(batch[1])),
    )


def contrast(model: nn.Module, batch: Any) -> tuple[torch.Tensor, ...]:
    a, b = (F.normalize(model(x).float(), dim=-1) for x in batch)
    return (F.cross_entropy(a @ b.T / 0.05, torch.arange(len(a))),)


def energy(model: nn.Module, batch: Any) -> tuple[torch.Tensor, ...]:
    out = model(batch[0])
    return (torch.logsumexp(out, -1).mean() - (out * batch[1]).mean(),)


class Residual(nn.Module):
    """A stream that grows with every block."""

    def __init__(self, blocks: int, gain: float) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(blocks)]
        with torch.no_grad():
            for layer in layers:
                layer.weight.mul_(gain)
        self.blocks = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)


class Fourier(nn.Module):
    """Features of a position that bfloat16 cannot tell from its neighbour."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(2 * WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = x * torch.arange(1, WIDTH + 1)
        return self.out(torch.cat([angles.sin(), angles.cos()], -1))


def positions() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.linspace(0, 300, ROWS).view(-1, 1)
    return x, torch.sin(3 * x)


def line() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.linspace(-2, 2, ROWS).view(-1, 1)
    return x, x.cos()


def folded(data: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: tuple(t.view(4, 12, WIDTH) for t in data())


def one_hot() -> tuple[torch.Tensor, torch.Tensor]:
    return F.one_hot(torch.arange(ROWS) % WIDTH, WIDTH).float(), torch.arange(ROWS) * 5 % WIDTH


# fmt: off
NEW = {
    "recurrent": Training(partial(Tokens, "GRU"), adamw, parts=classes, batch=tokens),
    "LSTM, momentum": Training(partial(Tokens, "LSTM"), partial(momentum, lr=0.5), parts=classes,
        batch=tokens),
    "tied weights": Training(partial(Tokens, "attention", tied=True), adam, parts=classes,
        batch=tokens),
    "sparse, slow": Training(partial(Tokens, "", sparse=True), partial(torch.optim.SGD, lr=0.05),
        parts=classes, batch=tokens),
    "SparseAdam": Training(partial(nn.Embedding, 30, 30, sparse=True),
        partial(torch.optim.SparseAdam, lr=1e-2), parts=classes, batch=tokens),
    "convolution, SGD": Training(partial(convolutions, nn.BatchNorm2d),
        partial(momentum, weight_decay=1e-4), parts=classes, batch=images),
    "group norm": Training(partial(convolutions, partial(nn.GroupNorm, 4)), safe_adam,
        parts=classes, batch=images),
    "instance norm": Training(partial(convolutions, nn.InstanceNorm2d), adamw, parts=classes,
        batch=images),
    "Adagrad": Training(mlp, partial(torch.optim.Adagrad, lr=0.02)),
    "Adadelta": Training(mlp, partial(torch.optim.Adadelta, lr=1.0)),
    "Adamax": Training(mlp, partial(torch.optim.Adamax, lr=3e-3)),
    "NAdam, safe eps": Training(mlp, partial(torch.optim.NAdam, lr=3e-3, eps=1e-4)),
    "FusedAdam": Training(mlp, partial(FusedAdam, lr=3e-3)),
    "FusedLAMB": Training(mlp, partial(FusedLAMB, lr=1e-2)),
    "Rprop": Training(mlp, partial(torch.optim.Rprop, lr=1e-3)),
    "slow AdamW": Training(mlp, partial(torch.optim.AdamW, lr=1e-6)),
    "slow SGD": Training(mlp, partial(torch.optim.SGD, lr=1e-5)),
    "groups of different rates": Training(mlp, groups_of),
    "small loss, SGD": Training(mlp, partial(torch.optim.SGD, lr=1e7), weights=(1e-8,)),
    "small loss, Adam": Training(mlp, partial(adam, eps=1e-20), weights=(1e-12,)),
    "large loss": Training(mlp, adam, parts=summed, weights=(1e4,)),
    "unequal heads, SGD": Training(partial(Heads, 2), sgd, parts=each_head, weights=(1.0, 1e-7)),
    "three heads": Training(partial(Heads, 3), partial(adam, eps=1e-16), parts=each_head,
        weights=(1.0, 1e-3, 1e-6)),
    "large residual stream": Training(partial(Residual, 12, 4.0), safe_adam),
    "huge residual stream": Training(partial(Residual, 24, 4.0), safe_adam),
    "norm by hand": Training(partial(mlp, RmsNorm), safe_adam, batch=partial(pairs, 30.0)),
    "norm by hand, large": Training(partial(mlp, RmsNorm), safe_adam, batch=partial(pairs, 2000.0)),
    "mask of -1e9": Training(partial(Masked, -1e9), safe_adam, batch=folded(pairs)),
    "mask of -1e4": Training(partial(Masked, -1e4), safe_adam, batch=folded(pairs)),
    "mask of -inf": Training(partial(Masked, -float("inf")), safe_adam, batch=folded(pairs)),
    "autoencoder": Training(Vae, adamw, parts=variational, weights=(1.0, 0.1)),
    "differentiated twice": Training(Penalty, adam, parts=equation, batch=line),
    "absolute error": Training(mlp, sgd, parts=absolute),
    "likelihood": Training(partial(mlp, act=nn.SiLU), adam, parts=likelihood),
    "contrast": Training(mlp, adam, parts=contrast),
    "energy": Training(mlp, safe_adam, parts=energy),
    "large targets": Training(mlp, partial(adam, lr=0.1), batch=partial(pairs, 1.0, 500.0)),
    "large inputs": Training(mlp, safe_adam, batch=partial(pairs, 3e4)),
    "inputs beyond float16": Training(mlp, safe_adam, batch=partial(pairs, 1e6)),
    "variance of large inputs": Training(lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), mlp()),
        safe_adam, batch=partial(pairs, 1e3)),
    "positions": Training(Fourier, adam, batch=positions),
    "saturated": Training(partial(mlp, act=nn.Sigmoid, gain=30.0), safe_adam),
    "dropout": Training(partial(mlp, partial(nn.Dropout, 0.2)), safe_adam),
    "dead units": Training(partial(mlp, act=nn.ReLU, gain=3.0), sgd),
    "high rate": Training(partial(deep, 1.5), partial(momentum, lr=0.5)),
    "deep, plain": Training(partial(deep, 1.0), partial(adam, lr=1e-2)),
    "one hot": Training(mlp, partial(momentum, lr=0.5), parts=classes, batch=one_hot),
    "cubes": Training(lambda: nn.Sequential(mlp(), _Power(3), nn.Linear(WIDTH, WIDTH)), safe_adam,
        batch=partial(pairs, 8.0)),
}
# fmt: on
"""Kinds that nothing was tuned for when they were written."""


class By(nn.Module):
    """A linear layer, a function written out by hand, and another layer."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], gain: float = 1.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.function = function
        with torch.no_grad():
            self.first.weight.mul_(gain)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.function(self.first(x)))


class LayerScale(nn.Module):
    """Branches that begin at almost nothing."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.branch = mlp()
        self.scale = nn.Parameter(torch.full((WIDTH,), start))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.scale * self.branch(x))


class Gated(nn.Module):
    """Experts, mixed by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(mlp() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.gate(x).softmax(-1)
        outs = torch.stack([expert(x) for expert in self.experts], -1)
        return (outs * gates.unsqueeze(-2)).sum(-1)


class Frozen(nn.Module):
    """A backbone that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = mlp().requires_grad_(False)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))


class Tempered(nn.Module):
    """A learned temperature."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.net = mlp()
        self.log_scale = nn.Parameter(torch.tensor(start))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.net(x), dim=-1) * self.log_scale.exp()


def by_log(model: nn.Module, batch: Any) -> tuple[torch.Tensor, ...]:
    """Likelihood of classes by the logarithm of probabilities, with the eps that papers have."""
    chosen = model(batch[0]).gather(-1, batch[1].unsqueeze(-1))
    return (-(chosen + 1e-12).log().mean(),)


def huber(model: nn.Module, batch: Any) -> tuple[torch.Tensor, ...]:
    return (F.huber_loss(model(batch[0]).float(), batch[1], delta=0.1),)


def hinge(model: nn.Module, batch: Any) -> tuple[torch.Tensor, ...]:
    return (F.multi_margin_loss(model(batch[0]).float(), batch[1]),)


def weighted(model: nn.Module, batch: Any) -> tuple[torch.Tensor, ...]:
    weights = torch.logspace(-3, 3, ROWS).view(-1, 1)
    return (((model(batch[0]).float() - batch[1]).square() * weights).mean(),)


def two_sums(model: nn.Module, batch: Any) -> tuple[torch.Tensor, ...]:
    out = model(batch[0])
    return F.mse_loss(out.float(), batch[1]), out.float().square().sum()


def penalized(model: nn.Module, batch: Any) -> tuple[torch.Tensor, ...]:
    """A regression, and how far the gradient by the input is from a length of 1."""
    x = batch[0].clone().requires_grad_()
    out = model(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    length = grad.float().square().sum(-1).sqrt()
    return F.mse_loss(out.float(), batch[1]), (length - 1).square().mean()


def by_norm(x: torch.Tensor) -> torch.Tensor:
    return x / (x * x).sum(-1, keepdim=True).sqrt()


def standardized(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-8)


def deep_tanh() -> nn.Module:
    return nn.Sequential(*(m for _ in range(15) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def weight_normed() -> nn.Module:
    first = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(first, nn.GELU(), nn.Linear(WIDTH, WIDTH))


def transposed() -> nn.Module:
    first = nn.Unflatten(1, (WIDTH, 1, 1)), nn.ConvTranspose2d(WIDTH, 8, 4), nn.BatchNorm2d(8)
    return nn.Sequential(*first, nn.ReLU(), nn.Flatten(), nn.Linear(128, WIDTH))


def local_response() -> nn.Module:
    first = nn.Conv2d(3, 8, 3), nn.LocalResponseNorm(3), nn.ReLU()
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(288, 4))


def wide_rates(params: Any) -> torch.optim.Optimizer:
    first, last = (own := list(params))[:4], own[4:]
    return torch.optim.SGD([{"params": first, "lr": 0.1}, {"params": last, "lr": 1e5}])


# fmt: off
LATER = {
    "log of probabilities": Training(lambda: nn.Sequential(mlp(gain=8.0), nn.Softmax(-1)),
        safe_adam, parts=by_log, batch=one_hot),
    "norm of large values": Training(partial(By, by_norm, 60.0), safe_adam),
    "norm of small values": Training(partial(By, by_norm, 1e-4), safe_adam),
    "standardized": Training(partial(By, standardized), safe_adam),
    "standardized zeros": Training(partial(By, standardized), safe_adam,
        batch=lambda: (pairs()[0] * (torch.arange(ROWS) > 5).view(-1, 1), pairs()[1])),
    "running sums": Training(partial(By, lambda x: x.cumsum(0) / 100), safe_adam,
        batch=partial(pairs, 30.0)),
    "exponentials": Training(partial(By, torch.exp), safe_adam, batch=partial(pairs, 3.0)),
    "reciprocals": Training(partial(By, lambda x: 1 / (x.square() + 1e-6)),
        partial(safe_adam, lr=1e-5)),
    "logarithms": Training(partial(By, lambda x: (x.abs() + 1e-10).log()), safe_adam),
    "layer scale 1e-5": Training(partial(LayerScale, 1e-5), safe_adam),
    "layer scale 1e-9": Training(partial(LayerScale, 1e-9), adamw),
    "experts": Training(Gated, adamw),
    "frozen backbone": Training(Frozen, safe_adam),
    "temperature": Training(partial(Tempered, 3.0), safe_adam, parts=classes, batch=one_hot),
    "high temperature": Training(partial(Tempered, 12.0), partial(safe_adam, lr=1e-3),
        parts=classes, batch=one_hot),
    "Huber": Training(mlp, partial(sgd, lr=1.0), parts=huber),
    "hinge": Training(mlp, sgd, parts=hinge, batch=one_hot),
    "weighted rows": Training(mlp, adam, parts=weighted),
    "penalty on outputs": Training(mlp, adamw, parts=two_sums, weights=(1.0, 1e-6)),
    "gradient penalty": Training(mlp, adam, parts=penalized, weights=(1.0, 0.1)),
    "gradient penalty, SGD": Training(partial(mlp, act=nn.Tanh), partial(sgd, lr=0.02),
        parts=penalized, weights=(1.0, 0.1)),
    "AMSGrad": Training(mlp, partial(safe_adam, amsgrad=True)),
    "RAdam": Training(mlp, partial(torch.optim.RAdam, lr=1e-2)),
    "Nesterov": Training(mlp, partial(momentum, nesterov=True)),
    "averaged SGD": Training(mlp, partial(torch.optim.ASGD, lr=0.1)),
    "Adafactor": Training(mlp, partial(torch.optim.Adafactor, lr=1e-2)),
    "decay": Training(mlp, partial(adamw, weight_decay=0.5)),
    "fast Adam": Training(mlp, partial(adam, lr=0.03)),
    "middling AdamW": Training(mlp, partial(adamw, lr=1e-4)),
    "middling SGD": Training(mlp, partial(sgd, lr=3e-3)),
    "small weights": Training(partial(mlp, gain=1e-3), safe_adam),
    "wide range of rates": Training(partial(Heads, 2), wide_rates,
        parts=each_head, weights=(1.0, 1e-6)),
    "deep tanh": Training(deep_tanh, partial(safe_adam, eps=1e-3)),
    "deep tanh, Adam": Training(deep_tanh, adam),
    "weight norm": Training(weight_normed, safe_adam),
    "transposed convolution": Training(transposed, adamw),
    "bags of words": Training(
        lambda: nn.Sequential(nn.EmbeddingBag(30, WIDTH), nn.Linear(WIDTH, 4)),
        partial(momentum, lr=0.5), parts=classes, batch=lambda: (tokens()[0], torch.arange(8) % 4)),
    "attention without the root": Training(partial(Masked, -float("inf")), adamw,
        batch=folded(partial(pairs, 6.0))),
    "prelu and layer norm": Training(partial(mlp, partial(nn.LayerNorm, 2 * WIDTH), act=nn.PReLU),
        safe_adam),
    "local response": Training(local_response, safe_adam, parts=classes, batch=images),
}
# fmt: on
"""Kinds that were added when the others came right."""


class Cancelling(nn.Module):
    """A norm whose variance is the difference of two means, which half formats cannot tell."""

    def __init__(self, floor: float) -> None:
        super().__init__()
        self.floor = floor
        self.weight = nn.Parameter(torch.ones(2 * WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        return self.weight * (x - mean) * torch.rsqrt(variance.clamp(min=self.floor))


def shifted(by: float, floor: float = 1e-5) -> nn.Module:
    """Features that lie ``by`` away from zero, and a norm whose variance cancels."""
    model = mlp(partial(Cancelling, floor))
    with torch.no_grad():
        cast("nn.Linear", cast("nn.Sequential", model)[0]).bias.add_(by)
    return model


class Adversaries(nn.Module):
    """A generator, and a critic that sees its gradient reversed."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = mlp()
        self.critic = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(), nn.Linear(WIDTH, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.generator(x)
        reversed_ = 2 * made.detach() - made  # the same values, and minus the gradient
        return self.critic(reversed_), self.critic(y)


def adversarial(model: nn.Module, batch: Any) -> tuple[torch.Tensor, ...]:
    fake, real = (out.float() for out in model(*batch))
    return F.softplus(fake).mean(), F.softplus(-real).mean()


def noisy(model: nn.Module, batch: Any) -> tuple[torch.Tensor, ...]:
    """A regression on rows drawn anew at every step."""
    rows = torch.randint(ROWS, (8,))
    return (F.mse_loss(model(batch[0][rows]).float(), batch[1][rows]),)


def shaken(model: nn.Module, batch: Any) -> tuple[torch.Tensor, ...]:
    out = model(batch[0] + 0.3 * torch.randn(batch[0].shape))
    return (F.mse_loss(out.float(), batch[1]),)


# fmt: off
STAYING = {
    **{
        f"cancelling variance, {by:g} away": Training(partial(shifted, by), partial(adamw, lr=lr))
        for by, lr in ((3.0, 3e-3), (10.0, 3e-3), (10.0, 1e-2), (30.0, 1e-3), (100.0, 3e-3))
    },
    "cancelling variance, SGD": Training(partial(shifted, 20.0), sgd),
    "cancelling variance, wide floor": Training(partial(shifted, 20.0, 1e-2), safe_adam),
    **{
        f"softmax by hand, {gain:g}": Training(partial(Softmax, gain), adamw, batch=folded(pairs))
        for gain in (2.0, 2.5, 4.0)
    },
    "bfloat16 weights stand still": Training(mlp, partial(adamw, lr=3e-5)),
    "activations of 1e5": Training(partial(mlp, RmsNorm, gain=1e5), safe_adam),
    "rows drawn anew": Training(mlp, adamw, parts=noisy),
    "shaken inputs": Training(mlp, partial(sgd, lr=0.3), parts=shaken),
    "exactly zero": Training(mlp, partial(adamw, lr=1e-2), parts=hinge, batch=one_hot),
    "nearly zero": Training(lambda: nn.Linear(WIDTH, WIDTH), partial(torch.optim.SGD, lr=5.0),
        parts=lambda model, batch: (F.mse_loss(model(batch[0]).float(), batch[0]),)),
    "recurrent, slow": Training(partial(Tokens, "RNN"), partial(adamw, lr=1e-4), parts=classes,
        batch=tokens),
    "transformer, slow": Training(partial(Tokens, "attention"), partial(adamw, lr=1e-4),
        parts=classes, batch=tokens),
}
# fmt: on
"""Kinds whose losses fall in half as well, but do not come near float32's; and healthy ones."""

# fmt: off
GAMES = {
    "slow": Training(Adversaries, adamw, parts=adversarial, weights=(1.0, 1.0)),
    "fast": Training(Adversaries, partial(torch.optim.Adam, lr=1e-2, betas=(0.5, 0.9)),
        parts=adversarial, weights=(1.0, 1.0)),
}
# fmt: on
"""Trainings whose losses do not fall, so that no progress tells whether a level trains."""

ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "batch norm": partial(mlp, partial(nn.BatchNorm1d, 2 * WIDTH)),
    "layer norm": partial(mlp, partial(nn.LayerNorm, 2 * WIDTH), act=nn.SiLU),
    "rms norm": partial(mlp, RmsNorm, act=nn.ReLU),
    "deep": partial(deep, 1.4),
    "residual": partial(Residual, 6, 1.5),
    "experts": Gated,
    "layer scale": partial(LayerScale, 1e-4),
    "gated unit": lambda: nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.GLU(), nn.Linear(WIDTH, WIDTH)
    ),
    "squares": partial(By, torch.square),
    "large gain": partial(mlp, act=nn.Tanh, gain=20.0),
}
LOSSES: dict[str, tuple[Parts, float]] = {
    "mean square": (square, 1.0),
    "sum of squares": (summed, 1.0),
    "absolute error": (absolute, 1.0),
    "Huber": (huber, 1.0),
    "likelihood": (likelihood, 1.0),
    "small": (square, 1e-6),
    "large": (square, 1e5),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.02),
    "momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=1e-4),
    "Adam": partial(torch.optim.Adam, lr=2e-3),
    "slow Adam": partial(torch.optim.Adam, lr=1e-5),
    "AdamW, eps 1e-5": partial(torch.optim.AdamW, lr=2e-3, eps=1e-5),
    "RMSprop, eps 1e-4": partial(torch.optim.RMSprop, lr=5e-4, eps=1e-4),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.01),
    "FusedAdam": partial(FusedAdam, lr=2e-3),
}
INPUTS = (1.0, 0.01, 100.0)


def drawn(count: int, seed: int) -> dict[str, Training]:
    """Combinations of all these, without a choice of anyone's."""
    kinds = list(itertools.product(ARCHITECTURES, LOSSES, OPTIMIZERS, INPUTS))
    found: dict[str, Training] = {}
    for architecture, loss, optimizer, inputs in Random(seed).sample(kinds, count):
        parts, weight = LOSSES[loss]
        found[f"{architecture}, {loss}, {optimizer}, {inputs:g}"] = Training(
            ARCHITECTURES[architecture],
            OPTIMIZERS[optimizer],
            parts=parts,
            batch=partial(pairs, inputs),
            weights=(weight,),
        )
    return found


DRAWN = drawn(40, seed=17)

CASES = {**DESCRIBED, **NEW, **LATER, **STAYING, **DRAWN}
