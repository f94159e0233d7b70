//===- PendingCollectivesTest.cpp - collectives that may have hung --------===//
#include "fsdp/Runtime/Collectives/PendingCollectives.h"

#include <gtest/gtest.h>

namespace fsdp::test {
namespace {

using namespace runtime;
using namespace std::chrono_literals;

struct PendingCollectivesTest : testing::Test {
  PendingCollectives pending;
  PendingCollectives::Clock::time_point start{};
  int64_t done = 0; ///< numbers up to this are

  void add(int64_t number, std::chrono::seconds at) {
    pending.add(
        {"what", "gather", number}, [this, number] { return number <= done; },
        start + at);
  }
  /// The number of the one that is late; 0: none is.
  int64_t overdue(std::chrono::seconds at) {
    auto late = pending.overdue(start + at, 10s);
    return late ? late->number : 0;
  }
};

TEST_F(PendingCollectivesTest, IsTheFirstThatIsNotDone) {
  add(1, 0s);
  add(2, 1s);
  add(3, 9s);
  EXPECT_EQ(pending.last().number, 3);
  EXPECT_EQ(overdue(9s), 0);
  EXPECT_EQ(overdue(10s), 1);
  done = 1;
  // The second had to wait for the first.
  EXPECT_EQ(overdue(11s), 0);
  EXPECT_EQ(overdue(20s), 0);
  EXPECT_EQ(overdue(21s), 2);
}

TEST_F(PendingCollectivesTest, TimeBeginsWhenOneIsAdded) {
  add(1, 0s);
  done = 1;
  EXPECT_EQ(overdue(100s), 0);
  EXPECT_TRUE(pending.empty());
  EXPECT_EQ(pending.last().number, 1);
  add(2, 200s);
  EXPECT_EQ(overdue(209s), 0);
  EXPECT_EQ(overdue(210s), 2);
  EXPECT_FALSE(pending.empty());
}

TEST_F(PendingCollectivesTest, AskNoMoreOnceDone) {
  int asked = 0;
  pending.add({"what", "gather", 1}, [&] { return ++asked > 0; }, start);
  EXPECT_EQ(overdue(1s), 0);
  EXPECT_EQ(overdue(2s), 0);
  EXPECT_EQ(asked, 1);
}

} // namespace
} // namespace fsdp::test
