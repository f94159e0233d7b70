//===- OffloadTest.cpp - copies that are late, as a GPU's are -------------===//
//
// Ranks with memory of their own over Gloo, whose copies from and to the host
// are as late as events allow: one to the device reads the host's memory when
// something after it begins, one to the host ends when the host waits for it.
// What begins too early then computes with other numbers.
//
//===----------------------------------------------------------------------===//
#include "Support/RankThreads.h"
#include "fsdp/Runtime/Devices/SteeredAllocator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <deque>
#include <limits>

namespace fsdp::test {
namespace {

using namespace runtime;
using plan::Stream;

/// Of each stream: how many of its copies come before.
using Clock = std::array<size_t, plan::kNumStreams>;

class LateDevice final : public Device {
public:
  /// Without `waits` the host never waits.
  explicit LateDevice(bool waits) : waits(waits) {}

  c10::Device where() const override { return host->where(); }
  std::unique_ptr<DeviceMemory> reserve(size_t bytes) override {
    return host->reserve(bytes);
  }
  std::unique_ptr<DeviceMemory> reserveHost(size_t bytes) override {
    auto memory = host->reserveHost(bytes);
    pinned.emplace_back(memory->base(), memory->bytes());
    return memory;
  }
  void copy(void *to, const void *from, size_t bytes) override {
    bool toHost = isPinned(to);
    if (!current || (!toHost && !isPinned(from))) {
      std::memcpy(to, from, bytes);
      return;
    }
    Copy &copy =
        queues[size_t(*current)].emplace_back(Copy{to, from, bytes, toHost});
    const auto *begin = static_cast<const std::byte *>(from);
    if (toHost)
      copy.taken.assign(begin, begin + bytes);
  }
  void *allocate(size_t bytes) override { return host->allocate(bytes); }
  c10::DeleterFnPtr deleter() const override { return host->deleter(); }
  void seed(uint64_t seed) override { host->seed(seed); }
  at::Generator generator() override { return host->generator(); }
  std::unique_ptr<Streams> makeStreams() override;
  void synchronize() override {
    Clock all;
    all.fill(std::numeric_limits<size_t>::max());
    reach(all, true);
  }

  /// Executes what `clock` has before it; with `host` also for the host.
  void reach(const Clock &clock, bool host) {
    for (size_t s = 0; s < queues.size(); ++s)
      for (size_t i = 0; i < std::min(clock[s], queues[s].size()); ++i) {
        Copy &copy = queues[s][i];
        if (copy.isDone || (copy.toHost && !host))
          continue;
        std::memcpy(copy.to, copy.toHost ? copy.taken.data() : copy.from,
                    copy.bytes);
        copy.isDone = true;
      }
  }
  size_t copiesOf(Stream stream) const { return queues[size_t(stream)].size(); }

  const bool waits;
  std::optional<Stream> current;

private:
  struct Copy {
    void *to;
    const void *from;
    size_t bytes;
    bool toHost;
    bool isDone = false;
    std::vector<std::byte> taken = {}; ///< of a copy to the host
  };
  bool isPinned(const void *address) const {
    auto *at = static_cast<const std::byte *>(address);
    return std::any_of(pinned.begin(), pinned.end(), [&](const auto &range) {
      return at >= range.first && at < range.first + range.second;
    });
  }

  std::unique_ptr<Device> host = makeCpuDevice();
  std::vector<std::pair<const std::byte *, size_t>> pinned;
  std::array<std::deque<Copy>, plan::kNumStreams> queues;
};

class LateStreams final : public Streams {
public:
  explicit LateStreams(LateDevice &device) : device(device) {}

  void submit(Stream stream, const std::vector<plan::EventId> &waits,
              plan::EventId records, Work work) override {
    Clock &clock = begin(stream, waits);
    device.reach(clock, false);
    device.current = stream;
    if (Wait begun = work())
      begun();
    device.current.reset();
    clock[size_t(stream)] = device.copiesOf(stream);
    if (records == -1)
      return;
    if (size_t(records) >= events.size())
      events.resize(size_t(records) + 1);
    events[size_t(records)] = clock;
  }
  void awaitOnHost(Stream stream,
                   const std::vector<plan::EventId> &waits) override {
    if (device.waits)
      device.reach(begin(stream, waits), true);
  }
  void synchronize() override {
    Clock all = {};
    for (const Clock &clock : clocks)
      join(all, clock);
    clocks.fill(all);
  }

private:
  static void join(Clock &clock, const Clock &other) {
    for (size_t s = 0; s < clock.size(); ++s)
      clock[s] = std::max(clock[s], other[s]);
  }
  Clock &begin(Stream stream, const std::vector<plan::EventId> &waits) {
    Clock &clock = clocks[size_t(stream)];
    for (plan::EventId event : waits)
      join(clock, events.at(size_t(event)));
    return clock;
  }

  LateDevice &device;
  std::array<Clock, plan::kNumStreams> clocks = {};
  std::vector<Clock> events;
};

std::unique_ptr<Streams> LateDevice::makeStreams() {
  return std::make_unique<LateStreams>(*this);
}

/// The plan with its copies of gradients on the stream of computation.
plan::Plan withCopiesBetweenComputation(plan::Plan plan) {
  for (plan::Instruction &instruction : plan.instructions)
    if (std::holds_alternative<plan::CopyToHost>(instruction.kind)) {
      EXPECT_EQ(instruction.stream, Stream::CopyToHost);
      instruction.stream = Stream::Compute;
    }
  plan::verifyPlan(plan, "plan");
  return plan;
}

RunSettings late(bool waits) {
  RunSettings settings;
  settings.makeDevice = [waits] { return std::make_unique<LateDevice>(waits); };
  return settings;
}

class LateCopies
    : public testing::TestWithParam<std::tuple<const char *, bool>> {
protected:
  static void SetUpTestSuite() { installSteeredAllocator(); }
  static plan::Plan makePlan() {
    auto [name, isAside] = GetParam();
    plan::Plan plan = compiledPlan(name);
    return isAside ? plan : withCopiesBetweenComputation(plan);
  }
};

TEST_P(LateCopies, ChangeNoBits) {
  plan::Plan plan = makePlan();
  std::vector<Outcome> outcomes = runOverGloo(plan);
  EXPECT_EQ(runOverGloo(plan, late(true)), outcomes);
  EXPECT_EQ(runOverShm(plan), outcomes);
}

TEST_P(LateCopies, AreNoticedWhereTheHostDoesNotWait) {
  plan::Plan plan = makePlan();
  EXPECT_NE(runOverGloo(plan, late(false)), runOverGloo(plan));
}

TEST_P(LateCopies, ChangeNoBitsOnThreads) {
  plan::Plan plan = makePlan();
  std::vector<Outcome> outcomes = runOverGloo(plan);
  for (uint64_t seed = 0; seed < plan::kNumStreams; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    EXPECT_EQ(runOverGloo(plan, {.streams = {.maxDelayMicroseconds = 300,
                                             .seed = seed}}),
              outcomes);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Plans, LateCopies,
    testing::Combine(testing::Values("llama-offload-2",
                                     "llama-offload-microbatches-2"),
                     testing::Bool()));

} // namespace
} // namespace fsdp::test
