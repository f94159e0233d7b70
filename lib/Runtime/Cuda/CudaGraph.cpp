//===- CudaGraph.cpp - work of a GPU that is captured and replayed --------===//
#include "CudaGraph.h"
#include "CudaError.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/version.h>

namespace fsdp::runtime {

namespace {

class CudaGraph final : public DeviceGraph {
public:
  void capture(int index, const std::function<void()> &work) {
    // The default stream cannot be captured.
    c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool(
        /*isHighPriority=*/false, c10::DeviceIndex(index));
    // Work in flight would not be in the graph.
    checkCuda(cudaDeviceSynchronize(), "wait for the work of the GPU");
    c10::cuda::CUDAStreamGuard guard(stream);
    // The watchdog's thread asks for events meanwhile.
    graph.capture_begin(pool, cudaStreamCaptureModeThreadLocal);
    try {
      work();
      graph.capture_end();
    } catch (...) {
      abandon();
      throw;
    }
  }

  void replay() override { graph.replay(); }

private:
  /// Ends a capture that has failed, so that work can be submitted again. What
  /// fails here too is of no interest: the cause is being thrown.
  void abandon() {
    bool ended = attempt([&] { graph.capture_end(); });
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 15
    // Where capture_end throws, it leaves the allocators with the pool, and
    // with a filter of streams that refers to the graph. If the pool was ended
    // nevertheless, reset() releases it.
    namespace allocator = c10::cuda::CUDACachingAllocator;
    c10::DeviceIndex device = c10::cuda::current_device();
    at::HostAllocator *pinned = at::getHostAllocator(at::kCUDA);
    if (!ended &&
        attempt([&] { allocator::endAllocateToPool(device, pool); })) {
      attempt([&] { allocator::releasePool(device, pool); });
      if (attempt([&] { pinned->end_allocate_to_pool(pool); }))
        attempt([&] { pinned->release_pool(pool); });
    }
#else
    (void)ended;
#endif
    attempt([&] { graph.reset(); });
    (void)cudaGetLastError();
  }

  static bool attempt(const std::function<void()> &call) {
    try {
      call();
      return true;
    } catch (const std::exception &) {
      return false;
    }
  }

  const at::cuda::MempoolId_t pool = at::cuda::graph_pool_handle();
  at::cuda::CUDAGraph graph;
};

} // namespace

std::unique_ptr<DeviceGraph>
captureCudaGraph(int index, const std::function<void()> &work) {
  auto graph = std::make_unique<CudaGraph>();
  graph->capture(index, work);
  return graph;
}

} // namespace fsdp::runtime
