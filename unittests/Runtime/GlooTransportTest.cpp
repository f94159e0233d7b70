//===- GlooTransportTest.cpp - collectives over Gloo ----------------------===//
//
// The ranks are threads over one store; what dies is a process.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Runtime/Collectives/GlooTransport.h"
#include "Support/Fixtures.h"
#include "fsdp/Runtime/Collectives/Reduce.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Memory/Layout.h"

#define USE_C10D_GLOO
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <latch>
#include <mutex>
#include <thread>

namespace fsdp::test {
namespace {

using namespace runtime;
using namespace std::chrono_literals;
using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using testing::IsEmpty;

using Body = std::function<void(Transport &)>;

c10::intrusive_ptr<c10d::Store> hashStore() {
  return c10::make_intrusive<c10d::HashStore>();
}

/// Runs `body` as each rank; returns the ranks' errors, "aborted: …" for an
/// AbortedError, empty where there was none.
std::vector<std::string>
runRanks(int64_t ranks, const Body &body,
         std::chrono::milliseconds timeout = std::chrono::seconds(60),
         const std::vector<Position> *positions = nullptr) {
  auto store = hashStore();
  std::vector<std::string> errors(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      try {
        WaitSettings settings;
        settings.patience = std::make_shared<Patience>(timeout);
        if (positions)
          settings.position = &(*positions)[size_t(rank)];
        auto transport = makeGlooTransport(store, rank, ranks, settings);
        body(*transport);
      } catch (const AbortedError &error) {
        errors[size_t(rank)] = "aborted: " + std::string(error.what());
      } catch (const std::exception &error) {
        errors[size_t(rank)] = error.what();
      }
    });
  for (std::thread &thread : threads)
    thread.join();
  return errors;
}

/// Counts down where a rank's work ends, by an error too; a rank that waits for
/// it outlives the others' failures, however slow the machine is.
struct AtEnd {
  std::latch &ended;
  ~AtEnd() { ended.count_down(); }
};

std::vector<int64_t> upTo(int64_t ranks) {
  std::vector<int64_t> all(static_cast<size_t>(ranks));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

void finish(const Communicator::Wait &wait) {
  if (wait)
    wait();
}

/// Values that no sum of which is exact; of a rank and a purpose.
at::Tensor noise(int64_t elements, at::ScalarType dtype, int64_t rank) {
  at::Tensor index = at::arange(elements, at::kDouble);
  return at::sin(index * 1.7 + double(rank) * 3.1 + 0.3).to(dtype);
}

/// Its gather must give noise(…, 0).
Communicator::Part partOf(const std::vector<int64_t> &begins, int64_t rank,
                          at::ScalarType dtype, bool inPlace) {
  int64_t begin = begins[size_t(rank)];
  int64_t length = begins[size_t(rank) + 1] - begin;
  Communicator::Part part;
  part.begins = begins;
  part.whole = at::zeros({begins.back()}, dtype);
  at::Tensor content = noise(begins.back(), dtype, 0).narrow(0, begin, length);
  if (inPlace)
    part.own = part.whole.narrow(0, begin, length).copy_(content);
  else
    part.own = content.clone();
  return part;
}

void expectGathered(const Communicator::Part &part) {
  EXPECT_TRUE(at::equal(
      part.whole, noise(part.begins.back(), part.whole.scalar_type(), 0)));
}

class GlooWorlds : public testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(Gloo, GlooWorlds, testing::Values(1, 2, 3, 4));

TEST_P(GlooWorlds, GathersPartsAsOneCollective) {
  int64_t ranks = GetParam();
  std::vector<int64_t> even = {0}, uneven = {0}, few = {0};
  for (int64_t rank = 0; rank < ranks; ++rank) {
    even.push_back(even.back() + 5);
    uneven.push_back(uneven.back() + 3 + rank);
    few.push_back(2); // the first rank has all
  }
  auto errors = runRanks(ranks, [&](Transport &transport) {
    auto comm = transport.connect("gather", upTo(ranks));
    EXPECT_EQ(comm->rank(), transport.rank());
    EXPECT_EQ(comm->size(), ranks);
    for (bool inPlace : {false, true}) {
      std::vector<Communicator::Part> parts;
      for (at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kShort})
        for (const auto &begins : {even, uneven, few})
          parts.push_back(partOf(begins, comm->rank(), dtype, inPlace));
      finish(comm->allGather("parts", parts));
      for (const auto &part : parts)
        expectGathered(part);
    }
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST_P(GlooWorlds, MultipliesTermsBeforeTheSum) {
  int64_t ranks = GetParam();
  auto errors = runRanks(ranks, [&](Transport &transport) {
    auto comm = transport.connect("reduce", upTo(ranks));
    for (at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      // A third is not exact, and each product is rounded.
      at::Tensor in = at::arange(7 * ranks, at::dtype(dtype));
      at::Tensor third = at::scalar_tensor(1 / 3.0, in.options());
      at::Tensor out = at::empty({7}, in.options());
      finish(comm->reduceScatter("grads", out, in, ReduceOp::Sum, 1 / 3.0));
      at::Tensor term = in.mul(third).narrow(0, 7 * comm->rank(), 7);
      // The order of more than two terms is Gloo's.
      at::Tensor sum = term.to(at::kDouble) * double(ranks);
      EXPECT_TRUE(ranks <= 2 ? at::equal(out, sum.to(dtype))
                             : isRounded(out, sum, sum, ranks - 1))
          << dtype;
    }
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

/// The terms of all ranks.
std::vector<at::Tensor> terms(int64_t ranks, int64_t elements,
                              at::ScalarType dtype) {
  std::vector<at::Tensor> all;
  for (int64_t rank = 0; rank < ranks; ++rank)
    all.push_back(noise(elements, dtype, rank));
  return all;
}

/// What reduceAroundRing makes of elements [begin, begin + count) of them.
at::Tensor aroundRing(const std::vector<at::Tensor> &all, int64_t begin,
                      int64_t count, double postdivide) {
  plan::DType dtype = planType(all[0].scalar_type());
  GradReduction how{.in = dtype, .reduce = dtype, .out = dtype};
  how.postdivide = postdivide;
  std::vector<const std::byte *> in;
  for (const at::Tensor &term : all)
    in.push_back(static_cast<const std::byte *>(term.const_data_ptr()) +
                 begin * int64_t(term.element_size()));
  at::Tensor out = at::empty({count}, all[0].scalar_type());
  reduceAroundRing(how, out.mutable_data_ptr(), in, count, begin,
                   all[0].numel());
  return out;
}

constexpr bool isSanitized() {
#if defined(__SANITIZE_ADDRESS__)
  return true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
  return true;
#endif
#endif
  return false;
}

// What lets shared memory have the bits of FSDP2 over Gloo.
TEST(Gloo, AddsAroundItsRing) {
  for (int64_t ranks : {2, 3, 4, 5, 7}) {
    auto errors = runRanks(ranks, [&](Transport &transport) {
      auto comm = transport.connect("ring", upTo(ranks));
      for (at::ScalarType dtype :
           {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16})
        // Less than an element a piece, odd rests, several segments.
        for (int64_t count : {1, 2, 3, 11, 64, 1003, 5000, 350001, 700001}) {
          // They take long under sanitizers; `make test-unit` has them all.
          if (isSanitized() && count > 5000 &&
              (dtype != at::kDouble || ranks > 4 || count > 350001))
            continue;
          std::vector<at::Tensor> all = terms(ranks, count * ranks, dtype);
          const at::Tensor &own = all[size_t(comm->rank())];
          at::Tensor out = at::empty({count}, own.options());
          finish(comm->reduceScatter("grads", out, own.clone(),
                                     ReduceOp::Average, 1));
          EXPECT_TRUE(at::equal(
              out, aroundRing(all, count * comm->rank(), count, double(ranks))))
              << ranks << " ranks, " << dtype << " of " << count;
          all = terms(ranks, count, dtype);
          at::Tensor sum = all[size_t(comm->rank())].clone();
          finish(comm->allReduce("vector", sum, ReduceOp::Sum));
          EXPECT_TRUE(at::equal(sum, aroundRing(all, 0, count, 1)))
              << ranks << " ranks, " << dtype << " of " << count;
        }
    });
    EXPECT_THAT(errors, Each(IsEmpty()));
  }
}

TEST_P(GlooWorlds, GathersATensorOfRows) {
  int64_t ranks = GetParam();
  auto errors = runRanks(ranks, [&](Transport &transport) {
    auto comm = transport.connect("gather", upTo(ranks));
    std::vector<int64_t> begins = {0};
    for (int64_t rank = 0; rank < ranks; ++rank)
      begins.push_back(begins.back() + 6);
    auto part = partOf(begins, comm->rank(), at::kFloat, false);
    at::Tensor flat = part.whole;
    part.whole = flat.view({2 * ranks, 3});
    part.own = part.own.view({2, 3});
    finish(comm->allGather("rows", {part}));
    part.whole = flat;
    expectGathered(part);
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

/// What c10d's own call of a collective gives on this rank.
at::Tensor reduceScatterOfC10d(const c10::intrusive_ptr<c10d::Store> &store,
                               int64_t rank, int64_t ranks, at::Tensor in,
                               c10d::ReduceOp op) {
  if (ranks == 1)
    return in;
  auto group = c10::make_intrusive<c10d::ProcessGroupGloo>(
      store, int(rank), int(ranks),
      c10d::ProcessGroupGloo::Options::create_default(60s));
  at::Tensor out = at::empty({in.numel() / ranks}, in.options());
  c10d::ReduceScatterOptions options;
  options.reduceOp = op;
  auto work = [&] {
    // torch 2.11's flight recorder races, as in GlooTransport.cpp.
    static std::mutex recording;
    std::lock_guard lock(recording);
    return group->_reduce_scatter_base(out, in, options);
  }();
  work->wait();
  return out;
}

TEST_P(GlooWorlds, ReduceScatterHasTheBitsOfC10d) {
  int64_t ranks = GetParam();
  constexpr int64_t kElements = 1009;
  auto peers = hashStore();
  auto errors = runRanks(ranks, [&](Transport &transport) {
    auto comm = transport.connect("reduce", upTo(ranks));
    int64_t trial = 0;
    for (at::ScalarType dtype : {at::kFloat, at::kBFloat16})
      for (ReduceOp op : {ReduceOp::Sum, ReduceOp::Average}) {
        at::Tensor in = noise(kElements * ranks, dtype, comm->rank());
        at::Tensor before = in.clone();
        at::Tensor out = at::empty({kElements}, in.options());
        finish(comm->reduceScatter("grads", out, in, op));
        EXPECT_TRUE(at::equal(in, before));
        auto prefixed = c10::make_intrusive<c10d::PrefixStore>(
            std::to_string(trial++), peers);
        EXPECT_TRUE(at::equal(
            out,
            reduceScatterOfC10d(prefixed, comm->rank(), ranks, in,
                                op == ReduceOp::Sum ? c10d::ReduceOp::SUM
                                                    : c10d::ReduceOp::AVG)));
        at::Tensor exact = at::zeros({kElements}, at::kDouble);
        at::Tensor magnitude = exact.clone();
        double divisor = op == ReduceOp::Average ? double(ranks) : 1;
        for (int64_t rank = 0; rank < ranks; ++rank) {
          at::Tensor term = noise(kElements * ranks, dtype, rank)
                                .narrow(0, comm->rank() * kElements, kElements)
                                .to(at::kDouble)
                                .div(divisor);
          exact += term;
          magnitude += term.abs();
        }
        // The division is a product with a rounded factor.
        EXPECT_TRUE(isRounded(out, exact, magnitude, ranks + 1));
      }
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST_P(GlooWorlds, AllReduces) {
  int64_t ranks = GetParam();
  auto errors = runRanks(ranks, [&](Transport &transport) {
    auto comm = transport.connect("all", upTo(ranks));
    auto reduced = [&](ReduceOp op) {
      auto mine = double(comm->rank() + 1);
      at::Tensor tensor = at::full({3, 2}, mine, at::kDouble);
      finish(comm->allReduce("norms", tensor, op));
      EXPECT_TRUE(at::equal(tensor, tensor[0][0].expand_as(tensor)));
      return tensor[0][0].item<double>();
    };
    auto sum = double(ranks * (ranks + 1) / 2);
    EXPECT_EQ(reduced(ReduceOp::Sum), sum);
    EXPECT_EQ(reduced(ReduceOp::Average), sum / double(ranks));
    EXPECT_EQ(reduced(ReduceOp::Max), double(ranks));
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST(GlooTransport, SeveralAreBegunBeforeTheFirstWait) {
  auto errors = runRanks(3, [&](Transport &transport) {
    auto gather = transport.connect("gather", {0, 1, 2});
    auto reduce = transport.connect("reduce", {0, 1, 2});
    auto first = partOf({0, 4, 9, 11}, gather->rank(), at::kFloat, false);
    auto second = partOf({0, 4, 8, 12}, gather->rank(), at::kFloat, false);
    at::Tensor sum = at::ones({100});
    auto waitFirst = gather->allGather("first", {first});
    auto waitSum = reduce->allReduce("sum", sum, ReduceOp::Sum);
    auto waitSecond = gather->allGather("second", {second});
    finish(waitSecond);
    finish(waitSum);
    finish(waitFirst);
    expectGathered(first);
    expectGathered(second);
    EXPECT_TRUE(at::equal(sum, at::full({100}, 3.0)));
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST(GlooTransport, DisjointGroupsMayHaveOneName) {
  auto errors = runRanks(4, [&](Transport &transport) {
    int64_t rank = transport.rank();
    auto pair = transport.connect("pair", {rank / 2 * 2, rank / 2 * 2 + 1});
    auto across = transport.connect("across", {rank % 2, rank % 2 + 2});
    EXPECT_EQ(pair->rank(), rank % 2);
    EXPECT_EQ(across->rank(), rank / 2);
    at::Tensor sum = at::full({2}, double(1 << rank));
    finish(pair->allReduce("pair", sum, ReduceOp::Sum));
    EXPECT_EQ(sum[1].item<double>(), rank < 2 ? 3 : 12);
    finish(across->allReduce("across", sum, ReduceOp::Sum));
    EXPECT_EQ(sum[1].item<double>(), 15);
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST(GlooTransport, NamesWhoDoesNotConnect) {
  auto errors = runRanks(
      3,
      [](Transport &transport) {
        if (transport.rank() != 1)
          transport.connect("gather", {0, 1, 2});
      },
      1000ms);
  EXPECT_EQ(errors[0], "communicator \"gather\": rank 1 has not come in 1 s");
  EXPECT_EQ(errors[1], "");
  EXPECT_EQ(errors[2], errors[0]);
}

TEST(GlooTransport, NamesWhoIsLateForACollective) {
  std::latch ended(2);
  auto errors = runRanks(
      3,
      [&](Transport &transport) {
        auto comm = transport.connect("gather", {0, 1, 2});
        at::Tensor sum = at::ones({8});
        finish(comm->allReduce("the first", sum, ReduceOp::Sum));
        if (transport.rank() == 2)
          return ended.wait();
        AtEnd tell{ended};
        finish(comm->allReduce("the second", sum, ReduceOp::Sum));
      },
      3s);
  // The one that is first to fail; the other's error depends on the timing.
  EXPECT_THAT(errors,
              testing::Contains(
                  "the second (collective 2 of communicator \"gather\") has "
                  "not finished after 3 s; rank 2 has not come to it"));
  EXPECT_THAT(errors[0], HasSubstr("the second"));
  EXPECT_THAT(errors[1], HasSubstr("the second"));
  EXPECT_EQ(errors[2], "");
}

TEST(GlooTransport, NamesWhoDoesNotMove) {
  std::latch ended(2);
  std::vector<Position> positions(3);
  auto errors = runRanks(
      3,
      [&](Transport &transport) {
        auto comm = transport.connect("gather", {0, 1, 2});
        at::Tensor sum = at::ones({8});
        if (transport.rank() == 2)
          return ended.wait();
        AtEnd tell{ended};
        finish(comm->allReduce("the first", sum, ReduceOp::Sum));
      },
      2s, &positions);
  EXPECT_THAT(errors, testing::Contains(
                          "rank 2 has not moved for 2 s; this rank was waiting "
                          "in the first (collective 1 of communicator "
                          "\"gather\")"));
  EXPECT_EQ(errors[2], "");
}

TEST(GlooTransport, WaitsForWhoMoves) {
  std::vector<Position> positions(2);
  auto errors = runRanks(
      2,
      [&](Transport &transport) {
        auto comm = transport.connect("gather", {0, 1});
        at::Tensor sum = at::ones({8});
        // Twice the deadline in all, and never that long without a beat.
        for (int i = 0; transport.rank() == 1 && i < 16; ++i) {
          std::this_thread::sleep_for(250ms);
          positions[1].beat();
        }
        finish(comm->allReduce("the first", sum, ReduceOp::Sum));
        EXPECT_EQ(sum[0].item<float>(), 2);
      },
      2s, &positions);
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST(GlooTransport, AFailureThatIsToldEndsAllWaits) {
  std::latch ended(2);
  auto errors = runRanks(3, [&](Transport &transport) {
    auto comm = transport.connect("gather", {0, 1, 2});
    if (transport.rank() == 1) {
      transport.fail("no more data");
      transport.fail("a consequence");
      EXPECT_EQ(transport.failure(), "rank 1: no more data");
      // Its sockets stay open.
      return ended.wait();
    }
    AtEnd tell{ended};
    at::Tensor sum = at::ones({8});
    finish(comm->allReduce("norms", sum, ReduceOp::Sum));
  });
  EXPECT_EQ(errors[0], "aborted: norms (collective 1 of communicator "
                       "\"gather\"): rank 1: no more data");
  EXPECT_EQ(errors[1], "");
  EXPECT_EQ(errors[2], errors[0]);
}

TEST(GlooTransport, AFailureThatIsToldEndsConnecting) {
  auto errors = runRanks(2, [](Transport &transport) {
    if (transport.rank() == 1)
      transport.fail("no more data");
    else
      transport.connect("gather", {0, 1});
  });
  EXPECT_EQ(errors[0], "aborted: rank 1: no more data");
}

TEST(GlooTransport, AbortEndsAWaitFromAnotherThread) {
  std::latch ended(1);
  auto errors = runRanks(2, [&](Transport &transport) {
    auto comm = transport.connect("gather", {0, 1});
    if (transport.rank() == 1)
      return ended.wait();
    AtEnd tell{ended};
    std::thread aborts([&] {
      std::this_thread::sleep_for(200ms);
      comm->abort();
    });
    at::Tensor out = at::ones({4}), in = at::ones({8});
    auto wait = comm->reduceScatter("grads", out, in, ReduceOp::Sum);
    EXPECT_THROW(wait(), AbortedError);
    aborts.join();
    comm->allReduce("norms", out, ReduceOp::Sum);
  });
  EXPECT_EQ(errors[0], "aborted: norms (collective 2 of communicator "
                       "\"gather\"): this rank was aborted");
  EXPECT_EQ(errors[1], "");
}

TEST(GlooTransport, APeerThatLeavesEndsACollective) {
  auto errors = runRanks(3, [](Transport &transport) {
    auto comm = transport.connect("gather", {0, 1, 2});
    if (transport.rank() == 1)
      return;
    auto part = partOf({0, 4, 6, 9}, comm->rank(), at::kFloat, false);
    finish(comm->allGather("unit \"layers.0\"", {part}));
  });
  for (int rank : {0, 2})
    EXPECT_THAT(errors[size_t(rank)],
                AllOf(HasSubstr("unit \"layers.0\" (collective 1 of "
                                "communicator \"gather\"): "),
                      testing::ContainsRegex("closed|reset"),
                      HasSubstr("rank 1 does not answer")));
}

} // namespace
} // namespace fsdp::test
