//===- Gated.cpp - operators of one's own ---------------------------------===//
//
// What a model calls as torch.ops.example.gated after
// torch.ops.load_library("libexample_operators.so"), and `fsdp-run --load`
// executes: a gate with its backward, a count in a buffer, and noise.
//
//===----------------------------------------------------------------------===//
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Dispatch.h>
#include <ATen/core/DistributionsHelper.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <cmath>
#include <mutex>
#include <tuple>

namespace {

using at::Tensor;

/// x * sigmoid(slope * gate), and the sigmoid for backward.
std::tuple<Tensor, Tensor> gated(const Tensor &x, const Tensor &gate,
                                 double slope) {
  TORCH_CHECK(x.sizes() == gate.sizes(),
              "gated: expected operands of one "
              "shape, got ",
              x.sizes(), " and ", gate.sizes());
  Tensor from = x.contiguous(), by = gate.contiguous();
  Tensor out = at::empty_like(from), open = at::empty_like(from);
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "gated", [&] {
    const auto *values = from.const_data_ptr<scalar_t>();
    const auto *gates = by.const_data_ptr<scalar_t>();
    auto *results = out.mutable_data_ptr<scalar_t>();
    auto *opens = open.mutable_data_ptr<scalar_t>();
    for (int64_t i = 0; i < from.numel(); ++i) {
      opens[i] =
          scalar_t(1) / (scalar_t(1) + std::exp(-scalar_t(slope) * gates[i]));
      results[i] = values[i] * opens[i];
    }
  });
  return {out, open};
}

std::tuple<Tensor, Tensor> gatedBackward(const Tensor &grad, const Tensor &x,
                                         const Tensor &open, double slope) {
  Tensor by = grad.contiguous(), from = x.contiguous();
  Tensor gradX = at::empty_like(from), gradGate = at::empty_like(from);
  AT_DISPATCH_FLOATING_TYPES(grad.scalar_type(), "gated_backward", [&] {
    const auto *grads = by.const_data_ptr<scalar_t>();
    const auto *values = from.const_data_ptr<scalar_t>();
    const auto *opens = open.const_data_ptr<scalar_t>();
    for (int64_t i = 0; i < by.numel(); ++i) {
      gradX.mutable_data_ptr<scalar_t>()[i] = grads[i] * opens[i];
      gradGate.mutable_data_ptr<scalar_t>()[i] = grads[i] * values[i] *
                                                 scalar_t(slope) * opens[i] *
                                                 (scalar_t(1) - opens[i]);
    }
  });
  return {gradX, gradGate};
}

/// Adds the elements of `x` above zero to `total`.
void count(Tensor &total, const Tensor &x) { total.add_(x.gt(0).sum()); }

/// x with noise from the generator.
Tensor jitter(const Tensor &x, double scale,
              const std::optional<at::Generator> &generator) {
  auto *own = at::get_generator_or_default<at::CPUGeneratorImpl>(
      generator, at::detail::getDefaultCPUGenerator());
  Tensor from = x.contiguous(), out = at::empty_like(from);
  std::lock_guard guard(own->mutex_);
  at::uniform_real_distribution<double> noise(-scale, scale);
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "jitter", [&] {
    for (int64_t i = 0; i < out.numel(); ++i)
      out.mutable_data_ptr<scalar_t>()[i] =
          from.const_data_ptr<scalar_t>()[i] + scalar_t(noise(own));
  });
  return out;
}

//===----------------------------------------------------------------------===//
// Shapes, for capture
//===----------------------------------------------------------------------===//

Tensor emptyAs(const Tensor &x) {
  return at::empty_like(x, at::MemoryFormat::Contiguous);
}

std::tuple<Tensor, Tensor> gatedMeta(const Tensor &x, const Tensor &, double) {
  return {emptyAs(x), emptyAs(x)};
}

std::tuple<Tensor, Tensor> gatedBackwardMeta(const Tensor &, const Tensor &x,
                                             const Tensor &, double) {
  return {emptyAs(x), emptyAs(x)};
}

void countMeta(Tensor &, const Tensor &) {}

Tensor jitterMeta(const Tensor &x, double,
                  const std::optional<at::Generator> &) {
  return emptyAs(x);
}

//===----------------------------------------------------------------------===//
// Autograd
//===----------------------------------------------------------------------===//

using Gated = std::tuple<Tensor, Tensor>(const Tensor &, const Tensor &,
                                         double);
using GatedBackward = std::tuple<Tensor, Tensor>(const Tensor &, const Tensor &,
                                                 const Tensor &, double);
using Jitter = Tensor(const Tensor &, double,
                      const std::optional<at::Generator> &);

template <typename Function> auto find(const char *name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<Function>();
}

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct GatedFunction : torch::autograd::Function<GatedFunction> {
  static variable_list forward(AutogradContext *context, const Tensor &x,
                               const Tensor &gate, double slope) {
    at::AutoDispatchBelowADInplaceOrView guard;
    static auto op = find<Gated>("example::gated");
    auto [out, open] = op.call(x, gate, slope);
    context->save_for_backward({x, open});
    context->saved_data["slope"] = slope;
    context->mark_non_differentiable({open});
    return {out, open};
  }
  static variable_list backward(AutogradContext *context,
                                const variable_list &grads) {
    static auto op = find<GatedBackward>("example::gated_backward");
    variable_list saved = context->get_saved_variables();
    auto [gradX, gradGate] = op.call(grads[0], saved[0], saved[1],
                                     context->saved_data["slope"].toDouble());
    return {gradX, gradGate, Tensor()};
  }
};

std::tuple<Tensor, Tensor> gatedAutograd(const Tensor &x, const Tensor &gate,
                                         double slope) {
  variable_list results = GatedFunction::apply(x, gate, slope);
  return {results[0], results[1]};
}

struct JitterFunction : torch::autograd::Function<JitterFunction> {
  static Tensor forward(AutogradContext *, const Tensor &x, double scale,
                        const std::optional<at::Generator> &generator) {
    at::AutoDispatchBelowADInplaceOrView guard;
    static auto op = find<Jitter>("example::jitter");
    return op.call(x, scale, generator);
  }
  static variable_list backward(AutogradContext *, const variable_list &grads) {
    return {grads[0], Tensor(), Tensor()};
  }
};

Tensor jitterAutograd(const Tensor &x, double scale,
                      const std::optional<at::Generator> &generator) {
  return JitterFunction::apply(x, scale, generator);
}

} // namespace

TORCH_LIBRARY(example, m) {
  m.def("gated(Tensor x, Tensor gate, *, float slope=1.0) -> (Tensor, Tensor)");
  m.def("gated_backward(Tensor grad, Tensor x, Tensor open, float slope) -> "
        "(Tensor, Tensor)");
  m.def("count(Tensor(a!) total, Tensor x) -> ()");
  m.def("jitter(Tensor x, float scale, *, Generator? generator=None) -> Tensor",
        {at::Tag::nondeterministic_seeded});
}

TORCH_LIBRARY_IMPL(example, CPU, m) {
  m.impl("gated", &gated);
  m.impl("gated_backward", &gatedBackward);
  m.impl("count", &count);
  m.impl("jitter", &jitter);
}

TORCH_LIBRARY_IMPL(example, Meta, m) {
  m.impl("gated", &gatedMeta);
  m.impl("gated_backward", &gatedBackwardMeta);
  m.impl("count", &countMeta);
  m.impl("jitter", &jitterMeta);
}

TORCH_LIBRARY_IMPL(example, Autograd, m) {
  m.impl("gated", &gatedAutograd);
  m.impl("jitter", &jitterAutograd);
}
