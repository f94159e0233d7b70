//===- Backend.cpp - where ranks compute and how they reach each other ----===//
#include "fsdp/Runtime/Backend.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/GlooTransport.h"

namespace fsdp::runtime {

namespace {

/// torch.distributed's default for Gloo; a step that takes longer is an error.
constexpr auto kTimeout = std::chrono::minutes(30);

} // namespace

std::unique_ptr<Device> makeDevice(const std::string &device,
                                   int64_t localRank) {
  if (device == "cpu")
    return makeCpuDevice();
  throw InputError("--device: expected cpu, got \"" + device + "\"");
}

std::unique_ptr<Transport>
makeTransport(Backend backend, const c10::intrusive_ptr<c10d::Store> &store,
              int64_t rank, int64_t worldSize) {
  return makeGlooTransport(store, rank, worldSize, kTimeout);
}

} // namespace fsdp::runtime
