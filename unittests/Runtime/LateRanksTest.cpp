//===- LateRanksTest.cpp - who has not come to a collective ---------------===//
#include "fsdp/Runtime/Collectives/LateRanks.h"

#include <gtest/gtest.h>

namespace fsdp::test {
namespace {

using namespace runtime;

TEST(LateRanks, NamesACollective) {
  CollectiveName name{"all_gather of unit \"layers.3\"", "gather", 412};
  EXPECT_EQ(name.text(), "all_gather of unit \"layers.3\" (collective 412 of "
                         "communicator \"gather\")");
  EXPECT_EQ(describeTimeout(name, std::chrono::minutes(10)),
            name.text() + " has not finished after 600 s");
}

TEST(LateRanks, NamesRanks) {
  EXPECT_EQ(nameRanks({}), "");
  EXPECT_EQ(nameRanks({2}), "rank 2");
  EXPECT_EQ(nameRanks({2, 5}), "ranks 2, 5");
}

TEST(LateRanks, NamesThoseBehindAndThoseSilent) {
  const std::vector<int64_t> ranks = {1, 2, 3, 5};
  EXPECT_EQ(describeLateRanks(7, ranks, {{1, 7}, {2, 6}, {3, 7}, {5, 0}}),
            "ranks 2, 5 have not come to it");
  EXPECT_EQ(describeLateRanks(7, ranks, {{1, 7}, {2, 6}, {5, 8}}),
            "rank 2 has not come to it; rank 3 does not answer");
  EXPECT_EQ(describeLateRanks(7, ranks, {{1, 7}, {2, 7}}),
            "ranks 3, 5 do not answer");
  EXPECT_EQ(describeLateRanks(7, ranks, {{1, 7}, {2, 7}, {3, 8}, {5, 7}}),
            "all its ranks have come to it");
}

TEST(LateRanks, IgnoresRanksOfOtherGroups) {
  EXPECT_EQ(describeLateRanks(2, {0, 1}, {{0, 2}, {1, 1}, {4, 0}}),
            "rank 1 has not come to it");
}

} // namespace
} // namespace fsdp::test
