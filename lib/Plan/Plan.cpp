//===- Plan.cpp - element types, shapes and shard placement ---------------===//
#include "fsdp/Plan/Plan.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <numeric>
#include <ranges>
#include <utility>

namespace fsdp::plan {

namespace {
struct DTypeInfo {
  DType dtype;
  std::string_view name;
  int64_t width;
};
constexpr std::array<DTypeInfo, 18> kDTypes = {{
    {DType::Float32, "float32", 4},
    {DType::Float64, "float64", 8},
    {DType::Float16, "float16", 2},
    {DType::BFloat16, "bfloat16", 2},
    {DType::Int64, "int64", 8},
    {DType::Int32, "int32", 4},
    {DType::Int16, "int16", 2},
    {DType::Int8, "int8", 1},
    {DType::UInt8, "uint8", 1},
    {DType::Bool, "bool", 1},
    {DType::UInt16, "uint16", 2},
    {DType::UInt32, "uint32", 4},
    {DType::UInt64, "uint64", 8},
    {DType::Float8E4M3FN, "float8_e4m3fn", 1},
    {DType::Float8E5M2, "float8_e5m2", 1},
    {DType::Complex32, "complex32", 4},
    {DType::Complex64, "complex64", 8},
    {DType::Complex128, "complex128", 16},
}};

const DTypeInfo &infoOf(DType dtype) {
  return *std::find_if(kDTypes.begin(), kDTypes.end(),
                       [&](const DTypeInfo &i) { return i.dtype == dtype; });
}
} // namespace

int64_t byteWidth(DType dtype) { return infoOf(dtype).width; }

std::string_view dtypeName(DType dtype) { return infoOf(dtype).name; }

bool isFloatingPoint(DType dtype) {
  return dtype == DType::Float32 || dtype == DType::Float64 ||
         dtype == DType::Float16 || dtype == DType::BFloat16;
}

bool isComplex(DType dtype) { return dtypeName(dtype).starts_with("complex"); }

bool isInteger(DType dtype) {
  std::string_view name = dtypeName(dtype);
  return name.starts_with("int") || name.starts_with("uint") || name == "bool";
}

std::optional<DType> parseDType(std::string_view name) {
  for (const DTypeInfo &info : kDTypes)
    if (info.name == name)
      return info.dtype;
  return std::nullopt;
}

std::string_view phaseName(Phase phase) {
  constexpr std::array<std::string_view, kNumPhases> names = {
      "forward", "backward", "optimizer"};
  return names[size_t(phase)];
}

std::string_view whenName(When when) {
  constexpr std::array<std::string_view, kNumWhens> names = {"every", "first",
                                                             "last"};
  return names[size_t(when)];
}

std::string_view streamName(Stream stream) {
  constexpr std::array<std::string_view, kNumStreams> names = {
      "compute",        "all_gather",   "reduce_scatter", "all_reduce",
      "copy_to_device", "copy_to_host", "model_axes"};
  return names[size_t(stream)];
}

int64_t TensorSpec::numElements() const {
  int64_t count = 1;
  for (int64_t extent : shape)
    count *= extent;
  return count;
}

Strides fullStrides(const std::vector<int64_t> &shape, const Strides &strides) {
  if (!strides.empty())
    return strides;
  Strides result(shape.size());
  int64_t step = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    result[i] = step;
    step *= std::max<int64_t>(shape[i], 1);
  }
  return result;
}

bool areDense(const std::vector<int64_t> &shape, const Strides &strides) {
  std::vector<std::pair<int64_t, int64_t>> dims; // stride and extent
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] == 0)
      return true;
    if (shape[i] > 1 && strides[i] != 0)
      dims.emplace_back(strides[i], shape[i]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t step = 1;
  for (auto [stride, extent] : dims) {
    if (stride != step)
      return false;
    step *= extent;
  }
  return true;
}

namespace {
/// The length of the longest of the unit's modules that contains `module`; 0
/// for the root unit, which contains all; -1 if none does. A unit's name joins
/// its modules with `+`.
int64_t containingLength(const Unit &unit, std::string_view module) {
  int64_t longest = -1;
  for (auto part : std::views::split(std::string_view(unit.name), '+')) {
    std::string_view prefix(part.begin(), part.end());
    prefix = prefix.substr(0, prefix.find('[')); // a bucket of the unit
    if (prefix == "(root)")
      longest = std::max<int64_t>(longest, 0);
    if (module == prefix || (module.starts_with(prefix) &&
                             module.substr(prefix.size()).starts_with('.')))
      longest = std::max<int64_t>(longest, prefix.size());
  }
  return longest;
}
} // namespace

int32_t unitOfModule(const Plan &plan, std::string_view module) {
  int32_t best = -1;
  int64_t bestLength = -1;
  for (size_t u = 0; u < plan.units.size(); ++u) {
    int64_t length = containingLength(plan.units[u], module);
    if (length > bestLength) {
      best = int32_t(u);
      bestLength = length;
    }
  }
  return best;
}

int32_t unitOfInstruction(const Plan &plan, const Instruction &instruction) {
  return std::visit(
      [&](const auto &kind) {
        if constexpr (requires { kind.unit; })
          return kind.unit;
        else
          return instruction.module < 0
                     ? -1
                     : unitOfModule(plan,
                                    plan.modules[size_t(instruction.module)]);
      },
      instruction.kind);
}

RowRange shardRows(int64_t rows, int64_t parts, int64_t index) {
  int64_t chunk = (rows + parts - 1) / parts;
  return {std::min(rows, chunk * index), std::min(rows, chunk * (index + 1))};
}

double LRSchedule::factor(int64_t step) const {
  // torchtitan's linear_warmup_stable_decay, in Python's order of operations.
  ++step;
  if (step <= warmupSteps)
    return double(step) / double(warmupSteps);
  if (decay == "constant")
    return 1.0;
  double progress = std::min(
      double(step - warmupSteps) / double(totalSteps - warmupSteps), 1.0);
  double adjustment = decay == "linear"
                          ? 1 - progress
                          : 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  return minLRRatio + (1 - minLRRatio) * adjustment;
}

std::vector<int64_t> Plan::shardGroup(int64_t rank) const {
  std::vector<int64_t> ranks(static_cast<size_t>(shards()));
  std::iota(ranks.begin(), ranks.end(), replicaIndex(rank) * shards());
  return ranks;
}

std::vector<int64_t> Plan::replicateGroup(int64_t rank) const {
  std::vector<int64_t> ranks;
  for (int64_t r = shardIndex(rank); r < worldSize; r += shards())
    ranks.push_back(r);
  return ranks;
}

TensorSpec shardSpec(const Plan &plan, int32_t param, int64_t index) {
  TensorSpec spec = plan.params[param].spec;
  if (plan.params[param].unit != -1) {
    int64_t &extent = spec.shape[plan.params[param].shardDim];
    extent = shardRows(extent, plan.shards(), index).size();
  }
  return spec;
}

int64_t paddedBytes(const Plan &plan, int32_t param, DType dtype) {
  int64_t parts = plan.params[param].unit == -1 ? 1 : plan.shards();
  return parts * shardSpec(plan, param, 0).numElements() * byteWidth(dtype);
}

ShardRuns shardRuns(const Plan &plan, int32_t param, int64_t index) {
  const Param &entry = plan.params[param];
  if (entry.unit == -1)
    return {1, 0, entry.spec.numElements(), 0};
  const std::vector<int64_t> &shape = entry.spec.shape;
  ShardRuns runs;
  for (int32_t dim = 0; dim < entry.shardDim; ++dim)
    runs.count *= shape[dim];
  int64_t row = 1;
  for (size_t dim = size_t(entry.shardDim) + 1; dim < shape.size(); ++dim)
    row *= shape[dim];
  RowRange rows = shardRows(shape[entry.shardDim], plan.shards(), index);
  runs.begin = rows.begin * row;
  runs.size = rows.size() * row;
  runs.stride = shape[entry.shardDim] * row;
  return runs;
}

} // namespace fsdp::plan
