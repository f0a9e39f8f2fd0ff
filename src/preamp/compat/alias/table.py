# SPDX-License-Identifier: BSD-3-Clause
"""Which of Apex's modules is which of preamp's, and what to use instead of the others."""

from __future__ import annotations

SUPPLIED: dict[str, str] = {
    "apex": "preamp.compat.alias.root",
    "apex.amp": "preamp.amp",
    "apex.amp._amp_state": "preamp.amp._amp_state",
    "apex.amp._initialize": "preamp.amp._initialize",
    "apex.amp.frontend": "preamp.amp.frontend",
    "apex.amp.handle": "preamp.amp.handle",
    "apex.amp.opt": "preamp.amp.opt",
    "apex.amp.scaler": "preamp.amp.scaler",
    "apex.contrib": "preamp.compat.alias.contrib",
    "apex.contrib.optimizers": "preamp.compat.alias.contrib_optimizers",
    "apex.contrib.optimizers.fp16_optimizer": "preamp.optimizers",
    "apex.contrib.optimizers.fused_adam": "preamp.compat.alias.contrib_optimizers",
    "apex.contrib.optimizers.fused_lamb": "preamp.optimizers",
    "apex.contrib.optimizers.fused_sgd": "preamp.optimizers",
    # Old checkpoints hold pickled scalers under the names of the two files below.
    "apex.fp16_utils": "preamp.fp16_utils",
    "apex.fp16_utils.fp16_optimizer": "preamp.fp16_utils",
    "apex.fp16_utils.fp16util": "preamp.fp16_utils",
    "apex.fp16_utils.loss_scaler": "preamp.fp16_utils",
    "apex.multi_tensor_apply": "preamp.multi_tensor_apply",
    "apex.multi_tensor_apply.multi_tensor_apply": "preamp.multi_tensor_apply",
    "apex.normalization": "preamp.normalization",
    "apex.normalization.fused_layer_norm": "preamp.normalization.fused_layer_norm",
    "apex.optimizers": "preamp.optimizers",
    "apex.optimizers.fp16_optimizer": "preamp.optimizers",
    "apex.optimizers.fused_adagrad": "preamp.optimizers",
    "apex.optimizers.fused_adam": "preamp.optimizers",
    "apex.optimizers.fused_lamb": "preamp.optimizers",
    "apex.optimizers.fused_mixed_precision_lamb": "preamp.optimizers",
    "apex.optimizers.fused_novograd": "preamp.optimizers",
    "apex.optimizers.fused_sgd": "preamp.optimizers",
    "apex.parallel": "preamp.parallel",
    "apex.parallel.LARC": "preamp.parallel.LARC",
    "apex.parallel.distributed": "preamp.parallel.distributed",
    "apex.parallel.multiproc": "preamp.parallel.multiproc",
    "amp_C": "preamp.compat.multi_tensor.amp_C",
    "apex_C": "preamp.compat.multi_tensor.apex_C",
    "fused_adam_cuda": "preamp.compat.multi_tensor.fused_adam_cuda",
}
"""Module of Apex → module of preamp that has its names. Parents come before their children."""

RUNNABLE = frozenset({"apex.parallel.multiproc"})
"""Not imported with its package: ``python -m`` warns of a module that is there before it runs."""

NEEDS_DISTRIBUTED = "apex.parallel"  # as in Apex, there only where ``torch.distributed`` is

_ATTENTION = "torch.nn.functional.scaled_dot_product_attention"
_COMPILE = "torch.compile over the layers of torch.nn"
_DENSE = "torch.nn.Linear and torch.nn.GELU, under torch.compile if they should be fused"
_SHARDED = "torch.distributed.fsdp.fully_shard"

REFUSED: dict[str, str] = {
    "apex.RNN": "torch.nn.LSTM, torch.nn.GRU or torch.nn.RNN",
    "apex.fused_dense": _DENSE,
    "apex.mlp": "torch.nn.Sequential of torch.nn.Linear and an activation",
    "apex.pyprof": "torch.profiler",
    "apex.reparameterization": "torch.nn.utils.parametrizations.weight_norm",
    "apex.transformer": f"torch.distributed.tensor.parallel, torch.distributed.pipelining and "
    f"{_ATTENTION}",
    "apex.contrib.bottleneck": _COMPILE,
    "apex.contrib.clip_grad": "torch.nn.utils.clip_grad_norm_ or preamp.clip_grad_norm_",
    "apex.contrib.conv_bias_relu": _COMPILE,
    "apex.contrib.cudnn_gbn": "torch.nn.SyncBatchNorm",
    "apex.contrib.fmha": _ATTENTION,
    "apex.contrib.focal_loss": "torch.nn.functional.binary_cross_entropy_with_logits, weighted",
    "apex.contrib.group_norm": "torch.nn.GroupNorm",
    "apex.contrib.groupbn": "torch.nn.SyncBatchNorm",
    "apex.contrib.index_mul_2d": "torch.index_select and torch.mul, under torch.compile",
    "apex.contrib.layer_norm": "apex.normalization.FusedLayerNorm or torch.nn.LayerNorm",
    "apex.contrib.multihead_attn": f"torch.nn.MultiheadAttention or {_ATTENTION}",
    "apex.contrib.optimizers.distributed_fused_adam": _SHARDED,
    "apex.contrib.optimizers.distributed_fused_lamb": _SHARDED,
    "apex.contrib.sparsity": "torch.sparse.to_sparse_semi_structured",
    "apex.contrib.transducer": "torchaudio.functional.rnnt_loss",
    "apex.contrib.xentropy": "torch.nn.functional.cross_entropy, which smooths labels too",
    "fused_dense_cuda": _DENSE,
    "fused_layer_norm_cuda": "apex.normalization.FusedLayerNorm or torch.nn.LayerNorm",
    "mlp_cuda": "torch.nn.Sequential of torch.nn.Linear and an activation",
    "syncbn": "apex.parallel.SyncBatchNorm or torch.nn.SyncBatchNorm",
}
"""Module of Apex that preamp does not have → what does its work today."""
