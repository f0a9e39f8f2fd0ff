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
    "apex.amp.lists": "preamp.amp.lists",
    "apex.amp.lists.functional_overrides": "preamp.compat.lists.functional_overrides",
    "apex.amp.lists.tensor_overrides": "preamp.compat.lists.tensor_overrides",
    "apex.amp.lists.torch_overrides": "preamp.compat.lists.torch_overrides",
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

_APPLIER = "apex.multi_tensor_apply.multi_tensor_applier"
_FILES_WITH_APPLIER = (
    "apex.amp.scaler",
    "apex.fp16_utils.fp16_optimizer",
    "apex.parallel.distributed",
    *(
        name
        for name in SUPPLIED
        if name.startswith(("apex.optimizers.", "apex.contrib.optimizers."))
    ),
)
_ATTENTION = "torch.nn.functional.scaled_dot_product_attention"
_COMPILE = "torch.compile over the layers of torch.nn"
_DENSE = "torch.nn.Linear and torch.nn.GELU, under torch.compile if they should be fused"
_SHARDED = "torch.distributed.fsdp.fully_shard"
_FLAT = "apex.parallel.distributed.flat_dist_call, which sorts tensors by type itself"
_LAYER_NORM = "apex.normalization.FusedLayerNorm or torch.nn.LayerNorm"
_MLP = "torch.nn.Sequential of torch.nn.Linear and an activation"
_OWN_CASTS = "amp.half_function, amp.float_function and amp.register_half_function, which cast"
_PEERS = "torch.distributed.batch_isend_irecv"
_RNN = "torch.nn.LSTM, torch.nn.GRU or torch.nn.RNN"
_SYNC = "apex.parallel.SyncBatchNorm or torch.nn.SyncBatchNorm"
_FLATTEN = "apex_C.flatten and apex_C.unflatten"
_REGISTER = "amp.register_half_function, amp.register_float_function, amp.register_promote_function"
_SCALE = "amp.scale_loss, with an optimizer that went through amp.initialize"
_UNSCALE = "amp.scale_loss, whose block unscales gradients when it ends"

REFUSED: dict[str, str] = {
    "apex.RNN": _RNN,
    "apex._autocast_utils": "torch.is_autocast_enabled and torch.get_autocast_dtype",
    "apex._custom_ops": "torch.library.custom_op",
    "apex._extensions": "amp_C and apex_C, which are modules of their own",
    "apex.fused_dense": _DENSE,
    "apex.git_version_info": "preamp.__version__",
    "apex.RankInfoFormatter": "logging.Formatter",
    "apex._library_root_logger": 'logging.getLogger("apex")',
    "apex.check_cudnn_version_and_warn": "torch.backends.cudnn.version",
    "apex.mlp": _MLP,
    "apex.pyprof": "torch.profiler",
    "apex.reparameterization": "torch.nn.utils.parametrizations.weight_norm",
    "apex.testing": "torch.testing",
    "apex.transformer": f"torch.distributed.tensor.parallel, torch.distributed.pipelining and "
    f"{_ATTENTION}",
    "apex.amp._amp_state.container_abcs": "collections.abc",
    "apex.amp._initialize.FP16_Optimizer_for_fused": "apex.contrib.optimizers.FP16_Optimizer",
    "apex.amp._initialize.FP16_Optimizer_general": "apex.fp16_utils.FP16_Optimizer",
    "apex.amp._initialize._initialize": "amp.initialize",
    "apex.amp._initialize._process_optimizer": "amp.initialize",
    "apex.amp._initialize.apex_DDP": "apex.parallel.DistributedDataParallel",
    "apex.amp._initialize.container_abcs": "collections.abc",
    "apex.amp._initialize.convert_network": "apex.fp16_utils.convert_network",
    "apex.amp._initialize.to_type": "tensor.to(dtype)",
    "apex.amp._initialize.check_models": "amp.initialize, which checks models itself",
    "apex.amp._initialize.check_optimizers": "amp.initialize, which checks optimizers itself",
    "apex.amp._initialize.check_params_fp32": "amp.initialize, which checks parameters itself",
    "apex.amp._process_optimizer": "amp.initialize, and optimizer._amp_stash for its lists",
    "apex.amp.amp._DECORATOR_HANDLE": "amp.init, which returns its handle",
    "apex.amp.amp._USER_CAST_REGISTRY": _REGISTER,
    "apex.amp.amp._USER_PROMOTE_REGISTRY": _REGISTER,
    "apex.amp.amp._decorator_helper": f"{_OWN_CASTS} arguments",
    "apex.amp.compat": "torch.is_tensor and torch.is_floating_point",
    "apex.amp.frontend.O0": 'apex.amp.frontend.opt_levels["O0"]',
    "apex.amp.frontend.O1": 'apex.amp.frontend.opt_levels["O1"]',
    "apex.amp.frontend.O2": 'apex.amp.frontend.opt_levels["O2"]',
    "apex.amp.frontend.O3": 'apex.amp.frontend.opt_levels["O3"]',
    "apex.amp.frontend.O4": 'apex.amp.frontend.opt_levels["O4"]',
    "apex.amp.frontend.O5": 'apex.amp.frontend.opt_levels["O5"]',
    "apex.amp.frontend._initialize": "amp.initialize",
    "apex.amp.lists.tensor_overrides.torch_overrides": "apex.amp.lists.torch_overrides",
    "apex.amp.opt": _SCALE,
    "apex.amp.handle.OptimWrapper": _SCALE,
    "apex.amp.rnn_compat": f"{_RNN}, which are cast like other functions",
    "apex.amp.scaler.axpby_check_overflow_python": _UNSCALE,
    "apex.amp.scaler.scale_check_overflow_python": _UNSCALE,
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
    "apex.contrib.optimizers.distributed_fused_adam_v2": _SHARDED,
    "apex.contrib.optimizers.distributed_fused_adam_v3": _SHARDED,
    "apex.contrib.optimizers.distributed_fused_lamb": _SHARDED,
    "apex.contrib.peer_memory": _PEERS,
    "apex.contrib.sparsity": "torch.sparse.to_sparse_semi_structured",
    "apex.contrib.torchsched": "torch.compile",
    "apex.contrib.transducer": "torchaudio.functional.rnnt_loss",
    "apex.contrib.xentropy": "torch.nn.functional.cross_entropy, which smooths labels too",
    "apex.fp16_utils.fused_weight_norm": "torch.nn.utils.parametrizations.weight_norm",
    "apex.fp16_utils.fp16_optimizer._amp_state": "apex.amp._amp_state",
    "apex.fp16_utils.fp16_optimizer.maybe_print": "apex.amp._amp_state.maybe_print",
    "apex.fp16_utils.fp16util.TORCH_MAJOR": "torch.__version__",
    "apex.fp16_utils.fp16util.TORCH_MINOR": "torch.__version__",
    "apex.fp16_utils.fp16util.backwards_debug_hook": "torch.Tensor.register_hook",
    "apex.normalization.fused_layer_norm.fused_layer_norm_cuda": _LAYER_NORM,
    "apex.normalization.fused_layer_norm.supports_custom_op": "torch.library.custom_op",
    "apex.parallel.distributed.apply_flat_dist_call": _FLAT,
    "apex.parallel.distributed.extract_tensors": _FLAT,
    "apex.parallel.distributed.split_by_type": _FLAT,
    "apex.parallel.distributed.split_half_float_double": _FLAT,
    "apex.parallel.distributed.flatten": _FLATTEN,
    "apex.parallel.distributed.flatten_impl": _FLATTEN,
    "apex.parallel.distributed.import_flatten_impl": _FLATTEN,
    "apex.parallel.distributed.imported_flatten_impl": _FLATTEN,
    "apex.parallel.distributed.unflatten": _FLATTEN,
    "apex.parallel.distributed.unflatten_impl": _FLATTEN,
    "apex.parallel.multiproc": "torchrun, which starts one process for each GPU",
    "apex.parallel.optimized_sync_batchnorm.ReduceOp": "torch.distributed.ReduceOp",
    "apex.parallel.optimized_sync_batchnorm.SyncBatchnormFunction": _SYNC,
    "apex.parallel.optimized_sync_batchnorm.syncbn": _SYNC,
    "apex.parallel.optimized_sync_batchnorm_kernel": _SYNC,
    "apex.parallel.sync_batchnorm.ReduceOp": "torch.distributed.ReduceOp",
    "apex.parallel.sync_batchnorm.SyncBatchnormFunction": _SYNC,
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
    **{f"{file}.multi_tensor_applier": _APPLIER for file in _FILES_WITH_APPLIER},
}
"""Module or name of Apex that preamp does not have → what does its work today."""

_IMPORTED_INSIDE = {
    "apex.amp.amp": ("compat", "rnn_compat", "utils", "wrap"),
    "apex.amp.handle": ("utils",),
    "apex.amp.lists.tensor_overrides": ("compat",),
    "apex.amp.lists.torch_overrides": ("utils",),
}
"""File of Apex → refused modules of ``apex.amp`` that it has by their names."""

REFUSED.update(
    {
        f"{file}.{name}": REFUSED[f"apex.amp.{name}"]
        for file, names in _IMPORTED_INSIDE.items()
        for name in names
    }
)
