//===- TorchItems.h - what torch.save writes of one object ----------------===//
//
// A tensor, or a value of Python's own types: an archive (StoredZip) of a
// pickle and of the tensor's elements. Anything else that torch.save writes
// (objects of other classes) is refused.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_CHECKPOINT_TORCHITEMS_H
#define FSDP_RUNTIME_CHECKPOINT_TORCHITEMS_H

#include "fsdp/Plan/Tensors.h"

#include <nlohmann/json.hpp>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace fsdp::runtime {

struct TorchTensor {
  plan::TensorSpec spec;
  /// Row-major; borrowed from the item, or from `memory` if the item's data is
  /// not row-major.
  std::span<const std::byte> data;
  std::shared_ptr<const void> memory;
};

// Reading. `item` is everything that torch.save wrote, and is borrowed. These
// throw InputError that begins with `place`.

TorchTensor readTorchTensor(const std::string &place,
                            std::span<const std::byte> item);
/// None, bool, int, float, str, bytes, and lists, tuples and dicts of these.
nlohmann::json readTorchValue(const std::string &place,
                              std::span<const std::byte> item);

// Writing, by calls of `write`.

void writeTorchTensor(const plan::TensorSpec &spec,
                      std::span<const std::byte> data,
                      const std::function<void(std::string_view)> &write);
/// Arrays become tuples, or lists.
void writeTorchValue(const nlohmann::json &value, bool tuples,
                     const std::function<void(std::string_view)> &write);

/// "torch float32", the name of the dtype in a pickle.
std::string torchName(plan::DType dtype);
std::optional<plan::DType> parseTorchName(std::string_view name);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CHECKPOINT_TORCHITEMS_H
