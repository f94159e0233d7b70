//===- FieldsTest.cpp - the structs of a plan list all that they have -----===//
#include "fsdp/Plan/Plan.h"

#include <gtest/gtest.h>

#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

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
  EXPECT_EQ(countFields<Kernel>(), countMembers<Kernel>());
  EXPECT_EQ(countFields<KernelCode>(), countMembers<KernelCode>());
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

/// The keys of a struct's fields, of inlined ones theirs.
template <typename StructT> void appendKeys(std::vector<std::string> &keys) {
  forEachField<StructT>([&](const auto &field) {
    using Member =
        std::remove_cvref_t<decltype(field.in(std::declval<StructT &>()))>;
    if constexpr (HasFields<Member>)
      if (field.isInlined())
        return appendKeys<Member>(keys);
    if constexpr (std::is_same_v<Member,
                                 std::optional<ReduceScatter::Divisors>>)
      if (field.isInlined())
        return appendKeys<ReduceScatter::Divisors>(keys);
    keys.push_back(field.key);
  });
}

/// So that none is read twice, or hides one that nobody knows.
TEST(Fields, HaveKeysOfTheirOwn) {
  forEachKind([]<typename KindT>(const KindT &kind) {
    std::vector<std::string> keys = {"phase"};
    appendKeys<KindT>(keys);
    appendKeys<Instruction>(keys);
    std::set<std::string> different(keys.begin(), keys.end());
    EXPECT_EQ(different.size(), keys.size()) << kind.verb;
  });
  for (auto append : {appendKeys<Plan>, appendKeys<Param>, appendKeys<Value>,
                      appendKeys<Buffer>, appendKeys<Input>, appendKeys<Unit>,
                      appendKeys<Optimizer>}) {
    std::vector<std::string> keys;
    append(keys);
    std::set<std::string> different(keys.begin(), keys.end());
    EXPECT_EQ(different.size(), keys.size()) << keys.front();
  }
}

/// One that is listed twice would count for one that is not.
TEST(Fields, NameDifferentMembers) {
  forEachKind([]<typename KindT>(const KindT &kind) {
    std::set<const void *> members;
    forEachField<KindT>(
        [&](const auto &field) { members.insert(&field.in(kind)); });
    EXPECT_EQ(members.size(), countFields<KindT>()) << kind.verb;
  });
}

} // namespace
} // namespace fsdp::test
