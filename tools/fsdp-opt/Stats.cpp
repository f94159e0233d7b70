//===- Stats.cpp - fsdp-opt --emit stats ----------------------------------===//
#include "Stats.h"

#include "fsdp/Dialect/Aten.h"
#include "fsdp/Dialect/FSDP.h"
#include "fsdp/Dialect/ModelParallel.h"
#include "fsdp/Dialect/Storages.h"
#include "fsdp/Plan/Plan.h"
#include "llvm/ADT/MapVector.h"
#include "llvm/ADT/SetVector.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/ADT/StringMap.h"
#include "llvm/Support/Format.h"

#include <map>

using namespace mlir;
using namespace mlir::fsdp;
namespace plan = ::fsdp::plan;

/// Bytes of the chunks of all ranks of a replica, FSDP2's padding included.
static int64_t getPaddedBytes(ParamOp param, int64_t ranks) {
  RankedTensorType type = param.getTensorType();
  ShardingAttr sharding = param.getShardingAttr();
  int64_t dim = sharding ? std::max<int64_t>(0, sharding.getShardedDim()) : 0;
  if (type.getNumElements() == 0)
    return 0;
  int64_t rows = type.getDimSize(dim);
  int64_t padded = plan::shardRows(rows, ranks, 0).size() * ranks;
  return getNumBytes(type) / rows * padded;
}

namespace {
struct Traffic {
  int64_t count = 0, bytes = 0;
  void add(int64_t more, int64_t times = 1) {
    count += times;
    bytes += times * more;
  }
};

class Stats {
public:
  Stats(ModuleOp module, ProgramOp program, llvm::raw_ostream &os)
      : module(module), program(program), os(os), units(getUnitParams(module)) {
    for (auto mesh : module.getOps<MeshOp>()) {
      replicas = mesh.getMesh().getAxisSize(replicateAxisName).value_or(1);
      ranks = mesh.getMesh().getNumRanks() / replicas;
    }
    countParams();
    countProgram();
  }

  void print() {
    printParams();
    printProgram();
    printUnits();
  }

private:
  void countParams() {
    for (auto &[unit, members] : units)
      for (ParamOp param : members) {
        int64_t padded = getPaddedBytes(param, ranks);
        paddedBytes[param.getSymName()] = padded;
        unitBytes[unit] += padded;
        shardBytes += padded / ranks;
        trainableShard += param.getFrozen() ? 0 : padded / ranks;
        largestUnit = std::max(largestUnit, unitBytes[unit]);
      }
    for (auto param : module.getOps<ParamOp>()) {
      if (!param.getIgnored() && !param.getUnitAttr())
        continue;
      ++params;
      ignored += param.getIgnored();
      frozen += param.getFrozen();
      elements += param.getTensorType().getNumElements();
      bytes += getNumBytes(param.getTensorType());
    }
  }

  /// What a microbatch does, and what a step does once.
  void countProgram() {
    MicrobatchesOp loop = getMicrobatches(program);
    int64_t microbatches = loop ? static_cast<int64_t>(loop.getSteps()) : 1;
    program.walk([&](Operation *op) {
      int64_t times = getCondition(op) ? 1 : microbatches;
      if (auto gather = dyn_cast<AllGatherOp>(op)) {
        gathers.add(getReceived(gather), times);
      } else if (auto reduce = dyn_cast<ReduceScatterOp>(op)) {
        reduces.add(getOthers(getReduced(reduce), ranks), times);
      } else if (auto reduce = dyn_cast<AllReduceOp>(op)) {
        // A ring passes every part twice, except for the rank's own.
        allReduces.add(2 * (getReduced(reduce) / ranks) * (replicas - 1) /
                           replicas,
                       times);
      } else if (auto call = dyn_cast<aten::CallOp>(op)) {
        ++calls;
        inPlaceGrads += call.getReduceInputOf().has_value();
        countOtherAxis(call, times);
      } else if (auto run = dyn_cast<FusedOp>(op)) {
        countKernel(run);
      } else if (isa<ReshardOp>(op)) {
        reshards += times;
      }
    });
  }

  void countKernel(FusedOp run) {
    auto kernel = module.lookupSymbol<KernelOp>(run.getKernel());
    ++kernelRuns;
    kernels.insert(kernel);
    fusedCalls += llvm::range_size(kernel.getBody().getOps<aten::CallOp>());
    if (DictionaryAttr code = kernel.getCodeAttr())
      for (NamedAttribute target : code)
        kernelTargets.insert(target.getName().getValue());
  }

  /// A collective that the model itself makes, over ranks of another axis.
  void countOtherAxis(aten::CallOp call, int64_t times) {
    auto collective = getModelCollective(call);
    if (!collective)
      return;
    int64_t given = 0;
    for (Value operand : call.getOperands())
      given += getNumBytes(cast<RankedTensorType>(operand.getType()));
    otherAxes[collective->axis].add(given, times);
  }

  /// Of something of which each of `size` ranks has a part: what the others
  /// have.
  static int64_t getOthers(int64_t padded, int64_t size) {
    return padded / size * (size - 1);
  }

  /// Bytes that a rank receives: from all, or from the group that kept parts.
  int64_t getReceived(AllGatherOp gather) {
    int64_t group = ranks;
    if (!gather.getShards().empty() &&
        gather.getShards().front().getDefiningOp<ReshardOp>())
      group =
          *module.lookupSymbol<UnitOp>(gather.getUnit()).getPostForwardSize();
    return getOthers(unitBytes[gather.getUnit()], group);
  }

  template <typename ReduceOp> int64_t getReduced(ReduceOp reduce) {
    int64_t padded = 0;
    for (auto name :
         reduce.getParamNames().template getAsRange<FlatSymbolRefAttr>())
      padded += paddedBytes[name.getValue()];
    return padded;
  }

  void row(StringRef name, const Twine &value) {
    os << llvm::left_justify(name, 28) << value << '\n';
  }
  void row(StringRef name, const Traffic &traffic) {
    row(name,
        Twine(traffic.count) + ", " + formatBytes(traffic.bytes) + " a rank");
  }

  void printParams() {
    row("ranks", Twine(replicas * ranks));
    if (auto parallel = getModelParallel(module)) {
      std::string axes;
      for (const ::fsdp::plan::ModelAxis &axis : parallel->axes)
        axes += (axes.empty() ? "" : ", ") + axis.name + " " +
                std::to_string(axis.ranks);
      row("ranks of the job", Twine(replicas * ranks * parallel->ranks) + ", " +
                                  Twine(parallel->ranks) +
                                  " share each copy of the model" +
                                  (axes.empty() ? "" : " (" + axes + ")"));
    }
    if (replicas > 1)
      row("replicas", Twine(replicas) + " of " + Twine(ranks) + " ranks");
    row("parameters", Twine(elements) + " in " + Twine(params) + " tensors (" +
                          Twine(frozen) + " frozen)");
    if (ignored)
      row("ignored parameters",
          Twine(ignored) + " tensors, whole on every rank");
    row("parameter bytes", formatBytes(bytes));
    row("units", Twine(units.size()));
    row("largest unit", formatBytes(largestUnit));
    row("parameter bytes a rank", formatBytes(shardBytes) + " (padded shards)");
    row("gradient bytes a rank",
        formatBytes(trainableShard) + " (padded shards)");
  }

  void printProgram() {
    row("ATen calls", Twine(calls));
    if (kernelRuns > 0)
      row("kernels", Twine(kernels.size()) + " in " + Twine(kernelRuns) +
                         " places, for " + Twine(fusedCalls) + " ATen calls" +
                         (kernelTargets.empty() ? "" : ", machine code for ") +
                         llvm::join(kernelTargets, ", "));
    row("gradients written in place", Twine(inPlaceGrads));
    row("all-gathers a step", gathers);
    row("reduce-scatters a step", reduces);
    if (replicas > 1)
      row("all-reduces a step", allReduces);
    for (auto &[axis, given] : otherAxes)
      row("collectives on " + axis, given);
    row("reshards a step", Twine(reshards));
    if (ProgramOp evaluation = getEvaluationProgram(module)) {
      auto gathers = llvm::range_size(evaluation.getOps<AllGatherOp>());
      auto calls = llvm::range_size(evaluation.getOps<aten::CallOp>());
      row("evaluation",
          Twine(calls) + " ATen calls, " + Twine(gathers) + " all-gathers");
    }
  }

  void printUnits() {
    os << '\n'
       << llvm::left_justify("unit", 40) << llvm::right_justify("tensors", 9)
       << llvm::right_justify("bytes", 13) << "  reshard_after_forward\n";
    for (auto unit : module.getOps<UnitOp>())
      os << llvm::left_justify(unit.getSymName(), 40)
         << llvm::right_justify(
                std::to_string(units[unit.getSymNameAttr()].size()), 9)
         << llvm::right_justify(formatBytes(unitBytes[unit.getSymName()]), 13)
         << "  " << (unit.getReshardAfterForward() ? "true" : "false") << '\n';
  }

  ModuleOp module;
  ProgramOp program;
  llvm::raw_ostream &os;
  llvm::MapVector<StringAttr, SmallVector<ParamOp>> units;
  int64_t replicas = 1, ranks = 1; ///< ranks of one replica
  /// Padded: by unit, by parameter.
  llvm::StringMap<int64_t> unitBytes, paddedBytes;
  int64_t elements = 0, bytes = 0, params = 0, frozen = 0, ignored = 0;
  int64_t shardBytes = 0, trainableShard = 0, largestUnit = 0;
  Traffic gathers, reduces, allReduces;
  std::map<std::string, Traffic> otherAxes; ///< by name: bytes given
  llvm::SetVector<Operation *> kernels;
  llvm::SetVector<StringRef> kernelTargets;
  int64_t kernelRuns = 0, fusedCalls = 0;
  int64_t calls = 0, inPlaceGrads = 0, reshards = 0;
};
} // namespace

void mlir::fsdp::printStats(ModuleOp module, llvm::raw_ostream &os) {
  if (ProgramOp program = getProgram(module))
    Stats(module, program, os).print();
}
