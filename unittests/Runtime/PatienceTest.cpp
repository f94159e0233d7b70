//===- PatienceTest.cpp - how long ranks wait for each other --------------===//
#include "fsdp/Runtime/Collectives/Patience.h"
#include "fsdp/Runtime/Launch/TimeLimit.h"

#include <gmock/gmock.h>

using namespace fsdp::runtime;
using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::IsEmpty;

namespace fsdp::test {
namespace {

/// What is seen of ranks with the pids 100, 101, ….
struct Sights : RankSights {
  explicit Sights(size_t ranks) : ranks(ranks), obstacles(ranks) {}

  std::vector<RankSight> look() override { return ranks; }
  std::string obstacle(int64_t rank) override {
    return obstacles[size_t(rank)];
  }
  int32_t process(int64_t rank) override { return 100 + int32_t(rank); }
  std::optional<Blindness> blindness() override { return blind; }
  void addWaits(int) override {}

  std::vector<RankSight> ranks;
  std::vector<std::string> obstacles;
  std::optional<Blindness> blind;
};

class StallTest : public testing::Test {
protected:
  std::optional<Stall::Cause> at(std::chrono::milliseconds time) {
    return tick(time);
  }
  /// Asks every second until then, as who waits does.
  std::optional<Stall::Cause> tick(std::chrono::milliseconds time,
                                   bool always = false) {
    for (; asked + 1s < time; asked += 1s)
      stall.overdue({}, always, begin + asked + 1s);
    asked = time;
    return stall.overdue({}, always, begin + time);
  }
  std::string textAt(std::chrono::milliseconds time) {
    std::optional<Stall::Cause> cause = at(time);
    return cause ? cause->text : "";
  }

  const Stall::Clock::time_point begin = Stall::Clock::now();
  Patience patience{10s, [](const Position &position) {
                      return " at " + std::to_string(position.step.load());
                    }};
  Sights sights{3};
  Stall stall{sights, patience, begin};
  std::chrono::milliseconds asked{0};
};

TEST(Patience, IsFiveMinutesThenTwoOrTwentySteps) {
  Patience patience;
  EXPECT_EQ(patience.deadline(), 5min);
  patience.stepTook(1s);
  EXPECT_EQ(patience.deadline(), 2min);
  patience.stepTook(30s);
  patience.stepTook(2s);
  EXPECT_EQ(patience.deadline(), 10min);
  Patience given(3s);
  given.stepTook(30s);
  EXPECT_EQ(given.deadline(), 3s);
}

TEST_F(StallTest, NamesWhoDoesNotWait) {
  sights.ranks[0].waits = sights.ranks[2].waits = true;
  sights.ranks[1].step = 4;
  EXPECT_EQ(textAt(5s), "");
  EXPECT_EQ(textAt(9s), "");
  std::optional<Stall::Cause> cause = at(10s);
  ASSERT_TRUE(cause);
  EXPECT_EQ(cause->text, "rank 1 has not moved for 10 s at 4");
  EXPECT_THAT(cause->processes, ElementsAre(101));
}

TEST_F(StallTest, BeginsAnewWhenAnybodyMoves) {
  sights.ranks[0].waits = true;
  for (int second = 1; second < 100; ++second) {
    // A first step, an evaluation, data, a save: whoever is at it.
    if (second % 8 == 0)
      ++sights.ranks[1].instruction;
    if (second % 8 == 4)
      ++sights.ranks[2].beats;
    EXPECT_EQ(textAt(std::chrono::seconds(second)), "") << second;
  }
  EXPECT_NE(textAt(200s), "");
}

TEST_F(StallTest, NamesAWaitingRankThatIsStopped) {
  for (RankSight &rank : sights.ranks)
    rank.waits = true;
  sights.obstacles[2] = "is stopped";
  EXPECT_EQ(textAt(9s), "");
  EXPECT_EQ(textAt(11s), "rank 2, which is stopped, has not moved for 10 s at "
                         "-1");
  sights.obstacles[2] = "";
  EXPECT_EQ(textAt(12s), "no rank has moved for 10 s: each waits for another");
}

TEST_F(StallTest, SaysHowManyOthersThereAre) {
  sights.ranks[2].waits = true;
  EXPECT_EQ(textAt(11s), "rank 0 has not moved for 10 s at -1, nor has "
                         "another");
  EXPECT_THAT(at(12s)->processes, ElementsAre(100, 101));
}

TEST_F(StallTest, NobodyWaitsForALongCall) {
  EXPECT_EQ(textAt(11s), "");
  EXPECT_EQ(textAt(100s), "");
  EXPECT_TRUE(tick(110s, /*always=*/true));
}

TEST_F(StallTest, DoesNotCountTheTimeOfAProcessThatWasSuspended) {
  sights.ranks[0].waits = true;
  EXPECT_EQ(textAt(8s), "");
  EXPECT_FALSE(stall.overdue({}, false, begin + 1h));
  EXPECT_FALSE(stall.overdue({}, false, begin + 1h + 1s));
  EXPECT_TRUE(stall.overdue({}, false, begin + 1h + 2s));
}

TEST_F(StallTest, SaysWhyNothingIsSeen) {
  sights.ranks[0].waits = true;
  sights.blind = RankSights::Blindness{"rank 0 serves no store", 0};
  EXPECT_EQ(textAt(11s), "rank 0 serves no store");
  EXPECT_THAT(at(12s)->processes, ElementsAre(100));
  sights.blind->rank.reset();
  EXPECT_THAT(at(13s)->processes, IsEmpty());
}

TEST(TimeLimit, KeepsTimeForTheLongestStepAndSave) {
  TimeLimit::Clock::time_point begin = TimeLimit::Clock::now();
  TimeLimit limit(100, begin);
  limit.stepTook(10s);
  limit.stepTook(2s);
  EXPECT_FALSE(limit.isNear(1, begin + 89s));
  EXPECT_TRUE(limit.isNear(1, begin + 91s));
  limit.saveTook(20s);
  EXPECT_TRUE(limit.isNear(1, begin + 71s));
  EXPECT_FALSE(limit.isNear(1, begin + 69s));
  EXPECT_TRUE(limit.isNear(2, begin + 51s));
  EXPECT_FALSE(limit.isNear(2, begin + 49s));
  TimeLimit none({}, begin);
  none.stepTook(10s);
  EXPECT_FALSE(none.isNear(1, begin + 1000h));
}

} // namespace
} // namespace fsdp::test
