//===- AgreementTest.cpp - what ranks tell each other between steps -------===//
#include "fsdp/Runtime/Launch/Agreement.h"
#include "Support/Fixtures.h"
#include "fsdp/Runtime/Launch/LocalStore.h"

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

class AgreementTest : public testing::TestWithParam<Backend> {};

TEST_P(AgreementTest, EveryRankGetsTheWordsOfAll) {
  uint16_t port = LocalStore(3).port();
  auto errors = forkRanks(3, [&](int64_t rank) {
    Rendezvous rendezvous({{rank, 3, "127.0.0.1", port}});
    auto agreement = makeAgreement(GetParam(), rendezvous, 60s);
    uint64_t rounds = GetParam() == Backend::Shm ? 2000 : 200;
    for (uint64_t round = 0; round < rounds; ++round) {
      if (round % (rounds / 4) == uint64_t(rank) * 7)
        std::this_thread::sleep_for(2ms);
      // All bits count.
      std::vector<uint64_t> words =
          agreement->exchange(~(10 * round + uint64_t(rank)));
      for (uint64_t r = 0; r < 3; ++r)
        if (words.at(r) != ~(10 * round + r))
          throw std::runtime_error("wrong word");
    }
    rendezvous.exchange("before a rank ends");
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST_P(AgreementTest, NamesTheRanksThatDoNotCome) {
  uint16_t port = LocalStore(3).port();
  auto errors = forkRanks(3, [&](int64_t rank) {
    Rendezvous rendezvous({{rank, 3, "127.0.0.1", port}});
    auto agreement = makeAgreement(GetParam(), rendezvous, 1s);
    agreement->exchange(0);
    std::string message = "none";
    if (rank == 0)
      try {
        agreement->exchange(0);
      } catch (const std::exception &error) {
        message = error.what();
      }
    rendezvous.exchange("rank 0 has failed");
    if (rank == 0)
      throw std::runtime_error(message);
  });
  std::string expected =
      GetParam() == Backend::Shm
          ? "ranks 1, 2 did not come to call 2 of the step within 1 s"
          : "call of the step (collective 2 of communicator \"agreement\") has "
            "not finished after 1 s; ranks 1, 2 have not come to it";
  EXPECT_THAT(errors, UnorderedElementsAre(
                          HasSubstr(expected +
                                    "; expected as many batches on every rank"),
                          IsEmpty(), IsEmpty()));
}

TEST_P(AgreementTest, NamesARankThatEnded) {
  uint16_t port = LocalStore(2).port();
  auto errors = forkRanks(2, [&](int64_t rank) {
    Rendezvous rendezvous({{rank, 2, "127.0.0.1", port}});
    auto agreement = makeAgreement(GetParam(), rendezvous, 60s);
    agreement->exchange(0);
    if (rank == 0)
      agreement->exchange(0);
  });
  EXPECT_THAT(errors[0],
              HasSubstr(GetParam() == Backend::Shm
                            ? ") ended after 1 calls of the step, this rank "
                              "makes call 2"
                            : "call of the step (collective 2 of communicator "
                              "\"agreement\"): "));
}

TEST_P(AgreementTest, OneRankAgreesWithItself) {
  Rendezvous alone(std::nullopt);
  auto agreement = makeAgreement(GetParam(), alone, 1s);
  EXPECT_THAT(agreement->exchange(5), ElementsAre(5));
}

INSTANTIATE_TEST_SUITE_P(Backends, AgreementTest,
                         testing::Values(Backend::Shm, Backend::Gloo),
                         [](const auto &info) {
                           return info.param == Backend::Shm ? "Shm" : "Gloo";
                         });

} // namespace
} // namespace fsdp::test
