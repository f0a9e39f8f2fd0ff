# SPDX-License-Identifier: BSD-3-Clause
"""``preamp estimate``: options, output, refusals."""

import functools
import json
import re
from typing import Any

import pytest
from torch import nn
from typer.testing import CliRunner, Result

import preamp
from kit.refusals import assert_approved
from preamp.cli.app import app


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
    assert_approved("cli", "masters that no level has", done.output.rstrip("\n"))


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
def test_the_options_of_storage_are_the_arguments(place: Any) -> None:
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


def test_levels_that_keep_their_gradients_are_named() -> None:
    why = "A dynamic loss scale needs all gradients of a step."
    asked = ("estimate", "--params", "5", "--optimizer", "FusedAdam", "--release-gradients")
    done = invoke(*asked)
    assert done.stdout.rstrip().endswith(f"Left out: O1, O2. {why}")
    for options in (("--levels", "O5"), ("--place", "host")):
        assert "Left out" not in invoke(*asked, *options).stdout


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


def test_estimate_of_a_very_large_model_fits_its_columns() -> None:
    done = invoke("estimate", "--params", "1e18", "--levels", "O2")
    assert "13.88 EiB" in done.output
    assert "…" not in done.output


def test_estimate_without_an_optimizer() -> None:
    done = invoke("estimate", "--params", "10", "--optimizer", "none", "--json")
    assert {row["optimizer_state"] for row in json.loads(done.output)} == {0}


REFUSED = {
    "estimate nothing": "",
    "estimate a model and a number": "torch.nn:Linear(2,2) --params 5",
    "estimate a model and no parameters": "torch.nn:Linear(2,2) --params 0",
    "estimate a model that is not there": "torch.nn:Linea(2,2)",
    "estimate a model that cannot be made": "torch.nn:Linear(2)",
    "estimate a model of no module": "Linear(2,2)",
    "estimate no parameters": "--params 0",
    "estimate too many parameters": "--params 1e30",
    "estimate nan parameters": "--params nan",
    "estimate an unknown level": "--params 5 --levels O9",
    "estimate unknown sharding": "--params 5 --sharding zero9",
    "estimate sharding of one rank": "--params 5 --sharding fsdp",
    "estimate an unknown optimizer": "--params 5 --optimizer Adm",
    "estimate an optimizer's failure": "torch.nn:Embedding(0,3) --optimizer Adafactor",
    "estimate an unknown storage": "--params 5 --storage foo",
    "estimate an unknown place": "--params 5 --place hots",
    "estimate a place for a foreign optimizer": "--params 5 --place host",
    "estimate a place and a card": "--params 5 --place host --card-gib 1",
    "estimate a host without a card": "--params 3e9 --host-gib 64",
}


@pytest.mark.parametrize("name", REFUSED)
def test_estimate_refuses(name: str) -> None:
    done = invoke("estimate", *REFUSED[name].split())
    assert done.exit_code == 2
    assert_approved("cli", name, done.output.rstrip("\n"))
