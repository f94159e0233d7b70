//===- FSDPInterfaces.td - what ops have in common ---------*- tablegen -*-===//
#ifndef FSDP_DIALECT_FSDPINTERFACES_TD
#define FSDP_DIALECT_FSDPINTERFACES_TD

include "mlir/IR/OpBase.td"

def FSDP_CollectiveOpInterface : OpInterface<"CollectiveOpInterface"> {
  let cppNamespace = "::mlir::fsdp";
  let description = [{
    An op that runs beside computation once it is scheduled: a collective, or a
    copy between host and device. Up to the sharded level it gives its results.
    From the scheduled level on it gives one `!fsdp.future` of them, and an
    `fsdp.wait` gives the results.
  }];
  let methods = [
    InterfaceMethod<"Whether it gives a future.", "bool", "hasFuture", (ins), "", [{
      return $_op->getNumResults() == 1 &&
             ::llvm::isa<::mlir::fsdp::FutureType>(
                 $_op->getResult(0).getType());
    }]>,
    InterfaceMethod<"The types of its results, those of its future if it has one.",
                    "::llvm::SmallVector<::mlir::Type>", "getAwaitedTypes", (ins), "", [{
      if (::mlir::fsdp::CollectiveOpInterface($_op.getOperation()).hasFuture())
        return ::llvm::to_vector(
            ::llvm::cast<::mlir::fsdp::FutureType>($_op->getResult(0).getType())
                .getTypes());
      return ::llvm::to_vector($_op->getResultTypes());
    }]>,
  ];
}

def FSDP_ConditionalOpInterface : OpInterface<"ConditionalOpInterface"> {
  let cppNamespace = "::mlir::fsdp";
  let description = [{
    An op that runs, in an `fsdp.microbatches`, in the first or the last
    microbatch alone where it has a condition: `when %first`, `when %last`.
  }];
  let methods = [
    InterfaceMethod<"A block argument of the loop; null where it runs in every microbatch.",
                    "::mlir::Value", "getCondition", (ins)>,
  ];
}

#endif // FSDP_DIALECT_FSDPINTERFACES_TD
