//===- NcclTransportTest.cpp - collectives over NCCL ----------------------===//
//
// The ranks are forked processes that share GPU 0, so this is a program of its
// own: CUDA does not outlive a fork. NCCL allows that from 2.30 on where
// NCCL_MULTI_RANK_GPU_ENABLE says so; older ones take ranks with different
// NCCL_HOSTIDs for ranks of different hosts, which talk over sockets. Without a
// GPU the program says so once and ends with 77, which CTest calls skipped.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Runtime/Collectives/NcclTransport.h"
#include "Support/Fixtures.h"
#include "fsdp/Runtime/Devices/CudaModule.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Launch/LocalStore.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <thread>

namespace fsdp::test {
namespace {

using namespace runtime;
using namespace std::chrono_literals;
using testing::Contains;
using testing::Each;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr int kSkipped = 77;

struct Rank {
  Device &device;
  Transport &transport;
  int64_t index;

  at::TensorOptions options(at::ScalarType dtype) const {
    return at::device(device.where()).dtype(dtype);
  }
  /// Of all ranks up to `ranks`.
  std::unique_ptr<Communicator> connect(const std::string &name,
                                        int64_t ranks) {
    std::vector<int64_t> all(static_cast<size_t>(ranks));
    std::iota(all.begin(), all.end(), 0);
    return transport.connect(name, all);
  }
};

/// Fails the rank, which is a process without GoogleTest's record.
void require(bool holds, const std::string &what) {
  if (!holds)
    throw std::runtime_error("not true: " + what);
}

NcclOptions within(std::chrono::milliseconds deadline) {
  NcclOptions options;
  options.waits.patience = std::make_shared<Patience>(deadline);
  return options;
}

/// Forks ranks that run `body`; their errors as forkRanks gives them, "aborted:
/// …" for an AbortedError.
std::vector<std::string>
forkGpuRanks(int64_t ranks, const std::function<void(Rank &)> &body,
             const NcclOptions &options = within(60s)) {
  LocalStore local(ranks);
  return forkRanks(ranks, [&](int64_t index) {
    std::string id = "fsdp-test-" + std::to_string(index);
    setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
    setenv("NCCL_HOSTID", id.c_str(), 1);
    setenv("NCCL_SOCKET_IFNAME", "lo", 1);
    std::unique_ptr<Device> device = makeCudaDevice(0);
    auto transport =
        makeNcclTransport(local.connect(index, 60s), index, ranks, 0, options);
    Rank rank{*device, *transport, index};
    try {
      body(rank);
      device->synchronize();
    } catch (const AbortedError &error) {
      local.leave();
      throw RunError("aborted: " + std::string(error.what()));
    } catch (const std::exception &error) {
      transport->fail(error.what());
      local.leave();
      throw;
    }
    local.leave();
  });
}

/// Numbers that bfloat16 has, of an element of the whole.
at::Tensor content(int64_t elements, at::TensorOptions options) {
  return at::arange(elements, at::kDouble)
      .remainder(251)
      .to(options.device(), c10::typeMetaToScalarType(options.dtype()));
}

Communicator::Part partOf(const std::vector<int64_t> &begins, int64_t rank,
                          at::TensorOptions options, bool inPlace) {
  int64_t begin = begins[size_t(rank)];
  int64_t length = begins[size_t(rank) + 1] - begin;
  Communicator::Part part;
  part.begins = begins;
  part.whole = at::zeros({begins.back()}, options);
  at::Tensor own =
      content(begins.back(), options).narrow(0, begin, length).clone();
  part.own = inPlace ? part.whole.narrow(0, begin, length).copy_(own) : own;
  return part;
}

class NcclWorlds : public testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(Nccl, NcclWorlds, testing::Values(1, 2, 4));

TEST_P(NcclWorlds, GathersPartsAsOneCollective) {
  int64_t ranks = GetParam();
  std::vector<int64_t> even = {0}, uneven = {0}, few = {0};
  for (int64_t rank = 0; rank < ranks; ++rank) {
    even.push_back(even.back() + 512);
    uneven.push_back(uneven.back() + 300 + rank);
    few.push_back(200); // the first rank has all
  }
  auto errors = forkGpuRanks(ranks, [&](Rank &rank) {
    auto comm = rank.connect("gather", ranks);
    require(comm->rank() == rank.index && comm->size() == ranks, "the rank");
    for (bool inPlace : {false, true}) {
      std::vector<Communicator::Part> parts;
      for (at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kByte})
        for (const auto &begins : {even, uneven, few})
          parts.push_back(
              partOf(begins, rank.index, rank.options(dtype), inPlace));
      require(!comm->allGather("parts", parts), "no wait");
      for (const auto &part : parts)
        require(at::equal(part.whole,
                          content(part.begins.back(), part.whole.options())),
                "the gathered content");
    }
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST_P(NcclWorlds, Reduces) {
  int64_t ranks = GetParam();
  auto errors = forkGpuRanks(ranks, [&](Rank &rank) {
    auto comm = rank.connect("reduce", ranks);
    auto sum = double(ranks * (ranks + 1) / 2);
    const std::vector<std::pair<ReduceOp, double>> cases = {
        {ReduceOp::Sum, sum},
        {ReduceOp::Average, sum / double(ranks)},
        {ReduceOp::Max, double(ranks)}};
    for (at::ScalarType dtype : {at::kFloat, at::kBFloat16})
      for (auto [op, factor] : cases) {
        at::Tensor base = content(300 * ranks, rank.options(dtype)).fmod(8);
        at::Tensor in = base * double(rank.index + 1);
        at::Tensor out = at::empty({300}, in.options());
        comm->reduceScatter("grads", out, in, op);
        // Small integers, and their halves and quarters, are exact.
        at::Tensor expected = base.narrow(0, rank.index * 300, 300) * factor;
        require(at::equal(out, expected), "the reduced chunk");
        if (op == ReduceOp::Sum) {
          comm->reduceScatter("scaled", out, in, op, 0.25);
          require(at::equal(out, expected * 0.25), "the premultiplied chunk");
        }
        comm->allReduce("norms", in, op);
        require(at::equal(in, base * factor), "the reduced tensor");
      }
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST(NcclTransport, CommunicatorsOverlapOnTheirStreams) {
  auto errors = forkGpuRanks(2, [](Rank &rank) {
    auto gather = rank.connect("gather", 2);
    auto reduce = rank.connect("reduce", 2);
    auto part = partOf({0, 1 << 20, 1 << 21}, rank.index,
                       rank.options(at::kFloat), false);
    at::Tensor sum = at::ones({1 << 20}, rank.options(at::kFloat));
    rank.device.synchronize();
    for (int step = 0; step < 50; ++step) {
      {
        c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
        gather->allGather("unit", {part});
      }
      c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
      reduce->allReduce("grads", sum, ReduceOp::Average);
    }
    rank.device.synchronize();
    require(at::equal(part.whole, content(1 << 21, part.whole.options())),
            "the gathered content");
    require(at::equal(sum, at::ones_like(sum)), "the average");
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST(NcclTransport, DisjointGroupsMayHaveOneName) {
  auto errors = forkGpuRanks(4, [](Rank &rank) {
    auto comm = rank.transport.connect(
        "pair", {rank.index / 2 * 2, rank.index / 2 * 2 + 1});
    at::Tensor sum =
        at::full({2}, double(1 << rank.index), rank.options(at::kFloat));
    comm->allReduce("pair", sum, ReduceOp::Sum);
    require(sum[1].item<double>() == (rank.index < 2 ? 3 : 12), "the sum");
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST(NcclTransport, TakesRegisteredMemory) {
  for (bool windows : {false, true}) {
    NcclOptions options = within(60s);
    options.windows = windows;
    auto errors = forkGpuRanks(
        2,
        [](Rank &rank) {
          constexpr int64_t kElements = 1 << 20;
          auto before = rank.connect("before", 2);
          auto memory = rank.device.reserve(8 * kElements);
          memory->back(8 * kElements);
          rank.transport.registerMemory(memory->base(), 8 * kElements);
          auto after = rank.connect("after", 2);
          at::Tensor whole = at::from_blob(memory->base(), {2 * kElements},
                                           rank.options(at::kFloat));
          for (Communicator *comm : {before.get(), after.get()}) {
            Communicator::Part part;
            part.whole = whole.zero_();
            part.begins = {0, kElements, 2 * kElements};
            part.own = whole.narrow(0, rank.index * kElements, kElements);
            part.own.fill_(double(rank.index + 1));
            comm->allGather("unit", {part});
            require(whole.sum().item<double>() == 3.0 * kElements, "the sum");
          }
          rank.device.synchronize();
          before.reset();
          after.reset();
        },
        options);
    EXPECT_THAT(errors, Each(IsEmpty())) << "windows: " << windows;
  }
}

TEST(NcclTransport, NamesWhoDoesNotConnect) {
  auto errors = forkGpuRanks(
      3,
      [](Rank &rank) {
        if (rank.index != 1)
          rank.connect("gather", 3);
      },
      within(2s));
  EXPECT_THAT(errors,
              Contains("communicator \"gather\": rank 1 has not come in 2 s"));
}

/// Waits until the GPU has ended what it was given, and throws what the
/// transport knows of it.
void finish(Rank &rank) {
  rank.device.synchronize();
  for (int tries = 0; rank.transport.failure().empty() && tries < 50; ++tries)
    std::this_thread::sleep_for(100ms);
  throw RunError(rank.transport.failure());
}

TEST(NcclTransport, NamesWhoIsLateForACollective) {
  auto begun = std::chrono::steady_clock::now();
  auto errors = forkGpuRanks(
      3,
      [](Rank &rank) {
        auto comm = rank.connect("gather", 3);
        at::Tensor sum = at::ones({8}, rank.options(at::kFloat));
        comm->allReduce("the first", sum, ReduceOp::Sum);
        rank.device.synchronize();
        if (rank.index == 2)
          std::this_thread::sleep_for(8s);
        else
          comm->allReduce("the second", sum, ReduceOp::Sum);
        finish(rank);
      },
      within(3s));
  EXPECT_THAT(errors,
              Each(HasSubstr("the second (collective 2 of communicator "
                             "\"gather\") has not finished after 3 s; rank 2 "
                             "has not come to it")));
  EXPECT_LT(std::chrono::steady_clock::now() - begun, 60s);
}

TEST(NcclTransport, AFailureThatIsToldEndsWhatTheGpuDoes) {
  auto begun = std::chrono::steady_clock::now();
  auto errors = forkGpuRanks(2, [](Rank &rank) {
    auto comm = rank.connect("gather", 2);
    at::Tensor sum = at::ones({8}, rank.options(at::kFloat));
    comm->allReduce("the first", sum, ReduceOp::Sum);
    rank.device.synchronize();
    if (rank.index == 1) {
      // First, as a communicator that is destroyed ends the peer's work too.
      std::this_thread::sleep_for(500ms);
      rank.transport.fail("no more data");
      std::this_thread::sleep_for(1s);
      throw RunError("no more data");
    }
    comm->allReduce("the second", sum, ReduceOp::Sum);
    rank.device.synchronize();
    comm->allReduce("the third", sum, ReduceOp::Sum);
  });
  EXPECT_EQ(errors[0],
            "aborted: the third (collective 3 of communicator \"gather\"): "
            "rank 1: no more data");
  EXPECT_THAT(errors[1], HasSubstr("no more data"));
  EXPECT_LT(std::chrono::steady_clock::now() - begun, 40s);
}

TEST(NcclTransport, AbortEndsWhatTheGpuDoes) {
  auto begun = std::chrono::steady_clock::now();
  auto errors = forkGpuRanks(2, [](Rank &rank) {
    auto comm = rank.connect("gather", 2);
    at::Tensor sum = at::ones({8}, rank.options(at::kFloat));
    comm->allReduce("the first", sum, ReduceOp::Sum);
    rank.device.synchronize();
    if (rank.index == 0) {
      comm->allReduce("the second", sum, ReduceOp::Sum);
      comm->abort();
      rank.device.synchronize();
      comm->allReduce("the third", sum, ReduceOp::Sum);
    }
  });
  EXPECT_THAT(errors[0], HasSubstr("this rank was aborted"));
  EXPECT_LT(std::chrono::steady_clock::now() - begun, 40s);
}

} // namespace

/// Why no test can run; empty if they can. In a process of its own.
std::string missing() {
  return forkRanks(1, [](int64_t) { makeCudaDevice(0); })[0];
}

} // namespace fsdp::test

int main(int argc, char **argv) {
  testing::InitGoogleMock(&argc, argv);
  if (std::string why = fsdp::test::missing(); !why.empty()) {
    std::printf("NcclTests: skipped: %s\n", why.c_str());
    return fsdp::test::kSkipped;
  }
  return RUN_ALL_TESTS();
}
