//===- NativeForm.h - native checkpoints for and from other programs ------===//
//
// A native checkpoint has tensors under torchtitan's names, and its manifest
// says where the run was. PyTorch wants that as values: "train_state.step",
// "lr_scheduler.last_epoch", and the optimizer's options for each parameter,
// which come from the plan. What PyTorch has no name for (seed, samples and the
// like) is the value "fsdp_mlir.run".
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_CHECKPOINT_NATIVEFORM_H
#define FSDP_RUNTIME_CHECKPOINT_NATIVEFORM_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/Checkpoint/Chunks.h"

#include <nlohmann/json.hpp>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::runtime {

/// Whether the folder has a manifest.
bool isNative(const std::string &folder);

/// "optimizer.param_groups.{parameter}.{option}" of each parameter and alias,
/// after so many steps: what get_optimizer_state_dict of PyTorch 2.4 to 2.15
/// gives, with flatten_optimizer_state_dict, for the torch.optim optimizer that
/// the plan's corresponds to; including all that a scheduler sets. Empty for a
/// plug-in.
std::map<std::string, nlohmann::json> torchOptions(const plan::Plan &plan,
                                                   int64_t step);

/// Reads a whole checkpoint, and compares all hashes. The result has tied
/// parameters under each name. With a plan, which must have the checkpoint's
/// parameters, it also has the optimizer's options. Throws InputError.
SavedState readNative(const std::string &folder, const plan::Plan *plan);

/// Where a run continues that starts from another program's checkpoint.
struct NativeStart {
  uint64_t seed = 0;
  /// The samples that all ranks have taken; nullopt: as many as the plan takes
  /// in the checkpoint's steps.
  std::optional<int64_t> samples;
};

/// Makes `folder`/step-N from the checkpoint at `from`, where N is its step;
/// fsdp-run continues from it with the plan. Non-persistent buffers that the
/// checkpoint lacks come from the plan's weights, a file relative to
/// `planPath`. `start` is for checkpoints without "fsdp_mlir.run". Returns
/// remarks: what is left out or assumed, and where the optimizer's options
/// differ. Throws InputError if something that the plan needs is missing.
std::vector<std::string>
writeNative(const std::string &folder, const std::string &from,
            const SavedState &state, const plan::Plan &plan,
            const std::string &planPath, const NativeStart &start);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CHECKPOINT_NATIVEFORM_H
