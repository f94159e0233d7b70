//===- FSDPDialect.td - the fsdp dialect -------------------*- tablegen -*-===//
#ifndef FSDP_DIALECT_FSDPDIALECT_TD
#define FSDP_DIALECT_FSDPDIALECT_TD

include "mlir/IR/OpBase.td"

def FSDP_Dialect : Dialect {
  let name = "fsdp";
  let cppNamespace = "::mlir::fsdp";
  let summary = "Fully sharded training: parameters, placements, collectives";
  let description = [{
    One training step of a model as a straight-line program, with its
    parameters, the mesh they are sharded over, and every collective explicit.

    The same dialect serves every level of the compiler:

    | level | what is in the program |
    | --- | --- |
    | captured | one device: `fsdp.read`, `aten.call`, `fsdp.gradients` |
    | sharded | placements and collectives: `fsdp.all_gather`, `fsdp.reshard`, `fsdp.reduce_scatter`, `fsdp.optimizer_step` |
    | planned | also the end of every value's life: `fsdp.free`, and where gradients are written |

    Collectives are never `Pure`: they have effects on one communication
    resource, so that no generic pass merges a backward re-gather into the
    forward gather or changes the order that every rank must agree on.

    A pass that places an op says why it stands there, for people, in the
    attribute `fsdp.why`. The plan has it too.

    **Why-1**: `fsdp.why` is a text that is not empty.
  }];
  let hasOperationAttrVerify = 1;
  let useDefaultAttributePrinterParser = 1;
  let useDefaultTypePrinterParser = 1;
}

#endif
