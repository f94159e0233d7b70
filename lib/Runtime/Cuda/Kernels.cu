//===- Kernels.cu - copies into and out of a collective's flat buffer -----===//
//
// A block copies a tile of FlatLayout.h. The conversions are the intrinsics
// that ATen's Half and BFloat16 use on the device; from float64 they go by
// float32, as ATen's do.
//
//===----------------------------------------------------------------------===//
#include "Kernels.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace fsdp::runtime {

namespace {

constexpr int kThreads = 256;

static_assert(sizeof(FlatTable) <= 4000, "a kernel's parameters are 4 KiB");

__device__ float widen(float value) { return value; }
__device__ float widen(double value) { return static_cast<float>(value); }
__device__ float widen(__half value) { return __half2float(value); }
__device__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename To> struct Narrow {
  static __device__ To from(float value) { return value; }
};
template <> struct Narrow<__half> {
  static __device__ __half from(float value) { return __float2half_rn(value); }
};
template <> struct Narrow<__nv_bfloat16> {
  static __device__ __nv_bfloat16 from(float value) {
    return __float2bfloat16_rn(value);
  }
};

template <typename To, typename From> struct Convert {
  static __device__ To from(From value) {
    return Narrow<To>::from(widen(value));
  }
};
template <typename Same> struct Convert<Same, Same> {
  static __device__ Same from(Same value) { return value; }
};

template <typename Element, int kCount>
struct alignas(sizeof(Element) * kCount) Vector {
  Element elements[kCount];
};

/// Elements before the first that is aligned to a vector.
template <typename Element, int kCount>
__device__ int64_t misaligned(const Element *data) {
  constexpr uintptr_t kBytes = sizeof(Element) * kCount;
  return int64_t((0 - reinterpret_cast<uintptr_t>(data)) % kBytes /
                 sizeof(Element));
}

template <typename To, typename From>
__device__ void copy(To *to, const From *from, int64_t count) {
  // 16 bytes of the wider type.
  constexpr int kCount =
      16 / (sizeof(To) > sizeof(From) ? sizeof(To) : sizeof(From));
  int64_t head = flatMin(misaligned<To, kCount>(to), count);
  if (misaligned<From, kCount>(from + head) != 0)
    head = count;
  int64_t vectors = (count - head) / kCount;
  for (int64_t i = threadIdx.x; i < vectors; i += kThreads) {
    int64_t at = head + i * kCount;
    auto in = *reinterpret_cast<const Vector<From, kCount> *>(from + at);
    Vector<To, kCount> out;
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      out.elements[j] = Convert<To, From>::from(in.elements[j]);
    *reinterpret_cast<Vector<To, kCount> *>(to + at) = out;
  }
  for (int64_t i = threadIdx.x; i < head; i += kThreads)
    to[i] = Convert<To, From>::from(from[i]);
  for (int64_t i = head + vectors * kCount + threadIdx.x; i < count;
       i += kThreads)
    to[i] = Convert<To, From>::from(from[i]);
}

template <typename Flat, typename Element, FlatDirection kDirection>
__global__ void __launch_bounds__(kThreads)
    copyTile(const __grid_constant__ FlatTable table) {
  FlatRange range = flatRange(table, blockIdx.x);
  Flat *flat = static_cast<Flat *>(table.flat) + range.flat;
  Element *tensor =
      static_cast<Element *>(table.tensors[range.index].data) + range.tensor;
  if (kDirection == FlatDirection::OutOfFlat) {
    copy(tensor, flat, range.count);
    return;
  }
  copy(flat, tensor, range.count);
  for (int64_t i = threadIdx.x; i < range.zeros; i += kThreads)
    flat[range.count + i] = Narrow<Flat>::from(0);
}

/// Calls `use` with a null pointer to the element's type.
template <typename Use> void withType(FlatElement element, Use use) {
  switch (element) {
  case FlatElement::Float32:
    return use(static_cast<float *>(nullptr));
  case FlatElement::Float64:
    return use(static_cast<double *>(nullptr));
  case FlatElement::Float16:
    return use(static_cast<__half *>(nullptr));
  case FlatElement::BFloat16:
    return use(static_cast<__nv_bfloat16 *>(nullptr));
  }
}

template <typename Flat, typename Element>
void launch(const FlatTable &table, FlatDirection direction,
            cudaStream_t stream) {
  auto blocks = static_cast<unsigned>(table.tiles);
  if (direction == FlatDirection::IntoFlat)
    copyTile<Flat, Element, FlatDirection::IntoFlat>
        <<<blocks, kThreads, 0, stream>>>(table);
  else
    copyTile<Flat, Element, FlatDirection::OutOfFlat>
        <<<blocks, kThreads, 0, stream>>>(table);
}

template <typename Flat> struct Launch {
  const FlatTable &table;
  FlatDirection direction;
  cudaStream_t stream;
  template <typename Element> void operator()(Element *) const {
    launch<Flat, Element>(table, direction, stream);
  }
};

struct LaunchFlat {
  const FlatTable &table;
  FlatElement tensor;
  FlatDirection direction;
  cudaStream_t stream;
  template <typename Flat> void operator()(Flat *) const {
    withType(tensor, Launch<Flat>{table, direction, stream});
  }
};

} // namespace

cudaError_t launchFlatCopy(const FlatTable &table, FlatElement flat,
                           FlatElement tensor, FlatDirection direction,
                           cudaStream_t stream) {
  withType(flat, LaunchFlat{table, tensor, direction, stream});
  return cudaGetLastError();
}

} // namespace fsdp::runtime
