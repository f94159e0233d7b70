//===- Buckets.cpp - neighbours that are gathered and reduced together ----===//
#include "Buckets.h"
#include "fsdp/Dialect/ModelParallel.h"
#include "fsdp/Dialect/Storages.h"

using namespace mlir;
using namespace mlir::fsdp;
namespace simulate = ::fsdp::simulate;

constexpr double kBusy = 0.9;
constexpr double kLeast = 10e6, kMost = 500e6;

/// A unit's policy, without its name.
static DictionaryAttr getPolicy(ModuleOp module, StringAttr name) {
  auto unit = module.lookupSymbol<UnitOp>(name);
  NamedAttrList attributes(unit->getAttrDictionary());
  attributes.erase(unit.getSymNameAttrName());
  return attributes.getDictionary(unit.getContext());
}

bool mlir::fsdp::canJoin(ModuleOp module, const Bucket &a, const Bucket &b) {
  return a.dtype && a.dtype == b.dtype &&
         (a.policy == b.policy ||
          getPolicy(module, a.policy) == getPolicy(module, b.policy));
}

void mlir::fsdp::join(Bucket &to, const Bucket &from) {
  to.params.append(from.params);
  to.units.insert(from.units.begin(), from.units.end());
  to.bytes += from.bytes;
}

SmallVector<Bucket> mlir::fsdp::splitUnits(ModuleOp module) {
  SmallVector<Bucket> buckets;
  for (auto &[unit, params] : getUnitParams(module)) {
    if (params.empty())
      continue;
    Type dtype = params.front().getTensorType().getElementType();
    bool mixed = llvm::any_of(params, [&](ParamOp param) {
      return param.getTensorType().getElementType() != dtype;
    });
    for (auto [index, param] : llvm::enumerate(params)) {
      if (!mixed || index == 0)
        buckets.push_back({unit, mixed ? Type() : dtype, {}, {}, 0});
      Bucket &bucket = buckets.back();
      bucket.params.push_back(param.getSymNameAttr());
      bucket.units.insert(unit);
      bucket.bytes += double(getNumBytes(param.getComputeType()));
    }
  }
  return buckets;
}

SmallVector<Bucket> mlir::fsdp::fillBuckets(ModuleOp module, double least) {
  SmallVector<Bucket> buckets;
  for (const Bucket &part : splitUnits(module)) {
    if (!buckets.empty() && buckets.back().bytes < least &&
        canJoin(module, buckets.back(), part))
      join(buckets.back(), part);
    else
      buckets.push_back(part);
  }
  return buckets;
}

double mlir::fsdp::getSaturatingBytes(ModuleOp module,
                                      const simulate::DeviceModel &device) {
  int64_t shards = 1;
  for (auto mesh : module.getOps<MeshOp>())
    shards = mesh.getMesh().getAxisSize(shardAxisName).value_or(1);
  auto parallel = getModelParallel(module);
  simulate::Axis axis{shards, parallel ? parallel->dataStride : 1};
  auto time = [&](double bytes) {
    return simulate::transferTime(device, simulate::Collective::AllGather, axis,
                                  bytes)
        .seconds;
  };
  double latency = time(0), rate = (time(1e9) - latency) / 1e9;
  double bytes = rate > 0 ? kBusy / (1 - kBusy) * latency / rate : kMost;
  return std::clamp(bytes, kLeast, kMost);
}

/// The name of what FSDP2 reduces a parameter with.
static std::string getMessage(ParamOp param) {
  std::string unit = param.getUnit()->str();
  if (std::optional<int64_t> calls = param.getPostBackward())
    unit += "#" + std::to_string(*calls);
  return unit;
}

void mlir::fsdp::replaceUnits(ModuleOp module, ArrayRef<Bucket> buckets) {
  llvm::DenseMap<StringAttr, UnitOp> policies;
  for (auto unit : module.getOps<UnitOp>())
    policies[unit.getSymNameAttr()] = unit;
  llvm::DenseMap<StringAttr, ParamOp> params;
  for (auto param : module.getOps<ParamOp>())
    params[param.getSymNameAttr()] = param;
  llvm::DenseMap<StringAttr, int64_t> parts, named;
  for (const Bucket &bucket : buckets)
    for (StringAttr unit : bucket.units)
      ++parts[unit];
  for (const Bucket &bucket : buckets) {
    std::string name;
    for (StringAttr unit : bucket.units) {
      name += (name.empty() ? "" : "+") + unit.getValue().str();
      if (parts[unit] > 1)
        name += "[" + std::to_string(named[unit]++) + "]";
    }
    UnitOp policy = policies.lookup(bucket.policy);
    OpBuilder builder(policy);
    auto unit = cast<UnitOp>(builder.clone(*policy));
    unit.setSymName(name);
    for (StringAttr symbol : bucket.params) {
      ParamOp param = params.lookup(symbol);
      if (!param.getReducedWith() && *param.getUnit() != name)
        param.setReducedWith(getMessage(param));
      param.setUnitAttr(FlatSymbolRefAttr::get(unit.getSymNameAttr()));
    }
  }
  for (auto [name, unit] : policies)
    unit.erase();
}
