//===- OptimalBucketsTest.cpp - the partitions against all of them --------===//
#include "OptimalBuckets.h"
#include "gtest/gtest.h"

#include <algorithm>
#include <iostream>
#include <random>

using namespace mlir::fsdp;

namespace {
constexpr unsigned kSeed = 20261122;

/// Blocks of `length` items that are alike, between other items.
BucketProblem makeProblem(std::mt19937 &random, int32_t before, int32_t length,
                          int32_t blocks, int32_t after) {
  auto uniform = [&](double low, double high) {
    return std::uniform_real_distribution<>(low, high)(random);
  };
  auto bytes = [&](int64_t most) {
    return std::uniform_int_distribution<int64_t>(1, most)(random);
  };
  auto chance = [&](double p) { return uniform(0, 1) < p; };
  auto draw = [&](int32_t kind) {
    BucketItem item;
    item.kind = kind;
    item.gatherBytes = double(bytes(100));
    item.reduceBytes = chance(0.9) ? item.gatherBytes * 2 : 0;
    item.inBackward = chance(0.8);
    item.gathered = int64_t(item.gatherBytes) * (chance(0.9) ? 1 : 0);
    item.gradient = item.reduceBytes > 0 ? int64_t(item.gatherBytes) : 0;
    return item;
  };
  BucketProblem problem;
  int32_t kind = 0;
  auto drawSome = [&](int32_t count) {
    std::vector<BucketItem> items;
    for (int32_t i = 0; i < count; ++i) {
      kind += chance(0.15) ? 1 : 0;
      items.push_back(draw(kind));
    }
    return items;
  };
  auto append = [&](const std::vector<BucketItem> &items) {
    problem.items.insert(problem.items.end(), items.begin(), items.end());
  };
  append(drawSome(before));
  ++kind;
  std::vector<BucketItem> block = drawSome(length);
  std::vector<double> durations;
  for (int32_t i = 0; i < length; ++i)
    durations.push_back(uniform(0.1, 2));
  for (int32_t b = 0; b < blocks; ++b)
    append(block);
  ++kind;
  append(drawSome(after));

  auto count = int32_t(problem.items.size());
  std::vector<double> duration;
  for (int32_t i = 0; i < count; ++i)
    duration.push_back(i >= before && i < before + length * blocks
                           ? durations[size_t((i - before) % length)]
                           : uniform(0.1, 2));
  double time = 0;
  int64_t kept = 100;
  for (int32_t i = 0; i < count; ++i) {
    BucketItem &item = problem.items[size_t(i)];
    item.forwardUse = time;
    item.forwardEnd = time += duration[size_t(i)];
    item.forwardPeak = kept += bytes(20);
  }
  problem.backwardBegin = time;
  for (int32_t i = count; i-- > 0;) {
    BucketItem &item = problem.items[size_t(i)];
    item.backwardUse = time;
    item.reduceBegin = time += 2 * duration[size_t(i)];
    item.backwardPeak = item.forwardPeak + bytes(20);
  }
  problem.end = time;
  problem.otherPeak = bytes(2 * kept);
  problem.gather = {uniform(0, 1), uniform(0, 0.04)};
  problem.again = {uniform(0, 1), uniform(0, 0.04)};
  problem.reduce = {uniform(0, 1), uniform(0, 0.04)};
  problem.slowdown = chance(0.5) ? uniform(0, 0.2) : 0;
  problem.reducesInFlight = int32_t(bytes(kMostReducesInFlight));
  problem.mostBytes = chance(0.5) ? uniform(50, 400) : 1e9;
  return problem;
}

bool isAllowed(const BucketProblem &problem, int32_t begin, int32_t end) {
  double bytes = 0;
  for (int32_t i = begin; i < end; ++i) {
    if (problem.items[size_t(i)].kind != problem.items[size_t(begin)].kind)
      return false;
    bytes += problem.items[size_t(i)].gatherBytes;
  }
  return end == begin + 1 || bytes <= problem.mostBytes;
}

/// Every contiguous partition.
std::vector<std::vector<int32_t>> allPartitions(const BucketProblem &problem) {
  auto count = int32_t(problem.items.size());
  std::vector<std::vector<int32_t>> result;
  for (uint32_t cuts = 0; cuts < 1U << (count - 1); ++cuts) {
    std::vector<int32_t> begins = {0};
    bool allowed = true;
    for (int32_t i = 1; i <= count; ++i)
      if (i == count || (cuts >> (i - 1) & 1)) {
        allowed = allowed && isAllowed(problem, begins.back(), i);
        if (i < count)
          begins.push_back(i);
      }
    if (allowed)
      result.push_back(begins);
  }
  return result;
}

std::vector<BucketPartition> bruteForce(const BucketProblem &problem) {
  std::vector<BucketPartition> all;
  for (const auto &begins : allPartitions(problem))
    all.push_back(evaluateBuckets(problem, begins));
  std::sort(all.begin(), all.end(), [](const auto &a, const auto &b) {
    return std::pair(a.exposed, a.peak) < std::pair(b.exposed, b.peak);
  });
  std::vector<BucketPartition> front;
  for (const BucketPartition &partition : all)
    if (front.empty() || partition.peak < front.back().peak)
      front.push_back(partition);
  return front;
}

/// The header's model, played from the first gather to the last reduction.
BucketPartition play(const BucketProblem &problem,
                     const std::vector<int32_t> &begins) {
  struct Part {
    bool forward = false, backward = false;
    double bytes = 0, reduced = 0, use = 1e30, end = 0, again = 1e30, ready = 0;
    int64_t gathered = 0, gradient = 0, forwardPeak = 0, backwardPeak = 0;
  };
  std::vector<Part> parts;
  for (size_t i = 0; i < problem.items.size(); ++i) {
    if (std::find(begins.begin(), begins.end(), int32_t(i)) != begins.end())
      parts.emplace_back();
    const BucketItem &item = problem.items[i];
    Part &part = parts.back();
    part.forward |= item.inForward;
    part.backward |= item.inBackward;
    part.bytes += item.gatherBytes;
    part.reduced += item.reduceBytes;
    part.use = std::min(part.use, item.forwardUse);
    part.end = std::max(part.end, item.forwardEnd);
    if (item.inBackward)
      part.again = std::min(part.again, item.backwardUse);
    if (item.reduceBytes > 0)
      part.ready = std::max(part.ready, item.reduceBegin);
    part.gathered += item.gathered;
    part.gradient += item.gradient;
    part.forwardPeak = std::max(part.forwardPeak, item.forwardPeak);
    part.backwardPeak = std::max(part.backwardPeak, item.backwardPeak);
  }

  double link = 0, waited = 0, all = 0;
  for (const Part &part : parts) {
    link += problem.gather.of(part.bytes);
    all += problem.gather.of(part.bytes);
    waited += std::max(0.0, link - (part.use + waited));
  }
  double gathers = 0, reduces = 0, late = 0, work = 0;
  std::vector<double> ends; // of reductions
  auto inFlight = size_t(problem.reducesInFlight);
  for (size_t b = parts.size(); b-- > 0;) {
    const Part &part = parts[b];
    if (part.backward) {
      double seconds = problem.again.of(part.bytes);
      gathers = std::max(gathers, part.end) + seconds;
      late = std::max(late, gathers - part.again);
      work += seconds;
    }
    if (part.reduced > 0) {
      if (ends.size() >= inFlight)
        late = std::max(late, ends[ends.size() - inFlight] - part.ready);
      double seconds = problem.reduce.of(part.reduced);
      reduces = std::max(reduces, part.ready + late) + seconds;
      ends.push_back(reduces);
      work += seconds;
    }
  }
  late = std::max(late, reduces - problem.end);

  BucketPartition result;
  result.exposed =
      waited + problem.slowdown * (all + work) +
      std::max({0.0, late, work - (problem.end - problem.backwardBegin)});
  result.peak = problem.otherPeak;
  for (size_t b = 0; b < parts.size(); ++b) {
    int64_t forward = parts[b].forwardPeak + parts[b].gathered;
    if (b + 1 < parts.size())
      forward += parts[b + 1].gathered;
    auto again = [](const Part &part) {
      return part.backward ? part.gathered : 0;
    };
    int64_t backward =
        parts[b].backwardPeak + again(parts[b]) + parts[b].gradient;
    if (b > 0)
      backward += again(parts[b - 1]);
    int32_t left = problem.reducesInFlight;
    for (size_t other = b + 1; other < parts.size() && left > 0; ++other)
      if (parts[other].reduced > 0) {
        backward += parts[other].gradient;
        --left;
      }
    result.peak = std::max({result.peak, forward, backward});
  }
  return result;
}

TEST(OptimalBuckets, EvaluatesTheModel) {
  std::cout << "seed " << kSeed << '\n';
  std::mt19937 random(kSeed);
  for (int round = 0; round < 60; ++round) {
    BucketProblem problem = makeProblem(random, 2, 3, 2, 1);
    for (const auto &begins : allPartitions(problem)) {
      BucketPartition expected = play(problem, begins);
      BucketPartition got = evaluateBuckets(problem, begins);
      ASSERT_NEAR(got.exposed, expected.exposed, 1e-9 * problem.end) << round;
      ASSERT_EQ(got.peak, expected.peak) << round;
    }
  }
}

TEST(OptimalBuckets, FrontIsThatOfAllPartitions) {
  std::cout << "seed " << kSeed << '\n';
  std::mt19937 random(kSeed);
  size_t points = 0;
  for (int round = 0; round < 300; ++round) {
    int32_t blocks = 1 + round % 2;
    BucketProblem problem = makeProblem(random, round % 3, 3, blocks, 1);
    std::vector<BucketPartition> expected = bruteForce(problem);
    std::vector<BucketPartition> got = findBuckets(problem, 0);
    points += expected.size();
    ASSERT_EQ(got.size(), expected.size()) << round;
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_NEAR(got[i].exposed, expected[i].exposed, 1e-9 * problem.end);
      EXPECT_EQ(got[i].peak, expected[i].peak) << round;
      BucketPartition again = evaluateBuckets(problem, got[i].begins);
      EXPECT_EQ(again.exposed, got[i].exposed) << round;
      EXPECT_EQ(again.peak, got[i].peak) << round;
    }
  }
  std::cout << points << " partitions on the fronts\n";
  EXPECT_GT(points, 600U);
}

TEST(OptimalBuckets, MissesNothingByMoreThanEpsilon) {
  std::cout << "seed " << kSeed << '\n';
  std::mt19937 random(kSeed);
  double worst = 0;
  for (int round = 0; round < 60; ++round) {
    BucketProblem problem = makeProblem(random, 1, 3, 2, 1);
    constexpr double kEpsilon = 0.02;
    int64_t bytes = problem.otherPeak;
    for (const BucketItem &item : problem.items)
      bytes += item.gathered + item.gradient;
    std::vector<BucketPartition> got = findBuckets(problem, kEpsilon);
    for (const BucketPartition &point : bruteForce(problem)) {
      double missed = 1;
      for (const BucketPartition &near : got)
        missed = std::min(
            missed, std::max((near.exposed - point.exposed) / problem.end,
                             double(near.peak - point.peak) / double(bytes)));
      worst = std::max(worst, missed);
      EXPECT_LE(missed, kEpsilon) << round;
    }
  }
  std::cout << "missed by at most " << worst << '\n';
}

TEST(OptimalBuckets, FindsBlocks) {
  std::mt19937 random(kSeed);
  for (int round = 0; round < 20; ++round) {
    BucketProblem problem = makeProblem(random, 2, 5, 12, 3);
    Repetition blocks = findRepetition(problem.items);
    EXPECT_EQ(blocks.length, 5);
    EXPECT_EQ(blocks.count, 12);
    EXPECT_EQ(blocks.begin, 2);
  }
  EXPECT_EQ(findRepetition({}).count, 0);
  EXPECT_EQ(findRepetition({BucketItem(), BucketItem()}).count, 2);
}

/// Blocks that are solved once are worse than the search over all by a gap that
/// is printed; their partitions are valid.
TEST(OptimalBuckets, RepeatsTheBucketsOfBlocks) {
  std::cout << "seed " << kSeed << '\n';
  std::mt19937 random(kSeed);
  double sum = 0, worst = 0;
  constexpr int kRounds = 10;
  for (int round = 0; round < kRounds; ++round) {
    BucketProblem problem = makeProblem(random, 1, 3, 9, 1);
    std::vector<BucketPartition> all = findBuckets(problem, 1e-3);
    std::vector<BucketPartition> repeated = findBucketsOfBlocks(problem, 1e-3);
    ASSERT_FALSE(repeated.empty());
    for (const BucketPartition &partition : repeated) {
      ASSERT_EQ(partition.begins.front(), 0);
      ASSERT_TRUE(
          std::is_sorted(partition.begins.begin(), partition.begins.end()));
      for (size_t b = 0; b < partition.begins.size(); ++b) {
        int32_t end = b + 1 < partition.begins.size()
                          ? partition.begins[b + 1]
                          : int32_t(problem.items.size());
        ASSERT_LT(partition.begins[b], end);
        EXPECT_TRUE(isAllowed(problem, partition.begins[b], end)) << round;
      }
    }
    double gap = (repeated.front().exposed - all.front().exposed) / problem.end;
    sum += gap;
    worst = std::max(worst, gap);
  }
  std::cout << "fastest: slower by " << 100 * sum / kRounds
            << " % of the step on average, " << 100 * worst << " % at most\n";
  EXPECT_LE(sum / kRounds, 0.02);
  EXPECT_LE(worst, 0.1);
}
} // namespace
