//===- NcclGroup.h - an ncclComm_t that may be aborted at any time --------===//
#ifndef FSDP_RUNTIME_CUDA_NCCLGROUP_H
#define FSDP_RUNTIME_CUDA_NCCLGROUP_H

#include "fsdp/Runtime/Collectives/Patience.h"
#include "fsdp/Runtime/Collectives/PendingCollectives.h"

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::runtime {

/// Why a communicator is of no use any more.
struct NcclFailure {
  std::string message;
  bool ofPeer = false; ///< AbortedError, else RunError
};

/// A communicator in non-blocking mode: no call of NCCL is waited for without
/// a deadline. Its methods may be called from any thread.
class NcclGroup {
public:
  /// Called again and again by what waits, without locks; may throw.
  using Tick = std::function<void()>;

  NcclGroup(std::string name, std::vector<int64_t> ranks, int gpu,
            std::shared_ptr<const Patience> patience)
      : name(std::move(name)), ranks(std::move(ranks)), gpu(gpu),
        patience(std::move(patience)) {}
  NcclGroup(const NcclGroup &) = delete;
  NcclGroup &operator=(const NcclGroup &) = delete;
  /// Aborted or destroyed before.
  ~NcclGroup() = default;

  const std::string name;
  const std::vector<int64_t> ranks;
  const int gpu;
  const std::shared_ptr<const Patience> patience;

  /// Joins the communicator of `id` as its `index`-th rank. Throws RunError
  /// after the deadline.
  void connect(const ncclUniqueId &id, int index, const Tick &tick);
  /// Registers memory; collective with `window`. Throws as connect.
  void add(void *base, size_t bytes, bool window, const Tick &tick);

  /// Begins a collective on `stream` by `calls`, which throws by
  /// checkNccl and is called inside an NCCL group. Returns false if it is not
  /// on the stream after the deadline: NCCL connects ranks when they first need
  /// it.
  bool run(const CollectiveName &collective, cudaStream_t stream,
           const std::function<void(ncclComm_t)> &calls);

  /// What NCCL or CUDA reports, with the last collective; or nullopt.
  std::optional<std::string> asyncError();
  /// The collective that the GPU is at for longer than `time`.
  std::optional<CollectiveName> pendingFor(std::chrono::milliseconds time);

  /// Makes every call fail from now on; the first reason is kept. Returns at
  /// once, and whether it was the first.
  bool refuse(const NcclFailure &failure);
  /// Frees the communicator, which ends what the GPU does of it. May hang.
  void abort();
  /// Frees it when the GPU has done all of it. Returns false if that takes
  /// seconds, or calls are refused: abort it then.
  bool destroy();

private:
  void throwIfRefused(const std::string &what);
  /// Waits until NCCL has done what it was asked for, `what`; false: it has not
  /// after the deadline.
  bool settle(const std::string &what, ncclResult_t result, const Tick &tick);
  void settleOrThrow(const std::string &what, ncclResult_t result,
                     const Tick &tick);
  void recordEnd(const CollectiveName &collective, cudaStream_t stream);

  /// Events that are not in use, of all that were made.
  struct Events {
    std::vector<cudaEvent_t> all, spare;
    ~Events();
  };

  std::mutex failureMutex;
  std::optional<NcclFailure> failure; ///< guarded by failureMutex

  std::mutex mutex; ///< guards what follows
  ncclComm_t comm = nullptr;
  std::vector<void *> handles;
  std::vector<ncclWindow_t> windows;
  Events events;
  PendingCollectives pending;
  std::optional<std::string> cudaFailure;
};

/// Throws RunError, "<what>: NCCL: …", unless `result` is none, or in progress.
void checkNccl(ncclResult_t result, const std::string &what, ncclComm_t comm);

/// Aborts the groups, which refuse calls already, in a thread; ends the process
/// with `message` if NCCL does not do so in time.
void abortWithin(const std::vector<std::shared_ptr<NcclGroup>> &groups,
                 const std::string &message, std::chrono::milliseconds grace);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CUDA_NCCLGROUP_H
