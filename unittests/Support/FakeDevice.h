//===- FakeDevice.h - a second kind of device, for tests on a CPU ---------===//
#ifndef FSDP_UNITTESTS_SUPPORT_FAKEDEVICE_H
#define FSDP_UNITTESTS_SUPPORT_FAKEDEVICE_H

#include <c10/core/Device.h>

namespace fsdp::test {

/// Tensors of it lie in the host's memory, and the CPU's kernels compute with
/// them; but an operator that takes tensors of the CPU beside them is an error,
/// as on a GPU.
inline const c10::Device kFake(c10::DeviceType::PrivateUse1, 0);

} // namespace fsdp::test

#endif // FSDP_UNITTESTS_SUPPORT_FAKEDEVICE_H
