//===- MemoryStats.cpp - fsdp-opt --emit stats, memory of a rank ----------===//
#include "Stats.h"
#include "llvm/ADT/STLExtras.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/ADT/Twine.h"
#include "llvm/Support/Format.h"

using namespace mlir::fsdp;
using namespace fsdp::plan;
using llvm::Twine;

/// Storages at the peak that get a line each.
constexpr size_t kShown = 16;

static std::string describeShape(const TensorSpec &spec) {
  std::string text = std::string(dtypeName(spec.dtype)) + "[";
  llvm::raw_string_ostream os(text);
  llvm::interleaveComma(spec.shape, os);
  return text + "]";
}

/// What made a storage, where in the model.
static std::string describeOrigin(const Plan &plan, const Storage &storage) {
  if (storage.definition == -1)
    return "input";
  const Instruction &instruction = instructionAt(plan, storage.definition);
  std::string text;
  if (const auto *call = std::get_if<Call>(&instruction.kind))
    text = call->op;
  if (instruction.module == -1)
    return text;
  const std::string &module = plan.modules[instruction.module];
  text += (text.empty() ? "" : " ") + ("in \"" + module + "\"");
  if (int32_t unit = unitOfModule(plan, module); unit != -1)
    text += " (unit \"" + plan.units[unit].name + "\")";
  return text;
}

void mlir::fsdp::printMemory(const Plan &plan, MemoryModel model,
                             int64_t scratch, llvm::raw_ostream &os) {
  Memory memory = replayMemory(plan, model);
  std::vector<int64_t> live = memory.liveBytes();
  auto staticUses = staticBytes(plan, model);
  auto row = [&](llvm::StringRef name, const Twine &value) {
    os << llvm::left_justify(name, 28) << value << '\n';
  };
  os << '\n';
  row("peak bytes a rank", formatBytes(peakBytes(plan, model) + scratch));
  for (size_t use = 0; use < kNumMemoryUses; ++use)
    if (staticUses[use] != 0)
      row("  " + std::string(memoryUseName(MemoryUse(use))),
          formatBytes(staticUses[use]));
  row("  arena", formatBytes(plan.arena->bytes));
  if (scratch != 0)
    row("  operators' scratch", formatBytes(scratch) + ", measured");
  if (plan.memoryBudget)
    row("memory budget",
        formatBytes(*plan.memoryBudget) + ", " +
            formatBytes(*plan.memoryBudget - peakBytes(plan, model)) +
            " of it left");
  int64_t gap = plan.arena->bytes - plan.arena->lowerBound;
  row("arena's lower bound",
      formatBytes(plan.arena->lowerBound) + ", gap " + formatBytes(gap));
  if (plan.hostArena)
    row("host's bytes a rank",
        formatBytes(plan.hostArena->bytes) + " of activations, gap " +
            formatBytes(plan.hostArena->bytes - plan.hostArena->lowerBound));
  row("storages in the arena", Twine(memory.storages.size()));
  if (live.empty() || memory.storages.empty())
    return;

  int64_t peak = memory.peakPosition();
  const Instruction &instruction = instructionAt(plan, peak);
  constexpr const char *phases[] = {"forward", "backward", "optimizer phase"};
  bool evaluates = peak >= memory.stepPositions;
  row("most bytes alive",
      formatBytes(live[size_t(peak)]) + " at " +
          (evaluates ? "evaluation[" + Twine(peak - memory.stepPositions)
                     : "instructions[" + Twine(peak)) +
          "], in " +
          (evaluates ? "evaluation" : phases[size_t(instruction.phase)]));
  BytesByUse uses = memory.usesAt(peak);
  std::vector<int32_t> alive = memory.aliveAt(peak);
  for (size_t use = 0; use < kNumMemoryUses; ++use)
    if (uses[use] != 0)
      row("  " + std::string(memoryUseName(MemoryUse(use))),
          formatBytes(uses[use]));
  os << '\n'
     << llvm::right_justify("bytes", 11) << "  "
     << llvm::left_justify("alive at the peak", 22)
     << llvm::left_justify("value", 30) << "made by\n";
  for (int32_t index : llvm::ArrayRef(alive).take_front(kShown)) {
    const Storage &storage = memory.storages[index];
    os << llvm::right_justify(formatBytes(storage.bytes), 11) << "  "
       << llvm::left_justify(memoryUseName(storage.use), 22)
       << llvm::left_justify(storage.value == -1
                                 ? ""
                                 : describeShape(plan.values[storage.value]),
                             30)
       << describeOrigin(plan, storage) << '\n';
  }
  if (alive.size() > kShown) {
    int64_t rest = 0;
    for (int32_t index : llvm::ArrayRef(alive).drop_front(kShown))
      rest += memory.storages[index].bytes;
    os << llvm::right_justify(formatBytes(rest), 11) << "  "
       << alive.size() - kShown << " more\n";
  }
}
