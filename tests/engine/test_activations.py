# SPDX-License-Identifier: BSD-3-Clause
"""Statistics of modules are those of the tensors that went through them in the step."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import preamp
from cases.levels import WITH_MASTERS
from preamp.core.errors import PreampStateError
from preamp.numerics import (
    FORMATS,
    FrameRecord,
    FramesRecord,
    NumericsRecord,
    TensorStatistics,
    measure,
)

KINDS = ("input", "output", "input gradient", "output gradient")


class Halves(nn.Module):
    """Returns two tensors."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = x.chunk(2, -1)
        return first, second.relu()


class Small(nn.Module):
    """A model with a checkpoint, two results, and an operation in place behind a module."""

    def __init__(self, checkpointed: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 8)])
        self.halves = Halves()
        self.head = nn.Linear(4, 1)
        self.checkpointed = checkpointed

    def _body(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x).relu_())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            x = checkpoint(self._body, x, use_reentrant=self.checkpointed == "reentrant")
        else:
            x = self._body(x)
        first, second = self.halves(x)
        return self.head(first + second)


def started(level: str = "O2", model: nn.Module | None = None, **options: Any) -> tuple[Any, Any]:
    model = Small() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0625)
    options = {"numerics": "light", **options}
    return preamp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def batch(number: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(number))


def backward(model: nn.Module, optimizer: Any, number: int, loss_id: int = 0) -> None:
    loss = model(batch(number).requires_grad_()).square().mean()
    with preamp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled:
        scaled.backward()


def step(model: nn.Module, optimizer: Any, *numbers: int) -> None:
    for number in numbers:
        backward(model, optimizer, number)
    optimizer.step()
    optimizer.zero_grad()


def watched(model: Any) -> list[tuple[int, TensorStatistics]]:
    records = preamp.engine_of(model).history.of(NumericsRecord)
    return [(r.step, t) for r in records for t in r.tensors if t.what in KINDS]


class Own:
    """What hooks of our own see, by name and kind."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        self.seen: dict[tuple[str, str], list[torch.Tensor]] = defaultdict(list)
        for name in names:
            module = model.get_submodule(name)
            module.register_forward_pre_hook(partial(self._see, name, "input"))
            module.register_forward_hook(partial(self._see, name, "output"))

    def _see(self, name: str, kind: str, module: nn.Module, *values: Any) -> None:
        value = values[-1]
        for place, tensor in enumerate(value if isinstance(value, tuple) else (value,)):
            full = f"{name}[{place}]" if place else name
            self.seen[full, kind].append(tensor.detach().clone())
            if tensor.requires_grad:
                tensor.register_hook(self._gradients(full, f"{kind} gradient"))

    def _gradients(self, name: str, kind: str) -> Callable[[torch.Tensor], None]:
        return lambda grad: self.seen[name, kind].append(grad.detach().clone())

    def statistics(self, scale: float) -> list[TensorStatistics]:
        found: list[TensorStatistics] = []
        for (name, kind), parts in self.seen.items():
            (one,) = measure([torch.cat([part.reshape(-1) for part in parts])])
            form = {torch.float16: "float16"}.get(parts[0].dtype, "bfloat16")
            by = scale if kind.endswith("gradient") else 1.0
            found.append(one.read(name, kind, FORMATS[form], scale=by))  # type: ignore[arg-type]
        return found


def by_name(statistics: list[TensorStatistics]) -> dict[tuple[str, str], TensorStatistics]:
    return {(t.name, t.what): t for t in statistics}


@pytest.mark.parametrize("level", WITH_MASTERS)
def test_they_are_of_all_forwards_and_backwards_of_the_step(level: str) -> None:
    model, optimizer = started(level)
    preamp.engine_of(model).watch_activations(["layers.*", "halves"], kinds=KINDS)
    own = Own(model, "layers.0", "layers.1", "halves")
    scale = preamp.engine_of(model).loss_scale()
    step(model, optimizer, 1, 2)
    found, wanted = by_name([t for _, t in watched(model)]), by_name(own.statistics(scale))
    assert found.keys() == wanted.keys()
    assert ("halves[1]", "output gradient") in found
    for key, tensor in wanted.items():
        assert found[key].rms == pytest.approx(tensor.rms, rel=1e-6)
        for name in TensorStatistics.__slots__:
            if name != "rms":
                assert getattr(found[key], name) == getattr(tensor, name), (key, name)


def test_without_steps_every_so_many_of_them_are_looked_at(tmp_path: Path) -> None:
    options = {"numerics": "off", "history": tmp_path / "run.jsonl", "numerics_every": 2}
    model, optimizer = started("O5", **options)
    preamp.engine_of(model).watch_activations("head")
    for number in range(4):
        step(model, optimizer, number)
    assert [(number, t.name, t.what) for number, t in watched(model)] == [
        (1, "head", "output"),
        (3, "head", "output"),
    ]


@pytest.mark.parametrize("way", ["reentrant", "not reentrant"])
def test_a_checkpoints_second_forward_is_not_counted_again(way: str) -> None:
    expected: dict[tuple[str, str], TensorStatistics] = {}
    for checkpointed in ("", way):
        model, optimizer = started("O5", Small(checkpointed))
        preamp.engine_of(model).watch_activations(kinds=KINDS)
        step(model, optimizer, 3)
        found = by_name([t for _, t in watched(model)])
        expected = expected or found
        assert found == expected


def test_evaluations_and_copies_are_no_part_of_a_step() -> None:
    model, optimizer = started()
    preamp.engine_of(model).watch_activations("head")
    twin = copy.deepcopy(model)
    model.eval()
    model(batch(0))
    model.train()
    twin(batch(0))
    step(model, optimizer, 1)
    assert [t.elements for _, t in watched(model)] == [5]


def test_gradients_have_the_loss_and_the_scale_of_their_backward() -> None:
    model, optimizer = started("O2", num_losses=2)
    engine = preamp.engine_of(model)
    engine.scaler(0).set_scale(8.0)
    engine.scaler(1).set_scale(32.0)
    engine.watch_activations("head", kinds=("output", "output gradient"))
    backward(model, optimizer, 0, loss_id=1)
    backward(model, optimizer, 1)
    optimizer.step()
    found = {
        (record.loss_id, t.what): (t.scale, t.elements)
        for record in engine.history.of(NumericsRecord)
        for t in record.tensors
        if t.name == "head"
    }
    assert found == {
        (0, "output"): (1.0, 10),
        (0, "output gradient"): (8.0, 5),
        (1, "output gradient"): (32.0, 5),
    }


def test_a_loop_without_scale_loss_has_gradients_too() -> None:
    model, optimizer = started("O4")
    preamp.engine_of(model).watch_activations("head", kinds="output gradient")
    model(batch(0)).square().mean().backward()
    optimizer.step()
    assert [(t.what, t.scale) for _, t in watched(model)] == [("output gradient", 1.0)]


def ends(tensor: torch.Tensor) -> list[float]:
    return [float(tensor.detach().min()), float(tensor.detach().max())]


@pytest.mark.parametrize("checkpointed", ["", "reentrant"])
def test_frames_are_the_ends_of_what_modules_were_given_returned_and_own(checkpointed: str) -> None:
    model, optimizer = started(model=Small(checkpointed))
    engine = preamp.engine_of(model)
    stop = engine.watch_frames([2, 3], pattern=["layers.*", "head"])
    wanted: list[FrameRecord] = []

    def note(name: str, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        wanted.append(
            FrameRecord(
                module=name,
                type="Linear",
                phase="forward",
                inputs=[ends(args[0])],
                outputs=[ends(output)],
                weights=[*map(ends, module.parameters())],
            )
        )

    for number in range(1, 5):
        if number == 4:
            stop()
        names = ("layers.0", "layers.1", "head") if number == 2 else ()
        hooks = [
            model.get_submodule(name).register_forward_hook(partial(note, name)) for name in names
        ]
        step(model, optimizer, number)
        for hook in hooks:
            hook.remove()
    records = engine.history.of(FramesRecord)
    assert [one.step for one in records] == [2, 3]
    assert records[0].frames == wanted[:3]  # a checkpoint computes two of them once more
    assert len(records[1].frames) == 3


def test_frames_of_an_overflow_show_where_it_began() -> None:
    model, optimizer = started()
    engine = preamp.engine_of(model)
    engine.watch_frames(range(1, 2))
    with torch.no_grad():
        model.layers[1].weight.fill_(6e4)
    step(model, optimizer, 1)
    (record,) = engine.history.of(FramesRecord)
    bad = [one for one in record.frames if not all(map(math.isfinite, one.outputs[0]))]
    assert (bad[0].module, engine.last_step_skipped) == ("layers.1", True)


def test_watching_ends_when_it_is_told_to_and_with_the_engine() -> None:
    model, optimizer = started(numerics_every=1)
    stop = preamp.engine_of(model).watch_activations("layers.*")
    preamp.engine_of(model).watch_activations("head", kinds=KINDS)
    step(model, optimizer, 0)
    stop()
    stop()
    step(model, optimizer, 1)
    names = [(number, t.name) for number, t in watched(model) if t.what == "output"]
    assert names == [(1, "layers.0"), (1, "layers.1"), (1, "head"), (2, "head")]
    preamp.engine_of(model).close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Shifted(nn.Module):
    """Hands a parameter to a module, as positions are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shift = nn.Parameter(torch.randn(6))
        self.add = Sum()
        self.head = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.add(x, self.shift))


class Sum(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_leaves_are_read_in_the_steps_that_were_asked_for_only(level: str) -> None:
    model, optimizer = started(level, Shifted())
    engine = preamp.engine_of(model)
    stop = engine.watch_activations("add", kinds="input gradient", steps=[1, 3, 5])
    for number in range(4):
        step(model, optimizer, number)
    found = [(n, t.elements) for n, t in watched(model) if t.name == "add[1]"]
    assert found == [(1, 6), (3, 6)]
    model(batch(4))  # on the way to step 5
    stop()
    step(model, optimizer, 5)
    assert [n for n, t in watched(model) if t.name == "add[1]"] == [1, 3]
    assert not model.shift._backward_hooks


def test_a_penalty_on_gradients_is_not_read_as_their_gradient() -> None:
    model, optimizer = started("O2", loss_scale=64.0)
    preamp.engine_of(model).watch_activations("head", kinds="output gradient")
    x = batch(0).requires_grad_()
    output = model(x)
    (grad,) = torch.autograd.grad(output.float().sum(), x, create_graph=True)
    with preamp.scale_loss(output.float().mean() + grad.square().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert [(t.scale, t.elements) for _, t in watched(model)] == [(64.0, 5)]


@pytest.mark.parametrize("what", ["watch_activations", "trace_overflow"])
def test_a_closed_engine_watches_nothing(what: str) -> None:
    model, _ = started()
    engine = preamp.engine_of(model)
    engine.close()
    with pytest.raises(PreampStateError, match=f"{what} was called after Engine.close"):
        getattr(engine, what)()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_module_that_is_watched_twice_counts_once() -> None:
    model, optimizer = started()
    engine = preamp.engine_of(model)
    engine.watch_activations("head", kinds=KINDS)
    engine.watch_activations("*", kinds=KINDS, steps=[1])
    step(model, optimizer, 0)
    found = {t.what: t.elements for _, t in watched(model) if t.name == "head"}
    assert found == {"input": 20, "output": 5, "input gradient": 20, "output gradient": 5}


def test_the_model_itself_goes_by_its_class() -> None:
    model, optimizer = started()
    preamp.engine_of(model).watch_activations("")
    step(model, optimizer, 0)
    assert [t.name for _, t in watched(model)] == ["Small"]


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"pattern": "layer.*"}, ValueError, r"There are 6 modules, such as 'layers', 'layers.0'"),
        ({"pattern": 3}, TypeError, r"pattern=3 cannot be used\. Allowed"),
        ({"pattern": ["head", None]}, TypeError, r"a string and a list of strings"),
        ({"kinds": "gradient"}, ValueError, r"'input', 'output', 'input gradient'"),
        ({"kinds": ()}, ValueError, r"kinds=\(\) is not known"),
        ({"steps": 3}, TypeError, r"steps=range\(1, 101, 10\)"),
    ],
)
def test_what_cannot_be_watched_is_refused(arguments: Any, kind: Any, words: str) -> None:
    model, _ = started()
    with pytest.raises(kind, match=words):
        preamp.engine_of(model).watch_activations(**arguments)
    assert not any(m._forward_hooks for m in model.layers)


def test_without_records_there_is_nowhere_to_put_them() -> None:
    model, _ = started(numerics="off")
    with pytest.raises(PreampStateError, match=r"makes no records of steps.*numerics=\"light\""):
        preamp.engine_of(model).watch_activations()
