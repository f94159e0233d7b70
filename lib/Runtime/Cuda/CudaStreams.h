//===- CudaStreams.h - a plan's streams as streams of a GPU ---------------===//
#ifndef FSDP_RUNTIME_CUDA_CUDASTREAMS_H
#define FSDP_RUNTIME_CUDA_CUDASTREAMS_H

#include "fsdp/Runtime/Devices/Streams.h"

namespace fsdp::runtime {

/// Streams of the index-th GPU. Work is executed on the caller's thread, which
/// submits it to the GPU, and what it submits is ordered there.
///
/// The thread's current stream joins in: each stream's first work after
/// synchronize(), or at all, follows what is on it; and after synchronize() it
/// follows all work, as each stream does. synchronize() does not wait on the
/// host. So a step can be captured in a graph from that stream.
std::unique_ptr<Streams> makeCudaStreams(int index);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CUDA_CUDASTREAMS_H
