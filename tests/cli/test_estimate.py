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


def found(*arguments: str) -> list[dict[str, Any]]:
    done = invoke("estimate", *arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


FIT = "--params 3e9 --levels O5 --card-gib"
PAGES = {
    "estimate on ranks": "--params 7e9 --optimizer FusedAdam --world-size 8",
    "estimate a storage": "--params 1e6 --optimizer FusedAdam --storage compact",
    "estimate state on the host": (
        "--params 1e9 --optimizer FusedAdam --levels O5 --storage split --place host"
    ),
    "estimate what is smaller": "--params 1e9 --optimizer FusedAdam --levels O5",
    "estimate what fits": f"{FIT} 20 --host-gib 32 --optimizer FusedAdam",
    "estimate that nothing fits": f"{FIT} 1 --optimizer FusedAdam",
    "estimate what fits with the fused one": f"{FIT} 20 --host-gib 32 --optimizer AdamW(lr=0.01)",
    "estimate what fits with its momentum": f"{FIT} 17 --optimizer SGD(momentum=0.9)",
    "estimate an option that no fused one has": f"{FIT} 17 --optimizer AdamW(amsgrad=True)",
    "estimate one level that fits without": "--params 3e9 --card-gib 24 --levels O5,O3",
    "estimate an optimizer without a fused twin": f"{FIT} 24 --optimizer RMSprop",
    "estimate what the fused one would keep": "--params 3e9 --levels O2,O5",
    "estimate nothing of no optimizer": "--params 3e9 --levels O5 --optimizer none",
    "estimate gradients that wait": (
        "--params 5 --optimizer FusedAdam --release-gradients --place host"
    ),
    "estimate a very large model": "--params 1e18 --levels O2",
}


@pytest.mark.parametrize("name", PAGES)
def test_what_is_printed(name: str) -> None:
    """Word by word, wherever lines end."""
    done = invoke("estimate", *PAGES[name].split())
    assert done.exit_code == 0, done.output
    assert_approved("cli", name, re.sub("━+", "━", " ".join(done.stdout.split())))


def test_estimate_prints_json() -> None:
    share = 100 * 4  # of 200 elements
    model = "torch.nn:Linear(10, 20, bias=False)"
    options = ("--levels", "O0,O2", "--world-size", "2", "--sharding", "fsdp")
    o0, o2 = found(model, "--optimizer", "SGD(momentum=0.9)", *options)
    assert (o0["opt_level"], o0["parameters"], o0["optimizer_state"]) == ("O0", 200, share)
    assert (o2["weights"], o2["masters"], o2["sharding"]) == (200, share, "fsdp")
    assert {row["optimizer_state"] for row in found("--params", "10", "--optimizer", "none")} == {0}
    compact = found("--params", "1e6", "--optimizer", "FusedAdam", "--storage", "compact")
    assert {row["opt_level"]: row["total"] for row in compact} == dict.fromkeys(
        ("O2", "O5"), 8_062_892
    )
    options = ("--params", "1e9", "--optimizer", "FusedAdam", "--levels", "O5")
    (placed,) = found(*options, "--storage", "split", "--place", "host")
    assert (placed["on_device"], placed["on_host"]) == (4 * 10**9 + 12, 10 * 10**9 + 3 * 2**25)
    assert placed["total"] == 14 * 10**9 + 12
    # Of the host there is enough, if nothing is said.
    fits = found(*FIT.split(), "20", "--optimizer", "FusedAdam")
    assert [row["place"] for row in fits] == [*["host"] * 6]
    assert found(*FIT.split(), "20", "--host-gib", "32", "--optimizer", "AdamW(lr=0.01)") == []
    assert len(found("--params", "3e9", "--levels", "O2,O5")) == 2


def test_the_options_of_storage_are_the_arguments() -> None:
    storage = preamp.Storage(masters="split", moments="8bit", place="host", release_gradients=True)
    policy = preamp.OPT_LEVELS["O5"].replace(storage=storage)
    wanted = preamp.estimate(functools.partial(nn.Linear, 4, 3), policy, "FusedAdam")
    options = ("--storage", "compact", "--place", "host", "--release-gradients")
    rows = found("torch.nn:Linear(4, 3)", "--optimizer", "FusedAdam", *options)
    assert [row["opt_level"] for row in rows] == ["O2", "O5"]
    assert rows[-1] == json.loads(json.dumps(wanted.to_json()))


REFUSED = {
    "estimate gradients released on the device": "--params 5 --release-gradients",
    "masters that no level has": ("--params 1e6 --optimizer FusedAdam --storage split --levels O1"),
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
