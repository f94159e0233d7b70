//===- PlaceStoragesTest.cpp - layouts of random lives --------------------===//
#include "fsdp/Plan/Memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <random>

namespace fsdp::test {
namespace {

using namespace plan;

bool meet(const Storage &a, const Storage &b) {
  for (const Life &first : a.lives)
    for (const Life &second : b.lives)
      if (first.overlaps(second))
        return true;
  return false;
}

/// Every layout is what placing storages one after the other, each on top of
/// those it meets, gives for some order, or worse.
int64_t smallestArena(const Memory &memory) {
  const std::vector<Storage> &storages = memory.storages;
  std::vector<size_t> order(storages.size());
  std::iota(order.begin(), order.end(), 0);
  int64_t best = -1;
  do {
    std::vector<int64_t> ends(storages.size());
    int64_t bytes = 0;
    for (size_t i = 0; i < order.size(); ++i) {
      int64_t begin = 0;
      for (size_t j = 0; j < i; ++j)
        if (meet(storages[order[i]], storages[order[j]]))
          begin = std::max(begin, ends[order[j]]);
      ends[order[i]] = begin + storages[order[i]].bytes;
      bytes = std::max(bytes, ends[order[i]]);
    }
    best = best == -1 ? bytes : std::min(best, bytes);
  } while (std::next_permutation(order.begin(), order.end()));
  return best;
}

class RandomLives {
public:
  explicit RandomLives(uint64_t seed) : random(seed) {}

  int64_t draw(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  }
  Memory make(size_t count, int64_t positions, int64_t longest) {
    Memory memory;
    memory.positions = positions;
    for (size_t i = 0; i < count; ++i) {
      Storage storage;
      storage.bytes = kTensorAlign * draw(1, 16);
      int64_t first = draw(0, positions - 1);
      storage.lives = {
          {first, std::min(positions - 1, first + draw(0, longest))}};
      if (draw(0, 9) == 0 && storage.lives[0].last + 2 < positions)
        storage.lives.push_back({storage.lives[0].last + 2, positions - 1});
      memory.storages.push_back(storage);
    }
    return memory;
  }

private:
  std::mt19937_64 random;
};

void expectDisjoint(const Memory &memory, const Placement &placement) {
  const std::vector<Storage> &storages = memory.storages;
  ASSERT_EQ(placement.offsets.size(), storages.size());
  for (size_t i = 0; i < storages.size(); ++i) {
    int64_t begin = placement.offsets[i], end = begin + storages[i].bytes;
    ASSERT_GE(begin, 0);
    ASSERT_EQ(begin % kTensorAlign, 0);
    ASSERT_LE(end, placement.bytes);
    for (size_t j = 0; j < i; ++j)
      if (begin < placement.offsets[j] + storages[j].bytes &&
          placement.offsets[j] < end) {
        ASSERT_FALSE(meet(storages[i], storages[j])) << i << " and " << j;
      }
  }
}

TEST(PlaceStorages, IsCloseToTheOptimum) {
  int64_t bytes = 0, optimum = 0, bound = 0;
  int optimal = 0;
  constexpr int kInstances = 300;
  for (int seed = 0; seed < kInstances; ++seed) {
    Memory memory = RandomLives(uint64_t(seed)).make(7, 12, 6);
    Placement placement = placeStorages(memory);
    expectDisjoint(memory, placement);
    int64_t best = smallestArena(memory);
    EXPECT_GE(placement.bytes, best);
    EXPECT_LE(placement.lowerBound, best);
    EXPECT_LE(placement.bytes, best + best / 2);
    bytes += placement.bytes;
    optimum += best;
    bound += placement.lowerBound;
    optimal += placement.bytes == best;
  }
  std::printf("%d of %d layouts optimal; all together %.2f %% above the "
              "optimum, which is %.2f %% above the lower bound\n",
              optimal, kInstances, 100. * double(bytes - optimum) / optimum,
              100. * double(optimum - bound) / bound);
  EXPECT_GE(optimal, kInstances * 9 / 10);
}

TEST(PlaceStorages, PacksAStackWithoutGaps) {
  // Activations of forward that backward takes in reverse, one temporary each.
  Memory memory;
  constexpr int64_t kLayers = 50;
  memory.positions = 2 * kLayers;
  for (int64_t i = 0; i < kLayers; ++i) {
    Storage saved, temporary;
    saved.bytes = kTensorAlign * (1 + i % 5);
    saved.lives = {{i, 2 * kLayers - 1 - i}};
    temporary.bytes = kTensorAlign * 7;
    temporary.lives = {{i, i}};
    memory.storages.push_back(saved);
    memory.storages.push_back(temporary);
  }
  Placement placement = placeStorages(memory);
  expectDisjoint(memory, placement);
  EXPECT_EQ(placement.bytes, placement.lowerBound);
}

TEST(PlaceStorages, PlacesMoreThanItComparesWithAllOthers) {
  Memory memory = RandomLives(1).make(9000, 20000, 40);
  Placement placement = placeStorages(memory);
  expectDisjoint(memory, placement);
  EXPECT_LE(placement.bytes, placement.lowerBound * 3 / 2);
  EXPECT_EQ(placement.offsets, placeStorages(memory).offsets);
}

TEST(PlaceStorages, OfNothingIsEmpty) {
  Memory memory;
  memory.positions = 3;
  Placement placement = placeStorages(memory);
  EXPECT_EQ(placement.bytes, 0);
  EXPECT_EQ(placement.lowerBound, 0);
}

} // namespace
} // namespace fsdp::test
