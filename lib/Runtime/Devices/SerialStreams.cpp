//===- SerialStreams.cpp - all streams on the caller's thread -------------===//
#include "fsdp/Runtime/Devices/Streams.h"

#include <utility>

namespace fsdp::runtime {

namespace {

class SerialStreams final : public Streams {
public:
  void submit(plan::Stream stream, const std::vector<plan::EventId> &waits,
              plan::EventId records, Work work) override {
    for (plan::EventId event : waits)
      if (size_t(event) < underWay.size())
        if (Wait wait = std::exchange(underWay[size_t(event)], {}))
          wait();
    Wait begun = work();
    if (!begun)
      return;
    if (stream == plan::Stream::Compute || records == -1)
      return begun();
    if (size_t(records) >= underWay.size())
      underWay.resize(size_t(records) + 1);
    underWay[size_t(records)] = std::move(begun);
  }

  void synchronize() override {
    for (Wait &wait : underWay)
      if (Wait begun = std::exchange(wait, {}))
        begun();
  }

private:
  /// Per event: what to wait for; empty if it is complete.
  std::vector<Wait> underWay;
};

} // namespace

std::unique_ptr<Streams> makeSerialStreams() {
  return std::make_unique<SerialStreams>();
}

} // namespace fsdp::runtime
