//===- Libdevice.cpp - CUDA's mathematical functions ----------------------===//
#include "Libdevice.h"

#include "llvm/IRReader/IRReader.h"
#include "llvm/Linker/Linker.h"
#include "llvm/Support/FileSystem.h"
#include "llvm/Support/SourceMgr.h"
#include "llvm/Transforms/IPO/Internalize.h"

using namespace mlir;

llvm::StringRef mlir::fsdp::getLibdevicePath() {
  static const llvm::StringRef path = [] {
    for (llvm::StringRef place : {FSDP_LIBDEVICE_PATHS})
      if (llvm::sys::fs::exists(place))
        return place;
    return llvm::StringRef();
  }();
  return path;
}

llvm::Error mlir::fsdp::linkLibdevice(llvm::Module &module) {
  bool isNeeded = llvm::any_of(module, [](const llvm::Function &function) {
    return function.isDeclaration() && !function.isIntrinsic();
  });
  if (!isNeeded)
    return llvm::Error::success();
  auto fail = [](const llvm::Twine &why) {
    return llvm::createStringError(llvm::inconvertibleErrorCode(), why);
  };
  llvm::StringRef path = getLibdevicePath();
  if (path.empty())
    return fail("expected libdevice of CUDA, got none");
  llvm::SMDiagnostic diagnostic;
  std::unique_ptr<llvm::Module> library =
      llvm::parseIRFile(path, diagnostic, module.getContext());
  if (!library)
    return fail(path + ": " + diagnostic.getMessage());
  library->setTargetTriple(module.getTargetTriple());
  library->setDataLayout(module.getDataLayout());
  auto internalise = [](llvm::Module &linked, const llvm::StringSet<> &added) {
    llvm::internalizeModule(linked, [&](const llvm::GlobalValue &value) {
      return !value.hasName() || !added.contains(value.getName());
    });
  };
  if (llvm::Linker::linkModules(module, std::move(library),
                                llvm::Linker::Flags::LinkOnlyNeeded,
                                internalise))
    return fail(path + ": not the functions of the kernel");
  return llvm::Error::success();
}
