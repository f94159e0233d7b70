//===- RendezvousTest.cpp - how ranks that others started find each other -===//
#include "fsdp/Runtime/Launch/Rendezvous.h"
#include "Support/Fixtures.h"
#include "fsdp/Runtime/Collectives/GlooTransport.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Launch/LocalStore.h"

#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

namespace fsdp::test {
namespace {

using namespace runtime;
using testing::Each;
using testing::IsEmpty;

/// Gathers that all ranks are there.
void expectAll(Transport &transport) {
  auto comm = transport.connect("all", {0, 1});
  at::Tensor sum = at::ones({4});
  comm->allReduce("sum", sum, ReduceOp::Sum)();
  if (sum[0].item<double>() != 2)
    throw std::runtime_error("wrong sum");
}

TEST(Rendezvous, GivesAStoreToEachTransport) {
  uint16_t port = LocalStore(2).port();
  auto errors = forkRanks(2, [&](int64_t rank) {
    // As two plans of one process have them, one after the other.
    Rendezvous first({{rank, 2, "127.0.0.1", port}});
    Rendezvous second({{rank, 2, "127.0.0.1", port}});
    for (Rendezvous *rendezvous : {&first, &second}) {
      auto transport = makeGlooTransport(rendezvous->connectStore(), rank, 2,
                                         std::chrono::seconds(20));
      if (!transport->failure().empty())
        throw std::runtime_error("the store is not new");
      expectAll(*transport);
      transport->fail("done");
    }
    second.exchange("before rank 0 ends, which serves the store");
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST(Rendezvous, MakesGroupsOfRanks) {
  uint16_t port = LocalStore(4).port();
  auto errors = forkRanks(4, [&](int64_t rank) {
    Rendezvous all({{rank, 4, "127.0.0.1", port}});
    std::string own = std::to_string(rank);
    Rendezvous group(all, {rank % 2, rank % 2 + 2});
    auto expect = [](const auto &got, const auto &want) {
      if (got != want)
        throw std::runtime_error("expected " + testing::PrintToString(want) +
                                 ", got " + testing::PrintToString(got));
    };
    expect(group.rank(), rank / 2);
    expect(group.worldSize(), 2);
    bool even = rank % 2 == 0;
    // Groups need not exchange equally often.
    for (int64_t more = rank % 2; more > 0; --more)
      expect(group.exchange("more").size(), size_t(2));
    expect(all.exchange(own), std::vector<std::string>{"0", "1", "2", "3"});
    expect(group.exchange(own), even ? std::vector<std::string>{"0", "2"}
                                     : std::vector<std::string>{"1", "3"});
    auto transport = makeGlooTransport(group.connectStore(), group.rank(), 2,
                                       std::chrono::seconds(20));
    expectAll(*transport);
    std::string text = "rank 1 died at step 1; ranks 0, 1 wait, rank 7 not";
    expect(group.numberedInJob(text),
           even ? "rank 2 died at step 1; ranks 0, 2 wait, rank 7 not"
                : "rank 3 died at step 1; ranks 1, 3 wait, rank 7 not");
    expect(all.numberedInJob(text), text);
    all.exchange("before rank 0 ends, which serves the store");
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST(Rendezvous, RefusesAGroupWithoutTheRank) {
  Rendezvous alone(std::nullopt);
  EXPECT_THROW(Rendezvous(alone, {1, 2}), InputError);
}

// One of the two is refused; the other one ends, too, and comes no more.
TEST(Rendezvous, DoesNotWaitForARankThatIsThereTwice) {
  uint16_t port = LocalStore(2).port();
  auto errors = forkRanks(3, [&](int64_t process) {
    Rendezvous rendezvous({{process == 0 ? 0 : 1, 2, "127.0.0.1", port}}, {},
                          std::chrono::seconds(60));
    if (process == 0)
      rendezvous.exchange("");
  });
  std::string twice = "two processes are rank 1 at 127.0.0.1:";
  EXPECT_THAT(errors[0], testing::HasSubstr(twice));
  EXPECT_THAT(errors[1] + errors[2], testing::HasSubstr(twice));
}

TEST(Rendezvous, GivesALoneRankAStore) {
  Rendezvous alone(std::nullopt);
  auto transport =
      makeGlooTransport(alone.connectStore(), 0, 1, std::chrono::seconds(1));
  transport->fail("no more data");
  EXPECT_EQ(transport->failure(), "rank 0: no more data");
}

} // namespace
} // namespace fsdp::test
