# SPDX-License-Identifier: BSD-3-Clause
"""Change the code in one place at a time, and see which tests notice.

``run`` collects tests once, and asks ``coverage`` which lines each enters. For each fault it forks,
gives the living functions the code of the changed source, runs all tests that enter the changed
lines, and writes a line of JSON with those that notice: they fail, hang or end the process (tests
after such a one are not asked). With ``--until N`` the shortest tests come first, one case of each,
and none is asked once N have noticed: what ``report`` and ``diff`` need of a whole room, and
``spare`` does not take. With ``--within S`` a fault is given up that S seconds of tests, in this
order, do not notice.
Faults are drawn from the source (comparisons, signs, operators, conditions, left-out statements),
or stand in ``planted_faults.py``. What ``--out`` has is not tried, nor looked for, again, so that a
run can go on; files must not change between. ``report`` lists what no test notices, ``spare`` tests
without which each fault keeps ``--keep`` that notice it, and ``diff`` what only the first of two
matrices noticed.

Only functions of this process change: what runs in another interpreter, or as machine code, is `not
reached`, and tests that start processes are never spare. Nothing is drawn outside of functions: a
spare test may still be the one that pins a default or a table. Read it before it goes.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib
import inspect
import json
import math
import multiprocessing
import os
import resource
import runpy
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, count
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
from coverage import Coverage

Row = dict[str, Any]
Fault = tuple[Row, dict[CodeType, CodeType]]  # what a matrix says of it; new code by old

COMPILED = ("triton/", "jit/formats.py", "jit/formulas.py", "jit/loops.py", "jit/words.py")
"""In kernels: what Triton and numba read, so that new code of its functions changes nothing."""

UNSEEN = ("subprocess.Popen", "os.fork", "os.posix_spawn", "socket.connect")
"""Events of a test that runs code where the changed one is not."""

FORK = multiprocessing.get_context("fork")

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div,
    ast.Div: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


def changes(node: ast.AST) -> Iterator[tuple[Any, str, Any, str]]:
    """What slips make of ``node``: the part that changes, the field, its new value, in words."""
    if isinstance(node, ast.Compare):
        for at, op in enumerate(node.ops):
            if type(op) in SWAPS:
                yield node, "ops", [*node.ops[:at], SWAPS[type(op)](), *node.ops[at + 1 :]], ""
    elif isinstance(node, (ast.BoolOp, ast.BinOp, ast.AugAssign)) and type(node.op) in SWAPS:
        yield node, "op", SWAPS[type(node.op)](), ""
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield node, "operand", ast.UnaryOp(node.op, node.operand), ""
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
        # What is left out stays in the source: names keep their scopes, and closures their cells.
        never = ast.BoolOp(ast.And(), [ast.Constant(False), node.test])
        yield node.test, "test", never, f"never {ast.unparse(node.test)}"
        if not isinstance(node, ast.While):
            always = ast.BoolOp(ast.Or(), [ast.Constant(True), node.test])
            yield node.test, "test", always, f"always {ast.unparse(node.test)}"
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if not isinstance(block, list) or (isinstance(node, ast.If) and len(block) == 1):
            continue  # a condition that never holds leaves its only statement out
        for at, line in enumerate(block):
            is_text = isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)
            kinds = (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Raise)
            if isinstance(line, kinds) and not is_text:
                without = [*block[:at], ast.If(ast.Constant(False), [line], []), *block[at + 1 :]]
                yield line, name, without, f"without {ast.unparse(line)}"


def drawn(file: str) -> Iterator[Fault]:
    """All faults of one place in the functions of a file."""
    path = Path(file).absolute()
    tree = ast.parse(path.read_text("utf-8"))
    original = compile(tree, path, "exec", dont_inherit=True)
    for node in ast.walk(tree):
        for place, field, value, words in changes(node):
            before, old = ast.unparse(place), getattr(node, field)
            setattr(node, field, value)
            ast.fix_missing_locations(tree)
            what = words or f"{before} → {ast.unparse(place)}"
            swaps = compared(original, compile(tree, path, "exec", dont_inherit=True))
            setattr(node, field, old)
            if swaps:
                name = f"{file}:{place.lineno}:{place.col_offset}: {what}"
                lines = [*range(place.lineno, place.end_lineno + 1)]
                yield {"fault": name, "file": file, "lines": lines}, swaps


def planted(file: str, old: str, new: str) -> Fault:
    """The fault that puts ``new`` where ``old`` stands."""
    path = Path(file).absolute()
    source = path.read_text("utf-8")
    if source.count(old) != 1:
        raise SystemExit(f"{file} should have once, and has {source.count(old)} times: {old!r}")
    # As many lines as before: codes are found by where they begin.
    changed = source.replace(old, "\n" * (old.count("\n") - new.count("\n")) + new)
    swaps = compared(*(compile(s, path, "exec", dont_inherit=True) for s in (source, changed)))
    if not swaps:
        raise SystemExit(f"{file}: no function changes with {new!r} for {old!r}")
    line = source[: source.index(old)].count("\n") + 1
    lines = [*range(line, line + old.rstrip().count("\n") + 1)]
    return {"fault": f"{file}:{line}: {old!r} → {new!r}", "file": file, "lines": lines}, swaps


def compared(old: CodeType, new: CodeType) -> dict[CodeType, CodeType]:
    """The functions (no classes: these are made) whose code, or code in it, differs."""
    swaps, after = dict[CodeType, CodeType](), defaultdict[object, list[CodeType]](list)
    for code in codes(new):
        after[code.co_name, code.co_firstlineno].append(code)
    for code in codes(old):
        others = after[code.co_name, code.co_firstlineno]
        other = others.pop(0) if others else code
        if code.co_flags & inspect.CO_OPTIMIZED and bare(code) != bare(other):
            if code.co_freevars != other.co_freevars:  # functions that are there have other cells
                raise SystemExit(f"{code.co_name} cannot be given {other.co_freevars}")
            swaps[code] = other
    return swaps


def codes(code: CodeType) -> list[CodeType]:
    """``code``, and all codes in it."""
    inner = [codes(part) for part in code.co_consts if isinstance(part, CodeType)]
    return [code, *(part for parts in inner for part in parts)]


def bare(code: CodeType) -> CodeType:
    """``code`` without columns."""
    inner = [bare(part) if isinstance(part, CodeType) else part for part in code.co_consts]
    return code.replace(co_linetable=b"", co_consts=tuple(inner))


def function_of(test: str) -> str:
    """The test without the parameters of one case."""
    return test.partition("[")[0]


class Matrix:
    """A plugin that runs tests over faults instead of running them."""

    def __init__(self, args: argparse.Namespace, faults: Iterable[Fault]) -> None:
        self._args, self._faults = args, faults
        self._tests: dict[str, Row] = {}
        self._log = -1  # a file of who begins and who fails
        self._failed = set[str]()  # in this process

    @pytest.hookimpl(trylast=True)  # after a conftest has chosen a profile
    def pytest_configure(self) -> None:
        """Let searches end with the first example that fails, and not look for a smaller one."""
        from hypothesis import Phase, settings

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
        faults, jobs = self._living(), self._args.jobs
        self._tests = read([self._args.out])[0]
        if any(item.nodeid not in self._tests for item in session.items):
            ended = self._noticed(lambda: self._trace(session.items))
            if {*ended.values()} - {"failed"}:
                raise pytest.UsageError(f"without a fault: {ended}")
            self._tests = read([self._args.out])[0]
        fail = {function_of(test) for test, known in self._tests.items() if known["fails"]}
        print("left out, since they fail without a fault:", *sorted(fail))
        items = [item for item in session.items if function_of(item.nodeid) not in fail]
        work = [FORK.Process(target=self._try, args=(faults[n::jobs], items)) for n in range(jobs)]
        for worker in work:
            worker.start()
        try:
            for worker in work:
                worker.join()
        finally:  # also where the run is ended
            for worker in work:
                worker.terminate()
        if any(worker.exitcode for worker in work):
            raise pytest.UsageError("a worker has died; what it says is above")
        return True

    def _living(self) -> list[tuple[Row, Any]]:
        """The faults, each with the functions that it changes and their new code."""
        files = [Path(row["file"]).with_suffix("") for row, _ in self._faults]
        names = {".".join(file.parts[1:]).removesuffix(".__init__") for file in files}
        for name in ("numba", "torch._dynamo", *names):  # once, instead of in each fork
            with suppress(Exception):
                importlib.import_module(name)
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
            if self._args.planted and not faults[-1][1]:
                raise pytest.UsageError(f"no living function changes with {row['fault']}")
        return faults

    def _noticed(self, work: Callable[[], None]) -> dict[str, str]:
        """Who fails in a fork that does ``work``, or ends it, and how."""
        with tempfile.TemporaryDirectory(prefix="kill-", ignore_cleanup_errors=True) as folder:
            child = FORK.Process(target=self._begin, args=(folder, work))
            child.start()
            try:
                child.join()
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid or 0, signal.SIGKILL)  # and what tests have started
            lines = [line.split(" ", 1) for line in Path(folder, "log").read_text().splitlines()]
        noticed = {test: "failed" for what, test in lines if what == "!"}
        if child.exitcode:
            is_hang = child.exitcode in (-signal.SIGXCPU, -signal.SIGALRM)
            last = [test for what, test in lines if what == ">"][-1]
            noticed[last] = "hang" if is_hang else f"ended with {child.exitcode}"
        return noticed

    def _begin(self, folder: str, work: Callable[[], None]) -> None:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._log = os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT)
        for stream in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        os.environ["PYTEST_DEBUG_TEMPROOT"] = os.environ["TMPDIR"] = tempfile.tempdir = folder
        work()
        os._exit(0)  # and wait for nobody

    def _trace(self, items: Sequence[Any]) -> None:
        """Run ``items``, and write what each enters, its lines, and whether it does more."""
        started = list[str]()
        sys.addaudithook(lambda event, _: started.append(event) if event in UNSEEN else None)
        for item, after in zip(items, [*items[1:], None], strict=True):
            coverage = Coverage(data_file=None, include=["src/*"], config_file=False)
            started.clear()
            coverage.start()
            begun = time.perf_counter()
            self._run(item, after)
            seconds = round(time.perf_counter() - begun, 3)
            coverage.stop()
            data = coverage.get_data()
            lines = {os.path.relpath(file): data.lines(file) for file in data.measured_files()}
            size = len(inspect.getsourcelines(item.function)[0])
            # The zygote is a process that many tests share.
            unseen = bool(started) or "zygote" in item.fixturenames
            known = {"lines": lines, "seconds": seconds, "size": size, "unseen": unseen}
            self._tests[item.nodeid] = known
        for test, known in self._tests.items():
            known["fails"] = function_of(test) in self._failed
        self._append({"tests": self._tests})

    def _append(self, row: Row) -> None:
        with self._args.out.open("ab", buffering=0) as file:  # in one go: workers share it
            file.write(json.dumps(row).encode() + b"\n")

    def _run(self, item: pytest.Item, after: pytest.Item | None) -> None:
        os.write(self._log, f"> {function_of(item.nodeid)}\n".encode())
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)

    def _try(self, faults: Iterable[tuple[Row, Any]], items: Iterable[pytest.Item]) -> None:
        """Write who of ``items`` notices each fault."""
        for row, living in faults:
            begun = time.perf_counter()
            entered = {t: known["lines"].get(row["file"], ()) for t, known in self._tests.items()}
            reach = [i for i in items if living and {*row["lines"]} & {*entered[i.nodeid]}]
            asked = self._chosen(reach)
            noticed = self._noticed(partial(self._ask, asked, living)) if asked else {}
            are_all = len(asked) == len(reach)
            state = "noticed" if noticed else "not noticed" if are_all else "given up"
            state = state if reach else "not reached"
            seconds = round(time.perf_counter() - begun, 1)
            whole = are_all and not self._args.until
            known = {"state": state, "noticed": noticed, "seconds": seconds, "whole": whole}
            self._append(row | known)

    def _chosen(self, items: Sequence[Any]) -> Sequence[Any]:
        """The tests that may be asked, in this order."""
        if not self._args.until and not self._args.within:
            return items
        items = sorted(items, key=lambda item: self._tests[item.nodeid]["seconds"])
        # Cases of one test notice much the same, so that all tests come before a second case.
        cases = defaultdict[str, Iterator[int]](count)
        turns = {item: next(cases[function_of(item.nodeid)]) for item in items}
        items = sorted(items, key=turns.__getitem__)
        together = accumulate(self._tests[item.nodeid]["seconds"] for item in items)
        within = self._args.within or math.inf
        return [item for item, total in zip(items, together, strict=True) if total <= within]

    def _ask(self, items: Sequence[Any], living: Any) -> None:
        until = self._args.until
        usual = {item: self._tests[item.nodeid]["seconds"] for item in items}
        for function, code in living:
            function.__code__ = code
        for item, after in zip(items, [*items[1:], None], strict=True):
            limit = int(self._args.limit + 3 * usual[item])
            used = int(time.process_time())
            resource.setrlimit(resource.RLIMIT_CPU, (used + limit, resource.RLIM_INFINITY))
            signal.alarm(5 * limit)  # one that waits uses no CPU
            self._run(item, after)
            if until and len(self._failed) >= until:
                return


def run(args: argparse.Namespace, given: Sequence[str]) -> int:
    """Try the faults that ``--out`` does not have yet."""
    paths = [path for place in args.of for path in [place, *sorted(place.rglob("*.py"))]]
    files = [path.as_posix() for path in paths if path.is_file()]
    if args.planted:
        table = runpy.run_path("tools/planted_faults.py")["FAULTS"]
        faults = [planted(file, *pair) for file in files for pair in table.get(file, ())]
    else:
        compiled = tuple(f"src/preamp/kernels/{place}" for place in COMPILED)
        faults = [f for file in files if not file.startswith(compiled) for f in drawn(file)]
    args.out = args.out.absolute()
    args.out.touch()
    tried = {row["fault"] for row in read([args.out])[1]}
    faults = [fault for fault in faults if fault[0]["fault"] not in tried]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what has started ends too
    options = ["-q", "-s", "--tb=native", "-p", "no:cacheprovider", "-p", "no:xdist"]
    status = pytest.main([*options, *given], plugins=[Matrix(args, faults)]) if faults else 0
    return int(status) or report([args.out])


def read(paths: Iterable[Path]) -> tuple[dict[str, Row], list[Row]]:
    """What is known of tests, and the rows of all faults."""
    tests, rows = dict[str, Row](), list[Row]()
    for row in [json.loads(line) for path in paths for line in path.read_text().splitlines()]:
        if "tests" in row:
            tests.update(row["tests"])
        else:
            rows.append(row)
    return tests, rows


def report(paths: Iterable[Path]) -> int:
    """Print counts, and each fault that no test noticed."""
    rows = read(paths)[1]
    print(f"{len(rows)} faults; {sum(row['seconds'] for row in rows):.0f} s")
    for state in ("noticed", "not noticed", "given up", "not reached"):
        found = [row["fault"] for row in rows if row["state"] == state]
        print(f"{len(found)} {state}", *(found if state != "noticed" else ()), sep="\n  ")
    return 0


def spare(paths: Iterable[Path], keep: int) -> int:
    """Print tests that may go, the longest first, while ``keep`` notice what they notice.

    One that noticed nothing stays, and one that alone enters a line where nothing was noticed.
    """
    tests, rows = read(paths)
    rows = [row for row in rows if row["noticed"]]
    if ended := [row["fault"] for row in rows if not row.get("whole", True)]:
        raise SystemExit(
            f"not all tests were asked for {len(ended)} faults, as {ended[0]}: whether one is spare"
            " needs each that notices. Run without --until and --within, to another --out"
        )
    killers = [set(row["noticed"]) for row in rows]
    judged = {(row["file"], line) for row in rows for line in row["lines"]}
    sizes = {function_of(test): known["size"] for test, known in tests.items()}
    stays = {function_of(test) for test, known in tests.items() if known["unseen"]}
    enters = defaultdict[str, set[object]](set)
    for test, known in tests.items():
        lines = {(file, line) for file, lines in known["lines"].items() for line in lines}
        enters[function_of(test)] |= lines - judged
    entering = Counter(line for lines in enters.values() for line in lines)
    gone = []
    for name in sorted(set().union(*killers) - stays, key=lambda n: (-sizes[n], n)):
        mine = [them for them in killers if name in them]
        if all(len(them) > keep for them in mine) and all(entering[x] > 1 for x in enters[name]):
            gone.append(name)
            entering.subtract(enters[name])
            for them in mine:
                them.discard(name)
    print(*(f"{sizes[name]:5} {name}" for name in gone), sep="\n")
    print(f"{len(gone)} tests, {sum(sizes[name] for name in gone)} lines")
    return 0


def diff(before: Path, after: Path) -> int:
    """Print the faults that a matrix noticed and a later one does not."""
    now = {row["fault"]: row["state"] for row in read([after])[1]}
    lost = [r for r in read([before])[1] if r["noticed"] and now.get(r["fault"]) != "noticed"]
    for row in lost:
        state = now.get(row["fault"], "not tried")
        print(f"{state}: {row['fault']}; was noticed by", *row["noticed"])
    print(f"{len(lost)} faults were noticed, and are no more")
    return bool(lost)


def main(argv: Sequence[str]) -> int:
    """Do what the arguments say."""
    at = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(epilog="run: after -- come tests, and options of pytest")
    parser.add_argument("command", choices=("run", "report", "spare", "diff"))
    parser.add_argument("of", nargs="+", type=Path, help="run: what of src; else: matrices")
    parser.add_argument("--planted", action="store_true", help="the planted faults, not drawn ones")
    parser.add_argument("--out", type=Path, default=Path("matrix.jsonl"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=int, default=20, help="CPU seconds beyond thrice the usual")
    parser.add_argument("--until", type=int, help="run: ask no more tests once so many noticed")
    parser.add_argument("--within", type=float, help="run: the shortest tests of so many seconds")
    parser.add_argument("--keep", type=int, default=2, help="so many notice each fault")
    args = parser.parse_intermixed_args(argv[:at])
    if args.command == "run":
        return run(args, argv[at + 1 :])
    if args.command == "spare":
        return spare(args.of, args.keep)
    return diff(*args.of) if args.command == "diff" else report(args.of)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
