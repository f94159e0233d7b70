//===- CompileKernels.cpp - kernels as machine code -----------------------===//
#include "fsdp/Codegen/Kernels.h"
#include "fsdp/Transforms/Passes.h"

#include "mlir/IR/Remarks.h"
#include "llvm/ADT/StringExtras.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_COMPILEKERNELS
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;

namespace {
struct CompileKernels : mlir::fsdp::impl::CompileKernelsBase<CompileKernels> {
  using CompileKernelsBase::CompileKernelsBase;

  void getDependentDialects(DialectRegistry &registry) const override {
    CompileKernelsBase::getDependentDialects(registry);
    registerKernelDialects(registry);
  }

  void runOnModule() override {
    known = getKernelTargets(getOperation());
    if (known.empty() && targets.empty())
      return; // for a GPU that is not known
    for (const std::string &name : targets)
      if (llvm::none_of(known, [&](const KernelTarget &target) {
            return target.name == name;
          })) {
        std::string names =
            llvm::join(llvm::map_range(known,
                                       [](const KernelTarget &target) {
                                         return target.name.str();
                                       }),
                       " or ");
        getOperation().emitError("fsdp-compile-kernels: expected ")
            << (names.empty() ? "none, for a GPU that is not known," : names)
            << " as a target, got: " << name;
        return signalPassFailure();
      }
    for (auto kernel : getOperation().getOps<KernelOp>())
      if (failed(compile(kernel)))
        return signalPassFailure();
  }

private:
  LogicalResult compile(KernelOp kernel) {
    if (!canLower(kernel)) {
      if (auto message = remark::missed(
              kernel.getLoc(),
              remark::RemarkOpts::name("NoCode").category("fsdp-fuse")))
        message << ("kernel " + kernel.getSymName() +
                    " has no code: its calls run one by one")
                       .str();
      return success();
    }
    Builder builder(kernel.getContext());
    SmallVector<NamedAttribute> code;
    for (const KernelTarget &target : known) {
      if (!targets.empty() && !llvm::is_contained(targets, target.name))
        continue;
      LoweredKernel lowered = lowerKernel(kernel, target);
      kernel.setTrips(lowered.trips);
      if (print)
        llvm::errs() << "// " << target.name << "\n" << *lowered.module;
      SmallVector<StringRef> imports(lowered.imports.begin(),
                                     lowered.imports.end());
      Attribute names = builder.getStrArrayAttr(imports);
      auto machine = compileKernel(std::move(lowered), target);
      if (failed(machine))
        return failure();
      code.emplace_back(
          target.name,
          builder.getDictionaryAttr(
              {builder.getNamedAttr("entry",
                                    builder.getI64IntegerAttr(machine->entry)),
               builder.getNamedAttr("image",
                                    builder.getStringAttr(llvm::toHex(
                                        machine->image, /*LowerCase=*/true))),
               builder.getNamedAttr("imports", names)}));
    }
    kernel.setCodeAttr(builder.getDictionaryAttr(code));
    return success();
  }

  SmallVector<KernelTarget> known;
};
} // namespace
