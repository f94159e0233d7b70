//===- Schedule.cpp - the policy of the scheduling passes -----------------===//
#include "fsdp/Transforms/Schedule.h"

#include "mlir/IR/Builders.h"

using namespace mlir;
using namespace mlir::fsdp;
namespace simulate = ::fsdp::simulate;

ScheduleOp mlir::fsdp::getOrCreateSchedule(ModuleOp module) {
  for (auto schedule : module.getOps<ScheduleOp>())
    return schedule;
  auto builder = OpBuilder::atBlockBegin(module.getBody());
  OperationState state(module.getLoc(), ScheduleOp::getOperationName());
  return cast<ScheduleOp>(builder.create(state));
}

FailureOr<simulate::DeviceModel> mlir::fsdp::loadDevice(ModuleOp module) {
  ScheduleOp schedule = getOrCreateSchedule(module);
  int64_t ranks = 1;
  for (auto mesh : module.getOps<MeshOp>())
    ranks = mesh.getMesh().getNumRanks();
  try {
    return simulate::clusterOf(simulate::loadDevice(schedule.getDevice().str()),
                               ranks)
        .device;
  } catch (const simulate::SimulateError &error) {
    return schedule.emitOpError(error.what());
  }
}

FailureOr<::fsdp::plan::MemoryModel>
mlir::fsdp::getMemoryModel(ModuleOp module) {
  if (auto name = module->getAttrOfType<StringAttr>(memoryAttrName))
    return name.getValue() == "device" ? ::fsdp::plan::MemoryModel::Device
                                       : ::fsdp::plan::MemoryModel::SharedHost;
  FailureOr<simulate::DeviceModel> device = loadDevice(module);
  if (failed(device))
    return failure();
  return device->memoryModel();
}
