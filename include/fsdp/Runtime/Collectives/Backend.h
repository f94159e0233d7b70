//===- Backend.h - where ranks compute and how they reach each other ------===//
#ifndef FSDP_RUNTIME_COLLECTIVES_BACKEND_H
#define FSDP_RUNTIME_COLLECTIVES_BACKEND_H

#include "fsdp/Runtime/Collectives/Communicator.h"
#include "fsdp/Runtime/Collectives/Patience.h"
#include "fsdp/Runtime/Devices/Device.h"

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <string>

namespace c10d {
class Store;
} // namespace c10d

namespace fsdp::runtime {

/// Shm: the ranks share memory of one host. Gloo and Nccl: each rank has its
/// own memory and communicates by c10d's Gloo on CPUs, or by NCCL on GPUs.
enum class Backend : uint8_t { Shm, Gloo, Nccl };

/// Whether `device` is a GPU: "cuda", which means the GPU whose index is the
/// rank's local rank, or "cuda:N". Otherwise it is "cpu". Throws InputError.
bool isGpu(const std::string &device);

/// The device of the rank that is the localRank-th on its host. Throws
/// InputError.
std::unique_ptr<Device> makeDevice(const std::string &device,
                                   int64_t localRank);

/// Connects a rank that has its own memory, over a new store shared by the
/// job's ranks.
std::unique_ptr<Transport>
makeTransport(Backend backend, const c10::intrusive_ptr<c10d::Store> &store,
              int64_t rank, int64_t worldSize, const Device &device,
              const WaitSettings &waits);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_COLLECTIVES_BACKEND_H
