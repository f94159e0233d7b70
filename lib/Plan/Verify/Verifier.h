//===- Verifier.h - one pass over a plan that checks its invariants -------===//
//
// Tables are in VerifyTables.cpp, values and the instructions that compute,
// gather or write in VerifyPlan.cpp, those that take gradients in
// VerifyGradients.cpp, and where values lie in VerifyArena.cpp.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_LIB_PLAN_VERIFY_VERIFIER_H
#define FSDP_LIB_PLAN_VERIFY_VERIFIER_H

#include "fsdp/Plan/DeviceBuffers.h"
#include "fsdp/Plan/Memory.h"
#include "fsdp/Plan/Operands.h"
#include "fsdp/Plan/Plan.h"

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fsdp::plan {

/// The text in double quotes.
std::string quote(std::string_view text);
/// "float32[2, 3]".
std::string describe(const TensorSpec &spec);
/// "[3, 1]".
std::string describe(const Strides &strides);

/// Two values whose storages are alive at the same time and have bytes of their
/// arena in common, if there are any.
std::optional<std::pair<ValueId, ValueId>> findOverlap(const Plan &plan,
                                                       const Memory &memory);

/// Checks P26 to P30, and P39, of one of the plan's lists of instructions,
/// whose values and phases hold; `list` is its name. PlanError for the first
/// that does not hold.
void verifyStreams(const Plan &plan,
                   const std::vector<Instruction> &instructions,
                   const std::string &origin, const std::string &list);

/// Checks the invariants of docs/plan-format.md; PlanError for the first that
/// does not hold.
class Verifier {
public:
  Verifier(const Plan &plan, const std::string &origin)
      : plan(plan), origin(origin), states(plan.values.size()),
        liveGather(plan.units.size(), -1), reductionOf(plan.params.size(), -1),
        copiedToDevice(plan.units.size()), allReduced(plan.params.size()),
        stepped(plan.params.size()), hasBuffers(hasDeviceBuffers(plan)),
        sources(plan.units.size(), -1), writtenParams(plan.params.size()),
        writtenBuffers(plan.buffers.size()) {}

  void verify();

private:
  struct ValueState {
    bool defined = false;
    bool freed = false;
    /// Parameter, gathered or read, that this is, or -1.
    int32_t paramOf = -1;
    /// Unit whose gathered parameter this is, or -1.
    int32_t gatheredFrom = -1;
    /// Position of that all_gather.
    int64_t gather = -1;
    /// Parameter whose reduced gradient shard this is, or -1.
    int32_t shardOf = -1;
    /// Of a shard: on the host.
    bool onHost = false;
    /// Of a shard: added, clipped or given to the optimizer.
    bool consumed = false;
    /// Of a gradient: over the step's microbatches.
    bool summed = false;
    /// Of a storage: its values that are not freed.
    int32_t alive = 0;
    /// Of a storage: copied to the host, so that the life of the device's copy
    /// ends.
    bool offloaded = false;
    /// An instruction's buffer.
    bool isBuffer = false;
    /// On the host: the position of the offload_activation that made it.
    int64_t hostOf = -1;
  };

  [[noreturn]] void fail(const char *label, const std::string &message) const {
    throw PlanError(origin + ": " + where + message + " (" + label + ")");
  }
  template <typename Table>
  void checkIndex(int64_t index, const Table &table, const char *what) const {
    if (index < 0 || index >= int64_t(table.size()))
      fail("P1", "expected " + std::string(what) + " below " +
                     std::to_string(table.size()) + ", got " +
                     std::to_string(index));
  }
  void checkSize(size_t got, size_t want, const char *what) const {
    if (got != want)
      fail("P1", "expected " + std::to_string(want) + " " + what + ", got " +
                     std::to_string(got));
  }
  void checkSpec(ValueId value, const TensorSpec &want, const char *label,
                 const std::string &what) const {
    const TensorSpec &got = plan.values[value];
    if (got != want)
      fail(label, "expected value " + std::to_string(value) + " (" + what +
                      ") to be " + describe(want) + ", got " + describe(got));
  }

  /// P38 of strides of any kind.
  void checkStrides(const Strides &strides, const TensorSpec &spec,
                    const std::string &what) const;
  /// P1 of an instruction's own numbers: its indices are in range, and lists
  /// parallel to that of its parameters are as long.
  void verifyFields(const Instruction &instruction) const;
  void verifyInstruction(const Instruction &instruction, ValueId loss = -1);
  void verifyTables();
  void verifyNames() const;
  void verifySharding(const Param &param) const;
  void verifyUnits() const;
  /// P42 of a kernel.
  void verifyKernel(const Kernel &kernel) const;
  void verifyInputs() const;
  void verifyOptimizer();
  void verifyHyperparameters(const Optimizer &of) const;
  void define(ValueId value);
  /// What the value being defined says of its storage.
  void verifyStorage(ValueId value);
  void verifyArena() const;
  /// Checks that the peak is within the budget.
  void verifyBudget(const Memory &memory) const;
  void verifyHostArena() const;
  void use(ValueId value);
  /// Checks that a value that is used is neither on the host nor of a storage
  /// that was copied there.
  void useOnDevice(ValueId value) const;
  void useOperand(ValueId value);
  void useArgs(const ArgList &args);
  /// An operand that a call writes.
  void useMutated(ValueId value);

  // What each kind asks of its operands and results, besides.
  void visit(const Call &call);
  void visit(const Fused &fused);
  void visit(const ReadBuffer &read);
  void visit(const Constant &constant);
  void visit(const AllGather &gather);
  void visit(const Reshard &reshard);
  /// P40 of an instruction of the step.
  void verifyWhen(const Instruction &instruction) const;
  /// P19, and P40 of what a microbatch leaves to the next.
  void verifyMicrobatches() const;
  void visit(const ReduceScatter &reduce);
  void visit(const Accumulate &accumulate);
  void visit(const LossScale &scale);
  void visit(const Unscale &unscale);
  void visit(const ClipGradNorm &clip);
  void visit(const AllReduce &reduce);
  void visit(const CopyToDevice &copy);
  void visit(const CopyToHost &copy);
  void visit(const OffloadActivation &offload);
  void visit(const ReloadActivation &reload);
  void visit(const StageState &stage);
  void visit(const OptimizerStep &step);
  void visit(const ReadParam &read);
  void visit(const WriteParam &write);
  void visit(const WriteBuffer &write);
  template <typename KindT> void visit(const KindT &) {
    for (ValueId value : getOperands(*current))
      useOperand(value);
    for (ValueId value : getResults(*current))
      if (value != current->buffer)
        define(value);
  }
  /// P34.
  void verifyBuffer(const Instruction &instruction);
  void verifySource(const AllGather &gather);
  /// Checks that a device's arena has room for the buffers.
  void verifyBuffersOfArena() const;
  static std::string bufferName(ValueId buffer);
  void verifyInit();
  void verifyEvaluation();
  void verifyLoss(ValueId loss);
  void verifyFrees(const Instruction &instruction, ValueId loss = -1);
  /// A gradient shard of `param` that is used for the only time.
  void useShard(ValueId value, int32_t param, const char *label);
  /// The same, where the shard has to be on the host if the parameter is.
  void useHostShard(ValueId value, int32_t param, const char *label);
  /// `dtype`: where it is not the parameter's.
  void defineShard(ValueId value, int32_t param,
                   std::optional<DType> dtype = std::nullopt);
  void accumulateWhole(ValueId in, ValueId out, const Param &param);
  /// Fills `partial`.
  void findPartialShards();
  /// Checks that the microbatches in which the current instruction runs are
  /// right for gradient `in`, from which `out` is made.
  void passSum(ValueId in, ValueId out);
  void verifyDivisor(double divisor);
  void verifyGradScaler() const;
  /// P37.
  void verifyUpdated() const;
  /// P39: checks that all units with parameters that the step updates are
  /// staged.
  void verifyStaged() const;

  const Plan &plan;
  const std::string &origin;
  /// "instructions[3]: " while an instruction is verified.
  std::string where;
  std::vector<ValueState> states;
  /// Position of the instruction being verified.
  int64_t position = -1;
  const Instruction *current = nullptr;
  /// Per unit: position of the all_gather not yet resharded, or -1.
  std::vector<int64_t> liveGather;
  /// Per unit: what its groups keep (Reshard::keep), 0 for nothing.
  std::vector<int64_t> kept = std::vector<int64_t>(plan.units.size());
  /// Per unit: the ranks of the groups that keep it, 0 before the first.
  std::vector<int64_t> keepSize = std::vector<int64_t>(plan.units.size());
  /// Per unit: its gathers and reshards, in order.
  std::vector<std::vector<const Instruction *>> lives =
      std::vector<std::vector<const Instruction *>>(plan.units.size());
  /// Value that holds the parameter's reduced gradient, or -1.
  std::vector<ValueId> reductionOf;
  /// Per unit: copied to the device for the all_gather to come.
  std::vector<bool> copiedToDevice;
  std::vector<bool> allReduced, stepped;
  /// Whether instructions have buffers.
  const bool hasBuffers;
  /// Per unit: the buffer that its next all_gather reads, or -1.
  std::vector<ValueId> sources;
  /// Parameters whose reduce-scatter input some call writes.
  std::set<int32_t> steered;
  /// Gradient shards that go to an all_reduce, directly or accumulated.
  std::set<ValueId> partial;
  /// Parameters whose gradients are accumulated.
  std::set<int32_t> accumulated;
  bool optimizerBegun = false;
  /// Units whose state is staged for a checkpoint.
  std::set<int32_t> staged;
  std::vector<bool> writtenParams, writtenBuffers;
  bool sawClipping = false, sawLossScale = false, sawUnscale = false;
  /// Parameters whose gradients are unscaled.
  std::set<int32_t> unscaled;
};

} // namespace fsdp::plan

#endif // FSDP_LIB_PLAN_VERIFY_VERIFIER_H
