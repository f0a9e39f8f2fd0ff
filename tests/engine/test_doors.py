# SPDX-License-Identifier: BSD-3-Clause
"""Wherever a script may look at or change weights and gradients, it finds what plain torch has.

Each test makes the same calls on an initialized model and on float32 weights without any engine,
on numbers that half precision holds exactly, and wants the same bits.
"""

import copy
import math
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel

import preamp
import preamp.optimizers
from cases.levels import BY_NAME, LEVEL_NAMES, WITH_MASTERS
from cases.models import Parts, values
from cases.tolerances import assert_same
from kit.compare import halves_match
from kit.pair import Pair, adam, sgd
from kit.refusals import refused
from preamp import fp16_utils
from preamp.compat import flat

levels = pytest.mark.parametrize("level", LEVEL_NAMES)
with_masters = pytest.mark.parametrize("level", WITH_MASTERS)


def refused_at(level: str, name: str) -> Any:
    half = str(BY_NAME[level].half).removeprefix("torch.")
    return refused("doors", name, changes=True, half=half)


class BodyError(Exception):
    """What the body of a block raises; preamp itself never does."""


def engine_of(owner: object) -> Any:
    return preamp.engine_of(owner)


def masters_of(pair: Pair) -> list[torch.Tensor]:
    return list(preamp.master_params(pair.optimizer))


# -- clipping --------------------------------------------------------------------------------------


OVERFLOWING = pytest.mark.parametrize(("level", "scale"), [("O2", 2.0**22), ("O5", 2.0**100)])
"""Scales whose gradients are finite in half precision while their norm is not."""


def signed(pair: Pair) -> Pair:
    """Let gradients have both signs: by these zeros of a clip differ from a script's zeros."""
    for model in (pair.model, pair.plain):
        for param in model.parameters():
            sign = torch.ones(param.shape)
            sign.view(-1)[::2] = -1.0
            param.register_hook(lambda grad, sign=sign: grad * sign.to(grad.dtype))
    return pair


@OVERFLOWING
@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("door", ["step", "read", "clip", "backward"])
def test_clipping_scaled_gradients_to_nothing_is_noticed_at_every_door(
    level: str, scale: Any, read: bool, door: str
) -> None:
    pair = signed(Pair(level, loss_scale=scale))
    pair.backward(0)
    if read:
        pair.check_grads()
    before = values(pair.optimizer)
    assert not clip_grad_norm_(pair.model.parameters(), 1.0).isfinite()
    doors: dict[str, Callable[[], object]] = {
        "step": pair.optimizer.step,
        "read": lambda: [master.grad for master in preamp.master_params(pair.optimizer)],
        "clip": lambda: preamp.clip_grad_norm_(pair.optimizer, 1.0),
        "backward": lambda: pair.ours(1),
    }
    with refused_at(level, "a write to scaled gradients"):
        doors[door]()
    for now, was in zip(values(pair.optimizer), before, strict=True):
        assert_same(now, was)
    pair.zero()  # afterwards all is as it was
    pair.train(2)
    pair.check()


@with_masters
def test_a_clip_that_underflows_is_refused(level: str) -> None:
    """The norm is finite; the factor makes every element a zero with its sign."""
    pair = signed(Pair(level, loss_scale=128.0))
    pair.backward(0)
    assert clip_grad_norm_(pair.model.parameters(), 1e-38).isfinite()
    with refused_at(level, "a write to scaled gradients"):
        pair.optimizer.step()


@levels
@pytest.mark.parametrize("read", [False, True])
def test_asking_for_the_norm_changes_nothing(level: str, read: bool) -> None:
    """Multiplied by one in place: written to, and the same."""
    is_whole = level not in WITH_MASTERS  # what accumulates lies beside the last gradient there
    pair = Pair(level, loss_scale=128.0 if is_whole else 1.0)
    for index in range(2 if is_whole else 1):
        pair.backward(index)
        if read:
            pair.check_grads()
        assert clip_grad_norm_(pair.model.parameters(), math.inf).isfinite()
        assert clip_grad_norm_(pair.model.parameters(), 1e6).isfinite()  # torch multiplies then too
    pair.check_grads()
    pair.step()
    pair.check()


@with_masters
@pytest.mark.parametrize("scale", [1.0, 128.0])
@pytest.mark.parametrize("failing", [False, True])
def test_a_clip_of_zeros_in_place_of_earlier_gradients_drops_nothing(
    level: str, scale: float, failing: bool
) -> None:
    """They lie there where a block brought nothing new, and would stay zeros."""
    pair = Pair(level, loss_scale=scale)
    pair.backward(0, "a")
    with suppress(BodyError), preamp.scale_loss(pair.loss(1, "b"), pair.optimizer) as scaled:
        scaled.backward()
        if failing:
            raise BodyError
    clip_grad_norm_(pair.model.get_submodule("a").parameters(), 2.0**-12)
    with refused_at(level, "a clip of zeros"):
        pair.optimizer.step()


WRITES: dict[str, Callable[[Any], object]] = {
    "value": lambda p: p.grad.clamp_(-64.0, 64.0),
    "norm asked for": lambda p: p.grad.mul_(1.0),
    "all but the largest": lambda p: p.grad.mul_(p.grad == p.grad.max()),
    "last element": lambda p: p.grad.view(-1)[-1:].mul_(0.5),
    "decay": lambda p: p.grad.add_(2.0**-20),
    "doubled": lambda p: p.grad.mul_(2.0),
    "replaced": lambda p: setattr(p, "grad", p.grad * 2),
}
"""The first five leave nearly all values, or all, and the first ones and largest magnitude."""


def wide_pair(level: str, **options: Any) -> Any:
    """A weight of 4,096 elements whose gradient is small but for its last element, which is 1."""
    model = nn.Linear(4096, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = sgd(model.parameters())
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    inputs = torch.full((1, 4096), 2.0**-12)
    inputs[0, -1] = 1.0
    return model, optimizer, inputs


@with_masters
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("read", [False, True])
def test_any_write_to_scaled_gradients_is_refused(level: str, write: str, read: bool) -> None:
    model, optimizer, inputs = wide_pair(level, loss_scale=128.0)
    with preamp.scale_loss(model(inputs).sum(), optimizer) as scaled:
        scaled.backward()
    if read:
        assert [master.grad for master in preamp.master_params(optimizer)]
    WRITES[write](model.weight)
    with refused_at(level, "a write to scaled gradients"):
        optimizer.step()
    assert not model.weight.any()
    optimizer.zero_grad()
    with preamp.scale_loss(model(inputs).sum(), optimizer) as scaled:
        scaled.backward()
    lr = optimizer.param_groups[0]["lr"]
    optimizer.step()
    assert_same(model.weight.detach().float(), (-lr * inputs).to(model.weight.dtype).float())


@with_masters
def test_the_norm_of_accumulated_gradients_is_not_that_of_the_last(level: str) -> None:
    """No scale is on them; clipped by it, their sum might be larger than allowed."""
    pair = Pair(level, loss_scale=1.0)
    pair.backward(0)
    pair.backward(1)
    clip_grad_norm_(pair.model.parameters(), math.inf)
    with refused_at(level, "a clip of the last gradient"):
        pair.optimizer.step()


@with_masters
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_infinities_that_a_script_replaces_after_unscaling(level: str, value: float) -> None:
    """A static scale does not look for them; float16 values are not taken as written."""
    model, optimizer, inputs = wide_pair(level, loss_scale=128.0)
    scaler = preamp.GradScaler(optimizer)
    inputs[0, -1] = value
    scaler.scale(model(inputs).sum()).backward()
    scaler.unscale_(optimizer)
    model.weight.grad.nan_to_num_(0.5, 0.5, 0.5)
    if BY_NAME[level].half is torch.float16:
        with pytest.raises(preamp.PreampStateError, match="changed after unscale_"):
            scaler.step(optimizer)
        return
    scaler.step(optimizer)
    lr = optimizer.param_groups[0]["lr"]
    inputs[0, -1] = 0.5
    assert_same(model.weight.detach().float(), (-lr * inputs).to(model.weight.dtype).float())


@with_masters
@pytest.mark.parametrize("read", [False, True])
def test_zeros_with_a_sign_are_no_clip_where_nobody_clipped(level: str, read: bool) -> None:
    """A backward may make them; a script may zero them."""
    pair = Pair(level, loss_scale=128.0)
    for side, backward in ((pair.model, pair.ours), (pair.plain, pair.theirs)):
        for param in side.parameters():
            param.register_hook(lambda grad: grad * -0.0)
        backward(0)
    if read:
        pair.check_grads()
    for model in (pair.model, pair.plain):
        grad = model.get_parameter("a.weight").grad
        assert grad is not None
        grad.zero_()
    pair.check_grads()
    pair.step()
    pair.check()


# -- copies and averages ---------------------------------------------------------------------------


def train(pair: Pair, count: int = 1, *, start: int = 0) -> None:
    for index in range(start, start + count):
        pair.train(index)


@with_masters
@pytest.mark.parametrize("write", [False, True])
def test_exact_weights_between_a_forward_and_its_backward(level: str, write: bool) -> None:
    """An average may be taken there; weights that the forward saved and are written to are not."""
    pair = Pair(level, lambda ps: torch.optim.SGD(ps, lr=0.5), Bowl, loss_scale=128.0)
    loss = pair.model(torch.ones(4)).float()
    with engine_of(pair.model).exact_weights(), torch.no_grad():
        AveragedModel(pair.model).update_parameters(pair.model)
        if write:
            for param in pair.model.parameters():
                param.mul_(1.0)
    with ExitStack() as stack:
        if write:
            stack.enter_context(pytest.raises(RuntimeError, match="modified by an inplace"))
        with preamp.scale_loss(loss, pair.optimizer) as scaled:
            scaled.backward()
        pair.plain(torch.ones(4)).backward()
        pair.step()
        pair.check()


class Mixture(nn.Module):
    """What has a master beside what has none: frozen, of no optimizer, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.trained = nn.Linear(4, 4)
        self.other = nn.Linear(4, 2)
        self.register_buffer("mix", torch.full((4, 4), 0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.trained(self.norm(self.frozen(x)) @ self.mix))


TRAINED: dict[str, Callable[[Mixture], list[nn.Parameter]]] = {
    "one layer": lambda model: [*model.trained.parameters()],
    "biases": lambda model: [p for name, p in model.named_parameters() if name.endswith("bias")],
    "nothing": lambda model: [],
}


def mixture(level: str, trained: str, **more: Any) -> Any:
    torch.manual_seed(0)
    model = Mixture()
    model.frozen.requires_grad_(False)
    params = [p for p in TRAINED[trained](model) if p.requires_grad]
    optimizer = preamp.optimizers.FusedSGD(params, lr=0.5) if params else None
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0, **more)
    return model, optimizer


@pytest.mark.each
@with_masters
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("storage", ["full", "split"])
def test_in_exact_weights_all_is_float32(level: str, trained: str, storage: str) -> None:
    model, optimizer = mixture(level, trained, storage=storage)
    if optimizer is not None:
        with preamp.scale_loss(model(torch.ones(3, 4)).sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    model.eval()
    halves = {name: tensor.clone() for name, tensor in tensors_of(model).items()}
    average, plain, x = AveragedModel(model), copy.deepcopy(model), torch.randn(3, 4)
    with suppress(BodyError), engine_of(model).exact_weights():
        assert {t.dtype for t in tensors_of(model).values()} == {torch.float32}
        assert_same(model(x), plain(x))
        assert_same(model(x.half()), plain(x.half().float()))
        average.update_parameters(model)
        raise BodyError  # the weights go back whatever happens
    for name, tensor in tensors_of(model).items():
        assert_same(tensor, halves[name], name)
    for ours, wanted in zip(average.module.parameters(), plain.parameters(), strict=True):
        assert_same(ours.detach(), wanted.detach())


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    found = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in found if tensor.is_floating_point()}


@with_masters
def test_what_is_written_to_weights_without_masters_is_rounded(level: str) -> None:
    model, _ = mixture(level, "one layer")
    held = [model.frozen.weight, model.other.weight, model.mix]
    with engine_of(model).exact_weights(), torch.no_grad():
        for tensor in held:
            tensor.fill_(1.0 + 2.0**-20)
        held[1].data.mul_(2)
    for tensor, value in zip(held, (1.0, 2.0, 1.0), strict=True):
        assert_same(tensor.detach(), torch.full_like(tensor, value))
    assert model(torch.ones(3, 4)).dtype is torch.float32


@with_masters
def test_frozen_weights_between_a_forward_and_its_backward(level: str) -> None:
    """Frozen weights that autograd has saved are not written to."""
    model, optimizer = mixture(level, "one layer", loss_scale=1.0)
    gradients: list[tuple[Any, ...]] = []
    for looks in (False, True):
        x = torch.arange(12.0).view(3, 4).square().requires_grad_()
        loss = model(x).sum()
        if looks:
            with engine_of(model).exact_weights():
                pass
        with preamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        gradients.append((x.grad, model.trained.weight.grad.clone()))
        optimizer.zero_grad()
    for ours, wanted in zip(*gradients, strict=True):
        assert_same(ours, wanted)


@with_masters
def test_exact_weights_within_exact_weights(level: str) -> None:
    model, optimizer = mixture(level, "one layer")
    engine, x = engine_of(model), torch.ones(3, 4)
    model.eval()
    with engine.exact_weights():
        wanted = model(x)
        with suppress(BodyError), engine.exact_weights(), torch.no_grad():
            model.trained.bias.add_(2.0**-20)
            raise BodyError
        assert {t.dtype for t in tensors_of(model).values()} == {torch.float32}
        model.trained.bias.data.sub_(2.0**-20)
        assert_same(model(x), wanted)
        model.trained.bias.data.add_(2.0**-20)
    assert model.trained.bias.dtype is not torch.float32
    assert_same(optimizer.param_groups[0]["params"][1].detach(), model.state_dict()["trained.bias"])
    with engine.exact_weights():
        assert model.trained.bias.dtype is torch.float32


@with_masters
def test_loading_within_exact_weights_is_exact(level: str) -> None:
    pair = Pair(level)
    state = {key: value + 2.0**-20 for key, value in pair.plain.state_dict().items()}
    with engine_of(pair.model).exact_weights():
        pair.model.load_state_dict(state)
    pair.plain.load_state_dict(state)
    pair.check()
    train(pair)
    pair.check()


@pytest.mark.parametrize("level", [name for name in LEVEL_NAMES if name not in WITH_MASTERS])
def test_exact_weights_change_nothing_without_masters(level: str) -> None:
    model, _ = mixture(level, "one layer")
    before = tensors_of(model)
    with engine_of(model).exact_weights(), engine_of(model).exact_weights():
        for name, tensor in tensors_of(model).items():
            assert tensor.data_ptr() == before[name].data_ptr()


@with_masters
def test_exact_weights_of_an_engine_that_gave_its_model_away(level: str) -> None:
    model, optimizer = mixture(level, "one layer")
    earlier = engine_of(model)
    second = torch.optim.SGD(model.other.parameters(), lr=0.5)
    preamp.initialize(model, second, opt_level=level, verbosity=0, allow_half_model=True)
    with earlier.exact_weights():
        assert model.other.weight.dtype is not torch.float32
        assert model.frozen.weight.dtype is not torch.float32
    del optimizer


# -- optimizers that move weights between steps ----------------------------------------------------


class Bowl(nn.Module):
    """Two weight vectors whose gradients depend on them; exact on small integers."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Parameter(torch.full((4,), 4.0))
        self.flat = nn.Parameter(torch.full((4,), -4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.deep * x).square().sum() / 2 + self.flat.square().sum() / 2


def check_halves_at_forward(pair: Pair) -> None:
    """The next forward sees the masters as they are, rounded."""
    seen: list[torch.Tensor] = []

    def look(module: nn.Module, inputs: Any) -> None:
        del inputs
        seen.extend(p.detach().clone() for p in module.parameters())

    with pair.model.register_forward_pre_hook(look), torch.no_grad():
        pair.model(torch.ones(4) if isinstance(pair.model, Bowl) else torch.ones(2, 3))
    wanted = [p.detach() for g in pair.plain_optimizer.param_groups for p in g["params"]]
    for ours, theirs in zip(seen, wanted, strict=True):
        assert_same(ours, theirs.to(ours.dtype))
    assert halves_match(pair.model)


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD: trains at y, evaluates at x, between which train() and eval() move."""

    def _of(self, p: torch.Tensor) -> torch.Tensor:
        return p

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 2.0**-3})
        self.is_training = True

    def _each(self) -> Iterable[torch.Tensor]:
        return (p for group in self.param_groups for p in group["params"])

    @torch.no_grad()
    def eval(self) -> None:
        moved = [p for p in self._each() if self.is_training and "z" in self.state[p]]
        given = list(map(self._of, moved))  # all first, as foreach functions want them
        for p, x in zip(moved, given, strict=True):
            x.lerp_(end=self.state[p]["z"], weight=-1.0)
        self.is_training = False

    @torch.no_grad()
    def train(self) -> None:
        for p in self._each() if not self.is_training else ():
            if "z" in self.state[p]:
                self._of(p).lerp_(end=self.state[p]["z"], weight=0.5)
        self.is_training = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for p in self._each():
            if p.grad is not None:
                z = self.state[p].setdefault("z", p.clone())
                self._of(p).lerp_(end=z, weight=0.5)
                self._of(p).add_(p.grad, alpha=-(2.0**-5))
                z.sub_(p.grad, alpha=2.0**-3)


class ScheduleFreeByData(ScheduleFree):
    """As many packages have it: torch counts no write."""

    def _of(self, p: torch.Tensor) -> torch.Tensor:
        return p.data


class ScheduleFreeByBuffer(ScheduleFree):
    """Moves a buffer that all parameters lie in; the parameters themselves are not touched."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        given = list(self._each())
        self.flat = torch.cat([p.detach().reshape(-1) for p in given])
        parts = self.flat.split([p.numel() for p in given])
        self.views = [part.view(p.shape) for p, part in zip(given, parts, strict=True)]
        for p, view in zip(given, self.views, strict=True):
            p.data = view

    def _of(self, p: torch.Tensor) -> torch.Tensor:
        return self.views[[id(each) for each in self._each()].index(id(p))]


schedule_free = pytest.mark.parametrize(
    "build", [ScheduleFree, ScheduleFreeByData, ScheduleFreeByBuffer]
)


# What a load does depends on what is loaded; the build and what follows act after it, one by one.
@pytest.mark.threes
@with_masters
@schedule_free
@pytest.mark.parametrize("then", ["forward", "state", "train"])
@pytest.mark.parametrize("loaded", ["nothing", "model", "optimizer", "engine"])
def test_what_schedule_free_moves_counts(level: str, build: Any, then: str, loaded: str) -> None:
    """After a load half weights are compared with masters, and count; a later move counts more."""
    pair = Pair(level, build)
    both: Any = (pair.optimizer, pair.plain_optimizer)
    for index in range(3):
        train(pair, start=index)
        owner: Any = getattr(pair, loaded, None)
        if owner is not None and index == 1:
            owner.load_state_dict(copy.deepcopy(owner.state_dict()))
        for optimizer in both:
            optimizer.eval()
        if then == "forward":
            check_halves_at_forward(pair)
        if then == "state":
            for key, value in pair.model.state_dict().items():
                assert_same(value, pair.plain.state_dict()[key], key)
        for optimizer in both:
            optimizer.train()
    check_halves_at_forward(pair)
    pair.check()


class OneByOne(torch.optim.SGD):
    """Its step calls a method of its own for each parameter."""

    def move(self, p: torch.Tensor) -> None:
        p.sub_(p.grad, alpha=0.5)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.move(p)


def calls_of_ours(function: Callable[[], object]) -> int:
    """How many functions of preamp run in ``function``."""
    count, package = 0, str(Path(preamp.__file__).parent)

    def hear(frame: Any, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(package)

    sys.setprofile(hear)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@with_masters
def test_methods_that_a_step_calls_for_each_parameter_cost_the_same_for_each(level: str) -> None:
    counts: list[int] = []
    for layers in (4, 8, 16):
        model = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(layers)])
        optimizer = OneByOne(model.parameters(), lr=0.5)
        preamp.initialize(model, optimizer, opt_level=level, verbosity=0)
        calls = 0
        for _ in range(3):
            with preamp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
                scaled.backward()
            calls = calls_of_ours(optimizer.step)
            optimizer.zero_grad()
        counts.append(calls)
    assert counts[2] - counts[1] == 2 * (counts[1] - counts[0]) > 0


@with_masters
@pytest.mark.parametrize("read", [False, True])
def test_half_weights_that_a_script_swaps_in_stay_for_its_forwards(level: str, read: bool) -> None:
    """Averages evaluate that way, and may read masters before; the next step has the masters."""
    pair = Pair(level)
    train(pair, 2)
    kept = [param.detach().clone() for param in pair.model.parameters()]
    if read:
        assert all(param.data.isfinite().all() for param in masters_of(pair))
    for param in pair.model.parameters():
        param.data.fill_(0.5)
    with torch.no_grad():
        pair.model(torch.ones(2, 3))
    for param, old in zip(pair.model.parameters(), kept, strict=True):
        assert_same(param.detach(), torch.full_like(param, 0.5))
        param.data.copy_(old)
    train(pair, start=2)
    pair.check()


@with_masters
def test_masters_keep_what_a_broadcast_tells_before_and_after_they_are_read(level: str) -> None:
    """Before the first block half weights count, however they were written to."""
    pair = Pair(level)
    expect_written(pair, _first_rows)
    assert all(param.data.isfinite().all() for param in masters_of(pair))
    expect_written(pair, _flattened)
    train(pair, 2)
    pair.check()


@with_masters
def test_writes_through_data_between_a_forward_and_its_backward(level: str) -> None:
    """The backward computes with what is written, as in torch, which counts no write either."""
    pair = Pair(level, lambda ps: torch.optim.SGD(ps, lr=0.5), Bowl, loss_scale=128.0)
    losses = [model(torch.ones(4)).float() for model in (pair.model, pair.plain)]
    for param in (*masters_of(pair), *pair.plain.parameters()):
        param.data.mul_(0.5)
    check_halves_at_forward(pair)
    with preamp.scale_loss(losses[0], pair.optimizer) as scaled:
        scaled.backward()
    losses[1].backward()
    pair.step()
    pair.check()


# -- the wrong loss --------------------------------------------------------------------------------


@levels
@pytest.mark.parametrize("scale", ["dynamic", 128.0])
@pytest.mark.parametrize("earlier", [False, True])
def test_a_backward_of_the_loss_itself_is_refused(level: str, scale: Any, earlier: bool) -> None:
    pair = Pair(level, loss_scale=scale)
    if earlier:
        pair.backward(0)
    loss = pair.loss(1)
    with (
        refused("doors", "a backward of the loss", changes=True),
        preamp.scale_loss(loss, pair.optimizer),
    ):
        loss.backward()
    pair.check_grads()  # those from before
    pair.backward(2)
    pair.step()
    pair.check()


@levels
@pytest.mark.parametrize("scale", [None, "dynamic", 128.0])
def test_other_ways_to_use_what_the_block_yields_are_fine(level: str, scale: Any) -> None:
    pair = Pair(level, loss_scale=scale)
    with preamp.scale_loss(pair.loss(3), pair.optimizer) as scaled:
        params = [p for p in pair.model.parameters() if p.requires_grad]
        for param, grad in zip(params, torch.autograd.grad(scaled, params), strict=True):
            param.grad = grad
    pair.theirs(3)
    with preamp.scale_loss(pair.loss(0), pair.optimizer) as scaled:
        (scaled * 2).backward()
    for _ in range(2):
        pair.theirs(0)
    with preamp.scale_loss(pair.loss(1), pair.optimizer) as scaled:
        torch.autograd.backward([scaled], retain_graph=True)
        scaled.backward()
    for _ in range(2):
        pair.theirs(1)
    with preamp.scale_loss(pair.loss(2), pair.optimizer):
        pass  # no backward: no gradients either
    pair.check_grads()
    pair.step()
    pair.check()


def _plain_steps(pair: Pair, count: int) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for index in range(count):
            pair.loss(index).backward()
            pair.optimizer.step()
            pair.optimizer.zero_grad()
    return [str(warning.message) for warning in told]


@levels
def test_steps_without_any_scale_loss_are_warned_of_once(level: str) -> None:
    texts = _plain_steps(Pair(level, loss_scale="dynamic"), 3)
    assert len(texts) == 1
    assert "scale_loss" in texts[0]


@levels
def test_no_warning_with_a_block_or_without_a_dynamic_scale(level: str) -> None:
    pair = Pair(level, loss_scale="dynamic")
    pair.optimizer.step()  # no gradients: nothing to scale
    train(pair)
    assert _plain_steps(pair, 3) == []
    for scale in (1.0, 128.0):
        assert _plain_steps(Pair(level, loss_scale=scale), 3) == []


# -- writes to half weights that leave no version behind -------------------------------------------


def _fill(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.fill_(0.375)


def _first_rows(model: nn.Module) -> None:
    """The rest keeps its precision."""
    for param in model.parameters():
        param.data[:1] = 2.0


def _flattened(model: nn.Module) -> None:
    """As a broadcast of all weights in one buffer does."""
    data = [param.data for param in model.parameters()]
    buffer = torch.cat([tensor.reshape(-1) for tensor in data]).mul_(2)
    parts = buffer.split([tensor.numel() for tensor in data])
    for tensor, part in zip(data, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


def _through_numpy(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.view(-1).view(torch.int8).numpy()[:] = 0


QUIET_WRITES = [_fill, _first_rows, _flattened, _through_numpy]


def expect_written(pair: Pair, write: Callable[[nn.Module], None]) -> None:
    """Write to both sides: what is not written keeps the master's float32 value."""
    rounded = [p.detach().clone() for p in pair.model.parameters()]
    write(pair.model)
    for ours, old, wanted in zip(
        pair.model.parameters(), rounded, pair.plain.parameters(), strict=True
    ):
        with torch.no_grad():
            wanted.copy_(torch.where(ours == old, wanted, ours.detach().to(wanted.dtype)))


LOADED = {"model", "optimizer", "engine", "amp"}


@levels
@pytest.mark.parametrize("write", QUIET_WRITES)
@pytest.mark.parametrize("after", ["initialize", "a forward", *sorted(LOADED)])
def test_quiet_writes_before_the_first_block_and_after_a_load(
    level: str, write: Callable[[nn.Module], None], after: str
) -> None:
    """Whoever resumes may broadcast what the first rank has read."""
    pair = Pair(level, build=adam if level in WITH_MASTERS else sgd)
    if after == "a forward":
        with torch.no_grad():
            pair.model(torch.ones(2, 3))
    if after in LOADED:
        train(pair, 2)
    if after == "amp":
        pair.engine.load_state_dict(pair.engine.state_dict())
    elif after in LOADED:
        owner: Any = getattr(pair, after)
        owner.load_state_dict(copy.deepcopy(owner.state_dict()))
    expect_written(pair, write)
    train(pair, 2, start=2)
    pair.check()


@with_masters
@pytest.mark.parametrize("build", [sgd, adam])
@pytest.mark.parametrize("write", QUIET_WRITES)
@pytest.mark.parametrize("then", ["train", "state", "copy", "exact"])
def test_half_weights_are_the_truth(
    level: str, build: Any, write: Callable[[nn.Module], None], then: str
) -> None:
    """A write that torch does not count, after any step: elements left alone keep all digits."""
    pair = Pair(level, build=build)
    for index in range(3):
        train(pair, 2, start=index)
        expect_written(pair, write)
        if then == "exact":
            with pair.engine.exact_weights():
                seen = {k: v.detach().clone() for k, v in pair.model.named_parameters()}
        else:
            model = copy.deepcopy(pair.model) if then == "copy" else pair.model
            seen = {} if then == "train" else model.state_dict()
        for key, value in seen.items():
            assert_same(value, pair.plain.state_dict()[key], key)
    train(pair, 3)
    pair.check()


@with_masters
def test_weights_may_be_clamped_after_each_step(level: str) -> None:
    """As the first WGAN does; forward, state and the next step agree."""
    pair = Pair(level, build=adam)
    for index in range(4):
        train(pair, start=index)
        expect_written(pair, lambda model: [p.data.clamp_(-0.01, 0.01) for p in model.parameters()])
        halves = {name: p.detach().clone() for name, p in pair.model.named_parameters()}
        pair.model(torch.ones(2, 3))
        for key, value in pair.model.state_dict().items():
            assert_same(value, pair.plain.state_dict()[key], key)
            assert_same(value.to(halves[key].dtype), halves[key], key)
            assert float(value.abs().max()) < 0.0101
    train(pair, 2, start=4)
    pair.check()


def finish(pair: Pair) -> None:
    pair.check_grads()
    pair.step()
    pair.check()


# -- clipping by other norms, the scale after an overflow ------------------------------------------


@levels
@pytest.mark.parametrize("dropped", [False, True])
def test_one_overflow_halves_the_scale_once(level: str, dropped: bool) -> None:
    pair = Pair(level, loss_scale="dynamic")
    before = values(pair.optimizer)
    pair.overflow()
    assert pair.engine.loss_scale() == 2.0**15
    if dropped:
        pair.zero()
    pair.ours(1, delay_unscale=True)
    pair.ours(2)
    assert pair.engine.loss_scale() == 2.0**15
    if dropped:
        pair.theirs(1)
        pair.theirs(2)
        finish(pair)
    else:
        pair.optimizer.step()
        assert pair.engine.last_step_skipped
        for now, was in zip(values(pair.optimizer), before, strict=True):
            assert_same(now, was)


@levels
def test_one_overflow_left_scaled_in_two_optimizers_halves_the_scale_once(level: str) -> None:
    """Found in one of them first, at the next block of its own."""
    model = Parts()
    opts = [sgd(part.parameters()) for part in (model.a, model.b)]
    preamp.initialize(model, opts, opt_level=level, loss_scale="dynamic", verbosity=0)
    for factor, parts, owners, delays in (
        (math.inf, "ab", opts, True),
        (2.0**-10, "a", opts[:1], False),
        (2.0**-10, "ab", opts, False),
    ):
        loss = model(torch.ones(2, 3), parts).float().sum() * factor
        with preamp.scale_loss(loss, owners, delay_unscale=delays) as scaled:
            scaled.backward()
    assert engine_of(model).loss_scale() == 2.0**15
    for opt in opts:
        opt.step()
        assert engine_of(model).last_step_skipped


# -- the older wrappers ----------------------------------------------------------------------------


WRAPPERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "fp16_utils": lambda opt: fp16_utils.FP16_Optimizer(opt, static_loss_scale=128.0),
    "flat": lambda opt: flat.FP16_Optimizer(opt, static_loss_scale=128.0),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_wrappers_notice_assigned_weights(wrapper: str, times: int, half: torch.dtype) -> None:
    """The second tensor may come to lie where the first weight lay."""
    params = [nn.Parameter(torch.zeros(64, 64, dtype=half)) for _ in range(20)]
    optimizer = WRAPPERS[wrapper](torch.optim.SGD(params, lr=2.0**-10))
    for step in range(1, 11):
        for param in params:
            for value in range(times):
                param.data = torch.full_like(param.data, step + value)
        optimizer.zero_grad()
        optimizer.backward(sum((param.float() * 0).sum() for param in params))
        optimizer.step()
        for param in params:
            assert_same(param.detach(), torch.full_like(param.data, step + times - 1))
