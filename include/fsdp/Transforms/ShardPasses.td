//===- ShardPasses.td - captured level to sharded level ----*- tablegen -*-===//
//
// Included by Passes.td.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_TRANSFORMS_SHARDPASSES_TD
#define FSDP_TRANSFORMS_SHARDPASSES_TD

def DetectUnits
    : LevelPass<"fsdp-detect-units", "Captured", "Captured"> {
  let summary = "Find the model's blocks: modules that are repeated";
  let description = [{
    If the module has an `fsdp.auto_units`, the pass replaces it by one
    `fsdp.unit_pattern` for each block. Modules whose names are equal except for
    the numbers in them form a family: `layers.0` and `layers.1`, `layer1.0` and
    `layer2.1`. A family is repeated if two of its modules call the same
    operators in forward in the same order, except for some that only one of them
    calls in between (a downsampling branch). Layers, which contain no modules,
    do not count. The blocks are the outermost members of repeated families. But
    if all children of such a module are members of repeated families and alike in
    this sense, the module is a row of blocks, and its children are the units.
    A module of `fsdp.entries` is not chosen, but modules inside it may be: as a
    unit, it would need other sums of gradients than the program has.

    A remark says what was chosen; a warning says that nothing was.

    After: there is no `fsdp.auto_units`.
  }];
}

def AssignUnits
    : LevelPass<"fsdp-assign-units", "Captured", "Grouped"> {
  let summary = "Group parameters into FSDP units by the module's patterns";
  let description = [{
    Replaces every `fsdp.unit_pattern` by one `fsdp.unit` for each module that
    it matches, and gives every parameter the unit of its innermost matching
    module. Parameters that no pattern claims belong to the root unit, `(root)`.
    If two patterns match one module, the first wins. A list of patterns makes
    one unit, named after its modules: `norm+output`.

    If the names of a tied parameter fall into different units, FSDP2 reports an
    error and asks to group them. Here the units become one, with a warning; this
    is the root unit if it is among them.

    Parameters that an `fsdp.ignore` matches get no unit and are marked
    `ignored`. A module all of whose parameters are ignored is no unit, as in
    FSDP2; a pattern may match it, with the root unit's mixed precision.

    `reshard_after_forward` defaults to true, and to false for the root unit. A
    `post_forward_size` of 1 becomes `reshard_after_forward = false`, with
    FSDP2's warning; a size of all ranks becomes `true`.
    The pattern `""` is the root unit's.

    Mixed precision must match the captured step, as `fsdp.captured_precision`
    of the module says, because the casts of activations and gradients are in the
    program. So are the sums of the gradients of units' inputs, which are first
    added inside a unit. If that makes a difference for a module, it is listed in
    `fsdp.entries`; it must then be in a unit of `fsdp.captured_units` if and
    only if it is in a unit here.

    After: every `fsdp.param` names a unit.
  }];
}

def ChooseMemory
    : LevelPass<"fsdp-choose-memory", "Grouped", "Grouped"> {
  let summary = "Choose what is kept, so that the step is fast and fits";
  let description = [{
    If the schedule has no `memory_budget`, the pass changes nothing. Otherwise
    it compiles the module to a plan, lays out its memory, and compares the peak
    with the budget. With `memory = "policy"` a step that does not fit is an
    error, which names what holds the memory at the peak and the choice that
    fits with the least loss of time.

    With `memory = "auto"` the pass compiles choices for the model's blocks and
    simulates them on the schedule's device. The blocks are the largest set of
    units that have parameters of the same types. The choices are:

    - parameters are resharded after forward as the policy says, resharded to the
      ranks of a host (a post-forward mesh), or not resharded;
    - activations are kept, or recomputed in some of the blocks (the first, the
      last, or evenly spread ones), either all or all except those of matrix
      products and attention;
    - one reduce-scatter is in flight, if the schedule does not say how many.

    Time and memory are linear in the number of blocks that recompute, so a few
    choices are enough. The pass takes the fastest choice that fits. A remark
    names it, and its distance from a lower bound on the time: the step's longest
    stream without what is recomputed and gathered again.
    Prefetching then fills the budget (fsdp-prefetch-all-gathers). If the policy
    has checkpoint patterns, recomputation is not varied.
  }];
}

def BucketUnits
    : LevelPass<"fsdp-bucket-units", "Grouped", "Grouped"> {
  let summary = "Gather and reduce groups of parameters other than the units";
  let description = [{
    With the schedule's `bucket = "unit"`, the pass changes nothing. With
    `parameter`, each parameter becomes a unit by itself. With `saturation`,
    neighbours in the order of the module form one unit until its all-gather is
    so large that the latency of the link is a tenth of its time on the
    schedule's device, at least 10 and at most 500 MB: small units are joined,
    and large ones cut.

    With `optimal` the candidates are these three, and partitions of the
    parameters into runs of neighbours that no other partition beats in both
    exposed communication and peak memory, by the model of `OptimalBuckets.h`.
    Each candidate is compiled and simulated, and the fastest that fits into
    `memory_budget` is taken; of several with the same time, the one with the
    lowest peak, then FSDP2's units. Remarks list the candidates, and the gap
    between the step and the longest of compute alone and each stream's
    transfers.

    Only units of the same policy are joined. A unit with parameters of several
    dtypes, which are reduced in their common dtype, is not changed. The bits are
    those of the original units: every element is reduced in the same order.
  }];
}

def ChunkLoss : LevelPass<"fsdp-chunk-loss", "Grouped", "Grouped"> {
  let summary = "Compute the logits and their loss a part of the rows at a time";
  let description = [{
    Replaces `fsdp.chunked_loss`. The logits, a matrix of a row for each target,
    and all tensors of their size are computed for some of the rows, with the
    loss and the gradients that come of it, then for the next rows. Only those of
    one chunk exist at a time. All of it is computed where backward begins.

    The section begins at the products that make the logits and ends at the loss
    (`nll_loss_forward`) and at the products and sums that take the logits'
    gradients. In between are views, casts, `_log_softmax` and its backward, and
    operators that compute element by element. The gradients of what the logits
    were computed from are concatenated, and those of the weights and biases
    summed over the chunks, which gives **other bits**, as does the sum of the
    losses.

    If another op reads the logits, or has to be known before (`label_smoothing`,
    a prediction that is returned), a warning names it, and the loss stays whole.
    Of several losses, that of the largest logits is computed in chunks. A remark
    (`fsdp-chunk`) says how many bytes of the logits' size there were.

    After: no `fsdp.chunked_loss`.
  }];
}

def RecomputeActivations
    : LevelPass<"fsdp-recompute-activations", "Grouped", "Grouped"> {
  let summary = "Recompute the activations of checkpointed modules in backward";
  let description = [{
    Replaces every `fsdp.checkpoint_pattern`. If backward uses what a matching
    module computes in forward, it is recomputed there: the calls that this
    takes, marked `recompute`, are cloned before the first such use, from the
    values that the module got from outside. Recomputed calls read the
    parameters of the all-gather in backward. The results are those of forward,
    bit for bit.

    These results are kept, as without the policy:

    - results of the operators in `save` (of `products`, those that are dear to
      compute again);
    - results that an op outside the module's backward uses after forward (the
      next module's input, for example), because their memory is held anyway;
    - results of random operators: a dropout's mask is not drawn again;
    - results of a call that writes what the module does not own (BatchNorm's
      running statistics), or reads something that is written later.

    A chain of in-place writes is recomputed whole or kept whole. CSE does not
    merge it with forward, because it does not merge a call that allocates.

    A remark (`fsdp-recompute`) says for each module how many calls are
    recomputed and how many bytes are not kept; a missed remark says what is kept
    all the same, and why.

    After: no `fsdp.checkpoint_pattern`.
  }];
}

def SimplifyCalls
    : LevelPass<"fsdp-simplify-calls", "Grouped", "Grouped"> {
  let summary = "Drop calls that only autograd's formulas needed";
  let description = [{
    Replaces, in the step and in the evaluation, a value by one that has the same
    elements, bit for bit:
    - a view by what it views, directly or through views, if sizes and strides are
      equal (`t` of `t`), or by an equal view made earlier;
    - a copy (`clone`, `_to_copy`, `pow` with the exponent 1) by what it copies, if
      sizes, strides and dtype are equal, or by an equal copy that is still needed
      (autocast's, one a projection), if only calls use both and none writes them.

    A multiple of what `expand` gave (the derivative of a mean) is made before it,
    if all users compute element by element beside a row-major tensor of its type.
    The peak does not grow: what is used longer takes the place of as many bytes. A
    remark (`fsdp-simplify`) says how many calls and bytes written are saved.
  }];
}

def OffloadActivations
    : LevelPass<"fsdp-offload-activations", "Grouped", "Grouped"> {
  let summary = "Keep the activations of modules on the host until backward";
  let description = [{
    Replaces every `fsdp.offload_pattern`. A storage that a call of a matching
    module allocates in forward and backward uses is copied to the host after
    its last use in forward, with `fsdp.offload_activation`, and back before its
    first use in backward, with `fsdp.reload_activation`. All views of it that
    backward uses come back with it, in one storage.

    The pass does not copy storages of fewer than `min_bytes`, nor storages that
    are held on the device anyway: the loss, parameters and their views,
    gradients, buffers, inputs. Recomputed activations are not kept, so they are
    not copied.

    ```mlir
    %s = aten.call "aten::exp"(%x) : (tensor<512xf32>) -> tensor<512xf32> loc("layer")
    …
    %g = aten.call "aten::mul.Tensor"(%d, %s) : (tensor<512xf32>, tensor<512xf32>) -> tensor<512xf32>
    ```

    becomes

    ```mlir
    %s = aten.call "aten::exp"(%x) : (tensor<512xf32>) -> tensor<512xf32> loc("layer")
    %h = fsdp.offload_activation %s : tensor<512xf32> to !fsdp.host<tensor<512xf32>>
    …
    %r = fsdp.reload_activation %h : !fsdp.host<tensor<512xf32>> to tensor<512xf32>
    %g = aten.call "aten::mul.Tensor"(%d, %r) : (tensor<512xf32>, tensor<512xf32>) -> tensor<512xf32>
    ```

    Remarks of category `fsdp-offload` say for each pattern how much is copied.

    Run it after recomputation. After: no
    `fsdp.offload_pattern`; Program-12 holds.
  }];
}

def PlaceParams
    : LevelPass<"fsdp-place-params", "Grouped", "Placed"> {
  let summary = "Shard every parameter over the mesh";
  let description = [{
    Gives each `fsdp.param` the sharding `[{"shard"}, {}, …]` over the module's
    mesh: ceil(n / ranks) rows per rank, as in FSDP2 and `torch.chunk`. A
    parameter that an `fsdp.shard_placement` matches is sharded on that dimension
    instead. The program still reads whole parameters.

    Before: every parameter has a unit; one `fsdp.mesh` with an axis `shard`.
    After: every parameter has a sharding.
  }];
}

def InsertAllGathers
    : LevelPass<"fsdp-insert-all-gathers", "Placed", "Gathered"> {
  let summary = "Gather each unit before its first use";
  let description = [{
    Replaces the reads of whole parameters by reads of shards and, for each
    unit, one `fsdp.all_gather` of all its parameters before the first use of
    any of them.

    Before: parameters are placed. After: no whole parameter is read.
  }];
}

def InsertReshards
    : LevelPass<"fsdp-insert-reshards", "Gathered", "Gathered"> {
  let summary = "Free gathered parameters after forward, gather again for backward";
  let description = [{
    A unit with `reshard_after_forward = true` is resharded after its last use
    in forward and gathered again before its first use in backward. Views of a
    gathered parameter that backward uses are rebuilt from the second all-gather.
    Every all-gather ends in an `fsdp.reshard` after its last use.

    A unit whose parameters backward does not use (an embedding, for example) is
    not gathered again.

    A unit with `post_forward_size = k` is resharded to 1/k of its parameters
    after forward, and gathered again from the parts that k neighbours kept.

    A remark (`fsdp-reshard`) says for each unit what happens to it after
    forward; a missed remark, that nothing is computed until it is gathered again.

    Before: one all-gather per unit. After: Program-3 holds.
  }];
}

def InsertReduceScatters
    : LevelPass<"fsdp-insert-reduce-scatters", "Gathered", "Reduced"> {
  let summary = "Reduce each unit's gradients when the last of them is available";
  let description = [{
    Puts one `fsdp.reduce_scatter` after the last of a unit's whole gradients, in
    unit order, and gives its results to `fsdp.gradients` in their place.
    Parameters without a gradient take no part, as in FSDP2.

    The reduction is in the unit's `reduce_dtype`, or if there is none in the
    dtype of the parameters (as in FSDP2 since PyTorch 2.15; where the module was
    captured for an earlier one, in that of the gradients). It is an average in
    fp32 and bf16. In other dtypes it is a sum, divided in part before and in part
    after, by FSDP2's rule. The unit's `gradient_division` gives the divisor, and
    may make it a sum that is divided afterwards.

    If the mesh has an axis `replicate` of more than one rank, the results are
    partial along this axis, and stay in the dtype of the reduction. They are also
    partial along an axis of one rank if the all-reduces are left to the last
    microbatch, because FSDP2 then adds shards in the dtype of the reduction.

    Before: gradients are whole. After: gradients are shards, partial along the
    axis of HSDP's replicas.
  }];
}

def InsertAllReduces
    : LevelPass<"fsdp-insert-all-reduces", "Reduced", "Reduced"> {
  let summary = "Reduce gradient shards over the replicas of HSDP";
  let description = [{
    Puts one `fsdp.all_reduce` over the axis `replicate` after each
    `fsdp.reduce_scatter` whose results are partial along this axis, and uses its
    results in their place. The division after a sum moves to it. If the unit's
    `gradient_division` has a factor, the reduce-scatter has already divided.

    Before: gradients may be partial along an axis. After: the gradients are
    averages over all ranks.
  }];
}

def InsertOffloadCopies
    : LevelPass<"fsdp-insert-offload-copies", "Reduced", "Reduced"> {
  let summary = "Copy shards of offloaded units to the device and gradients back";
  let description = [{
    The shards of a unit with `cpu_offload` lie on the host. The pass puts one
    `fsdp.copy_to_device` before each all-gather of such a unit, in the evaluation
    too, and at the end of backward one `fsdp.copy_to_host` of the unit's gradient
    shards, whose results are the gradients. So accumulation, clipping
    and the optimizer work on the host, as with FSDP2's `CPUOffloadPolicy`. Run it
    after `fsdp-insert-reduce-scatters` and `fsdp-insert-all-reduces`.

    Before:

    ```mlir
    fsdp.unit @u {cpu_offload}
    %w = fsdp.all_gather @u %s : (…) -> tensor<4x4xf32>
    %r = fsdp.reduce_scatter @u avg [@w] %g : (tensor<4x4xf32>) -> !fsdp.sharded<…>
    fsdp.gradients [@w] %r : !fsdp.sharded<…>
    ```

    After:

    ```mlir
    %d = fsdp.copy_to_device @u %s : (!fsdp.sharded<…>) -> !fsdp.sharded<…>
    %w = fsdp.all_gather @u %d : (…) -> tensor<4x4xf32>
    %r = fsdp.reduce_scatter @u avg [@w] %g : (tensor<4x4xf32>) -> !fsdp.sharded<…>
    %h = fsdp.copy_to_host @u [@w] %r : (!fsdp.sharded<…>) -> !fsdp.sharded<…>
    fsdp.gradients [@w] %h : !fsdp.sharded<…>
    ```
  }];
}

def InsertAccumulation
    : LevelPass<"fsdp-insert-accumulation", "Reduced", "Reduced"> {
  let summary = "Loop over a step's microbatches, and add their gradients";
  let description = [{
    Without an `fsdp.accumulation` of more than one step, the pass changes
    nothing. Otherwise forward and backward become the body of an
    `fsdp.microbatches`, backward begins with 1 / `steps` in place of 1, and the
    gradients are added in one of three ways:

    - With `reduce_each_microbatch`, one `fsdp.accumulate` of all gradient shards
      ends backward.
    - Without it, an `fsdp.accumulate` of its whole gradients precedes each
      `fsdp.reduce_scatter`, and all collectives of gradients run in the last
      microbatch only.
    - With `all_reduce_each_microbatch = false`, the results of all
      `fsdp.reduce_scatter` are added at the end of backward, and each
      `fsdp.all_reduce` takes the sums, in the last microbatch only.

    Whole gradients of ignored parameters are added at the end of backward.

    Whole gradients are added in the dtype of their reduction. If that is not the
    dtype of the gradients, a warning names the parameters that are used more than
    once: in the first microbatch, FSDP2 adds the gradients of the uses in the
    dtype of the reduction too, but the program adds them in the dtype of the
    gradients.

    Before: gradients are shards; those of ignored parameters are whole.
    After: the same, and they are results of the loop.
  }];
}

def DeferReshards
    : LevelPass<"fsdp-defer-reshards", "Reduced", "Reduced"> {
  let summary = "Keep what backward gathered for the next microbatch";
  let description = [{
    Removes `fsdp.accumulation`. Without a loop over microbatches, or with
    `reshard_after_backward = true`, the pass changes nothing else. Otherwise
    the last reshard of a unit that is gathered in backward moves to the end of
    backward and runs in the last microbatch only; what the unit's last
    all-gather gathers is carried to the next microbatch, where it takes the
    place of the unit's first all-gather.

    Before: every all-gather has its reshard. After: Program-9 holds.
  }];
}

def InsertLossScaling
    : LevelPass<"fsdp-insert-loss-scaling", "Reduced", "Reduced"> {
  let summary = "Scale the loss and unscale its gradients";
  let description = [{
    Without an `fsdp.grad_scaler`, the pass changes nothing. Otherwise backward
    begins with `fsdp.loss_scale` in place of 1, and the optimizer phase begins
    with one `fsdp.unscale` of all gradient shards. It is `deferred` if the
    optimizer is fused and nothing is clipped.

    Before: gradients are shards. After: gradients are the unscaled shards.
  }];
}

def InsertClipping
    : LevelPass<"fsdp-insert-clipping", "Reduced", "Reduced"> {
  let summary = "Clip the gradients before the update";
  let description = [{
    Without an `fsdp.gradient_clipping`, the pass changes nothing. Otherwise the
    optimizer phase begins with one `fsdp.clip_grad_norm` of all gradient shards,
    in the order of `model.parameters()`: a module's own parameters before those
    of its children.

    Before: gradients are shards. After: gradients are the clipped shards.
  }];
}

def InsertOptimizer
    : LevelPass<"fsdp-insert-optimizer", "Reduced", "Sharded"> {
  let summary = "Update the shards at the end of the step";
  let description = [{
    Replaces `fsdp.gradients` by one `fsdp.optimizer_step` in the optimizer phase.
    If the module has any `fsdp.param_group`, each
    parameter gets the first group whose pattern matches its name or one of its
    aliases; a group that gets no parameter is an error.

    Before: gradients are shards; the module has an `fsdp.optimizer`. After:
    the program is a complete training step.
  }];
}

#endif // FSDP_TRANSFORMS_SHARDPASSES_TD
