//===- FSDPTrainingOps.td - what happens to gradients ------*- tablegen -*-===//
//
// Policy and ops between the reduction of gradients and the update of the
// parameters: accumulation, clipping, parameter groups, learning rate.
// Included by FSDPOps.td.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_DIALECT_FSDPTRAININGOPS_TD
#define FSDP_DIALECT_FSDPTRAININGOPS_TD

//===----------------------------------------------------------------------===//
// Policy
//===----------------------------------------------------------------------===//

def FSDP_GradientClippingOp : FSDP_Op<"gradient_clipping"> {
  let summary = "Policy: clip the gradients by their global norm";
  let description = [{
    `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)`
    before every update. `fsdp-insert-clipping` turns it into an
    `fsdp.clip_grad_norm`.

    ```mlir
    fsdp.gradient_clipping {max_norm = 1.0, norm_type = 2.0}
    ```

    **GradientClipping-1**: `max_norm` is positive and `norm_type` is 1, 2 or
    infinity. **GradientClipping-2**: a module has at most one.
  }];
  let arguments = (ins F64Attr:$max_norm, F64Attr:$norm_type);
  let assemblyFormat = "attr-dict";
  let hasVerifier = 1;
}

def FSDP_ParamGroupOp : FSDP_Op<"param_group"> {
  let summary = "Policy: hyperparameters of the parameters that patterns match";
  let description = [{
    A parameter group of torch.optim. A parameter belongs to the first group
    with a pattern that matches its name; if there is none, it has the
    optimizer's own hyperparameters. `*` stays within one segment of the name,
    `**` crosses segments.

    ```mlir
    fsdp.param_group "**.bias", "norm.weight" {weight_decay = 0.0}
    ```

    **ParamGroup-1**: each hyperparameter is one that the module's optimizer
    has, of its type and in its range; `fused`, `foreach` and `library` hold for
    all groups and belong to the optimizer. **ParamGroup-2**: there is at least
    one pattern.
  }];
  let arguments = (ins StrArrayAttr:$patterns, DictionaryAttr:$hyperparameters);
  let assemblyFormat = "custom<Patterns>($patterns) $hyperparameters attr-dict";
  let hasVerifier = 1;
}

def FSDP_LRScheduleOp : FSDP_Op<"lr_schedule"> {
  let summary = "Policy: a factor on the learning rate of each step";
  let description = [{
    Like a `LambdaLR` with torchtitan's linear warm-up and decay. With s the
    step counted from 1, w `warmup_steps`, t `total_steps`, m `min_lr_ratio`:
    the factor is s / w for s <= w; after that, with p = min((s - w) / (t - w),
    1), it is m + (1 - m) d, where d is 0.5 (1 + cos(pi p)) for `cosine`, 1 - p
    for `linear`; for `constant` the factor is 1.

    ```mlir
    fsdp.lr_schedule {decay = "cosine", min_lr_ratio = 0.1, total_steps = 100, warmup_steps = 10}
    ```

    **LRSchedule-1**: `decay` is `cosine`, `linear` or `constant`;
    0 <= `warmup_steps` < `total_steps`; `min_lr_ratio` is in [0, 1].
    **LRSchedule-2**: a module has at most one.
  }];
  let arguments = (ins I64Attr:$warmup_steps, StrAttr:$decay,
                       I64Attr:$total_steps, F64Attr:$min_lr_ratio);
  let assemblyFormat = "attr-dict";
  let hasVerifier = 1;
}

def FSDP_AccumulationOp : FSDP_Op<"accumulation"> {
  let summary = "Policy: several microbatches per step";
  let description = [{
    A step runs forward and backward `steps` times, on as many microbatches, and
    updates once, with the gradient of the mean of their losses: each backward
    begins with 1 / `steps`. With `reduce_each_microbatch` every backward
    reduces and adds the shards, as FSDP2 does by default. Without it, whole
    gradients are added on each rank, in the dtype of their reduction, and
    reduced in the last microbatch, as after
    `set_requires_gradient_sync(False)`. With `all_reduce_each_microbatch =
    false` every backward reduce-scatters, the shards are added in the dtype of
    the reduction, and the sums are all-reduced over the replicas in the last
    microbatch, as after `set_requires_all_reduce(False)`; a mesh without an
    axis `replicate` has nothing to all-reduce. With
    `reshard_after_backward = false` parameters that backward gathered stay
    gathered for the next microbatch, as after
    `set_reshard_after_backward(False)`. Gradients of ignored parameters are
    added on each rank, whatever the policy.

    ```mlir
    fsdp.accumulation {reduce_each_microbatch = true, steps = 4}
    ```

    **Accumulation-1**: `steps` is positive. **Accumulation-2**: a module has
    at most one.
  }];
  let arguments = (ins I64Attr:$steps, BoolAttr:$reduce_each_microbatch,
                       DefaultValuedAttr<BoolAttr, "true">:$reshard_after_backward,
                       DefaultValuedAttr<BoolAttr, "true">:$all_reduce_each_microbatch);
  let assemblyFormat = "attr-dict";
  let hasVerifier = 1;
}

def FSDP_ChunkedLossOp : FSDP_Op<"chunked_loss"> {
  let summary = "Policy: compute the logits and the loss in chunks of rows";
  let description = [{
    The logits never exist whole: they are computed, with their loss and their
    gradients, for one of `chunks` parts of the rows after the other. This changes
    bits. `fsdp-chunk-loss` applies it.

    ```mlir
    fsdp.chunked_loss {chunks = 8}
    ```

    **ChunkedLoss-1**: `chunks` is 2 at least. **ChunkedLoss-2**: a module has at
    most one.
  }];
  let arguments = (ins I64Attr:$chunks);
  let assemblyFormat = "attr-dict";
  let hasVerifier = 1;
}

def FSDP_GradScalerOp : FSDP_Op<"grad_scaler"> {
  let summary = "Policy: scale the loss, and skip updates that are not finite";
  let description = [{
    `torch.amp.GradScaler`: backward begins with a scale instead of 1, the
    gradients are divided by it, and a step in which one of them is not finite,
    on any rank, updates nothing. The scale is then multiplied by
    `backoff_factor`; after `growth_interval` steps in a row without such a step
    it is multiplied by `growth_factor`. `fsdp-insert-loss-scaling` applies it.

    ```mlir
    fsdp.grad_scaler {backoff_factor = 0.5, growth_factor = 2.0, growth_interval = 2000, init_scale = 65536.0}
    ```

    **GradScaler-1**: `init_scale` and `growth_interval` are positive,
    `growth_factor` > 1, 0 < `backoff_factor` < 1. **GradScaler-2**: a module
    has at most one.
  }];
  let arguments = (ins F64Attr:$init_scale, F64Attr:$growth_factor,
                       F64Attr:$backoff_factor, I64Attr:$growth_interval);
  let assemblyFormat = "attr-dict";
  let hasVerifier = 1;
}

//===----------------------------------------------------------------------===//
// In the program
//===----------------------------------------------------------------------===//

def FSDP_LossScaleOp : FSDP_Op<"loss_scale", [
    FSDP_NamedResults, FSDP_InProgram,
    MemoryEffects<[MemRead<FSDP_StateResource>]>]> {
  let summary = "The step's loss scale";
  let description = [{
    The factor by which the gradient scaler multiplies the loss in this step,
    the same on all ranks.

    ```mlir
    %scale = fsdp.loss_scale : tensor<f32>
    ```

    **LossScale-1**: the result is a `tensor<f32>`.
  }];
  let results = (outs AnyRankedTensor:$scale);
  let assemblyFormat = "attr-dict `:` type($scale)";
  let hasVerifier = 1;
}

def FSDP_UnscaleOp : FSDP_Op<"unscale", [
    FSDP_NamedResults, HasParent<"ProgramOp">,
    MemoryEffects<[MemRead<FSDP_CommResource>, MemWrite<FSDP_CommResource>,
                   MemRead<FSDP_StateResource>, MemWrite<FSDP_StateResource>]>,
    DeclareOpInterfaceMethods<SymbolUserOpInterface>]> {
  let summary = "Divides all gradients by the loss scale, and looks for infinities";
  let description = [{
    `GradScaler.unscale_` on DTensors: the shards times the reciprocal of the
    scale; one all-reduce (a maximum) determines whether any element on any rank
    is not finite; if so, the step's `fsdp.optimizer_step` changes nothing. With
    `deferred` the shards stay as they are and the optimizer's fused kernels
    divide them, as in `GradScaler.step` with a fused optimizer.

    ```mlir
    %u0, %u1 = fsdp.unscale [@w, @b] %g0, %g1 : (…) -> (…)
    ```

    **Unscale-1**: there are as many operands and results as parameters; each
    has its parameter's sharded type, partial along no axis and not in f16.
  }];
  let arguments = (ins FlatSymbolRefArrayAttr:$param_names,
                       Variadic<FSDP_ShardedType>:$grads,
                       UnitAttr:$deferred);
  let results = (outs Variadic<FSDP_ShardedType>:$unscaled);
  let assemblyFormat = [{
    $param_names $grads attr-dict `:` functional-type($grads, $unscaled)
  }];
}

def FSDP_ClipGradNormOp : FSDP_Op<"clip_grad_norm", [
    FSDP_NamedResults, HasParent<"ProgramOp">,
    MemoryEffects<[MemRead<FSDP_CommResource>, MemWrite<FSDP_CommResource>]>,
    DeclareOpInterfaceMethods<SymbolUserOpInterface>]> {
  let summary = "Clips all gradients by their global norm";
  let description = [{
    `clip_grad_norm_` on DTensors: the p-norm of each shard, to the power p;
    one all-reduce of the vector of these; its root; the p-norm of that vector;
    every gradient times min(max_norm / (norm + 1e-6), 1). Parameters are in
    the order of `model.parameters()`, which is the order in the vector.

    ```mlir
    %c0, %c1 = fsdp.clip_grad_norm [@w, @b] %g0, %g1 {max_norm = 1.0, norm_type = 2.0} : (…) -> (…)
    ```

    **ClipGradNorm-1**: there are as many operands and results as parameters;
    each has its parameter's sharded type, partial along no axis.
  }];
  let arguments = (ins FlatSymbolRefArrayAttr:$param_names,
                       Variadic<FSDP_ShardedType>:$grads,
                       F64Attr:$max_norm, F64Attr:$norm_type);
  let results = (outs Variadic<FSDP_ShardedType>:$clipped);
  let assemblyFormat = [{
    $param_names $grads attr-dict `:` functional-type($grads, $clipped)
  }];
}

#endif
