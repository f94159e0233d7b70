//===- FSDPOffloadOps.td - copies between host and device --*- tablegen -*-===//
//
// Included by FSDPOps.td.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_DIALECT_FSDPOFFLOADOPS_TD
#define FSDP_DIALECT_FSDPOFFLOADOPS_TD

def FSDP_CopyToDeviceOp : FSDP_Op<"copy_to_device", [HasParent<"ProgramOp">,
    MemoryEffects<[MemRead<FSDP_CommResource>, MemWrite<FSDP_CommResource>]>,
    DeclareOpInterfaceMethods<SymbolUserOpInterface>]> {
  let summary = "Copies this rank's shards of an offloaded unit from the host";
  let description = [{
    The shards of a unit with `cpu_offload` lie on the host. A gather takes
    copies of them, cast to the dtype in which the unit is gathered; they end
    with the gather's `fsdp.reshard`. Operands are in unit order.

    ```mlir
    %d = fsdp.copy_to_device @layers.0 %s : (!fsdp.sharded<…>) -> !fsdp.sharded<…>
    ```

    **CopyToDevice-1**: the unit has `cpu_offload`, each operand is a read of a
    parameter of it, and each result has its operand's type.
  }];
  let arguments = (ins FlatSymbolRefAttr:$unit, Variadic<FSDP_ShardedType>:$shards);
  let results = (outs Variadic<FSDP_ShardedType>:$copies);
  let assemblyFormat = [{
    $unit $shards attr-dict `:` functional-type($shards, $copies)
  }];
}

def FSDP_CopyToHostOp : FSDP_Op<"copy_to_host", [HasParent<"ProgramOp">,
    MemoryEffects<[MemRead<FSDP_CommResource>, MemWrite<FSDP_CommResource>]>,
    DeclareOpInterfaceMethods<SymbolUserOpInterface>]> {
  let summary = "Copies gradients' shards of an offloaded unit to the host";
  let description = [{
    The optimizer updates the shards of a unit with `cpu_offload` on the host,
    where its state lies too, with these copies of their gradients. With
    `last_microbatch` it runs in the last microbatch of a step only.

    ```mlir
    %h = fsdp.copy_to_host @layers.0 [@layers.0.w] %g : (!fsdp.sharded<…>) -> !fsdp.sharded<…>
    ```

    **CopyToHost-1**: the unit has `cpu_offload`, the parameters belong to it,
    and each operand and result has its parameter's sharded type.
  }];
  let arguments = (ins FlatSymbolRefAttr:$unit, FlatSymbolRefArrayAttr:$param_names,
                       Variadic<FSDP_ShardedType>:$grads,
                       UnitAttr:$last_microbatch);
  let results = (outs Variadic<FSDP_ShardedType>:$copies);
  let assemblyFormat = [{
    $unit $param_names $grads attr-dict `:` functional-type($grads, $copies)
  }];
}

#endif // FSDP_DIALECT_FSDPOFFLOADOPS_TD
