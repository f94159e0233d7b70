//===- Tensors.h - element types, shapes and strides ----------------------===//
//
// What capture, compiler and runtime say about a tensor, without the library of
// any of them.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_PLAN_TENSORS_H
#define FSDP_PLAN_TENSORS_H

#include "fsdp/Plan/Fields.h"

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace fsdp::plan {

/// Element types, spelled as PyTorch spells them ("float32", "bfloat16", ...).
enum class DType : uint8_t {
  Float32,
  Float64,
  Float16,
  BFloat16,
  Int64,
  Int32,
  Int16,
  Int8,
  UInt8,
  Bool,
  UInt16,
  UInt32,
  UInt64,
  Float8E4M3FN,
  Float8E5M2,
  Complex32,
  Complex64,
  Complex128,
};

/// The alignment of a tensor's first byte in arenas, shared memory and staging
/// memory, as in ATen's allocators.
inline constexpr int64_t kTensorAlign = 64;
/// The least multiple of `align` that is not below `bytes`.
template <typename Bytes>
constexpr Bytes alignTo(Bytes bytes, Bytes align = Bytes(kTensorAlign)) {
  return (bytes + align - 1) / align * align;
}

/// Bytes of one element.
int64_t byteWidth(DType dtype);
/// "float32" and so on.
std::string_view dtypeName(DType dtype);
/// float32, float64, float16 or bfloat16.
bool isFloatingPoint(DType dtype);
/// A complex dtype of any width.
bool isComplex(DType dtype);
/// An integer or bool.
bool isInteger(DType dtype);
/// The inverse of dtypeName; nullopt for an unknown name.
std::optional<DType> parseDType(std::string_view name);

/// Shape and element type of a dense tensor.
struct TensorSpec {
  std::vector<int64_t> shape;
  DType dtype = DType::Float32;

  int64_t numElements() const;
  int64_t numBytes() const { return numElements() * byteWidth(dtype); }
  bool operator==(const TensorSpec &) const = default;

  static constexpr auto fields() {
    return std::tuple(field("shape", &TensorSpec::shape).atLeast(0),
                      field("dtype", &TensorSpec::dtype));
  }
};

/// How many elements apart neighbours are along each dimension; empty if the
/// tensor is row-major without gaps.
using Strides = std::vector<int64_t>;
/// `strides`, or those of a row-major tensor if it is empty.
Strides fullStrides(const std::vector<int64_t> &shape, const Strides &strides);
/// Whether each element of one storage is an element of the tensor exactly
/// once; dimensions of stride 0 count as if they had one element.
bool areDense(const std::vector<int64_t> &shape, const Strides &strides);

} // namespace fsdp::plan

#endif // FSDP_PLAN_TENSORS_H
