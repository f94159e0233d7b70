//===- OperatorLibraries.cpp - operators of other libraries ---------------===//
#include "fsdp/Runtime/Operators/OperatorLibraries.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Operators/CallTable.h"
#include "fsdp/Runtime/Operators/Operators.h"

#include <filesystem>
#include <set>

#include <dlfcn.h>

namespace fsdp::runtime {

namespace {

/// Of those with a schema: a kernel may be registered without one.
std::set<std::string> registeredOperators() {
  auto &dispatcher = c10::Dispatcher::singleton();
  std::set<std::string> names;
  for (const c10::OperatorName &name : dispatcher.getAllOpNames())
    if (dispatcher.findSchema(name))
      names.insert(name.name + (name.overload_name.empty()
                                    ? ""
                                    : "." + name.overload_name));
  return names;
}

/// Python extensions are linked with libtorch.so and rely on Python having
/// loaded it. It lies beside the library that has the dispatcher.
bool loadLibTorch() {
  Dl_info info;
  if (!dladdr(reinterpret_cast<void *>(&c10::Dispatcher::realSingleton), &info))
    return false;
  auto folder = std::filesystem::path(info.dli_fname).parent_path();
  return dlopen((folder / "libtorch.so").c_str(), RTLD_NOW | RTLD_GLOBAL);
}

bool open(const std::string &file, std::string &error) {
  if (dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL))
    return true;
  error = dlerror();
  if (error.find("libtorch.so") == std::string::npos || !loadLibTorch())
    return false;
  if (dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL))
    return true;
  error = dlerror();
  return false;
}

void load(const std::string &path, const std::string &file) {
  std::set<std::string> before = registeredOperators();
  auto fail = [&](const std::string &why) {
    throw InputError("--load " + path + ": " + why);
  };
  try {
    if (std::string error; !open(file, error))
      fail("cannot load the library: " + error);
  } catch (const c10::Error &error) { // of what it registers
    fail("cannot load the library: " +
         firstLine(error.what_without_backtrace()));
  }
  std::vector<std::string> added;
  for (const std::string &name : registeredOperators())
    if (!before.contains(name))
      added.push_back(name);
  if (added.empty())
    fail("expected a library that registers operators with TORCH_LIBRARY, got "
         "one that registers none");
  allowOperators(added);
}

} // namespace

void loadOperators(const std::vector<std::string> &paths) {
  static std::set<std::string> loaded;
  for (const std::string &path : paths) {
    std::error_code error;
    std::string file = std::filesystem::canonical(path, error).string();
    if (error)
      throw InputError("--load " + path +
                       ": cannot open the library: " + error.message());
    if (loaded.insert(file).second)
      load(path, file);
  }
}

} // namespace fsdp::runtime
