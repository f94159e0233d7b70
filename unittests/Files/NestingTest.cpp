//===- NestingTest.cpp - how deep a text goes -----------------------------===//
#include "fsdp/Support/Nesting.h"

#include <gtest/gtest.h>

#include <string>

namespace fsdp::test {
namespace {

TEST(NestingTest, CountsOpenBrackets) {
  EXPECT_EQ(nestingOf(""), 0u);
  EXPECT_EQ(nestingOf("a(b[c] {d}) <e>"), 2u);
  EXPECT_EQ(nestingOf(")))((("), 3u);
  EXPECT_EQ(nestingOf(std::string(300, '<')), 300u);
}

TEST(NestingTest, KnowsArrowsStringsAndComments) {
  EXPECT_EQ(nestingOf("<() -> <() -> <()>>>"), 4u);
  EXPECT_EQ(nestingOf(R"("((((" "a\"((")"), 0u);
  EXPECT_EQ(nestingOf("// [[[[\n(// ((\n("), 2u);
  EXPECT_EQ(nestingOf("// it is \"\n((("), 3u);
  EXPECT_EQ(nestingOf("\"(\n(("), 2u);
}

} // namespace
} // namespace fsdp::test
