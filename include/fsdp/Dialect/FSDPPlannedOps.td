//===- FSDPPlannedOps.td - what only the planned level has -*- tablegen -*-===//
//
// Streams, events and offsets are attributes of any op that becomes an
// instruction (docs/spec.md, "Planned"). Included by FSDPOps.td.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_DIALECT_FSDPPLANNEDOPS_TD
#define FSDP_DIALECT_FSDPPLANNEDOPS_TD

def FSDP_FreeOp : FSDP_Op<"free", [
    FSDP_InProgram, FSDP_ConditionalOpInterface, AttrSizedOperandSegments,
    MemoryEffects<[MemFree]>]> {
  let summary = "Ends the life of values (level lowered)";
  let description = [{
    The life of what a microbatch leaves to the next one ends `when %last`.

    ```mlir
    fsdp.free %x : tensor<4xf32>
    fsdp.free %sum when %last : tensor<4xf32>
    ```
  }];
  let arguments = (ins Variadic<AnyType>:$values, Optional<I1>:$condition);
  let assemblyFormat = "$values (`when` $condition^)? attr-dict `:` type($values)";
}

def FSDP_AllocateOp : FSDP_Op<"allocate", [
    FSDP_NamedResults, FSDP_InProgram, MemoryEffects<[MemAlloc]>]> {
  let summary = "Memory that a collective needs beside its results";
  let description = [{
    If ranks have memory of their own, this is the flat tensor of a reduction,
    the copies of an offloaded unit's shards, or what a reshard keeps. One op
    uses it, after the keyword `in`; its life ends with an `fsdp.free`.

    ```mlir
    %b = fsdp.allocate : tensor<32xf32>
    %r = fsdp.reduce_scatter @u avg [@w] %g in %b : tensor<32xf32> : (…) -> (…)
    ```
  }];
  let results = (outs AnyRankedTensor:$buffer);
  let assemblyFormat = "attr-dict `:` type($buffer)";
}

def FSDP_MarkOp : FSDP_Op<"mark", [
    FSDP_InProgram, MemoryEffects<[MemWrite<FSDP_CommResource>]>]> {
  let summary = "Does nothing on the compute stream";
  let description = [{
    Whatever begins beside the compute stream at the beginning of a microbatch
    follows the mark, and therefore the compute stream of the microbatch before.

    ```mlir
    fsdp.mark {fsdp.records = 0 : i32}
    ```
  }];
  let assemblyFormat = "attr-dict";
}

#endif // FSDP_DIALECT_FSDPPLANNEDOPS_TD
