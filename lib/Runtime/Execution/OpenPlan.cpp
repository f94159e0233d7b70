//===- OpenPlan.cpp - a plan that may run ---------------------------------===//
#include "fsdp/Runtime/Execution/OpenPlan.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Operators/Operators.h"
#include "fsdp/Runtime/Optimizer/OptimizerPlugin.h"

#include <torch/version.h>

#include <filesystem>

namespace fsdp::runtime {

namespace {

/// The file itself, by whatever way `path` leads to it.
std::string fileOf(const std::filesystem::path &path) {
  std::error_code error;
  std::string file = std::filesystem::canonical(path, error).string();
  if (error)
    throw InputError(path.string() +
                     ": cannot open the optimizer plug-in: " + error.message());
  return file;
}

/// The library of the plan, which is the one that is allowed.
std::string findPlugin(const plan::Plan &plan, const std::string &path,
                       const std::string &allowed) {
  const std::string &library = plan.optimizer.library;
  if (allowed.empty())
    throw InputError(path + ": the optimizer is code in the library \"" +
                     library + "\"; expected --allow-plugin with its path");
  std::string file =
      fileOf(std::filesystem::path(path).parent_path() / library);
  if (std::string got = fileOf(allowed); got != file)
    throw InputError(path + ": expected --allow-plugin " + file + ", got " +
                     got);
  checkOptimizerLibrary(file);
  return file;
}

} // namespace

plan::Plan openPlan(const std::string &path, const std::string &allowedPlugin) {
  plan::Plan plan = plan::readPlan(path);
  checkOperators(plan, path);
  if (plan.optimizer.library.empty()) {
    if (!allowedPlugin.empty())
      throw InputError(path + ": --allow-plugin: the plan has no plug-in");
    return plan;
  }
  plan.optimizer.library = findPlugin(plan, path, allowedPlugin);
  for (plan::Optimizer &group : plan.paramGroups)
    group.library = plan.optimizer.library;
  return plan;
}

void checkDevice(const plan::Plan &plan, const std::string &path, bool onGpu) {
  const std::string device = onGpu ? "cuda" : "cpu";
  if (!plan.capturedFor || plan.capturedFor->device == device)
    return;
  const auto &[wanted, arch, torch, numerics] = *plan.capturedFor;
  throw InputError(
      path + ": the plan was captured for the device \"" + wanted + "\"" +
      (arch.empty() ? "" : " (" + arch + ")") +
      "; another device may lack its operators or compute them differently; "
      "expected --device " +
      wanted + " or --any-device, got --device " + device);
}

void checkArchitecture(const plan::Plan &plan, const std::string &path,
                       const std::string &got) {
  if (!plan.capturedFor || plan.capturedFor->arch.empty() ||
      plan.capturedFor->arch == got)
    return;
  throw InputError(
      path + ": the plan was captured for " + plan.capturedFor->arch +
      ", where PyTorch may choose different operators than on this "
      "GPU; expected " +
      plan.capturedFor->arch + " or --any-device, got " + got);
}

std::string otherTorch(const plan::Plan &plan, const std::string &path) {
  if (!plan.capturedFor || isThisTorch(plan.capturedFor->torch))
    return {};
  return path + ": captured with torch " + plan.capturedFor->torch +
         ", executed by torch " TORCH_VERSION
         ": the operators and their bits may differ";
}

} // namespace fsdp::runtime
