//===- Patience.cpp - how long ranks wait for each other ------------------===//
#include "fsdp/Runtime/Collectives/Patience.h"

#include <algorithm>

namespace fsdp::runtime {

using std::chrono::milliseconds;

namespace {

constexpr milliseconds kBeforeASecondStep = std::chrono::minutes(5);
constexpr milliseconds kLeast = std::chrono::minutes(2);
constexpr int64_t kSteps = 20;
/// A wait starts to look at the other ranks when it has become long.
constexpr milliseconds kLong(1000);
/// A process whose wait was not polled for this long did not run.
constexpr milliseconds kAsleep(5000);

std::string seconds(milliseconds time) {
  std::string text = std::to_string(time.count() / 1000);
  if (int64_t tenths = time.count() % 1000 / 100)
    text += "." + std::to_string(tenths);
  return text + " s";
}

} // namespace

milliseconds Patience::deadline() const {
  if (given)
    return *given;
  int64_t step = longest->load(std::memory_order_relaxed);
  return step == 0 ? kBeforeASecondStep
                   : std::max(kLeast, milliseconds(kSteps * step));
}

void Patience::stepTook(std::chrono::duration<double> seconds) {
  auto step = std::max<int64_t>(1, int64_t(seconds.count() * 1000));
  int64_t before = longest->load();
  while (before < step && !longest->compare_exchange_weak(before, step))
    ;
}

std::string WaitSettings::step() const {
  int64_t number = position ? position->step.load() : -1;
  return number < 0 ? "" : " at step " + std::to_string(number + 1);
}

std::optional<Stall::Cause> Stall::overdue(milliseconds grace, bool always,
                                           Clock::time_point now) {
  milliseconds deadline = patience.deadline();
  if (now - looked > kAsleep)
    since += now - looked;
  looked = now;
  if (now - begun < std::min(kLong, deadline / 4))
    return std::nullopt;
  std::vector<RankSight> sight = sights.look();
  bool waits = always;
  for (size_t rank = 0; rank < sight.size(); ++rank) {
    waits |= sight[rank].waits;
    if (rank < seen.size() && sight[rank].movedSince(seen[rank]))
      since = now;
  }
  if (!waits)
    since = now;
  seen = std::move(sight);
  if (now - since < deadline + grace)
    return std::nullopt;
  return cause(deadline);
}

Stall::Cause Stall::cause(milliseconds deadline) const {
  std::string time = " has not moved for " + seconds(deadline);
  if (std::optional<RankSights::Blindness> blind = sights.blindness()) {
    int32_t pid = blind->rank ? sights.process(*blind->rank) : 0;
    return {pid ? std::vector<int32_t>{pid} : std::vector<int32_t>(),
            blind->text};
  }
  Cause cause;
  std::vector<std::string> obstacles;
  for (size_t rank = 0; rank < seen.size(); ++rank)
    obstacles.push_back(sights.obstacle(int64_t(rank)));
  // If an obstacle is known, only the ranks that have one are named.
  bool isKnown = std::any_of(obstacles.begin(), obstacles.end(),
                             [](auto &obstacle) { return !obstacle.empty(); });
  int64_t others = -1;
  for (size_t rank = 0; rank < seen.size(); ++rank) {
    const std::string &obstacle = obstacles[rank];
    if (isKnown ? obstacle.empty() : seen[rank].waits)
      continue;
    if (int32_t pid = sights.process(int64_t(rank)))
      cause.processes.push_back(pid);
    if (++others > 0)
      continue;
    Position position;
    position.step = seen[rank].step;
    position.instruction = seen[rank].instruction;
    position.saving = seen[rank].saving;
    cause.text = "rank " + std::to_string(rank) +
                 (obstacle.empty() ? "" : ", which " + obstacle + ",") + time +
                 (seen[rank].current ? "" : " since it was last seen") +
                 patience.where(position);
  }
  if (others < 0)
    cause.text = "no rank has moved for " + seconds(deadline) +
                 ": each waits for another";
  else if (others > 0)
    cause.text +=
        ", nor " + (others == 1 ? "has another"
                                : "have " + std::to_string(others) + " others");
  return cause;
}

} // namespace fsdp::runtime
