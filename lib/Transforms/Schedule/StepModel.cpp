//===- StepModel.cpp - time and memory of a step --------------------------===//
#include "StepModel.h"

#include "fsdp/Transforms/EmitPlan.h"
#include "fsdp/Transforms/InsertFrees.h"

#include <numeric>

using namespace mlir;
using namespace mlir::fsdp;
namespace plan = ::fsdp::plan;
namespace simulate = ::fsdp::simulate;

FailureOr<StepModel> StepModel::build(ModuleOp module) {
  StepModel model;
  SmallVector<Operation *> frees;
  for (auto program : module.getOps<ProgramOp>())
    insertFrees(program, &frees);
  auto emitted = emitPlan(module, &model.ops);
  for (Operation *free : frees)
    free->erase();
  if (failed(emitted))
    return failure();
  model.plan = std::move(*emitted);
  try {
    model.device =
        simulate::clusterOf(
            simulate::loadDevice(getSchedule(module).getDevice().str()),
            model.plan.worldSize)
            .device;
  } catch (const simulate::SimulateError &error) {
    return getSchedule(module).emitOpError(error.what());
  }
  model.cost = simulate::costOf(model.plan, model.device);
  model.memoryModel = model.device.sharedMemory ? plan::MemoryModel::SharedHost
                                                : plan::MemoryModel::Device;
  model.memory = plan::replayMemory(model.plan, model.memoryModel);
  auto kept = plan::staticBytes(model.plan, model.memoryModel);
  model.staticBytes = std::accumulate(kept.begin(), kept.end(), int64_t{0});
  return model;
}

std::vector<double> StepModel::computeTime() const {
  std::vector<double> time(plan.instructions.size() + 1);
  for (size_t i = 0; i < plan.instructions.size(); ++i)
    time[i + 1] =
        time[i] + (plan.instructions[i].stream == plan::Stream::Compute
                       ? cost.instructions[i].seconds
                       : 0);
  return time;
}
