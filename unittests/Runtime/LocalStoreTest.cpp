//===- LocalStoreTest.cpp - forked ranks that find each other -------------===//
#include "fsdp/Runtime/Launch/LocalStore.h"
#include "Support/Fixtures.h"
#include "fsdp/Runtime/Collectives/GlooTransport.h"
#include "fsdp/Runtime/Error.h"

#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <thread>

#include <unistd.h>

namespace fsdp::test {
namespace {

using namespace runtime;
using namespace std::chrono_literals;
using testing::Each;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr int64_t kRanks = 3;

/// Forks ranks with a transport over one LocalStore.
std::vector<std::string>
forkTransports(const std::function<void(Transport &)> &body) {
  LocalStore local(kRanks);
  return forkRanks(kRanks, [&](int64_t rank) {
    auto transport =
        makeGlooTransport(local.connect(rank, 60s), rank, kRanks, 60s);
    try {
      body(*transport);
    } catch (const AbortedError &) {
      local.leave();
      throw;
    } catch (const std::exception &error) {
      transport->fail(error.what());
      local.leave();
      throw;
    }
    local.leave();
  });
}

TEST(LocalStore, ConnectsForkedRanks) {
  auto errors = forkTransports([](Transport &transport) {
    auto comm = transport.connect("all", {0, 1, 2});
    at::Tensor sum = at::ones({1 << 16});
    comm->allReduce("sum", sum, ReduceOp::Sum)();
    if (sum.sum().item<double>() != double(kRanks) * (1 << 16))
      throw RunError("wrong sum");
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

// Whoever finds the port, and knows the keys but not the secret.
TEST(LocalStore, HeedsNobodyElse) {
  LocalStore local(kRanks);
  auto errors = forkRanks(kRanks, [&](int64_t rank) {
    auto transport =
        makeGlooTransport(local.connect(rank, 60s), rank, kRanks, 60s);
    auto comm = transport->connect("all", {0, 1, 2});
    at::Tensor sum = at::ones({8});
    comm->allReduce("first", sum, ReduceOp::Sum)();
    if (rank == 1) {
      c10d::TCPStoreOptions options;
      options.port = local.port();
      c10d::TCPStore foreign("127.0.0.1", options);
      for (const char *key : {"failure", "alarm", "left"})
        for (const char *prefix : {"", "/", "fsdp-run/"})
          foreign.set(std::string(prefix) + key, {'2'});
    }
    comm->allReduce("second", sum, ReduceOp::Sum)();
    if (sum[0].item<double>() != double(kRanks * kRanks))
      throw RunError("wrong sum");
    local.leave();
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST(LocalStore, LetsAWriteToADeadPeerFail) {
  LocalStore local(1);
  auto errors = forkRanks(1, [&](int64_t rank) {
    local.connect(rank);
    int ends[2];
    if (pipe(ends) != 0 || close(ends[0]) != 0)
      throw RunError("no pipe");
    if (write(ends[1], "", 1) != -1 || errno != EPIPE)
      throw RunError("the write did not fail");
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST(LocalStore, HasAPortOfItsOwn) {
  LocalStore first(2), second(2);
  EXPECT_GT(first.port(), 0);
  EXPECT_NE(first.port(), second.port());
}

// The others learn the cause even from the rank that serves the store.
class LocalStoreFailure : public testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(Ranks, LocalStoreFailure, testing::Values(0, 2));

TEST_P(LocalStoreFailure, IsToldToAll) {
  auto errors = forkTransports([&](Transport &transport) {
    auto comm = transport.connect("all", {0, 1, 2});
    at::Tensor sum = at::ones({8});
    comm->allReduce("first", sum, ReduceOp::Sum)();
    if (transport.rank() == GetParam()) {
      // Before the communicator closes its sockets, which the others see.
      transport.fail("no more data");
      throw RunError("no more data");
    }
    comm->allReduce("second", sum, ReduceOp::Sum)();
  });
  for (int64_t rank = 0; rank < kRanks; ++rank)
    EXPECT_THAT(
        errors[size_t(rank)],
        HasSubstr(rank == GetParam()
                      ? "no more data"
                      : "second (collective 2 of communicator \"all\"): rank " +
                            std::to_string(GetParam()) + ": no more data"));
}

TEST_P(LocalStoreFailure, ByASignalIsNoticed) {
  auto errors = forkTransports([&](Transport &transport) {
    auto comm = transport.connect("all", {0, 1, 2});
    at::Tensor sum = at::ones({8});
    comm->allReduce("first", sum, ReduceOp::Sum)();
    if (transport.rank() == GetParam())
      raise(SIGKILL);
    comm->allReduce("second", sum, ReduceOp::Sum)();
  });
  for (int64_t rank = 0; rank < kRanks; ++rank)
    EXPECT_THAT(
        errors[size_t(rank)],
        HasSubstr(rank == GetParam()
                      ? "killed by signal 9"
                      : "second (collective 2 of communicator \"all\"): "));
  EXPECT_THAT(errors[1],
              HasSubstr(GetParam() == 2 ? "rank 2 does not answer"
                                        : "the ranks' store is gone"));
}

} // namespace
} // namespace fsdp::test
