# SPDX-License-Identifier: BSD-3-Clause
"""What stays float32 in half models: by ``keep_fp32``, and buffers that no checkpoint holds."""

import copy
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preamp
from cases.levels import BY_NAME, HALF_WEIGHTS, LEVEL_NAMES
from kit.loops import scaled_step
from kit.refusals import assert_refused, refused
from preamp import amp
from preamp.casting.functions import FUNCTION_CASTS
from preamp.numerics import RunRecord

F32 = torch.float32


class Gate(nn.Module):
    """Weights used by hand, beside a layer of torch's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / 4)
        self.bias = nn.Parameter(torch.zeros(width))
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.inner(x) @ self.weight + self.bias)


class Model(nn.Module):
    gain: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.gate = Gate(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 11)
        self.register_buffer("gain", torch.tensor([1.0, 3.14159]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x * self.gate(self.norm(x)) * self.gain[0]
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.recurrent(x)[0])


TOKENS = torch.arange(12).reshape(2, 6) % 11


def started(level: str, **arguments: Any) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0, **arguments)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    losses: list[float] = []
    for _ in range(steps):
        loss = F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten())
        scaled_step(loss, optimizer)
        losses.append(loss.item())
    return losses


def in_float32(model: nn.Module) -> set[str]:
    named = (*model.named_parameters(), *model.named_buffers())
    return {name for name, tensor in named if tensor.dtype is F32}


GATE = {"gate.weight", "gate.bias", "gate.inner.weight", "gate.inner.bias"}
ATTENTION = {
    f"attention.{name}"
    for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
}
RECURRENT = {f"recurrent.{kind}_{gate}_l0" for kind in ("weight", "bias") for gate in ("ih", "hh")}
NORM = {"norm.weight", "norm.bias"}
HEAD = {"head.weight", "head.bias"}


SELECTIONS: dict[str, tuple[Any, set[str]]] = {
    "a type": (nn.LayerNorm, NORM),
    "a type of one's own, and all in it": (Gate, GATE),
    "a module's name": ("gate", GATE),
    "a pattern for modules": ("gat?", GATE),
    "a pattern for parameters": ("gate.*", GATE),
    "one parameter of a module": ("gate.bias", {"gate.bias"}),
    "one parameter of a layer": ("head.bias", HEAD),
    "a predicate": (lambda name, tensor: name.endswith("bias") and tensor.numel() == 11, HEAD),
    "a predicate that finds nothing": (lambda name, tensor: False, set()),
    "a layer of several weights": ("attention.out_proj.bias", ATTENTION),
    "a recurrent layer": (nn.RNNBase, RECURRENT),
    "a buffer": ("gain", {"gain"}),
    "an embedding": (nn.Embedding, {"embed.weight"}),
    "several": ([nn.LayerNorm, "head", "gain"], NORM | HEAD | {"gain"}),
    "everything": ("*", NORM | GATE | ATTENTION | RECURRENT | HEAD | {"gain", "embed.weight"}),
}


@pytest.mark.parametrize("level", HALF_WEIGHTS)
@pytest.mark.parametrize("selection", SELECTIONS)
def test_what_it_names_is_float32_and_trains(selection: str, level: str) -> None:
    keep, expected = SELECTIONS[selection]
    torch.manual_seed(0)
    before = Model().state_dict()
    model, optimizer = started(level, keep_fp32=keep)
    assert in_float32(model) == expected
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in expected)
    engine = preamp.engine_of(optimizer)
    named = dict(model.named_parameters())
    for name in expected & named.keys():
        assert engine.master_of(named[name]) is None
        assert any(named[name] is p for g in optimizer.param_groups for p in g["params"])

    torch.manual_seed(0)
    plain = Model()
    reference = torch.optim.SGD(plain.parameters(), lr=0.5)
    wanted: list[float] = []
    for _ in range(3):
        loss = F.cross_entropy(plain(TOKENS).flatten(0, 1), TOKENS.flatten())
        loss.backward()
        reference.step()
        reference.zero_grad()
        wanted.append(loss.item())
    losses = train(model, optimizer)
    exact = expected == SELECTIONS["everything"][1]
    torch.testing.assert_close(losses, wanted, rtol=0 if exact else 0.02, atol=0)
    assert in_float32(model) == expected
    moved = {name for name in named if not torch.equal(model.state_dict()[name], before[name])}
    assert moved == set(named)


REFUSED: dict[str, Any] = {
    "a misspelled name": "norm.wieght",
    "a pattern beside a type": [nn.LayerNorm, "gates.*"],
    "a type that no module has": nn.Conv2d,
    "another such type": nn.RMSNorm,
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("level", HALF_WEIGHTS)
def test_what_the_models_do_not_have_is_refused(level: str, name: str) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"opt_level": level, "verbosity": 0, "keep_fp32": REFUSED[name]}
    with refused("keep_fp32", name, model, optimizer):
        preamp.initialize(model, optimizer, **options)
    assert in_float32(model) == set(model.state_dict())
    assert_refused("keep_fp32", "no engine", lambda: preamp.engine_of(model))


def test_a_name_in_one_of_several_models_is_enough() -> None:
    critic, model = nn.Sequential(nn.Linear(3, 3)), Model()
    seen: list[torch.Tensor] = []
    critic[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    preamp.initialize([model, critic], opt_level="O5", verbosity=0, keep_fp32=[nn.Sequential])
    assert in_float32(model) == set()
    assert in_float32(critic) == {"0.weight", "0.bias"}
    inputs = torch.full((1, 3), 1 / 3)
    assert critic(inputs).dtype is F32
    assert torch.equal(seen[0], inputs)  # a model that is kept gets unrounded inputs


@pytest.mark.parametrize("level", HALF_WEIGHTS)
def test_batch_norms_by_type(level: str) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False))
    preamp.initialize(
        model, opt_level=level, verbosity=0, keep_fp32=nn.BatchNorm2d, keep_batchnorm_fp32=False
    )
    assert all(name.startswith(("1.", "2.")) for name in in_float32(model))
    assert {"1.weight", "1.running_var", "2.running_mean"} <= in_float32(model)
    seen: list[torch.dtype] = []
    model[1].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    model(torch.randn(3, 2, 5, 5)).sum().backward()
    assert seen == [BY_NAME[level].half]  # as with keep_batchnorm_fp32


@pytest.mark.parametrize("level", HALF_WEIGHTS)
def test_modules_without_weights_compute_in_float32(level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(dim=-1), nn.Linear(4, 4))
    seen: list[torch.dtype] = []
    model[1].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    preamp.initialize(model, opt_level=level, verbosity=0, keep_fp32=nn.Softmax)
    model(torch.randn(3, 4)).sum().backward()
    assert seen == [F32]


OWN = SimpleNamespace(cross_entropy=F.cross_entropy)


class WithLoss(nn.Module):
    """Returns its loss, computed in four ways, and the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 32)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.body(x)
        return {
            "module": self.loss(logits, labels),
            "function": F.cross_entropy(logits, labels),
            "registered": OWN.cross_entropy(logits, labels),
            "widened": F.cross_entropy(logits.float(), labels),
            "logits": logits,
        }


@pytest.fixture
def registered() -> Iterator[None]:
    preamp.register_float_function(OWN, "cross_entropy")
    yield
    FUNCTION_CASTS.extras.pop((id(OWN), "cross_entropy"))


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("door", [preamp, amp], ids=["preamp", "amp"])
@pytest.mark.parametrize(
    ("level", "keep"),
    [
        *((level, None) for level in LEVEL_NAMES if level != "O0"),
        *((level, nn.CrossEntropyLoss) for level in HALF_WEIGHTS),
    ],
)
def test_a_loss_inside_the_model(door: Any, level: str, keep: Any) -> None:
    """Each sentence of the page about it."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(64) % 32
    torch.manual_seed(0)
    model = door.initialize(WithLoss(), opt_level=level, verbosity=0, keep_fp32=keep)
    found = model(x, labels)
    outside = F.cross_entropy(found["logits"].float(), labels)
    exact = {name for name, loss in found.items() if torch.equal(loss, outside)}
    if level in HALF_WEIGHTS:
        assert exact == ({"widened"} if keep is None else {"widened", "module"})
        assert torch.equal(found["function"], found["function"].to(BY_NAME[level].half).float())
    else:
        assert exact == {"widened", "module", "function", "registered"}


# -- there and back ------------------------------------------------------------------------------


@pytest.mark.parametrize("level", HALF_WEIGHTS)
def test_the_decision_can_be_read(level: str) -> None:
    model, optimizer = started(level, keep_fp32=[nn.LayerNorm, "gain"])
    text = preamp.engine_of(optimizer).explain()
    assert f"keep_fp32 = LayerNorm, 'gain' (default of {level}: nothing)" in text
    assert "3 tensors that keep_fp32 names stay float32" in text
    run = preamp.engine_of(model).history.of(RunRecord)[0]
    assert run.policy["keep_fp32"] == "LayerNorm, 'gain'"


# -- buffers -------------------------------------------------------------------------------------


def rotated(x: torch.Tensor, inv_freq: torch.Tensor, start: int) -> torch.Tensor:
    positions = torch.arange(start, start + x.shape[-2])
    angles = torch.outer(positions, inv_freq)
    cos, sin = angles.cos(), angles.sin()
    one, two = x.chunk(2, dim=-1)
    return torch.cat([one * cos - two * sin, one * sin + two * cos], dim=-1)


class Rotary(nn.Module):
    """Attention with rotary position codes, written as if all were of one dtype."""

    inv_freq: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        inv_freq = 1.0 / 10000.0 ** (torch.arange(0, 8, 2) / 8)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        q, k = (rotated(t, self.inv_freq, 8000) for t in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


def made() -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    return Rotary(), torch.randn(2, 5, 16)


def results(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    output = model(x)
    (output.sin() * torch.arange(1.0, 1 + output.shape[-1])).sum().backward()
    assert x.grad is not None
    return [output.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("level", HALF_WEIGHTS)
def test_constants_stay_float32_and_mix_with_half(level: str) -> None:
    model, x = made()
    exact = results(copy.deepcopy(model).double(), x.double())
    constants = dict(model.named_buffers())
    before = {name: value.clone() for name, value in constants.items()}
    preamp.initialize(model, opt_level=level, verbosity=0)
    assert all(value.dtype is F32 for value in constants.values())
    assert all(torch.equal(value, before[name]) for name, value in constants.items())
    eps = torch.finfo(BY_NAME[level].half).eps
    found = results(model, x)
    assert len(found) == len(exact)
    for ours, right in zip(found, exact, strict=True):
        error = (ours.double() - right).norm() / right.norm()
        assert error < 4 * eps
    with torch.no_grad():
        assert (model.eval()(x).double() - exact[0]).norm() < 4 * eps * exact[0].norm()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_models_mix_too() -> None:
    model, x = made()
    preamp.initialize(model, opt_level="O5", verbosity=0)
    eager = results(model, x)
    torch._dynamo.reset()
    compiled = results(torch.compile(model, backend="aot_eager", fullgraph=True), x)
    torch._dynamo.reset()
    for ours, wanted in zip(compiled, eager, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=0)


def test_constants_of_another_dtype() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("wide", torch.full((2,), 0.1, dtype=torch.float64), persistent=False)
    model.register_buffer("narrow", torch.ones(2, dtype=torch.bfloat16), persistent=False)
    model.register_buffer("whole", torch.arange(2), persistent=False)
    preamp.initialize(model, opt_level="O5", verbosity=0, allow_half_model=True)
    found = {name: value.dtype for name, value in model.named_buffers()}
    assert found == {"wide": F32, "narrow": torch.bfloat16, "whole": torch.int64}


# -- buffers that the cast harms -----------------------------------------------------------------

HARMED: dict[str, tuple[torch.Tensor, dict[torch.dtype, str]]] = {
    "large": (torch.tensor([1e6, 1.5]), {torch.float16: "1e+06 becomes infinite"}),
    "whole": (
        torch.arange(5000.0),
        {
            torch.float16: "whole numbers up to 4999 become others",
            torch.bfloat16: "whole numbers up to 4999 become others",
        },
    ),
    "tiny": (torch.tensor([1e-9, 1.0]), {torch.float16: "values too small for it become 0"}),
    "small": (
        torch.linspace(1e-6, 2e-6, 100),
        {torch.float16: "values near the smallest it has lose most of their digits"},
    ),
    "plain": (torch.linspace(0.5, 3, 1001), {}),
    "exact": (torch.arange(2048.0)[:257], {}),
    "infinite": (torch.tensor([float("inf"), float("nan"), -0.0, 0.0]), {}),
    "codes": (torch.sin(torch.arange(1000.0)), {}),
}


@pytest.mark.parametrize("level", HALF_WEIGHTS)
def test_one_warning_names_the_buffers(level: str) -> None:
    model = nn.Linear(2, 2)
    for name, (value, _) in HARMED.items():
        model.register_buffer(name, value.clone())
    half = BY_NAME[level].half
    harm = {name: what[half] for name, (_, what) in HARMED.items() if half in what}
    with pytest.warns(UserWarning, match="^The cast to ") as caught:
        preamp.initialize(model, opt_level=level, verbosity=0)
    assert [str(one.message) for one in caught] == [
        f"The cast to {str(half).removeprefix('torch.')} changes buffers by more than its "
        f"rounding: {', '.join(f'{name!r} ({loss})' for name, loss in harm.items())}. Buffers in "
        "the state_dict are cast as weights are, and have no masters. Pass "
        f"keep_fp32={list(harm)} to keep them in float32."
    ]
    assert caught[0].filename == __file__


@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_no_warning_where_nothing_is_harmed(level: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for persistent, keep in ((True, "*"), (False, None)):
            model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2))
            keep = keep if level in HALF_WEIGHTS else None
            if level in HALF_WEIGHTS or not persistent:
                for name, (value, _) in HARMED.items():
                    model.register_buffer(name, value.clone(), persistent=persistent)
            preamp.initialize(model, opt_level=level, verbosity=0, keep_fp32=keep)
