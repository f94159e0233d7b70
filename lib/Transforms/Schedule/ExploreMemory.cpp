//===- ExploreMemory.cpp - time against memory of a step ------------------===//
#include "fsdp/Transforms/ExploreMemory.h"

#include "fsdp/Dialect/Aten.h"
#include "fsdp/Transforms/CompileStep.h"
#include "fsdp/Transforms/Schedule.h"
#include "llvm/ADT/MapVector.h"
#include "llvm/Support/FormatVariadic.h"

using namespace mlir;
using namespace mlir::fsdp;
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
    if (int64_t perHost = this->device.ranksPerHost;
        perHost > 1 && perHost < shards && shards % perHost == 0)
      reshardKinds.push_back(MemoryChoice::Reshard::Host);
  }
  findProducts();
  // What the policy says about recomputation stays.
  if (blocks.empty() || !module.getOps<CheckpointPatternOp>().empty())
    return;
  if (!products.empty())
    recomputeKinds.push_back(MemoryChoice::Recompute::Products);
  recomputeKinds.push_back(MemoryChoice::Recompute::Full);
}

void MemoryExplorer::findProducts() {
  ProgramOp program = getProgram(module);
  if (!program || blocks.empty())
    return;
  // The blocks are alike.
  StringRef block = blocks.front().getValue().split('+').first;
  llvm::SetVector<StringRef> found;
  for (auto call : program.getOps<aten::CallOp>()) {
    auto named = dyn_cast<NameLoc>(call.getLoc());
    StringRef name = named ? named.getName().strref() : StringRef();
    if (!name.consume_front(block) || (!name.empty() && name.front() != '.'))
      continue;
    StringRef op = call.getCallee().split('.').first;
    if (llvm::is_contained(
            {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}, op) ||
        (op.contains("scaled_dot_product") && !op.contains("backward")))
      found.insert(op);
  }
  products = found.takeVector();
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
      unit.setPostForwardSize(device.ranksPerHost);
    }
  }
  auto builder = OpBuilder::atBlockBegin(to.getBody());
  ArrayAttr save;
  if (choice.recompute == MemoryChoice::Recompute::Products)
    save = builder.getStrArrayAttr(products);
  for (StringAttr block : ArrayRef(blocks).take_front(size_t(choice.blocks))) {
    SmallVector<StringRef> modules;
    block.getValue().split(modules, '+');
    for (StringRef name : modules)
      CheckpointPatternOp::create(builder, to.getLoc(), name, save);
  }
}

/// The three uses that hold most at the peak.
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
  known.push_back(outcome);
  return outcome;
}

std::string MemoryExplorer::describe(const MemoryChoice &choice) const {
  std::string text;
  if (choice.blocks > 0)
    text = llvm::formatv("recompute {0} of {1} blocks{2}", choice.blocks,
                         blocks.size(),
                         choice.recompute == MemoryChoice::Recompute::Products
                             ? " but matrix products and attention"
                             : "");
  if (choice.reshard == MemoryChoice::Reshard::Keep)
    text += text.empty() ? "keep parameters gathered"
                         : ", keep parameters gathered";
  if (choice.reshard == MemoryChoice::Reshard::Host)
    text += std::string(text.empty() ? "" : ", ") +
            "reshard after forward to the ranks of a host";
  return text.empty() ? "as the policy says" : text;
}

size_t mlir::fsdp::sortByParetoFront(SmallVectorImpl<MemoryOutcome> &outcomes) {
  auto key = [](const MemoryOutcome &outcome) {
    return std::tuple(outcome.bytes, outcome.seconds, outcome.choice.reshard,
                      outcome.choice.recompute, outcome.choice.blocks);
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
  return SmallVector<MemoryOutcome>(explorer.outcomes());
}
