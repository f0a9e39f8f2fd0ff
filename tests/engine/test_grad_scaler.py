# SPDX-License-Identifier: BSD-3-Clause
"""``preamp.GradScaler``: loops written for ``torch.amp``, before and after the one changed line."""

import copy
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import preamp
from cases.levels import BY_NAME, EXACT, LEVEL_NAMES, WITH_MASTERS
from cases.models import Damage, Exact, Parts, loss_of
from cases.selection import examples
from cases.tolerances import assert_same
from kit.loops import begin, scaled_backward
from kit.refusals import assert_refused, refused
from preamp.optimizers import FusedSGD

Build = Callable[..., torch.optim.Optimizer]
BUILDS: dict[str, Build] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.05, eps=1e-4),
    "torch_fused": lambda params: torch.optim.Adam(params, lr=0.05, eps=1e-4, fused=True),
    "fused_sgd": lambda params: FusedSGD(params, lr=0.5, momentum=0.9),
}
SCALE = 2.0**10
"""Below 2**16, where products of the exact models' gradients stay finite in float16."""


class Loop:
    """What a script for ``torch.amp`` has: with torch's scaler, or with ours at a level."""

    def __init__(self, level: str | None, build: str = "sgd", **options: Any) -> None:
        self.models = [Parts(0), Parts(1)]
        self.optimizers = [BUILDS[build](model.parameters()) for model in self.models]
        numbers = {"init_scale": SCALE, "growth_interval": 3, **options}
        if level is None:
            self.scaler: Any = torch.amp.GradScaler("cpu", **numbers)
        else:
            preamp.initialize(
                self.models, self.optimizers, opt_level=level, loss_scale="dynamic", verbosity=0
            )
            self.scaler = preamp.GradScaler(self.optimizers, **numbers)
        self.damages = [Damage(model.a.weight, float("inf")) for model in self.models]
        self.index = 0

    def backward(self, which: tuple[int, ...], *, damaged: bool = False) -> None:
        for one in which:
            self.damages[one].armed = damaged
        self.scaled(which).backward()

    def scaled(self, which: tuple[int, ...]) -> torch.Tensor:
        self.index += 1
        return self.scaler.scale(loss_of([self.models[one] for one in which], self.index))

    def each(self, which: int, change: Callable[[torch.Tensor], object]) -> None:
        """Change all gradients, as a clip does by a factor."""
        for param in self.models[which].parameters():
            if param.grad is not None:
                change(param.grad)

    def zero(self, which: int, *, to_none: bool = True) -> None:
        self.optimizers[which].zero_grad(set_to_none=to_none)


def assert_alike(ours: Loop, torchs: Loop) -> None:
    """Weights are equal bitwise, and so are the scalers' states."""
    for mine, model in zip(ours.models, torchs.models, strict=True):
        for name, value in mine.state_dict().items():
            assert_same(value.float(), model.state_dict()[name], name)
    assert ours.scaler.state_dict() == torchs.scaler.state_dict()


def both(level: str, build: str = "sgd", **options: Any) -> tuple[Loop, Loop]:
    torchs, ours = Loop(None, build, **options), Loop(level, build, **options)
    return ours, torchs


# -- the loops that people write -------------------------------------------------------------------


def plain(loop: Loop) -> None:
    for step in range(5):
        loop.backward((0,), damaged=step == 2)
        loop.scaler.step(loop.optimizers[0])
        loop.scaler.update()
        loop.zero(0)


KINDS = ("backward", "unscale", "multiply", "step", "zero")
ACTIONS = [f"{kind} {which}" for kind in KINDS for which in "01"]
ACTIONS += ["backward 01", "overflow 0", "anew 0", "lost 1", "update", "fill 0", "read", "drop 1"]
ACTIONS += ["set", "freeze 0", "clean 0", "sum 01"]

AFTER = {"backward": "scaled", "overflow": "scaled", "unscale": "unscaled", "step": "stepped"}
AFTER["anew"] = AFTER["sum"] = "scaled"
EMPTY = dict.fromkeys(("unscaled", "stepped", "emptied"), "emptied")  # unnoticed by torch's
UPDATED = {"unscaled": "used", "stepped": "used", "emptied": "none"}
SCALES = ("backward", "overflow", "sum", "anew", "lost")
# torch would add scaled gradients to unscaled ones, and unscale used ones again
ALLOWED = {
    "backward": {"none", "scaled"},
    "overflow": {"none", "scaled"},
    "sum": {"none", "scaled"},
    "anew": {"none", "scaled", "stepped"},
    "lost": {"none", "scaled"},
    "unscale": {"scaled", "unscaled", "stepped"},
    "step": {"scaled", "unscaled", "stepped"},
    "multiply": {"unscaled"},
    "clean": {"unscaled"},
}


@pytest.mark.parametrize("level", EXACT)
@settings(max_examples=examples(100, quick=10))
@given(data=st.data(), build=st.sampled_from(sorted(BUILDS)))
def test_any_program_does_what_it_does_with_torchs(
    level: str, data: st.DataObject, build: str
) -> None:
    """Whatever torch's scaler refuses, ours refuses with the same words; all else is the same.

    Optimizers without any gradient, which torch refuses too, are left out.
    """
    ours, torchs = both(level, build)
    stages = ["none", "none"]  # of the gradients
    try:
        for action in data.draw(st.lists(st.sampled_from(ACTIONS), min_size=4, max_size=24)):
            kind, _, rest = action.partition(" ")
            which = tuple(map(int, rest))
            if not {stages[one] for one in which} <= ALLOWED.get(kind, {*stages}):
                continue
            if kind in ("update", "set") and "scaled" in stages:  # torch would not remember it
                continue
            if kind in SCALES and "unscaled" in stages:  # for every optimizer, or refused
                continue
            outcomes = [_outcome(loop, kind, which) for loop in (torchs, ours)]
            assert outcomes[0] == outcomes[1], action
            if outcomes[0] is not None:
                continue
            for one in which:
                empty = EMPTY.get(stages[one], "none")
                stages[one] = AFTER.get(
                    kind, empty if kind in ("zero", "fill", "drop") else stages[one]
                )
            if kind in ("update", "set"):
                stages = [UPDATED.get(stage, stage) for stage in stages]
        if "unscaled" not in stages:
            ours.scaler.scale(torch.zeros(()))  # nothing is left half done
        assert_alike(ours, torchs)
    finally:
        preamp.engine_of(ours.optimizers[0]).close()


def _outcome(loop: Loop, kind: str, which: tuple[int, ...]) -> object:
    """What an act is refused with."""
    try:
        ACTS[kind](loop, *which)
    except (AssertionError, RuntimeError) as error:
        return type(error), str(error)
    return None


def _anew(loop: Loop, *which: int) -> None:
    """Where some zero."""
    scaled = loop.scaled(which)
    loop.zero(which[0], to_none=loop.index % 2 == 0)
    scaled.backward()


def _sum(loop: Loop, *which: int) -> None:
    """Of losses that were scaled one by one, and in a list."""
    first = loop.scaled((0,))
    losses = [loss_of(loop.models, loop.index), loss_of(loop.models[1:], loop.index)]
    second, third = loop.scaler.scale(losses)
    (first + second + third).backward()


def _set(loop: Loop, *which: int) -> None:
    loop.scaler.set_growth_factor(2.0 ** (1 + loop.index % 2))
    loop.scaler.set_backoff_factor(2.0 ** -(1 + loop.index % 3))
    scale = 2.0 ** (5 + loop.index % 4)
    loop.scaler.update(torch.tensor(scale) if loop.index % 2 else scale)


def _freeze(loop: Loop, which: int) -> None:
    weight = loop.models[which].b.weight
    weight.requires_grad_(not weight.requires_grad)


ACTS: dict[str, Callable[..., object]] = {
    "backward": lambda loop, *which: loop.backward(which),
    "overflow": lambda loop, *which: loop.backward(which, damaged=True),
    "anew": _anew,
    "lost": lambda loop, *which: loop.scaled(which),  # whose backward ran out of memory
    "sum": _sum,
    "set": _set,
    "freeze": _freeze,
    "clean": lambda loop, which: loop.each(which, lambda grad: grad.nan_to_num_(0.0, 0.0, 0.0)),
    "multiply": lambda loop, which: loop.each(which, lambda grad: grad.mul_(0.5)),
    "drop": lambda loop, which: loop.models[which].zero_grad(),
    "zero": lambda loop, which: loop.zero(which),
    "fill": lambda loop, which: loop.zero(which, to_none=False),
    "unscale": lambda loop, which: loop.scaler.unscale_(loop.optimizers[which]),
    "step": lambda loop, which: loop.scaler.step(loop.optimizers[which]),
    "update": lambda loop: loop.scaler.update(),
    "read": lambda loop: loop.scaler.get_scale(),
}


SECOND = [(level, (0,)) for level in LEVEL_NAMES] + [(level, (1,)) for level in EXACT]


@pytest.mark.parametrize("build", ["sgd", "fused_sgd"])
@pytest.mark.parametrize(("level", "second"), SECOND)
@pytest.mark.parametrize("zeroes", [False, True])
def test_what_is_dropped_is_dropped_with_all_that_was_accumulated(
    level: str, second: tuple[int, ...], build: str, zeroes: bool
) -> None:
    """As scripts keep a layer as it is for a while: without its gradient before each step."""
    ours, torchs = both(level, build)
    weight, bias = ours.models[0].a.parameters()
    start = weight.detach().clone(), bias.detach().clone()
    for loop in (ours, torchs):
        loop.backward((0, 1))
        loop.backward(second)
        if zeroes:
            loop.models[0].a.weight.grad.zero_()
        else:
            loop.models[0].a.weight.grad = None
        loop.scaler.step(loop.optimizers[0])
        loop.scaler.update()
    assert torch.equal(weight, start[0])
    assert not torch.equal(bias, start[1])
    if level in EXACT:
        assert_alike(ours, torchs)


# -- what torch documents --------------------------------------------------------------------------


def _step(loop: Loop, *args: Any, **kwargs: Any) -> None:
    loop.scaler.step(loop.optimizers[0], *args, **kwargs)


def _unscale(loop: Loop) -> None:
    loop.scaler.unscale_(loop.optimizers[0])


MISUSES: dict[str, Callable[[Loop], object]] = {
    "step before scale": _step,
    "unscale before scale": _unscale,
    "update before scale": lambda loop: loop.scaler.update(),
    "unscale twice": lambda loop: (loop.backward((0,)), _unscale(loop), _unscale(loop)),
    "unscale after step": lambda loop: (loop.backward((0,)), _step(loop), _unscale(loop)),
    "step twice": lambda loop: (loop.backward((0,)), _step(loop), _step(loop)),
    "update without step": lambda loop: (loop.backward((0,)), loop.scaler.update()),
    "closure": lambda loop: (loop.backward((0,)), _step(loop, closure=lambda: None)),
    "no tensor": lambda loop: loop.scaler.scale([1.0]),
    "neither": lambda loop: loop.scaler.scale(1.0),
    "empty state": lambda loop: loop.scaler.load_state_dict({}),
}


@pytest.mark.parametrize("misuse", MISUSES)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_misuse_is_refused_in_torchs_words(misuse: str, level: str) -> None:
    told = []
    for loop in both(level):
        with pytest.raises((AssertionError, RuntimeError, ValueError)) as caught:
            MISUSES[misuse](loop)
        told.append((caught.type, str(caught.value)))
    assert told[0] == told[1]


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_states_are_exchanged_with_torchs(level: str) -> None:
    ours, torchs = both(level)
    plain(torchs)
    ours.scaler.load_state_dict(torchs.scaler.state_dict())
    assert ours.scaler.state_dict() == torchs.scaler.state_dict()
    assert preamp.engine_of(ours.optimizers[0]).loss_scale() == torchs.scaler.get_scale()
    back = torch.amp.GradScaler("cpu")
    back.load_state_dict(ours.scaler.state_dict())
    assert back.state_dict() == torchs.scaler.state_dict()


def test_scaling_of_containers_is_torchs() -> None:
    for loop in both("O2"):
        x, y = torch.ones(2), torch.full((), 3.0)
        result = loop.scaler.scale([x, (y, [x])])
        assert type(result) is list
        assert type(result[1]) is tuple
        assert_same(result[1][1][0], x * SCALE)
        assert_same(next(iter(loop.scaler.scale(iter([y])))), y * SCALE)
        assert loop.scaler.scale([]) == []


@pytest.mark.parametrize("off", ["scaler", "engine"])
def test_without_scaling_it_lets_everything_through(off: str) -> None:
    model = Exact()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    preamp.initialize(model, optimizer, opt_level="O5", verbosity=0, enabled=off != "engine")
    scaler = preamp.GradScaler(optimizer, enabled=off != "scaler")
    loss = loss_of([model], 0)
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(optimizer)
    before = copy.deepcopy(model.state_dict())
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(before["linear.weight"], model.state_dict()["linear.weight"])
    assert (scaler.is_enabled(), scaler.get_scale(), scaler.state_dict()) == (False, 1.0, {})
    scaler.load_state_dict({"scale": 4.0})


# -- what a script does to unscaled gradients -----------------------------------------------------


def _uneven(level: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A model of which one gradient is 2**-27 everywhere, which float16 cannot hold."""
    model = nn.ParameterDict(
        {"large": nn.Parameter(torch.ones(300)), "tiny": nn.Parameter(torch.ones(5))}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"loss_scale": "dynamic", "verbosity": 0, **options}
    preamp.initialize(model, optimizer, opt_level=level, **options)
    return model, optimizer, preamp.GradScaler(optimizer, init_scale=2.0**14)


def _fill(model: Any, scaler: Any) -> torch.Tensor:
    """Give it gradients: of ``large`` these, returned in float32."""
    weights = torch.linspace(-1, 1, 300).half().float()
    weights = weights.to(model["large"].dtype).float()
    loss = (model["large"].float() * weights).sum() + model["tiny"].float().sum() * 2.0**-27
    scaler.scale(loss).backward()
    return weights


def _gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    grads = [master.grad for master in preamp.master_params(optimizer)]
    return [grad.clone() for grad in grads if grad is not None]


@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize(
    ("backwards", "unscales", "change", "warns"),
    [
        (2, False, "mul_", True),
        (2, True, "mul_", False),
        (1, False, "mul_", False),
        (2, False, "zero_", False),
        (2, False, "drop", False),
    ],
)
def test_changing_a_part_of_what_was_accumulated_is_warned_of_once(
    level: str, backwards: int, unscales: bool, change: str, warns: bool
) -> None:
    """In torch, where nothing is set aside, such a clip is of the whole; so are float32 ones."""
    warns &= BY_NAME[level].has_masters
    model = Parts(0)
    optimizer = begin(level, model, BUILDS["sgd"](model.parameters()))
    scaler = preamp.GradScaler(optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for index in range(backwards):
                scaler.scale(loss_of([model], index)).backward()
            if unscales:
                scaler.unscale_(optimizer)
            for param in model.parameters():
                if change == "drop":
                    param.grad = None
                elif param.grad is not None:
                    param.grad.mul_(0.5) if change == "mul_" else param.grad.zero_()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    told = [w for w in caught if "before GradScaler.unscale_" in str(w.message)]
    assert len(told) == warns


@pytest.mark.parametrize("is_zeroed", [False, True])
def test_zeros_that_a_factor_has_left_keep_what_masters_have(is_zeroed: bool) -> None:
    """They have a sign where the smallest numbers were negative; zeros of a script have none."""
    model, optimizer, scaler = _uneven("O2")
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    loss = model["large"].float().sum() + (model["tiny"].float() * signs).sum() * 2.0**-24
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    for param in model.parameters():
        param.grad.mul_(0.412345)  # no half number
    assert not model["tiny"].grad.any()
    if is_zeroed:
        model["tiny"].grad.zero_()
    grads: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: grads.extend(_gradients(optimizer)))
    scaler.step(optimizer)
    torch.testing.assert_close(grads[0], torch.full((300,), 0.412345), rtol=2.0**-10, atol=0)
    expected = torch.zeros(5) if is_zeroed else 0.412345 * 2.0**-24 * signs
    torch.testing.assert_close(grads[1], expected, rtol=2.0**-10, atol=0)


OTHER_CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "clamped": lambda grad: grad.clamp_(-0.5, 0.5),
    "shifted": lambda grad: grad.add_(0.25),
    "few values": lambda grad: grad[290:].clamp_(max=0.5),  # those looked at first tell nothing
    "without a version": lambda grad: grad.data.clamp_(max=0.5),
}


@pytest.mark.parametrize("level", WITH_MASTERS)
@pytest.mark.parametrize("change", OTHER_CHANGES)
@pytest.mark.parametrize("accumulates", [False, True])
def test_another_change_is_refused_in_float16_and_taken_as_written_in_bfloat16(
    level: str, change: str, accumulates: bool
) -> None:
    model, optimizer, scaler = _uneven(level)
    _fill(model, scaler)
    if accumulates:
        _fill(model, scaler)
    scaler.unscale_(optimizer)
    OTHER_CHANGES[change](model["large"].grad)
    written = model["large"].grad.clone()
    if BY_NAME[level].half is torch.float16:
        with refused("grad_scaler", "another change than by a factor", model, optimizer):
            scaler.step(optimizer)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiny = _gradients(optimizer)[1]
        scaler.step(optimizer)
    assert_same(tiny, torch.full((5,), 2.0**-27 * (1 + accumulates)))
    moved = 1 - model.state_dict()["large"]
    torch.testing.assert_close(moved, written.float(), rtol=0, atol=2.0**-20)


@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("unscales", [False, True])
def test_values_are_clipped_in_float32(level: str, unscales: bool) -> None:
    model, optimizer, scaler = _uneven(level)
    weights = _fill(model, scaler)
    if unscales:
        scaler.unscale_(optimizer)
    preamp.clip_grad_value_(optimizer, 2.0**-28)
    large, tiny = _gradients(optimizer)
    assert_same(large, weights.clamp(-(2.0**-28), 2.0**-28).to(large.dtype))
    assert_same(tiny, torch.full((5,), 2.0**-28).to(tiny.dtype))
    scaler.step(optimizer)


@pytest.mark.parametrize("level", WITH_MASTERS)
def test_gradients_may_be_zeroed_dropped_replaced_and_negated(level: str) -> None:
    for change, factor in (
        (lambda p: p.grad.zero_(), 0.0),
        (lambda p: setattr(p, "grad", None), None),
        (lambda p: setattr(p, "grad", p.grad * 0.5), 0.5),
        (lambda p: p.grad.neg_(), -1.0),
        (lambda p: p.grad.mul_(3.0), 3.0),
        (lambda p: (p.grad.mul_(0.1), p.grad.mul_(0.1)), 0.01),
        (lambda p: p.grad.mul_(1.0), 1.0),
    ):
        model, optimizer, scaler = _uneven(level)
        weights = _fill(model, scaler)
        scaler.unscale_(optimizer)
        change(model["large"])
        found = _gradients(optimizer)
        assert_same(found[-1], torch.full((5,), 2.0**-27))
        if factor is None:
            assert len(found) == 1
        else:
            eps = torch.finfo(BY_NAME[level].half).eps if factor == 0.01 else 0.0
            torch.testing.assert_close(found[0], weights * factor, rtol=eps, atol=0)


# -- what is told ---------------------------------------------------------------------------------


def _start(count: int = 1, **options: Any) -> tuple[nn.Module, list[Any]]:
    model = Exact()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for _ in range(count)]
    preamp.initialize(model, optimizers, verbosity=0, **({"opt_level": "O2"} | options))
    return model, optimizers


def _optimizers(**options: Any) -> list[Any]:
    return _start(**options)[1]


def _scaler() -> Any:
    return preamp.GradScaler(_optimizers())


def _of_closed() -> Any:
    scaler = preamp.GradScaler(optimizers := _optimizers())
    preamp.engine_of(optimizers[0]).close()
    return scaler


def _after_one_backward() -> Any:
    model, optimizers = _start()
    scaler = preamp.GradScaler(optimizers)
    scaler.scale(loss_of([model], 0)).backward()
    return scaler, model, optimizers


GradScaler: Any = preamp.GradScaler
STRANGER = torch.optim.SGD([torch.ones(1)])
INTEGER = torch.ones(1, dtype=torch.int64)
REFUSED: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {  # what is made, the act
    "an optimizer without engine": (lambda: STRANGER, GradScaler),
    "no optimizer": (list, GradScaler),
    "optimizers of two engines": (lambda: [*_optimizers(), *_optimizers()], GradScaler),
    "optimizers that share parameters": (lambda: _optimizers(count=2, opt_level="O1"), GradScaler),
    "a pickle": (_scaler, pickle.dumps),
    "a closed engine": (_of_closed, lambda scaler: scaler.scale(torch.ones(1))),
    "a scale of zero": (_optimizers, lambda made: GradScaler(made, init_scale=0.0)),
    "a scale in words": (_after_one_backward, lambda made: made[0].update("large")),
    "a closure by position": (
        _after_one_backward,
        lambda made: made[0].step(made[2][0], lambda: pytest.fail("was called")),
    ),
    "a file before a step": (
        _after_one_backward,
        lambda made: preamp.save_checkpoint("nowhere", *made[1:]),
    ),
    "a growth below one": (_optimizers, lambda made: GradScaler(made, growth_factor=0.5)),
    "a backoff of one": (_scaler, lambda scaler: scaler.set_backoff_factor(1.0)),
    "half an interval": (_scaler, lambda scaler: scaler.set_growth_interval(2.5)),
    "an engine's state": (_scaler, lambda scaler: scaler.load_state_dict({"loss_scaler0": {}})),
    "a device for an optimizer": (lambda: "cuda", GradScaler),
    "a model for an optimizer": (lambda: _start()[0], GradScaler),
    "a loss of whole numbers": (_scaler, lambda scaler: scaler.scale(INTEGER)),
    "a loss_id without a scale": (_optimizers, lambda made: GradScaler(made, loss_id=1)),
    "numbers of a static scale": (
        lambda: _optimizers(opt_level="O5"),
        lambda made: GradScaler(made, init_scale=4.0),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, act = REFUSED[name]
    made = make()
    assert_refused("grad_scaler", name, lambda: act(made))


LOADS = {
    "a scale that is no number": {"scale": float("nan")},
    "a count below zero": {"_growth_tracker": -1},
    "an interval in words": {"growth_interval": "x"},
}


@pytest.mark.parametrize("name", LOADS)
def test_a_failed_load_changes_nothing(name: str) -> None:
    scaler = _scaler()
    before = scaler.state_dict()
    with refused("grad_scaler", name):
        scaler.load_state_dict({**before, "growth_factor": 3.0, **LOADS[name]})
    assert scaler.state_dict() == before


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_a_step_past_it_is_refused(level: str) -> None:
    """The loss scale would never hear of an overflow; after `unscale_` it does."""
    ours, torchs = both(level)
    for loop in (ours, torchs):
        loop.backward((0,))
    optimizer = ours.optimizers[0]
    assert_refused("grad_scaler", "a step past it", optimizer.step, *ours.models, optimizer)
    ours.scaler.unscale_(optimizer)
    optimizer.step()
    torchs.scaler.step(torchs.optimizers[0])
    for loop in (ours, torchs):
        loop.scaler.update()
    assert_alike(ours, torchs)


def test_another_optimizer_is_not_stepped() -> None:
    ours, _ = both("O2")
    ours.backward((0,))
    (other,) = _optimizers()
    with refused("grad_scaler", "a step of another's", *ours.models, *ours.optimizers):
        ours.scaler.step(other)
    ours.scaler.step(ours.optimizers[0])


# -- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_unscaled_gradients_that_were_zeroed_are_none(level: str) -> None:
    ours, torchs = both(level)
    for loop in (ours, torchs):
        loop.backward((0,))
        _unscale(loop)
        loop.zero(0, to_none=False)
        if loop is torchs:
            loop.scaler.update()
        loop.backward((0,))
        _step(loop)
        loop.scaler.update()
    for mine, model in zip(ours.models, torchs.models, strict=True):
        for param, wanted in zip(mine.parameters(), model.parameters(), strict=True):
            assert_same(param.detach().float(), wanted.detach().to(param.dtype).float())


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("again", ["loop", "update", "scaler", "block"])
def test_a_session_goes_on_after_an_exception_behind_unscale(level: str, again: str) -> None:
    """A cell failed between `unscale_` and `step`, and the cell with the loop runs again."""
    ours, _ = both(level)
    optimizer = ours.optimizers[0]
    ours.backward((0,))
    ours.scaler.unscale_(optimizer)
    with refused("grad_scaler", "a scale after unscale_", *ours.models, optimizer):
        ours.backward((1,))  # the next iteration, which forgot to zero gradients
    if again in ("loop", "update"):
        ours.zero(0)
    if again == "update":
        ours.scaler.update()
    if again == "scaler":
        ours.scaler = preamp.GradScaler(optimizer)
    if again == "block":
        scaled_backward(loss_of(ours.models[:1], 1), optimizer)
    else:
        ours.backward((0,))
        ours.scaler.unscale_(optimizer)
    ours.scaler.step(optimizer)
    ours.scaler.update()
    ours.zero(0)
    plain(ours)
    assert preamp.engine_of(optimizer).steps_applied == 5  # of six, one with an overflow


def _linear(level: str, **options: Any) -> tuple[nn.Linear, torch.optim.Optimizer, Any]:
    model = nn.Linear(64, 64, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    preamp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    return model, optimizer, preamp.GradScaler(optimizer, init_scale=16.0, **options)


def _moved(model: nn.Linear, step: Callable[[], object]) -> torch.Tensor:
    before = model.state_dict()["weight"].clone()
    step()
    return before - model.state_dict()["weight"]


@pytest.mark.parametrize("level", WITH_MASTERS)
@pytest.mark.parametrize("how", ["assigned", "by a penalty", "after unscale_"])
def test_what_is_done_to_masters_counts(level: str, how: str) -> None:
    """Though half gradients are gone, which backwards have reached that had earlier ones."""
    model, optimizer, scaler = _linear(level)
    for _ in range(2):
        scaler.scale(model(torch.ones(1, 64)).sum()).backward()
    (master,) = preamp.master_params(optimizer)
    if how == "assigned":
        master.grad = torch.full_like(master, 3.0)
    elif how == "by a penalty":
        optimizer.zero_grad()
        (master.sum() * 3.0).backward()
    else:
        scaler.unscale_(optimizer)
        assert master.grad is not None
        master.grad.mul_(1.5)
    moved = _moved(model, lambda: scaler.step(optimizer))
    assert_same(moved, torch.full((64, 64), 3.0))


def test_a_backward_that_could_not_begin_ends_no_later_one() -> None:
    """One that it would end is a block's, whose gradients would be gone without a word."""
    model, optimizer, scaler = _linear("O2")
    ones = torch.ones(1, 64)
    scaled_backward(model(ones).sum(), optimizer)
    assert model.weight.grad is not None
    model.weight.grad.mul_(0.5)
    with pytest.raises(preamp.PreampStateError, match="was changed in place"):
        scaler.scale(model(ones).sum())
    optimizer.zero_grad()
    with preamp.scale_loss(model(ones).sum(), optimizer) as scaled:
        scaled.backward()
        with pytest.raises(preamp.PreampStateError, match="inside a scale_loss block"):
            preamp.clip_grad_norm_(optimizer, 1.0)
    assert_same(_moved(model, optimizer.step), torch.ones(64, 64))


def test_a_clip_whose_norm_overflowed_is_refused() -> None:
    """Torch takes the norm of float16 gradients in float16, and would make the step zero."""
    model, optimizer, scaler = _linear("O2")
    signs = torch.ones(1, 64)
    signs[0, ::2] = -1.0
    scaler.scale((model(2.0**11 * signs)).sum()).backward()
    scaler.unscale_(optimizer)
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isinf()
    with refused("grad_scaler", "a clip to nothing", model, optimizer):
        scaler.step(optimizer)


def test_a_scaled_loss_keeps_no_activations() -> None:
    model, optimizer, scaler = _linear("O2")
    output = model(torch.ones(1, 64))
    kept = weakref.ref(output)
    scaler.scale(output.sum())  # whose backward is not called, as after an error
    del output
    optimizer.zero_grad()
    assert kept() is None
