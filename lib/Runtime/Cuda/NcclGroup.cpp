//===- NcclGroup.cpp - an ncclComm_t that may be aborted at any time ------===//
#include "NcclGroup.h"
#include "CudaError.h"

#include <condition_variable>
#include <cstdio>
#include <thread>

#include <unistd.h>

namespace fsdp::runtime {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

namespace {

/// For what only tidies up.
constexpr milliseconds kTidy(5000);

/// Waits as one does for something that is nearly always there at once.
class Pause {
public:
  void operator()() {
    if (++times < 1000)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(100));
  }

private:
  int times = 0;
};

bool capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  checkCuda(cudaStreamIsCapturing(stream, &status),
            "query whether a stream is being captured");
  return status != cudaStreamCaptureStatusNone;
}

} // namespace

void checkNccl(ncclResult_t result, const std::string &what, ncclComm_t comm) {
  if (result == ncclSuccess || result == ncclInProgress)
    return;
  std::string detail = ncclGetLastError(comm);
  throw RunError(what + ": NCCL: " + ncclGetErrorString(result) +
                 (detail.empty() ? "" : " (" + detail + ")"));
}

NcclGroup::Events::~Events() {
  for (cudaEvent_t event : all)
    (void)cudaEventDestroy(event);
}

bool NcclGroup::destroy() {
  auto end = steady_clock::now() + kTidy;
  auto inTime = [&] {
    std::lock_guard lock(failureMutex);
    return !failure && steady_clock::now() < end;
  };
  std::lock_guard lock(mutex);
  if (!comm)
    return true;
  // Finalizing waits for what the GPU is executing.
  for (Pause pause;; pause()) {
    (void)pending.overdue(steady_clock::now(), kTidy);
    if (pending.empty())
      break;
    if (!inTime())
      return false;
  }
  for (void *handle : handles)
    (void)ncclCommDeregister(comm, handle);
  for (ncclWindow_t window : windows)
    (void)ncclCommWindowDeregister(comm, window);
  ncclResult_t state = ncclCommFinalize(comm);
  for (Pause pause; state == ncclInProgress && inTime(); pause())
    if (ncclCommGetAsyncError(comm, &state) != ncclSuccess)
      return false;
  if (state != ncclSuccess)
    return false;
  (void)ncclCommDestroy(std::exchange(comm, nullptr));
  return true;
}

void NcclGroup::throwIfRefused(const std::string &what) {
  std::lock_guard lock(failureMutex);
  if (!failure)
    return;
  std::string text = what + ": " + failure->message;
  if (failure->ofPeer)
    throw AbortedError(text);
  throw RunError(text);
}

bool NcclGroup::settle(const std::string &what, ncclResult_t result,
                       const Tick &tick) {
  auto end = steady_clock::now() + patience->deadline();
  for (Pause pause;; pause()) {
    throwIfRefused(what);
    {
      std::lock_guard lock(mutex);
      if (!comm)
        throw AbortedError(what + ": the communicator was aborted");
      checkNccl(result, what, comm);
      if (result == ncclInProgress)
        checkNccl(ncclCommGetAsyncError(comm, &result), what, comm);
      checkNccl(result, what, comm);
    }
    if (result == ncclSuccess)
      return true;
    if (steady_clock::now() > end)
      return false;
    if (tick)
      tick();
  }
}

void NcclGroup::settleOrThrow(const std::string &what, ncclResult_t result,
                              const Tick &tick) {
  if (!settle(what, result, tick))
    throw RunError(what + " has not finished after " +
                   std::to_string(patience->deadline().count() / 1000) + " s");
}

void NcclGroup::connect(const ncclUniqueId &id, int index, const Tick &tick) {
  std::string what = "communicator \"" + name + "\" of " +
                     std::to_string(ranks.size()) + " ranks";
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  config.commName = name.c_str();
  ncclResult_t result;
  {
    std::lock_guard lock(mutex);
    result =
        ncclCommInitRankConfig(&comm, int(ranks.size()), id, index, &config);
  }
  settleOrThrow(what, result, tick);
}

void NcclGroup::add(void *base, size_t bytes, bool window, const Tick &tick) {
  std::string what = "registration of " + std::to_string(bytes) +
                     " bytes in communicator \"" + name + "\"";
  void *handle = nullptr;
  ncclResult_t result;
  throwIfRefused(what);
  {
    std::lock_guard lock(mutex);
    result = ncclCommRegister(comm, base, bytes, &handle);
  }
  settleOrThrow(what, result, tick);
  ncclWindow_t symmetric = nullptr;
  if (window) {
    {
      std::lock_guard lock(mutex);
      result = ncclCommWindowRegister(comm, base, bytes, &symmetric,
                                      NCCL_WIN_COLL_SYMMETRIC);
    }
    settleOrThrow(what, result, tick);
  }
  std::lock_guard lock(mutex);
  if (handle)
    handles.push_back(handle);
  // Null where the GPUs have no common addresses: NCCL goes without.
  if (symmetric)
    windows.push_back(symmetric);
}

bool NcclGroup::run(const CollectiveName &collective, cudaStream_t stream,
                    const std::function<void(ncclComm_t)> &calls) {
  std::string what = collective.text();
  throwIfRefused(what);
  ncclResult_t result;
  {
    std::lock_guard lock(mutex);
    if (!comm)
      throw AbortedError(what + ": the communicator was aborted");
    checkNccl(ncclGroupStart(), what, comm);
    try {
      calls(comm);
    } catch (...) {
      (void)ncclGroupEnd();
      throw;
    }
    result = ncclGroupEnd();
  }
  // Until NCCL has settled, the collective may not be on the stream yet, which
  // the caller continues to use.
  if (!settle(what, result, {}))
    return false;
  recordEnd(collective, stream);
  return true;
}

void NcclGroup::recordEnd(const CollectiveName &collective,
                          cudaStream_t stream) {
  if (capturing(stream))
    return;
  std::lock_guard lock(mutex);
  if (events.spare.empty()) {
    cudaEvent_t event = nullptr;
    checkCuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
              "make an event");
    events.all.push_back(event);
    events.spare.push_back(event);
  }
  cudaEvent_t event = events.spare.back();
  checkCuda(cudaEventRecord(event, stream), "record an event");
  events.spare.pop_back();
  pending.add(
      collective,
      [this, event] {
        cudaError_t state = cudaEventQuery(event);
        if (state == cudaSuccess) {
          events.spare.push_back(event);
          return true;
        }
        (void)cudaGetLastError();
        if (state != cudaErrorNotReady)
          cudaFailure = describe(state);
        return false;
      },
      steady_clock::now());
}

std::optional<std::string> NcclGroup::asyncError() {
  std::lock_guard lock(mutex);
  if (!comm)
    return std::nullopt;
  const CollectiveName &last = pending.last();
  std::string what =
      last.number ? last.text() : "communicator \"" + name + "\"";
  if (cudaFailure)
    return what + ": CUDA: " + *cudaFailure;
  ncclResult_t state = ncclSuccess;
  try {
    checkNccl(ncclCommGetAsyncError(comm, &state), what, comm);
    checkNccl(state, what, comm);
  } catch (const RunError &error) {
    return error.what();
  }
  return std::nullopt;
}

std::optional<CollectiveName> NcclGroup::pendingFor(milliseconds time) {
  std::lock_guard lock(mutex);
  if (!comm)
    return std::nullopt;
  return pending.overdue(steady_clock::now(), time);
}

bool NcclGroup::refuse(const NcclFailure &reason) {
  std::lock_guard lock(failureMutex);
  if (failure)
    return false;
  failure = reason;
  return true;
}

void NcclGroup::abort() {
  ncclComm_t aborted = nullptr;
  {
    std::lock_guard lock(mutex);
    aborted = std::exchange(comm, nullptr);
  }
  if (!aborted)
    return;
  (void)cudaSetDevice(gpu);
  (void)ncclCommAbort(aborted);
}

void abortWithin(const std::vector<std::shared_ptr<NcclGroup>> &groups,
                 const std::string &message, milliseconds grace) {
  struct Done {
    std::mutex mutex;
    std::condition_variable changed;
    size_t left;
  };
  auto done = std::make_shared<Done>();
  done->left = groups.size();
  // One each: a communicator's abort may wait for another's kernels.
  for (const auto &group : groups)
    std::thread([group, done] {
      group->abort();
      {
        std::lock_guard lock(done->mutex);
        --done->left;
      }
      done->changed.notify_all();
    }).detach();
  std::unique_lock lock(done->mutex);
  if (done->changed.wait_for(lock, grace, [&] { return done->left == 0; }))
    return;
  std::fprintf(stderr, "%s\nNCCL has not finished an abort after %lld s\n",
               message.c_str(), static_cast<long long>(grace.count() / 1000));
  std::fflush(nullptr);
  _exit(kExitRunFailure);
}

} // namespace fsdp::runtime
