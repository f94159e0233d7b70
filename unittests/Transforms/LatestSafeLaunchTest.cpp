//===- LatestSafeLaunchTest.cpp - launches against all launches -----------===//
#include "LatestSafeLaunch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <random>

using namespace fsdp::schedule;

namespace {

/// A step that takes `compute` seconds at each position.
LaunchProblem makeProblem(const std::vector<double> &compute) {
  LaunchProblem problem;
  problem.time = {0};
  for (double seconds : compute)
    problem.time.push_back(problem.time.back() + seconds);
  problem.live.assign(compute.size(), 0);
  return problem;
}

struct Outcome {
  double seconds = 0; ///< of the step
  /// Bytes times the seconds for which they are held before the first use.
  double held = 0;
  std::vector<double> stalls;
};

/// Position by position, as the streams would run.
Outcome play(const LaunchProblem &problem, const std::vector<size_t> &at) {
  size_t count = problem.gathers.size();
  std::vector<double> launched(count), ended(count);
  Outcome outcome;
  outcome.stalls.resize(count);
  double now = 0, link = 0;
  for (size_t position = 0; position < problem.live.size(); ++position) {
    for (size_t k = 0; k < count; ++k)
      if (at[k] == position) {
        launched[k] = now;
        ended[k] = link = std::max(now, link) + problem.gathers[k].seconds;
      }
    for (size_t k = 0; k < count; ++k)
      if (problem.gathers[k].use == position) {
        outcome.stalls[k] = std::max(0.0, ended[k] - now);
        now = std::max(now, ended[k]);
        outcome.held += double(problem.gathers[k].bytes) * (now - launched[k]);
      }
    now += problem.time[position + 1] - problem.time[position];
  }
  outcome.seconds = now;
  return outcome;
}

bool fits(const LaunchProblem &problem, const std::vector<size_t> &at) {
  if (!problem.budget)
    return true;
  for (size_t position = 0; position < problem.live.size(); ++position) {
    int64_t bytes = problem.live[position];
    for (size_t k = 0; k < at.size(); ++k)
      if (at[k] <= position && position < problem.gathers[k].latest)
        bytes += problem.gathers[k].bytes;
    if (bytes > *problem.budget)
      return false;
  }
  return true;
}

/// Of all launches in order that fit, the shortest step, and of the shortest
/// the one that holds least.
Outcome bruteForce(const LaunchProblem &problem) {
  Outcome best;
  best.seconds = best.held = std::numeric_limits<double>::infinity();
  std::vector<size_t> at;
  std::function<void()> extend = [&] {
    if (at.size() == problem.gathers.size()) {
      if (!fits(problem, at))
        return;
      Outcome outcome = play(problem, at);
      if (std::pair(outcome.seconds, outcome.held) <
          std::pair(best.seconds, best.held))
        best = outcome;
      return;
    }
    const GatherToLaunch &gather = problem.gathers[at.size()];
    for (size_t p = std::max(gather.earliest, at.empty() ? 0 : at.back());
         p <= gather.latest; ++p) {
      at.push_back(p);
      extend();
      at.pop_back();
    }
  };
  extend();
  return best;
}

/// Two to five gathers, three to eight positions.
LaunchProblem randomProblem(std::mt19937 &random, bool budgeted) {
  auto below = [&](size_t n) { return size_t(random() % n); };
  std::vector<double> compute(3 + below(6));
  for (double &seconds : compute)
    seconds = double(below(7));
  LaunchProblem problem = makeProblem(compute);
  std::vector<size_t> uses(2 + below(4));
  for (size_t &use : uses)
    use = below(compute.size());
  std::sort(uses.begin(), uses.end());
  for (int64_t &bytes : problem.live)
    bytes = int64_t(below(6));
  for (size_t use : uses) {
    GatherToLaunch gather;
    gather.seconds = double(1 + below(8));
    gather.bytes = int64_t(1 + below(5));
    gather.latest = gather.use = use;
    gather.earliest = below(3) ? 0 : below(use + 1);
    problem.gathers.push_back(gather);
    for (size_t p = use, end = use + 1 + below(compute.size() - use); p < end;
         ++p)
      problem.live[p] += gather.bytes;
  }
  if (budgeted)
    problem.budget =
        *std::max_element(problem.live.begin(), problem.live.end()) +
        int64_t(below(6));
  return problem;
}

std::vector<size_t> positionsOf(const std::vector<Launch> &launches) {
  std::vector<size_t> at;
  for (const Launch &launch : launches)
    at.push_back(launch.at);
  return at;
}

/// How far the launches are from the best, over random instances.
struct Gap {
  int instances = 0, longer = 0, heavier = 0;
  double meanSeconds = 0, maxSeconds = 0, meanHeld = 0, maxHeld = 0;
};

Gap measure(bool budgeted, unsigned seed, int instances) {
  std::mt19937 random(seed);
  Gap gap;
  for (; gap.instances < instances; ++gap.instances) {
    LaunchProblem problem = randomProblem(random, budgeted);
    std::vector<Launch> launches = latestSafeLaunches(problem);
    std::vector<size_t> at = positionsOf(launches);
    EXPECT_TRUE(std::is_sorted(at.begin(), at.end()));
    for (size_t k = 0; k < at.size(); ++k) {
      EXPECT_GE(at[k], problem.gathers[k].earliest);
      EXPECT_LE(at[k], problem.gathers[k].latest);
    }
    EXPECT_TRUE(fits(problem, at));
    Outcome ours = play(problem, at), best = bruteForce(problem);
    // What it says of itself.
    for (size_t k = 0; k < at.size(); ++k)
      EXPECT_EQ(launches[k].stall, ours.stalls[k]) << gap.instances;
    double longer = best.seconds > 0 ? ours.seconds / best.seconds - 1 : 0;
    double heavier =
        longer == 0 && best.held > 0 ? ours.held / best.held - 1 : 0;
    gap.longer += longer > 0;
    gap.heavier += heavier > 0;
    gap.meanSeconds += longer / instances;
    gap.meanHeld += heavier / instances;
    gap.maxSeconds = std::max(gap.maxSeconds, longer);
    gap.maxHeld = std::max(gap.maxHeld, heavier);
  }
  std::printf("seed %u, %d instances %s a budget: step longer than the "
              "shortest in %d (mean %.4f %%, most %.2f %%), more held than by "
              "another of the same length in %d (mean %.4f %%, most %.2f %%)\n",
              seed, instances, budgeted ? "with" : "without", gap.longer,
              100 * gap.meanSeconds, 100 * gap.maxSeconds, gap.heavier,
              100 * gap.meanHeld, 100 * gap.maxHeld);
  return gap;
}

TEST(LatestSafeLaunch, IsTheShortestStepWithoutABudget) {
  Gap gap = measure(/*budgeted=*/false, 1, 3000);
  EXPECT_EQ(gap.longer, 0);
  EXPECT_EQ(gap.heavier, 0);
}

TEST(LatestSafeLaunch, IsNearTheShortestStepWithABudget) {
  Gap gap = measure(/*budgeted=*/true, 2, 3000);
  EXPECT_EQ(gap.longer, 0);
  EXPECT_LE(gap.heavier, 94);
  EXPECT_LE(gap.meanHeld, 0.0092);
  EXPECT_LE(gap.maxHeld, 0.85);
}

TEST(LatestSafeLaunch, LaunchesWhileTheWorkBeforeTheUseHidesIt) {
  LaunchProblem problem = makeProblem({4, 4, 4, 4});
  problem.gathers.push_back({3, 1, 0, 3, 3});
  std::vector<Launch> launches = latestSafeLaunches(problem);
  EXPECT_EQ(launches[0].at, 2u);
  EXPECT_EQ(launches[0].limit, LaunchLimit::Duration);
  EXPECT_EQ(launches[0].stall, 0);
  problem.reserve = 0.5;
  EXPECT_EQ(latestSafeLaunches(problem)[0].at, 1u);
}

TEST(LatestSafeLaunch, ABusyLinkIsNotWaitedForWithMemory) {
  // Gathers take longer than compute: each is launched when the one before it
  // has come, and no earlier.
  LaunchProblem problem = makeProblem({0, 1, 0, 1, 0, 1});
  for (size_t use : {0, 2, 4})
    problem.gathers.push_back({5, 1, 0, use, use});
  std::vector<Launch> launches = latestSafeLaunches(problem);
  EXPECT_EQ(positionsOf(launches), (std::vector<size_t>{0, 1, 3}));
  EXPECT_EQ(launches[0].limit, LaunchLimit::StepBegin);
  EXPECT_EQ(launches[1].limit, LaunchLimit::Link);
  EXPECT_EQ(launches[1].stall, 4);
}

TEST(LatestSafeLaunch, SaysWhatLimitsIt) {
  LaunchProblem problem = makeProblem({4, 4, 4, 4});
  problem.live = {5, 9, 5, 5};
  problem.gathers.push_back({9, 2, 2, 3, 3});
  Launch launch = latestSafeLaunches(problem)[0];
  EXPECT_EQ(launch.at, 2u);
  EXPECT_EQ(launch.limit, LaunchLimit::Needs);
  EXPECT_EQ(launch.stall, 5);
  problem.gathers[0].earliest = 0;
  problem.budget = 10;
  launch = latestSafeLaunches(problem)[0];
  EXPECT_EQ(launch.at, 2u);
  EXPECT_EQ(launch.limit, LaunchLimit::Budget);
  EXPECT_EQ(launch.excess, 11);
}

TEST(LatestSafeLaunch, FSDP2IsOneAheadWithinAPhase) {
  LaunchProblem problem = makeProblem({1, 1, 1, 1, 1});
  for (size_t use : {0, 2, 4})
    problem.gathers.push_back({1, 1, 0, use, use, use == 4});
  std::vector<Launch> launches = fsdp2Launches(problem);
  EXPECT_EQ(positionsOf(launches), (std::vector<size_t>{0, 1, 4}));
  EXPECT_EQ(launches[1].limit, LaunchLimit::FSDP2);
  EXPECT_EQ(launches[2].stall, 1);
}

} // namespace
