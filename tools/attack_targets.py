# SPDX-License-Identifier: BSD-3-Clause
"""What the attacks on files aim at: live objects that must stay as they are, and the guard."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn, optim

import preamp

SECONDS = 60  # that one attempt may take; what has no end is meant, on a slow machine too
BYTES, TIMES = 64 << 20, 8  # of memory that it may take: so many, and of the file's size
LONGEST = 20_000  # characters of a message


class Broken(Exception):
    """An attack has broken something."""


class _Stopped(BaseException):
    """It took too long; no `Exception`, which readers would take for damage."""


def same(a: Any, b: Any) -> bool:
    """Whether two trees of plain data are equal, tensors bitwise."""
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        raw = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
        return torch.equal(*raw)
    if isinstance(a, Mapping):
        own, other = cast("Mapping[Any, Any]", a), cast("Mapping[Any, Any]", b)
        return own.keys() == other.keys() and all(same(own[key], other[key]) for key in own)
    if isinstance(a, (list, tuple)):
        items, others = cast("list[Any]", a), cast("list[Any]", b)
        return len(items) == len(others) and all(map(same, items, others))
    return bool(a == b) or (a != a and b != b)


class Target:
    """A model, an optimizer and a scheduler in the middle of a training."""

    def __init__(self, level: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        self.optimizer = optim.SGD(self.model.parameters(), lr=0.125, momentum=0.5)
        self.scheduler = optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 3])
        preamp.initialize(self.model, self.optimizer, opt_level=level, verbosity=0)
        for _ in range(2):
            loss = self.model(torch.randn(5, 4)).float().square().mean()
            with preamp.scale_loss(loss, self.optimizer) as scaled:
                scaled.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def save(self, path: Path) -> None:
        """Save it all."""
        preamp.save_checkpoint(path, self.model, self.optimizer, self.scheduler, {"a": [1, "b"]})

    def load(self, path: Path) -> None:
        """Load it all."""
        preamp.load_checkpoint(path, self.model, self.optimizer, self.scheduler)

    def numbers(self) -> list[Any]:
        """Copies of all that a loading changes."""
        own = [*self.model.state_dict().values()]
        params = [*self.model.parameters()]
        params += [p for group in self.optimizer.param_groups for p in group["params"]]
        tensors = [*own, *params, *(p.grad for p in params)]
        copies = [None if t is None else t.detach().clone() for t in tensors]
        groups = self.optimizer.state_dict()
        states = {name: _copied(state) for name, state in groups["state"].items()}
        rest = [dict(group) for group in groups["param_groups"]]
        return [
            copies,
            states,
            rest,
            self.scheduler.state_dict(),
            preamp.engine_of(self.model).state_dict(),
            torch.get_rng_state(),
            random.getstate(),
        ]

    def close(self) -> None:
        """End its engine."""
        preamp.engine_of(self.model).close()


def _copied(value: Any) -> Any:
    if isinstance(value, dict):  # the state of one parameter; others may be anything
        return {name: _copied(entry) for name, entry in value.items()}
    return value.clone() if isinstance(value, torch.Tensor) else value


@dataclass
class Guard:
    """Watches what is attempted; keeps the most that one attempt took."""

    seconds: float = 0.0
    bytes: int = 0
    target: Target | None = field(default=None, repr=False)

    def attempt(self, act: Callable[[], Any], path: Path) -> str:
        """Return whether ``act`` has ``"loaded"`` what is at ``path`` or was ``"refused"``.

        Raises:
            Broken: It took too much, changed what it refused to load, or raised another error
                than it should.
        """
        before = None if self.target is None else self.target.numbers()
        with self._watched(path.stat().st_size if path.is_file() else 0):
            outcome = _outcome(act, path)
        if outcome == "refused" and self.target is not None:
            if not same(before, self.target.numbers()):
                raise Broken("it was refused and has changed something")
        return outcome

    @contextmanager
    def _watched(self, size: int) -> Generator[None]:
        start_bytes, start = _fresh_peak(), time.monotonic()
        signal.signal(signal.SIGALRM, _stop)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        faulthandler.dump_traceback_later(2 * SECONDS, exit=True)  # what C code hangs in
        try:
            yield
        except _Stopped:
            raise Broken(f"it takes longer than {SECONDS} seconds") from None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.cancel_dump_traceback_later()
        took = _memory("VmHWM") - start_bytes
        self.seconds = max(self.seconds, time.monotonic() - start)
        self.bytes = max(self.bytes, took)
        if took > BYTES + TIMES * size:
            raise Broken(f"it takes {took >> 20} MiB of memory, and the file has {size} bytes")


def _stop(*_: object) -> None:
    raise _Stopped


def _outcome(act: Callable[[], Any], path: Path) -> str:
    try:
        act()
    except OSError as error:
        if str(path) not in str(error):
            raise Broken(f"{error!r} names no path") from error
        check_words(error)
    except (preamp.PreampError, ValueError, TypeError) as error:
        check_words(error)
    except Exception as error:
        raise Broken(f"raw error {error!r:.500}") from error
    else:
        return "loaded"
    return "refused"


def check_words(error: Exception) -> None:
    """Raise `Broken` unless a message has three parts and a length to read."""
    text = str(error)
    if text.count(". ") < 2 or not text.endswith("."):
        raise Broken(f"not in three parts: {error!r:.500}") from error
    if len(text) > LONGEST:
        raise Broken(f"a message of {len(text)} characters") from error


def _fresh_peak() -> int:
    """Let the peak of the resident memory be what is resident now; return it."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    return _memory("VmRSS")


def _memory(name: str) -> int:
    with open(f"/proc/{os.getpid()}/status", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))
