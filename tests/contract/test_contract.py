# SPDX-License-Identifier: BSD-3-Clause
"""The contract with Apex is complete, and every row of it is proven by tests that exist."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from apex_table import render
from contract.rows import ROWS, SECTIONS
from contract.rows.row import Row

ROOT = Path(__file__).parents[2]

NAMES = {
    "apex": "amp fp16_utils optimizers normalization parallel transformer RNN mlp fused_dense "
    "DeprecatedFeatureWarning deprecated_warning",
    "apex.amp": "init half_function float_function promote_function bfloat16_function "
    "register_half_function register_float_function register_promote_function "
    "register_bfloat16_function scale_loss disable_casts initialize state_dict load_state_dict "
    "master_params _amp_state",
    "apex.amp.scaler": "LossScaler",
    "apex.amp.handle": "AmpHandle NoOpHandle",
    "apex.amp.opt": "OptimWrapper",
    "apex.amp.frontend": "Properties opt_levels",
    "apex.amp._initialize": "applier",
    "apex.fp16_utils": "BN_convert_float network_to_half prep_param_lists "
    "model_grads_to_master_grads master_params_to_model_params tofp16 to_python_float "
    "clip_grad_norm convert_module convert_network FP16Model FP16_Optimizer LossScaler "
    "DynamicLossScaler",
    "apex.optimizers": "FusedSGD FusedAdam FusedNovoGrad FusedLAMB FusedAdagrad "
    "FusedMixedPrecisionLamb FusedLARS FP16_Optimizer",
    "apex.contrib.optimizers": "FP16_Optimizer FusedAdam FusedLAMB",
    "apex.multi_tensor_apply": "multi_tensor_applier MultiTensorApply multi_tensor_applier_l2norm",
    "apex.parallel": "ReduceOp DistributedDataParallel Reducer SyncBatchNorm "
    "convert_syncbn_model create_syncbn_process_group multiproc",
    "apex.parallel.LARC": "LARC",
    "apex.parallel.distributed": "flat_dist_call",
    "apex_C": "flatten unflatten",
    "": "amp_C syncbn fused_layer_norm_cuda mlp_cuda fused_dense_cuda fused_adam_cuda",
}
STATE = "opt_properties min_loss_scale max_loss_scale loss_scalers handle hard_override "
STATE += "allow_incoming_model_not_fp32 verbosity"
FLAT = "zero_grad backward step _update_scale load_state_dict state_dict"

REQUIRED: dict[str, list[str]] = {
    "0": [
        *(
            f"`{module}.{name}`"
            for module, names in NAMES.items()
            if module
            for name in names.split()
        ),
        *(f"`{name}`" for name in NAMES[""].split()),
        *(f"`_amp_state.{name}`" for name in STATE.split()),
    ],
    "1.2": [
        "Module, none → module",
        "Module, Optimizer → pair",
        "Module, list → pair",
        "list, none → list",
        "list, Optimizer → pair",
        "list, list → pair",
        "LARC for an optimizer",
        "models: tuple or anything else → `TypeError`",
        "optimizers: tuple, generator or anything else → `TypeError`",
    ],
    "1.4": [
        f"`{name}`"
        for name in "enabled opt_level cast_model_type patch_torch_functions "
        "patch_torch_functions_type keep_batchnorm_fp32 master_weights loss_scale".split()
    ],
    "1.5": [
        f"`{name}`"
        for name in "cast_model_type patch_torch_functions patch_torch_functions_type "
        "keep_batchnorm_fp32 master_weights loss_scale max_loss_scale min_loss_scale".split()
    ],
    "1.8": [
        "Tensor",
        "str, ndarray",
        "object with `to`",
        "Mapping",
        "other Iterable",
        "anything else",
    ],
    "2.2": [
        "disabled",
        "O0, O3 defaults",
        "O1",
        "O2",
        "static scale ≠ 1",
        "static 1.0 with master weights",
    ],
    "2.6": ["`step`", "`zero_grad`", "`add_param_group`", "`state_dict`, `load_state_dict`"],
    "4.2": [
        *(
            f"low precision, `{where}`"
            for where in ("torch.nn.functional", "torch", "torch.Tensor")
        ),
        *(f"fp32, `{where}`" for where in ("torch.nn.functional", "torch", "torch.Tensor")),
        "promote, `torch`",
        "promote, `torch.Tensor`",
        "sequence promote, `torch`",
        "banned",
        "not patched",
    ],
    "5.1": [
        f"`{name}`"
        for name in "tofp16 BN_convert_float network_to_half convert_module convert_network "
        "FP16Model prep_param_lists model_grads_to_master_grads master_params_to_model_params "
        "to_python_float clip_grad_norm".split()
    ],
    "5.2": ["`LossScaler`", "`DynamicLossScaler`"],
    "5.3": [
        "`zero_grad`",
        "`backward`",
        "`update_master_grads`",
        "`step`",
        "`step(closure)`",
        "`clip_master_grads`",
        "`inspect_master_grad_data`",
        "`loss_scale`",
        "`state`, `param_groups`",
        "`state_dict`",
        "`load_state_dict`",
        "pickling and copying: `RuntimeError`",
    ],
    "6": [*(f"`{name}`" for name in FLAT.split()), "`state`, `param_groups`"],
    "7": [
        f"`{name}`"
        for name in "FusedSGD FusedAdam FusedLAMB FusedNovoGrad FusedAdagrad "
        "FusedMixedPrecisionLamb FusedLARS".split()
    ],
    "8": [
        f"`{name}`"
        for name in "multi_tensor_scale multi_tensor_axpby multi_tensor_l2norm "
        "multi_tensor_l2norm_mp multi_tensor_l2norm_scale multi_tensor_unscale_l2norm "
        "multi_tensor_sgd multi_tensor_adam multi_tensor_adam_capturable "
        "multi_tensor_adam_capturable_master multi_tensor_adagrad multi_tensor_novograd "
        "multi_tensor_lamb multi_tensor_lamb_mp multi_tensor_lamb_stage1_cuda "
        "multi_tensor_lamb_stage2_cuda update_scale_hysteresis multi_tensor_lars "
        "apex_C.flatten apex_C.unflatten fused_adam_cuda.adam fused_adam_cuda.adam_mt".split()
    ],
    "A": [
        "writing `loss_scalers[0]._loss_scale`",
        "logging `loss_scalers[i].loss_scale()`",
        "BERT trainers' resume through `_lazy_init_maybe_master_weights`",
        "`_amp_lazy_init()`, then the lists of `_amp_stash`",
        '`register_half_function(torch, "einsum")`',
        "`master_weights=False` at O2, `cast_model_type=False`",
        "`amp_C` by hand, with a literal chunk size",
        "clipping `amp.master_params(optimizer)`, inside or after the block",
        "early FusedAdam in the flat FP16_Optimizer",
        "`handle._deactivate()` in tests",
        "two networks, two optimizers, three losses",
        "capability probes",
    ],
}
"""Section → names that it must have. Bugs and forms are counted by their numbers."""

NUMBERED = {"10": [f"A-{n}" for n in range(1, 41)], "forms": [str(n) for n in range(1, 20)]}


def names_of(section: str) -> list[str]:
    return [row.name for row in ROWS if row.section == section]


@pytest.mark.parametrize("section", REQUIRED)
def test_every_required_name_has_a_row(section: str) -> None:
    assert set(REQUIRED[section]) - set(names_of(section)) == set()


@pytest.mark.parametrize("section", NUMBERED)
def test_every_number_has_a_row(section: str) -> None:
    found = {name.partition(":")[0] for name in names_of(section)}
    assert found == set(NUMBERED[section])


def test_rows_are_unique_and_in_a_section() -> None:
    keys = [(row.section, row.name) for row in ROWS]
    assert sorted(keys) == sorted(set(keys))
    assert {row.section for row in ROWS} == set(SECTIONS)


def test_what_differs_says_why() -> None:
    assert [row for row in ROWS if row.verdict != "supported" and not row.why] == []
    assert [row for row in ROWS if row.why and not row.why.endswith(".")] == []


# -- the proof -------------------------------------------------------------------------------


@functools.cache
def functions_of(file: str) -> frozenset[str]:
    """Test functions of a file; methods as ``Class::method``, checks that ranks run included."""
    found: set[str] = set()
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            methods = (item for item in node.body if isinstance(item, ast.FunctionDef))
            found |= {f"{node.name}::{method.name}" for method in methods}
        elif isinstance(node, ast.Assign):  # the TestCase of a hypothesis state machine
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(name for name in found if is_test(name, file))


def is_test(name: str, file: str) -> bool:
    last = name.rpartition("::")[2]
    is_run_on_ranks = file.endswith("_checks.py") and last.startswith("check_")
    return last.startswith(("test_", "Test")) or is_run_on_ranks


def unproven(rows: tuple[Row, ...]) -> list[str]:
    """Rows without a test, and tests that do not exist."""
    found = [f"{row.name}: no test" for row in rows if not row.tests]
    for row in rows:
        for node in row.tests:
            file, _, function = node.partition("::")
            if not (ROOT / file).is_file() or function not in functions_of(file):
                found.append(f"{row.name}: {node} does not exist")
    return found


def test_every_row_is_proven() -> None:
    assert unproven(ROWS) == []


@pytest.mark.parametrize(
    ("tests", "expected"),
    [
        ((), "x: no test"),
        (("tests/no_such_file.py::test_a",), "x: tests/no_such_file.py::test_a does not exist"),
        (
            ("tests/contract/test_contract.py::test_gone",),
            "x: tests/contract/test_contract.py::test_gone does not exist",
        ),
        (
            ("tests/contract/test_contract.py::unproven",),
            "x: tests/contract/test_contract.py::unproven does not exist",
        ),
    ],
)
def test_a_row_without_proof_is_found(tests: tuple[str, ...], expected: str) -> None:
    assert unproven((Row("0", "x", "supported", "", tests),)) == [expected]


def test_checks_on_ranks_are_run_by_a_test() -> None:
    files = {node.partition("::")[0] for row in ROWS for node in row.tests if "::check_" in node}
    for file in files:
        runners = (ROOT / file).parent.glob("test_*.py")
        module = Path(file).stem
        assert any(f"checks_of({module})" in path.read_text("utf-8") for path in runners), file


# -- the page --------------------------------------------------------------------------------


def test_documented_table_is_current() -> None:
    page = (ROOT / "docs" / "from-apex.md").read_text(encoding="utf-8")
    assert page == render(ROWS, SECTIONS), "run python tools/apex_table.py"
