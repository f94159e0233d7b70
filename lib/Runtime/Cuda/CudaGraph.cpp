//===- CudaGraph.cpp - work of a GPU that is captured and replayed --------===//
#include "CudaGraph.h"
#include "CudaError.h"

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

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
    graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
    try {
      work();
    } catch (...) {
      abandon();
      throw;
    }
    graph.capture_end();
  }

  void replay() override { graph.replay(); }

private:
  /// Ends a capture that has failed, so that work can be submitted again.
  void abandon() {
    try {
      graph.capture_end();
    } catch (const std::exception &) {
      // The cause is being thrown.
    }
    graph.reset();
    (void)cudaGetLastError();
  }

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
