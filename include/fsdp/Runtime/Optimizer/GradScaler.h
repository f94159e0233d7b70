//===- GradScaler.h - torch.amp.GradScaler on gradient shards -------------===//
#ifndef FSDP_RUNTIME_OPTIMIZER_GRADSCALER_H
#define FSDP_RUNTIME_OPTIMIZER_GRADSCALER_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/Collectives/Comm.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdp::runtime {

/// The loss scale and what changes it, bit by bit as torch.amp.GradScaler does
/// under FSDP2 (torch's amp/grad_scaler.py; for DTensors,
/// found_inf_reduce_handler of distributed/tensor/_dispatch.py). Every rank has
/// one, with equal state.
class GradScaler {
public:
  /// Its tensors are on `device`.
  GradScaler(const plan::GradScaler &settings,
             c10::Device device = c10::DeviceType::CPU);

  /// A float32 scalar that update() writes.
  const at::Tensor &scale() const { return currentScale; }

  /// Returns `shards`, on the host or the device, divided by the scale that
  /// they were multiplied by; with `deferred`, returns them unchanged. May
  /// write them. From then on foundInf() says whether any element on any rank
  /// of the replica was not finite. A collective operation.
  std::vector<at::Tensor> unscale(Comm &comm, std::vector<at::Tensor> shards,
                                  bool deferred);
  /// Whether any element was not finite. Waits for the device.
  bool foundInf() const;
  /// The same as a float32 scalar, 1 or 0, for kernels that skip by themselves;
  /// valid until update().
  const at::Tensor &found() const { return foundAnywhere; }

  /// Ends the step: backs off or grows.
  void update();

  /// What the next step depends on, between steps.
  struct State {
    float scale = 0;
    int32_t growthTracker = 0;
  };
  State state() const;
  void setState(const State &state);

private:
  plan::GradScaler settings;
  at::Tensor currentScale, growthTracker, foundAnywhere;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_OPTIMIZER_GRADSCALER_H
