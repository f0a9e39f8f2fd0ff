# SPDX-License-Identifier: BSD-3-Clause
"""What every test starts from and leaves behind: seeds, default dtype, casts, open engines."""

import gc
import importlib
import os
import random
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

import preamp
from alias.harness import Zygote
from cases.selection import SUITE, SUITES, select
from kit.engines import close_engines, note_engines
from preamp.compat.amp_state import AmpState, amp_state
from preamp.core.torch_private.operations import may_be_compiled
from preamp.kernels import dispatch

torch.set_num_threads(1)
note_engines()

# Read where Triton is first imported, as torch's compiler does for tests that were collected before
# those of the kernels.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Machine code that tests make is theirs; processes that they start find it too.
os.environ.setdefault("PREAMP_CACHE", str(Path(__file__).parents[1] / ".pytest_cache" / "preamp"))

# For each device that is not there, torch.manual_seed would format a stack trace, to be shown if it
# ever comes: as long as many a test takes.
for _device in (torch.cuda, torch.xpu, torch.mtia):
    if not _device.is_available():
        _device.manual_seed_all = lambda seed: None

# The same examples in every run, and no deadline: the first call of a torch op is slow. For a
# search with new examples: pytest --hypothesis-profile=explore.
hypothesis.settings.register_profile("quick", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.register_profile("full", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000)


def draw_from_no_modules() -> None:
    """Let derandomized examples be the same wherever and after whichever tests they are drawn.

    Hypothesis also draws constants that it finds in the modules that are loaded by then.
    """
    providers: Any = importlib.import_module("hypothesis.internal.conjecture.providers")
    if hasattr(providers, "_get_local_constants") and hasattr(providers, "_local_constants"):
        providers._get_local_constants = lambda: providers._local_constants


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--suite", choices=SUITES, default="quick", help="which tests to run")
    parser.addoption("--without-numba", action="store_true", help="as where it is not installed")


def pytest_configure(config: pytest.Config) -> None:
    os.environ[SUITE] = config.getoption("--suite")
    if config.getoption("--without-numba"):
        dispatch.lacks_numba = lambda: "this run of the tests is to do without numba"
    if not config.getoption("--hypothesis-profile"):
        is_quick = config.getoption("--suite") == "quick"
        hypothesis.settings.load_profile("quick" if is_quick else "full")
        draw_from_no_modules()


@pytest.hookimpl(trylast=True)  # after -k and -m, so that pairs are looked for in what they leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selected = select(items, config.getoption("--suite"))
    left_out = set(items) - set(selected)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = selected


_CASTABLE = ("cpu", "cuda")


def _autocast_state() -> tuple[object, ...]:
    devices = ((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _CASTABLE)
    return (*devices, torch.is_autocast_cache_enabled())


def pytest_collection_finish() -> None:
    leave_out_of_collections()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    done = yield  # fixtures hold nothing any more
    leave_out_of_collections()
    return done


_modules_left_out = 0


def leave_out_of_collections() -> None:
    """Keep modules, millions of objects, out of every later look for cycles: tests run many.

    Worth a look of its own once torch's compiler is loaded, say, and not for a module or two.
    """
    global _modules_left_out
    if len(sys.modules) > _modules_left_out + 100:
        gc.collect()
        gc.freeze()
        _modules_left_out = len(sys.modules)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or extensions would complain at exit of what they have made


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """The process that whole programs are forked from."""
    # torch's optimizers import its compiler at their first step.
    with Zygote("sklearn.datasets", "torch._dynamo") as process:
        yield process


@pytest.fixture
def alias() -> Iterator[None]:
    """Install the alias; afterwards remove it."""
    preamp.install_apex_alias()
    yield
    preamp.remove_apex_alias()


@pytest.fixture(autouse=True)
def clean_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Seed everything; afterwards close the engines left open, and check what they leave.

    What the test has patched is so until then.
    """
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    dtype, grad, casts = torch.get_default_dtype(), torch.is_grad_enabled(), _autocast_state()
    yield
    close_engines()
    vars(amp_state).clear()
    vars(amp_state).update(vars(AmpState()))
    if may_be_compiled():  # where something is, modules that are watched in later tests hear less
        torch.compiler.reset()
    left = _autocast_state()
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
    for device, (enabled, half) in zip(_CASTABLE, casts, strict=False):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, half)
    torch.set_autocast_cache_enabled(casts[-1])
    assert left == casts, "a test left autocast in another state"
