//===- ModuleNames.cpp - modules' names in text ---------------------------===//
#include "fsdp/Transforms/ModuleNames.h"
#include "fsdp/Dialect/FSDP.h"
#include "fsdp/Transforms/StepProgram.h"

#include "mlir/IR/BuiltinOps.h"

using namespace mlir;
using namespace mlir::fsdp;

static constexpr StringLiteral moduleAttrName = "fsdp.module";

namespace {
struct ReadModuleNames : PassWrapper<ReadModuleNames, OperationPass<ModuleOp>> {
  MLIR_DEFINE_EXPLICIT_INTERNAL_INLINE_TYPE_ID(ReadModuleNames)

  void runOnOperation() override {
    WalkResult result = getOperation().walk([](Operation *op) {
      Attribute attr = op->removeDiscardableAttr(moduleAttrName);
      if (!attr)
        return WalkResult::advance();
      auto name = dyn_cast<StringAttr>(attr);
      if (!name) {
        op->emitOpError("expected a string for ")
            << moduleAttrName << ", got: " << attr;
        return WalkResult::interrupt();
      }
      Location source = op->getLoc();
      if (auto named = dyn_cast<NameLoc>(source))
        source = named.getChildLoc();
      op->setLoc(NameLoc::get(name, source));
      return WalkResult::advance();
    });
    if (result.wasInterrupted())
      signalPassFailure();
  }
};

struct WriteModuleNames
    : PassWrapper<WriteModuleNames, OperationPass<ModuleOp>> {
  MLIR_DEFINE_EXPLICIT_INTERNAL_INLINE_TYPE_ID(WriteModuleNames)

  void runOnOperation() override {
    for (auto program : getOperation().getOps<ProgramOp>())
      program.getBody().walk([](Operation *op) {
        if (StringRef name = getModuleName(op); !name.empty())
          op->setDiscardableAttr(moduleAttrName,
                                 StringAttr::get(op->getContext(), name));
      });
  }
};
} // namespace

std::unique_ptr<Pass> mlir::fsdp::createReadModuleNames() {
  return std::make_unique<ReadModuleNames>();
}

std::unique_ptr<Pass> mlir::fsdp::createWriteModuleNames() {
  return std::make_unique<WriteModuleNames>();
}
