# SPDX-License-Identifier: BSD-3-Clause
"""Plugin of pytest: run tests for CUDA without a GPU, on memory and kernels of the host.

For other programs `pytest_configure` does the rest, see ``tools/gpu.sh --dry``.

``python -m pytest -p devices.pretended.plugin tests/devices`` (``make test-device``) compiles
``device.cpp`` once for this torch, which takes a minute and a C++ compiler, loads it, and gives
``torch.cuda`` what tests ask of it. Triton's kernels run in its interpreter.

Shown are the ways that only tensors of a device take, results, and waits of the host: copies come
late, and `set_sync_debug_mode` refuses what torch's refuses. Not shown are times, graphs, work of
several streams at once, and what compilers make of kernels.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_SOURCE = Path(__file__).with_name("device.cpp")
_FOLDER = Path(os.environ.get("PREAMP_CACHE") or _SOURCE.parents[3] / ".pytest_cache")
_ASKED_BEFORE_IT_COMES = 2  # times that an event says no

_LEFT_OUT = {
    "test_a_graph_replays_what_steps_do": "graphs",
    "test_launches_do_not_grow_with_the_tensors": "profiler",
    "test_two_graphs_of_one_optimizer": "graphs",
}
"""Tests of what the pretended device does not have."""

_TRITON = re.compile(
    r"test_triton|in_triton|waits_for_the_device\[O2-Fused|loop_waits\[O[12]-FusedAdam-clip"
)
"""Tests that run in Triton's kernels."""


def _compile(torch_folder: Path) -> Path:
    """The library, compiled if there is none for this source and this torch."""
    told = (_SOURCE.read_bytes(), importlib.metadata.version("torch").encode())
    made = _FOLDER / f"pretended-{hashlib.sha256(b'|'.join(told)).hexdigest()[:16]}.so"
    if made.exists():
        return made
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise pytest.UsageError("The pretended device needs a C++ compiler: install g++")
    made.parent.mkdir(parents=True, exist_ok=True)
    draft = made.with_suffix(f".{os.getpid()}")
    include, libraries = torch_folder / "include", torch_folder / "lib"
    flags = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC"]
    flags += [f"-I{include}", f"-I{include}/torch/csrc/api/include"]
    linked = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10", "-ltorch_cpu", "-ltorch"]
    subprocess.run([compiler, *flags, str(_SOURCE), "-o", str(draft), *linked], check=True)
    draft.replace(made)
    return made


def _load() -> Any:
    """Load the device before torch is imported, which asks once whether there is CUDA."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None or "torch" in sys.modules:
        raise pytest.UsageError("The pretended device is a plugin: pytest -p devices.pretended…")
    folder = Path(found.origin).parent
    path = _compile(folder)
    for name in ("libc10.so", "libtorch_cpu.so", "libtorch.so"):
        ctypes.CDLL(str(folder / "lib" / name), ctypes.RTLD_GLOBAL)
    library: Any = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    for name in ("stream", "copies", "allocated", "peak"):
        getattr(library, f"pretended_{name}").restype = ctypes.c_int64
    library.pretended_begin()
    return library


os.environ["TRITON_INTERPRET"] = "1"  # read where kernels are loaded
_device = _load()

import torch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402


def _index(device: Any = None) -> int:
    if device is None or device == "cuda":
        return _device.pretended_device()
    if isinstance(device, int):
        return device if device >= 0 else _device.pretended_device()
    index = torch.device(device).index
    return _device.pretended_device() if index is None else index


# -- waits ---------------------------------------------------------------------------------------

_NEED_VALUES = {
    "_local_scalar_dense",
    "_unique2",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}
"""Operations whose result the host needs the values for."""


class _Waits(TorchDispatchMode):
    """Refuse what torch does under ``set_sync_debug_mode("error")``, and events not come yet."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        result = func(*args, **kwargs)
        name = func._schema.name.split("::")[-1]
        if any(tensor.is_cuda for tensor in given):
            is_mask = name == "index" and any(
                leaf.dtype in (torch.bool, torch.uint8)
                for leaf in tree_leaves(args[1])
                if isinstance(leaf, torch.Tensor)
            )
            if name in _NEED_VALUES or is_mask:
                _refuse_waiting(name)
        if name in ("copy_", "_to_copy"):
            into, source = (args[0], args[1]) if name == "copy_" else (result, args[0])
            is_late = kwargs.get("non_blocking") or (name == "copy_" and args[2:3] == (True,))
            if into.is_cuda != source.is_cuda:
                host = source if into.is_cuda else into
                # What is pageable is staged on its way up, and waited for on its way down.
                if not is_late or not (into.is_cuda or host.is_pinned()):
                    _refuse_waiting(f"{name} between {source.device} and {into.device}")
        return result


_refusing: list[_Waits] = []
_counting: list[list[str]] = []
_thread = [threading.get_ident()]  # that waits are refused in; a writer in the background may wait


def _refuse_waiting(what: str) -> None:
    if not _refusing or threading.get_ident() != _thread[0]:
        return
    if not _counting:
        raise RuntimeError(f"called a synchronizing CUDA operation: {what}")
    _counting[-1].append(what)


@contextmanager
def waits_counted() -> Iterator[list[str]]:
    """Note what waits, instead of refusing it, in this thread."""
    _counting.append([])
    _set_sync_debug_mode("error")
    try:
        yield _counting[-1]
    finally:
        _set_sync_debug_mode("default")
        _counting.pop()


def _set_sync_debug_mode(mode: int | str) -> None:
    if mode in ("error", 2) and not _refusing:
        _thread[0] = threading.get_ident()
        _refusing.append(_Waits())
        _refusing[0].__enter__()
    elif mode in ("default", 0) and _refusing:
        _refusing.pop().__exit__(None, None, None)


# -- torch.cuda ----------------------------------------------------------------------------------


class _Stream:
    _made = 0

    def __init__(self, device: Any = None, priority: int = 0, stream_id: int | None = None) -> None:
        del priority
        _Stream._made += 1
        self.device = torch.device("cuda", _index(device))
        self.stream_id = 8 * _Stream._made if stream_id is None else stream_id
        self.cuda_stream = self.stream_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.device, self.stream_id))

    def synchronize(self) -> None:
        _device.pretended_arrive(ctypes.c_uint64(2**64 - 1))

    def query(self) -> bool:
        return True

    def wait_stream(self, stream: _Stream) -> None:
        """Nothing to do: work is done in the order of the calls."""

    def wait_event(self, event: _Event) -> None:
        """Nothing to do."""

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record(self)
        return event


class _Event:
    def __init__(self, **options: bool) -> None:
        del options
        self._copies: int | None = None  # asked for when it was recorded, until they have come
        self._asked = 0

    def record(self, stream: Any = None) -> None:
        del stream
        self._copies, self._asked = _device.pretended_copies(), 0

    def query(self) -> bool:
        self._asked += 1
        if self._copies is not None and self._asked <= _ASKED_BEFORE_IT_COMES:
            return False
        self._arrive()
        return True

    def synchronize(self) -> None:
        if self._copies is not None and self._asked <= _ASKED_BEFORE_IT_COMES:
            _refuse_waiting("Event.synchronize")
        self._arrive()

    def wait(self, stream: Any = None) -> None:
        """Nothing to do."""

    def _arrive(self) -> None:
        if self._copies is not None:
            _device.pretended_arrive(ctypes.c_uint64(self._copies))
            self._copies = None


@contextmanager
def _on_stream(stream: _Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    index = stream.device.index
    before = _device.pretended_stream(index)
    _device.pretended_set_stream(index, ctypes.c_int64(stream.stream_id))
    try:
        yield
    finally:
        _device.pretended_set_stream(index, ctypes.c_int64(before))


def _exchange(to: int) -> int:
    before = _device.pretended_device()
    if to >= 0:
        _device.pretended_set_device(to)
    return before


def _synchronize(device: Any = None) -> None:
    del device
    _device.pretended_arrive(ctypes.c_uint64(2**64 - 1))


def _current_stream(device: Any = None) -> _Stream:
    index = _index(device)
    return _Stream(index, stream_id=_device.pretended_stream(index))


_STANDS_FOR: dict[str, Any] = {
    "Event": _Event,
    "Stream": _Stream,
    "_exchange_device": _exchange,
    "_initialized": True,
    "_is_in_bad_fork": lambda: False,
    "_lazy_init": lambda: None,
    "_maybe_exchange_device": _exchange,
    "current_device": _index,
    "current_stream": _current_stream,
    "default_stream": lambda device=None: _Stream(_index(device), stream_id=0),
    "device_count": lambda: 2,
    "empty_cache": lambda: None,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_name": lambda device=None: "pretended",
    "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
    "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8)] * 2,
    "get_sync_debug_mode": lambda: 2 * len(_refusing),
    "is_available": lambda: True,
    "is_bf16_supported": lambda *_, **__: True,
    "is_current_stream_capturing": lambda: False,
    "is_initialized": lambda: True,
    "manual_seed": lambda seed: None,
    "manual_seed_all": lambda seed: None,
    "max_memory_allocated": lambda device=None: _device.pretended_peak(0),
    "mem_get_info": lambda device=None: (1 << 34, 1 << 34),
    "memory_allocated": lambda device=None: _device.pretended_allocated(),
    "memory_reserved": lambda device=None: _device.pretended_allocated(),
    "reset_peak_memory_stats": lambda device=None: _device.pretended_peak(1),
    "set_device": lambda device: _exchange(_index(device)),
    "set_rng_state": lambda state, device=None: None,
    "set_rng_state_all": lambda states: None,
    "set_sync_debug_mode": _set_sync_debug_mode,
    "stream": _on_stream,
    "synchronize": _synchronize,
}
for _name, _value in _STANDS_FOR.items():
    setattr(torch.cuda, _name, _value)
torch.accelerator.synchronize = _synchronize

_clone_storage = torch.UntypedStorage.clone


def _clone(storage: Any) -> Any:
    """As torch's, which asks CUDA for the memory; deep copies of tensors call it."""
    if storage.device.type != "cuda":
        return _clone_storage(storage)
    view = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return view.clone().untyped_storage()


torch.UntypedStorage.clone = _clone


# -- Triton --------------------------------------------------------------------------------------


def _without_modes(run: Callable[..., Any]) -> Callable[..., Any]:
    """What the interpreter itself copies is no wait of the host."""

    @functools.wraps(run)
    def run_plain(*args: Any, **kwargs: Any) -> Any:
        waits = _refusing.copy()
        _refusing.clear()
        try:
            with _disable_current_modes():
                return run(*args, **kwargs)
        finally:
            _refusing.extend(waits)

    return run_plain


_in_triton = [False]


def pytest_configure() -> None:
    """Let Triton's back end take the device's tensors, and run its kernels in the interpreter."""
    from triton.runtime import interpreter

    from cases.interpreted import patch_language_once
    from preamp.kernels import dispatch
    from preamp.kernels.triton import launch

    interpreter.GridExecutor.__call__ = _without_modes(interpreter.GridExecutor.__call__)
    launch.INTERPRETED = False
    patch_language_once()
    choose = dispatch.choose

    def choose_here(device: torch.device) -> tuple[str, str]:
        name = "triton" if _in_triton[0] else "plain"
        return (name, "pretended") if device.type == "cuda" else choose(device)

    dispatch.choose = choose_here


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Choose the back end: interpreted, a step takes seconds, so not all tests take Triton's."""
    from preamp.kernels import dispatch

    _in_triton[0] = bool(_TRITON.search(item.nodeid))
    dispatch.backend.cache_clear()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what the pretended device does not have, by name."""
    for item in items:
        what = _LEFT_OUT.get(getattr(item, "originalname", item.name))
        if what is not None:
            item.add_marker(pytest.mark.skip(reason=f"The pretended device has no {what}"))
