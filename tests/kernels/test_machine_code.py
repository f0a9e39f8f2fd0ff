# SPDX-License-Identifier: BSD-3-Clause
"""Machine code of numba's kernels: compiled once, found by later processes, kept from others."""

import ctypes
import hashlib
import os
import pickle
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import preamp
from cases.back_ends import JIT
from cases.rules import BF16, ONE_EACH
from cases.stored import Case
from preamp.kernels.jit import compiler, loops

_CAST = """
import sys, torch
from preamp.kernels import backend
assert "numba" not in sys.modules
target = torch.zeros(3, dtype=torch.bfloat16)
backend("jit").cast_copy_([torch.full((3,), 1.5)], [target])
from preamp.kernels.jit import loops
stats = loops.combine.stats
print(loops.__file__, target[0].item(), *map(len, (stats.cache_hits, stats.cache_misses)))
"""
MADE, FOUND = ["1.5", "0", "1"], ["1.5", "1", "0"]
"""The number, and how many kernels were there and how many compiled."""


def start(cache: Path, program: str = _CAST, **environment: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PREAMP_CACHE": str(cache), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", program], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def outcome(process: subprocess.Popen[str]) -> str:
    out, error = process.communicate(timeout=500)
    assert process.returncode == 0, error
    return out.strip()


def cast_in(process: subprocess.Popen[str]) -> list[str]:
    return outcome(process).split()[1:]


@pytest.mark.full
def test_processes_compile_at_once_and_later_ones_not_at_all(tmp_path: Path) -> None:
    both = [start(tmp_path) for _ in range(2)]
    assert all(cast_in(process) in (MADE, FOUND) for process in both)
    assert cast_in(start(tmp_path)) == FOUND
    (folder,) = tmp_path.iterdir()
    assert not list(folder.rglob("*.tmp*"))
    (tmp_path / "file").touch()  # a folder that cannot be made costs compiling only
    assert cast_in(start(tmp_path / "file" / "folder")) == MADE


@pytest.mark.parametrize("row", ONE_EACH, ids=lambda row: row.name)
def test_types_of_kernels_are_the_same_in_every_process(row: Any) -> None:
    """Of a class that is not found by its name numba's index would have one for each process."""
    Case.of(row, BF16, "float32").run(JIT)
    for signature in loops.update.signatures:
        assert pickle.loads(pickle.dumps(signature)) == signature


@pytest.mark.parametrize("length", [0, 10, -10])
def test_a_damaged_file_is_made_anew(cache: Path, length: int) -> None:
    (file,) = use_cache()
    whole = file.read_bytes()
    file.write_bytes(whole[:length])
    assert use_cache() == [file]
    assert len(file.read_bytes()) == len(whole)
    shutil.rmtree(file.parent)  # and where nothing can be kept any more
    assert use_cache() == []


@pytest.mark.full
def test_copies_of_the_package_share_code_while_their_sources_are_the_same(tmp_path: Path) -> None:
    """It is not found by where the package lies, nor by when its files were written."""
    source = Path(preamp.__file__).parent
    for name in ("one", "other"):
        shutil.copytree(source, tmp_path / name / "preamp", copy_function=shutil.copyfile)

    def found(name: str) -> list[str]:
        place = tmp_path / name
        file, *rest = outcome(start(tmp_path / "cache", PYTHONPATH=str(place))).split()
        assert file.startswith(str(place))
        return rest

    assert found("one") == MADE
    assert found("other") == FOUND
    words = tmp_path / "other" / "preamp/kernels/jit/words.py"
    before, now = "narrow(peek(values, i, _F32), _ZERO_BF16)", "narrow(_F32, _ZERO_BF16)"
    text = words.read_text()
    assert before in text
    words.write_text(text.replace(before, now))  # a function that the kernel calls
    assert found("other") == ["0.0", "0", "1"]
    assert found("one") == FOUND


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


# -- whose machine code is read -------------------------------------------------------------------

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


class Planted:
    """What a file that somebody else put there can be: code that runs when it is read."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.proof),)


@posix_only
@pytest.mark.parametrize(
    "who", ["the user", "another", "his group", "anybody", "by a link", "by two names", "by a pipe"]
)
def test_code_counts_that_only_the_user_can_have_written(
    cache: Path, tmp_path: Path, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever its folder is, and whoever may write to that."""
    before = os.umask(0)
    try:
        (file,) = use_cache()
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert {stat.S_IMODE(place.stat().st_mode) for place in file.parents[:3]} == {0o700}
    planted = pickle.dumps((Planted(tmp_path / "proof"), None))
    file.write_bytes(hashlib.sha256(planted).digest() + planted)
    beside = file.with_suffix(".beside")
    if who == "another" and os.geteuid() == 0:
        os.chown(file, OTHER, OTHER)
    elif who == "another":
        monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    elif who.startswith("by"):  # the user's own file, which may be anything that he has got
        file.rename(beside)
        {"by a link": file.symlink_to, "by two names": file.hardlink_to}.get(
            who, lambda _: os.mkfifo(file)
        )(beside)
    else:
        file.chmod({"the user": 0o600, "his group": 0o620, "anybody": 0o602}[who])
    use_cache()
    assert (tmp_path / "proof").exists() == (who == "the user")  # where it runs, as code does


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
