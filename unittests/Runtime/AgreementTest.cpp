//===- AgreementTest.cpp - what ranks tell each other between steps -------===//
#include "fsdp/Runtime/Agreement.h"
#include "Support/Fixtures.h"
#include "fsdp/Runtime/LocalStore.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <thread>

namespace fsdp::test {
namespace {

using namespace runtime;
using namespace std::chrono_literals;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::UnorderedElementsAre;

TEST(Agreement, EveryRankGetsTheWordsOfAll) {
  uint16_t port = LocalStore(3).port();
  auto errors = forkRanks(3, [&](int64_t rank) {
    Rendezvous rendezvous({{rank, 3, "127.0.0.1", port}});
    Agreement agreement(rendezvous);
    for (uint64_t round = 0; round < 2000; ++round) {
      if (round % 500 == uint64_t(rank) * 7)
        std::this_thread::sleep_for(2ms);
      std::vector<uint64_t> words =
          agreement.exchange(10 * round + uint64_t(rank), 60s);
      for (uint64_t r = 0; r < 3; ++r)
        if (words.at(r) != 10 * round + r)
          throw std::runtime_error("wrong word");
    }
    rendezvous.exchange("before a rank ends");
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST(Agreement, NamesTheRanksThatDoNotCome) {
  uint16_t port = LocalStore(3).port();
  auto errors = forkRanks(3, [&](int64_t rank) {
    Rendezvous rendezvous({{rank, 3, "127.0.0.1", port}});
    Agreement agreement(rendezvous);
    agreement.exchange(0, 60s);
    std::string message = "none";
    if (rank == 0)
      try {
        agreement.exchange(0, 1s);
      } catch (const std::exception &error) {
        message = error.what();
      }
    rendezvous.exchange("rank 0 has failed");
    if (rank == 0)
      throw std::runtime_error(message);
  });
  EXPECT_THAT(errors,
              UnorderedElementsAre(
                  HasSubstr("ranks 1, 2 did not come to call 2 of the step "
                            "within 1 s; expected as many batches on every "
                            "rank"),
                  IsEmpty(), IsEmpty()));
}

TEST(Agreement, NamesARankThatEnded) {
  uint16_t port = LocalStore(2).port();
  auto errors = forkRanks(2, [&](int64_t rank) {
    Rendezvous rendezvous({{rank, 2, "127.0.0.1", port}});
    Agreement agreement(rendezvous);
    agreement.exchange(0, 60s);
    if (rank == 0)
      agreement.exchange(0, 60s);
  });
  EXPECT_THAT(errors[0], HasSubstr(") ended after 1 calls of the step, this "
                                   "rank makes call 2"));
}

TEST(Agreement, OneRankAgreesWithItself) {
  Rendezvous alone(std::nullopt);
  EXPECT_THAT(Agreement(alone).exchange(5, 1s), ElementsAre(5));
}

} // namespace
} // namespace fsdp::test
