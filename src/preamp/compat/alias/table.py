# SPDX-License-Identifier: BSD-3-Clause
"""Which of Apex's modules is which of preamp's, and what to use instead of the others."""

from __future__ import annotations

SUPPLIED: dict[str, str] = {
    "apex": "preamp.compat.alias.root",
    "apex.amp": "preamp.amp",
    "apex.amp.__version__": "preamp.amp.__version__",
    "apex.amp._amp_state": "preamp.amp._amp_state",
    "apex.amp._initialize": "preamp.amp._initialize",
    "apex.amp.amp": "preamp.amp.amp",
    "apex.amp.frontend": "preamp.amp.frontend",
    "apex.amp.handle": "preamp.amp.handle",
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
    "apex.optimizers.fused_lars": "preamp.optimizers",
    "apex.optimizers.fused_mixed_precision_lamb": "preamp.optimizers",
    "apex.optimizers.fused_novograd": "preamp.optimizers",
    "apex.optimizers.fused_sgd": "preamp.optimizers",
    "apex.parallel": "preamp.parallel",
    "apex.parallel.LARC": "preamp.parallel.LARC",
    "apex.parallel.distributed": "preamp.parallel.distributed",
    "apex.parallel.optimized_sync_batchnorm": "preamp.parallel.optimized_sync_batchnorm",
    "apex.parallel.sync_batchnorm": "preamp.parallel.sync_batchnorm",
    "amp_C": "preamp.compat.multi_tensor.amp_C",
    "apex_C": "preamp.compat.multi_tensor.apex_C",
}
"""Module of Apex → module of preamp that has its names. Parents come before their children."""

NEEDS_DISTRIBUTED = "apex.parallel"  # as in Apex, there only where ``torch.distributed`` is

_ATTENTION = "torch.nn.functional.scaled_dot_product_attention"
_COMPILE = "torch.compile over the layers of torch.nn"
_DENSE = "torch.nn.Linear and torch.nn.GELU, under torch.compile if they should be fused"
_SHARDED = "torch.distributed.fsdp.fully_shard"
_LAYER_NORM = "apex.normalization.FusedLayerNorm or torch.nn.LayerNorm"
_MLP = "torch.nn.Sequential of torch.nn.Linear and an activation"
_OWN_CASTS = "amp.half_function, amp.float_function and amp.register_half_function, which cast"
_PEERS = "torch.distributed.batch_isend_irecv"
_RNN = "torch.nn.LSTM, torch.nn.GRU or torch.nn.RNN"
_SYNC = "apex.parallel.SyncBatchNorm or torch.nn.SyncBatchNorm"
_FLATTEN = "apex_C.flatten and apex_C.unflatten"
_SCALE = "amp.scale_loss, with an optimizer that went through amp.initialize"

REFUSED: dict[str, str] = {
    "apex.RNN": _RNN,
    "apex._autocast_utils": "torch.is_autocast_enabled and torch.get_autocast_dtype",
    "apex.fused_dense": _DENSE,
    "apex.mlp": _MLP,
    "apex.pyprof": "torch.profiler",
    "apex.reparameterization": "torch.nn.utils.parametrizations.weight_norm",
    "apex.transformer": f"torch.distributed.tensor.parallel, torch.distributed.pipelining and "
    f"{_ATTENTION}",
    "apex.amp._process_optimizer": "amp.initialize, and optimizer._amp_stash for its lists",
    "apex.amp.compat": "torch.is_tensor and torch.is_floating_point",
    "apex.amp.lists": f"{_OWN_CASTS} functions of your choice",
    "apex.amp.opt": _SCALE,
    "apex.amp.handle.NoOpHandle": _SCALE,
    "apex.amp.handle.OptimWrapper": _SCALE,
    "apex.amp.rnn_compat": f"{_RNN}, which are cast like other functions",
    "apex.amp.utils": f"{_OWN_CASTS} arguments",
    "apex.amp.wrap": f"{_OWN_CASTS} single functions",
    "apex.contrib.bottleneck": _COMPILE,
    "apex.contrib.clip_grad": "torch.nn.utils.clip_grad_norm_ or preamp.clip_grad_norm_",
    "apex.contrib.conv_bias_relu": _COMPILE,
    "apex.contrib.cudnn_gbn": "torch.nn.SyncBatchNorm",
    "apex.contrib.fmha": _ATTENTION,
    "apex.contrib.focal_loss": "torch.nn.functional.binary_cross_entropy_with_logits, weighted",
    "apex.contrib.gpu_direct_storage": "torch.cuda.gds.GdsFile",
    "apex.contrib.group_norm": "torch.nn.GroupNorm",
    "apex.contrib.groupbn": "torch.nn.SyncBatchNorm",
    "apex.contrib.index_mul_2d": "torch.index_select and torch.mul, under torch.compile",
    "apex.contrib.layer_norm": _LAYER_NORM,
    "apex.contrib.multihead_attn": f"torch.nn.MultiheadAttention or {_ATTENTION}",
    "apex.contrib.nccl_allocator": "torch.cuda.memory.MemPool",
    "apex.contrib.nccl_p2p": _PEERS,
    "apex.contrib.openfold_triton": f"torch.nn.LayerNorm and {_ATTENTION}, under torch.compile",
    "apex.contrib.optimizers.distributed_fused_adam": _SHARDED,
    "apex.contrib.optimizers.distributed_fused_lamb": _SHARDED,
    "apex.contrib.peer_memory": _PEERS,
    "apex.contrib.sparsity": "torch.sparse.to_sparse_semi_structured",
    "apex.contrib.torchsched": "torch.compile",
    "apex.contrib.transducer": "torchaudio.functional.rnnt_loss",
    "apex.contrib.xentropy": "torch.nn.functional.cross_entropy, which smooths labels too",
    "apex.parallel.distributed.flatten": _FLATTEN,
    "apex.parallel.distributed.unflatten": _FLATTEN,
    "apex.parallel.multiproc": "torchrun, which starts one process for each GPU",
    "apex.parallel.optimized_sync_batchnorm_kernel": _SYNC,
    "apex.parallel.sync_batchnorm_kernel": _SYNC,
    "amp_C.multi_tensor_adagrad": "preamp.optimizers.FusedAdagrad",
    "amp_C.multi_tensor_lamb_mp": "preamp.optimizers.FusedMixedPrecisionLamb",
    "amp_C.multi_tensor_lamb_stage1_cuda": "preamp.optimizers.FusedLAMB",
    "amp_C.multi_tensor_lamb_stage2_cuda": "preamp.optimizers.FusedLAMB",
    "amp_C.multi_tensor_lars": "preamp.optimizers.FusedLARS",
    "amp_C.multi_tensor_novograd": "preamp.optimizers.FusedNovoGrad",
    "fused_adam_cuda": "preamp.optimizers.FusedAdam",
    "fused_dense_cuda": _DENSE,
    "fused_layer_norm_cuda": _LAYER_NORM,
    "mlp_cuda": _MLP,
    "syncbn": _SYNC,
}
"""What scripts import of Apex and preamp does not have → what does its work today."""
