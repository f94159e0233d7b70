//===- CudaFixture.cpp - the GPU of the tests, and their main -------------===//
//
// Where there is no GPU the program says so once and ends with 77, which CTest
// calls skipped.
//
//===----------------------------------------------------------------------===//
#include "CudaFixture.h"
#include "fsdp/Runtime/Error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>

namespace fsdp::test {

namespace {

constexpr int kSkipped = 77;

std::unique_ptr<runtime::Device> device;

} // namespace

runtime::Device &gpu() { return *device; }

} // namespace fsdp::test

int main(int argc, char **argv) {
  testing::InitGoogleMock(&argc, argv);
  try {
    fsdp::test::device = fsdp::runtime::makeCudaDevice(0);
  } catch (const fsdp::runtime::InputError &error) {
    std::printf("CudaTests: skipped: %s\n", error.what());
    return fsdp::test::kSkipped;
  }
  int result = RUN_ALL_TESTS();
  fsdp::test::device.reset();
  return result;
}
