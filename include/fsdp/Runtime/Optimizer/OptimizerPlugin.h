//===- OptimizerPlugin.h - an optimizer of the user's ---------------------===//
//
// A plug-in is a shared library that is built against this header and LibTorch,
// with one class registered by FSDP_OPTIMIZER_PLUGIN. The policy `optimizer:
// {name: plugin, library: liblion.so, lr: 1.0e-4, options: {...}}` names it;
// the path is relative to the plan. It is loaded only where whoever runs the
// plan names the same file (fsdp-run --allow-plugin), and after its version of
// this interface has been read from the file: code of a library (constructors,
// for example) runs as soon as it is loaded. examples/lion is such a plug-in.
//
// Each rank updates its shards, so the update must be element-wise, or at
// least not mix elements across dim 0.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_OPTIMIZER_OPTIMIZERPLUGIN_H
#define FSDP_RUNTIME_OPTIMIZER_OPTIMIZERPLUGIN_H

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::runtime {

/// The numbers of `options`; a parameter group may override some.
using OptimizerOptions = std::map<std::string, double>;

/// One parameter group's update rule.
class OptimizerPlugin {
public:
  virtual ~OptimizerPlugin() = default;

  /// How many state tensors each parameter has. The runtime holds them; they
  /// have the shard's shape and dtype, and start at zero.
  virtual size_t numStates() const = 0;
  /// Updates one non-empty shard in place. `step` counts from 1; `lr` is this
  /// step's. `grad` is not to be written. Called on one thread a rank, under
  /// inference mode; what it throws ends the run.
  virtual void update(at::Tensor &param, const at::Tensor &grad,
                      std::vector<at::Tensor> &states, int64_t step,
                      double lr) = 0;
};

/// Version of this interface. A library with another version is refused.
inline constexpr int64_t kOptimizerPluginVersion = 2;

/// Throws InputError unless the file is a shared library with
/// FSDP_OPTIMIZER_PLUGIN of this version. None of its code is run.
void checkOptimizerLibrary(const std::string &path);

/// A loaded library. The plug-ins it creates must not outlive it.
class OptimizerLibrary {
public:
  /// Throws InputError if `path` cannot be loaded, or is not a plug-in of this
  /// version; in the latter case none of its code has run.
  explicit OptimizerLibrary(const std::string &path);
  OptimizerLibrary(const OptimizerLibrary &) = delete;
  OptimizerLibrary &operator=(const OptimizerLibrary &) = delete;
  ~OptimizerLibrary();

  /// Throws InputError with the plug-in's message if it refuses the options.
  std::unique_ptr<OptimizerPlugin>
  create(const OptimizerOptions &options) const;

private:
  std::string path;
  void *handle = nullptr;
  OptimizerPlugin *(*factory)(const OptimizerOptions &) = nullptr;
};

} // namespace fsdp::runtime

/// Registers class Type, constructed from `const OptimizerOptions &`; it may
/// throw std::exception for options that it refuses.
#define FSDP_OPTIMIZER_PLUGIN(Type)                                            \
  extern "C" {                                                                 \
  extern __attribute__((visibility("default")))                                \
  const int64_t fsdpOptimizerPluginVersion;                                    \
  __attribute__((used)) const int64_t fsdpOptimizerPluginVersion =             \
      ::fsdp::runtime::kOptimizerPluginVersion;                                \
  }                                                                            \
  extern "C" ::fsdp::runtime::OptimizerPlugin *fsdpCreateOptimizerPlugin(      \
      const ::fsdp::runtime::OptimizerOptions &options) {                      \
    return new Type(options);                                                  \
  }

#endif // FSDP_RUNTIME_OPTIMIZER_OPTIMIZERPLUGIN_H
