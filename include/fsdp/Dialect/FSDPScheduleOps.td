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

    - `prefetch`: `latest_safe` launches each gather as late as hides it behind
      the computation before its first use; `fsdp2` launches the next gather of
      a phase when the one before it has come, as FSDP2 does; `none` launches it
      where it is needed.
    - `reduce_scatters_in_flight`: reduce-scatters whose gradients are held while
      computation goes on. FSDP2 has one; without it two, or what `memory = "auto"`
      chooses.
    - `bucket`: what is gathered and reduced together: `unit`, FSDP2's units;
      `parameter`, each by itself; `saturation`, neighbours up to the size at
      which the link is busy; `optimal`, whichever of these and of the best
      partitions into neighbours is fastest within the budget.
    - `memory`: `policy` takes what is resharded and recomputed from the policy;
      `auto` chooses it, and `reduce_scatters_in_flight` where that is not given,
      so that the step is fast within the budget.
    - `memory_budget`: bytes a rank. No gather is launched where it would not
      fit; a step that cannot fit is an error.
    - `stage_checkpoints`: copies of a step's state for a checkpoint are
      instructions of the step after it, beside its computation.
    - `device`: the description that times and bytes come from: the name of one
      that fsdp-opt knows, or a YAML file.

    ```mlir
    fsdp.schedule {device = "h100", memory_budget = 68719476736 : i64, prefetch = "latest_safe"}
    ```

    **Schedule-1**: `prefetch`, `bucket` and `memory` are one of the above; at
    least one reduce-scatter is in flight; the budget is positive, and given
    where `memory` is `auto`.
  }];
  let arguments = (ins DefaultValuedAttr<StrAttr, "\"latest_safe\"">:$prefetch,
                       OptionalAttr<I64Attr>:$reduce_scatters_in_flight,
                       DefaultValuedAttr<StrAttr, "\"unit\"">:$bucket,
                       DefaultValuedAttr<StrAttr, "\"policy\"">:$memory,
                       OptionalAttr<I64Attr>:$memory_budget,
                       DefaultValuedAttr<BoolAttr, "false">:$stage_checkpoints,
                       DefaultValuedAttr<StrAttr, "\"cpu\"">:$device);
  let assemblyFormat = "attr-dict";
  let hasVerifier = 1;
  let extraClassDeclaration = [{
    /// `reduce_scatters_in_flight`, two without it.
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
    unit's parameters, and of the optimizer's state of these, are copied to where
    the checkpoint is written from. Otherwise nothing happens. It only begins;
    the copies are there after the `fsdp.wait`. In a loop over microbatches it
    runs `when %first`.

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
