//===- FSDPCollectiveOps.td - collectives over a unit ------*- tablegen -*-===//
//
// Included by FSDPOps.td.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_DIALECT_FSDPCOLLECTIVEOPS_TD
#define FSDP_DIALECT_FSDPCOLLECTIVEOPS_TD

def FSDP_AllGatherOp : FSDP_Op<"all_gather", [
    FSDP_NamedResults, FSDP_InProgram, FSDP_CollectiveOpInterface,
    FSDP_ConditionalOpInterface, AttrSizedOperandSegments,
    MemoryEffects<[MemRead<FSDP_CommResource>, MemWrite<FSDP_CommResource>]>,
    DeclareOpInterfaceMethods<SymbolUserOpInterface>]> {
  let summary = "Gathers all parameters of a unit, in unit order";
  let description = [{
    ```mlir
    %w0, %w1 = fsdp.all_gather @layers.0 %s0, %s1 : (…) -> (…)
    ```

    If the operands are the results of an `fsdp.reshard`, it gathers over their
    sub-axis.

    ```mlir
    %w = fsdp.all_gather @layers.0 %s when %first else %kept : !fsdp.carried<tensor<64x64xf32>> : (…) -> (…)
    ```

    With `when %first` it gathers only in the first microbatch of a step; in
    later ones the results are the parameters that the microbatch before left
    gathered.

    With an `!fsdp.future` as its result, the op only launches the gather
    (scheduled level).

    **AllGather-1**: the unit has parameters, and the operands are the shards of
    all of them, in unit order: all of them read, all of them copies by one
    `fsdp.copy_to_device`, or all results of one `fsdp.reshard`.
    **AllGather-2**: each result is the operand's global tensor type, in the
    dtype that the unit's `mixed_precision` gives it (placement and cast are
    recomputed and compared). **AllGather-3**: there is a condition if and only
    if parameters are kept; there is then one kept parameter for each result, a
    carried value of the result's type.
  }];
  let arguments = (ins FlatSymbolRefAttr:$unit, Variadic<FSDP_ShardedType>:$shards,
                       Optional<I1>:$condition,
                       Variadic<FSDP_CarriedType>:$kept);
  let results = (outs Variadic<FSDP_TensorOrFuture>:$params);
  let assemblyFormat = [{
    $unit $shards (`when` $condition^)? (`else` $kept^ `:` type($kept))? attr-dict
    `:` functional-type($shards, $params)
  }];
  let builders = [
    // In every microbatch.
    OpBuilder<(ins "::mlir::TypeRange":$params,
                   "::mlir::FlatSymbolRefAttr":$unit,
                   "::mlir::ValueRange":$shards),
              [{ build($_builder, $_state, params, unit, shards,
                       /*condition=*/::mlir::Value(), /*kept=*/{}); }]>
  ];
  let hasVerifier = 1;
}

def FSDP_ReshardOp : FSDP_Op<"reshard", [
    FSDP_NamedResults, FSDP_InProgram, FSDP_ConditionalOpInterface,
    AttrSizedOperandSegments,
    MemoryEffects<[MemRead<FSDP_CommResource>, MemWrite<FSDP_CommResource>]>,
    DeclareOpInterfaceMethods<SymbolUserOpInterface>]> {
  let summary = "Ends the life of gathered parameters";
  let description = [{
    If the op has results, this rank keeps a part of the parameters, from which
    an `fsdp.all_gather` restores them within a group. With `when %last` the
    parameters' life ends only in the last microbatch of a step.

    ```mlir
    fsdp.reshard @layers.0 %w : tensor<64x64xf32>
    %k = fsdp.reshard @layers.1 %v : tensor<64x64xf32> to !fsdp.sharded<tensor<64x64xf32>, <@world, [{"shard":2}, {} ]>>
    ```

    **Reshard-1**: operands are all results of one `fsdp.all_gather` of the same
    unit, or of the wait for it, in order. **Reshard-2**: there are results only
    for a unit with `post_forward_size`, which divides the number of ranks of
    the axis and is less than it; each has its operand's type and its
    parameter's sharding over that sub-axis.
  }];
  let arguments = (ins FlatSymbolRefAttr:$unit, Variadic<AnyRankedTensor>:$params,
                       Optional<I1>:$condition, Optional<AnyRankedTensor>:$buffer);
  let results = (outs Variadic<FSDP_ShardedType>:$kept);
  let assemblyFormat = [{
    $unit $params (`when` $condition^)? (`in` $buffer^ `:` type($buffer))? attr-dict
    `:` type($params) (`to` type($kept)^)?
  }];
  let builders = [
    // In every microbatch, in memory of its own.
    OpBuilder<(ins "::mlir::TypeRange":$kept, "::mlir::FlatSymbolRefAttr":$unit,
                   "::mlir::ValueRange":$params),
              [{ build($_builder, $_state, kept, unit, params,
                       /*condition=*/::mlir::Value(),
                       /*buffer=*/::mlir::Value()); }]>
  ];
  let hasVerifier = 1;
}

def FSDP_ReduceScatterOp : FSDP_Op<"reduce_scatter", [
    FSDP_NamedResults, FSDP_InProgram, FSDP_CollectiveOpInterface,
    FSDP_ConditionalOpInterface, AttrSizedOperandSegments,
    MemoryEffects<[MemRead<FSDP_CommResource>, MemWrite<FSDP_CommResource>]>,
    DeclareOpInterfaceMethods<SymbolUserOpInterface>]> {
  let summary = "Reduces a unit's gradients over all ranks, keeping this rank's rows";
  let description = [{
    ```mlir
    %r0, %r1 = fsdp.reduce_scatter @layers.0 avg [@a, @b] %g0, %g1 : (…) -> (…)
    ```

    Gradients are cast to `reduce_dtype`, reduced in it, and cast to the dtype
    of the parameter's shards; without the attribute they are reduced in their
    own dtype. Over Gloo and shared memory, `avg` is a sum in Gloo's order
    (spec.md), followed by a division. `sum` divides each gradient by `predivide` before
    the reduction, and the sum by `postdivide` after it: this is how FSDP2 keeps
    an average in fp16 within range. With `premultiply` it multiplies each
    gradient by that number, rounded to the dtype of the reduction: NCCL's
    PREMUL_SUM, which is how FSDP2 divides by a user's factor. With `when %last`
    it runs only in the last microbatch of a step. With an `!fsdp.future` as its
    result, the op only launches the reduction, as does `fsdp.all_reduce`
    (scheduled level).

    **ReduceScatter-1**: there is at least one parameter; the parameters belong
    to the unit, are in unit order, and are as many as the operands and the
    results. **ReduceScatter-2**: each operand has its parameter's type, in its
    gradient's dtype or, with a condition, in that of the sums of an
    `fsdp.accumulate`. **ReduceScatter-3**: each result has its parameter's
    sharded type, partial along every axis of more than one rank that does not
    shard it; in the dtype of the reduction if it is partial, otherwise in its
    own. **ReduceScatter-4**: `reduce_dtype` is that of the unit's
    `mixed_precision`, if that has one; divisors and `premultiply` are positive
    and go with `sum`.
  }];
  let arguments = (ins FlatSymbolRefAttr:$unit, FSDP_ReduceKindAttr:$kind,
                       FlatSymbolRefArrayAttr:$param_names,
                       Variadic<AnyRankedTensor>:$grads,
                       OptionalAttr<TypeAttr>:$reduce_dtype,
                       OptionalAttr<F64Attr>:$predivide,
                       OptionalAttr<F64Attr>:$postdivide,
                       OptionalAttr<F64Attr>:$premultiply,
                       Optional<I1>:$condition,
                       Optional<AnyRankedTensor>:$buffer);
  let results = (outs Variadic<FSDP_ShardedOrFuture>:$shards);
  let assemblyFormat = [{
    $unit $kind $param_names $grads (`when` $condition^)?
    (`in` $buffer^ `:` type($buffer))? attr-dict `:`
    functional-type($grads, $shards)
  }];
}

def FSDP_AllReduceOp : FSDP_Op<"all_reduce", [
    FSDP_NamedResults, FSDP_InProgram, FSDP_CollectiveOpInterface,
    FSDP_ConditionalOpInterface, AttrSizedOperandSegments,
    MemoryEffects<[MemRead<FSDP_CommResource>, MemWrite<FSDP_CommResource>]>,
    DeclareOpInterfaceMethods<SymbolUserOpInterface>]> {
  let summary = "Reduces a unit's gradient shards over the replicas (HSDP)";
  let description = [{
    ```mlir
    %a0, %a1 = fsdp.all_reduce @layers.0 avg over "replicate" [@a, @b] %r0, %r1 : !fsdp.sharded<…>, !fsdp.sharded<…>
    ```

    The ranks with the same index on all other axes exchange their shards, which
    are partial along the axis before the op and not after it. `avg` is a sum,
    in the order of a reduce-scatter's, followed by a division by the axis's
    size; `sum` divides by `postdivide` instead. Shards arrive and are reduced
    in `reduce_dtype`, and are then cast to the dtype of the parameter's shards.
    With `when %last` it runs only in the last microbatch of a step.

    **AllReduce-1**: there is at least one parameter; the parameters belong to
    the unit, are in unit order, and are as many as the operands and the
    results. **AllReduce-2**: each operand has its parameter's sharded type,
    partial along the axis, in `reduce_dtype` if that is given; each result has
    the same type, but is partial along the other axes only, and, if there are
    none, is in its parameter's dtype. **AllReduce-3**: the axis is one of the
    mesh.
    **AllReduce-4**: a divisor is positive and goes with `sum`.
  }];
  let arguments = (ins FlatSymbolRefAttr:$unit, FSDP_ReduceKindAttr:$kind,
                       StrAttr:$axis, FlatSymbolRefArrayAttr:$param_names,
                       Variadic<FSDP_ShardedType>:$grads,
                       OptionalAttr<TypeAttr>:$reduce_dtype,
                       OptionalAttr<F64Attr>:$postdivide,
                       Optional<I1>:$condition,
                       Optional<AnyRankedTensor>:$buffer);
  let results = (outs Variadic<FSDP_ShardedOrFuture>:$reduced);
  let assemblyFormat = [{
    $unit $kind `over` $axis $param_names $grads (`when` $condition^)?
    (`in` $buffer^ `:` type($buffer))? attr-dict `:`
    functional-type($grads, $reduced)
  }];
}

#endif
