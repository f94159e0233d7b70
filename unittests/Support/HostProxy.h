//===- HostProxy.h - the host as a device, for tests to change ------------===//
#ifndef FSDP_UNITTESTS_SUPPORT_HOSTPROXY_H
#define FSDP_UNITTESTS_SUPPORT_HOSTPROXY_H

#include "fsdp/Runtime/Devices/Device.h"

namespace fsdp::test {

class HostProxy : public runtime::Device {
public:
  c10::Device where() const override { return host->where(); }
  std::unique_ptr<runtime::DeviceMemory> reserve(size_t bytes) override {
    return host->reserve(bytes);
  }
  std::unique_ptr<runtime::DeviceMemory> reserveHost(size_t bytes) override {
    return host->reserveHost(bytes);
  }
  void copy(void *to, const void *from, size_t bytes) override {
    host->copy(to, from, bytes);
  }
  void *allocate(size_t bytes) override { return host->allocate(bytes); }
  c10::DeleterFnPtr deleter() const override { return host->deleter(); }
  void seed(uint64_t seed) override { host->seed(seed); }
  at::Generator generator() override { return host->generator(); }
  std::unique_ptr<runtime::Streams> makeStreams() override {
    return host->makeStreams();
  }
  void synchronize() override {}

private:
  std::unique_ptr<runtime::Device> host = runtime::makeCpuDevice();
};

} // namespace fsdp::test

#endif // FSDP_UNITTESTS_SUPPORT_HOSTPROXY_H
