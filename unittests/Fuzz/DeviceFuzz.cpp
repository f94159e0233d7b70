//===- DeviceFuzz.cpp - the readers of devices and clusters ---------------===//
#include "Fuzz.h"
#include "fsdp/Simulate/DeviceModel.h"

#include <cmath>

using namespace fsdp;

/// What is accepted gives finite times.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  std::string_view text(reinterpret_cast<const char *>(data), size);
  auto read = [&](auto &&parse) {
    try {
      simulate::DeviceModel device = parse();
      simulate::Transfer transfer = simulate::transferTime(
          device, simulate::Collective::AllReduce, {8, 1}, 1e6);
      fuzz::require(transfer.seconds >= 0, "expected a time of at least 0");
    } catch (const simulate::SimulateError &error) {
      fuzz::requireMessage(error.what(), "file.yaml:");
    }
  };
  read([&] { return simulate::parseDevice(text, "file.yaml"); });
  read([&] { return simulate::parseCluster(text, "file.yaml", 8).device; });
  return 0;
}
