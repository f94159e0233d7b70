//===- ShmCommTest.cpp - collectives on forked ranks ----------------------===//
#include "fsdp/Runtime/Collectives/ShmComm.h"
#include "Support/Fixtures.h"
#include "Support/SamplePlan.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Memory/Layout.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <random>
#include <thread>

#include <unistd.h>

namespace fsdp::test {
namespace {

using namespace runtime;
using testing::HasSubstr;

constexpr int64_t kUnits = 5;

/// Units with full, uneven and empty shards; their reductions run backwards.
/// The first parameter of unit 0 is written at the very beginning, long
/// before its reduction, which is the last.
plan::Plan collectivePlan(int64_t worldSize, plan::DType dtype) {
  plan::Plan plan;
  plan.worldSize = worldSize;
  const std::vector<std::vector<std::vector<int64_t>>> shapes = {
      {{9, 5}, {1}}, {{8, 3}}, {{7, 1000}, {3}, {2, 2}}, {{5}}, {{4, 4}}};
  for (int64_t u = 0; u < kUnits; ++u) {
    plan::Unit unit{"unit" + std::to_string(u), {}, true};
    for (const auto &shape : shapes[size_t(u)]) {
      unit.params.push_back(int32_t(plan.params.size()));
      plan.params.push_back({unit.name + std::to_string(plan.params.size()),
                             {},
                             {shape, dtype},
                             int32_t(u),
                             true});
    }
    plan.units.push_back(unit);
  }
  plan.instructions.push_back(
      {plan::Call{{"aten::mm", ""}, {}, {}, 0}, plan::Phase::Backward, -1, {}});
  auto addValue = [&](plan::TensorSpec spec) {
    plan.values.push_back(std::move(spec));
    return plan::ValueId(plan.values.size() - 1);
  };
  for (int64_t u = kUnits - 1; u >= 0; --u) {
    plan::ReduceScatter reduce{
        int32_t(u), plan.units[size_t(u)].params, {}, {}};
    for (int32_t param : reduce.params) {
      reduce.ins.push_back(addValue(plan.params[size_t(param)].spec));
      reduce.outs.push_back(addValue(plan::shardSpec(plan, param, 0)));
    }
    plan.instructions.push_back({reduce, plan::Phase::Backward, -1, {}});
  }
  return plan;
}

/// A number that every rank can compute for every other.
double valueOf(int64_t rank, int64_t step, int64_t param, int64_t i) {
  auto x = uint64_t(((rank * 31 + step) * 31 + param) * 10007 + i);
  x = (x ^ (x >> 31)) * 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 29)) * 0xbf58476d1ce4e5b9;
  return double(x >> 11) / double(uint64_t(1) << 52) - 1;
}

template <typename T>
void fill(T *data, int64_t count, int64_t rank, int64_t step, int64_t param,
          int64_t first) {
  for (int64_t i = 0; i < count; ++i)
    data[i] = T(valueOf(rank, step, param, first + i));
}

void expect(bool condition, const std::string &what) {
  if (!condition)
    throw std::runtime_error(what);
}

/// One rank of a run over all collectives; throws where a number differs
/// from the serial result.
template <typename T>
void trainLike(const plan::Plan &plan, ShmSegment &segment, int64_t rank,
               int64_t steps, uint32_t delaySeed) {
  int64_t worldSize = plan.worldSize;
  ShmComm comm(plan, segment, rank);
  std::mt19937 random(delaySeed * 977 + uint32_t(rank));
  auto delay = [&] {
    if (delaySeed && random() % 3 == 0)
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
  };
  const plan::Messages messages(plan);
  // Versions of a parameter are numbered -1 (initial), 0, 1, ...
  auto writeShards = [&](int64_t version) {
    for (size_t p = 0; p < plan.params.size(); ++p) {
      at::Tensor shard = comm.shard(int32_t(p));
      const auto &spec = plan.params[p].spec;
      int64_t row = spec.numElements() / spec.shape[0];
      fill(shard.template mutable_data_ptr<T>(), shard.numel(), 99, version,
           int64_t(p),
           plan::shardRows(spec.shape[0], worldSize, rank).begin * row);
    }
  };
  writeShards(-1);
  comm.publish();
  for (int64_t step = 0; step < steps; ++step) {
    comm.beginStep(step);
    for (int32_t u = 0; u < kUnits; ++u) {
      delay();
      std::vector<at::Tensor> full = await(comm.allGather(u));
      for (size_t i = 0; i < full.size(); ++i) {
        int32_t p = plan.units[size_t(u)].params[i];
        const T *data = full[i].template const_data_ptr<T>();
        for (int64_t k = 0; k < full[i].numel(); ++k)
          expect(data[k] == T(valueOf(99, step - 1, p, k)), "all_gather");
      }
      comm.reshard(u);
    }
    std::vector<std::pair<const plan::ReduceScatter *, Collective>> results;
    auto *early = static_cast<T *>(comm.reduceInput(0));
    if (early)
      fill(early, plan.params[0].spec.numElements(), rank, step, 0, 0);
    for (const plan::Instruction &instruction : plan.instructions) {
      const auto *reduce = std::get_if<plan::ReduceScatter>(&instruction.kind);
      if (!reduce)
        continue;
      delay();
      std::vector<at::Tensor> grads;
      for (int32_t p : reduce->params) {
        const auto &spec = plan.params[size_t(p)].spec;
        at::ScalarType dtype = scalarType(spec.dtype);
        // Odd parameters are copied in, even ones written in place.
        void *place = p % 2 ? nullptr : comm.reduceInput(p);
        at::Tensor grad = place ? at::from_blob(place, spec.shape, dtype)
                                : at::empty(spec.shape, dtype);
        if (!(p == 0 && early))
          fill(grad.template mutable_data_ptr<T>(), grad.numel(), rank, step, p,
               0);
        grads.push_back(grad);
      }
      results.emplace_back(reduce, comm.reduceScatter(*reduce, grads));
    }
    delay();
    for (const auto &[reduce, begun] : results)
      begun.wait();
    comm.beginUpdate();
    for (const auto &[reduce, begun] : results) {
      const std::vector<at::Tensor> &shards = begun.results;
      std::vector<plan::MessagePlace> places =
          messages.messagePlaces(reduce->params);
      for (size_t i = 0; i < shards.size(); ++i) {
        int32_t p = reduce->params[i];
        const auto &spec = plan.params[size_t(p)].spec;
        int64_t row = spec.numElements() / spec.shape[0];
        plan::RowRange rows = plan::shardRows(spec.shape[0], worldSize, rank);
        expect(shards[i].numel() == rows.size() * row, "shard size");
        const T *data = shards[i].template const_data_ptr<T>();
        const plan::MessagePlace &place = places[i];
        int64_t piece =
            plan::ringPiece(worldSize * place.row, sizeof(T), worldSize);
        for (int64_t k = 0; k < shards[i].numel(); ++k) {
          int64_t index = (rank * place.row + place.begin + k) / piece;
          T sum = 0;
          for (int64_t back = 1; back <= worldSize; ++back) {
            int64_t r = (index - back + worldSize) % worldSize;
            sum += T(valueOf(r, step, p, rows.begin * row + k));
          }
          expect(data[k] == sum / T(worldSize), "reduce_scatter");
        }
      }
    }
    writeShards(step);
    comm.publish();
    std::vector<RankStats> stats =
        comm.exchangeStats({double(step * 100 + rank), rank, 7, 0.5, 0, 0, -1,
                            uint32_t(step + rank)});
    expect(stats.size() == size_t(worldSize), "stats");
    for (size_t r = 0; r < stats.size(); ++r)
      expect(stats[r].loss == double(step * 100 + int64_t(r)) &&
                 stats[r].peakBytes == int64_t(r) &&
                 stats[r].evaluationLoss == 0.5 &&
                 stats[r].requests == uint32_t(step) + r,
             "stats of a rank");
  }
}

TEST(ShmComm, EqualsTheSerialResult) {
  for (int64_t worldSize = 1; worldSize <= 4; ++worldSize) {
    plan::Plan plan = collectivePlan(worldSize, plan::DType::Float32);
    ShmSegment segment(plan);
    for (const std::string &error : forkRanks(worldSize, [&](int64_t rank) {
           trainLike<float>(plan, segment, rank, 5, 0);
         }))
      EXPECT_EQ(error, "") << worldSize << " ranks";
  }
}

TEST(ShmComm, EqualsTheSerialResultUnderDelays) {
  for (uint32_t seed = 1; seed <= 6; ++seed) {
    plan::Plan plan = collectivePlan(3, plan::DType::Float64);
    ShmSegment segment(plan);
    for (const std::string &error : forkRanks(3, [&](int64_t rank) {
           trainLike<double>(plan, segment, rank, 5, seed);
         }))
      EXPECT_EQ(error, "") << "seed " << seed;
  }
}

TEST(ShmComm, PlacesDoNotOverlap) {
  plan::Plan plan = collectivePlan(2, plan::DType::Float32);
  SegmentLayout layout(plan);
  EXPECT_TRUE(layout.dedicated[0]);
  auto range = [&](size_t p) {
    return std::pair(layout.grads[p],
                     layout.grads[p] + size_t(plan.params[p].spec.numBytes()));
  };
  for (size_t p = 0; p < plan.params.size(); ++p) {
    EXPECT_EQ(layout.params[p] % 64, 0u);
    EXPECT_EQ(layout.grads[p] % 64, 0u);
    EXPECT_LE(range(p).second, layout.areaBytes);
    for (size_t q = 0; q < p; ++q) {
      bool together =
          std::abs(layout.reductionOf[p] - layout.reductionOf[q]) <= 1 ||
          layout.dedicated[p] || layout.dedicated[q];
      if (together) {
        EXPECT_TRUE(range(p).second <= range(q).first ||
                    range(q).second <= range(p).first)
            << p << " and " << q;
      }
    }
  }
}

TEST(ShmComm, TwoPlansTrainTheSameParameters) {
  plan::Plan plan = collectivePlan(3, plan::DType::Float32);
  ShmSegment segment(plan), other(plan);
  other.useParametersOf(segment);
  for (int64_t rank = 0; rank < 3; ++rank) {
    ShmComm comm(plan, segment, rank);
    ShmComm second(plan, other, rank, /*concurrent=*/false, &comm);
    for (int32_t p = 0; p < int32_t(plan.params.size()); ++p) {
      at::Tensor shard = comm.shard(p);
      EXPECT_EQ(second.shard(p).const_data_ptr(), shard.const_data_ptr());
      // Padded to the rows of rank 0, within the parameter's own place.
      at::Tensor padded = comm.paddedShard(p);
      EXPECT_EQ(padded.size(0), plan::shardSpec(plan, p, 0).shape[0]);
      if (shard.numel() > 0)
        EXPECT_EQ(padded.const_data_ptr(), shard.const_data_ptr());
      const auto *end =
          static_cast<const std::byte *>(padded.data_ptr()) + padded.nbytes();
      for (int32_t q = 0; q < int32_t(plan.params.size()); ++q)
        if (segment.master(0, q) > segment.master(0, p))
          EXPECT_LE(end, segment.master(0, q)) << p << " and " << q;
    }
  }
  plan::Plan another = collectivePlan(3, plan::DType::Float64);
  ShmSegment wrong(another);
  EXPECT_THROW(wrong.useParametersOf(segment), InputError);
}

TEST(ShmComm, NamesADeadPeer) {
  plan::Plan plan = collectivePlan(2, plan::DType::Float32);
  ShmSegment segment(plan);
  std::vector<std::string> errors = forkRanks(2, [&](int64_t rank) {
    ShmComm comm(plan, segment, rank);
    comm.publish();
    comm.beginStep(6);
    if (rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      raise(SIGKILL);
    }
    await(comm.allGather(3));
    comm.beginUpdate();
  });
  EXPECT_THAT(errors[0], HasSubstr("rank 1 (pid "));
  EXPECT_THAT(errors[0], HasSubstr(") died; this rank was waiting in "
                                   "optimizer_step at step 7"));
}

TEST(ShmComm, StopsWhenAborted) {
  plan::Plan plan = collectivePlan(2, plan::DType::Float32);
  ShmSegment segment(plan);
  std::vector<std::string> errors = forkRanks(2, [&](int64_t rank) {
    ShmComm comm(plan, segment, rank);
    comm.beginStep(0);
    comm.publish();
    if (rank == 1) {
      segment.fail(1, "a reason");
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      return;
    }
    // That of the last unit comes first.
    await(comm.reduceScatter(
        std::get<plan::ReduceScatter>(plan.instructions[1].kind),
        {at::from_blob(segment.grad(0, 7), {4, 4}, at::kFloat)}));
  });
  EXPECT_EQ(errors[0], "stopped while waiting in reduce_scatter of unit "
                       "\"unit4\" at step 1");
  EXPECT_EQ(segment.header().failedRank.load(), 1);
  EXPECT_STREQ(segment.state(1).failure, "a reason");
}

TEST(ShmComm, WaitingDoesNotBurnTheProcessor) {
  plan::Plan plan = collectivePlan(2, plan::DType::Float32);
  ShmSegment segment(plan);
  std::vector<std::string> errors = forkRanks(2, [&](int64_t rank) {
    ShmComm comm(plan, segment, rank);
    if (rank == 1)
      std::this_thread::sleep_for(std::chrono::seconds(1));
    comm.publish();
    std::clock_t before = std::clock();
    await(comm.allGather(0));
    double seconds = double(std::clock() - before) / CLOCKS_PER_SEC;
    expect(seconds < 0.25, "used " + std::to_string(seconds) + " s");
  });
  EXPECT_EQ(errors[0], "");
  EXPECT_EQ(errors[1], "");
}

TEST(ShmComm, BarriersSeparateWritesFromReads) {
  constexpr int64_t kRanks = 4;
  plan::Plan plan = collectivePlan(kRanks, plan::DType::Float32);
  ShmSegment segment(plan);
  std::vector<std::string> errors = forkRanks(kRanks, [&](int64_t rank) {
    ShmComm comm(plan, segment, rank);
    for (int64_t round = 0; round < 20; ++round) {
      std::this_thread::sleep_for(std::chrono::milliseconds(rank * round % 3));
      comm.barrier();
      comm.shard(0).fill_(double(round));
      comm.publish();
      at::Tensor whole = await(comm.allGather(0))[0];
      expect(whole.eq(double(round)).all().item<bool>(),
             "round " + std::to_string(round));
    }
  });
  for (const std::string &error : errors)
    EXPECT_EQ(error, "");
}

TEST(ShmComm, RefusesIntegerGradients) {
  plan::Plan plan = collectivePlan(1, plan::DType::Int32);
  ShmSegment segment(plan);
  EXPECT_THROW(ShmComm(plan, segment, 0), InputError);
}

} // namespace
} // namespace fsdp::test
