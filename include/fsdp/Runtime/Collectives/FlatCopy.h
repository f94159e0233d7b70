//===- FlatCopy.h - copies into and out of a collective's flat buffer -----===//
//
// The copies that FSDP2 makes around a reduce-scatter, with the cast in the
// same pass. The dtypes are float32, float64, float16 and bfloat16, converted
// as ATen does. On CUDA each call makes one launch per 96 tensors of one dtype,
// on the current stream, with no copy from the host, so that it can be captured
// in a graph.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_COLLECTIVES_FLATCOPY_H
#define FSDP_RUNTIME_COLLECTIVES_FLATCOPY_H

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace fsdp::runtime {

/// Fills `flat`, contiguous, with at::_chunk_cat(grads, 0, ranks) in the dtype
/// of `flat`. A gradient may be empty. Throws RunError if sizes or dtypes do
/// not match.
void copyIn(const at::Tensor &flat, const std::vector<at::Tensor> &grads,
            int64_t ranks);

/// Fills each shard, contiguous and possibly empty, from `chunk`, contiguous:
/// shard i begins there at the sum of the strides before it, and strides[i] is
/// at least its number of elements. Throws RunError if sizes or dtypes do not
/// match.
void copyOut(const std::vector<at::Tensor> &shards, const at::Tensor &chunk,
             const std::vector<int64_t> &strides);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_COLLECTIVES_FLATCOPY_H
