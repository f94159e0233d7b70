//===- Reduce.cpp - sums of gradients in a given dtype --------------------===//
#include "fsdp/Runtime/Collectives/Reduce.h"
#include "fsdp/Plan/Messages.h"
#include "fsdp/Runtime/Collectives/Comm.h"
#include "fsdp/Runtime/Memory/Layout.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <type_traits>

#ifdef __SSE__
#include <xmmintrin.h>
#endif

namespace fsdp::runtime {

namespace {

using plan::DType;

/// In its scope the calling thread keeps denormal numbers, whatever
/// torch.set_flush_denormal has said: FSDP2's sums are made in threads of the
/// backend's own, which that does not reach. Elsewhere than on x86 it does
/// nothing.
class KeepDenormals {
public:
#ifdef __SSE__
  KeepDenormals() { _mm_setcsr(before & ~kFlush); }
  ~KeepDenormals() { _mm_setcsr(before); }

private:
  static constexpr unsigned kFlush = 0x8040; // flush to zero, denormals as zero
  unsigned before = _mm_getcsr();
#else
  KeepDenormals() {}
#endif
};

/// Elements of a block: all its arrays stay in the first-level cache.
constexpr int64_t kBlock = 2048;
constexpr int64_t kGrain = int64_t(1) << 16;

/// sum[i] = (in[0][i] + in[1][i] + ...) / divisor in T, one pass over memory.
template <typename T>
void average(T *out, const std::vector<const std::byte *> &in, T divisor,
             int64_t count) {
  auto term = [&](size_t rank) {
    return reinterpret_cast<const T *>(in[rank]);
  };
  at::parallel_for(0, count, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at += kBlock) {
      int64_t size = std::min(kBlock, end - at);
      T *__restrict sum = out + at;
      const T *__restrict first = term(0) + at;
      const T *__restrict second = term(1) + at;
      for (int64_t i = 0; i < size; ++i)
        sum[i] = first[i] + second[i];
      for (size_t r = 2; r < in.size(); ++r) {
        const T *__restrict next = term(r) + at;
        for (int64_t i = 0; i < size; ++i)
          sum[i] += next[i];
      }
      for (int64_t i = 0; i < size; ++i)
        sum[i] /= divisor;
    }
  });
}

/// Calls `visit` with a null pointer to the C++ type of `dtype`.
template <typename Visitor> void visitFloat(DType dtype, Visitor visit) {
  switch (dtype) {
  case DType::Float64:
    return visit(static_cast<double *>(nullptr));
  case DType::Float16:
    return visit(static_cast<c10::Half *>(nullptr));
  case DType::BFloat16:
    return visit(static_cast<c10::BFloat16 *>(nullptr));
  default:
    return visit(static_cast<float *>(nullptr));
  }
}

/// `value` rounded to R. Math is float, or double where a double takes part.
template <typename R, typename Math> Math roundTo(Math value) {
  return Math(static_cast<R>(value));
}

template <typename R, typename Math>
void load(Math *__restrict to, const std::byte *from, DType dtype, int64_t at,
          int64_t size) {
  visitFloat(dtype, [&]<typename T>(T *) {
    const T *__restrict source = reinterpret_cast<const T *>(from) + at;
    for (int64_t i = 0; i < size; ++i)
      to[i] = roundTo<R>(Math(source[i]));
  });
}

template <typename R, typename Math>
void divide(Math *__restrict values, double divisor, int64_t size) {
  if (divisor == 1)
    return;
  for (int64_t i = 0; i < size; ++i)
    values[i] = roundTo<R>(values[i] / Math(divisor));
}

template <typename R, typename Math>
void multiply(Math *__restrict values, double factor, int64_t size) {
  if (factor == 1)
    return;
  Math rounded = roundTo<R>(Math(factor));
  for (int64_t i = 0; i < size; ++i)
    values[i] = roundTo<R>(values[i] * rounded);
}

template <typename R, typename Math>
void reduceRounding(const GradReduction &reduction, void *out,
                    const std::vector<const std::byte *> &in, int64_t count) {
  at::parallel_for(0, count, kGrain, [&](int64_t begin, int64_t end) {
    Math sum[kBlock], term[kBlock];
    for (int64_t at = begin; at < end; at += kBlock) {
      int64_t size = std::min(kBlock, end - at);
      load<R>(sum, in[0], reduction.in, at, size);
      divide<R>(sum, reduction.predivide, size);
      multiply<R>(sum, reduction.premultiply, size);
      for (size_t r = 1; r < in.size(); ++r) {
        load<R>(term, in[r], reduction.in, at, size);
        divide<R>(term, reduction.predivide, size);
        multiply<R>(term, reduction.premultiply, size);
        for (int64_t i = 0; i < size; ++i)
          sum[i] = roundTo<R>(sum[i] + term[i]);
      }
      divide<R>(sum, reduction.postdivide, size);
      visitFloat(reduction.out, [&]<typename T>(T *) {
        T *__restrict to = static_cast<T *>(out) + at;
        for (int64_t i = 0; i < size; ++i)
          to[i] = static_cast<T>(sum[i]);
      });
    }
  });
}

} // namespace

GradReduction makeGradReduction(const plan::Plan &plan,
                                const plan::ReduceScatter &reduce,
                                size_t index) {
  GradReduction result;
  result.in = plan.values[reduce.ins[index]].dtype;
  result.reduce = reduce.reduceDtype.value_or(result.in);
  result.out = plan.values[reduce.outs[index]].dtype;
  auto divisors = reduce.divisors.value_or(
      plan::ReduceScatter::Divisors{1, double(plan.shards())});
  result.predivide = divisors.predivide;
  result.postdivide = divisors.postdivide;
  result.premultiply = divisors.premultiply;
  return result;
}

GradReduction makeGradReduction(const plan::Plan &plan,
                                const plan::AllReduce &reduce, size_t index) {
  GradReduction result;
  result.in = plan.values[reduce.ins[index]].dtype;
  result.reduce = result.in;
  result.out = plan.params[reduce.params[index]].spec.dtype;
  result.postdivide = reduce.postdivide.value_or(double(plan.replicas));
  return result;
}

/// The reduction of the parts of complex numbers.
static GradReduction ofParts(GradReduction reduction) {
  reduction.in = reduction.reduce = reduction.out =
      reduction.in == DType::Complex64 ? DType::Float32 : DType::Float64;
  return reduction;
}

void reduceInOrder(const GradReduction &reduction, void *out,
                   const std::vector<const std::byte *> &in, int64_t count) {
  KeepDenormals scope;
  if (plan::isComplex(reduction.in))
    return reduceInOrder(ofParts(reduction), out, in, 2 * count);
  bool plain = !reduction.casts() && reduction.predivide == 1 &&
               reduction.premultiply == 1 && in.size() > 1;
  if (plain && reduction.in == DType::Float32)
    return average(static_cast<float *>(out), in, float(reduction.postdivide),
                   count);
  if (plain && reduction.in == DType::Float64)
    return average(static_cast<double *>(out), in, reduction.postdivide, count);
  bool wide = reduction.in == DType::Float64 || reduction.out == DType::Float64;
  visitFloat(reduction.reduce, [&]<typename R>(R *) {
    if (wide || std::is_same_v<R, double>)
      reduceRounding<R, double>(reduction, out, in, count);
    else
      reduceRounding<R, float>(reduction, out, in, count);
  });
}

void reduceAroundRing(const GradReduction &reduction, void *out,
                      const std::vector<const std::byte *> &in, int64_t count,
                      int64_t begin, int64_t elements) {
  if (plan::isComplex(reduction.in))
    return reduceAroundRing(ofParts(reduction), out, in, 2 * count, 2 * begin,
                            2 * elements);
  size_t ranks = in.size();
  int64_t piece = plan::ringPiece(elements, plan::byteWidth(reduction.reduce),
                                  int64_t(ranks));
  std::vector<const std::byte *> terms(ranks);
  for (int64_t done = 0, size = 0; done < count; done += size) {
    int64_t index = (begin + done) / piece;
    size = std::min(count - done, (index + 1) * piece - (begin + done));
    for (size_t k = 0; k < ranks; ++k)
      terms[k] = in[(size_t(index) + ranks - 1 - k) % ranks] +
                 done * plan::byteWidth(reduction.in);
    reduceInOrder(reduction,
                  static_cast<std::byte *>(out) +
                      done * plan::byteWidth(reduction.out),
                  terms, size);
  }
}

} // namespace fsdp::runtime
