//===- FSDPOffloadOps.td - copies between host and device --*- tablegen -*-===//
//
// Included by FSDPOps.td.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_DIALECT_FSDPOFFLOADOPS_TD
#define FSDP_DIALECT_FSDPOFFLOADOPS_TD

def FSDP_CopyToDeviceOp : FSDP_Op<"copy_to_device", [
    FSDP_NamedResults, FSDP_InProgram, FSDP_ConditionalOpInterface,
    AttrSizedOperandSegments,
    MemoryEffects<[MemRead<FSDP_CommResource>, MemWrite<FSDP_CommResource>]>,
    DeclareOpInterfaceMethods<SymbolUserOpInterface>]> {
  let summary = "Copies this rank's shards of an offloaded unit from the host";
  let description = [{
    The shards of a unit with `cpu_offload` are on the host. A gather takes
    copies of them, cast to the dtype in which the unit is gathered; the copies
    end with the gather's `fsdp.reshard`. Operands are in unit order. The op has
    the condition of the gather.

    ```mlir
    %d = fsdp.copy_to_device @layers.0 %s : (!fsdp.sharded<…>) -> !fsdp.sharded<…>
    ```

    **CopyToDevice-1**: the unit has `cpu_offload`, each operand is a read of
    one of its parameters, and each result has its operand's type.
  }];
  let arguments = (ins FlatSymbolRefAttr:$unit, Variadic<FSDP_ShardedType>:$shards,
                       Optional<I1>:$condition, Optional<AnyRankedTensor>:$buffer);
  let results = (outs Variadic<FSDP_ShardedType>:$copies);
  let assemblyFormat = [{
    $unit $shards (`when` $condition^)? (`in` $buffer^ `:` type($buffer))? attr-dict
    `:` functional-type($shards, $copies)
  }];
}

def FSDP_CopyToHostOp : FSDP_Op<"copy_to_host", [
    FSDP_NamedResults, FSDP_InProgram, FSDP_CollectiveOpInterface,
    FSDP_ConditionalOpInterface, AttrSizedOperandSegments,
    MemoryEffects<[MemRead<FSDP_CommResource>, MemWrite<FSDP_CommResource>]>,
    DeclareOpInterfaceMethods<SymbolUserOpInterface>]> {
  let summary = "Copies gradient shards of an offloaded unit to the host";
  let description = [{
    The optimizer updates the shards of a unit with `cpu_offload` on the host,
    where its state is too, with these copies of their gradients. With
    `when %last` it runs only in the last microbatch of a step.

    ```mlir
    %h = fsdp.copy_to_host @layers.0 [@layers.0.w] %g : (!fsdp.sharded<…>) -> !fsdp.sharded<…>
    ```

    With an `!fsdp.future` as its result, the op only launches the copy
    (scheduled level).

    **CopyToHost-1**: the unit has `cpu_offload`, the parameters belong to it,
    and each operand and result has its parameter's sharded type; the results
    may be one future of them.
  }];
  let arguments = (ins FlatSymbolRefAttr:$unit, FlatSymbolRefArrayAttr:$param_names,
                       Variadic<FSDP_ShardedType>:$grads,
                       Optional<I1>:$condition);
  let results = (outs Variadic<FSDP_ShardedOrFuture>:$copies);
  let assemblyFormat = [{
    $unit $param_names $grads (`when` $condition^)? attr-dict `:`
    functional-type($grads, $copies)
  }];
}

def FSDP_OffloadPatternOp : FSDP_Op<"offload_pattern"> {
  let summary = "Policy: the modules whose activations are kept on the host";
  let description = [{
    What a matching module, or a module inside it, computes in forward for use
    in backward is copied to the host after its last use in forward, and back
    before its first use in backward, if it has at least `min_bytes`; 1,024 is
    torchtune's `min_offload_size`. If two patterns match, the first wins.
    `fsdp-offload-activations` replaces the op by copies.

    ```mlir
    fsdp.offload_pattern "layers.*" {min_bytes = 1048576 : i64}
    ```

    **OffloadPattern-1**: the pattern is not empty, and `min_bytes` is positive.
  }];
  let arguments = (ins StrAttr:$pattern,
                       DefaultValuedAttr<I64Attr, "1024">:$min_bytes);
  let assemblyFormat = "$pattern attr-dict";
  let hasVerifier = 1;
}

def FSDP_OffloadActivationOp : FSDP_Op<"offload_activation", [
    FSDP_NamedResults, FSDP_InProgram, FSDP_CollectiveOpInterface,
    MemoryEffects<[MemRead<FSDP_CommResource>, MemWrite<FSDP_CommResource>]>]> {
  let summary = "Copies a storage of forward to the host";
  let description = [{
    The first operand owns the storage, which is copied once; the others are
    views of it that backward uses too. The device's copy is not used any more
    (Program-12), so its life ends here.

    ```mlir
    %h = fsdp.offload_activation %x, %v : tensor<2x4xf32>, tensor<8xf32> to !fsdp.host<tensor<2x4xf32>, tensor<8xf32>>
    ```

    With an `!fsdp.future` of that type as its result, the op only launches the
    copy (scheduled level), and the life of the storage ends with the wait.

    **OffloadActivation-1**: a call made the first operand's storage, and the
    other operands share it. **OffloadActivation-2**: the result is an
    `!fsdp.host` of the operands' types, or a future of one.
  }];
  let arguments = (ins Variadic<AnyRankedTensor>:$values);
  let results = (outs FSDP_HostOrFuture:$host);
  let assemblyFormat = "$values attr-dict `:` type($values) `to` qualified(type($host))";
  let hasVerifier = 1;
}

def FSDP_ReloadActivationOp : FSDP_Op<"reload_activation", [
    FSDP_NamedResults, FSDP_InProgram, FSDP_CollectiveOpInterface,
    MemoryEffects<[MemRead<FSDP_CommResource>, MemWrite<FSDP_CommResource>]>]> {
  let summary = "Copies a storage back to the device";
  let description = [{
    The results have the values and the strides of what
    `fsdp.offload_activation` took. The first owns the new storage, the others
    are views of it.

    ```mlir
    %x, %v = fsdp.reload_activation %h : !fsdp.host<tensor<2x4xf32>, tensor<8xf32>> to tensor<2x4xf32>, tensor<8xf32>
    ```

    With an `!fsdp.future` as its result, the op only launches the copy
    (scheduled level).

    **ReloadActivation-1**: the results have the types that the `!fsdp.host`
    operand lists, or are one future of them.
  }];
  let arguments = (ins FSDP_HostType:$host);
  let results = (outs Variadic<FSDP_TensorOrFuture>:$values);
  let assemblyFormat = "$host attr-dict `:` qualified(type($host)) `to` type($values)";
  let hasVerifier = 1;
}

#endif // FSDP_DIALECT_FSDPOFFLOADOPS_TD
