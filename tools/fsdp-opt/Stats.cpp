//===- Stats.cpp - fsdp-opt --emit stats ----------------------------------===//
#include "Stats.h"

#include "fsdp/Dialect/Aten.h"
#include "fsdp/Dialect/FSDP.h"
#include "fsdp/Plan/Plan.h"
#include "llvm/ADT/MapVector.h"
#include "llvm/ADT/StringMap.h"
#include "llvm/Support/Format.h"

using namespace mlir;
using namespace mlir::fsdp;
namespace plan = ::fsdp::plan;

static int64_t getNumBytes(RankedTensorType type) {
  Type element = type.getElementType();
  int64_t width =
      element.isInteger(1) ? 1 : element.getIntOrFloatBitWidth() / 8;
  return type.getNumElements() * width;
}

/// Bytes of all ranks' chunks, padding included (what FSDP2 sends).
static int64_t getPaddedBytes(ParamOp param, int64_t ranks) {
  RankedTensorType type = param.getTensorType();
  if (param.getShardingAttr() && param.getShardingAttr().getShardedDim() > 0)
    return getNumBytes(type); // divides evenly
  int64_t rows = plan::shardRows(type.getDimSize(0), ranks, 0).size() * ranks;
  int64_t rowBytes =
      type.getDimSize(0) ? getNumBytes(type) / type.getDimSize(0) : 0;
  return rows * rowBytes;
}

namespace {
struct Traffic {
  int64_t count = 0, bytes = 0;
  void add(int64_t more, int64_t times = 1) {
    count += times;
    bytes += times * more;
  }
};
} // namespace

void mlir::fsdp::printStats(ModuleOp module, llvm::raw_ostream &os) {
  int64_t replicas = 1, ranks = 1; // ranks of one replica
  for (auto mesh : module.getOps<MeshOp>()) {
    replicas = mesh.getMesh().getAxisSize(replicateAxisName).value_or(1);
    ranks = mesh.getMesh().getNumRanks() / replicas;
  }
  auto units = getUnitParams(module);
  llvm::StringMap<int64_t> unitPaddedBytes, paddedBytes;
  int64_t elements = 0, bytes = 0, shardBytes = 0, params = 0, frozen = 0,
          trainableShard = 0, largestUnit = 0;
  for (auto &[unit, members] : units) {
    int64_t unitBytes = 0;
    for (ParamOp param : members) {
      RankedTensorType type = param.getTensorType();
      int64_t padded = getPaddedBytes(param, ranks);
      paddedBytes[param.getSymName()] = padded;
      ++params;
      frozen += param.getFrozen();
      elements += type.getNumElements();
      bytes += getNumBytes(type);
      shardBytes += padded / ranks;
      trainableShard += param.getFrozen() ? 0 : padded / ranks;
      unitBytes += padded;
    }
    unitPaddedBytes[unit] = unitBytes;
    largestUnit = std::max(largestUnit, unitBytes);
  }

  int64_t ignored = 0;
  for (auto param : module.getOps<ParamOp>())
    if (param.getIgnored()) {
      ++params;
      ++ignored;
      frozen += param.getFrozen();
      elements += param.getTensorType().getNumElements();
      bytes += getNumBytes(param.getTensorType());
    }

  // What a microbatch does, and what a step does once.
  Traffic gathers, reduces, allReduces;
  int64_t calls = 0, inPlaceGrads = 0, reshards = 0;
  auto onWire = [&](int64_t padded) { return padded / ranks * (ranks - 1); };
  ProgramOp program = getProgram(module);
  if (!program)
    return;
  MicrobatchesOp loop = getMicrobatches(program);
  int64_t microbatches = loop ? static_cast<int64_t>(loop.getSteps()) : 1;
  auto timesOf = [&](Operation *op) {
    return getCondition(op) ? 1 : microbatches;
  };
  program.walk([&](Operation *op) {
    if (auto gather = dyn_cast<AllGatherOp>(op)) {
      int64_t bytes = onWire(unitPaddedBytes[gather.getUnit()]);
      if (!gather.getShards().empty() &&
          gather.getShards().front().getDefiningOp<ReshardOp>()) {
        auto unit = module.lookupSymbol<UnitOp>(gather.getUnit());
        int64_t group = *unit.getPostForwardSize();
        bytes = unitPaddedBytes[gather.getUnit()] / group * (group - 1);
      }
      gathers.add(bytes, timesOf(op));
    } else if (auto reduce = dyn_cast<ReduceScatterOp>(op)) {
      int64_t padded = 0;
      for (auto name : reduce.getParamNames().getAsRange<FlatSymbolRefAttr>())
        padded += paddedBytes[name.getValue()];
      reduces.add(onWire(padded), timesOf(op));
    } else if (auto reduce = dyn_cast<AllReduceOp>(op)) {
      int64_t padded = 0;
      for (auto name : reduce.getParamNames().getAsRange<FlatSymbolRefAttr>())
        padded += paddedBytes[name.getValue()];
      // A ring passes every part twice, but for the rank's own.
      allReduces.add(2 * (padded / ranks) * (replicas - 1) / replicas,
                     timesOf(op));
    } else if (auto call = dyn_cast<aten::CallOp>(op)) {
      ++calls;
      inPlaceGrads += call.getReduceInputOf().has_value();
    } else if (auto reshard = dyn_cast<ReshardOp>(op)) {
      reshards += timesOf(op);
    }
  });

  auto row = [&](StringRef name, const Twine &value) {
    os << llvm::left_justify(name, 28) << value << '\n';
  };
  row("ranks", Twine(replicas * ranks));
  if (replicas > 1)
    row("replicas", Twine(replicas) + " of " + Twine(ranks) + " ranks");
  row("parameters", Twine(elements) + " in " + Twine(params) + " tensors (" +
                        Twine(frozen) + " frozen)");
  if (ignored)
    row("ignored parameters", Twine(ignored) + " tensors, whole on every rank");
  row("parameter bytes", formatBytes(bytes));
  row("units", Twine(units.size()));
  row("largest unit", formatBytes(largestUnit));
  row("parameter bytes a rank", formatBytes(shardBytes) + " (padded shards)");
  row("gradient bytes a rank",
      formatBytes(trainableShard) + " (padded shards)");
  row("ATen calls", Twine(calls));
  row("gradients written in place", Twine(inPlaceGrads));
  row("all-gathers a step",
      Twine(gathers.count) + ", " + formatBytes(gathers.bytes) + " a rank");
  row("reduce-scatters a step",
      Twine(reduces.count) + ", " + formatBytes(reduces.bytes) + " a rank");
  if (replicas > 1)
    row("all-reduces a step", Twine(allReduces.count) + ", " +
                                  formatBytes(allReduces.bytes) + " a rank");
  row("reshards a step", Twine(reshards));
  if (ProgramOp evaluation = getEvaluationProgram(module)) {
    auto gathers = llvm::range_size(evaluation.getOps<AllGatherOp>());
    auto calls = llvm::range_size(evaluation.getOps<aten::CallOp>());
    row("evaluation",
        Twine(calls) + " ATen calls, " + Twine(gathers) + " all-gathers");
  }
  os << '\n'
     << llvm::left_justify("unit", 40) << llvm::right_justify("tensors", 9)
     << llvm::right_justify("bytes", 13) << "  reshard_after_forward\n";
  for (auto unit : module.getOps<UnitOp>())
    os << llvm::left_justify(unit.getSymName(), 40)
       << llvm::right_justify(
              std::to_string(units[unit.getSymNameAttr()].size()), 9)
       << llvm::right_justify(formatBytes(unitPaddedBytes[unit.getSymName()]),
                              13)
       << "  " << (unit.getReshardAfterForward() ? "true" : "false") << '\n';
}
