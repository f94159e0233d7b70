//===- DeviceTest.cpp - memory and random numbers of a GPU ----------------===//
#include "fsdp/Runtime/Devices/Device.h"
#include "CudaFixture.h"
#include "fsdp/Runtime/Devices/SteeredAllocator.h"
#include "fsdp/Runtime/Error.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

namespace fsdp::test {
namespace {

using namespace runtime;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr size_t kHugePage = size_t(2) << 20;

at::TensorOptions onGpu(at::ScalarType dtype = at::kFloat) {
  return at::device(gpu().where()).dtype(dtype);
}

TEST(CudaDeviceTest, RefusesAGpuThatIsNotThere) {
  EXPECT_THAT([] { makeCudaDevice(10'000); },
              ThrowsMessage<InputError>(HasSubstr("expected GPU 10000, got ")));
}

TEST(CudaDeviceTest, BacksARangeInPiecesAndCopiesBothWays) {
  std::unique_ptr<DeviceMemory> range = gpu().reserve(size_t(1) << 40);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(range->base()) % kHugePage, 0);
  ASSERT_GE(range->bytes(), size_t(1) << 40);
  std::unique_ptr<DeviceMemory> host = gpu().reserveHost(3 * kHugePage + 1);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(host->base()) % kHugePage, 0);
  ASSERT_GE(host->bytes(), 3 * kHugePage + 1);

  auto *values = reinterpret_cast<int64_t *>(host->base());
  size_t numel = 2 * kHugePage / sizeof(int64_t);
  std::iota(values, values + numel, 0);
  range->back(1);
  range->back(3 * kHugePage);
  range->back(kHugePage);
  // Across the end of the first piece.
  std::byte *place = range->base() + kHugePage + 8;
  gpu().copy(place, values, 2 * kHugePage - 8);
  auto count = int64_t(numel) - 1;
  at::Tensor there = at::from_blob(place, {count}, onGpu(at::kLong));
  there.add_(1);
  gpu().copy(values, place, 2 * kHugePage - 8);
  gpu().synchronize();
  EXPECT_EQ(values[0], 1);
  EXPECT_EQ(values[count - 1], count);
}

TEST(CudaDeviceTest, RefusesMoreMemoryThanThereIs) {
  std::unique_ptr<DeviceMemory> range = gpu().reserve(size_t(1) << 44);
  EXPECT_THAT([&] { range->back(size_t(1) << 44); },
              ThrowsMessage<RunError>(HasSubstr("CUDA_ERROR_OUT_OF_MEMORY")));
  // The range is as it was.
  range->back(1);
  at::from_blob(range->base(), {4}, onGpu()).fill_(1);
  gpu().synchronize();
}

TEST(CudaDeviceTest, SeedsTheGenerator) {
  gpu().seed(7);
  at::Tensor first = at::rand({100}, onGpu());
  EXPECT_FALSE(at::equal(first, at::rand({100}, onGpu())));
  gpu().seed(7);
  EXPECT_TRUE(at::equal(first, at::rand({100}, onGpu())));
}

/// Gives out the one place it has, as a rank's arena does.
class OnePlace final : public AllocationSource {
public:
  explicit OnePlace(void *place) : place(place) {}
  c10::DataPtr allocate(size_t bytes) override {
    served.push_back(bytes);
    return {place, place, [](void *) {}, gpu().where()};
  }
  void *place;
  std::vector<size_t> served;
};

TEST(SteeredCudaAllocatorTest, ServesTensorsFromTheThreadsSource) {
  std::unique_ptr<DeviceMemory> range = gpu().reserve(kHugePage);
  range->back(kHugePage);
  OnePlace source(range->base());
  int64_t before = heapAllocations();
  {
    UseAllocationSource use(source, c10::DeviceType::CUDA);
    at::Tensor served = at::full({100}, 3.0, onGpu());
    EXPECT_EQ(served.data_ptr(), range->base());
  }
  EXPECT_EQ(source.served.at(0), 400);
  EXPECT_EQ(heapAllocations(), before);
  at::Tensor own = at::empty({100}, onGpu());
  EXPECT_NE(own.data_ptr(), range->base());
  EXPECT_EQ(heapAllocations(), before + 1);
}

TEST(SteeredCudaAllocatorTest, CountsTheHeapAndWhatIsFreed) {
  int64_t calls = heapAllocations();
  int64_t large = int64_t(1) << 28;
  {
    at::Tensor tensor = at::empty({large}, onGpu(at::kByte));
  }
  int64_t peak = peakAllocatedBytes();
  EXPECT_GE(peak, large);
  // Were the first not counted as freed, these would be above it.
  void *block = gpu().allocate(size_t(large));
  gpu().deleter()(block);
  {
    at::Tensor tensor = at::empty({large}, onGpu(at::kByte));
  }
  EXPECT_EQ(peakAllocatedBytes(), peak);
  EXPECT_EQ(heapAllocations(), calls + 3);
}

} // namespace
} // namespace fsdp::test
