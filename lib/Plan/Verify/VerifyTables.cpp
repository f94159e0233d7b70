//===- VerifyTables.cpp - what a plan declares before its program ---------===//
#include "Verifier.h"
#include "fsdp/Plan/Limits.h"
#include "fsdp/Plan/ModelCollectives.h"

#include <algorithm>
#include <set>
#include <string>

namespace fsdp::plan {

std::string describe(const Strides &strides) {
  std::string text = "[";
  for (size_t i = 0; i < strides.size(); ++i)
    text += (i ? ", " : "") + std::to_string(strides[i]);
  return text + "]";
}

void Verifier::checkStrides(const Strides &strides, const TensorSpec &spec,
                            const std::string &what) const {
  if (strides.empty())
    return;
  if (strides.size() != spec.shape.size())
    fail("P38", "expected " + std::to_string(spec.shape.size()) +
                    " strides of " + what + ", got " +
                    std::to_string(strides.size()));
  int64_t last = 0, more = 0; // the last element, counted from the first
  for (size_t i = 0; i < strides.size(); ++i)
    if (strides[i] < 0 ||
        __builtin_mul_overflow(
            strides[i], std::max<int64_t>(spec.shape[i] - 1, 0), &more) ||
        __builtin_add_overflow(last, more, &last) || last > (INT64_MAX >> 4))
      fail("P38", "expected strides of " + what + " that address memory, got " +
                      describe(strides));
}

void Verifier::verifyTables() {
  if (plan.version != kPlanVersion)
    fail("P1", "expected version " + std::to_string(kPlanVersion) + ", got " +
                   std::to_string(plan.version));
  if (plan.worldSize < 1 || plan.worldSize > kMaxWorldSize)
    fail("P1", "expected a world size in [1, " + std::to_string(kMaxWorldSize) +
                   "], got " + std::to_string(plan.worldSize));
  if (plan.replicas < 1 || plan.worldSize % plan.replicas != 0)
    fail("P1", "expected replicas that divide the world size " +
                   std::to_string(plan.worldSize) + ", got " +
                   std::to_string(plan.replicas));
  if (plan.capturedFor)
    if (std::string defect = findDefect(plan.capturedFor->numerics);
        !defect.empty())
      fail("P41", defect);
  if (plan.modelParallel)
    if (std::string defect = findDefect(*plan.modelParallel); !defect.empty())
      fail("P44", defect);
  verifyOptimizer();
  verifyGradScaler();
  verifyNames();
  for (const Param &param : plan.params)
    if (param.unit != -1)
      verifySharding(param);
  for (const Buffer &buffer : plan.buffers) {
    checkStrides(buffer.strides, buffer.spec, "buffer " + quote(buffer.name));
    if (!buffer.strides.empty() && !areDense(buffer.spec.shape, buffer.strides))
      fail("P38", "expected buffer " + quote(buffer.name) +
                      " to be dense but for strides of 0, got strides " +
                      describe(buffer.strides));
  }
  verifyUnits();
  verifyInputs();
  for (const Kernel &kernel : plan.kernels)
    verifyKernel(kernel);
}

void Verifier::verifyNames() const {
  std::set<std::string> names;
  auto unique = [&](const std::string &name) {
    if (!names.insert(name).second)
      fail("P2", "two parameters or buffers are named " + quote(name));
  };
  for (const Param &param : plan.params) {
    unique(param.name);
    for (const std::string &alias : param.aliases)
      unique(alias);
  }
  for (const Buffer &buffer : plan.buffers)
    unique(buffer.name);
}

void Verifier::verifySharding(const Param &param) const {
  checkIndex(param.unit, plan.units, "a unit");
  for (std::optional<DType> cast : {param.computeDtype, param.gradDtype})
    if (cast && !(isFloatingPoint(*cast) && isFloatingPoint(param.spec.dtype)))
      fail("P20", "expected floating-point dtypes to cast parameter " +
                      quote(param.name) + " between");
  if (param.spec.shape.empty())
    fail("P2", "expected parameter " + quote(param.name) +
                   " to have a dimension to shard, got a scalar");
  if (param.shardDim < 0 || size_t(param.shardDim) >= param.spec.shape.size())
    fail("P2", "expected parameter " + quote(param.name) +
                   " to have the dimension " + std::to_string(param.shardDim) +
                   " to shard");
  int64_t extent = param.spec.shape[param.shardDim];
  if (param.shardDim > 0 && extent % plan.shards() != 0)
    fail("P2", "expected dimension " + std::to_string(param.shardDim) +
                   " of parameter " + quote(param.name) +
                   " to divide evenly over " + std::to_string(plan.shards()) +
                   " ranks, got size " + std::to_string(extent));
}

void Verifier::verifyUnits() const {
  std::vector<int> claims(plan.params.size());
  for (size_t u = 0; u < plan.units.size(); ++u)
    for (int32_t param : plan.units[u].params) {
      checkIndex(param, plan.params, "a parameter");
      if (plan.params[param].unit != int32_t(u))
        fail("P2", "unit " + quote(plan.units[u].name) + " lists parameter " +
                       quote(plan.params[param].name) +
                       ", which names another unit");
      ++claims[param];
    }
  for (size_t p = 0; p < plan.params.size(); ++p)
    if (claims[p] != (plan.params[p].unit == -1 ? 0 : 1))
      fail("P2", "expected parameter " + quote(plan.params[p].name) +
                     " in one unit's list once, got " +
                     std::to_string(claims[p]) + " times");
}

void Verifier::verifyInputs() const {
  std::set<std::string> inputNames;
  for (const Input &input : plan.inputs) {
    if (!inputNames.insert(input.name).second)
      fail("P2", "two inputs are named " + quote(input.name));
    checkIndex(input.value, plan.values, "a value");
    checkSpec(input.value, input.spec, "P5", "input " + quote(input.name));
    if (input.spec.shape.empty())
      fail("P5", "expected input " + quote(input.name) +
                     " to have the samples in dim 0, got a scalar");
    checkStrides(input.strides, input.spec, "input " + quote(input.name));
    if (!input.strides.empty() &&
        (!areDense(input.spec.shape, input.strides) ||
         std::count(input.strides.begin(), input.strides.end(), 0) > 0))
      fail("P38", "expected input " + quote(input.name) +
                      " to be dense, got strides " + describe(input.strides));
    if (input.low >= input.high)
      fail("P5", "expected input " + quote(input.name) +
                     " to have low < high, got " + std::to_string(input.low) +
                     " and " + std::to_string(input.high));
  }
}

} // namespace fsdp::plan
