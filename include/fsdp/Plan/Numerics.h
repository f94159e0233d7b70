//===- Numerics.h - PyTorch's settings that decide bits -------------------===//
#ifndef FSDP_PLAN_NUMERICS_H
#define FSDP_PLAN_NUMERICS_H

#include <map>
#include <span>
#include <string>
#include <string_view>

namespace fsdp::plan {

/// Global settings of PyTorch on which the bits of its kernels depend, by name:
/// those that were not PyTorch's defaults when the model was captured. A run of
/// the plan sets them.
using Numerics = std::map<std::string, std::string>;

/// A setting, named as in Python below `torch.backends`, or `torch` itself, and
/// the values that it takes, PyTorch's default first.
struct NumericSetting {
  std::string_view name;
  std::span<const std::string_view> values;
};

/// All settings that are known, in the order in which they are to be set.
std::span<const NumericSetting> numericSettings();

/// What is wrong with the settings, as "expected ..., got ..."; empty: nothing.
std::string findDefect(const Numerics &numerics);

} // namespace fsdp::plan

#endif // FSDP_PLAN_NUMERICS_H
