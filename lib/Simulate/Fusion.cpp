//===- Fusion.cpp - chains of operators as one kernel ---------------------===//
#include "Fusion.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

namespace fsdp::simulate {

using namespace plan;

namespace {

class Fuser {
public:
  Fuser(const Plan &plan, std::vector<OperatorWork> &works,
        std::vector<bool> &launches)
      : plan(plan), works(works), launches(launches), parents(works.size()),
        stages(works.size()), writers(plan.values.size(), -1),
        readers(plan.values.size()) {
    std::iota(parents.begin(), parents.end(), 0);
  }

  void run() {
    for (size_t i = 0; i < works.size(); ++i)
      link(int(i));
    for (size_t i = 0; i < works.size(); ++i)
      if (isFusable(int(i)))
        recount(int(i));
  }

private:
  bool isFusable(int index) const { return works[index].fusable; }
  const Call *callAt(int index) const {
    return std::get_if<Call>(&plan.instructions[index].kind);
  }
  int find(int index) {
    while (parents[index] != index)
      index = parents[index] = parents[parents[index]];
    return index;
  }

  /// A stage ends where a kernel does that cannot be fused: no chain leads out
  /// of a stage and back, so calls that are linked within one can be one
  /// kernel.
  void link(int index) {
    const Instruction &instruction = plan.instructions[index];
    std::vector<ValueId> operands = getOperands(instruction);
    bool free = callAt(index) && works[index].kind == OperatorWork::Kind::Free;
    for (ValueId id : operands) {
      ValueId owner = ownerOf(plan, id);
      // A view is not a use; whoever uses it is.
      if (!free)
        readers[owner].push_back(index);
      int writer = writers[owner];
      if (writer < 0)
        continue;
      bool joins = isFusable(index) && isFusable(writer);
      stages[index] = std::max(stages[index], stages[writer] + (joins ? 0 : 1));
    }
    if (isFusable(index))
      for (ValueId id : operands) {
        int writer = writers[ownerOf(plan, id)];
        if (writer >= 0 && isFusable(writer) &&
            stages[writer] == stages[index] &&
            plan.instructions[writer].phase == instruction.phase)
          parents[find(index)] = find(writer);
      }
    if (const Call *call = callAt(index); call && !free)
      for (ValueId out : call->outs)
        if (out >= 0)
          writers[ownerOf(plan, out)] = index;
  }

  void recount(int index) {
    const Call &call = *callAt(index);
    Kernel &kernel = kernels[find(index)];
    launches[index] = !kernel.launched;
    kernel.launched = true;
    double bytes = 0;
    for (ValueId id : getOperands(call)) {
      ValueId owner = ownerOf(plan, id);
      if (!kernel.made.count(owner) && kernel.read.insert(owner).second)
        bytes += double(touchedBytes(plan, id));
    }
    for (ValueId out : call.outs) {
      if (out < 0)
        continue;
      ValueId owner = ownerOf(plan, out);
      kernel.made.insert(owner);
      auto outside = [&](int reader) {
        return find(reader) != find(index) || !isFusable(reader);
      };
      bool escapes =
          out == plan.loss || plan.values[out].storage >= 0 ||
          std::any_of(readers[owner].begin(), readers[owner].end(), outside);
      if (escapes)
        bytes += double(touchedBytes(plan, out));
    }
    // What touches a part of an operand does not take more for being fused.
    works[index].bytes = std::min(works[index].bytes, bytes);
  }

  struct Kernel {
    bool launched = false;
    std::set<ValueId> made, read;
  };

  const Plan &plan;
  std::vector<OperatorWork> &works;
  std::vector<bool> &launches;
  std::vector<int> parents; ///< union-find over instructions
  std::vector<int> stages;
  std::vector<int> writers;              ///< per storage: its last
  std::vector<std::vector<int>> readers; ///< per storage
  std::map<int, Kernel> kernels;
};

} // namespace

void fuse(const Plan &plan, std::vector<OperatorWork> &works,
          std::vector<bool> &launches) {
  Fuser(plan, works, launches).run();
}

} // namespace fsdp::simulate
