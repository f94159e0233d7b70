//===- DetectUnits.cpp - units from the repeated structure of the graph ---===//
//
// Names play no part in what is found. A cut is a place in forward where one
// activation is alive; between two cuts lies a segment. A segment of several
// calls that uses parameters is a residual part: attention, an MLP, a
// bottleneck. The longest periodic run of alike residual parts are the blocks.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Transforms/Passes.h"

#include "llvm/ADT/DenseMap.h"
#include "llvm/ADT/DenseSet.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/ADT/StringMap.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_DETECTUNITS
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;

namespace {
/// Forward as positions of calls.
struct Forward {
  explicit Forward(ProgramOp program) {
    for (Operation &op : program.getBody().front()) {
      if (auto phase = dyn_cast<PhaseOp>(op);
          phase && phase.getPhase() == Phase::Backward)
        break;
      if (auto call = dyn_cast<aten::CallOp>(op)) {
        position[call] = calls.size();
        calls.push_back(call);
      }
    }
    findActivations(program);
    findCuts(program);
  }

  /// A value is an activation if it follows from both the step's inputs and
  /// parameters: not one are masks, positions and transposed weights.
  void findActivations(ProgramOp program) {
    llvm::DenseSet<Value> fromInput, fromParam;
    for (BlockArgument argument : program.getBody().getArguments())
      fromInput.insert(argument);
    for (auto read : program.getOps<ReadOp>())
      fromParam.insert(read.getResult());
    for (aten::CallOp call : calls)
      for (Value operand : call->getOperands())
        for (Value result : call->getResults()) {
          if (fromInput.contains(operand))
            fromInput.insert(result);
          if (fromParam.contains(operand))
            fromParam.insert(result);
          if (fromInput.contains(result) && fromParam.contains(result))
            activations.insert(result);
        }
  }

  /// Position p is a cut if one activation is alive between calls p - 1 and p.
  void findCuts(ProgramOp program) {
    llvm::DenseMap<Value, std::pair<size_t, size_t>> lives; // by storage
    for (auto [index, call] : llvm::enumerate(calls))
      for (Value result : call->getResults()) {
        if (!activations.contains(result))
          continue;
        Value owner = getStorageOwner(result);
        auto [it, inserted] = lives.try_emplace(owner, index, index);
        for (Operation *user : result.getUsers()) {
          size_t last = isa<ReturnOp>(user) ? calls.size() : 0;
          if (auto used = position.find(user); used != position.end())
            last = used->second;
          it->second.second = std::max(it->second.second, last);
        }
      }
    std::vector<int64_t> change(calls.size() + 2);
    for (auto &[owner, life] : lives)
      if (life.second > life.first) {
        ++change[life.first + 1];
        --change[life.second + 1];
      }
    int64_t alive = 0;
    for (size_t index = 0; index <= calls.size(); ++index) {
      alive += change[index];
      if (alive == 1)
        cuts.push_back(index);
    }
  }

  std::vector<aten::CallOp> calls;
  llvm::DenseMap<Operation *, size_t> position;
  llvm::DenseSet<Value> activations;
  std::vector<size_t> cuts;
};

/// Calls [begin, end) between two cuts.
struct Segment {
  size_t begin, end;
  /// How often each operator is called.
  llvm::StringMap<unsigned> ops;
  unsigned kind = 0;

  /// Twice what both have, over what either has.
  double likeness(const Segment &other) const {
    unsigned common = 0;
    for (const auto &entry : ops)
      common += std::min(entry.getValue(), other.ops.lookup(entry.getKey()));
    return 2.0 * common / double(end - begin + other.end - other.begin);
  }
};

/// Parts `begin` to `begin + length`, in blocks of `period` of them.
struct Run {
  size_t begin = 0, length = 0, period = 1;
};

struct DetectUnits : mlir::fsdp::impl::DetectUnitsBase<DetectUnits> {
  void runOnOperation() override {
    ModuleOp module = getOperation();
    auto policies = llvm::to_vector(module.getOps<AutoUnitsOp>());
    if (policies.empty())
      return;
    ProgramOp program = getProgram(module);
    if (!program)
      return signalPassFailure();
    AutoUnitsOp policy = policies.front();
    Forward forward(program);
    llvm::DenseMap<StringAttr, size_t> firstUse =
        getFirstUses(program, forward);
    std::vector<Segment> parts = getParts(forward, firstUse);
    Run run = findRun(parts);
    if (run.length < 2 * run.period) {
      policy.emitRemark("found no repeated structure in ")
          << parts.size()
          << " residual parts; the root unit has all parameters";
    } else {
      std::vector<size_t> begins;
      for (size_t i = 0; i < run.length; i += run.period)
        begins.push_back(parts[run.begin + i].begin);
      // What follows the last part's end is not the block's.
      size_t end = parts[run.begin + run.length - 1].end;
      createUnits(module, policy, run, begins, end, firstUse);
    }
    for (AutoUnitsOp op : policies)
      op.erase();
  }

private:
  /// The first call of forward that uses each parameter, a view of it aside.
  static llvm::DenseMap<StringAttr, size_t>
  getFirstUses(ProgramOp program, const Forward &forward) {
    llvm::DenseMap<StringAttr, size_t> uses;
    for (auto read : program.getOps<ReadOp>()) {
      SmallVector<Value> values{read.getResult()};
      size_t first = forward.calls.size();
      while (!values.empty())
        for (Operation *user : values.pop_back_val().getUsers()) {
          auto it = forward.position.find(user);
          if (it == forward.position.end())
            continue;
          bool activation = llvm::any_of(user->getResults(), [&](Value value) {
            return forward.activations.contains(value);
          });
          if (activation)
            first = std::min(first, it->second);
          else
            llvm::append_range(values, user->getResults());
        }
      StringAttr name = read.getParamAttr().getAttr();
      auto [it, inserted] = uses.try_emplace(name, first);
      it->second = std::min(it->second, first);
    }
    return uses;
  }

  /// The segments of several calls that use parameters, by kind.
  static std::vector<Segment>
  getParts(const Forward &forward,
           const llvm::DenseMap<StringAttr, size_t> &firstUse) {
    std::vector<size_t> uses;
    for (auto &[name, position] : firstUse)
      uses.push_back(position);
    llvm::sort(uses);
    std::vector<Segment> parts;
    SmallVector<size_t> examples; // a part of each kind
    for (size_t i = 0; i + 1 < forward.cuts.size(); ++i) {
      Segment part{forward.cuts[i], forward.cuts[i + 1], {}};
      auto use = llvm::lower_bound(uses, part.begin);
      if (part.end - part.begin < 2 || use == uses.end() || *use >= part.end)
        continue;
      for (size_t call = part.begin; call < part.end; ++call)
        ++part.ops[forward.calls[call]
                       ->getAttrOfType<StringAttr>("callee")
                       .getValue()];
      part.kind = examples.size();
      for (auto [kind, example] : llvm::enumerate(examples))
        if (part.likeness(parts[example]) >= kAlike) {
          part.kind = kind;
          break;
        }
      if (part.kind == examples.size())
        examples.push_back(parts.size());
      parts.push_back(std::move(part));
    }
    return parts;
  }

  /// The longest run of kinds that repeats with some period, the shortest
  /// period of those.
  static Run findRun(const std::vector<Segment> &parts) {
    Run best;
    for (size_t period = 1; period <= std::min(parts.size() / 2, kMaxPeriod);
         ++period) {
      size_t same = 0;
      for (size_t i = 0; i + period <= parts.size(); ++i) {
        if (i + period < parts.size() &&
            parts[i].kind == parts[i + period].kind) {
          ++same;
          continue;
        }
        size_t length = (same + period) / period * period;
        if (same >= period && length > best.length)
          best = {i - same, length, period};
        same = 0;
      }
    }
    return best;
  }

  static void createUnits(ModuleOp module, AutoUnitsOp policy, const Run &run,
                          ArrayRef<size_t> begins, size_t end,
                          const llvm::DenseMap<StringAttr, size_t> &firstUse) {
    std::vector<SmallVector<ParamOp>> blocks(begins.size());
    for (auto param : module.getOps<ParamOp>()) {
      auto use = firstUse.find(param.getSymNameAttr());
      if (param.getUnit() || param.getIgnored() || use == firstUse.end() ||
          use->second < begins.front() || use->second >= end)
        continue;
      auto block = llvm::upper_bound(begins, use->second) - begins.begin() - 1;
      blocks[block].push_back(param);
    }
    std::string names;
    llvm::StringMap<unsigned> taken;
    unsigned count = 0;
    for (ArrayRef<ParamOp> block : blocks) {
      if (block.empty())
        continue;
      std::string name = getCommonModule(block);
      if (unsigned again = taken[name]++)
        name += "#" + std::to_string(again);
      OpBuilder builder(block.front());
      auto unit = UnitOp::create(builder, policy.getLoc(), name, true);
      for (ParamOp param : block)
        param.setUnitAttr(FlatSymbolRefAttr::get(unit.getSymNameAttr()));
      names += (names.empty() ? "" : ", ") + name;
      ++count;
    }
    policy.emitRemark("found ")
        << count << " blocks of " << run.period << " residual part"
        << (run.period == 1 ? "" : "s") << " each: " << names;
  }

  /// The longest module name that all parameters have in common.
  static std::string getCommonModule(ArrayRef<ParamOp> params) {
    SmallVector<StringRef> common;
    params.front().getSymName().split(common, '.');
    common.pop_back();
    for (ParamOp param : params.drop_front()) {
      SmallVector<StringRef> segments;
      param.getSymName().split(segments, '.');
      segments.pop_back();
      size_t same = 0;
      while (same < std::min(common.size(), segments.size()) &&
             common[same] == segments[same])
        ++same;
      common.truncate(same);
    }
    return common.empty() ? "block" : llvm::join(common, ".");
  }

  /// Parts this much alike are of one kind: a bottleneck with a downsampling
  /// branch and one without are (0.86), attention and an MLP are not.
  static constexpr double kAlike = 0.75;
  static constexpr size_t kMaxPeriod = 64;
};
} // namespace
