//===- Numerics.cpp - PyTorch's settings that decide bits -----------------===//
#include "fsdp/Plan/Numerics.h"

#include <algorithm>
#include <array>

namespace fsdp::plan {

namespace {

constexpr std::array<std::string_view, 2> kOn = {"on", "off"};
constexpr std::array<std::string_view, 2> kOff = {"off", "on"};
constexpr std::array<std::string_view, 3> kModes = {"off", "warn", "on"};
constexpr std::array<std::string_view, 3> kPrecisions = {"highest", "high",
                                                         "medium"};

// cuda.matmul.allow_tf32 is float32_matmul_precision by another name.
constexpr NumericSetting kSettings[] = {
    {"float32_matmul_precision", kPrecisions},
    {"deterministic_algorithms", kModes},
    {"mkldnn.enabled", kOn},
    {"mkldnn.deterministic", kOff},
    {"nnpack.enabled", kOn},
    {"cudnn.enabled", kOn},
    {"cudnn.benchmark", kOff},
    {"cudnn.deterministic", kOff},
    {"cudnn.allow_tf32", kOn},
    {"cuda.matmul.allow_fp16_reduced_precision_reduction", kOn},
    {"cuda.matmul.allow_bf16_reduced_precision_reduction", kOn},
    {"cuda.matmul.allow_fp16_accumulation", kOff},
};

template <typename Range, typename Fn>
std::string quoteAll(const Range &range, Fn nameOf) {
  std::string text;
  for (const auto &entry : range)
    text.append(text.empty() ? "\"" : ", \"").append(nameOf(entry)) += '"';
  return text;
}

} // namespace

std::span<const NumericSetting> numericSettings() { return kSettings; }

std::string findDefect(const Numerics &numerics) {
  for (const auto &[name, value] : numerics) {
    const auto *setting =
        std::find_if(std::begin(kSettings), std::end(kSettings),
                     [&](const auto &known) { return known.name == name; });
    if (setting == std::end(kSettings))
      return "expected settings of PyTorch among " +
             quoteAll(kSettings, [](const auto &known) { return known.name; }) +
             ", got \"" + name + "\"";
    if (std::find(setting->values.begin(), setting->values.end(), value) ==
        setting->values.end())
      return "expected one of " +
             quoteAll(setting->values, [](auto known) { return known; }) +
             " for \"" + name + "\", got \"" + value + "\"";
  }
  return {};
}

} // namespace fsdp::plan
