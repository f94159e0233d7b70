//===- OptimizerPlugin.cpp - loading an optimizer of the user's -----------===//
#include "fsdp/Runtime/Optimizer/OptimizerPlugin.h"
#include "fsdp/Runtime/Error.h"

#include <dlfcn.h>

namespace fsdp::runtime {

OptimizerLibrary::OptimizerLibrary(const std::string &path) : path(path) {
  checkOptimizerLibrary(path);
  // Without a slash dlopen would search the system's folders.
  std::string file = path.find('/') == std::string::npos ? "./" + path : path;
  handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle)
    throw InputError("cannot load the optimizer plug-in: " +
                     std::string(dlerror()));
  factory = reinterpret_cast<OptimizerPlugin *(*)(const OptimizerOptions &)>(
      dlsym(handle, "fsdpCreateOptimizerPlugin"));
  if (factory)
    return;
  dlclose(handle);
  throw InputError(path + ": expected a library with FSDP_OPTIMIZER_PLUGIN, "
                          "found none in it");
}

OptimizerLibrary::~OptimizerLibrary() { dlclose(handle); }

std::unique_ptr<OptimizerPlugin>
OptimizerLibrary::create(const OptimizerOptions &options) const {
  try {
    return std::unique_ptr<OptimizerPlugin>(factory(options));
  } catch (const std::exception &error) {
    throw InputError(path + ": " + error.what());
  }
}

} // namespace fsdp::runtime
