//===- KernelTable.cpp - the kernels of a plan, ready to run --------------===//
#include "fsdp/Runtime/Operators/KernelTable.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Memory/Layout.h"
#include "fsdp/Runtime/Operators/CallTable.h"
#include "fsdp/Runtime/Operators/Operators.h"

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/Version.h>
#include <ATen/ops/empty_strided.h>
#include <torch/version.h>

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <system_error>

namespace fsdp::runtime {

//===----------------------------------------------------------------------===//
// Code
//===----------------------------------------------------------------------===//

// Of LibTorch, which may be one without them.
#define FSDP_IMPORTS(X)                                                        \
  X(Sleef_expf8_u10)                                                           \
  X(Sleef_expf16_u10)                                                          \
  X(Sleef_tanhf8_u10)                                                          \
  X(Sleef_tanhf16_u10)
#define FSDP_DECLARE(name) extern "C" void name() __attribute__((weak));
FSDP_IMPORTS(FSDP_DECLARE)
#undef FSDP_DECLARE

/// Null if there is none of this name.
static void *findImport(const std::string &name) {
#define FSDP_FIND(function)                                                    \
  if (name == #function)                                                       \
    return reinterpret_cast<void *>(&function);
  FSDP_IMPORTS(FSDP_FIND)
#undef FSDP_FIND
  return nullptr;
}

KernelImages::KernelImages(const std::vector<plan::Kernel> &kernels,
                           const std::string &target)
    : functions(kernels.size()) {
  std::vector<size_t> offsets(kernels.size());
  std::vector<const plan::KernelCode *> codes(kernels.size(), nullptr);
  for (size_t i = 0; i < kernels.size(); ++i)
    for (const plan::KernelCode &code : kernels[i].code)
      if (code.target == target) {
        codes[i] = &code;
        offsets[i] = bytes;
        bytes += plan::alignTo(code.image.size(), size_t(plan::kTensorAlign));
      }
  if (bytes == 0)
    return;
  bytes = plan::alignTo(bytes, size_t(sysconf(_SC_PAGESIZE)));
  auto fail = [](const char *what) {
    throw RunError("the code of the plan's kernels: " + std::string(what) +
                   ": " + std::generic_category().message(errno));
  };
  memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED)
    fail("mmap");
  auto *base = static_cast<char *>(memory);
  for (size_t i = 0; i < kernels.size(); ++i)
    if (codes[i])
      std::memcpy(base + offsets[i], codes[i]->image.data(),
                  codes[i]->image.size());
  if (mprotect(memory, bytes, PROT_READ | PROT_EXEC) != 0) {
    int error = errno;
    munmap(memory, bytes);
    errno = error;
    fail("mprotect");
  }
  for (size_t i = 0; i < kernels.size(); ++i)
    if (codes[i]) {
      Function &function = functions[i];
      bool isComplete = true;
      for (const std::string &name : codes[i]->imports) {
        function.imports.push_back(findImport(name));
        isComplete &= function.imports.back() != nullptr;
      }
      if (isComplete)
        function.run = reinterpret_cast<plan::KernelFunction>(
            base + offsets[i] + codes[i]->entry);
    }
}

KernelImages::~KernelImages() {
  if (memory)
    munmap(memory, bytes);
}

std::string kernelTarget() {
#if defined(__x86_64__)
  // ATen's kernels for AVX2 and AVX-512 are those with fused multiply-adds,
  // which the code of plans has too.
  std::string capability = at::get_cpu_capability();
  if (capability == "AVX512" && __builtin_cpu_supports("x86-64-v4"))
    return "x86-64-v4";
  if ((capability == "AVX512" || capability == "AVX2") &&
      __builtin_cpu_supports("x86-64-v3"))
    return "x86-64-v3";
#endif
  return "";
}

std::string whyNoKernelCode(const plan::Plan &plan, const std::string &target) {
  bool hasCode = std::any_of(
      plan.kernels.begin(), plan.kernels.end(),
      [](const plan::Kernel &kernel) { return !kernel.code.empty(); });
  if (!hasCode)
    return "";
  // The operators of another PyTorch may round in other ways.
  std::string torch = plan.capturedFor ? plan.capturedFor->torch : "";
  bool isForGpu = target.starts_with("sm_");
  if (isForGpu ? !isThisTorch(torch) : torch != TORCH_VERSION)
    return "it is for " +
           (torch.empty() ? "no version of torch" : "torch " + torch) +
           ", this is torch " TORCH_VERSION;
  for (const plan::Kernel &kernel : plan.kernels)
    for (const plan::KernelCode &code : kernel.code)
      if (code.target == target)
        return "";
  if (isForGpu)
    return "none is for this GPU (" + target + ")";
  return "none is for this processor, as ATen uses it (" +
         at::get_cpu_capability() + ")";
}

static std::atomic<bool> runsCode = true;

void setRunsKernelCode(bool value) { runsCode = value; }
bool runsKernelCode() { return runsCode; }

//===----------------------------------------------------------------------===//
// Kernels
//===----------------------------------------------------------------------===//

/// A kernel, and its calls as a program of their own.
struct KernelTable::Entry {
  Entry(const plan::Kernel &kernel, c10::Device device) : kernel(kernel) {
    calls.values = kernel.values;
    for (const plan::Call &call : kernel.calls)
      calls.instructions.emplace_back().kind = call;
    try {
      table = std::make_unique<CallTable>(calls, calls.instructions, device);
    } catch (const InputError &error) {
      throw InputError("kernel \"" + kernel.name + "\": " + error.what());
    }
  }

  void load(Device &device, const plan::KernelCode &code) {
    try {
      onDevice = device.loadKernel(code.image);
    } catch (const RunError &error) {
      throw RunError("kernel \"" + kernel.name + "\": " + error.what());
    }
  }

  const plan::Kernel &kernel;
  plan::Plan calls;
  std::unique_ptr<CallTable> table;
  KernelImages::Function function;
  std::unique_ptr<DeviceKernel> onDevice;
};

KernelTable::KernelTable(const plan::Plan &plan, Device &device)
    : plan(plan), device(device) {
  for (const plan::Kernel &kernel : plan.kernels)
    entries.push_back(std::make_unique<Entry>(kernel, device.where()));
  bool isCpu = device.where().is_cpu();
  std::string target = isCpu ? kernelTarget() : device.architecture();
  if (!runsKernelCode() || !whyNoKernelCode(plan, target).empty())
    return;
  if (isCpu)
    images = std::make_unique<KernelImages>(plan.kernels, target);
  for (size_t i = 0; i < entries.size(); ++i) {
    Entry &entry = *entries[i];
    if (isCpu)
      entry.function = images->find(i);
    else
      for (const plan::KernelCode &code : entry.kernel.code)
        if (code.target == target)
          entry.load(device, code);
  }
}

KernelTable::~KernelTable() = default;

int64_t KernelTable::compiled() const {
  return std::count_if(entries.begin(), entries.end(), [](const auto &entry) {
    return entry->function.run || entry->onDevice;
  });
}

static bool isLaidOut(const at::Tensor &tensor, const plan::Value &as) {
  if (!tensor.defined() || tensor.layout() != at::kStrided ||
      tensor.scalar_type() != scalarType(as.dtype) ||
      tensor.sizes() != as.shape || tensor.is_conj() || tensor.is_neg())
    return false;
  plan::Strides strides = plan::fullStrides(as.shape, as.strides);
  for (size_t i = 0; i < strides.size(); ++i)
    if (as.shape[i] > 1 && tensor.stride(int64_t(i)) != strides[i])
      return false;
  return true;
}

/// The code of a plan has no type that UndefinedBehaviorSanitizer could check.
#if defined(__clang__)
__attribute__((no_sanitize("function")))
#endif
static void call(const KernelImages::Function &function,
                 const std::vector<void *> &tensors, int64_t begin,
                 int64_t end) {
  function.run(tensors.data(), function.imports.data(), begin, end);
}

std::vector<void *>
KernelTable::takeTensors(const Entry &entry, const plan::Fused &fused,
                         std::vector<at::Tensor> &values) const {
  std::vector<void *> tensors;
  tensors.reserve(fused.ins.size() + fused.outs.size());
  auto take = [&](const void *data) {
    tensors.push_back(const_cast<void *>(data));
    return !entry.onDevice || uintptr_t(data) % plan::kGpuAlign == 0;
  };
  for (size_t i = 0; i < fused.ins.size(); ++i) {
    const at::Tensor &in = values[fused.ins[i]];
    if (!isLaidOut(in, entry.kernel.values[i]) ||
        in.device() != device.where() || !take(in.const_data_ptr()))
      return {};
  }
  for (plan::ValueId out : fused.outs) {
    const plan::Value &spec = plan.values[out];
    values[out] = at::empty_strided(
        spec.shape, plan::fullStrides(spec.shape, spec.strides),
        at::dtype(scalarType(spec.dtype)).device(device.where()));
    if (!take(values[out].mutable_data_ptr()))
      return {};
  }
  return tensors;
}

bool KernelTable::runCode(const Entry &entry, const plan::Fused &fused,
                          std::vector<at::Tensor> &values) const {
  if (!entry.function.run && !entry.onDevice)
    return false;
  // From how many elements on they are divided is up to each operator.
  if (entry.kernel.whole && at::get_num_threads() > 1)
    return false;
  std::vector<void *> tensors = takeTensors(entry, fused, values);
  if (tensors.empty())
    return false;
  int64_t trips = entry.kernel.trips;
  if (entry.onDevice) {
    entry.onDevice->launch(tensors, trips);
    return true;
  }
  // As many elements a thread at least as ATen's kernels take.
  int64_t elements = plan.values[fused.outs.front()].numElements();
  int64_t grain =
      std::max<int64_t>(1, at::internal::GRAIN_SIZE * trips / elements);
  at::parallel_for(0, trips, grain, [&](int64_t begin, int64_t end) {
    call(entry.function, tensors, begin, end);
  });
  return true;
}

void KernelTable::run(const plan::Fused &fused,
                      std::vector<at::Tensor> &values) {
  Entry &entry = *entries[size_t(fused.kernel)];
  for (plan::ValueId out : fused.outs)
    values[out].reset();
  if (runCode(entry, fused, values))
    return;
  std::vector<at::Tensor> own(entry.kernel.values.size());
  for (size_t i = 0; i < fused.ins.size(); ++i)
    own[i] = values[fused.ins[i]];
  for (size_t i = 0; i < entry.kernel.calls.size(); ++i)
    entry.table->run(i, entry.kernel.calls[i], own);
  for (size_t i = 0; i < fused.outs.size(); ++i)
    values[fused.outs[i]] = own[size_t(entry.kernel.results[i])];
}

} // namespace fsdp::runtime
