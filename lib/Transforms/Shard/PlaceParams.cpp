//===- PlaceParams.cpp - shard every parameter on dim 0 -------------------===//
#include "fsdp/Transforms/Passes.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_PLACEPARAMS
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;

namespace {
struct PlaceParams : mlir::fsdp::impl::PlaceParamsBase<PlaceParams> {
  void runOnOperation() override {
    ModuleOp module = getOperation();
    auto meshes = llvm::to_vector(module.getOps<MeshOp>());
    if (meshes.size() != 1) {
      module.emitError("expected one fsdp.mesh in the module, got: ")
          << meshes.size();
      return signalPassFailure();
    }
    MeshOp mesh = meshes.front();
    if (!mesh.getMesh().getAxisSize(shardAxisName)) {
      mesh.emitError("expected an axis \"")
          << shardAxisName << "\", got: " << mesh.getMesh();
      return signalPassFailure();
    }
    Builder builder(module.getContext());
    Attribute whole = builder.getArrayAttr({});
    Attribute sharded =
        builder.getArrayAttr({builder.getStringAttr(shardAxisName)});
    for (auto param : module.getOps<ParamOp>()) {
      if (param.getSharding() || param.getIgnored())
        continue;
      SmallVector<Attribute> dims(param.getTensorType().getRank(), whole);
      dims.front() = sharded;
      param.setShardingAttr(ShardingAttr::get(
          module.getContext(), FlatSymbolRefAttr::get(mesh.getSymNameAttr()),
          builder.getArrayAttr(dims)));
    }
  }
};
} // namespace
