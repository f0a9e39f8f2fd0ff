# SPDX-License-Identifier: BSD-3-Clause
"""A training whose script is one line: ``Run("O2", "FusedAdam").play("backward; clip .5; step")``.

Every test that trains something starts here. A `Run` has models and optimizers by name, at a level
of ``preamp.initialize``, or at the level ``"plain"`` without any engine: that is plain torch, what
others are compared with. A program is a list of acts, ``;`` between them; an act is the name of a
function or method marked `act`, and its arguments. Programs may be joined, repeated
(``3 * "iterate; "``) and be keys of a table, and say in a failure what was done. What no act could
do is refused before the first one is done.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args, get_origin

import torch
from torch import nn

import preamp
from cases.levels import BY_NAME, LEVELS
from kit.compare import same
from preamp import optimizers as fused
from preamp.optim import LARC

Act = Callable[..., Any]
ACTS: dict[str, Act] = {}
"""What programs can do, by name; a file of tests adds its own with `act`."""
PLAIN = "plain"
How = Literal["inf", "delay", "late"]


def act(function: Act) -> Act:
    """Let programs call ``function(run, *arguments)`` by its name, which is of one file only."""
    name = function.__name__
    there = ACTS.setdefault(name, function)
    if there.__code__.co_filename != function.__code__.co_filename:
        raise ValueError(f"The act {name!r} is in {there.__code__.co_filename} already.")
    ACTS[name] = function
    return function


@functools.cache
def parameters_of(function: Act) -> list[inspect.Parameter]:
    """Those that a program can give: their order, and what words stand for."""
    params = inspect.signature(function, eval_str=True).parameters.values()
    return [p for p in [*params][1:] if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]


def value_of(word: str, kind: Any) -> Any:
    """What a word is for a parameter that takes a number, a string or one of some words."""
    if get_origin(kind) is Literal:
        if word not in get_args(kind):
            raise ValueError(f"{word!r} is none of {', '.join(get_args(kind))}")
        return word
    return kind(word) if kind in (int, float, str) else word


def parsed(program: str) -> list[tuple[str, Act, list[Any]]]:
    """The acts of a program, in its words, and with their arguments."""
    acts = []
    for text in program.split(";"):
        if not (words := text.split()):
            continue
        name, *given = words
        if name not in ACTS:
            raise ValueError(f"No act is {name!r}; there are {', '.join(sorted(ACTS))}.")
        takes = parameters_of(ACTS[name])
        try:
            inspect.Signature(takes).bind(*given)
            takes = takes + (len(given) - len(takes)) * takes[-1:]  # the last may be repeated
            values = [value_of(word, p.annotation) for word, p in zip(given, takes, strict=False)]
        except (TypeError, ValueError) as error:
            told = ", ".join(map(str, parameters_of(ACTS[name])))
            raise ValueError(f"{' '.join(words)!r}: {error}; {name} takes ({told}).") from error
        acts.append((" ".join(words), ACTS[name], values))
    return acts


# -- what runs are made of ------------------------------------------------------------------------


class Net(nn.Module):
    """A layer of each kind that levels treat differently."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.bn = nn.BatchNorm1d(8)
        self.ln = nn.LayerNorm(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.ln(self.bn(self.first(x)))))


MODELS: dict[str, Callable[[], Any]] = {"Net": Net, "Linear": lambda: nn.Linear(3, 2)}
"""Models by name; a file of tests adds its own."""
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adam": {"lr": 0.05, "eps": 1e-4},
    "Adagrad": {"lr": 0.1},
    "LBFGS": {"lr": 0.1, "max_iter": 3},
    "FusedAdam": {"lr": 0.01, "weight_decay": 0.1},
    "FusedSGD": {"lr": 0.1, "momentum": 0.9},
    "FusedLARS": {"lr": 0.1, "momentum": 0.9},
}
"""Where an optimizer of that name needs others than ``lr=0.01``."""


def build(name: str, params: Iterable[Any], **options: Any) -> Any:
    """An optimizer of torch or of preamp: ``"AdamW fused"``, ``"LARC FusedSGD"``."""
    kind, _, more = name.partition(" ")
    if kind == "LARC":
        return LARC(build(more, params, **options))
    options = OPTIONS.get(kind, {"lr": 0.01}) | ({more: True} if more else {}) | options
    return (getattr(fused, kind, None) or getattr(torch.optim, kind))(params, **options)


def batch_of(model: nn.Module, index: int) -> torch.Tensor:
    """Inputs number ``index``, as wide as the model's first matrix that is more than a column."""
    width = next(p.shape[-1] for p in model.parameters() if p.dim() > 1 and p.shape[-1] > 1)
    return torch.randn(6, width, generator=torch.Generator().manual_seed(index))


class Run:
    """Models, an optimizer of each, and what a script does with them.

    Attributes:
        models, optimizers: In order; ``model`` and ``optimizer`` are the first ones.
        row: What is known of the level; ``None`` of plain torch.
        log: The acts so far.
    """

    def __init__(
        self,
        level: str = "O2",
        optimizer: str = "SGD",
        model: str | Callable[[], Any] = "Net",
        *,
        count: int = 1,
        seed: int = 0,
        door: Any = preamp,
        starts: bool = True,
        **options: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.door, self.row, self.log = door, BY_NAME.get(level), list[str]()
        make = MODELS[model] if isinstance(model, str) else model
        self.models: list[Any] = [make() for _ in range(count)]
        self.optimizers: list[Any] = [build(optimizer, m.parameters()) for m in self.models]
        self.model, self.optimizer = self.models[0], self.optimizers[0]
        self.options = {"opt_level": level, "verbosity": 0, **options}
        if starts and level != PLAIN:
            self.initialize()

    @act
    def initialize(self, **changes: Any) -> None:
        """Through the door; ``changes`` are other arguments, ``models`` and ``optimizers`` too."""
        given = {"models": self.models, "optimizers": self.optimizers, **self.options, **changes}
        self.door.initialize(**given)

    @property
    def engine(self) -> Any:
        return preamp.engine_of(self.optimizer)

    def play(self, *programs: str) -> Run:
        """Do what they say, in order."""
        for words, function, values in [one for program in programs for one in parsed(program)]:
            self.log.append(words)
            function(self, *values)
        return self

    # -- acts -----------------------------------------------------------------------------------

    def loss(self, index: int = 0) -> torch.Tensor:
        """The sum over all models; at least as large as its gradients are exact."""
        made = [model(batch_of(model, index)).float().square().mean() for model in self.models]
        return torch.stack(made).sum()

    @act
    def backward(
        self, index: int = 0, *how: Literal["inf", "delay", "late"], **scaling: Any
    ) -> None:
        """In a block: ``inf`` makes its gradients infinite, the others are options of blocks."""
        if "delay" in how:
            scaling["delay_unscale"] = True
        if "late" in how:
            scaling["delay_overflow_check"] = True
        self.back(self.loss(index), float("inf") if "inf" in how else 1.0, **scaling)

    def back(self, loss: torch.Tensor, by: float = 1.0, **scaling: Any) -> None:
        """The backward of a loss that a test has made."""
        if self.row is None:
            return loss.backward()
        owners = self.optimizers if len(self.optimizers) > 1 else self.optimizer
        with self.door.scale_loss(loss, owners, **scaling) as scaled:
            (scaled * by).backward()
        return None

    @act
    def outside(self, index: int = 0) -> None:
        """A backward in no block."""
        self.loss(index).backward()

    @act
    def clip(self, max_norm: float = 0.5) -> None:
        for optimizer in self.optimizers:
            if self.row is None:
                nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], max_norm)
            else:
                preamp.clip_grad_norm_(optimizer, max_norm)

    @act
    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    @act
    def zero(self, how: Literal["none", "filled", "own"] = "none") -> None:
        """``own`` is what the optimizer does by itself: some of Apex's fill."""
        given = {} if how == "own" else {"set_to_none": how == "none"}
        for optimizer in self.optimizers:
            optimizer.zero_grad(**given)

    @act
    def iterate(self, *indices: int) -> None:
        """Whole iterations, one for each index."""
        for index in indices or (0,):
            self.backward(index)
            self.step()
            self.zero()

    @act
    def closure(self, index: int = 0) -> None:
        """A step with a closure that makes its gradients."""

        def again() -> torch.Tensor:
            self.zero()
            self.backward(index)
            return self.loss(index).detach()

        self.optimizer.step(again)

    @act
    def forward(self) -> None:
        with torch.no_grad():
            self.loss()

    @act
    def read(self) -> None:
        """Look at each weight, and at the gradient of each master."""
        for state in self.states()[0]:
            assert all(value.isfinite().all() for value in state.values())
        for param in preamp.master_params(self.optimizer):
            _ = param.grad

    @act
    def fill(self, value: float = 0.5) -> None:
        """Write to all weights without a trace in torch."""
        for param in self.model.parameters():
            param.data.fill_(value)

    @act
    def save(self, path: Any = None, **options: Any) -> Any:
        """To a file, or to be loaded by ``load`` without one."""
        if path is not None:
            return preamp.save_checkpoint(path, self.models, self.optimizers, None, 0, **options)
        self.saved = copy.deepcopy(self.states())
        return None

    @act
    def load(self, path: Any = None) -> None:
        if path is not None:
            preamp.load_checkpoint(path, self.models, self.optimizers)
            return
        models, optimizers, engine = copy.deepcopy(self.saved)
        for thing, state in zip([*self.models, *self.optimizers], models + optimizers, strict=True):
            thing.load_state_dict(state)
        preamp.engine_of(self.optimizer).load_state_dict(engine)

    @act
    def close(self) -> None:
        self.engine.close()

    # -- what there is --------------------------------------------------------------------------

    def params(self) -> list[torch.Tensor]:
        """What optimizers update: masters where there are any."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return [param for group in groups for param in group["params"]]

    def twins(self) -> list[Any]:
        """Half weights with their masters."""
        sessions = self.engine.sessions.values()
        return [twin for session in sessions for twin in session.table.twins]

    def states(self) -> tuple[Any, Any, Any]:
        engine = preamp.engine_of(self.optimizer).state_dict() if self.row else {}
        return (
            [model.state_dict() for model in self.models],
            [optimizer.state_dict() for optimizer in self.optimizers],
            engine,
        )

    def numbers(self) -> dict[str, Any]:
        """Copies of all that training goes on from."""
        models, optimizers, engine = copy.deepcopy(self.states())
        tensors = [[*model.parameters(), *model.buffers()] for model in self.models]
        grads = [[param.grad for param in model.parameters()] for model in self.models]
        return {
            "models": models,
            "optimizers": optimizers,
            "engine": engine,
            "stored": [[tensor.detach().clone() for tensor in each] for each in tensors],
            "gradients": [[None if g is None else g.clone() for g in each] for each in grads],
            "skipped": bool(self.row) and self.engine.last_step_skipped,
        }


# -- what is asked of runs ------------------------------------------------------------------------


def differing(a: Any, b: Any, at: str = "") -> str:
    """Where two trees differ first; empty if they are equal bitwise."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return next((d for key in a if (d := differing(a[key], b[key], f"{at}/{key}"))), "")
    if isinstance(a, (list, tuple)) and type(a) is type(b) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return next((d for i, (x, y) in pairs if (d := differing(x, y, f"{at}/{i}"))), "")
    return "" if same(a, b) else f"{at}: {a} is not {b}"


def assert_alike(*runs: Run, of: Sequence[str] = ()) -> None:
    """All have the same bits: in what is named of `Run.numbers`, or in all that they have.

    With plain torch that is what state dicts have: weights as exact as they are, and moments.
    """
    has_plain = any(run.row is None for run in runs)
    first, *others = [run.numbers() for run in runs]
    names = of or (["models", "optimizers"] if has_plain else list(first))
    for run, other in zip(runs[1:], others, strict=True):
        found = filter(None, (differing(first[name], other[name], name) for name in names))
        assert not (where := next(found, "")), f"after {'; '.join(run.log)}\n{where}"


def assert_same_program(program: str, *runs: Run, after: str = "") -> None:
    """The program leaves all runs with the same bits, after each of its parts between ``|``."""
    for part in program.split("|"):
        for run in runs:
            run.play(part, after)
        assert_alike(*runs)


def assert_rounded(run: Run) -> None:
    """Each half weight is its rounded master."""
    for twin in run.twins():
        assert same(twin.half.detach(), twin.value().to(twin.half.dtype)), twin.name


ALL = tuple(row.name for row in LEVELS)


def where(**facts: Any) -> Sequence[str]:
    """Levels of which these facts hold: ``where(has_masters=True)``."""
    return [r.name for r in LEVELS if all(getattr(r, k) == v for k, v in facts.items())]


MASTERS = where(has_masters=True)
