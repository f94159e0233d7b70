//===- SampleOrderTest.cpp - orders are bijections, mixtures are even -----===//
#include "fsdp/Runtime/Files/SampleOrder.h"
#include "fsdp/Runtime/Error.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>
#include <vector>

namespace fsdp::test {
namespace {

using runtime::Permutation;
using runtime::SampleOrder;

/// Whether every number below `size` is met once.
bool isBijection(uint64_t size, uint64_t key) {
  Permutation permutation(size, key);
  std::vector<bool> seen(size);
  for (uint64_t i = 0; i < size; ++i) {
    uint64_t to = permutation(i);
    if (to >= size || seen[to])
      return false;
    seen[to] = true;
  }
  return true;
}

TEST(Permutation, IsABijectionOfEverySize) {
  for (uint64_t size = 1; size <= 600; ++size)
    for (uint64_t key : {0, 1, 12345})
      EXPECT_TRUE(isBijection(size, key)) << size << " " << key;
  // Around squares, and far from them.
  for (uint64_t size : {65535, 65536, 65537, 65792, 65793, 100000, 1000003})
    EXPECT_TRUE(isBijection(size, 7)) << size;
}

TEST(Permutation, StaysWithinTheLargestSizes) {
  for (uint64_t size :
       {uint64_t(INT64_MAX), uint64_t(INT64_MAX) - 1, uint64_t(1) << 62,
        (uint64_t(1) << 62) + 1, uint64_t(3037000500) * 3037000500}) {
    Permutation permutation(size, 1);
    std::set<uint64_t> seen;
    for (uint64_t i = 0; i < 1000; ++i)
      for (uint64_t from : {i, size - 1 - i}) {
        EXPECT_LT(permutation(from), size);
        seen.insert(permutation(from));
      }
    EXPECT_EQ(seen.size(), 2000u);
  }
}

/// Runs of other versions, and on other machines, must go on in this order.
TEST(Permutation, IsTheSameForever) {
  auto first = [](uint64_t size, uint64_t key) {
    std::vector<uint64_t> values;
    for (uint64_t i = 0; i < 8; ++i)
      values.push_back(Permutation(size, key)(i));
    return values;
  };
  EXPECT_EQ(first(10, 0), (std::vector<uint64_t>{0, 7, 3, 9, 8, 4, 2, 6}));
  EXPECT_EQ(first(uint64_t(1) << 40, 42),
            (std::vector<uint64_t>{410890490657, 831110506073, 154161638927,
                                   785905812960, 413342262546, 459286068207,
                                   813803796557, 737387973803}));
}

TEST(Permutation, PutsEveryNumberEverywhere) {
  constexpr uint64_t kSize = 10, kKeys = 20000;
  std::map<std::pair<uint64_t, uint64_t>, int64_t> counts;
  for (uint64_t key = 0; key < kKeys; ++key) {
    Permutation permutation(kSize, runtime::mixBits(key));
    for (uint64_t i = 0; i < kSize; ++i)
      ++counts[{i, permutation(i)}];
  }
  // Five standard deviations of a binomial count, over 100 of them.
  double mean = double(kKeys) / kSize;
  double bound = 5 * std::sqrt(mean * (1 - 1.0 / kSize));
  for (uint64_t i = 0; i < kSize; ++i)
    for (uint64_t j = 0; j < kSize; ++j)
      EXPECT_LT(std::abs(double(counts[{i, j}]) - mean), bound)
          << i << " to " << j;
}

std::vector<std::pair<size_t, int64_t>> take(const SampleOrder &order,
                                             int64_t begin, int64_t end) {
  std::vector<std::pair<size_t, int64_t>> places;
  for (int64_t i = begin; i < end; ++i)
    places.emplace_back(order.at(i).source, order.at(i).sample);
  return places;
}

TEST(SampleOrder, TakesSourcesOneAfterAnother) {
  SampleOrder order({3, 2}, {}, std::nullopt);
  using Places = std::vector<std::pair<size_t, int64_t>>;
  EXPECT_EQ(take(order, 0, 7),
            (Places{{0, 0}, {0, 1}, {0, 2}, {1, 0}, {1, 1}, {0, 0}, {0, 1}}));
}

TEST(SampleOrder, PermutesEachEpochAnew) {
  SampleOrder order({60, 40}, {}, 9);
  auto first = take(order, 0, 100), second = take(order, 100, 200);
  EXPECT_NE(first, second);
  EXPECT_NE(first, take(SampleOrder({60, 40}, {}, 10), 0, 100));
  EXPECT_EQ(first, take(SampleOrder({60, 40}, {}, 9), 0, 100));
  for (auto places : {first, second}) {
    std::sort(places.begin(), places.end());
    EXPECT_EQ(places, take(SampleOrder({60, 40}, {}, std::nullopt), 0, 100));
  }
}

TEST(SampleOrder, MixesByWeight) {
  for (std::vector<int64_t> weights : {std::vector<int64_t>{7, 3},
                                       {1, 1},
                                       {999, 1},
                                       {5, 3, 2},
                                       {1, 2, 3, 4, 5},
                                       {300000, 700000},
                                       {1, 1, 1, 1, 1, 1, 93}}) {
    std::vector<int64_t> sizes(weights.size(), 1 << 20);
    SampleOrder order(sizes, weights, std::nullopt);
    int64_t sum = 0;
    for (int64_t weight : weights)
      sum += weight;
    std::vector<int64_t> counts(weights.size());
    for (int64_t i = 0; i < 3000; ++i) {
      SampleOrder::Place place = order.at(i);
      // Those of a source come in their order, without a gap.
      EXPECT_EQ(place.sample, counts[place.source]++);
      for (size_t s = 0; s < weights.size(); ++s) {
        double share = double(weights[s]) * double(i + 1) / double(sum);
        // Less than one ahead of its share; behind by what others are ahead.
        EXPECT_LT(double(counts[s]) - share, 1);
        EXPECT_LT(share - double(counts[s]), double(weights.size()) - 1 + 1e-9);
      }
    }
  }
}

TEST(SampleOrder, RepeatsSourcesThatEndFirst) {
  SampleOrder order({2, 1000}, {1, 1}, 4);
  std::vector<int64_t> small;
  std::set<int64_t> large;
  for (int64_t i = 0; i < 2000; ++i) {
    SampleOrder::Place place = order.at(i);
    if (place.source == 0)
      small.push_back(place.sample);
    else
      large.insert(place.sample);
  }
  ASSERT_EQ(small.size(), 1000u);
  EXPECT_EQ(large.size(), 1000u); // once each
  bool differ = false;
  for (size_t epoch = 0; epoch < 500; ++epoch) {
    EXPECT_NE(small[2 * epoch], small[2 * epoch + 1]);
    differ |= small[2 * epoch] != small[0];
  }
  EXPECT_TRUE(differ);
}

TEST(SampleOrder, RefusesWhatItCannotCount) {
  EXPECT_THROW(SampleOrder({INT64_MAX, 1}, {}, std::nullopt),
               runtime::InputError);
  EXPECT_THROW(SampleOrder({1, 1}, {999'999, 2}, std::nullopt),
               runtime::InputError);
  // What counts is the ratio.
  EXPECT_NO_THROW(
      SampleOrder({1, 1}, {7'000'000'000, 3'000'000'000}, std::nullopt));
}

} // namespace
} // namespace fsdp::test
