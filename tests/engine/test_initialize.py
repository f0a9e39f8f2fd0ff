# SPDX-License-Identifier: BSD-3-Clause
"""``initialize``: shapes in and out, what is printed, what is converted, inputs and outputs."""

from __future__ import annotations

import collections
import dataclasses
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import preamp
from cases.levels import CASTING_FUNCTIONS, HALF_WEIGHTS, LEVEL_NAMES, WITH_MASTERS
from engine.harness import HALF, everything, loss_of, make, masters, started, train_step, weights
from kit.compare import halves_match, same
from kit.run import Net
from preamp import amp
from preamp.optim import MasterParameter

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DOORS = [preamp.initialize, amp.initialize]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.125)


# -- shapes ----------------------------------------------------------------------------------


def _two() -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    models: list[nn.Module] = [Net(), Net()]
    return models, [sgd(model) for model in models]


def _one() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net()
    return model, sgd(model)


SHAPES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "model": lambda: (Net(),),
    "model, none": lambda: (Net(), None),
    "model, optimizer": _one,
    "model, no optimizers": lambda: (Net(), []),
    "model, list of one": lambda: ((given := _one())[0], [given[1]]),
    "model, list of two": lambda: ((model := Net()), [sgd(model.first), sgd(model.last)]),
    "list": lambda: (_two()[0],),
    "list, optimizer": lambda: ([(given := _one())[0]], given[1]),
    "list, list": _two,
    "no models, optimizer": lambda: ([], _one()[1]),
}


# The form of what comes back depends on the form of what is given; the level does not change it.
@pytest.mark.pairs
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("door", DOORS, ids=["preamp", "amp"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("by_keyword", [False, True])
def test_what_is_given_comes_back(
    door: Any, level: str, enabled: bool, shape: str, by_keyword: bool
) -> None:
    given = SHAPES[shape]()
    before = [list(each) if isinstance(each, list) else each for each in given]
    named = dict(zip(("models", "optimizers"), given, strict=False))
    args, kwargs = ((), named) if by_keyword else (given, {})
    result = door(*args, **kwargs, opt_level=level, enabled=enabled, verbosity=0)
    if "optimizers" in named and given[1] is not None:
        assert type(result) is tuple
    else:
        result = (result,)
    for found, own, kept in zip(result, given, before, strict=False):
        assert found is own
        if isinstance(own, list):
            assert all(a is b for a, b in zip(own, kept, strict=True))


def test_signature_is_apex_s() -> None:
    parameters = inspect.signature(amp.initialize).parameters
    positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert (
        positional
        == (
            "models optimizers enabled opt_level cast_model_type patch_torch_functions "
            "keep_batchnorm_fp32 master_weights loss_scale cast_model_outputs num_losses verbosity "
            "min_loss_scale max_loss_scale"
        ).split()
    )
    assert [parameters[name].default for name in positional[2:]] == [
        True,
        "O1",
        *[None] * 6,
        1,
        1,
        None,
        2.0**24,
    ]
    assert list(inspect.signature(preamp.initialize).parameters)[:14] == positional


def test_all_arguments_explicitly_with_their_defaults() -> None:
    model = Net()
    optimizer = sgd(model)
    parameters = inspect.signature(amp.initialize).parameters
    arguments = {name: p.default for name, p in list(parameters.items())[2:]}
    amp.initialize(models=model, optimizers=optimizer, **{**arguments, "verbosity": False})
    assert preamp.engine_of(model).policy == preamp.OPT_LEVELS["O1"].replace(scope="thread")


@pytest.mark.parametrize("keyword", ["combine_grad", "cast_batchnorm"])
def test_unknown_keyword_of_another_fork(keyword: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{keyword}'"):
        amp.initialize(Net(), **{keyword: True})


def test_cudnn_may_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    train_step(model, optimizer, 0)
    assert halves_match(model)


# -- printing --------------------------------------------------------------------------------

BRIEFS = {
    "O0": "O0:  Pure FP32 training.",
    "O1": "O1:  Insert automatic casts around Pytorch functions and Tensor methods.",
    "O2": "O2:  FP16 training with FP32 batchnorm and FP32 master weights.",
    "O3": "O3:  Pure FP16 training.",
    "O4": "O4:  Insert automatic BF16 casts around Pytorch functions and Tensor methods.",
    "O5": "O5:  BF16 training with FP32 batchnorm and FP32 master weights.",
}


@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_printed_tokens(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    amp.initialize(Net(), opt_level=level, loss_scale="128.0")
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    options = (
        "enabled opt_level cast_model_type patch_torch_functions patch_torch_functions_type "
        "keep_batchnorm_fp32 master_weights loss_scale"
    ).split()
    assert lines[0] == f"Selected optimization level {BRIEFS[level]}"
    assert lines[1] == "Defaults for this optimization level are:"
    assert [line.split(" : ")[0].strip() for line in lines[2:10]] == options
    assert lines[10:12] == [
        "Processing user overrides (additional kwargs that are not None)...",
        "After processing overrides, optimization options are:",
    ]
    assert [line.split(" : ")[0].strip() for line in lines[12:]] == options
    default = preamp.OPT_LEVELS[level].loss_scale
    assert lines[9] == f"loss_scale                 : {default}"
    assert lines[19] == "loss_scale                 : 128.0"
    assert lines[2] == "enabled                    : True"


@pytest.mark.parametrize("verbosity", [0, False, "0"])
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_silence(level: str, verbosity: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level=level, verbosity=verbosity, loss_scale="dynamic")
    train_step(model, optimizer, 0, poison=True)
    assert preamp.engine_of(model).last_step_skipped
    assert capsys.readouterr().out == ""


def test_skipped_step_is_told_by_the_first_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = make()
    preamp.initialize(model, optimizer, opt_level="O2")
    capsys.readouterr()
    train_step(model, optimizer, 0, poison=True)
    assert capsys.readouterr().out.count("\n") == 1
    monkeypatch.setattr("preamp.core.log.is_first_rank", lambda: False)
    train_step(model, optimizer, 0, poison=True)
    assert preamp.engine_of(model).last_step_skipped
    assert capsys.readouterr().out == ""


SUMMARIES = {
    "O0": "preamp: O0 in float32, no float32 masters, loss scale 1.0, back end ",
    "O1": "preamp: O1 in float16, no float32 masters, loss scale dynamic, back end ",
    "O2": "preamp: O2 in float16, 6 float32 masters, loss scale dynamic, back end ",
    "O3": "preamp: O3 in float16, no float32 masters, loss scale 1.0, back end ",
    "O4": "preamp: O4 in bfloat16, no float32 masters, loss scale 1.0, back end ",
    "O5": "preamp: O5 in bfloat16, 6 float32 masters, loss scale 1.0, back end ",
}


@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_preamps_own_door_says_one_line(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = make()
    preamp.initialize(model, optimizer, opt_level=level, backend="reference")
    assert capsys.readouterr().out == f"{SUMMARIES[level]}reference\n"


def test_what_fails_says_nothing_before(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError):
        preamp.initialize(nn.Linear(2, 2).half(), opt_level="O2")
    preamp.initialize(nn.Linear(2, 2), opt_level="O2", verbosity=0)
    for door in DOORS:
        door(nn.Linear(2, 2), opt_level="O2", enabled=False)
    assert capsys.readouterr().out == ""


# -- conversion ------------------------------------------------------------------------------


class Zoo(nn.Module):
    """One of everything that the levels convert differently, and buffers of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.bn = nn.BatchNorm1d(4)
        self.bn_of_ranks, self.bn_of_volumes = nn.SyncBatchNorm(4), nn.BatchNorm3d(4)
        self.plain_bn = nn.BatchNorm1d(4, affine=False)
        self.ln = nn.LayerNorm(4)
        self.gn = nn.GroupNorm(2, 4)
        self.inorm = nn.InstanceNorm1d(4, affine=True)
        self.rnn = nn.LSTM(4, 4, batch_first=True)
        self.wide = nn.Parameter(torch.full((2,), 0.1, dtype=F64))
        self.register_buffer("f32", torch.full((2,), 0.1))
        self.register_buffer("f64", torch.full((2,), 0.1, dtype=F64))
        self.register_buffer("i64", torch.arange(2))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("z", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("hidden", torch.full((2,), 0.1), persistent=False)


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {
        name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }


FIXED = {
    "i64": torch.int64,
    "mask": torch.bool,
    "z": torch.complex64,
    **{
        f"{name}.num_batches_tracked": torch.int64
        for name in ("bn", "bn_of_ranks", "bn_of_volumes", "plain_bn")
    },
}


@pytest.mark.parametrize("level", HALF_WEIGHTS)
def test_conversion_of_half_models(level: str) -> None:
    model = Zoo()
    preamp.initialize(model, opt_level=level, verbosity=0)
    for name, dtype in dtypes(model).items():
        if name in FIXED:
            assert dtype is FIXED[name], name
        elif (name.startswith("bn") and level != "O3") or name == "hidden":
            assert dtype is F32, name
        else:
            assert dtype is HALF[level], name


def test_o0_makes_doubles_float32() -> None:
    model = Zoo()
    preamp.initialize(model, opt_level="O0", verbosity=0)
    assert {dtype for name, dtype in dtypes(model).items() if name not in FIXED} == {F32}


@pytest.mark.parametrize(
    ("level", "options"),
    [
        *((level, {"cast_model_type": False}) for level in LEVEL_NAMES),
        *((level, {}) for level in CASTING_FUNCTIONS),
    ],
)
def test_what_converts_nothing(level: str, options: dict[str, Any]) -> None:
    model = Zoo()
    before = weights(model)
    preamp.initialize(model, opt_level=level, verbosity=0, **options)
    assert same(weights(model), before)


@pytest.mark.parametrize(
    ("level", "given", "kept"), [("O2", False, F16), ("O2", "False", F16), ("O3", "True", F32)]
)
def test_keep_batchnorm(level: str, given: Any, kept: torch.dtype) -> None:
    model = Zoo()
    preamp.initialize(model, opt_level=level, keep_batchnorm_fp32=given, verbosity=0)
    assert model.bn.weight.dtype is model.bn.running_mean.dtype is kept
    assert model.plain_bn.running_mean.dtype is F16


@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_parameters_and_groups_keep_their_identity(level: str) -> None:
    model, optimizer = make()
    before = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    groups, lists = optimizer.param_groups, [group["params"] for group in optimizer.param_groups]
    inner = list(groups)
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert optimizer.param_groups is groups
    assert all(a is b for a, b in zip(groups, inner, strict=True))
    assert all(group["params"] is params for group, params in zip(groups, lists, strict=True))
    after = dict(model.named_parameters())
    assert all(after[name] is param for name, param in before.items())
    assert all(dict(model.named_buffers())[name] is b for name, b in buffers.items())


@pytest.mark.parametrize("level", HALF_WEIGHTS)
def test_existing_gradients_are_converted(level: str) -> None:
    model, _ = make()
    model.first.weight.grad = torch.full_like(model.first.weight, 3.0)
    preamp.initialize(model, opt_level=level, verbosity=0)
    assert model.first.weight.grad.dtype is HALF[level]
    assert model.first.weight.grad[0, 0] == 3.0


@pytest.mark.filterwarnings("ignore:optimizer.step.. was called with gradients that no scale_loss")
@pytest.mark.parametrize("level", WITH_MASTERS)
def test_existing_gradients_count(level: str) -> None:
    """A gradient made before initialize is unscaled, and the next step uses it."""
    weight = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(weight.parameters(), lr=1.0)
    weight.weight.data.fill_(1.0)
    weight.weight.grad = torch.full_like(weight.weight, 0.25)
    preamp.initialize(weight, optimizer, opt_level=level, verbosity=0)
    optimizer.step()
    assert weight.weight.tolist() == [[0.75, 0.75]]


@pytest.mark.parametrize("level", WITH_MASTERS)
def test_which_parameters_have_masters(level: str) -> None:
    model, optimizer = started(level)
    named = dict(model.named_parameters())
    for param, (name, own) in zip(preamp.master_params(optimizer), named.items(), strict=True):
        assert isinstance(param, MasterParameter) is not name.startswith("bn."), name
        assert (param is own) is name.startswith("bn."), name
        assert param.dtype is F32


@pytest.mark.parametrize(("level", "given"), [("O2", False), ("O2", "False"), ("O5", False)])
def test_no_masters_and_a_scale_from_a_flag(level: str, given: Any) -> None:
    model, optimizer = started(level, master_weights=given, loss_scale="128.0")
    assert not preamp.engine_of(model).has_masters
    assert all(
        a is b for a, b in zip(preamp.master_params(optimizer), model.parameters(), strict=True)
    )
    x = torch.randn(6, 4, requires_grad=True)
    with amp.scale_loss(model(x).square().mean(), optimizer) as scaled:
        assert scaled.item() == pytest.approx(128.0 * model(x).square().mean().item())
        scaled.backward()
    first = x.grad.clone()
    assert first.abs().sum() > 0  # of the input: still scaled, as scripts that read it expect
    before = weights(model)
    optimizer.zero_grad()
    with amp.scale_loss(model(x).square().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert not same(weights(model)["first.weight"], before["first.weight"])


@pytest.mark.parametrize("level", ["O0", "O3"])
def test_master_weights_can_be_asked_for(level: str) -> None:
    model, optimizer = started(level, master_weights=True)
    assert preamp.engine_of(model).has_masters is (level == "O3")
    train_step(model, optimizer, 0)
    assert halves_match(model)


# -- lists of models -------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("is_part", [False, True])
def test_a_module_twice_or_beside_its_own_part(level: str, is_part: bool) -> None:
    model, optimizer = make()
    exact = [param.detach().clone() for param in model.parameters()]
    models = [model, model.first if is_part else model]
    preamp.initialize(models, optimizer, opt_level=level, verbosity=0)
    if level in WITH_MASTERS:
        assert same(masters(optimizer), exact)
    assert model(torch.ones(2, 4)).dtype is F32
    train_step(model, optimizer, 0)
    assert halves_match(model)
    assert all(value.dtype is F32 for key, value in model.state_dict().items() if "num" not in key)
    preamp.engine_of(model).close()
    assert {p.dtype for p in model.parameters()} == {F32}


@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_frozen_copies_for_averaging(level: str) -> None:
    model, optimizer = make()
    average = Net()
    average.load_state_dict(model.state_dict())
    average.requires_grad_(False)
    models = [model, average]
    preamp.initialize(models, optimizer, opt_level=level, verbosity=0)
    train_step(model, optimizer, 0)
    for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
        slow.data.mul_(0.5).add_(fast.data, alpha=0.5)
    out = average.eval()(torch.ones(2, 4))
    assert out.isfinite().all()
    average.load_state_dict(model.state_dict())
    assert same(weights(average), weights(model))


@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_model_alone_for_evaluation(level: str) -> None:
    model, _ = make()
    model.eval()
    x = torch.randn(3, 4)
    with torch.no_grad():
        expected = model(x)
        preamp.initialize(model, opt_level=level, verbosity=0)
        got = model(x)
    assert got.dtype is F32
    assert torch.allclose(got.float(), expected, atol=0.05, rtol=0.05)
    assert preamp.engine_of(model).optimizers == ()


# -- enabled=False ---------------------------------------------------------------------------


@pytest.mark.parametrize("door", [preamp, amp], ids=["preamp", "amp"])
def test_disabled_passes_everything_through(door: Any) -> None:
    model, optimizer = make()
    reference, plain = make()
    before = weights(model)
    door.initialize(model, optimizer, enabled=False, opt_level="O9", loss_scale="abc")
    assert same(weights(model), before)
    assert vars(optimizer).keys() - vars(plain).keys() <= {"_preamp_link"}
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        with door.scale_loss(loss, optimizer) as scaled:
            assert scaled is loss
            scaled.backward()
        torch.nn.utils.clip_grad_norm_(door.master_params(optimizer), 1.0)
        optimizer.step()
        plain.zero_grad()
        loss_of(reference, step).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        plain.step()
    assert same(weights(model), weights(reference))
    assert list(door.master_params(optimizer)) == list(model.parameters())


@pytest.mark.parametrize("door", [preamp, amp], ids=["preamp", "amp"])
def test_disabled_asks_nothing_of_its_arguments(door: Any) -> None:
    """With amp off scripts pass tuples, mocks and wrappers; they come back as they are."""
    model = Net()
    models, optimizers = (model, "text"), MagicMock()
    result = door.initialize(models, optimizers, enabled=False, num_losses="many", verbosity=None)
    assert result[0] is models
    assert result[1] is optimizers
    wrapped = nn.DataParallel(model)
    assert door.initialize(wrapped, enabled=False) is wrapped


@pytest.mark.parametrize(
    "optimizers", [MagicMock(), (), [], None, "text"], ids=["mock", "tuple", "list", "none", "text"]
)
def test_disabled_scale_loss_asks_nothing_of_its_optimizers(optimizers: Any) -> None:
    amp.initialize("model", optimizers, enabled=False)
    loss = torch.ones(())
    with amp.scale_loss(loss, optimizers) as scaled:
        assert scaled is loss


def test_disabled_state() -> None:
    model, optimizer = make()
    amp.initialize(model, optimizer, enabled=False)
    assert amp.state_dict() == {}
    amp.load_state_dict({})
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 0}})
    assert amp.state_dict() == {}
    with amp.disable_casts():
        assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is F32
    engine = preamp.engine_of(optimizer)
    assert engine.explain() == "preamp is off (enabled=False): every call passes through."
    assert preamp.state_dict(engine)["steps"]
    assert preamp.clip_grad_norm_(optimizer, 1.0).item() == 0.0
    engine.close()
    assert "_preamp_link" not in vars(model)


def test_disabled_then_enabled() -> None:
    model, optimizer = make()
    preamp.initialize(model, optimizer, enabled=False)
    preamp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert preamp.engine_of(optimizer).policy.opt_level == "O2"
    train_step(model, optimizer, 0)
    assert halves_match(model)


# -- inputs ----------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: Any
    n: Any


@dataclasses.dataclass
class Record:
    x: Any
    n: Any = 3


@dataclasses.dataclass
class ModelOutput(collections.OrderedDict):  # type: ignore[type-arg]
    """Built like the output classes of model libraries: fields, entries and attributes agree."""

    logits: Any = None
    hidden: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                super().__setitem__(field.name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        return type(self), tuple(getattr(self, f.name) for f in dataclasses.fields(self))


class Echo(nn.Module):
    """Keeps what its forward was given, and returns what it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen: Any = None
        self.answer: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = (args, kwargs)
        return self.answer


def echo(level: str, **arguments: Any) -> Echo:
    return preamp.initialize(Echo(), opt_level=level, verbosity=0, **arguments)


class Movable:
    """A batch that moves itself, as graphs and boxes do."""

    def __init__(self) -> None:
        self.ids, self.target = torch.tensor([257, 513, 999]), torch.tensor([1001.3])

    def to(self, device: Any) -> Movable:
        self.ids, self.target = self.ids.to(device), self.target.to(device)
        return self


def ones(dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(2, dtype=dtype)


Make, Find = Callable[[torch.dtype], Any], Callable[[Any], list[Any]]
CONTAINERS: dict[str, tuple[Make, Find]] = {
    "tensor": (ones, lambda got: [got]),
    "named tuple": (lambda dtype: Pair(ones(dtype), 3), list),
    "dataclass": (lambda dtype: Record(ones(dtype)), lambda got: [got.x, got.n]),
    "model output": (
        lambda dtype: ModelOutput(logits=ones(dtype), hidden=(ones(dtype),)),
        lambda got: [got.logits, got["logits"], *got.hidden],
    ),
    "list": (lambda dtype: [ones(dtype), "b", None], list),
    "dict": (lambda dtype: {"a": ones(dtype), "s": "text"}, lambda got: [*got, *got.values()]),
    "nested": (
        lambda dtype: {"k": [Pair(ones(dtype), (ones(dtype), 7))]},
        lambda got: [got["k"][0].x, *got["k"][0].n],
    ),
}
"""How to make them around tensors of a dtype, and what is in them."""
FOR_INPUTS: dict[str, tuple[Make, Find]] = {
    "packed": (lambda dtype: pack_sequence([ones(dtype)[:, None]]), lambda got: [got.data])
}
LEFT_ALONE = [
    *("fwd", None, 7, torch.arange(2), torch.ones(2) > 0, np.ones(2), nn.Linear(2, 2)),
    *(Movable(), (number for number in range(2))),
]


def check_container(kind: str, found: Any, given: torch.dtype, expected: torch.dtype) -> None:
    """It is of the same type and has the same things in it, tensors in the ``expected`` dtype."""
    make, find = {**CONTAINERS, **FOR_INPUTS}[kind]
    made = make(given)
    assert type(found) is type(made), kind
    for got, was in zip(find(found), find(made), strict=True):
        if isinstance(was, torch.Tensor):
            assert got.dtype is expected, kind
        else:
            assert got == was, kind


INPUT_DTYPE = {"O0": F32, "O1": F32, "O2": F16, "O3": F16, "O4": F32, "O5": BF16}


@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("by_keyword", [False, True])
def test_inputs(level: str, by_keyword: bool) -> None:
    model = echo(level)
    kinds = {**CONTAINERS, **FOR_INPUTS}
    given = [*(make(F32) for make, _ in kinds.values()), *LEFT_ALONE, range(2)]
    model(**{f"n{n}": one for n, one in enumerate(given)}) if by_keyword else model(*given)
    args, kwargs = model.seen
    found = list(kwargs.values()) if by_keyword else list(args)
    assert len(found) == len(given)
    for kind, got in zip(kinds, found, strict=False):
        check_container(kind, got, F32, INPUT_DTYPE[level])
    for got, one in zip(found[len(kinds) :], LEFT_ALONE, strict=False):
        assert got is one
    assert found[-1] == range(2)


def test_the_callers_containers_are_not_changed() -> None:
    model = echo("O2")
    given = {"x": torch.ones(1), "list": [torch.ones(1)]}
    model(given)
    assert given["x"].dtype is F32
    assert given["list"][0].dtype is F32


@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("door", [preamp, amp], ids=["preamp", "amp"])
def test_objects_that_move_themselves_go_in_and_out_as_they_are(door: Any, level: str) -> None:
    model = door.initialize(Echo(), opt_level=level, verbosity=0)
    batch = Movable()
    model.answer = [batch, {"ids": batch.ids}]
    for run in (model, model.forward):
        out = run(batch, named=batch)
        assert model.seen == ((batch,), {"named": batch})
        assert out[0] is batch
        assert out[1]["ids"] is batch.ids
    assert batch.ids.tolist() == [257, 513, 999]
    assert torch.equal(batch.target, torch.tensor([1001.3]))


# -- outputs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("scope", ["model", "thread"])
def test_outputs(level: str, scope: Any) -> None:
    """Models answer in float32; those around which functions are cast too are left alone."""
    model = echo(level, scope=scope)
    expected = F16 if scope == "thread" and level in CASTING_FUNCTIONS else F32

    model.answer = (*(make(F16) for make, _ in CONTAINERS.values()), *LEFT_ALONE)
    found = model()
    for kind, got in zip(CONTAINERS, found, strict=False):
        check_container(kind, got, F16, expected)
    for got, one in zip(found[len(CONTAINERS) :], LEFT_ALONE, strict=True):
        assert got is one


@dataclasses.dataclass(frozen=True)
class Forward:
    """A call with a float64 argument.

    Attributes:
        options: Of ``initialize``.
        seen: What the model gets of its argument; None where that is no matter here.
        answer: What the model returns.
        out: What comes out of the call.
    """

    level: str
    options: dict[str, Any]
    seen: torch.dtype | None
    answer: torch.dtype
    out: torch.dtype


UNCAST = {"cast_model_type": False}
FORWARDS = [
    Forward("O0", {}, seen=F32, answer=F16, out=F32),
    *(Forward(level, {}, seen=F64, answer=F64, out=F64) for level in CASTING_FUNCTIONS),
    *(Forward(level, {}, seen=F64, answer=BF16, out=F32) for level in CASTING_FUNCTIONS),
    Forward("O2", UNCAST, seen=F64, answer=F16, out=F16),
    Forward("O2", {**UNCAST, "cast_model_outputs": F16}, seen=F64, answer=F32, out=F16),
    *(
        Forward(level, {"cast_model_outputs": out}, seen=None, answer=F32, out=out)
        for level in LEVEL_NAMES
        for out in (F16, F64)
    ),
]


@pytest.mark.parametrize("call", FORWARDS, ids=lambda call: call.level)
def test_forwards(call: Forward) -> None:
    model = echo(call.level, **call.options)
    model.answer = torch.ones(1, dtype=call.answer)
    assert model(torch.ones(1, dtype=F64)).dtype is call.out
    assert call.seen in (None, model.seen[0][0].dtype)


# -- float32 made inside a half model --------------------------------------------------------


class Inside(nn.Module):
    """Hands a layer a float32 tensor that was not among the model's inputs."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.layer = layer
        self.call = call

    def forward(self) -> Any:
        return self.call(self.layer)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "linear": (lambda: nn.Linear(4, 4), lambda m: m(torch.ones(2, 4))),
    "bilinear": (lambda: nn.Bilinear(2, 2, 2), lambda m: m(torch.ones(2, 2), torch.ones(2, 2))),
    "layer_norm": (lambda: nn.LayerNorm(4), lambda m: m(torch.ones(2, 4))),
    "group_norm": (lambda: nn.GroupNorm(2, 4), lambda m: m(torch.ones(2, 4))),
    "conv1d": (lambda: nn.Conv1d(2, 2, 1), lambda m: m(torch.ones(1, 2, 4))),
    "conv2d": (lambda: nn.Conv2d(2, 2, 1), lambda m: m(torch.ones(1, 2, 4, 4))),
    "transposed": (lambda: nn.ConvTranspose1d(2, 2, 1), lambda m: m(torch.ones(1, 2, 4))),
    "lstm": (lambda: nn.LSTM(4, 4), lambda m: m(torch.ones(2, 1, 4))[0]),
    "lstm with state": (
        lambda: nn.LSTM(4, 4),
        lambda m: m(torch.ones(2, 1, 4), (torch.zeros(1, 1, 4), torch.zeros(1, 1, 4)))[0],
    ),
    "lstm of packed rows": (
        lambda: nn.LSTM(4, 4),
        lambda m: m(pack_sequence([torch.ones(3, 4), torch.ones(1, 4)]))[0].data,
    ),
    "gru": (lambda: nn.GRU(4, 4), lambda m: m(torch.ones(2, 1, 4))[0]),
    "gru cell": (lambda: nn.GRUCell(4, 4), lambda m: m(torch.ones(1, 4))),
    "attention": (
        lambda: nn.MultiheadAttention(4, 2),
        lambda m: m(torch.ones(2, 1, 4), torch.ones(2, 1, 4), value=torch.ones(2, 1, 4))[0],
    ),
    "attention with float mask": (
        lambda: nn.MultiheadAttention(4, 2),
        lambda m: m(*[torch.ones(2, 1, 4)] * 3, attn_mask=torch.zeros(2, 2))[0],
    ),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0),
        lambda m: m(torch.ones(2, 1, 4)),
    ),
    "prelu": (lambda: nn.PReLU(), lambda m: m(torch.ones(2, 4))),
    "batch_norm": (lambda: nn.BatchNorm1d(4), lambda m: m(torch.randn(3, 4))),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("level", HALF_WEIGHTS)
def test_float32_inside(level: str, name: str) -> None:
    build, call = LAYERS[name]
    model = Inside(build(), call)
    optimizer = sgd(model)
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0)
    out = model()
    assert out.dtype is F32
    with preamp.scale_loss(out.sum(), optimizer) as scaled:
        scaled.backward()
    assert all(p.grad is not None for p in preamp.master_params(optimizer))
    model.eval()
    with torch.no_grad():
        assert model().isfinite().all()


# -- calling again ---------------------------------------------------------------------------


def test_bound_methods_are_methods() -> None:
    _, optimizer = started("O2")
    for name in ("step", "zero_grad", "add_param_group"):
        method = getattr(optimizer, name)
        assert isinstance(method, MethodType)
        assert method.__self__ is optimizer
        assert method.__name__ == name


def test_state_is_complete_after_initialize() -> None:
    model, optimizer = started("O2")
    assert everything(model, optimizer)["engine"] == {
        "loss_scaler0": {"loss_scale": 2.0**16, "unskipped": 0},
        "steps": [{"applied": 0, "skipped": 0, "skips_in_row": 0}],
    }


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_numbers_of_an_optimizer_keep_their_dtype(level: str) -> None:
    """State of the weights' shape is cast with them; NAdam's product of momenta is a number."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    products = [state["mu_product"].clone() for state in optimizer.state.values()]
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0)
    found = list(optimizer.state.values())
    weights = torch.float32 if level == "O2" else torch.float16
    assert {state["exp_avg"].dtype for state in found} == {weights}
    assert [state["mu_product"] for state in found] == products
    assert {state["mu_product"].dtype for state in found} == {torch.float32}
