//===- FieldsTest.cpp - the structs of a plan list all that they have -----===//
#include "fsdp/Plan/Plan.h"

#include <gtest/gtest.h>

#include <utility>

namespace fsdp::test {

/// Initialises a member of any type.
struct Anything {
  size_t position;
  template <typename T> operator T() const;
};

namespace {

using namespace plan;

/// The members of an aggregate, its base being one.
template <typename StructT, size_t... kIndices>
constexpr bool takes(std::index_sequence<kIndices...>) {
  return requires { StructT{Anything{kIndices}...}; };
}
template <typename StructT, size_t kCount = 0> constexpr size_t countMembers() {
  if constexpr (takes<StructT>(std::make_index_sequence<kCount + 1>()))
    return countMembers<StructT, kCount + 1>();
  else
    return kCount;
}

template <typename StructT> constexpr size_t countFields() {
  return std::tuple_size_v<decltype(StructT::fields())>;
}

/// A member that is not listed would be lost between compiler and runtime.
TEST(Fields, AreAllMembers) {
  forEachKind([]<typename KindT>(const KindT &kind) {
    EXPECT_EQ(countFields<KindT>(), countMembers<KindT>()) << kind.verb;
  });
  // Its kind and its phase stand before them.
  EXPECT_EQ(countFields<Instruction>() + 2, countMembers<Instruction>());
  EXPECT_EQ(countFields<TensorSpec>(), countMembers<TensorSpec>());
  EXPECT_EQ(countFields<Param>(), countMembers<Param>());
  EXPECT_EQ(countFields<Buffer>(), countMembers<Buffer>());
  EXPECT_EQ(countFields<Input>(), countMembers<Input>());
  EXPECT_EQ(countFields<Unit>(), countMembers<Unit>());
  EXPECT_EQ(countFields<Optimizer>(), countMembers<Optimizer>());
  EXPECT_EQ(countFields<LRSchedule>(), countMembers<LRSchedule>());
  EXPECT_EQ(countFields<GradScaler>(), countMembers<GradScaler>());
  EXPECT_EQ(countFields<Weights>(), countMembers<Weights>());
  EXPECT_EQ(countFields<Arena>(), countMembers<Arena>());
  EXPECT_EQ(countFields<ReduceScatter::Divisors>(),
            countMembers<ReduceScatter::Divisors>());
  // The version is read before all others.
  EXPECT_EQ(countFields<Plan>() + 1, countMembers<Plan>());
}

} // namespace
} // namespace fsdp::test
