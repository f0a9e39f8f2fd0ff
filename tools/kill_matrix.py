# SPDX-License-Identifier: BSD-3-Clause
"""Change the code in one place at a time, and see which tests notice.

``run`` collects the tests once and asks ``coverage`` which lines each enters. For each fault it
forks, gives the living functions the code of the changed source, runs the tests that enter the
changed lines, and writes a line of JSON: the fault, and all who noticed. It goes on where an
earlier run into the same file ended. Further cases of a test that has noticed are left out.

Faults are drawn from the source (comparisons, signs, operators, conditions, left-out statements),
or stand in ``planted_faults.py`` (``--planted``). A planted fault that forks do not notice, or that
is outside of functions or in what a compiler reads, is tried once more in a copy of the package.

``report`` counts, and lists what no test noticed. ``spare`` names tests without which each fault
keeps ``--keep`` that notice. ``diff`` lists what an earlier matrix noticed and a later one does
not.

What it does not see: lines that run in another interpreter (ranks), or where a test traces by
itself. Faults there are `not reached`, if no other test reaches them, and such tests never spare.
No fault is drawn outside of functions: a test that is spare may still be the one that pins a
default, or an order of a table. Read it before it goes.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import json
import os
import resource
import runpy
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from types import CodeType
from typing import NoReturn

import pytest

from faults import Fault, drawn, planted
from kill_rows import (
    KEY,
    NOT_NOTICED,
    NOT_PLANTED,
    NOT_REACHED,
    NOTICED,
    Row,
    diff,
    function_of,
    key_of,
    print_spare,
    report,
)

ROOT = Path(__file__).parents[1]

COMPILED = ("kernels/rules.py", "kernels/triton/")
COMPILED += tuple(f"kernels/jit/{name}.py" for name in ("formats", "formulas", "loops", "words"))
"""Numba and Triton read these functions: what they made keeps the code that was there before."""

LATE = ("llvmlite", "numba", "preamp", "torch", "triton")
"""What tests import late is imported before the forks, once for all of them."""

UNSEEN = ("subprocess.Popen", "os.fork", "os.posix_spawn", "socket.connect", "sys.settrace")
"""Events of a test that reaches code where neither coverage nor the change of code does."""

MANY = 1 << 30

DEATHS = 3
"""Forks of one fault that may hang or crash before the tests that are left stay unasked."""

# -- who notices ------------------------------------------------------------------------------


class Failures:
    """A plugin: the functions of tests that have failed."""

    def __init__(self, tell: Callable[[str], object] = lambda line: None) -> None:
        self.names: set[str] = set()
        self._tell = tell

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take note of one."""
        name = function_of(report.nodeid)
        if report.failed and name not in self.names:
            self.names.add(name)
            self._tell(f"! {name}")


class Entered:
    """Which lines tests enter, how long they take, and which do more than is seen here."""

    def __init__(self, package: Path) -> None:
        os.environ.setdefault("COVERAGE_CORE", "ctrace")  # sys.monitoring knows no contexts
        # Not installed where only the matrix is read.
        self._coverage = importlib.import_module("coverage").Coverage(
            data_file=None, include=[f"{package}/*"], config_file=False, messages=False
        )
        self._package, self._modules = package, set(sys.modules)
        self._tests: dict[str, Row] = {}
        self._now: Row = {}
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: object) -> None:
        if event in UNSEEN and threading.current_thread() is threading.main_thread():
            self._now["unseen"] = True

    @contextmanager
    def by(self, item: pytest.Item) -> Iterator[None]:
        """Look at what ``item`` does."""
        self._coverage.start()
        self._coverage.switch_context(item.nodeid)
        # The zygote is a process that many tests share.
        is_unseen = "zygote" in getattr(item, "fixturenames", ())
        self._now = self._tests[item.nodeid] = {"unseen": is_unseen, "lines": {}}
        begun = time.perf_counter()
        yield
        self._now["seconds"] = round(time.perf_counter() - begun, 3)
        self._now = {}
        self._coverage.stop()

    def told(self) -> Row:
        """All that was found, as JSON has it."""
        data = self._coverage.get_data()
        for path in data.measured_files():
            file = Path(path).relative_to(self._package).as_posix()
            for line, tests in data.contexts_by_lineno(path).items():
                for test in {*tests} - {""}:
                    lines = self._tests[test]["lines"]
                    lines[file] = lines.get(file, 0) | 1 << line
        for test in self._tests.values():
            test["lines"] = {file: hex(mask) for file, mask in test["lines"].items()}
        late = [name for name in sys.modules if name not in self._modules]
        return {"tests": self._tests, "late": [n for n in late if n.split(".")[0] in LATE]}


class Matrix:
    """A plugin that runs tests over faults instead of running them."""

    def __init__(self, args: argparse.Namespace, header: Row, faults: Sequence[Fault]) -> None:
        self._args, self._header, self._faults = args, header, faults
        self._package = package_of(args.root)
        self._living: dict[tuple[str, CodeType], list[types.FunctionType]] = defaultdict(list)
        self._over_clean = cache(self._over)

    @pytest.hookimpl(trylast=True)  # after a conftest has chosen a profile
    def pytest_configure(self) -> None:
        """Let searches end with the first example that fails, and not look for a smaller one."""
        with suppress(ImportError):
            from hypothesis import Phase, settings

            phases = (Phase.explicit, Phase.generate)
            settings.register_profile("kill", settings(), phases=phases, report_multiple_bugs=False)
            settings.load_profile("kill")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Try all faults."""
        if session.testsfailed:
            return None  # pytest tells what could not be collected
        items = {item.nodeid: item for item in session.items}
        if "tests" not in self._header:
            self._begin(list(items.values()))
        for name in self._header["late"]:
            with suppress(Exception):
                importlib.import_module(name)
        for file in {fault.file for fault in self._faults}:
            importlib.import_module(module_of(self._package, file))
        gc.unfreeze()  # what a conftest may hide
        gc.collect()
        for thing in gc.get_objects():
            if type(thing) is types.FunctionType:
                self._living[thing.__code__.co_filename, thing.__code__].append(thing)
        gc.freeze()  # a look through all objects in a fork would copy their pages
        left_out = self._header["left_out"]
        self._work({test: i for test, i in items.items() if function_of(test) not in left_out})
        return True

    def _begin(self, items: Sequence[pytest.Item]) -> None:
        """Write what tests enter, and who fails without a fault."""
        with tempfile.TemporaryDirectory() as folder:
            told = Path(folder, "told.json")
            failed, _ = self._noticed(items, told=told)
            if {*failed.values()} - {"failed"}:
                raise pytest.UsageError(f"without a fault: {failed}")
            self._header.update(json.loads(told.read_text("utf-8")))
        again = [item for item in items if function_of(item.nodeid) in failed]
        # Some fail since they are traced.
        self._header["left_out"] = sorted(self._noticed(again)[0]) if again else []
        append(self._args.out, self._header)
        for name in self._header["left_out"]:
            print(f"left out, since it fails without a fault: {name}", flush=True)

    def _work(self, items: Mapping[str, pytest.Item]) -> None:
        """Try all faults, ``--jobs`` at a time."""
        until = time.monotonic() + self._args.seconds
        workers = []
        for number in range(self._args.jobs):
            workers.append(os.fork())
            if workers[-1] == 0:
                status = 1
                try:
                    for fault in self._faults[number :: self._args.jobs]:
                        if time.monotonic() < until:
                            append(self._args.out, self._row(fault, items))
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(status)
        if any([os.waitpid(worker, 0)[1] for worker in workers]):
            raise pytest.UsageError("a worker has died; what it says is above")

    def _row(self, fault: Fault, items: Mapping[str, pytest.Item]) -> Row:
        begun = time.perf_counter()
        tests = self._header["tests"]
        chosen = [
            item
            for test, item in items.items()
            if int(tests[test]["lines"].get(fault.file, "0"), 16) & fault.mask
            and test.startswith(fault.tests or "")
        ]
        if self._args.enough < MANY:  # the quick ones may be enough
            chosen.sort(key=self._usual)
        state, noticed, unasked = NOT_REACHED, dict[str, str](), 0
        if chosen and not fault.is_outside and not is_compiled(fault.file):
            codes = [((old.co_filename, old), new) for old, new in fault.swaps.items()]
            living = [(f, new) for key, new in codes for f in self._living.get(key, ())]
            if living:
                noticed, unasked = self._noticed(chosen, living)
            state = NOTICED if noticed else NOT_NOTICED if living else NOT_PLANTED
        if fault.source and not noticed:
            failed = self._over(fault.tests, fault.file, fault.source)
            noticed = dict.fromkeys(sorted(failed - self._over_clean(fault.tests)), "failed")
            state = NOTICED if noticed else NOT_NOTICED
        row = dict(zip(KEY, fault.key, strict=True)) | {"mask": hex(fault.mask), "state": state}
        row |= {"noticed": noticed, "ran": len(chosen), "unasked": unasked}
        return row | {"seconds": round(time.perf_counter() - begun, 1)}

    def _over(self, tests: tuple[str, ...], file: str = "", source: str = "") -> set[str]:
        """Who of ``tests`` fails over a copy of the package, in an interpreter of its own."""
        with tempfile.TemporaryDirectory(prefix="kill-") as folder:
            copy = shutil.copytree(self._package, Path(folder, self._package.name))
            if file:
                Path(copy, file).write_text(source, "utf-8")
            command = ["timeout", "3600", sys.executable, __file__, "copy"]
            command += ["--root", str(self._args.root)]
            command += ["--suite", self._args.suite, "--out", f"{folder}/out", "--tests", *tests]
            # Processes that tests start find the tests by their names from the root.
            path = os.pathsep.join([folder, str(self._args.root)])
            environment = {**os.environ, "PYTHONPATH": path}
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode == 124:  # of timeout
                return {"hang"}
            if done.returncode:
                raise RuntimeError(done.stdout + done.stderr)
            return set(json.loads(Path(folder, "out").read_text("utf-8")))

    def _noticed(
        self,
        items: Sequence[pytest.Item],
        living: Sequence[tuple[types.FunctionType, CodeType]] = (),
        told: Path | None = None,
    ) -> tuple[dict[str, str], int]:
        """Who of ``items`` notices and how, and how many could not be asked."""
        found: dict[str, str] = {}
        for _ in range(DEATHS):
            with tempfile.TemporaryDirectory(prefix="kill-", ignore_cleanup_errors=True) as folder:
                out, into = os.pipe()
                sys.stdout.flush()
                child = os.fork()
                if child == 0:
                    self._child(items, living, told, (folder, into))
                os.close(into)
                at, failed, end = self._listen(child, out, items)
                os.close(out)
            found.update(dict.fromkeys(failed, "failed"))
            if not end:
                return found, 0
            if at < 0:
                raise RuntimeError(f"no test began: {end}")
            found[function_of(items[at].nodeid)] = end
            items = [item for item in items[at + 1 :] if function_of(item.nodeid) not in found]
            if not items or len(found) >= self._args.enough:
                return found, 0
        return found, len(items)

    def _child(
        self,
        items: Sequence[pytest.Item],
        living: Sequence[tuple[types.FunctionType, CodeType]],
        told: Path | None,
        ends: tuple[str, int],
    ) -> NoReturn:
        """Run ``items`` in this fork, and tell of each."""
        folder, into = ends
        status = 1

        def tell(line: str) -> None:
            os.write(into, f"{line}\n".encode())

        try:
            os.setsid()
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):
                os.dup2(nowhere, stream)
            os.environ["PYTEST_DEBUG_TEMPROOT"] = os.environ["TMPDIR"] = tempfile.tempdir = folder
            for function, code in living:
                function.__code__ = code
            entered = Entered(self._package) if told else None
            failures = Failures(tell)
            items[0].config.pluginmanager.register(failures)
            hook = items[0].config.hook.pytest_runtest_protocol
            enough = self._args.enough if living else len(items)
            left = iter(enumerate(items))
            now = next(left, None)
            while now and len(failures.names) < enough:
                after = next(
                    (n for n in left if told or function_of(n[1].nodeid) not in failures.names),
                    None,
                )
                tell(f"> {now[0]}")
                self._limit(now[1])
                with entered.by(now[1]) if entered else nullcontext():
                    hook(item=now[1], nextitem=after and after[1])
                now = after
            if entered and told:
                told.write_text(json.dumps(entered.told()), "utf-8")
            tell(".")
            status = 0
        except BaseException as error:
            tell(f"? {error!r}")
        finally:
            os._exit(status)

    def _usual(self, item: pytest.Item) -> float:
        return self._header.get("tests", {}).get(item.nodeid, {"seconds": 100})["seconds"]

    def _limit(self, item: pytest.Item) -> None:
        """Give the test ten times the CPU it usually takes, and ``--hang`` more."""
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        limit = int(used + self._args.hang + 10 * self._usual(item)) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))

    def _listen(
        self, child: int, out: int, items: Sequence[pytest.Item]
    ) -> tuple[int, list[str], str]:
        """The latest test that began, who failed, and what ended the child if not its end."""
        at, failed, heard, latest = -1, [], b"", time.monotonic()
        kind = end = ""
        while kind not in (".", "?"):
            is_ready = bool(select.select([out], [], [], 1)[0])
            chunk = os.read(out, 1 << 16) if is_ready else b""
            if chunk:
                latest = time.monotonic()
                *lines, heard = (heard + chunk).split(b"\n")
                for kind, _, text in (line.decode().partition(" ") for line in lines):
                    at = int(text) if kind == ">" else at
                    failed += [text] if kind == "!" else []
                    end = text if kind == "?" else end
            elif is_ready or os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                break
            # One that waits for ever uses no CPU.
            elif time.monotonic() > latest + 60 + 20 * self._usual(items[max(at, 0)]):
                end = "hang"
                break
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # with all that tests have started
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if kind != "." and not end:
            end = "hang" if status == -signal.SIGXCPU else f"ended with {status}"
        return at, failed, end


# -- the command ------------------------------------------------------------------------------


def package_of(root: Path) -> Path:
    """The folder of the only package below ``src``."""
    (package,) = [path.parent for path in Path(root, "src").glob("*/__init__.py")]
    return package


def module_of(package: Path, file: str) -> str:
    """How a file of the package is imported."""
    return ".".join((package.name, *Path(file).with_suffix("").parts)).removesuffix(".__init__")


def is_compiled(file: str) -> bool:
    """Whether a compiler has read the functions of a file, so that new code changes nothing."""
    return file.startswith(COMPILED)


def append(out: Path, row: Row) -> None:
    """Write a row in one go: workers share the file."""
    with out.open("ab", buffering=0) as file:
        file.write(json.dumps(row).encode() + b"\n")


def digest_of(root: Path) -> str:
    """What tells these sources and tests from all others."""
    files = sorted(path for folder in ("src", "tests") for path in Path(root, folder).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def faults_of(args: argparse.Namespace) -> list[Fault]:
    """The faults that the arguments choose."""
    package = package_of(args.root)
    chosen = tuple(args.file or [f"{room}/" for room in args.room] or [""])
    if args.planted:
        table = runpy.run_path(str(args.table))["FAULTS"]
        rows = [(*place, *pair) for place, pairs in table.items() for pair in pairs]
        found = [planted(r[0], package / r[0], *r[1:]) for r in rows if r[0].startswith(chosen)]
    else:
        files = sorted(path.relative_to(package).as_posix() for path in package.rglob("*.py"))
        left = [file for file in files if file.startswith(chosen)]
        for file in filter(is_compiled, left):
            print(f"left out, since a compiler reads it: {file}")
        found = [f for file in left if not is_compiled(file) for f in drawn(file, package / file)]
    if not found:
        raise SystemExit("no faults are there")
    return found


def run(args: argparse.Namespace) -> int:
    """Try the faults that ``--out`` does not have yet."""
    faults = faults_of(args)
    tests = args.tests or sorted(
        {test for fault in faults for test in fault.tests or [f"tests/{fault.file.split('/')[0]}"]}
    )
    digest = digest_of(args.root)
    header: Row = {"digest": digest, "of": [tests, args.suite], "faults": len(faults)}
    faults = faults[:: args.every]
    if args.out.exists():
        old, *rows = map(json.loads, args.out.read_text("utf-8").splitlines())
        if {key: old[key] for key in header} != header:
            raise SystemExit(f"{args.out} is of other sources, tests or faults: name another file")
        tried = set(map(key_of, rows))
        header, faults = old, [fault for fault in faults if fault.key not in tried]
    status = run_pytest(args, tests, Matrix(args, header, faults)) if faults else 0
    if digest_of(args.root) != digest:  # searches are seeded with the text of their test
        raise SystemExit(f"files have changed meanwhile: begin {args.out} anew")
    return status or min(report([args.out]), 1)


def run_pytest(args: argparse.Namespace, tests: Sequence[str], plugin: object) -> int:
    """Run pytest in this process, from the root."""
    os.chdir(args.root)
    sys.path.insert(0, str(args.root))  # as python -m pytest has it, for ranks
    sys.path.append(str(args.root / "src"))  # after a copy of it
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = ["-q", "-s", "--tb=native", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options += ["--suite", args.suite] if args.suite else []
    return int(pytest.main([*options, *tests], plugins=[plugin]))


def over_copy(args: argparse.Namespace) -> int:
    """Write who of the tests fails over the package that is first on the path."""
    failures = Failures()
    status = run_pytest(args, args.tests, failures)
    name = package_of(args.root).name
    if not Path(importlib.import_module(name).__file__ or "").is_relative_to(args.out.parent):
        raise SystemExit("the tests have run over another package")
    args.out.write_text(json.dumps(sorted(failures.names)), "utf-8")
    return status if status > 1 else 0


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("run", "report", "spare", "diff", "copy"))
    parser.add_argument("matrix", nargs="*", type=Path, help="for all but run")
    parser.add_argument("--room", nargs="*", default=[], help="folders of the package")
    parser.add_argument("--file", nargs="*", default=[], help="files of the package")
    parser.add_argument("--planted", action="store_true", help="the planted faults, not drawn ones")
    parser.add_argument("--every", type=int, default=1, help="try each so manieth fault")
    parser.add_argument("--tests", nargs="*", default=[], help="default: those of the room")
    parser.add_argument("--suite", default="", help="quick, rest or all")
    parser.add_argument("--enough", type=int, default=MANY, help="stop when so many notice")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no fault after these")
    parser.add_argument("--hang", type=int, default=10, help="CPU seconds beyond the usual")
    parser.add_argument("--out", type=Path, default=Path("matrix.jsonl"))
    parser.add_argument("--keep", type=int, default=2, help="so many notice each fault")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    table = Path(__file__).with_name("planted_faults.py")
    parser.add_argument("--table", type=Path, default=table, help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args(argv)
    args.out = args.out.absolute()
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the arguments say."""
    args = arguments(argv)
    if args.command == "report":
        return report(args.matrix)
    if args.command == "diff":
        return min(diff(*args.matrix), 1)
    if args.command == "spare":
        return print_spare(args.matrix, args.root, args.keep)
    return run(args) if args.command == "run" else over_copy(args)


if __name__ == "__main__":
    sys.exit(main())
