//===- FSDPScheduleOps.td - the scheduled level ------------*- tablegen -*-===//
//
// Included by FSDPOps.td.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_DIALECT_FSDPSCHEDULEOPS_TD
#define FSDP_DIALECT_FSDPSCHEDULEOPS_TD

def FSDP_ScheduleOp : FSDP_Op<"schedule"> {
  let summary = "Policy: when collectives are launched and awaited";
  let description = [{
    A schedule changes no bits.

    - `prefetch`: `latest_safe` launches each gather as late as possible while
      the computation before its first use still hides it; `fsdp2` launches the
      next gather of a phase when the one before it is complete, as FSDP2 does;
      `none` launches each gather where it is needed.
    - `reduce_scatters_in_flight`: the number of reduce-scatters whose gradients
      are held while computation goes on. FSDP2 has one; the default is two, or
      what `memory = "auto"` chooses.
    - `bucket`: what is gathered and reduced together: `unit`, FSDP2's units;
      `parameter`, each parameter by itself; `saturation`, neighbours up to the
      size that saturates the link; `optimal`, whichever of these and of the
      best partitions into neighbours is fastest within the budget.
    - `memory`: `policy` takes what is resharded and recomputed from the policy;
      `auto` chooses it, and `reduce_scatters_in_flight` if that is not given,
      so that the step is fast within the budget.
    - `memory_budget`: bytes per rank. No gather is launched where it would not
      fit; a step that cannot fit is an error.
    - `stage_checkpoints`: the copies of a step's state for a checkpoint are
      instructions of the next step, and run beside its computation.
    - `fuse`: `exact` runs chains of calls as kernels that give the same bits,
      where those have been compared with ATen's; `unproven` also where they have
      not; `none` runs each call by itself.
    - `device`: the device description that times and bytes come from: the name
      of one that fsdp-opt knows, or a YAML file.

    ```mlir
    fsdp.schedule {device = "h100", memory_budget = 68719476736 : i64, prefetch = "latest_safe"}
    ```

    **Schedule-1**: `prefetch`, `bucket`, `memory` and `fuse` each have one of the
    values above; at least one reduce-scatter is in flight; the budget is
    positive, and is given if `memory` is `auto`.
  }];
  let arguments = (ins DefaultValuedAttr<StrAttr, "\"latest_safe\"">:$prefetch,
                       OptionalAttr<I64Attr>:$reduce_scatters_in_flight,
                       DefaultValuedAttr<StrAttr, "\"unit\"">:$bucket,
                       DefaultValuedAttr<StrAttr, "\"policy\"">:$memory,
                       OptionalAttr<I64Attr>:$memory_budget,
                       DefaultValuedAttr<BoolAttr, "false">:$stage_checkpoints,
                       DefaultValuedAttr<StrAttr, "\"exact\"">:$fuse,
                       DefaultValuedAttr<StrAttr, "\"cpu\"">:$device);
  let assemblyFormat = "attr-dict";
  let hasVerifier = 1;
  let extraClassDeclaration = [{
    /// `reduce_scatters_in_flight`, or two if it is not given.
    int64_t getNumReducesInFlight();
  }];
}

def FSDP_WaitOp : FSDP_Op<"wait", [
    FSDP_NamedResults, FSDP_InProgram,
    MemoryEffects<[MemRead<FSDP_CommResource>, MemWrite<FSDP_CommResource>]>,
    TypesMatchWith<"results are those of the future", "future", "values",
                   "::llvm::cast<::mlir::fsdp::FutureType>($_self).getTypes()">]> {
  let summary = "Waits for a collective and gives its results";
  let description = [{
    ```mlir
    %f = fsdp.all_gather @layers.0 %s : (!fsdp.sharded<…>) -> !fsdp.future<tensor<64x64xf32>>
    %w = fsdp.wait %f : !fsdp.future<tensor<64x64xf32>>
    ```
  }];
  let arguments = (ins FSDP_FutureType:$future);
  let results = (outs Variadic<FSDP_Awaited>:$values);
  let assemblyFormat = "$future attr-dict `:` qualified(type($future))";
}

def FSDP_StageStateOp : FSDP_Op<"stage_state", [
    FSDP_NamedResults, FSDP_InProgram, FSDP_CollectiveOpInterface,
    FSDP_ConditionalOpInterface,
    MemoryEffects<[MemRead<FSDP_CommResource>, MemWrite<FSDP_CommResource>]>,
    DeclareOpInterfaceMethods<SymbolUserOpInterface>]> {
  let summary = "Copies a unit's state to a checkpoint's staging memory";
  let description = [{
    If a checkpoint of the step before is being taken, this rank's shards of the
    unit's parameters and of their optimizer state are copied to where the
    checkpoint is written from. Otherwise nothing happens. The op only launches
    the copies; they are complete after the `fsdp.wait`. In a loop over
    microbatches it runs `when %first`.

    ```mlir
    %f = fsdp.stage_state @layers.0 : !fsdp.future<>
    ```

    **StageState-1**: `unit` names a unit, and the future has no results.
  }];
  let arguments = (ins FlatSymbolRefAttr:$unit, Optional<I1>:$condition);
  let results = (outs FSDP_FutureType:$staged);
  let assemblyFormat = [{
    $unit (`when` $condition^)? attr-dict `:` qualified(type($staged))
  }];
}

#endif // FSDP_DIALECT_FSDPSCHEDULEOPS_TD
