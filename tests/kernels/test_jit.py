# SPDX-License-Identifier: BSD-3-Clause
"""What only the compiled kernels have: conversions of their own, threads, and code on the disk.

That they compute what the other back ends do is in the tests of every back end.
"""

import ctypes
import functools
import hashlib
import math
import os
import pickle
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

import preamp
from cases.back_ends import JIT, REFERENCE
from cases.rules import BF16, F16, F32, ONE_EACH
from cases.selection import examples
from cases.stored import STORAGES, Case, assert_bits
from cases.tolerances import assert_same
from kit.refusals import refused
from preamp.kernels import Update, plans
from preamp.kernels.jit import compiler, loops
from preamp.kernels.jit import ops as jit_ops
from preamp.kernels.jit.formats import Layout
from preamp.kernels.rules import AdamRule, BiasCorrection

CPU = torch.device("cpu")
ADAM = AdamRule(
    lr=0.01, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=True,
    bias_correction=BiasCorrection.MOMENTS,
)  # fmt: skip


def rounded(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    target = torch.empty_like(source, dtype=dtype)
    JIT.cast_copy_([source], [target])
    return target


# -- conversions -----------------------------------------------------------------------------------


def lower_halves(first: int) -> torch.Tensor:
    """Of words whose first three lower bits, which float16 keeps, are ``first``.

    Of the 13 bits that it drops, or bfloat16 besides the three, each alone, all below it, and both
    of these with the bit that is half a unit.
    """
    alone = [1 << bit for bit in range(13)]
    dropped = {0, *alone, *(bit - 1 for bit in alone), 0x1FFF}
    dropped |= {0x1000 | bits for bits in dropped}
    return torch.tensor([first << 13 | bits for bits in sorted(dropped)])


@pytest.mark.parametrize("first", range(8))
def test_float32_rounds_as_torch_does(first: int) -> None:
    """All upper halves of words, so all exponents; rounding asks of the rest whether it is zero."""
    upper = torch.arange(2**16)[:, None] << 16
    bits = (upper | lower_halves(first)).flatten()
    values = bits.to(torch.uint32).view(torch.int32).view(F32)
    for half in (F16, BF16):
        assert_same(rounded(values, half), values.to(half))


def test_subnormals_and_signs_of_zeros_stay() -> None:
    tiny = torch.tensor([2.0**-149, -(2.0**-149), 0.0, -0.0])
    targets = [torch.ones(4)]
    JIT.axpby_(targets, 1.0, [tiny], 0.0, [None])
    assert targets[0].tolist() == tiny.tolist()
    assert torch.signbit(targets[0]).tolist() == [False, True, False, True]


# -- chunks and threads ----------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(0, 3 * loops.CHUNK), max_size=8), threads=st.integers(1, 9))
@settings(max_examples=examples(100))
def test_chunks_cover_everything_once(sizes: list[int], threads: int) -> None:
    chunks = loops.cut(sizes)
    seen = [np.zeros(size, int) for size in sizes]
    for owner, start, length in chunks.table.T:
        assert 0 < length <= loops.CHUNK
        seen[owner][start : start + length] += 1
    assert all((of_one == 1).all() for of_one in seen)
    ends = chunks.shares(threads)
    assert ends == sorted(ends)
    assert (ends[0], ends[-1], len(ends)) == (0, chunks.table.shape[1], threads + 1)


def lists(seed: int, shapes: Any, half: torch.dtype = BF16) -> list[list[torch.Tensor]]:
    """Parameters, half gradients, two moments, halves."""
    generator = torch.Generator().manual_seed(seed)
    made = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(4)]
    made[3] = [tensor.abs() for tensor in made[3]]
    grads = [tensor.to(half) for tensor in made[1]]
    return [made[0], grads, made[2], made[3], [p.to(half) for p in made[0]]]


def updated(ops: Any, seed: int, shapes: Any) -> list[torch.Tensor]:
    p, g, m, v, halves = lists(seed, shapes)
    ops.update_(p, g, m, v, rule=ADAM, update=Update(step=3, halves=halves))
    return [*p, *m, *v, *halves]


@pytest.mark.parametrize("size", [1023, 1024, 1025, loops.CHUNK - 1, loops.CHUNK + 1, 300_000])
def test_any_number_of_threads_has_the_same_bits(threads: Any, size: int) -> None:
    shapes = [(size,), (3,), (size // 2,)]
    threads(1)
    wanted = updated(JIT, 1, shapes)
    grads = lists(2, shapes)[1]
    norms = {JIT.l2norm(grads, [None] * 3, CPU).item()}
    for count in (2, 3, 8):
        threads(count)
        for ours, exact in zip(updated(JIT, 1, shapes), wanted, strict=True):
            assert torch.equal(ours, exact)
        norms.add(JIT.l2norm(grads, [None] * 3, CPU).item())
    assert len(norms) == 1


def test_each_operation_is_rounded_on_its_own() -> None:
    """To the bit, in numpy's float32; torch's roots are not those of IEEE on every processor."""
    f, shapes = np.float32, [(2000,)]
    p, g, m, v, halves = ([tensor.numpy() for tensor in column] for column in _as_float(1, shapes))
    grad = g[0] * f(0.5)
    first = f(0.9) * m[0] + f(1 - 0.9) * grad
    second = f(0.99) * v[0] + f(1 - 0.99) * grad * grad
    root = np.sqrt(second * f(1 / (1 - 0.99**3))) + f(1e-8)
    wanted = p[0] - f(0.01) * (first * f(1 / (1 - 0.9**3)) / root + f(0.1) * p[0])
    ours = lists(1, shapes)
    told = Update(step=3, inv_scale=torch.tensor(0.5), halves=ours[4])
    JIT.update_(*ours[:4], rule=ADAM, update=told)
    for column, exact in ((ours[0], wanted), (ours[2], first), (ours[3], second)):
        assert column[0].numpy().tobytes() == exact.tobytes()
    assert torch.equal(ours[4][0], ours[0][0].to(BF16))
    assert halves[0].dtype == f


def _as_float(seed: int, shapes: Any) -> list[list[torch.Tensor]]:
    return [[tensor.float() for tensor in column] for column in lists(seed, shapes)]


def test_steps_of_several_threads_of_a_program(threads: Any) -> None:
    threads(2)
    shapes = [(200_000,)] * 2
    wanted = [updated(JIT, seed, shapes) for seed in range(4)]
    failed: list[int] = []

    def work(seed: int) -> None:
        for _ in range(5):
            found = updated(JIT, seed, shapes)
            if not all(map(torch.equal, found, wanted[seed])):
                failed.append(seed)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failed == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_has_threads_of_its_own(threads: Any) -> None:
    """Only preamp's: those that torch itself had are missed by its own operations there."""
    threads(2)
    shapes = [(300_000,)]
    wanted = [tensor.view(torch.int16).numpy() for tensor in updated(JIT, 1, shapes)]
    p, g, m, v, halves = lists(1, shapes)
    child = os.fork()
    if not child:  # no test goes on here
        code = 1
        try:
            signal.alarm(60)
            JIT.update_(p, g, m, v, rule=ADAM, update=Update(step=3, halves=halves))
            found = [tensor.view(torch.int16).numpy() for tensor in (*p, *m, *v, *halves)]
            same = [(a == b).all() for a, b in zip(found, wanted, strict=True)]
            code = int(not all(same))
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    again = [tensor.view(torch.int16).numpy() for tensor in updated(JIT, 1, shapes)]
    assert all((a == b).all() for a, b in zip(again, wanted, strict=True))


def walk(kernel: Any, chunks: loops.Chunks) -> None:
    values = torch.empty(chunks.numel)
    loops.walk(kernel, chunks, [[values]], np.array([[values.data_ptr()]]))


@pytest.mark.parametrize("of_the_caller", [False, True])
def test_an_error_in_a_thread_is_raised_and_all_have_ended(
    of_the_caller: bool, threads: Any
) -> None:
    """The caller's own thread has the first chunks."""
    threads(3)
    chunks = loops.cut([loops.CHUNK * 30])
    ended: list[int] = []
    others_may_end = threading.Event()

    def kernel(first: int, last: int, *_: Any) -> None:
        if first and of_the_caller:
            assert others_may_end.wait(60)
        ended.append(first)
        if of_the_caller == (first == 0):
            threading.Timer(0.2, others_may_end.set).start()
            raise RuntimeError("oh")

    with pytest.raises(RuntimeError, match="oh"):
        walk(kernel, chunks)
    assert len(ended) == 3


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no timers")
def test_an_interrupt_is_raised_when_all_threads_have_ended(threads: Any) -> None:
    """It comes while the caller waits for the others."""
    threads(2)
    ended: list[int] = []
    is_interrupted = threading.Event()

    def interrupt(*_: Any) -> None:
        is_interrupted.set()
        raise KeyboardInterrupt

    def kernel(first: int, *_: Any) -> None:
        if first:
            assert is_interrupted.wait(60)
            time.sleep(0.1)
            ended.append(first)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            walk(kernel, loops.cut([loops.CHUNK * 30]))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(ended) == 1


_LAST_STEPS = """
import atexit, threading, torch
from preamp.kernels import backend
torch.set_num_threads(2)
target = [torch.ones(300_000)]
def work():
    threading.main_thread().join()
    backend("jit").scale_add_(target, 2.0, [None])
    print(float(target[0].numpy().min()), flush=True)
backend("jit").scale_add_(target, 2.0, [None])
atexit.register(lambda: backend("jit").scale_add_(target, 2.0, [None]))
threading.Thread(target=work).start()
"""


def test_threads_outlive_the_main_one(tmp_path: Path) -> None:
    """Python starts no more threads then; the one that trains does all of it."""
    assert outcome(start(tmp_path, _LAST_STEPS)) == "4.0"


# -- what autograd is told, and what no kernel can take --------------------------------------------


def test_tensors_without_memory_are_left_to_torch() -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        JIT.scale_add_([y], 2.0, [None])
        return y

    assert torch.func.functionalize(doubled)(torch.ones(3)).tolist() == [2.0] * 3
    freed = torch.ones(100)
    cast("Any", freed.untyped_storage()).resize_(0)
    with pytest.raises(RuntimeError, match=r"not allocated|has no memory"):
        JIT.census([freed], CPU)
    with FakeTensorMode():
        assert JIT.l2norms([torch.ones(3)], None, CPU).shape == (1,)


def test_factors_of_one_element_are_numbers() -> None:
    factor = torch.tensor([2.0])
    found: list[torch.Tensor] = []
    for ops in (JIT, REFERENCE):
        targets = [torch.zeros(4) for _ in range(3)]
        ops.axpby_(targets, factor, [torch.ones(4)] * 3, 1.0, [None] * 3)
        p, g, m, v, _ = lists(1, [(3,), (2,)])
        told = Update(step=1, inv_scale=torch.tensor([0.5]))
        ops.update_(p, g, m, v, rule=replace(ADAM, lr=torch.tensor([0.01])), update=told)
        found.append(torch.cat([*targets, *p]))
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-7)
    targets = [torch.zeros(4) for _ in range(3)]
    with refused("kernels", "fewer factors than tensors"):
        JIT.axpby_(targets, torch.ones(2), targets, 1.0, [None] * 3)


def test_lists_as_before_are_asked_by_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which take a tenth of the time."""
    shapes = [(5,), (3, 7)]
    wanted = updated(JIT, 1, shapes)
    monkeypatch.setattr(plans, "_dtypes", None)  # which looks at a place in Python
    assert all(map(torch.equal, updated(JIT, 1, shapes), wanted))


def test_a_view_that_negates_is_not_read_as_it_lies() -> None:
    strided = torch.randn(4, dtype=torch.complex64).conj().imag
    dense = cast("Any", torch)._neg_view(torch.randn(4))
    for negated in (strided, dense):
        assert negated.is_neg()
        assert_same(JIT.l2norm([negated], [None], CPU), REFERENCE.l2norm([negated], [None], CPU))
        target = torch.zeros(4)
        for _ in range(3):
            JIT.cast_copy_([negated], [target])
            assert_same(target, negated.resolve_neg())


# -- compiling -------------------------------------------------------------------------------------

_STEP = """
import sys, torch
from preamp.kernels import backend
assert "numba" not in sys.modules
ops = backend("jit")
target = torch.zeros(3, dtype=torch.bfloat16)
ops.cast_copy_([torch.full((3,), 1.5)], [target])
assert target.tolist() == [1.5] * 3
from preamp.kernels.jit import loops
stats = loops.combine.stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""


def start(cache: Path, program: str = _STEP, **environment: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PREAMP_CACHE": str(cache), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", program], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def outcome(process: subprocess.Popen[str]) -> str:
    out, error = process.communicate(timeout=500)
    assert process.returncode == 0, error
    return out.strip()


@pytest.mark.full
def test_processes_compile_at_once_and_later_ones_not_at_all(tmp_path: Path) -> None:
    both = [start(tmp_path) for _ in range(2)]
    assert all(outcome(process) in ("0 1", "1 0") for process in both)
    assert outcome(start(tmp_path)) == "1 0"
    (folder,) = tmp_path.iterdir()
    assert not list(folder.rglob("*.tmp*"))


_UPDATES = """
from cases.back_ends import JIT
from cases.rules import BF16, ONE_EACH
from cases.stored import STORAGES, Case, assert_bits
from preamp.kernels.jit import loops
for row in ONE_EACH:
    if row.op in ("adam_", "sgd_"):
        Case.of(row, BF16, "8bit").run(JIT)
stats = loops.update.stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""


@pytest.mark.full
def test_later_processes_compile_no_update(tmp_path: Path) -> None:
    tests = str(Path(__file__).parents[1])
    assert outcome(start(tmp_path, _UPDATES, PYTHONPATH=tests)) == "0 2"
    assert outcome(start(tmp_path, _UPDATES, PYTHONPATH=tests)) == "2 0"


@pytest.mark.parametrize("row", ONE_EACH, ids=lambda row: row.name)
def test_types_of_kernels_are_the_same_in_every_process(row: Any) -> None:
    """Of a class that is not found by its name numba's index would have one for each process."""
    Case.of(row, BF16, "float32").run(JIT)
    for signature in loops.update.signatures:
        assert pickle.loads(pickle.dumps(signature)) == signature


_CHILDREN = """
import multiprocessing, torch
from preamp.kernels import backend

def total(queue=None):
    torch.set_num_threads(1)  # of torch's own, which a fork would miss
    target, source = [torch.zeros(200_000)], [torch.ones(200_000)]
    torch.set_num_threads(2)
    backend("jit").axpby_(target, 3.0, source, 1.0, [None])
    found = int((target[0].numpy() == 3).sum())
    return found if queue is None else queue.put(found)

if __name__ == "__main__":
    found = [total()]
    for way in multiprocessing.get_all_start_methods():
        context = multiprocessing.get_context(way)
        queue = context.SimpleQueue()
        child = context.Process(target=total, args=(queue,))
        child.start()
        found.append(queue.get())
        child.join()
    print(set(found))
"""


@pytest.mark.full
def test_children_started_in_every_way(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_CHILDREN, encoding="utf-8")
    environment = {**os.environ, "PREAMP_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, text=True, capture_output=True, timeout=500
    )
    assert done.stdout.strip() == "{200000}", done.stderr


@pytest.mark.parametrize("length", [0, 10, -10])
def test_a_damaged_file_is_made_anew(cache: Path, length: int) -> None:
    (file,) = use_cache()
    whole = file.read_bytes()
    file.write_bytes(whole[:length])
    assert use_cache() == [file]
    assert len(file.read_bytes()) == len(whole)
    shutil.rmtree(file.parent)  # and where nothing can be kept any more
    assert use_cache() == []


_DOUBLED = """
import torch
from preamp.kernels import backend
from preamp.kernels.jit import loops
target = torch.zeros(3, dtype=torch.bfloat16)
backend("jit").cast_copy_([torch.full((3,), 1.5)], [target])
stats = loops.combine.stats
print(loops.__file__, target[0].item(), *map(len, (stats.cache_hits, stats.cache_misses)))
"""


@pytest.mark.full
def test_copies_of_the_package_share_code_while_their_sources_are_the_same(tmp_path: Path) -> None:
    """It is not found by where the package lies, nor by when its files were written."""
    source = Path(preamp.__file__).parent
    for name in ("one", "other"):
        shutil.copytree(source, tmp_path / name / "preamp", copy_function=shutil.copyfile)

    def found(name: str) -> list[str]:
        place = tmp_path / name
        file, *rest = outcome(start(tmp_path / "cache", _DOUBLED, PYTHONPATH=str(place))).split()
        assert file.startswith(str(place))
        return rest

    assert found("one") == ["1.5", "0", "1"]
    assert found("other") == ["1.5", "1", "0"]
    words = tmp_path / "other" / "preamp/kernels/jit/words.py"
    before, now = "narrow(peek(values, i, _F32), _ZERO_BF16)", "narrow(f32_of_bits(0), _ZERO_BF16)"
    text = words.read_text()
    assert before in text
    words.write_text(text.replace(before, now))  # a function that the kernel calls
    assert found("other") == ["0.0", "0", "1"]
    assert found("one") == ["1.5", "1", "0"]


@pytest.mark.full
def test_a_folder_that_cannot_be_made_costs_compiling_only(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert outcome(start(tmp_path / "file" / "folder")) == "0 1"


@pytest.mark.parametrize(
    ("platform", "variables", "wanted"),
    [
        ("linux", {"XDG_CACHE_HOME": "/x"}, Path("/x/preamp")),
        ("linux", {"HOME": "/home/me"}, Path("/home/me/.cache/preamp")),
        ("win32", {"LOCALAPPDATA": "/l"}, Path("/l/preamp")),
        ("linux", {"PREAMP_CACHE": "/p", "XDG_CACHE_HOME": "/x"}, Path("/p")),
    ],
)
def test_where_code_is_kept(
    platform: str, variables: dict[str, str], wanted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PREAMP_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert compiler.cache_folder() == wanted


# -- who may write to the folder of machine code ---------------------------------------------------

OTHER = 54321  # a user that nobody is

posix_only = pytest.mark.skipif(os.name != "posix", reason="folders have no such permissions")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for machine code that nobody else can write to, not made yet."""
    monkeypatch.setenv("PREAMP_CACHE", str(tmp_path / "above" / "code"))
    compiler._folder.cache_clear()
    yield tmp_path / "above" / "code"
    compiler._folder.cache_clear()


def use_cache() -> list[Path]:
    """Compile a kernel and return the files that it is kept in."""
    assert compiler.kernel(one_more)(1.0) == 2.0
    return [file for file in compiler.cache_folder().rglob("*.code")]


def one_more(number: float) -> float:
    return number + 1


LABS: Any = None  # a function of C, while a test has put it here


def absolute(number: int) -> Any:
    return LABS(number)


@posix_only
def test_code_with_an_address_of_this_process_is_not_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labs = ctypes.CDLL(None).labs
    labs.argtypes, labs.restype = [ctypes.c_long], ctypes.c_long
    monkeypatch.setitem(globals(), "LABS", labs)
    assert compiler.kernel(absolute)(-2) == 2
    assert [*cache.rglob("*.code")] == []


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a folder be another user's, by root's right or by being another."""
    if os.geteuid() == 0:
        os.chown(path, OTHER, OTHER)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: OTHER)


@posix_only
def test_folders_for_code_are_made_for_the_user_alone(cache: Path) -> None:
    before = os.umask(0)
    try:
        assert use_cache()
    finally:
        os.umask(before)
    (folder,) = cache.iterdir()
    assert [stat.S_IMODE(p.stat().st_mode) for p in (folder, cache, cache.parent)] == [0o700] * 3


@pytest.mark.product
@posix_only
@pytest.mark.parametrize("mode", [0o775, 0o722, 0o1777])
@pytest.mark.parametrize("place", ["code", "above", "inner"])
def test_code_is_not_kept_where_others_may_write(cache: Path, place: str, mode: int) -> None:
    """But in a folder with the sticky bit, such as /tmp, nobody can put another in its place."""
    inner = Path(cast("str", compiler._folder()))
    compiler._folder.cache_clear()
    changed = {"code": cache, "above": cache.parent, "inner": inner}[place]
    changed.chmod(mode)
    if mode == 0o1777 and place != "inner":
        assert use_cache()
        return
    told = rf"(?s)others may write to {re.escape(str(changed))} \(drwx.*Set PREAMP_CACHE"
    with pytest.warns(UserWarning, match=told):
        assert use_cache() == []
    compiler.kernel(one_more)  # and once is enough


@posix_only
@pytest.mark.parametrize("place", ["code", "above"])
def test_code_is_not_kept_in_the_folder_of_another_user(
    cache: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(parents=True)
    give_away({"code": cache, "above": cache.parent}[place], monkeypatch)
    with pytest.warns(UserWarning, match=r"(?s)belongs to another user.*your own"):
        assert use_cache() == []


@posix_only
def test_a_link_is_judged_by_where_it_leads(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    (shared / "code").mkdir()
    cache.parent.mkdir()
    cache.symlink_to(shared / "code")
    with pytest.warns(UserWarning, match=rf"others may write to {shared} "):
        assert use_cache() == []
    compiler._folder.cache_clear()
    monkeypatch.setenv("PREAMP_CACHE", str(shared / "link"))
    (tmp_path / "own").mkdir()
    (shared / "link").symlink_to(tmp_path / "own")
    assert use_cache()  # whoever turns the link around does so too late: what it led to is used


class Planted:
    """What a file that somebody else put there can be: code that runs when it is read."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.proof),)


@posix_only
@pytest.mark.parametrize("is_shared", [True, False])
def test_a_planted_file_is_not_read(cache: Path, tmp_path: Path, is_shared: bool) -> None:
    (file,) = use_cache()
    planted = pickle.dumps((Planted(tmp_path / "proof"), None))
    file.write_bytes(hashlib.sha256(planted).digest() + planted)
    compiler._folder.cache_clear()
    if is_shared:
        cache.chmod(0o777)
        with pytest.warns(UserWarning, match="could run code in this process"):
            use_cache()
    else:  # it does run, so the rule is needed
        use_cache()
    assert (tmp_path / "proof").exists() is not is_shared


def test_on_windows_permissions_are_not_looked_at(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delattr(os, "geteuid", raising=False)
    assert use_cache()


# -- far elements ---------------------------------------------------------------------------------

FAR = 25_600 * 100_000
"""Elements before the first one: more than 2**31, and whole rows of each of `FAR_SHAPES`."""

FAR_SHAPES = ((48, 200), (9, 1024))


def walk_far_away(
    kernel: Any, chunks: Any, rows: Any, at: np.ndarray, *arguments: Any, walk: Any
) -> None:
    """As if ``FAR`` elements, which nothing works on, were before those of every tensor."""
    table, places = chunks.table.copy(), at.copy()
    table[1] += FAR
    for number, tensors in enumerate(rows):
        for place, tensor in enumerate(tensors):
            shape = rows[0][place].shape
            if tensor.shape == shape:
                places[number, place] -= FAR * tensor.itemsize
            else:  # a scale for every 128 elements of a row, or what is left of them
                places[number, place] -= FAR // shape[1] * -(-shape[1] // 128) * 4
    told = [
        one._replace(starts=one.starts - FAR) if isinstance(one, Layout) else one
        for one in arguments
    ]
    walk(kernel, replace(chunks, table=table), rows, places, *told)


@pytest.mark.parametrize(("half", "kind"), STORAGES)
def test_updates_beyond_31_bits(half: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements behind the first 2**31 of a tensor, without the memory for those before them."""
    row = next(row for row in ONE_EACH if row.op == "adam_")
    case = Case.of(row, half, kind, shapes=FAR_SHAPES)
    wanted = case.run(JIT)
    monkeypatch.setattr(jit_ops, "walk", functools.partial(walk_far_away, walk=jit_ops.walk))
    assert_bits(case.run(JIT).kept, wanted.kept)


def test_other_ops_beyond_31_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def results() -> list[torch.Tensor]:
        wide = [torch.linspace(-3.0, 5.0, math.prod(shape)).view(shape) for shape in FAR_SHAPES]
        half = [tensor.half() for tensor in wide]
        census, largest = JIT.census(half, CPU, with_norm=True), JIT.census(half, CPU).max_abs
        assert largest is not None
        JIT.axpby_(wide, 2.0, wide, 0.5, half)
        lows = [torch.empty_like(tensor, dtype=torch.int16) for tensor in wide]
        JIT.split_(wide, half, lows)
        return [census.found_inf, census.norm, largest, *wide, *half, *lows]

    wanted = results()
    monkeypatch.setattr(jit_ops, "walk", functools.partial(walk_far_away, walk=jit_ops.walk))
    for ours, other in zip(results(), wanted, strict=True):
        assert torch.equal(ours, other)
