# SPDX-License-Identifier: BSD-3-Clause
"""The op table against the functions that Apex's O1 cast: the same, but for what is named here."""

import pytest

from preamp.casting.functions import namespace_owner
from preamp.casting.op_lists import OP_TABLE

F = "torch.nn.functional"
POINTWISE_WIDE = (
    "acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow cumprod cumsum "
    "dist norm prod std sum var renorm"
)
PROMOTED = "addcdiv addcmul atan2 cross dot add div mul eq equal ge gt le lt ne"
CONVOLUTIONS = "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc"
PRODUCTS = "prelu addmm addmv addr matmul mm mv addbmm baddbmm bmm"
REFUSED_IN_PLACE = "acos_ asin_ cosh_ exp_ expm1_ log_ log10_ log2_ reciprocal_ rsqrt_ sinh_ tan_"

APEX: dict[tuple[str, str], str] = {
    ("half", F): f"{CONVOLUTIONS} linear",
    ("half", "torch"): f"{CONVOLUTIONS} {PRODUCTS}",
    ("half", "torch.Tensor"): f"__matmul__ {PRODUCTS}",
    ("float", F): "interpolate grid_sample softplus softmin log_softmax softmax gelu layer_norm "
    "group_norm local_response_norm normalize cosine_similarity poisson_nll_loss "
    "cosine_embedding_loss cross_entropy hinge_embedding_loss kl_div l1_loss mse_loss "
    "margin_ranking_loss multilabel_margin_loss multilabel_soft_margin_loss multi_margin_loss "
    "nll_loss binary_cross_entropy_with_logits smooth_l1_loss soft_margin_loss "
    "triplet_margin_loss ctc_loss",
    ("float", "torch"): POINTWISE_WIDE,
    ("float", "torch.Tensor"): f"__ipow__ __pow__ __rpow__ cpu {POINTWISE_WIDE}",
    ("promote", "torch"): f"{PROMOTED} bilinear",
    ("promote", "torch.Tensor"): f"{PROMOTED} __add__ __div__ __eq__ __ge__ __gt__ __iadd__ "
    "__idiv__ __imul__ __isub__ __itruediv__ __le__ __lt__ __mul__ __ne__ __radd__ __rdiv__ "
    "__rmul__ __rsub__ __rtruediv__ __sub__ __truediv__",
    ("sequence_promote", "torch"): "cat stack",
    ("banned", F): "binary_cross_entropy",
    ("no_half_in_place", "torch"): REFUSED_IN_PLACE,
    ("no_half_in_place", "torch.Tensor"): f"{REFUSED_IN_PLACE} erfinv_ pow_ cumprod_ cumsum_ "
    "renorm_",
    ("match_self", "torch.Tensor"): "addmm_ addmv_ addr_ addbmm_ baddbmm_ addcdiv_ addcmul_ "
    "atan2_ add_ div_ mul_ eq_ ge_ gt_ le_ lt_ ne_",
    ("leave", F): "relu batch_norm dropout max_pool2d embedding sigmoid tanh silu "
    "scaled_dot_product_attention",
    ("leave", "torch"): "sigmoid tanh softmax mean einsum",
    ("leave", "torch.Tensor"): "softmax mean",
}
"""What Apex did → in which namespace → to which functions."""

OTHERWISE = {
    # One over a half number is a reciprocal, which both run in float32.
    ("promote", "torch.Tensor", "__rdiv__"): "float",
    ("promote", "torch.Tensor", "__rtruediv__"): "float",
    # A softmax is in float32 by whichever name it is called.
    ("leave", "torch", "softmax"): "float",
    ("leave", "torch.Tensor", "softmax"): "float",
    # Products that Apex did not know of.
    ("leave", "torch", "einsum"): "half",
    ("leave", F, "scaled_dot_product_attention"): "half",
    # torch brings the other argument to the target's dtype by itself, and rounds once.
    **{
        ("match_self", "torch.Tensor", f"{name}_"): "leave"
        for name in "addcdiv addcmul atan2 add div mul eq ge gt le lt ne".split()
    },
}
"""Apex's rule, namespace, function → the rule here."""

ROWS = [(rule, where, name) for (rule, where), names in APEX.items() for name in names.split()]
RULES = {(row.namespace, row.name): row.rule for row in OP_TABLE}


@pytest.mark.parametrize("rule", sorted({rule for rule, _ in APEX}))
def test_functions_have_the_rule_of_apex(rule: str) -> None:
    """What the table does not mention is left alone; what torch does not have is not asked for."""
    for row in (row for row in ROWS if row[0] == rule and hasattr(namespace_owner(row[1]), row[2])):
        assert RULES.get(row[1:], "leave") == OTHERWISE.get(row, rule), row


def test_every_difference_is_one() -> None:
    assert set(OTHERWISE) <= set(ROWS)
    assert all(row[0] != rule for row, rule in OTHERWISE.items())
