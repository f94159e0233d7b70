//===- FiniteTest.cpp - whether numbers are numbers -----------------------===//
#include "fsdp/Runtime/Memory/Finite.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <limits>

namespace fsdp::test {
namespace {

TEST(Finite, EveryElementCounts) {
  double infinity = std::numeric_limits<double>::infinity();
  double nan = std::numeric_limits<double>::quiet_NaN();
  for (at::ScalarType dtype :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16})
    for (int64_t size : {1, 7, 4096, 5000})
      for (int64_t at : {int64_t(0), size / 2, size - 1}) {
        at::Tensor tensor = at::zeros({size}, dtype);
        tensor[at] = dtype == at::kHalf ? 65504.0 : 1e38;
        EXPECT_TRUE(runtime::allFinite(tensor));
        for (double bad : {infinity, -infinity, nan}) {
          tensor[at] = bad;
          EXPECT_FALSE(runtime::allFinite(tensor)) << dtype << " " << at;
        }
      }
}

TEST(Finite, ViewsAndOtherDtypes) {
  at::Tensor tensor = at::zeros({4, 4});
  tensor[1][2] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_FALSE(runtime::allFinite(tensor.t()));
  EXPECT_TRUE(runtime::allFinite(tensor.select(1, 0)));
  EXPECT_FALSE(runtime::allFinite(tensor.select(1, 2)));
  EXPECT_TRUE(runtime::allFinite(at::arange(5)));
  EXPECT_TRUE(runtime::allFinite(at::empty({0})));
}

} // namespace
} // namespace fsdp::test
