//===- PlaceParams.cpp - shard every parameter over the mesh --------------===//
#include "fsdp/Transforms/ModulePattern.h"
#include "fsdp/Transforms/Passes.h"

#include "llvm/ADT/SmallPtrSet.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_PLACEPARAMS
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;

namespace {
struct PlaceParams : mlir::fsdp::impl::PlaceParamsBase<PlaceParams> {
  void runOnModule() override {
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
    ranks = *mesh.getMesh().getAxisSize(shardAxisName);
    placements = llvm::to_vector(module.getOps<ShardPlacementOp>());
    Builder builder(module.getContext());
    Attribute whole = builder.getArrayAttr({});
    Attribute sharded =
        builder.getArrayAttr({builder.getStringAttr(shardAxisName)});
    for (auto param : module.getOps<ParamOp>()) {
      if (param.getSharding() || param.getIgnored())
        continue;
      SmallVector<Attribute> dims(param.getTensorType().getRank(), whole);
      FailureOr<int64_t> dim = getDim(param);
      if (failed(dim))
        return signalPassFailure();
      dims[*dim] = sharded;
      param.setShardingAttr(ShardingAttr::get(
          module.getContext(), FlatSymbolRefAttr::get(mesh.getSymNameAttr()),
          builder.getArrayAttr(dims), /*partial=*/nullptr));
    }
    for (ShardPlacementOp placement : placements) {
      if (!matched.contains(placement)) {
        placement.emitError("pattern \"")
            << placement.getPattern() << "\" matches no sharded parameter";
        return signalPassFailure();
      }
      placement.erase();
    }
  }

private:
  static bool matches(ShardPlacementOp placement, ParamOp param) {
    StringRef pattern = placement.getPattern();
    if (matchesPattern(pattern, param.getSymName()))
      return true;
    auto aliases = param.getAliases();
    return aliases && llvm::any_of(aliases->getAsValueRange<StringAttr>(),
                                   [&](StringRef alias) {
                                     return matchesPattern(pattern, alias);
                                   });
  }

  /// The dimension that the first matching placement names, else 0.
  FailureOr<int64_t> getDim(ParamOp param) {
    ShardPlacementOp first;
    for (ShardPlacementOp placement : placements)
      if (matches(placement, param)) {
        matched.insert(placement);
        if (!first)
          first = placement;
      }
    if (!first)
      return 0;
    RankedTensorType type = param.getTensorType();
    int64_t given = first.getDim(), rank = type.getRank();
    int64_t dim = given < 0 ? given + rank : given;
    if (dim < 0 || dim >= rank)
      return first.emitError("expected a dimension of parameter \"")
             << param.getSymName() << "\", which has " << rank
             << ", got: " << given;
    if (dim == 0)
      return 0;
    if (type.getDimSize(dim) % ranks != 0)
      return first.emitError("expected dimension ")
             << dim << " of parameter \"" << param.getSymName()
             << "\" to divide evenly over " << ranks
             << " ranks, got size: " << type.getDimSize(dim);
    auto unit = param.getUnitAttr()
                    ? param->getParentOfType<ModuleOp>().lookupSymbol<UnitOp>(
                          param.getUnitAttr())
                    : UnitOp();
    if (unit && unit.getPostForwardSize())
      return first.emitError("expected dimension 0 for parameter \"")
             << param.getSymName() << "\" of unit \"" << unit.getSymName()
             << "\", which has an integer \"reshard_after_forward\", got: "
             << given;
    return dim;
  }

  int64_t ranks = 1;
  SmallVector<ShardPlacementOp> placements;
  llvm::SmallPtrSet<Operation *, 8> matched;
};
} // namespace
