//===- ExploreMemory.cpp - time against memory of a step ------------------===//
#include "fsdp/Transforms/ExploreMemory.h"

#include "fsdp/Dialect/Aten.h"
#include "fsdp/Dialect/ModelParallel.h"
#include "fsdp/Plan/OperatorWork.h"
#include "fsdp/Transforms/CompileStep.h"
#include "fsdp/Transforms/Schedule.h"
#include "fsdp/Transforms/StepProgram.h"
#include "llvm/ADT/MapVector.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/Support/FormatVariadic.h"

using namespace mlir;
using namespace mlir::fsdp;
namespace plan = ::fsdp::plan;
namespace simulate = ::fsdp::simulate;

FailureOr<MemoryExplorer> MemoryExplorer::create(ModuleOp module) {
  auto device = loadDevice(module);
  if (failed(device))
    return failure();
  return MemoryExplorer(module, std::move(*device));
}

MemoryExplorer::MemoryExplorer(ModuleOp module, simulate::DeviceModel device)
    : module(module), device(std::move(device)) {
  llvm::MapVector<Attribute, SmallVector<StringAttr>> classes;
  for (auto &[unit, params] : getUnitParams(module)) {
    if (unit.getValue() == rootUnitName)
      continue;
    SmallVector<Attribute> types;
    for (ParamOp param : params)
      types.push_back(TypeAttr::get(param.getType()));
    classes[ArrayAttr::get(module.getContext(), types)].push_back(unit);
  }
  for (auto &[types, units] : classes)
    if (units.size() > blocks.size())
      blocks = units;

  int64_t shards = 1;
  for (auto mesh : module.getOps<MeshOp>())
    shards = mesh.getMesh().getAxisSize(shardAxisName).value_or(1);
  reshardKinds = {MemoryChoice::Reshard::Policy};
  bool resharded = llvm::any_of(module.getOps<UnitOp>(), [&](UnitOp unit) {
    return llvm::is_contained(blocks, unit.getSymNameAttr()) &&
           unit.getReshardAfterForward();
  });
  if (resharded && shards > 1 && !this->device.sharedMemory) {
    reshardKinds.push_back(MemoryChoice::Reshard::Keep);
    auto parallel = getModelParallel(module);
    perHost = this->device.ranksPerHost / (parallel ? parallel->dataStride : 1);
    if (perHost > 1 && perHost < shards && shards % perHost == 0)
      reshardKinds.push_back(MemoryChoice::Reshard::Host);
  }
  inFlightKinds = {0};
  // Where gradients lie in shared memory their room is the same.
  if (!getOrCreateSchedule(module).getReduceScattersInFlightAttr() &&
      shards > 1 && !this->device.sharedMemory)
    inFlightKinds = {1, 0};
  // What the policy says about recomputation stays.
  if (blocks.empty() || !module.getOps<CheckpointPatternOp>().empty())
    return;
  if (hasProducts())
    recomputeKinds.push_back(MemoryChoice::Recompute::Products);
  if (!this->device.sharedMemory && this->device.hostLink.bandwidth > 0 &&
      module.getOps<OffloadPatternOp>().empty())
    recomputeKinds.push_back(MemoryChoice::Recompute::Offload);
  recomputeKinds.push_back(MemoryChoice::Recompute::Full);
}

bool MemoryExplorer::hasProducts() const {
  ProgramOp program = getProgram(module);
  if (!program || blocks.empty())
    return false;
  // The blocks are alike.
  StringRef block = blocks.front().getValue().split('+').first;
  return llvm::any_of(program.getOps<aten::CallOp>(), [&](aten::CallOp call) {
    StringRef name = getModuleName(call);
    return name.consume_front(block) && (name.empty() || name.front() == '.') &&
           ::fsdp::plan::isProduct(call.getCallee());
  });
}

void MemoryExplorer::apply(const MemoryChoice &choice) {
  apply(module, choice);
}

void MemoryExplorer::apply(ModuleOp to, const MemoryChoice &choice) const {
  for (auto unit : to.getOps<UnitOp>()) {
    if (!llvm::is_contained(blocks, unit.getSymNameAttr()))
      continue;
    if (choice.reshard == MemoryChoice::Reshard::Keep) {
      unit.setReshardAfterForward(false);
      unit.removePostForwardSizeAttr();
    } else if (choice.reshard == MemoryChoice::Reshard::Host) {
      unit.setPostForwardSize(perHost);
    }
  }
  auto builder = OpBuilder::atBlockBegin(to.getBody());
  ArrayAttr save;
  if (choice.recompute == MemoryChoice::Recompute::Products)
    save = builder.getStrArrayAttr({StringRef(productsName)});
  for (int64_t i = 0; i < choice.blocks; ++i) {
    int64_t index = i;
    if (choice.which == MemoryChoice::Which::Last)
      index += numBlocks() - choice.blocks;
    else if (choice.which == MemoryChoice::Which::Spread)
      index = i * numBlocks() / choice.blocks;
    SmallVector<StringRef> modules;
    blocks[size_t(index)].getValue().split(modules, '+');
    for (StringRef name : modules) {
      if (choice.recompute == MemoryChoice::Recompute::Offload)
        OffloadPatternOp::create(builder, to.getLoc(), name, kMinOffload);
      else
        CheckpointPatternOp::create(builder, to.getLoc(), name, save);
    }
  }
  if (choice.inFlight != 0)
    getOrCreateSchedule(to).setReduceScattersInFlight(choice.inFlight);
}

/// No choice's step is shorter: whatever is kept, a call runs once, and a unit
/// is gathered and copied once.
static simulate::LowerBound boundOfChoices(const CompiledStep &step,
                                           simulate::DeviceModel device) {
  device.collectiveCopies = false; // those of later gathers are in compute
  simulate::StepCost cost = simulate::costOf(step.plan, device);
  std::vector<bool> gathered(step.plan.units.size()), copied(gathered);
  auto again = [](std::vector<bool> &units, int32_t unit) {
    bool seen = units[size_t(unit)];
    units[size_t(unit)] = true;
    return seen;
  };
  for (auto [instruction, one] :
       llvm::zip_equal(step.plan.instructions, cost.instructions)) {
    bool skips = false;
    if (const auto *call = std::get_if<plan::Call>(&instruction.kind))
      skips = call->recompute;
    else if (const auto *gather =
                 std::get_if<plan::AllGather>(&instruction.kind))
      skips = again(gathered, gather->unit);
    else if (const auto *copy =
                 std::get_if<plan::CopyToDevice>(&instruction.kind))
      skips = again(copied, copy->unit);
    else if (const auto *reshard =
                 std::get_if<plan::Reshard>(&instruction.kind))
      skips = reshard->keep != 0;
    else // an activation may stay
      skips =
          std::holds_alternative<plan::OffloadActivation>(instruction.kind) ||
          std::holds_alternative<plan::ReloadActivation>(instruction.kind);
    if (skips)
      one = {};
  }
  return simulate::lowerBound(step.plan, cost, device);
}

double MemoryExplorer::gapPercent(const MemoryOutcome &outcome) const {
  return leastTime.seconds > 0 ? 100 * (outcome.seconds / leastTime.seconds - 1)
                               : 0;
}

FailureOr<MemoryOutcome> MemoryExplorer::evaluate(const MemoryChoice &choice) {
  for (const MemoryOutcome &outcome : known)
    if (outcome.choice == choice)
      return outcome;
  FailureOr<CompiledStep> step =
      compileStep(module, device, [&](ModuleOp copy) {
        apply(copy, choice);
        // Chosen afterwards, for what is kept then.
        ScheduleOp schedule = getOrCreateSchedule(copy);
        if (schedule.getBucket() == "optimal")
          schedule.setBucket("unit");
      });
  if (failed(step))
    return failure();
  MemoryOutcome outcome{choice, step->seconds, step->bytes};
  peakHolders = std::move(step->holders);
  if (known.empty())
    leastTime = boundOfChoices(*step, device);
  known.push_back(outcome);
  return outcome;
}

std::string MemoryExplorer::describe(const MemoryChoice &choice) const {
  SmallVector<std::string> parts;
  if (choice.blocks > 0) {
    constexpr const char *which[] = {"the first {0} of {1}",
                                     "the last {0} of {1}",
                                     "{0} evenly spread of {1}"};
    const char *format = choice.blocks == numBlocks()
                             ? "{0} of {1}"
                             : which[size_t(choice.which)];
    // By MemoryChoice::Recompute.
    constexpr const char *what[] = {
        "recompute {0} blocks but matrix products and attention",
        "offload the activations of {0} blocks", "recompute {0} blocks"};
    parts.push_back(
        llvm::formatv(
            false, what[size_t(choice.recompute)],
            llvm::formatv(false, format, choice.blocks, numBlocks()).str())
            .str());
  }
  if (choice.reshard == MemoryChoice::Reshard::Keep)
    parts.push_back("keep parameters gathered");
  if (choice.reshard == MemoryChoice::Reshard::Host)
    parts.push_back("reshard after forward to the ranks of a host");
  if (choice.inFlight == 1)
    parts.push_back("have one reduce-scatter in flight");
  return parts.empty() ? "as the policy says" : llvm::join(parts, ", ");
}

size_t mlir::fsdp::sortByParetoFront(SmallVectorImpl<MemoryOutcome> &outcomes) {
  auto key = [](const MemoryOutcome &outcome) {
    return std::tuple(outcome.bytes, outcome.seconds, outcome.choice.reshard,
                      outcome.choice.recompute, outcome.choice.blocks,
                      outcome.choice.which, outcome.choice.inFlight);
  };
  llvm::sort(outcomes,
             [&](const auto &a, const auto &b) { return key(a) < key(b); });
  SmallVector<MemoryOutcome> front, rest;
  for (const MemoryOutcome &outcome : outcomes)
    (front.empty() || outcome.seconds < front.back().seconds ? front : rest)
        .push_back(outcome);
  size_t size = front.size();
  front.append(rest);
  outcomes = std::move(front);
  return size;
}

/// Choices that differ from one in which blocks recompute, or in what is in
/// flight.
static SmallVector<MemoryChoice> getNeighbours(const MemoryExplorer &explorer,
                                               const MemoryChoice &choice) {
  SmallVector<MemoryChoice> neighbours;
  for (int64_t inFlight : explorer.reducesInFlight()) {
    neighbours.push_back(choice);
    neighbours.back().inFlight = inFlight;
  }
  if (choice.blocks > 0 && choice.blocks < explorer.numBlocks())
    for (auto which : {MemoryChoice::Which::First, MemoryChoice::Which::Last,
                       MemoryChoice::Which::Spread}) {
      neighbours.push_back(choice);
      neighbours.back().which = which;
    }
  return neighbours;
}

FailureOr<SmallVector<MemoryOutcome>>
mlir::fsdp::exploreMemory(MemoryExplorer &explorer) {
  int64_t total = explorer.numBlocks();
  for (MemoryChoice::Reshard reshard : explorer.reshards()) {
    if (failed(explorer.evaluate({reshard})))
      return failure();
    for (MemoryChoice::Recompute recompute : explorer.recomputations())
      for (int64_t quarter = 1; quarter <= 4; ++quarter)
        if (int64_t blocks = total * quarter / 4; blocks > 0)
          if (failed(explorer.evaluate({reshard, recompute, blocks})))
            return failure();
  }
  // The second time, neighbours of what the first has put on the front.
  SmallVector<MemoryOutcome> outcomes;
  for (int round = 0; round < 2; ++round) {
    outcomes.assign(explorer.outcomes().begin(), explorer.outcomes().end());
    size_t front = sortByParetoFront(outcomes);
    for (const MemoryOutcome &outcome : ArrayRef(outcomes).take_front(front))
      for (const MemoryChoice &choice : getNeighbours(explorer, outcome.choice))
        if (failed(explorer.evaluate(choice)))
          return failure();
  }
  return SmallVector<MemoryOutcome>(explorer.outcomes());
}
