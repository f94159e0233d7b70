//===- Executor.h - runs a plan's instructions ----------------------------===//
//
// Everything that can be looked up is looked up once, in a CallTable. A step
// then pushes arguments onto one reused stack and calls the boxed kernels.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_EXECUTOR_H
#define FSDP_RUNTIME_EXECUTOR_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/CallTable.h"
#include "fsdp/Runtime/Comm.h"
#include "fsdp/Runtime/Position.h"
#include "fsdp/Runtime/ShardedOptimizer.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

namespace fsdp::runtime {

/// A failure made on purpose, for tests of what follows.
struct Fault {
  int64_t rank = 0;
  int64_t step = 0;        ///< counted from 1
  int64_t instruction = 0; ///< position in the plan
  bool kill = false;       ///< SIGKILL to itself; otherwise an exception
};

class Executor {
public:
  /// Borrows plan, comm and position; resolves every instruction. `buffers`
  /// are this rank's, in the plan's order; calls may mutate them. Throws
  /// InputError that names an instruction whose operator is unknown or whose
  /// arguments do not fit its schema.
  Executor(const plan::Plan &plan, Comm &comm, Position &position,
           std::vector<at::Tensor> buffers);
  ~Executor();

  /// Runs one step, counted from 0, on `inputs` in the plan's order and
  /// returns the loss. Throws RunError that names step, operator, module and
  /// unit; errors of the collectives pass through.
  double runStep(int64_t step, const std::vector<at::Tensor> &inputs);

  void setFault(const Fault &value) { fault = value; }

private:
  void run(const plan::Call &call, size_t index);
  void run(const plan::AllGather &gather);
  void run(const plan::ReduceScatter &reduce);
  void run(const plan::OptimizerStep &step);
  void execute(size_t position);
  void injectFault(int64_t step, size_t position) const;
  std::vector<at::Tensor> take(const std::vector<plan::ValueId> &ids) const;

  const plan::Plan &plan;
  Comm &comm;
  Position &position;
  std::vector<at::Tensor> buffers;
  std::vector<at::Tensor> values;
  CallTable calls;
  std::unique_ptr<ShardedOptimizer> optimizer;
  std::optional<Fault> fault;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_EXECUTOR_H
