//===- FSDPInterfaces.td - what ops have in common ---------*- tablegen -*-===//
#ifndef FSDP_DIALECT_FSDPINTERFACES_TD
#define FSDP_DIALECT_FSDPINTERFACES_TD

include "mlir/IR/OpBase.td"

def FSDP_CollectiveOpInterface : OpInterface<"CollectiveOpInterface"> {
  let cppNamespace = "::mlir::fsdp";
  let description = [{
    An op that runs beside computation once it is scheduled: a collective, or a
    copy between host and device. Up to the sharded level it returns its
    results. From the scheduled level on it returns one `!fsdp.future` of them,
    and an `fsdp.wait` returns the results.
  }];
  let methods = [
    InterfaceMethod<"Whether it returns a future.", "bool", "hasFuture", (ins), "", [{
      return $_op->getNumResults() == 1 &&
             ::llvm::isa<::mlir::fsdp::FutureType>(
                 $_op->getResult(0).getType());
    }]>,
    InterfaceMethod<"The types of its results, or those of its future if it has one.",
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
    An op that may have a condition in an `fsdp.microbatches`, `when %first` or
    `when %last`; it then runs only in the first or only in the last microbatch.
  }];
  let methods = [
    InterfaceMethod<"A block argument of the loop; null if it runs in every microbatch.",
                    "::mlir::Value", "getCondition", (ins)>,
  ];
}

#endif // FSDP_DIALECT_FSDPINTERFACES_TD
