# SPDX-License-Identifier: BSD-3-Clause
"""``preamp estimate`` and ``preamp plan``: options, output, refusals."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn
from typer.testing import CliRunner, Result

import preamp
from preamp.cli.app import app
from preamp.planning.report import bytes_text

SCRIPT = """
from __future__ import annotations
import sys
assert len(sys.argv) == 1
print("the script speaks")
from dataclasses import KW_ONLY, dataclass
import torch
from torch import nn
import helper

@dataclass
class Settings:
    _: KW_ONLY
    width: int = 4

def loss_fn(model, batch):
    print("the loss speaks")
    return model(batch).float().square().mean()

def make():
    model = nn.Linear(Settings().width, helper.OUT)
    return model, loss_fn, torch.ones(8, 4), torch.optim.SGD(model.parameters(), lr=0.1)

model = nn.Linear(4, 4)
data = torch.ones(8, 4)

def nothing():
    return model

def two():
    return model, loss_fn

def needing(width):
    return model, loss_fn, data

def leaving():
    raise SystemExit(0)

def broken():
    raise ValueError("a bug of the script's own")

if __name__ == "__main__":
    raise SystemExit("the training itself was run")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    # Not another dict in place of sys.modules: torch goes on importing into the one there was.
    for name in ("helper", "preamp_planned_script"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "helper.py").write_text("OUT = 3\n", encoding="utf-8")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    yield str(path)
    preamp.remove_apex_alias()
    sys.modules.pop("helper", None)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_estimate_prints_a_row_for_each_level() -> None:
    done = invoke("estimate", "--params", "7e9", "--optimizer", "FusedAdam", "--world-size", "8")
    assert done.exit_code == 0, done.output
    assert "7,000,000,000 parameters, FusedAdam, one of 8 ranks" in done.output
    lines = [line.split() for line in done.output.splitlines()]
    rows = {line[0]: line for line in lines if line and line[0] in preamp.OPT_LEVELS}
    assert list(rows) == list(preamp.OPT_LEVELS)
    assert rows["O5"][1:3] == ["13.04", "GiB"]


def test_estimate_prints_json() -> None:
    done = invoke(
        *("estimate", "torch.nn:Linear(10, 20, bias=False)", "--optimizer", "SGD(momentum=0.9)"),
        *("--levels", "O0,O2", "--world-size", "2", "--sharding", "fsdp", "--json"),
    )
    assert done.exit_code == 0, done.output
    o0, o2 = json.loads(done.output)
    share = 100 * 4  # of 200 elements
    assert (o0["opt_level"], o0["parameters"], o0["optimizer_state"]) == ("O0", 200, share)
    assert (o2["weights"], o2["masters"], o2["sharding"]) == (200, share, "fsdp")


def test_estimate_of_a_storage_shows_the_levels_that_can_have_it() -> None:
    options = ("estimate", "--params", "1e6", "--optimizer", "FusedAdam", "--storage")
    done = invoke(*options, "compact", "--json")
    found = {row["opt_level"]: row["total"] for row in json.loads(done.stdout)}
    assert found == {"O2": 8_062_892, "O5": 8_062_892}
    done = invoke(*options, "compact")
    assert done.stdout.startswith("1,000,000 parameters, FusedAdam, storage compact")
    done = invoke(*options, "split", "--levels", "O1")
    assert done.exit_code == 2
    assert "which has no masters" in done.output


def rows_of(output: str) -> list[list[str]]:
    """Cells of the rows of tables, which begin with a level."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in output.splitlines()]
    return [line for line in lines if line[0] in preamp.OPT_LEVELS]


def test_estimate_tells_the_device_from_the_host() -> None:
    options = ("estimate", "--params", "1e9", "--optimizer", "FusedAdam", "--levels", "O5")
    placed = (*options, "--storage", "split", "--place", "host")
    (found,) = json.loads(invoke(*placed, "--json").stdout)
    assert (found["on_device"], found["on_host"]) == (4 * 10**9 + 12, 10 * 10**9 + 3 * 2**25)
    assert found["total"] == 14 * 10**9 + 12
    text = invoke(*placed).stdout
    assert "total" not in text  # no number is of both
    assert "state on the host card host" in " ".join(text.split())
    assert "7.45 GiB 3.73 GiB 9.41 GiB" in " ".join(text.split())
    assert ["O5", "96.00 MiB"] in rows_of(text)
    assert "3.73 GiB with storage=preamp.Storage(masters='split', place='host'), the rest" in (
        " ".join(invoke(*options).stdout.split())
    )


def test_estimate_says_what_fits() -> None:
    options = ("estimate", "--params", "3e9", "--optimizer", "FusedAdam", "--levels", "O5")
    done = invoke(*options, "--card-gib", "20", "--host-gib", "32")
    released = "preamp.Storage(masters='split', moments='8bit', release_gradients=True)"
    sentences, table = done.stdout.split("\n\n", 1)
    assert " ".join(sentences.split()) == (
        f"O5 with storage={released}: 16.94 GiB on the device. "
        "O5 with storage=preamp.Storage(masters='split', place='host'): 11.18 GiB on the device, "
        "28.03 GiB on the host."
    )
    assert table.startswith("Less is kept with these arguments of preamp.Storage:")
    assert rows_of(table) == [
        ["O5", "split", "8bit", "False", "host", "11.18 GiB", "11.44 GiB"],
        ["O5", "split", "8bit", "True", "host", "5.59 GiB", "17.03 GiB"],
    ]
    assert table.rstrip().endswith("Activations, what is accumulated, saves and loads come on top.")
    done = invoke(*options, "--card-gib", "20", "--json")  # of the host there is enough
    assert [row["place"] for row in json.loads(done.stdout)] == ["device", *["host"] * 6]
    done = invoke(*options, "--card-gib", "1")
    assert done.exit_code == 0
    assert done.stdout.startswith("Nothing fits: no level with any storage keeps as little.")
    assert "in place of" not in done.stdout


def test_estimate_names_the_fused_optimizer_with_which_it_fits() -> None:
    options = ("estimate", "--params", "3e9", "--optimizer", "AdamW(lr=0.01)", "--levels", "O5")
    done = invoke(*options, "--card-gib", "20", "--host-gib", "32")
    words = " ".join(done.stdout.split())
    assert words.startswith("Nothing fits: no level with any storage keeps as little. With Fused")
    assert "With FusedAdam(lr=0.01) in place of AdamW there is: O5 with storage=preamp.Sto" in words
    assert "11.18 GiB on the device, 28.03 GiB on the host. Less" in words
    assert json.loads(invoke(*options, "--card-gib", "20", "--json").stdout) == []


def test_the_fused_optimizer_is_counted_with_the_same_arguments() -> None:
    options = ("estimate", "--params", "3e9", "--levels", "O5", "--card-gib", "17", "--optimizer")
    words = " ".join(invoke(*options, "SGD(momentum=0.9)").stdout.split())
    assert "With FusedSGD(momentum=0.9) in place of SGD there is: O5 with" in words
    assert "release_gradients=True): 14.06 GiB on the device." in words  # momentum included
    assert "in place of" not in invoke(*options, "AdamW(amsgrad=True)").stdout


def test_estimate_names_it_beside_a_level_that_fits_without() -> None:
    options = ("estimate", "--params", "3e9", "--card-gib", "24", "--levels", "O5,O3")
    words = " ".join(invoke(*options).stdout.split())
    assert words.startswith('O3 with storage="full": 22.35 GiB on the device. With FusedAdam in')
    assert words.count("O5 with") == 2
    assert words.count("O3 with") == 1
    done = invoke(*options[:-1], "O5", "--optimizer", "RMSprop")  # has no fused twin
    assert "in place of" not in done.stdout


def test_estimate_tells_what_the_fused_optimizer_would_keep() -> None:
    options = ("estimate", "--params", "3e9", "--levels", "O2,O5")
    words = " ".join(invoke(*options).stdout.split())
    told = "FusedAdam makes the update of AdamW. At O5 44.70 GiB are kept; 39.12 GiB with"
    assert words.count(told) == 1
    assert '22.53 GiB with storage="compact"; 16.94 GiB' in words.partition(told)[2]
    for other in ("FusedAdam", "RMSprop", "none"):
        assert "makes the update" not in invoke(*options, "--optimizer", other).stdout
    assert len(json.loads(invoke(*options, "--json").stdout)) == 2


@pytest.mark.parametrize("place", ["device", "host"])
def test_the_options_of_storage_are_the_arguments(place: Any, script: str) -> None:
    storage = preamp.Storage(masters="split", moments="8bit", place=place, release_gradients=True)
    wanted = preamp.estimate(
        functools.partial(nn.Linear, 4, 3),
        preamp.OPT_LEVELS["O5"].replace(storage=storage),
        "FusedAdam",
    )
    options = ("--storage", "compact", "--place", place, "--release-gradients", "--json")
    asked = ("estimate", "torch.nn:Linear(4, 3)", "--optimizer", "FusedAdam")
    found = {row["opt_level"]: row for row in json.loads(invoke(*asked, *options).stdout)}
    # A dynamic loss scale needs the gradients, unless they wait on the host.
    assert list(found) == (["O5"] if place == "device" else ["O2", "O5"])
    assert found["O5"] == json.loads(json.dumps(wanted.to_json()))
    with Path(script).open("a", encoding="utf-8") as file:
        file.write(FUSED)
    asked = ("plan", script, "--names", "fused", "--levels", "O5", "--verify", "0")
    planned = json.loads(invoke(*asked, *options).stdout)["levels"]["O5"]["memory"]
    assert (planned["storage"], planned["gradients"]) == (wanted.storage, wanted.gradients)
    assert planned["optimizer_state"] == wanted.optimizer_state


FUSED = """
def fused():
    from preamp.optimizers import FusedAdam
    model = nn.Linear(4, 3)
    return model, loss_fn, data, FusedAdam(model.parameters(), lr=0.1)
"""


def test_plan_says_of_which_place_a_number_is(script: str) -> None:
    with Path(script).open("a", encoding="utf-8") as file:
        file.write(FUSED)
    options = ("--names", "fused", "--place", "host", "--levels", "O5", "--verify", "0")
    memory = json.loads(invoke("plan", script, *options, "--json").stdout)["levels"]["O5"]["memory"]
    done = invoke("plan", script, *options)
    assert "kept on card  on host  peak on card" in done.stdout
    kept, there, peak = rows_of(done.stdout)[-1][3:6]
    assert kept == f"{4 * 15 + 12} B"
    assert there == bytes_text(12 * 15 + memory["staging"])
    assert peak == bytes_text(memory["peak"])
    assert memory["peak"] >= 4 * 15 + 12


def test_levels_that_keep_their_gradients_are_named(script: str) -> None:
    with Path(script).open("a", encoding="utf-8") as file:
        file.write(FUSED)
    why = "A dynamic loss scale needs all gradients of a step."
    asked = ("estimate", "--params", "5", "--optimizer", "FusedAdam", "--release-gradients")
    done = invoke(*asked)
    assert done.stdout.rstrip().endswith(f"Left out: O1, O2. {why}")
    for options in (("--levels", "O5"), ("--place", "host")):
        assert "Left out" not in invoke(*asked, *options).stdout
    planned = ("plan", script, "--names", "fused", "--verify", "0", "--release-gradients")
    words = " ".join(invoke(*planned, "--levels", "O2,O5").stdout.split())
    assert f"- At O2 gradients are not released. {why}" in words
    assert why not in invoke(*planned, "--levels", "O5").stdout
    assert why not in invoke(*planned[:-1], "--levels", "O2").stdout


def test_a_caption_is_there_with_its_column() -> None:
    asked = ("estimate", "--params", "5", "--levels", "O5", "--optimizer")
    fused, torchs = (
        " ".join(invoke(*asked, optimizer).stdout.split()) for optimizer in ("FusedAdam", "AdamW")
    )
    on_host = " ".join(invoke(*asked, "FusedAdam", "--place", "host").stdout.split())
    in_step, staging = "More in step: while the optimizer steps", "Staging is memory of the host"
    assert [in_step in text for text in (fused, torchs, on_host)] == [False, True, False]
    assert [staging in text for text in (fused, torchs, on_host)] == [False, False, True]
    assert "Activations are not counted." in fused


def test_estimate_refuses_a_host_without_a_card() -> None:
    done = invoke("estimate", "--params", "3e9", "--host-gib", "64")
    assert done.exit_code != 0
    assert "Got --host-gib without --card-gib" in done.output


def test_estimate_of_a_very_large_model_fits_its_columns() -> None:
    done = invoke("estimate", "--params", "1e18", "--levels", "O2")
    assert "13.88 EiB" in done.output
    assert "…" not in done.output


def test_estimate_without_an_optimizer() -> None:
    done = invoke("estimate", "--params", "10", "--optimizer", "none", "--json")
    assert {row["optimizer_state"] for row in json.loads(done.output)} == {0}


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ((), "Got neither a model nor --params"),
        (("torch.nn:Linear(2, 2)", "--params", "5"), "Got both a model and --params"),
        (("torch.nn:Linea(2, 2)",), "Cannot import torch.nn:Linea"),
        (("--params", "5", "--levels", "O9"), "'O9' is not known"),
        (("--params", "5", "--sharding", "zero9"), "'zero9' is not known"),
        (("--params", "5", "--optimizer", "Adm"), "'Adm' is not known"),
        (
            ("--params", "5", "--sharding", "fsdp"),
            "Got --sharding fsdp without --world-size. Shared out is between ranks, and one rank "
            "has everything. Pass for example --world-size 8.",
        ),
        (
            ("--params", "5", "--storage", "foo"),
            "--storage 'foo' is not known. Choose full, split, compact. Pass for example",
        ),
        (("--params", "5", "--place", "hots"), "place='hots'. It takes 'device', 'host'"),
        (
            ("--params", "5", "--card-gib", "-1"),
            "Got --card-gib -1. A card has more than 0 GiB. Pass for example --card-gib 80.",
        ),
        (("--params", "5", "--card-gib", "nan"), "Got --card-gib nan. A card has more than 0 GiB"),
        (
            ("--params", "5", "--card-gib", "1", "--host-gib", "-1"),
            "Got --host-gib -1. A host has 0 GiB for training, or more. Pass for example",
        ),
        (("--params", "5", "--card-gib", "1", "--host-gib", "nan"), "Got --host-gib nan. A host"),
        (
            ("--params", "5", "--place", "host", "--card-gib", "1"),
            "Got --card-gib and preamp.Storage(place='host'). With --card-gib the storages that",
        ),
        (("--params", "5", "--place", "host"), "place='host', and the optimizer is AdamW"),
        (("torch.nn:Linear(2)",), "cannot be made"),
        (("torch.nn:Linear(2, 2)", "--params", "0"), "Got both a model and --params"),
        (("Linear(2, 2)",), "'Linear' does not name a factory. A factory is written package.mod"),
        (
            ("--params", "0"),
            "0 is not a number of parameters. It is a whole number from 1 to 1e+18",
        ),
        (("--params", "1e30"), "1e+30 is not a number of parameters. It is a whole number from"),
        (("--params", "nan"), "nan is not a number of parameters"),
        (
            ("torch.nn:Embedding(0, 3)", "--optimizer", "Adafactor"),
            "with a parameter of shape (0, 3)",
        ),
    ],
)
def test_estimate_refuses(options: tuple[str, ...], part: str) -> None:
    done = invoke("estimate", *options)
    assert done.exit_code == 2
    assert done.output.startswith("Error: ")
    assert part in done.output


QUICK = ("--levels", "O5", "--steps", "1", "--verify", "1")


def test_plan_runs_make(script: str) -> None:
    done = invoke("plan", script, *QUICK)
    assert done.exit_code == 0, done.output
    assert "\nRecommended: O5\n" in done.output


def test_plan_takes_names_and_prints_json(script: str) -> None:
    done = invoke("plan", script, "--names", "model,loss_fn,data", *QUICK, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)  # nothing else is on it
    assert "the script speaks\nthe loss speaks\n" in done.stderr
    assert report["recommended"] == "O5"
    assert report["levels"]["O5"]["memory"]["optimizer"] == "AdamW"
    assert report["levels"]["O5"]["memory"]["parameters"] == 20


def test_plan_looks_at_levels_whose_names_have_spaces(script: str) -> None:
    steps = ("--steps", "1", "--verify-steps", "0", "--json")
    done = invoke("plan", script, "--levels", "O2 O4, O5 without masters", *steps)
    assert done.exit_code == 0, done.output
    assert list(json.loads(done.stdout)["levels"]) == ["O2", "O4", "O5 without masters"]


def test_plan_gives_the_script_the_spec_of_a_module(script: str) -> None:
    lines = "from importlib.util import find_spec\nassert find_spec(__name__).origin == __file__\n"
    with Path(script).open("a", encoding="utf-8") as file:
        file.write(lines)
    done = invoke("plan", script, "--verify", "0")
    assert done.exit_code == 0, done.output


def test_plan_supplies_apex(script: str) -> None:
    first = "from apex.optimizers import FusedAdam\nfrom apex import amp\n"
    source = (
        Path(script).read_text(encoding="utf-8").replace("import torch\n", f"{first}import torch\n")
    )
    last = "model, loss_fn, data, FusedAdam(model.parameters(), lr=0.1)"
    Path(script).write_text(f"{source}\ndef fused():\n    return {last}\n", encoding="utf-8")
    done = invoke("plan", script, "--names", "fused", *QUICK, "--json")
    assert done.exit_code == 0, done.output
    memory = json.loads(done.stdout)["levels"]["O5"]["memory"]
    assert memory["optimizer"] == "FusedAdam"


def test_plan_of_a_script_that_does_without_apex_needs_no_alias(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "apex", ModuleType("apex"))  # in the way of the alias
    done = invoke("plan", script, *QUICK)
    assert done.exit_code == 0, done.output


def test_plan_trains_every_level_as_long_as_asked_and_writes_a_page(
    script: str, tmp_path: Path
) -> None:
    page = tmp_path / "plan.html"
    options = ("--levels", "O2,O5", "--verify", "5", "-o", str(page))
    done = invoke("plan", script, *options)
    assert done.exit_code == 0, done.output
    assert done.output.count("  5 steps") == 2
    assert "Loss by step" in page.read_text(encoding="utf-8")
    page.unlink()
    done = invoke("plan", script, *options[:-1], str(tmp_path / "train.py" / "plan.html"))
    assert done.exit_code == 2
    assert "Recommended: " in done.stdout  # the answer comes before the page
    assert "Error: " in done.stderr


BUGS = {
    "an import": ("import no_such_module", "", ["<module>"]),
    "the module": ("1 / 0", "", ["<module>"]),
    "its own function": ("", "def make():\n    return helper()", ["make", "helper"]),
    "the loss": ("", "def loss_fn(model, batch):\n    return helper()", ["loss_fn", "helper"]),
    "initialize": ("import preamp; preamp.initialize(None, opt_level='bf16')", "", ["<module>"]),
    "its syntax": ("def f(:", "", []),
    "a nul byte": ("x = '\0'", "", []),
}


@pytest.mark.full
@pytest.mark.parametrize("bug", BUGS)
def test_the_traceback_of_a_script_begins_in_the_script(bug: str, tmp_path: Path) -> None:
    first, last, functions = BUGS[bug]
    path = tmp_path / "broken.py"
    path.write_text(f"{first}\n{BROKEN}\n{last}\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "preamp", "plan", str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("  File ")]
    own = [line for line in lines if f'"{path}"' in line]
    assert len(own) == max(len(functions), 1)
    assert lines[: len(own)] == own
    for line, function in zip(own, functions, strict=False):
        assert line.endswith(f"in {function}")
    assert len(done.stderr.splitlines()) < 20
    assert not any("cli" in line or "typer" in line for line in lines)


BROKEN = """
from torch import nn, ones

def helper():
    raise KeyError("here")

def loss_fn(model, batch):
    return model(batch).sum()

def make():
    return nn.Linear(4, 4), loss_fn, ones(2, 4)
"""


def test_errors_of_the_script_keep_their_traceback(script: str) -> None:
    done = invoke("plan", script, "--names", "broken")
    assert isinstance(done.exception, ValueError)
    assert str(done.exception) == "a bug of the script's own"


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("missing.py",), "There is no file 'missing.py'"),
        (("{script}", "--names", "build"), "defines no 'build'"),
        (("{script}", "--names", "nothing"), "nothing() in {script} returned something else than"),
        (("{script}", "--names", "two"), "two() in {script} returned something else than three"),
        (("{script}", "--names", "model"), "model in {script} is Linear, not a function that"),
        (("{script}", "--names", "data"), "data in {script} is Tensor, not a function that"),
        (("{script}", "--names", "Settings"), "Settings in {script} is Settings, not a function"),
        (("{script}", "--names", "needing"), "needing() in {script} takes arguments. One name is"),
        (("{script}", "--names", "leaving"), "{script} ended itself by sys.exit(0). It is run for"),
        (("{script}", "--names", "model,loss_fn"), "Got --names model,loss_fn. It is the name of"),
        (("{script}", "--names", "model,,data"), "Got --names model,,data. It is the name of one"),
        (
            ("{script}", "--names", "model,data,loss_fn"),
            "loss_fn is Tensor, which cannot be called",
        ),
        (("{script}", "--levels", "O9"), "'O9' is not known"),
        (("{script}", "--steps", "0"), "steps=0 cannot be used"),
    ],
)
def test_plan_refuses(options: tuple[str, ...], part: str, script: str) -> None:
    for more in ((), ("--json",)):
        done = invoke("plan", *(option.format(script=script) for option in options), *more)
        assert done.exit_code == 2
        assert not json_in(done.stdout)
        assert part.format(script=script) in done.stderr.partition("Error: ")[2]


def json_in(text: str) -> bool:
    return "{" in text


def test_plan_refuses_a_storage_before_the_script_runs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('it ran')", encoding="utf-8")
    done = invoke("plan", str(script), "--storage", "compakt")
    assert done.exit_code == 2
    assert "'compakt' is not known. Choose full, split, compact." in done.output
    assert "it ran" not in done.output
