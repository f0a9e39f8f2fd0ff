# SPDX-License-Identifier: BSD-3-Clause
"""Change the code in one place at a time, and see which tests notice.

``run`` collects tests once, and asks ``coverage`` which lines each enters. For each fault it forks,
gives the living functions the code of the changed source, runs all tests that enter the changed
lines, and writes a line of JSON with those that notice: they fail, hang or end the process. Tests
after one that hangs are not asked, nor further cases of one that has failed. Faults that ``--out``
has are skipped: the same command goes on where it was ended. Files must not change between.

Faults are drawn from the source (comparisons, signs, operators, conditions, left-out statements),
or stand in ``planted_faults.py``. ``report`` counts, and lists what no test noticed. ``spare``
names tests without which each fault keeps ``--keep`` that notice it. ``diff`` lists what an earlier
matrix noticed and a later one does not.

Only functions of this process change: what runs in another interpreter, or as machine code, is `not
reached`, and tests that start processes are never spare. Nothing is drawn outside of functions: a
spare test may still be the one that pins a default or a table. Read it before it goes.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import inspect
import json
import multiprocessing
import os
import resource
import runpy
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from coverage import Coverage
from hypothesis import Phase, settings

from faults import Row, drawn, planted

COMPILED = ("kernels/triton/",)
COMPILED += tuple(f"kernels/jit/{name}.py" for name in ("formats", "formulas", "loops", "words"))
"""Triton and numba read these functions: new code of theirs changes nothing."""

UNSEEN = ("subprocess.Popen", "os.fork", "os.posix_spawn", "socket.connect", "sys.settrace")
"""Events of a test that runs code where neither coverage nor the change of code is."""

FORK = multiprocessing.get_context("fork")


def package() -> Path:
    """The folder of the only package below ``src``."""
    (found,) = Path.cwd().glob("src/*/__init__.py")
    return found.parent


def function_of(test: str) -> str:
    """The test without the parameters of one case."""
    return test.partition("[")[0]


class Matrix:
    """A plugin that runs tests over faults instead of running them."""

    def __init__(self, out: Path, jobs: int, limit: int, faults: Sequence[Any]) -> None:
        self._out, self._jobs, self._limit, self._faults = out, jobs, limit, faults
        self._tests: dict[str, Row] = {}
        self._failed: set[str] = set()  # in this fork
        self._log = -1

    @pytest.hookimpl(trylast=True)  # after a conftest has chosen a profile
    def pytest_configure(self) -> None:
        """Let searches end with the first example that fails, and not look for a smaller one."""
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("kill", settings(), phases=phases, report_multiple_bugs=False)
        settings.load_profile("kill")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take note of who fails."""
        if report.failed:
            self._failed.add(function_of(report.nodeid))
            os.write(self._log, f"! {function_of(report.nodeid)}\n".encode())

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Try all faults."""
        if session.testsfailed:
            return None  # pytest tells what could not be collected
        faults = self._living()
        fail = self._noticed(lambda: self._trace(session.items))
        print("left out, since they fail without a fault:", fail)
        self._tests = read([self._out])[0]
        items = [item for item in session.items if function_of(item.nodeid) not in fail]
        parts = [faults[at :: self._jobs] for at in range(self._jobs)]
        workers = [FORK.Process(target=self._try, args=(part, items)) for part in parts]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if any(worker.exitcode for worker in workers):
            raise pytest.UsageError("a worker has died; what it says is above")
        return True

    def _living(self) -> list[tuple[Row, Any]]:
        """The faults, each with the functions that it changes and their new code."""
        for name in ("numba", "torch._dynamo"):  # once, instead of in each fork
            with suppress(ImportError):
                importlib.import_module(name)
        for file in {row["file"] for row, _ in self._faults}:
            parts = (package().name, *Path(file).with_suffix("").parts)
            importlib.import_module(".".join(parts).removesuffix(".__init__"))
        gc.unfreeze()  # what a conftest may hide
        functions = defaultdict[object, list[FunctionType]](list)
        for thing in gc.get_objects():
            if type(thing) is FunctionType:
                functions[thing.__code__.co_filename, thing.__code__].append(thing)
        gc.freeze()  # a look through all objects in a fork would copy their pages
        faults = []
        for row, swaps in self._faults:
            codes = [((old.co_filename, old), new) for old, new in swaps.items()]
            faults.append((row, [(f, new) for key, new in codes for f in functions[key]]))
            if not faults[-1][1]:
                raise pytest.UsageError(f"no living function changes with {told(row)}")
        return faults

    def _noticed(self, work: Callable[[], None]) -> dict[str, str]:
        """Who fails in a fork that does ``work``, or ends it, and how."""
        with tempfile.TemporaryDirectory(prefix="kill-", ignore_cleanup_errors=True) as folder:
            child = FORK.Process(target=self._begin, args=(folder, work))
            child.start()
            child.join()
            with suppress(ProcessLookupError):
                os.killpg(child.pid or 0, signal.SIGKILL)  # what tests have started
            lines = [line.split(" ", 1) for line in Path(folder, "log").read_text().splitlines()]
        noticed = {test: "failed" for what, test in lines if what == "!"}
        if child.exitcode:
            is_hang = child.exitcode in (-signal.SIGXCPU, -signal.SIGALRM)
            last = [test for what, test in lines if what == ">"][-1]
            noticed[last] = "hang" if is_hang else f"ended with {child.exitcode}"
        return noticed

    def _begin(self, folder: str, work: Callable[[], None]) -> None:
        os.setsid()
        self._log = os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT)
        for stream in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        os.environ["PYTEST_DEBUG_TEMPROOT"] = os.environ["TMPDIR"] = tempfile.tempdir = folder
        work()
        os._exit(0)  # and wait for nobody

    def _run(self, items: Iterable[pytest.Item], seen: Any = nullcontext) -> None:
        left = iter(items)
        item = next(left, None)
        while item:
            after = next((i for i in left if function_of(i.nodeid) not in self._failed), None)
            os.write(self._log, f"> {function_of(item.nodeid)}\n".encode())
            with seen(item):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            item = after

    def _trace(self, items: Iterable[pytest.Item]) -> None:
        """Write what ``items`` enter, how long they are, and whether they do more."""
        os.environ["COVERAGE_CORE"] = "ctrace"  # sys.monitoring knows no contexts
        coverage = Coverage(data_file=None, include=[f"{package()}/*"], config_file=False)
        tests, now = dict[str, Row](), Row()

        def hear(event: str, arguments: object) -> None:
            if event in UNSEEN and threading.current_thread() is threading.main_thread():
                now["unseen"] = True

        @contextmanager
        def seen(item: Any) -> Iterator[None]:
            nonlocal now
            coverage.start()  # anew, if a test has traced by itself
            coverage.switch_context(item.nodeid)
            # The zygote is a process that many tests share.
            now = tests[item.nodeid] = {"unseen": "zygote" in item.fixturenames, "lines": {}}
            begun = time.perf_counter()
            yield
            now["seconds"] = round(time.perf_counter() - begun, 3)
            now["size"] = len(inspect.getsourcelines(item.function)[0])
            now = {}
            coverage.stop()

        sys.addaudithook(hear)
        self._run(items, seen)
        data = coverage.get_data()
        for path in data.measured_files():
            file = Path(path).relative_to(package()).as_posix()
            for line, names in data.contexts_by_lineno(path).items():
                for lines in [tests[name]["lines"] for name in {*names} - {""}]:
                    lines[file] = lines.get(file, 0) | 1 << line
        append(self._out, {"tests": tests})

    def _try(self, faults: Iterable[tuple[Row, Any]], items: Iterable[pytest.Item]) -> None:
        """Write who of ``items`` notices each fault."""
        for row, living in faults:
            begun = time.perf_counter()
            mask = (1 << row["last"] + 1) - (1 << row["line"])
            known = [(item, self._tests[item.nodeid]) for item in items]
            asked = [(i, test) for i, test in known if test["lines"].get(row["file"], 0) & mask]
            noticed = self._noticed(partial(self._ask, asked, living)) if asked else {}
            state = "noticed" if noticed else "not noticed" if asked else "not reached"
            seconds = round(time.perf_counter() - begun, 1)
            append(self._out, {**row, "state": state, "noticed": noticed, "seconds": seconds})

    def _ask(self, asked: Iterable[tuple[pytest.Item, Row]], living: Any) -> None:
        limit = int(self._limit + 3 * sum(test["seconds"] for _, test in asked))
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        signal.alarm(5 * limit)  # one that waits uses no CPU
        for function, code in living:
            function.__code__ = code
        self._run(item for item, _ in asked)


def append(out: Path, row: Row) -> None:
    """Write a row in one go: workers share the file."""
    with out.open("ab", buffering=0) as file:
        file.write(json.dumps(row).encode() + b"\n")


def run(args: argparse.Namespace, given: Sequence[str]) -> int:
    """Try the faults that ``--out`` does not have yet."""
    here, rooms = package(), {place.partition("/")[0] for place in args.of}
    files = [path.relative_to(here).as_posix() for path in sorted(here.rglob("*.py"))]
    files = [f for f in files if any(f == place or f.startswith(f"{place}/") for place in args.of)]
    if args.planted:
        table = runpy.run_path("tools/planted_faults.py")["FAULTS"]
        faults = [planted(f, here / f, *pair) for f in files for pair in table.get(f, ())]
    else:
        chosen = [file for file in files if not file.startswith(COMPILED)]
        faults = [fault for file in chosen for fault in drawn(file, here / file)]
    out = args.out.absolute()
    tried = set(map(key_of, read([out])[1])) if out.exists() else set()
    faults = [fault for fault in faults if key_of(fault[0]) not in tried]
    sys.path += [str(Path.cwd()), str(here.parent)]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = ["-q", "-s", "--tb=native", "-p", "no:cacheprovider", "-p", "no:xdist"]
    tests = given or sorted(f"tests/{room}" for room in rooms)
    matrix = Matrix(out, args.jobs, args.limit, faults)
    status = int(pytest.main([*options, *tests], plugins=[matrix])) if faults else 0
    return status or report([out])


# -- what the rows tell -----------------------------------------------------------------------


def read(paths: Iterable[Path]) -> tuple[dict[str, Row], list[Row]]:
    """What is known of tests, and the rows of all faults."""
    tests, rows = dict[str, Row](), list[Row]()
    for row in [json.loads(line) for path in paths for line in path.read_text().splitlines()]:
        if "tests" in row:
            tests.update(row["tests"])
        else:
            rows.append(row)
    return tests, rows


def key_of(row: Row) -> tuple[object, ...]:
    """What tells its fault from all others."""
    return row["file"], row["line"], row["column"], row["what"]


def told(row: Row) -> str:
    """A fault in a line."""
    return f"  {row['file']}:{row['line']}: {' '.join(row['what'].split())[:160]}"


def report(paths: Iterable[Path]) -> int:
    """Print counts, and each fault that no test noticed."""
    rows = read(paths)[1]
    of = {
        s: [r for r in rows if r["state"] == s] for s in ("noticed", "not noticed", "not reached")
    }
    counts = ", ".join(f"{len(found)} {state}" for state, found in of.items())
    print(f"{len(rows)} faults: {counts}; {sum(row['seconds'] for row in rows):.0f} s")
    for state in ("not noticed", "not reached"):
        print(f"{state}:", *map(told, of[state]), sep="\n")
    return 0


def spare(tests: dict[str, Row], rows: Iterable[Row], keep: int) -> list[tuple[int, str]]:
    """Tests that may go, the longest first, while ``keep`` notice each fault that they notice.

    One that noticed nothing was not judged, and stays. So does one that does more than this
    process sees, and one that alone enters a line where no fault was noticed.
    """
    noticed = [row for row in rows if row["noticed"]]
    killers = [set(row["noticed"]) for row in noticed]
    judged = {(r["file"], line) for r in noticed for line in range(r["line"], r["last"] + 1)}
    enters, sizes, stays = defaultdict[str, set[object]](set), dict[str, int](), set[str]()
    for test, known in tests.items():
        name = function_of(test)
        sizes[name] = known["size"]
        stays |= {name} if known["unseen"] else set()
        for file, mask in known["lines"].items():
            bits = enumerate(bin(mask)[:1:-1])
            enters[name] |= {(file, line) for line, bit in bits if bit == "1"} - judged
    entering = Counter(line for lines in enters.values() for line in lines)
    gone = []
    for name in sorted(set().union(*killers) - stays, key=lambda n: (-sizes[n], n)):
        mine = [them for them in killers if name in them]
        if all(len(them) > keep for them in mine) and all(entering[x] > 1 for x in enters[name]):
            gone.append((sizes[name], name))
            entering.subtract(enters[name])
            for them in mine:
                them.discard(name)
    return gone


def diff(before: Path, after: Path) -> int:
    """Print the faults that a matrix noticed and a later one does not."""
    now = {key_of(row): row["state"] for row in read([after])[1]}
    rows = [row for row in read([before])[1] if row["noticed"]]
    lost = [row for row in rows if now.get(key_of(row)) != "noticed"]
    for row in lost:
        print(f"{now.get(key_of(row), 'not tried')}:\n{told(row)}\n    {', '.join(row['noticed'])}")
    print(f"{len(lost)} faults were noticed, and are no more")
    return bool(lost)


def main(argv: Sequence[str]) -> int:
    """Do what the arguments say."""
    at = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(epilog="run: after -- come tests and options of pytest")
    parser.add_argument("command", choices=("run", "report", "spare", "diff"))
    parser.add_argument("of", nargs="+", help="run: files or folders of the package; else matrices")
    parser.add_argument("--planted", action="store_true", help="the planted faults, not drawn ones")
    parser.add_argument("--out", type=Path, default=Path("matrix.jsonl"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=int, default=20, help="CPU seconds beyond thrice the usual")
    parser.add_argument("--keep", type=int, default=2, help="so many notice each fault")
    args = parser.parse_intermixed_args(argv[:at])
    paths = [Path(path) for path in args.of]
    if args.command == "run":
        return run(args, argv[at + 1 :])
    if args.command == "report":
        return report(paths)
    if args.command == "diff":
        return diff(*paths)
    gone = spare(*read(paths), args.keep)
    print(*(f"{size:5} {name}" for size, name in gone), sep="\n")
    print(f"{len(gone)} tests, {sum(size for size, _ in gone)} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
