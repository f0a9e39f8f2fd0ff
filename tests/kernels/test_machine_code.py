# SPDX-License-Identifier: BSD-3-Clause
"""Machine code of numba's kernels: compiled once, found by later processes, kept from others."""

import ctypes
import hashlib
import os
import pickle
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

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
    before, now = "narrow(peek(values, i, _F32), _ZERO_BF16)", "narrow(f32_of_bits(0), _ZERO_BF16)"
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
    if os.geteuid() == 0:
        os.chown({"code": cache, "above": cache.parent}[place], OTHER, OTHER)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: OTHER)
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
