//===- StepModel.cpp - time and memory of a step --------------------------===//
#include "StepModel.h"

#include "fsdp/Plan/DeviceBuffers.h"
#include "fsdp/Transforms/AssignStreams.h"
#include "fsdp/Transforms/EmitPlan.h"
#include "fsdp/Transforms/InsertFrees.h"

using namespace mlir;
using namespace mlir::fsdp;
namespace plan = ::fsdp::plan;
namespace simulate = ::fsdp::simulate;

FailureOr<StepModel> StepModel::build(ModuleOp module) {
  StepModel model;
  SmallVector<Operation *> frees;
  for (auto program : module.getOps<ProgramOp>()) {
    insertFrees(program, &frees);
    assignStreams(program);
  }
  PlanOrigins origins;
  auto emitted = emitPlan(module, &origins);
  for (Operation *free : frees)
    free->erase();
  for (Operation *&op : origins.step)
    if (isa<MarkOp>(op))
      op = op->getNextNode(); // it goes
  for (auto program : module.getOps<ProgramOp>())
    clearStreams(program);
  if (failed(emitted))
    return failure();
  model.plan = std::move(*emitted);
  model.ops = std::move(origins.step);
  auto device = loadDevice(module);
  if (failed(device))
    return failure();
  model.device = std::move(*device);
  model.cost = simulate::costOf(model.plan, model.device);
  plan::MemoryModel memoryModel = model.device.memoryModel();
  if (memoryModel == plan::MemoryModel::Device)
    plan::addDeviceBuffers(model.plan);
  model.memory = plan::replayMemory(model.plan, memoryModel);
  model.staticBytes = plan::sum(plan::staticBytes(model.plan, memoryModel));
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
