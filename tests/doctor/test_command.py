# SPDX-License-Identifier: BSD-3-Clause
"""``preamp doctor`` as a user calls it."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from alias.harness import Done, Zygote, call, run_python
from doctor.cases import BUGS, FLOAT32, GRAD_SCALER
from preamp.cli import doctor as command
from preamp.doctor import RULES, explain_text

BUG = BUGS["clipping without unscale_"].text
QUIET = "import warnings\nwarnings.simplefilter('ignore')\n"

Doctor = Callable[..., Done]


@pytest.fixture
def doctor(zygote: Zygote, tmp_path: Path) -> Doctor:
    """``preamp doctor`` on a text, in a process of its own."""

    def call_doctor(text: str, *options: str, arguments: tuple[str, ...] = ()) -> Done:
        (tmp_path / "train.py").write_text(QUIET + text, "utf-8")
        return zygote.preamp(("doctor", *options, "train.py", *arguments), tmp_path)

    return call_doctor


@pytest.mark.full
def test_the_front_door(tmp_path: Path) -> None:
    """The others are forked from one process; this one is started as a user starts it."""
    (tmp_path / "train.py").write_text(QUIET + BUG, "utf-8")
    done = run_python(("-m", "preamp", "doctor", "--strict", "train.py"), tmp_path)
    assert done.returncode == 1
    assert "PA101 error" in done.stderr


def test_a_report_and_its_file(doctor: Doctor, tmp_path: Path) -> None:
    done = doctor(BUG + "print('done')\n", "--json", "out.json")
    assert done.returncode == 0
    assert done.stdout == "done\n"
    line = BUG.splitlines().index(next(x for x in BUG.splitlines() if "# <-" in x)) + 3
    assert done.stderr.startswith(
        "\npreamp doctor: 1 error in 4 optimizer steps, 1 of them skipped\n\n"
    )
    assert f"train.py:{line}: PA101 error: Gradients are clipped while they" in done.stderr
    assert "the loss scale on them is 1024." in done.stderr.replace("\n  ", " ")
    report = json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert report["steps"] == 4
    assert [finding["rule"] for finding in report["findings"]] == ["PA101"]
    assert report["findings"][0]["line"] == line
    assert report["findings"][0]["numbers"]["loss_scale"] == 1024.0


@pytest.mark.parametrize(
    ("text", "status"),
    [(BUG, 1), (GRAD_SCALER, 0), (BUG + "import sys\nsys.exit(3)\n", 3), ("1 / 0\n", 1)],
    ids=["bug", "healthy", "own status", "exception"],
)
def test_strict(doctor: Doctor, text: str, status: int) -> None:
    assert doctor(text, "--strict").returncode == status


IN_A_HOOK = """import torch
x = torch.ones(1, requires_grad=True)
x.register_hook(lambda grad: 1 / 0)
x.sum().backward()
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "end", ["def f():\n    raise ValueError('oh')\nf()\n", IN_A_HOOK], ids=["raised", "in a hook"]
)
def test_the_traceback_is_that_of_python(doctor: Doctor, tmp_path: Path, end: str) -> None:
    """Also where the doctor's own frames stand between those of the script."""
    done = doctor(BUG + end)
    plain = run_python(("train.py",), tmp_path)
    assert done.returncode == plain.returncode == 1
    assert done.stderr.startswith(plain.stderr)
    assert "PA101 error" in done.stderr[len(plain.stderr) :]


def test_an_interrupt(doctor: Doctor) -> None:
    done = doctor(BUG + "raise KeyboardInterrupt\n")
    assert done.returncode == -signal.SIGINT
    assert "PA101 error" in done.stderr


@pytest.mark.parametrize(("end", "status"), [("", 0), ("sys.exit(3)", 3), ("1 / 0", 1)])
def test_standard_output_holds_the_json_alone(doctor: Doctor, end: str, status: int) -> None:
    text = f"{BUG}import os, sys\nprint('done', flush=True)\nos.system('echo child')\n{end}\n"
    done = doctor(text, "--select", "pa1", "--json", "-")
    assert done.returncode == status
    report = json.loads(done.stdout)
    assert [finding["rule"] for finding in report["findings"]] == ["PA101"]
    assert "done\nchild\n" in done.stderr
    assert "PA101 error" in done.stderr


def test_options_of_the_script_are_its_own(doctor: Doctor) -> None:
    text = "import sys\nprint(__name__, sys.argv)\n" + FLOAT32.replace("range(4)", "range(10**9)")
    options = ("--steps", "2", "--select", "PA4")
    done = doctor(text, *options, arguments=("--steps", "9", "--list", "-m"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "__main__ ['train.py', '--steps', '9', '--list', '-m']\n"
    assert "no findings in 2 optimizer steps" in done.stderr


@pytest.mark.full
def test_a_module_and_its_workers(zygote: Zygote, tmp_path: Path) -> None:
    """Workers end with the program's exit code, and report nothing of their own."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("", "utf-8")
    text = (
        "import multiprocessing, sys\n"
        "def work(x):\n    return x + 1\n"
        "if __name__ == '__main__':\n"
        "    for method in ('fork', 'spawn'):\n"
        "        with multiprocessing.get_context(method).Pool(1) as pool:\n"
        "            print(pool.map(work, [1, 2]), sys.argv[1:])\n"
    )
    (tmp_path / "pkg" / "train.py").write_text(QUIET + text, "utf-8")
    done = zygote.preamp(("doctor", "-m", "pkg.train", "--x"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[2, 3] ['--x']\n" * 2
    assert done.stderr.count("preamp doctor:") == 1
    assert "The script took no optimizer step" in done.stderr


# -- without a process of its own ------------------------------------------------------------


def test_list_and_explain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "doctor", "--list") == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == list(RULES)
    for rule in RULES.values():
        for spelling in (rule.id, rule.id.lower()):
            assert call(monkeypatch, "doctor", "--explain", spelling) == 0
            assert capsys.readouterr().out == explain_text(rule)


WRONG = {
    ("--explain", "PA999"): "There is no rule 'PA999'. Rules are PA101,",
    ("--select", "PX", "x.py"): "There is no rule 'PX'. Rules are PA101,",
    ("--select", "PA1", "--ignore", "PA", "x.py"): "No rule is left to look for.",
    ("--select", ",", "x.py"): "--select ',' names no rule. It takes ids,",
    ("--ignore", "", "x.py"): "--ignore '' names no rule. It takes ids,",
    ("missing.py",): "There is no file 'missing.py'. It runs one Python file, or one module named "
    "by -m. Call preamp doctor script.py, or preamp doctor -m module; preamp doctor --help says",
    (): "Got nothing in place of a program.",
    ("-m", "no.such.module"): "There is no module no.such.module that can be run.",
    ("--steps", "0", "x.py"): "Invalid value for '--steps'",
    ("--steps", "some", "x.py"): "Invalid value for '--steps'",
    ("--json", "no/folder/out.json", __file__): "no/folder/out.json cannot be written: No such",
    ("--nonsense", "x.py"): "No such option: --nonsense",
}


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_what_is_wrong_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert call(monkeypatch, "doctor", *arguments) == 2
    assert WRONG[arguments] in capsys.readouterr().err


def test_only_the_first_rank_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    examination = command.Examination(command.select_rules())
    file = str(tmp_path / "out.json")
    monkeypatch.setenv("RANK", "1")
    assert command._open(file) is None
    command._report(examination, None, os.getpid())
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "out.json").exists()


# -- whole training programs that have no such bug ------------------------------------------------

ROOT = Path(__file__).parents[2]
PROGRAMS = (
    ("tests/scripts/imagenet.py", "--opt-level", "O2", "--epochs", "1"),
    ("examples/01_minimal.py", "--steps", "20"),
    ("examples/02_accumulation_and_clipping.py", "--steps", "20"),
    ("examples/03_gan.py", "--steps", "20"),
)


@pytest.mark.parametrize(
    "program",
    [pytest.param(p, marks=[pytest.mark.full] if "tests/" in p[0] else []) for p in PROGRAMS],
    ids=lambda program: Path(program[0]).stem,
)
def test_a_healthy_program_is_clean(
    zygote: Zygote, tmp_path: Path, program: tuple[str, ...]
) -> None:
    script, *arguments = program
    options = ("doctor", "--steps", "20", "--strict")
    done = zygote.preamp((*options, str(ROOT / script), *arguments), tmp_path)
    assert done.returncode == 0, done.stderr
    # Some versions of triton, loaded beforehand, say more when Python ends.
    assert done.stderr.startswith("\npreamp doctor: no findings in 20 optimizer steps\n")
