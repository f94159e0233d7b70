//===- FakeDevice.cpp - a second kind of device, for tests on a CPU -------===//
#include "Support/FakeDevice.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <utility>
#include <vector>

namespace fsdp::test {
namespace {

using at::Tensor;

class FakeAllocator final : public c10::Allocator {
public:
  c10::DataPtr allocate(size_t bytes) override {
    void *block = bytes == 0 ? nullptr : std::malloc(bytes);
    return {block, block, &std::free, kFake};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void *to, const void *from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};
FakeAllocator allocator;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

C10_REGISTER_GUARD_IMPL(
    PrivateUse1, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::PrivateUse1>);

/// The same memory, as the CPU's.
Tensor onCpu(const Tensor &tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone())
    return tensor;
  return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(),
                       tensor.strides(), at::dtype(tensor.dtype()));
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
             std::optional<at::Layout>, std::optional<at::Device>,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, kKeys,
                                   c10::dtype_or_default(dtype), format);
}

Tensor emptyStrided(at::IntArrayRef size, at::IntArrayRef stride,
                    std::optional<at::ScalarType> dtype,
                    std::optional<at::Layout>, std::optional<at::Device>,
                    std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, kKeys,
                                           c10::dtype_or_default(dtype));
}

Tensor &copy(Tensor &self, const Tensor &from, bool) {
  onCpu(self).copy_(onCpu(from));
  return self;
}

/// Of all other operators: that of the CPU.
void fallback(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
  std::vector<std::pair<Tensor, Tensor>> seen; // alias, original
  auto alias = [&](const Tensor &tensor) {
    TORCH_CHECK(!tensor.defined() || tensor.is_privateuseone() ||
                    tensor.unsafeGetTensorImpl()->is_wrapped_number(),
                op.schema().name(),
                ": expected tensors of the fake device, got one of ",
                tensor.device());
    seen.emplace_back(onCpu(tensor), tensor);
    return seen.back().first;
  };
  size_t count = op.schema().arguments().size();
  for (size_t i = stack->size() - count; i < stack->size(); ++i) {
    c10::IValue &value = (*stack)[i];
    if (value.isTensor()) {
      value = alias(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor &tensor : value.toTensorVector())
        list.push_back(alias(tensor));
      value = list;
    } else if (value.isDevice()) {
      value = c10::Device(at::kCPU);
    }
  }
  op.callBoxed(stack);
  auto original = [&](const Tensor &result) {
    for (const auto &[alias, tensor] : seen)
      if (alias.is_same(result))
        return tensor;
    if (!result.defined())
      return result;
    Tensor moved = at::empty_strided(result.sizes(), result.strides(),
                                     result.options().device(kFake));
    onCpu(moved).copy_(result);
    return moved;
  };
  size_t results = op.schema().returns().size();
  for (size_t i = stack->size() - results; i < stack->size(); ++i) {
    c10::IValue &value = (*stack)[i];
    if (value.isTensor()) {
      value = original(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor &tensor : value.toTensorVector())
        list.push_back(original(tensor));
      value = list;
    }
  }
}

/// Never taken back, as in AttentionKernelsTest.cpp.
torch::Library &implement(const char *operators) {
  return *new torch::Library(torch::Library::IMPL, operators,
                             c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
}

const torch::Library &others = implement("_").fallback(
    torch::CppFunction::makeFromBoxedFunction<&fallback>());

const torch::Library &own = []() -> torch::Library & {
  torch::Library &library = implement("aten");
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", emptyStrided);
  library.impl("copy_", copy);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", static_cast<Tensor (*)(const Tensor &, at::IntArrayRef)>(
                           at::native::view));
  library.impl("_reshape_alias", at::native::_reshape_alias);
  return library;
}();

} // namespace
} // namespace fsdp::test
