//===- EventFileTest.cpp - scalars for TensorBoard ------------------------===//
//
// That TensorBoard reads what is written: test/parity/test_limits.py.
//
#include "fsdp/Runtime/Files/EventFile.h"

#include <gtest/gtest.h>

using namespace fsdp::runtime;

namespace fsdp::test {
namespace {

// Of RFC 3720, B.4, and the usual check value.
TEST(EventFile, SumsAreCrc32c) {
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  EXPECT_EQ(crc32c(""), 0u);
}

} // namespace
} // namespace fsdp::test
