//===- Backend.cpp - where ranks compute and how they reach each other ----===//
#include "fsdp/Runtime/Collectives/Backend.h"
#include "fsdp/Runtime/Collectives/GlooTransport.h"
#include "fsdp/Runtime/Collectives/NcclTransport.h"
#include "fsdp/Runtime/Error.h"

#include <charconv>
#include <optional>
#include <string_view>

namespace fsdp::runtime {

namespace {

constexpr std::string_view kNumbered = "cuda:";

/// The N of "cuda:N"; nullopt for "cuda".
std::optional<int> gpuNumber(const std::string &device) {
  if (device == "cuda")
    return std::nullopt;
  int number = -1;
  if (device.starts_with(kNumbered)) {
    const char *end = device.data() + device.size();
    auto read = std::from_chars(device.data() + kNumbered.size(), end, number);
    if (read.ptr != end || read.ec != std::errc())
      number = -1;
  }
  if (number < 0)
    throw InputError("--device: expected cpu, cuda or cuda:N, got \"" + device +
                     "\"");
  return number;
}

} // namespace

bool isGpu(const std::string &device) {
  if (device == "cpu")
    return false;
  gpuNumber(device);
  return true;
}

std::unique_ptr<Device> makeDevice(const std::string &device,
                                   int64_t localRank) {
  if (!isGpu(device))
    return makeCpuDevice();
  return makeCudaDevice(gpuNumber(device).value_or(int(localRank)));
}

std::unique_ptr<Transport>
makeTransport(Backend backend, const c10::intrusive_ptr<c10d::Store> &store,
              int64_t rank, int64_t worldSize, const Device &device,
              const WaitSettings &waits) {
  if (backend == Backend::Nccl)
    return makeNcclTransport(store, rank, worldSize, device.where().index(),
                             {waits});
  return makeGlooTransport(store, rank, worldSize, waits);
}

} // namespace fsdp::runtime
