//===- SteeredCudaAllocator.cpp - the CUDA allocator of a rank ------------===//
// Most methods of the class just forward a call. Those that torch 2.11 lacks
// are listed under the version that introduced them.
//
//===----------------------------------------------------------------------===//
#include "SteeredCudaAllocator.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/headeronly/version.h>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#define FSDP_TORCH_AT_LEAST(minor)                                             \
  (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= (minor))

namespace fsdp::runtime {

namespace {

using namespace c10::cuda::CUDACachingAllocator;
using c10::DeviceIndex;
using c10::MempoolId_t;
using c10::CachingDeviceAllocator::DeviceStats;

/// What torch gave out.
struct Block {
  size_t bytes;
  c10::DeleterFnPtr deleter; ///< null: torch's raw_delete
};

/// Never destroyed: tensors may outlive static objects.
struct State {
  CudaHost host;
  CUDAAllocator *torch;
  std::mutex lock;
  std::unordered_map<void *, Block> live;
  std::vector<c10::cuda::CUDAStream> streams; ///< that use what is live
};
State *state = nullptr;

void *count(void *block, size_t bytes, c10::DeleterFnPtr deleter = nullptr) {
  if (!block)
    return block;
  state->host.countHeapAllocation();
  state->host.countAllocatedBytes(int64_t(bytes));
  std::lock_guard guard(state->lock);
  state->live[block] = {bytes, deleter};
  return block;
}

void release(void *block) {
  if (block && !state->host.freeRaw(block))
    freeInCudaHeap(block);
}

/// Torch knows a block as its own by the deleter.
void record(void *block, c10::DeleterFnPtr deleter,
            c10::cuda::CUDAStream stream) {
  c10::DataPtr own(block, block,
                   deleter ? deleter : state->torch->raw_deleter(),
                   stream.device());
  state->torch->recordStream(own, stream);
  own.release_context();
}

class SteeredCudaAllocator final : public CUDAAllocator {
public:
  explicit SteeredCudaAllocator(CUDAAllocator &torch) : torch(torch) {}

  c10::DataPtr allocate(size_t bytes) override {
    if (AllocationSource *source = sourceFor(bytes))
      return source->allocate(bytes);
    return inHeap(torch.allocate(bytes), bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void *to, const void *from, size_t bytes) const override {
    torch.copy_data(to, from, bytes);
  }

  void *raw_alloc(size_t bytes) override {
    if (AllocationSource *source = sourceFor(bytes))
      return source->allocate(bytes).release_context();
    return count(torch.raw_alloc(bytes), bytes);
  }
  void *raw_alloc_with_stream(size_t bytes, cudaStream_t stream) override {
    return count(torch.raw_alloc_with_stream(bytes, stream), bytes);
  }
  void raw_delete(void *block) override { release(block); }

  /// Of a source's memory the plan orders the uses.
  void recordStream(const c10::DataPtr &pointer,
                    c10::cuda::CUDAStream stream) override {
    if (pointer.get_deleter() != &freeInCudaHeap)
      return torch.recordStream(pointer, stream);
    c10::DeleterFnPtr deleter = nullptr;
    {
      std::lock_guard guard(state->lock);
      deleter = state->live.at(pointer.get()).deleter;
    }
    record(pointer.get(), deleter, stream);
  }

  void init(int devices) override { torch.init(devices); }
  bool initialized() override { return torch.initialized(); }
  void emptyCache(MempoolId_t pool) override { torch.emptyCache(pool); }
  DeviceStats getDeviceStats(DeviceIndex device) override {
    return torch.getDeviceStats(device);
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    torch.resetAccumulatedStats(device);
  }
  void resetPeakStats(DeviceIndex device) override {
    torch.resetPeakStats(device);
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    return torch.getMemoryInfo(device);
  }
  double getMemoryFraction(DeviceIndex device) override {
    return torch.getMemoryFraction(device);
  }
  void setMemoryFraction(double fraction, DeviceIndex device) override {
    torch.setMemoryFraction(fraction, device);
  }
  std::vector<StreamSegmentSize>
  getExpandableSegmentSizes(DeviceIndex device) override {
    return torch.getExpandableSegmentSizes(device);
  }
  void enable(bool value) override { torch.enable(value); }
  bool isEnabled() const override { return torch.isEnabled(); }
  void cacheInfo(DeviceIndex device, size_t *largest) override {
    torch.cacheInfo(device, largest);
  }
  void *getBaseAllocation(void *block, size_t *bytes) override {
    return torch.getBaseAllocation(block, bytes);
  }
  SnapshotInfo snapshot(MempoolId_t pool, bool traces) override {
    return torch.snapshot(pool, traces);
  }

  void beginAllocateToPool(DeviceIndex device, MempoolId_t pool,
                           std::function<bool(cudaStream_t)> filter) override {
    torch.beginAllocateToPool(device, pool, std::move(filter));
  }
  void endAllocateToPool(DeviceIndex device, MempoolId_t pool) override {
    torch.endAllocateToPool(device, pool);
  }
  void releasePool(DeviceIndex device, MempoolId_t pool) override {
    torch.releasePool(device, pool);
  }
  int getPoolUseCount(DeviceIndex device, MempoolId_t pool) override {
    return torch.getPoolUseCount(device, pool);
  }
  void createOrIncrefPool(DeviceIndex device, MempoolId_t pool,
                          std::shared_ptr<CUDAAllocator> own) override {
    torch.createOrIncrefPool(device, pool, std::move(own));
  }
  void setUseOnOOM(DeviceIndex device, MempoolId_t pool, bool use) override {
    torch.setUseOnOOM(device, pool, use);
  }
  void setNoSplit(DeviceIndex device, MempoolId_t pool) override {
    torch.setNoSplit(device, pool);
  }
  bool checkPoolLiveAllocations(
      DeviceIndex device, MempoolId_t pool,
      const std::unordered_set<void *> &expected) override {
    return torch.checkPoolLiveAllocations(device, pool, expected);
  }

  ShareableHandle shareIpcHandle(void *block) override {
    return torch.shareIpcHandle(block);
  }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    return torch.getIpcDevPtr(std::move(handle));
  }
  void enablePeerAccess(DeviceIndex device, DeviceIndex peer) override {
    torch.enablePeerAccess(device, peer);
  }
  cudaError_t memcpyAsync(void *to, int toDevice, const void *from,
                          int fromDevice, size_t bytes, cudaStream_t stream,
                          bool peerToPeer) override {
    return torch.memcpyAsync(to, toDevice, from, fromDevice, bytes, stream,
                             peerToPeer);
  }

  bool isHistoryEnabled() override { return torch.isHistoryEnabled(); }
  void recordHistory(bool enabled, CreateContextFn recorder, size_t entries,
                     RecordContext when, bool clear,
                     const std::vector<std::string> &skipped) override {
    torch.recordHistory(enabled, recorder, entries, when, clear, skipped);
  }
  void recordAnnotation(
      const std::vector<std::pair<std::string, std::string>> &data) override {
    torch.recordAnnotation(data);
  }
  void pushCompileContext(std::string &data) override {
    torch.pushCompileContext(data);
  }
  void popCompileContext() override { torch.popCompileContext(); }
  void setUserMetadata(const std::string &data) override {
    torch.setUserMetadata(data);
  }
  std::string getUserMetadata() override { return torch.getUserMetadata(); }
  void attachOutOfMemoryObserver(OutOfMemoryObserver observer) override {
    torch.attachOutOfMemoryObserver(std::move(observer));
  }
  void attachAllocatorTraceTracker(AllocatorTraceTracker tracker) override {
    torch.attachAllocatorTraceTracker(std::move(tracker));
  }

  std::shared_ptr<AllocatorState> getCheckpointState(DeviceIndex device,
                                                     MempoolId_t id) override {
    return torch.getCheckpointState(device, id);
  }
  CheckpointDelta
  setCheckpointPoolState(DeviceIndex device,
                         std::shared_ptr<AllocatorState> pool) override {
    return torch.setCheckpointPoolState(device, std::move(pool));
  }
  std::string name() override { return torch.name(); }

#if FSDP_TORCH_AT_LEAST(12)
  std::shared_ptr<c10::GatheredContext>
  getContextForPointer(const void *block) override {
    return torch.getContextForPointer(block);
  }
  void attachOomRejectionObserver(OomRejectionObserver observer) override {
    torch.attachOomRejectionObserver(std::move(observer));
  }
#endif
#if FSDP_TORCH_AT_LEAST(13)
  void markCaptureBegin(DeviceIndex device) override {
    torch.markCaptureBegin(device);
  }
  void markCaptureEnd(DeviceIndex device) override {
    torch.markCaptureEnd(device);
  }
  c10::DataPtr allocateWithAddress(size_t bytes, void *address) override {
    return inHeap(torch.allocateWithAddress(bytes, address), bytes);
  }
#endif
#if FSDP_TORCH_AT_LEAST(14)
  bool supportsUserMetadata() override { return torch.supportsUserMetadata(); }
  void annotateMemory(const void *block, const std::string &data) override {
    torch.annotateMemory(block, data);
  }
#endif

private:
  static AllocationSource *sourceFor(size_t bytes) {
    return bytes > 0 ? state->host.allocationSource(c10::DeviceType::CUDA)
                     : nullptr;
  }
  static c10::DataPtr inHeap(c10::DataPtr given, size_t bytes) {
    c10::Device device = given.device();
    c10::DeleterFnPtr deleter = given.get_deleter();
    void *block = count(given.release_context(), bytes, deleter);
    return {block, block, &freeInCudaHeap, device};
  }

  CUDAAllocator &torch;
};

} // namespace

void installSteeredCudaAllocator(const CudaHost &host) {
  static const bool isInstalled = [&] {
    CUDAAllocator *torch = get();
    state = new State{host, torch, {}, {}, {}};
    auto *steered = new SteeredCudaAllocator(*torch);
    allocator.store(steered);
    c10::SetAllocator(c10::DeviceType::CUDA, steered, /*priority=*/100);
    return true;
  }();
  (void)isInstalled;
}

void *allocateInCudaHeap(size_t bytes) {
  return count(state->torch->raw_alloc(bytes), bytes);
}

void freeInCudaHeap(void *block) {
  if (!block)
    return;
  Block freed = {0, nullptr};
  std::vector<c10::cuda::CUDAStream> streams;
  {
    std::lock_guard guard(state->lock);
    // What was allocated before the allocator was installed is not counted.
    auto found = state->live.find(block);
    if (found != state->live.end()) {
      freed = found->second;
      state->live.erase(found);
      streams = state->streams;
    }
  }
  state->host.countAllocatedBytes(-int64_t(freed.bytes));
  try {
    for (c10::cuda::CUDAStream stream : streams)
      record(block, freed.deleter, stream);
    if (freed.deleter)
      freed.deleter(block);
    else
      state->torch->raw_delete(block);
  } catch (const std::exception &) {
    // A device that failed accepts no more events. The error that is unwinding
    // is the one to report; leaked memory does not matter then.
  }
}

void keepMemoryForStream(c10::cuda::CUDAStream stream) {
  std::lock_guard guard(state->lock);
  if (std::find(state->streams.begin(), state->streams.end(), stream) ==
      state->streams.end())
    state->streams.push_back(stream);
}

} // namespace fsdp::runtime
