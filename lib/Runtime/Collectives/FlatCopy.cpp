//===- FlatCopy.cpp - copies into and out of a collective's flat buffer ---===//
#include "fsdp/Runtime/Collectives/FlatCopy.h"
#include "fsdp/Runtime/Devices/CudaModule.h"
#include "fsdp/Runtime/Devices/FlatLayout.h"
#include "fsdp/Runtime/Error.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/TypeCast.h>

#include <algorithm>
#include <string>

namespace fsdp::runtime {

namespace {

/// Calls `use` with a value of the element's type.
template <typename Use> void withType(FlatElement element, Use use) {
  switch (element) {
  case FlatElement::Float32:
    return use(float());
  case FlatElement::Float64:
    return use(double());
  case FlatElement::Float16:
    return use(c10::Half());
  case FlatElement::BFloat16:
    return use(c10::BFloat16());
  }
}

FlatElement elementOf(const char *what, const at::Tensor &tensor) {
  switch (tensor.scalar_type()) {
  case at::kFloat:
    return FlatElement::Float32;
  case at::kDouble:
    return FlatElement::Float64;
  case at::kHalf:
    return FlatElement::Float16;
  case at::kBFloat16:
    return FlatElement::BFloat16;
  default:
    throw RunError(std::string(what) +
                   ": expected float32, float64, float16 or bfloat16, got " +
                   c10::toString(tensor.scalar_type()));
  }
}

[[noreturn]] void refuse(const char *what, const std::string &where,
                         const std::string &expected, const std::string &got) {
  throw RunError(std::string(what) + ": expected " + expected + where +
                 ", got " + got);
}

void copyOnHost(const FlatTable &table, FlatElement flatElement,
                FlatElement tensorElement, FlatDirection direction) {
  withType(flatElement, [&](auto flatValue) {
    using Flat = decltype(flatValue);
    withType(tensorElement, [&](auto tensorValue) {
      using Element = decltype(tensorValue);
      for (int64_t tile = 0; tile < table.tiles; ++tile) {
        FlatRange range = flatRange(table, tile);
        Flat *flat = static_cast<Flat *>(table.flat) + range.flat;
        auto *tensor = static_cast<Element *>(table.tensors[range.index].data) +
                       range.tensor;
        if (direction == FlatDirection::IntoFlat) {
          std::transform(tensor, tensor + range.count, flat,
                         c10::convert<Flat, Element>);
          std::fill_n(flat + range.count, range.zeros, Flat(0.0F));
        } else {
          std::transform(flat, flat + range.count, tensor,
                         c10::convert<Element, Flat>);
        }
      }
    });
  });
}

/// Collects tensors by dtype and copies when a table is full.
class FlatCopy {
public:
  FlatCopy(const char *what, const at::Tensor &flat, int64_t rows,
           FlatDirection direction)
      : what(what), flat(flat), flatElement(elementOf(what, flat)), rows(rows),
        direction(direction) {
    if (!flat.is_contiguous())
      refuse(what, "", "a contiguous buffer", "strides");
    if (!flat.is_cpu() && !flat.is_cuda())
      refuse(what, "", "tensors on the CPU or a GPU", flat.device().str());
    for (FlatTable &table : tables)
      clear(table);
  }

  void add(const at::Tensor &tensor, int64_t width, int64_t begin) {
    if (tensor.device() != flat.device())
      refuse(what, "", "tensors on " + flat.device().str(),
             tensor.device().str());
    auto element = size_t(elementOf(what, tensor));
    FlatTable &table = tables[element];
    if (table.count == kFlatTensors)
      run(element);
    addFlatTensor(table, tensor.data_ptr(), tensor.numel(), width, begin);
  }

  void finish() {
    for (size_t element = 0; element < std::size(tables); ++element)
      run(element);
  }

private:
  void clear(FlatTable &table) const {
    table.flat = flat.data_ptr();
    table.rows = rows;
    table.columns = flat.numel() / rows;
    table.tiles = 0;
    table.count = 0;
  }

  void run(size_t element) {
    FlatTable &table = tables[element];
    if (table.count > 0 && flat.is_cuda())
      cudaModule().copyFlat(table, flatElement, FlatElement(element),
                            direction);
    else if (table.count > 0)
      copyOnHost(table, flatElement, FlatElement(element), direction);
    clear(table);
  }

  const char *what;
  const at::Tensor &flat;
  FlatElement flatElement;
  int64_t rows;
  FlatDirection direction;
  FlatTable tables[4];
};

} // namespace

void copyIn(const at::Tensor &flat, const std::vector<at::Tensor> &grads,
            int64_t ranks) {
  static constexpr char kWhat[] = "copy-in of gradients";
  std::vector<int64_t> widths;
  int64_t columns = 0;
  for (const at::Tensor &grad : grads) {
    if (grad.dim() == 0)
      refuse(kWhat, "", "gradients with dimensions", "a scalar");
    int64_t rows = grad.size(0);
    widths.push_back(
        rows == 0 ? 0 : (rows + ranks - 1) / ranks * (grad.numel() / rows));
    columns += widths.back();
  }
  if (flat.numel() != ranks * columns)
    refuse(kWhat, " for " + std::to_string(ranks) + " ranks",
           std::to_string(ranks * columns) + " elements",
           std::to_string(flat.numel()));

  FlatCopy copy(kWhat, flat, ranks, FlatDirection::IntoFlat);
  // Of a gradient with other strides the copy lives until it is read; on CUDA
  // the allocator orders its end by the stream.
  std::vector<at::Tensor> held;
  int64_t begin = 0;
  for (size_t i = 0; i < grads.size(); ++i) {
    held.push_back(grads[i].contiguous());
    copy.add(held.back(), widths[i], begin);
    begin += widths[i];
  }
  copy.finish();
}

void copyOut(const std::vector<at::Tensor> &shards, const at::Tensor &chunk,
             const std::vector<int64_t> &strides) {
  static constexpr char kWhat[] = "copy-out of shards";
  if (shards.size() != strides.size())
    refuse(kWhat, "", std::to_string(shards.size()) + " strides",
           std::to_string(strides.size()));
  int64_t columns = 0;
  for (size_t i = 0; i < shards.size(); ++i) {
    std::string where = " for shard " + std::to_string(i);
    int64_t numel = shards[i].numel();
    if (!shards[i].is_contiguous())
      refuse(kWhat, where, "contiguous memory", "strides");
    if (strides[i] < numel)
      refuse(kWhat, where, "a stride of at least " + std::to_string(numel),
             std::to_string(strides[i]));
    columns += strides[i];
  }
  if (chunk.numel() < columns)
    refuse(kWhat, "", "at least " + std::to_string(columns) + " elements",
           std::to_string(chunk.numel()));

  FlatCopy copy(kWhat, chunk, 1, FlatDirection::OutOfFlat);
  int64_t begin = 0;
  for (size_t i = 0; i < shards.size(); ++i) {
    copy.add(shards[i], shards[i].numel(), begin);
    begin += strides[i];
  }
  copy.finish();
}

} // namespace fsdp::runtime
