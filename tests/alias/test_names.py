# SPDX-License-Identifier: BSD-3-Clause
"""Every documented name of Apex is there, or says what replaces it."""

import importlib
import importlib.util
import pickle
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import preamp
from kit.refusals import refused
from preamp import amp
from preamp.compat.alias import table
from preamp.compat.amp_state import amp_state

pytestmark = pytest.mark.usefixtures("alias")

NAMES = {
    "apex": "amp contrib deprecated_warning DeprecatedFeatureWarning fp16_utils "
    "multi_tensor_apply normalization optimizers parallel -transformer",
    "apex.amp": "_amp_state _initialize amp bfloat16_function disable_casts float_function "
    "frontend half_function handle init initialize -lists load_state_dict master_params -opt "
    "promote_function register_bfloat16_function register_float_function register_half_function "
    "register_promote_function scale_loss scaler state_dict -_process_optimizer -compat "
    "-rnn_compat -utils -wrap",
    "apex.amp.__version__": "__version__ VERSION",
    "apex.amp._amp_state": "_amp_state AmpState master_params maybe_print warn_or_err",
    "apex.amp._initialize": "applier",
    "apex.amp.amp": "bfloat16_function float_function half_function init promote_function "
    "register_bfloat16_function register_float_function register_half_function "
    "register_promote_function",
    "apex.amp.frontend": "initialize load_state_dict opt_levels Properties state_dict",
    "apex.amp.handle": "AmpHandle disable_casts scale_loss -NoOpHandle -OptimWrapper",
    "apex.amp.scaler": "LossScaler",
    "apex.contrib": "optimizers",
    "apex.contrib.optimizers": "FP16_Optimizer FusedAdam FusedLAMB",
    "apex.contrib.optimizers.fp16_optimizer": "FP16_Optimizer",
    "apex.contrib.optimizers.fused_adam": "FusedAdam",
    "apex.contrib.optimizers.fused_lamb": "FusedLAMB",
    "apex.contrib.optimizers.fused_sgd": "FusedSGD",
    "apex.fp16_utils": "BN_convert_float clip_grad_norm convert_module convert_network "
    "DynamicLossScaler FP16_Optimizer fp16_optimizer FP16Model fp16util loss_scaler LossScaler "
    "master_params_to_model_params model_grads_to_master_grads network_to_half prep_param_lists "
    "to_python_float tofp16",
    "apex.fp16_utils.fp16_optimizer": "clip_grad_norm FP16_Optimizer LossScaler "
    "master_params_to_model_params model_grads_to_master_grads",
    "apex.fp16_utils.fp16util": "BN_convert_float clip_grad_norm convert_module convert_network "
    "FP16Model master_params_to_model_params model_grads_to_master_grads network_to_half "
    "prep_param_lists to_python_float tofp16",
    "apex.fp16_utils.loss_scaler": "DynamicLossScaler LossScaler to_python_float",
    "apex.multi_tensor_apply": "multi_tensor_applier MultiTensorApply",
    "apex.multi_tensor_apply.multi_tensor_apply": "MultiTensorApply",
    "apex.normalization": "fused_layer_norm FusedLayerNorm FusedRMSNorm MixedFusedLayerNorm "
    "MixedFusedRMSNorm",
    "apex.normalization.fused_layer_norm": "fused_layer_norm fused_layer_norm_affine "
    "fused_rms_norm fused_rms_norm_affine FusedLayerNorm FusedLayerNormAffineFunction "
    "FusedLayerNormAffineMixedDtypesFunction FusedLayerNormFunction FusedRMSNorm "
    "FusedRMSNormAffineFunction FusedRMSNormAffineMixedDtypesFunction FusedRMSNormFunction "
    "manual_rms_norm mixed_dtype_fused_layer_norm_affine mixed_dtype_fused_rms_norm_affine "
    "MixedFusedLayerNorm MixedFusedRMSNorm",
    "apex.optimizers": "FP16_Optimizer FusedAdagrad FusedAdam FusedLAMB FusedLARS "
    "FusedMixedPrecisionLamb FusedNovoGrad FusedSGD",
    "apex.optimizers.fp16_optimizer": "FP16_Optimizer",
    "apex.optimizers.fused_adagrad": "FusedAdagrad",
    "apex.optimizers.fused_adam": "FusedAdam",
    "apex.optimizers.fused_lamb": "FusedLAMB",
    "apex.optimizers.fused_lars": "FusedLARS",
    "apex.optimizers.fused_mixed_precision_lamb": "FusedMixedPrecisionLamb",
    "apex.optimizers.fused_novograd": "FusedNovoGrad",
    "apex.optimizers.fused_sgd": "FusedSGD",
    "apex.parallel": "convert_syncbn_model create_syncbn_process_group distributed "
    "DistributedDataParallel LARC optimized_sync_batchnorm ReduceOp Reducer sync_batchnorm "
    "SyncBatchNorm",
    "apex.parallel.LARC": "LARC",
    "apex.parallel.distributed": "DistributedDataParallel flat_dist_call Reducer -flatten "
    "-unflatten",
    "apex.parallel.optimized_sync_batchnorm": "SyncBatchNorm",
    "apex.parallel.sync_batchnorm": "SyncBatchNorm",
    "amp_C": "multi_tensor_adam multi_tensor_axpby multi_tensor_l2norm multi_tensor_lamb "
    "multi_tensor_scale multi_tensor_sgd -multi_tensor_adagrad -multi_tensor_lamb_mp "
    "-multi_tensor_lamb_stage1_cuda -multi_tensor_lamb_stage2_cuda -multi_tensor_lars "
    "-multi_tensor_novograd",
    "apex_C": "flatten unflatten",
}
"""What each file of Apex has for scripts; ``-`` before a name says that it is refused."""

COMPILED = ("syncbn", "fused_layer_norm_cuda", "mlp_cuda", "fused_dense_cuda", "fused_adam_cuda")
PACKAGES = ("apex.RNN", "apex.mlp", "apex.fused_dense", "apex.transformer")


def test_the_table_is_walked() -> None:
    assert set(NAMES) == set(table.SUPPLIED)
    assert set(table.REFUSED) >= {*COMPILED, *PACKAGES}
    assert not set(table.REFUSED) & set(table.SUPPLIED)


@pytest.mark.parametrize("module", NAMES)
def test_a_module_of_apex_has_its_names_and_knows_its_own(module: str) -> None:
    names = NAMES[module].split()
    without = {name[1:] for name in names if name.startswith("-")}
    loaded = importlib.import_module(module)
    assert {name for name in names if name[0] != "-"} <= set(vars(loaded))
    assert {f"{module}.{name}" for name in without} <= set(table.REFUSED)
    assert loaded.__name__ == module
    assert loaded.__spec__ is not None
    assert loaded.__spec__.name == module
    assert importlib.util.find_spec(module) is loaded.__spec__
    package = module if hasattr(loaded, "__path__") else module.rpartition(".")[0]
    assert loaded.__package__ == package
    assert loaded.__file__ == importlib.import_module(table.SUPPLIED[module]).__file__
    with refused("alias", "import of an unknown name", module=module):
        importlib.import_module(f"{module}.nonsense")
    with refused("alias", "import of an unknown name", module=module):
        exec(f"from {module} import nonsense")
    with refused("alias", "attribute that is unknown", module=module):
        _ = loaded.nonsense
    with refused("alias", "attribute that Python asks for", module=module):
        _ = loaded.__wrapped__


@pytest.mark.parametrize("module", table.REFUSED)
def test_other_names_say_what_replaces_them(module: str) -> None:
    """What looks by ``hasattr`` sees that they are missing, what takes them reads why."""
    words = {"module": module, "use": table.REFUSED[module]}
    with refused("alias", "import of what is replaced", **words):
        importlib.import_module(module)
    parent, _, child = module.rpartition(".")
    if not parent:
        return
    with refused("alias", "import of what is replaced", **words):
        exec(f"from {parent} import {child}")
    loaded = importlib.import_module(parent)
    assert not hasattr(loaded, child)
    with refused("alias", "attribute that is replaced", **words):
        getattr(loaded, child)


def test_a_module_that_another_finder_has_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Advice is for what nothing supplies; a package may hang a module of its own below apex."""
    importlib.import_module("apex")

    class Other:
        def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
            if name != "apex.own":
                return None
            return importlib.util.spec_from_file_location(name, tmp_path / "own.py")

    (tmp_path / "own.py").write_text("here = True", "utf-8")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Other()])
    try:
        assert importlib.import_module("apex.own").here
    finally:
        sys.modules.pop("apex.own", None)


def test_functions_beside_the_state(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = importlib.import_module("apex.amp._amp_state")
    monkeypatch.setattr(amp_state, "_verbosity", 1)
    state.maybe_print("once")
    monkeypatch.setattr(amp_state, "hard_override", True)
    state.warn_or_err("as you wish")
    monkeypatch.setattr("preamp.core.log.is_first_rank", lambda: False)
    state.maybe_print("on every rank")
    state.maybe_print("on the first", rank0=True)
    monkeypatch.setattr(amp_state, "_verbosity", 0)
    state.maybe_print("silent")
    assert capsys.readouterr().out == "once\nWarning:  as you wish\non every rank\n"
    monkeypatch.setattr(amp_state, "hard_override", False)
    with pytest.raises(RuntimeError, match=r"^no$"):
        state.warn_or_err("no")


REPLACEMENTS = sorted(
    {
        name
        for text in table.REFUSED.values()
        for name in re.findall(r"\b(torch(?:\.\w+)+)", text)
        if not name.startswith("torchaudio")
    }
)


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_replacements_exist(name: str) -> None:
    """The advice must not send anyone to a name that torch does not have."""
    if name == "torch.cuda.gds.GdsFile" and torch.__version__.startswith("2.6."):
        pytest.skip("from torch 2.7 on")
    module: Any = torch
    for part in name.split(".")[1:]:
        if not hasattr(module, part):
            importlib.import_module(f"{module.__name__}.{part}")
        module = getattr(module, part)


def test_no_torch_distributed_no_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    apex = importlib.import_module("apex")
    assert not hasattr(apex, "parallel")
    for name in ("apex.parallel", "apex.parallel.LARC"):
        with refused("alias", "parallel without torch.distributed"):
            importlib.import_module(name)


# -- the forms that scripts use --------------------------------------------------------------


def run(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(text, names)
    return names


FORMS = {  # what a script says, and what holds then; `amp` and `preamp` are ours
    "import apex": "apex.amp.initialize is ours.amp.initialize",
    "import apex.amp.scaler": "apex.amp.scaler.LossScaler is ours.amp.LossScaler",
    "import apex, types": "isinstance(apex.contrib, types.ModuleType)",
    "import apex.amp as a\nfrom apex import amp": "a is amp",
    "from apex.amp import scaler\nfrom apex.amp.scaler import LossScaler": (
        "scaler.LossScaler is LossScaler"
    ),
    "from apex import amp\nfrom apex.amp import handle": "handle.scale_loss is amp.scale_loss",
    "from apex.amp.frontend import Properties, opt_levels": (
        "'O1' in opt_levels and Properties().enabled is False"
    ),
    "import torch\nfrom apex.amp._initialize import applier": (
        "applier([torch.ones(2)], lambda x: x + 1)[0].tolist() == [2.0, 2.0]"
    ),
    "from apex.amp import *": "initialize is ours.amp.initialize",
    "import apex.parallel.sync_batchnorm as a, apex.parallel.optimized_sync_batchnorm as b": (
        "a.SyncBatchNorm is b.SyncBatchNorm"
    ),
    "from apex import amp": "'state_dict' in amp.__dict__ and amp.state_dict() == {}",  # as timm
    "try:\n import syncbn\nexcept ImportError:\n syncbn = None": "syncbn is None",
    "from apex.contrib import optimizers as a\nfrom apex import optimizers as b": (
        "all(getattr(a, n) is getattr(b, n) for n in ('FP16_Optimizer', 'FusedLAMB', 'FusedSGD'))"
    ),
    "import copy\nfrom apex.amp import _amp_state as a": "copy.copy(a) is not a",
}


@pytest.mark.parametrize("text", FORMS)
def test_forms_of_scripts(text: str) -> None:
    assert eval(FORMS[text], {**run(text), "ours": preamp})


def test_the_state_is_an_object_and_a_module() -> None:
    """``import apex.amp._amp_state`` must not put the module in the object's place."""
    names = run(
        "import apex.amp._amp_state\n"
        "from apex.amp._amp_state import _amp_state, AmpState\n"
        "from apex.amp import _amp_state as also\n"
    )
    assert names["_amp_state"] is names["also"] is names["apex"].amp._amp_state is amp_state
    assert isinstance(names["_amp_state"], names["AmpState"])
    assert isinstance(sys.modules["apex.amp._amp_state"], types.ModuleType)
    names["apex"].amp._amp_state.verbosity = 0
    assert amp._amp_state.verbosity == 0
    amp._amp_state.verbosity = 1


@pytest.mark.parametrize("root", ["apex", "preamp"])
def test_probes_by_the_version(root: str) -> None:
    """Trainers that import it tell their users to install Apex where that fails."""
    names = run(
        f"from {root}.amp import __version__ as module\n"
        f"from {root}.amp.__version__ import VERSION, __version__ as text\n"
    )
    assert names["module"].VERSION == names["VERSION"] == (0, 1, 0)
    assert names["module"].__version__ == names["text"] == "0.1.0"


def test_star_import_of_fp16_utils_brings_every_name() -> None:
    """Apex had no ``__all__`` there, and its own example imports the star."""
    names = run("from apex.fp16_utils import *")
    files = {"fp16_optimizer", "fp16util", "loss_scaler"}
    assert {*NAMES["apex.fp16_utils"].split()} - files <= names.keys()


def test_contribs_sgd_takes_no_gradients() -> None:
    contrib = importlib.import_module("apex.contrib.optimizers")
    with pytest.raises(TypeError, match=r"FusedSGD.step\(\) got 'grads'"):
        contrib.FusedSGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step(grads=[torch.ones(1)])


def test_contribs_adam_is_that_of_early_2019() -> None:
    """Its order of arguments, and its formula where nothing else selects it."""
    contrib = importlib.import_module("apex.contrib.optimizers.fused_adam")
    assert contrib.FusedAdam is importlib.import_module("apex.contrib.optimizers").FusedAdam
    start = torch.tensor([1.0, -2.0], dtype=torch.float64)
    param = torch.nn.Parameter(start.clone())
    optimizer = contrib.FusedAdam([param], 0.25, True, (0.5, 0.75), 0.125, True, 0.5)
    exact, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for number in (1, 2):
        grad = torch.tensor([0.5 * number, 3.0], dtype=torch.float64)
        param.grad = grad.clone()
        optimizer.step()
        m, v = 0.5 * m + 0.5 * grad, 0.75 * v + 0.25 * grad * grad
        size = 0.25 * (1 - 0.75**number) ** 0.5 / (1 - 0.5**number)
        exact = exact - size * (m / (v + 0.125).sqrt() + 0.5 * exact)
    assert (param.detach() - exact).abs().max() <= 1e-14
    copied = pickle.loads(pickle.dumps(optimizer))
    assert type(copied) is contrib.FusedAdam
    copied.step()


def test_objects_outlive_the_alias() -> None:
    """Classes are preamp's own, so what is pickled under the alias needs no alias."""
    scaler = run("from apex.amp.scaler import LossScaler")["LossScaler"]
    text = pickle.dumps(scaler)
    assert b"apex" not in text
    assert pickle.loads(text) is scaler


def test_reload() -> None:
    module = importlib.import_module("apex.amp")
    del module.initialize
    assert importlib.reload(module) is module
    assert module.initialize is amp.initialize
    assert module._amp_state is amp_state


def test_module_does_not_leak_into_preamp(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(vars(amp))
    for module in NAMES:
        importlib.import_module(module)
    monkeypatch.setattr(importlib.import_module("apex.amp"), "initialize", None)
    assert vars(amp) == before


def test_deprecations_have_apex_category_on_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    apex = importlib.import_module("apex")
    assert issubclass(apex.DeprecatedFeatureWarning, FutureWarning)
    with pytest.warns(apex.DeprecatedFeatureWarning, match="^old$") as caught:
        apex.deprecated_warning("old")
    assert caught[0].filename == __file__
    monkeypatch.setattr("preamp.compat.alias.root.is_first_rank", lambda: False)
    apex.deprecated_warning("old")  # warnings are errors here
