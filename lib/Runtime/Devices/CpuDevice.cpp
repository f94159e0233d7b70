//===- CpuDevice.cpp - the host as a rank's device ------------------------===//
#include "fsdp/Runtime/Devices/Device.h"
#include "fsdp/Runtime/Devices/SteeredAllocator.h"
#include "fsdp/Runtime/Error.h"

#include <ATen/CPUGeneratorImpl.h>

#include <cerrno>
#include <cstring>
#include <string>

#include <sys/mman.h>

namespace fsdp::runtime {

namespace {

constexpr size_t kHugePage = size_t(2) << 20;

/// The kernel gives memory at the first touch.
class MappedMemory final : public DeviceMemory {
public:
  explicit MappedMemory(size_t wanted)
      : size((wanted + kHugePage - 1) / kHugePage * kHugePage) {
    size_t whole = size + kHugePage;
    void *mapped = mmap(nullptr, whole, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED)
      throw RunError("cannot map " + std::to_string(whole) +
                     " bytes: " + std::strerror(errno));
    auto *first = static_cast<std::byte *>(mapped);
    size_t before =
        (kHugePage - reinterpret_cast<uintptr_t>(first) % kHugePage) %
        kHugePage;
    if (before > 0)
      munmap(first, before);
    begin = first + before;
    munmap(begin + size, kHugePage - before);
  }
  MappedMemory(const MappedMemory &) = delete;
  MappedMemory &operator=(const MappedMemory &) = delete;
  ~MappedMemory() override { munmap(begin, size); }

  std::byte *base() const override { return begin; }
  size_t bytes() const override { return size; }
  void back(size_t) override {}

private:
  size_t size;
  std::byte *begin;
};

class CpuDevice final : public Device {
public:
  c10::Device where() const override { return c10::DeviceType::CPU; }
  std::unique_ptr<DeviceMemory> reserve(size_t bytes) override {
    return std::make_unique<MappedMemory>(bytes);
  }
  std::unique_ptr<DeviceMemory> reserveHost(size_t bytes) override {
    return reserve(bytes);
  }
  void copy(void *to, const void *from, size_t bytes) override {
    std::memcpy(to, from, bytes);
  }
  void *allocate(size_t bytes) override { return allocateInHeap(bytes); }
  c10::DeleterFnPtr deleter() const override { return &freeInHeap; }
  void seed(uint64_t seed) override { generator().set_current_seed(seed); }
  at::Generator generator() override {
    return at::detail::getDefaultCPUGenerator();
  }
  std::unique_ptr<Streams> makeStreams() override {
    return makeSerialStreams();
  }
  void synchronize() override {}
};

} // namespace

std::unique_ptr<Device> makeCpuDevice() {
  return std::make_unique<CpuDevice>();
}

} // namespace fsdp::runtime
