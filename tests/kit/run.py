# SPDX-License-Identifier: BSD-3-Clause
"""A training whose script is one line: ``Run("O2", "FusedAdam").play("backward; clip .5; step")``.

Every test that trains something starts here. A `Run` has models and optimizers by name, at a level
of ``preamp.initialize``, or at the level ``"plain"`` without any engine: that is plain torch, what
others are compared with. A program is a list of acts, ``;`` between them; an act is the name of a
method of `Run` or of a function marked `act`, and its arguments. Programs may be joined, repeated
(``3 * "iterate; "``) and be keys of a table, and say in a failure what was done.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

import preamp
from cases.levels import BY_NAME, LEVELS
from kit.compare import same
from preamp import optimizers as fused
from preamp.optim import LARC

Act = Callable[..., object]
ACTS: dict[str, Act] = {}
"""Acts that are no methods, by name; a file of tests adds its own with `act`."""
PLAIN = "plain"


def act(function: Act) -> Act:
    """Let programs call ``function(run, *arguments)`` by its name."""
    ACTS[function.__name__] = function
    return function


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
    """Inputs number ``index``, as wide as the model's first weight."""
    width = next(p.shape[-1] for p in model.parameters() if p.dim() > 1)
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
        model: str = "Net",
        *,
        count: int = 1,
        seed: int = 0,
        door: Any = preamp,
        starts: bool = True,
        **options: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.door, self.row, self.log = door, BY_NAME.get(level), list[str]()
        self.models: list[Any] = [MODELS[model]() for _ in range(count)]
        self.optimizers: list[Any] = [build(optimizer, m.parameters()) for m in self.models]
        self.model, self.optimizer = self.models[0], self.optimizers[0]
        self.options = {"opt_level": level, "verbosity": 0, **options}
        if starts and level != PLAIN:
            self.initialize()

    def initialize(self, **changes: Any) -> None:
        """Through the door; ``changes`` are other arguments, ``models`` and ``optimizers`` too."""
        given = {"models": self.models, "optimizers": self.optimizers, **self.options, **changes}
        self.door.initialize(**given)

    @property
    def engine(self) -> Any:
        return preamp.engine_of(self.optimizer)

    def play(self, *programs: str) -> Run:
        """Do what they say, in order."""
        for words in (text.split() for program in programs for text in program.split(";")):
            if words:
                self.log.append(" ".join(words))
                self.do(words[0], *map(value_of, words[1:]))
        return self

    def do(self, name: str, *arguments: Any) -> object:
        if name in ACTS:
            return ACTS[name](self, *arguments)
        return getattr(self, name)(*arguments)

    # -- acts -----------------------------------------------------------------------------------

    def loss(self, index: int = 0) -> torch.Tensor:
        """The sum over all models; at least as large as its gradients are exact."""
        made = [model(batch_of(model, index)).float().square().mean() for model in self.models]
        return torch.stack(made).sum()

    def backward(self, index: int = 0, *how: str, **scaling: Any) -> None:
        """In a block: ``inf`` makes its gradients infinite, ``delay`` leaves them scaled."""
        loss = self.loss(index)
        if self.row is None:
            return loss.backward()
        if "delay" in how:
            scaling["delay_unscale"] = True
        if "late" in how:
            scaling["delay_overflow_check"] = True
        owners = self.optimizers if len(self.optimizers) > 1 else self.optimizer
        with self.door.scale_loss(loss, owners, **scaling) as scaled:
            (scaled * float("inf") if "inf" in how else scaled).backward()

    def outside(self, index: int = 0) -> None:
        """A backward in no block."""
        self.loss(index).backward()

    def clip(self, max_norm: float = 0.5) -> None:
        for optimizer in self.optimizers:
            if self.row is None:
                nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], max_norm)
            else:
                preamp.clip_grad_norm_(optimizer, max_norm)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero(self, to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=to_none)

    def iterate(self, *indices: int) -> None:
        """Whole iterations, one for each index."""
        for index in indices or (0,):
            self.backward(index)
            self.step()
            self.zero()

    def closure(self, index: int = 0) -> None:
        """A step with a closure that makes its gradients."""

        def again() -> torch.Tensor:
            self.zero()
            self.backward(index)
            return self.loss(index).detach()

        self.optimizer.step(again)

    def forward(self) -> None:
        with torch.no_grad():
            self.loss()

    def read(self) -> None:
        """Look at each master and its gradient."""
        for param in self.params():
            assert param.isfinite().all()
            _ = param.grad

    def fill(self, value: float = 0.5) -> None:
        """Write to all weights without a trace in torch."""
        for param in self.model.parameters():
            param.data.fill_(value)

    def save(self, path: Any = None, **options: Any) -> Any:
        """To a file, or to be loaded by ``load`` without one."""
        if path is not None:
            return preamp.save_checkpoint(path, self.models, self.optimizers, None, 0, **options)
        self.saved = copy.deepcopy(self.states())
        return None

    def load(self, path: Any = None) -> None:
        if path is not None:
            preamp.load_checkpoint(path, self.models, self.optimizers)
            return
        models, optimizers, engine = copy.deepcopy(self.saved)
        for thing, state in zip([*self.models, *self.optimizers], models + optimizers, strict=True):
            thing.load_state_dict(state)
        preamp.load_state_dict(self.optimizer, engine)

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
        return [twin for session in sessions for twin in session.masters or ()]

    def states(self) -> tuple[Any, Any, Any]:
        engine = preamp.state_dict(self.optimizer) if self.row else {}
        return (
            [model.state_dict() for model in self.models],
            [optimizer.state_dict() for optimizer in self.optimizers],
            engine,
        )

    def numbers(self) -> dict[str, Any]:
        """Copies of all that training goes on from."""
        stored = [[*model.parameters(), *model.buffers()] for model in self.models]
        return {
            "stored": [[tensor.detach().clone() for tensor in each] for each in stored],
            "states": copy.deepcopy(self.states()),
            "gradients": [
                None if p.grad is None else p.grad.clone()
                for m in self.models
                for p in m.parameters()
            ],
            "skipped": self.engine.last_step_skipped if self.row else False,
        }


def value_of(word: str) -> Any:
    """A number, or the word itself."""
    try:
        return float(word) if "." in word or "e-" in word else int(word)
    except ValueError:
        return word


# -- what is asked of runs ------------------------------------------------------------------------


def differing(a: Any, b: Any, at: str = "") -> str:
    """Where two trees differ first; empty if they are equal bitwise."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return next((d for key in a if (d := differing(a[key], b[key], f"{at}/{key}"))), "")
    if isinstance(a, (list, tuple)) and type(a) is type(b) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return next((d for i, (x, y) in pairs if (d := differing(x, y, f"{at}/{i}"))), "")
    return "" if same(a, b) else f"{at}: {a} is not {b}"


def assert_alike(*runs: Run, of: str | None = None) -> None:
    """All have the same bits, everywhere or in what is named."""
    first, *others = [run.numbers() if of is None else run.numbers()[of] for run in runs]
    for run, other in zip(runs[1:], others, strict=True):
        assert not (where := differing(first, other)), f"after {'; '.join(run.log)}\n{where}"


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
