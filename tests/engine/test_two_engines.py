# SPDX-License-Identifier: BSD-3-Clause
"""Two engines in one process: trained by turns, each gives bitwise what it gives alone."""

import copy
import io
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import preamp
from cases.levels import F32_WEIGHTS, HALF_WEIGHTS, LEVEL_NAMES
from kit.compare import differences, picture, same
from kit.loops import everything, loss_of, make, started, train_step
from preamp import amp

STEPS = 4
POISONED = 2  # this step of the first engine overflows
HALF_PAIRS = [("O1", "O4"), ("O2", "O4"), ("O3", "O4"), ("O2", "O5"), ("O1", "O5")]
PAIRS = [("O1", "O2"), ("O1", "O0"), ("O2", "O2"), ("O1", "O1"), ("O5", "O3")]

Run = tuple[Any, Any]
CLIPS: dict[str, Callable[[Any], torch.Tensor]] = {
    "no": lambda optimizer: torch.zeros(()),
    "torch's": lambda optimizer: clip_grad_norm_(preamp.master_params(optimizer), 0.125),
    "preamp's": lambda optimizer: preamp.clip_grad_norm_(optimizer, 0.125),
}


def one_step(run: Run, step: int, *, poison: bool, clip: str = "no") -> torch.Tensor:
    model, optimizer = run
    optimizer.zero_grad()
    loss = loss_of(model, step)
    with preamp.scale_loss(loss, optimizer) as scaled:
        (scaled * float("inf") if poison else scaled).backward()
    norm = CLIPS[clip](optimizer)
    optimizer.step()
    return norm.float()


def alone(
    level: str, seed: int, optimizer: str, *, poison: bool, clip: str = "no"
) -> tuple[Any, Any]:
    run = started(level, seed, optimizer, loss_scale="dynamic")
    norms = [
        one_step(run, step, poison=poison and step == POISONED, clip=clip) for step in range(STEPS)
    ]
    result = everything(*run)
    preamp.engine_of(run[0]).close()
    return result, norms


# One engine can disturb the other through casts, which optimizers and clips do not act on.
@pytest.mark.threes
@pytest.mark.parametrize(
    ("first", "second"), [*PAIRS, *HALF_PAIRS, *((b, a) for a, b in (*PAIRS[:2], *HALF_PAIRS))]
)
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("scope", ["model", "thread"])
@pytest.mark.parametrize("clip", CLIPS)
def test_interleaved(first: str, second: str, optimizer: str, scope: str, clip: str) -> None:
    """Also beside tensors of another half dtype."""
    levels = (first, second)
    expected = [
        alone(level, seed, optimizer, poison=seed == 0, clip=clip)
        for seed, level in enumerate(levels)
    ]
    runs = [
        started(level, seed, optimizer, loss_scale="dynamic", scope=scope)
        for seed, level in enumerate(levels)
    ]
    norms: list[list[torch.Tensor]] = [[], []]
    for step in range(STEPS):
        for seed, run in enumerate(runs):
            is_bad = seed == 0 and step == POISONED
            norms[seed].append(one_step(run, step, poison=is_bad, clip=clip))
    for run, found, wanted in zip(runs, norms, expected, strict=True):
        assert same((everything(*run), found), wanted)
    assert preamp.engine_of(runs[0][0]).steps_skipped >= 1


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_nested_blocks(first: str, second: str) -> None:
    """One engine's whole backward inside the other's ``with`` block."""
    expected = [
        alone(level, seed, "SGD", poison=False)[0] for seed, level in enumerate((first, second))
    ]
    one = started(first, 0, loss_scale="dynamic")
    two = started(second, 1, loss_scale="dynamic")
    for step in range(STEPS):
        for run in (one, two):
            run[1].zero_grad()
        outer, inner = loss_of(one[0], step), loss_of(two[0], step)
        with preamp.scale_loss(outer, one[1]) as scaled:
            with preamp.scale_loss(inner, two[1]) as other:
                other.backward()
            scaled.backward()
        for run in (two, one):
            run[1].step()
    for run, wanted in zip((one, two), expected, strict=True):
        assert same(everything(*run), wanted)


@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_plain_training_of_a_half_precision_neighbour(level: str) -> None:
    """Closing one engine halfway leaves the other's course alone."""
    expected, _ = alone("O2", 1, "Adam", poison=False)
    one = started(level, 0, "Adam", loss_scale="dynamic")
    two = started("O2", 1, "Adam", loss_scale="dynamic")
    for step in range(STEPS):
        if step < 2:
            one_step(one, step, poison=False)
        elif step == 2:
            preamp.engine_of(one[0]).close()
        one_step(two, step, poison=False)
    assert same(everything(*two), expected)


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_models_that_are_cast_are_left_out_of_another_engines_function_casts(level: str) -> None:
    model, _ = started(level)
    x = torch.randn(6, 4)
    expected = model.eval()(x)
    started("O1", 1, scope="thread")
    assert same(model(x), expected)


def test_what_has_no_argument_means_engines_made_through_amp() -> None:
    one, two = make(), make(1)
    amp.initialize(*one, opt_level="O2", verbosity=0)
    amp.initialize(*two, opt_level="O1", verbosity=0, loss_scale=4.0)
    started("O5", 2)  # preamp's own spelling is not among them
    assert amp.state_dict() == {
        "loss_scaler0": {"loss_scale": 4.0, "unskipped": 0},  # of the latest call
        "loss_scaler1": {"loss_scale": 2.0**16, "unskipped": 0},
    }
    assert amp._amp_state.opt_properties.opt_level == "O1"
    with amp.scale_loss(loss_of(one[0], 0), one[1]) as scaled:  # the first still has its own scale
        assert scaled.item() == pytest.approx(2.0**16 * loss_of(one[0], 0).item(), rel=0.2)


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_a_step_is_not_cast_by_another_engine(level: str) -> None:
    """Adafactor multiplies matrices in its step, which O1 would round to half."""

    def train() -> dict[str, Any]:
        model, _ = make(3)
        optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
        run = preamp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=8.0)
        for step in range(STEPS):
            train_step(*run, step, poison=False)
        result = everything(*run)
        preamp.engine_of(run[0]).close()
        return result

    alone = train()
    other = started("O1", 1, "SGD", scope="thread")
    assert same(train(), alone)
    assert preamp.engine_of(other[0]) is not None


# -- half dtypes side by side ----------------------------------------------------------------


def tensors_of(run: Run, half: torch.dtype) -> list[torch.Tensor]:
    """Tensors of an engine's half dtype, as a forward and its backward make them."""
    made = [param.detach().to(half) for param in run[0].parameters()]
    return [tensor.reshape(-1) for tensor in made]


def joined(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Joins, sums and norms of tensors, as code around models makes them."""
    return [
        torch.cat(tensors),
        torch.stack([tensor[:2] for tensor in tensors]),
        torch.hstack(tensors),
        torch.column_stack([tensor[:2] for tensor in tensors]),
        torch.nn.utils.parameters_to_vector(tensors),
        torch.nn.utils.get_total_norm(tensors),
        tensors[0].index_copy(0, torch.tensor([0]), tensors[1][:1]),
    ]


def clipped(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients after a clip, and their norm before it."""
    params = [nn.Parameter(tensor.clone()) for tensor in tensors]
    for param in params:
        param.grad = param.detach() * 8
    norm = torch.nn.utils.clip_grad_norm_(params, 0.5)
    return [norm, *(param.grad for param in params if param.grad is not None)]


@pytest.mark.parametrize(("first", "second"), [*HALF_PAIRS, *((b, a) for a, b in HALF_PAIRS)])
@pytest.mark.parametrize("scope", ["model", "thread"])
def test_tensors_of_another_half_dtype_are_plain(first: str, second: str, scope: str) -> None:
    """Under the casts of neither engine, wherever they are on; nobody's tensors included."""
    with_plain: dict[torch.dtype, list[torch.Tensor]] = {}
    tensors: dict[torch.dtype, list[torch.Tensor]] = {}
    for half in (torch.float16, torch.bfloat16):
        tensors[half] = tensors_of(make(), half)
        with_plain[half] = [*joined(tensors[half]), *clipped(tensors[half])]
    runs = [started(level, seed, scope=scope) for seed, level in enumerate((first, second))]
    active = {torch.get_autocast_dtype("cpu")} if torch.is_autocast_enabled("cpu") else set()
    assert bool(active) is (scope == "thread" and bool({"O1", "O4"} & {first, second}))
    for half in tensors.keys() - active:
        assert same([*joined(tensors[half]), *clipped(tensors[half])], with_plain[half])
    for half in active:  # whose norms are float32
        assert same(joined(tensors[half])[:5], with_plain[half][:5])
        clipped(tensors[half])
    mixed = [*tensors[torch.float16], *tensors[torch.bfloat16]]
    assert torch.cat(mixed).dtype is torch.float32
    for run in runs:
        one_step(run, 0, poison=False)


def test_a_plain_half_model_beside_casts_of_the_whole_thread() -> None:
    """Forward, loss and backward are torch's alone."""

    def train() -> list[torch.Tensor]:
        model = make(3)[0].half()
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).half()
        out = model(x)
        loss = nn.functional.cross_entropy(out, torch.arange(6) % 3) + out.softmax(-1).sum()
        loss.backward()
        return [out.detach(), loss.detach(), *[p.grad for p in model.parameters()]]

    expected = train()
    started("O4", scope="thread")
    assert same(train(), expected)


class WithScores(nn.Module):
    """Has scores in a half dtype of its own, and notes what float functions make of them."""

    def __init__(self, half: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.kind = half
        self.seen: set[torch.dtype] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = float_functions(self.kind)
        return self.linear(x)


def float_functions(half: torch.dtype) -> set[torch.dtype]:
    x = torch.rand(2, 4).to(half)
    made = [x.softmax(-1), nn.functional.softmax(x, -1), x.pow(2), torch.pow(x, 2), x**2, x.sum()]
    made += [torch.exp(x), x.norm(), nn.functional.layer_norm(x, [4]), amp.float_function(abs)(x)]
    return {result.dtype for result in made}


def elsewhere(run: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(run()))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize(
    ("level", "other"), [("O1", torch.bfloat16), ("O4", torch.float16)], ids=["O1", "O4"]
)
@pytest.mark.parametrize("scope", ["thread", "model"])
@pytest.mark.parametrize("door", [amp, preamp], ids=["amp", "preamp"])
def test_float_functions_of_the_other_half_dtype(
    door: Any, scope: str, level: str, other: torch.dtype
) -> None:
    """In float32 wherever an engine made under Apex's names casts, and nowhere else."""
    model = WithScores(other)
    door.initialize(model, opt_level=level, scope=scope, verbosity=0)
    inside = torch.float32 if door is amp else other
    for run in (lambda run: run(), elsewhere):  # on another thread too
        run(lambda: model(torch.rand(2, 4)))
        assert model.seen == {inside}
    assert float_functions(other) == {inside if scope == "thread" else other}
    with preamp.disable_casts():
        assert float_functions(other) == {other}

    beside = WithScores(other)
    preamp.initialize(beside, opt_level=level, verbosity=0)
    beside(torch.rand(2, 4))
    assert beside.seen == {other}
    half = WithScores(other)
    preamp.initialize(half, opt_level="O2" if level == "O4" else "O5", verbosity=0)
    half(torch.rand(2, 4))
    assert half.seen == {other}


@pytest.mark.parametrize(("half", "other"), [(torch.float16, torch.bfloat16)])
def test_float_functions_of_the_other_half_dtype_under_a_handle(
    half: torch.dtype, other: torch.dtype
) -> None:
    handle = amp.init(patch_type=half)
    assert float_functions(other) == {torch.float32}
    handle.deactivate()
    assert float_functions(other) == {other}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("door", [amp, preamp], ids=["amp", "preamp"])
def test_compiled_float_functions_of_the_other_half_dtype(door: Any) -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 2, -1) + 1

    x = torch.rand(2, 4).half()
    compiled = torch.compile(attend, backend="eager")
    assert compiled(x).dtype is torch.float16
    door.initialize(nn.Linear(4, 4), opt_level="O0", verbosity=0)
    kept = door.initialize(nn.Linear(4, 4), opt_level="O4", scope="thread", verbosity=0)
    assert compiled(x).dtype is (torch.float32 if door is amp else torch.float16)
    preamp.engine_of(kept).close()
    assert compiled(x).dtype is torch.float16


# -- shared sub-modules -------------------------------------------------------------------------


def pair() -> tuple[Run, Run]:
    """Two models around the same layer, each with an optimizer of its own weights."""
    torch.manual_seed(0)
    shared = nn.Linear(4, 4)
    models = [nn.Sequential(shared, nn.Linear(4, 3)) for _ in range(2)]
    one, two = [(model, torch.optim.SGD(model[1].parameters(), lr=0.125)) for model in models]
    return one, two


@pytest.mark.each
@pytest.mark.parametrize("half", HALF_WEIGHTS)
@pytest.mark.parametrize("other", LEVEL_NAMES)
@pytest.mark.parametrize("half_first", [True, False])
@pytest.mark.parametrize("part", ["model", "layer"])
def test_a_shared_layer_is_refused_where_one_engine_has_it_half(
    half: str, other: str, half_first: bool, part: str
) -> None:
    levels = (half, other) if half_first else (other, half)
    one, (model, optimizer) = pair()
    preamp.initialize(*one, opt_level=levels[0], verbosity=0)
    second: nn.Module = model if part == "model" else model[0]
    before = picture(*one, model, optimizer)
    name = "0.weight" if part == "model" else "weight"
    text = (
        f"{name!r} belongs to a Sequential too, which went through initialize at {levels[0]!r} in "
        f"another call, and this one is for {levels[1]!r}. Engines may share weights only where "
        "both keep them in float32: at O0, O1 and O4. Pass both models to one initialize, in a "
        "list, or call preamp.engine_of(model).close() for the other model first."
    )
    for allow in (False, True):
        with pytest.raises(preamp.PreampStateError, match=f"^{re.escape(text)}$"):
            preamp.initialize(
                second, optimizer, opt_level=levels[1], verbosity=0, allow_half_model=allow
            )
    assert differences(before, picture(*one, model, optimizer)) == []

    preamp.engine_of(one[0]).close()
    preamp.initialize(second, optimizer, opt_level=levels[1], verbosity=0)
    assert preamp.engine_of(second).policy.opt_level == levels[1]


@pytest.mark.product
@pytest.mark.parametrize("first", F32_WEIGHTS)
@pytest.mark.parametrize("second", F32_WEIGHTS)
def test_a_shared_float32_layer_is_accepted(first: str, second: str) -> None:
    one, two = pair()
    preamp.initialize(*one, opt_level=first, verbosity=0)
    preamp.initialize(*two, opt_level=second, verbosity=0)
    assert preamp.engine_of(one[0]) is not preamp.engine_of(two[0])


def test_a_layer_shared_with_a_model_that_has_changed_over_is_refused() -> None:
    (model, optimizer), two = pair()
    preamp.initialize(model, opt_level="O0", verbosity=0)
    preamp.initialize(model, optimizer, opt_level="O1", verbosity=0)  # which alone has it now
    with pytest.raises(preamp.PreampStateError, match="at 'O1' in another call"):
        preamp.initialize(*two, opt_level="O2", verbosity=0)
    preamp.initialize(model, opt_level="O2", verbosity=0)  # the same model may change over
    assert model[0].weight.dtype is torch.float16


@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_copies_share_nothing(level: str) -> None:
    (model, optimizer), _ = pair()
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0)
    file = io.BytesIO()
    torch.save(model[0], file)
    file.seek(0)
    for made in (copy.deepcopy(model[0]), torch.load(file, weights_only=False)):
        preamp.initialize(made.float(), opt_level="O2", verbosity=0)
        assert made.weight.dtype is torch.float16
