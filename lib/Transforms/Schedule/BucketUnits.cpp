//===- BucketUnits.cpp - what is gathered and reduced together ------------===//
#include "fsdp/Simulate/DeviceModel.h"
#include "fsdp/Transforms/Passes.h"
#include "fsdp/Transforms/Schedule.h"
#include "mlir/IR/Remarks.h"
#include "llvm/ADT/SetVector.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_BUCKETUNITS
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;
namespace simulate = ::fsdp::simulate;

namespace {
/// PyTorch Inductor's rule (bucketing of FSDP collectives): a bucket of so many
/// bytes that latency is a tenth of its time, within these limits.
constexpr double kBusy = 0.9;
constexpr double kLeast = 10e6, kMost = 500e6;

/// Neighbours that are gathered and reduced together.
struct Bucket {
  UnitOp policy; ///< whose policy all of its units have
  Type dtype;
  SmallVector<ParamOp> params;
  llvm::SetVector<StringAttr> units;
  double bytes = 0;
};

struct BucketUnits : mlir::fsdp::impl::BucketUnitsBase<BucketUnits> {
  void runOnOperation() override {
    ModuleOp module = getOperation();
    ScheduleOp schedule = getOrCreateSchedule(module);
    if (schedule.getBucket() == "unit")
      return;
    double least = 0;
    if (schedule.getBucket() == "saturation") {
      FailureOr<double> bytes = getSaturation(module);
      if (failed(bytes))
        return signalPassFailure();
      least = *bytes;
    }
    SmallVector<Bucket> buckets = fill(module, least);
    replaceUnits(module, buckets);
    remark::passed(schedule.getLoc(),
                   remark::RemarkOpts::name("Buckets").category("fsdp-bucket"))
        << std::to_string(buckets.size()) + " buckets of at least " +
               std::to_string(int64_t(least)) + " bytes where neighbours allow";
  }

private:
  /// Bytes from which on the link of the shard axis is busy.
  static FailureOr<double> getSaturation(ModuleOp module) {
    int64_t shards = 1;
    for (auto mesh : module.getOps<MeshOp>())
      shards = mesh.getMesh().getAxisSize(shardAxisName).value_or(1);
    auto device = loadDevice(module);
    if (failed(device))
      return failure();
    auto time = [&](double bytes) {
      return simulate::transferTime(*device, simulate::Collective::AllGather,
                                    {shards, 1}, bytes)
          .seconds;
    };
    double latency = time(0), rate = (time(1e9) - latency) / 1e9;
    double bytes = rate > 0 ? kBusy / (1 - kBusy) * latency / rate : kMost;
    return std::clamp(bytes, kLeast, kMost);
  }

  static double getBytes(ParamOp param) {
    RankedTensorType type = param.getComputeType();
    return double(type.getNumElements()) *
           std::max(1U, type.getElementTypeBitWidth() / 8);
  }

  /// The units' policies without their names.
  static DictionaryAttr getPolicy(UnitOp unit) {
    NamedAttrList attributes(unit->getAttrDictionary());
    attributes.erase(unit.getSymNameAttrName());
    return attributes.getDictionary(unit.getContext());
  }

  /// Neighbours in the order of the module; a unit of several dtypes, which are
  /// reduced in their common one, stays whole and alone.
  static SmallVector<Bucket> fill(ModuleOp module, double least) {
    llvm::DenseMap<StringAttr, UnitOp> units;
    for (auto unit : module.getOps<UnitOp>())
      units[unit.getSymNameAttr()] = unit;
    SmallVector<Bucket> buckets;
    for (auto &[name, params] : getUnitParams(module)) {
      UnitOp unit = units.lookup(name);
      Type dtype = params.front().getTensorType().getElementType();
      bool mixed = llvm::any_of(params, [&](ParamOp param) {
        return param.getTensorType().getElementType() != dtype;
      });
      for (auto [index, param] : llvm::enumerate(params)) {
        bool fits = !buckets.empty() && buckets.back().dtype &&
                    buckets.back().dtype == dtype && !mixed &&
                    buckets.back().bytes < least &&
                    getPolicy(buckets.back().policy) == getPolicy(unit);
        if (mixed ? index == 0 : !fits)
          buckets.push_back({unit, mixed ? Type() : dtype, {}, {}, 0});
        Bucket &bucket = buckets.back();
        bucket.params.push_back(param);
        bucket.units.insert(name);
        bucket.bytes += getBytes(param);
      }
    }
    return buckets;
  }

  /// One unit for each bucket, named after the units that it is of, with a
  /// number where these are in several.
  static void replaceUnits(ModuleOp module, ArrayRef<Bucket> buckets) {
    llvm::DenseMap<StringAttr, int64_t> parts, named;
    for (const Bucket &bucket : buckets)
      for (StringAttr unit : bucket.units)
        ++parts[unit];
    llvm::DenseSet<Operation *> made;
    for (const Bucket &bucket : buckets) {
      std::string name;
      for (StringAttr unit : bucket.units) {
        name += (name.empty() ? "" : "+") + unit.getValue().str();
        if (parts[unit] > 1)
          name += "[" + std::to_string(named[unit]++) + "]";
      }
      UnitOp policy = bucket.policy;
      OpBuilder builder(policy);
      auto unit = cast<UnitOp>(builder.clone(*policy));
      unit.setSymName(name);
      for (ParamOp param : bucket.params)
        param.setUnitAttr(FlatSymbolRefAttr::get(unit.getSymNameAttr()));
      made.insert(unit);
    }
    for (auto unit : llvm::make_early_inc_range(module.getOps<UnitOp>()))
      if (!made.contains(unit))
        unit.erase();
  }
};
} // namespace
