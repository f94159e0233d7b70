//===- RankArenaTest.cpp - execution in planned memory --------------------===//
#include "fsdp/Runtime/Memory/RankArena.h"
#include "Support/Fixtures.h"
#include "Support/SamplePlan.h"
#include "fsdp/Runtime/Devices/SteeredAllocator.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <map>
#include <sstream>
#include <thread>

namespace fsdp::test {
namespace {

using namespace runtime;
using nlohmann::json;

/// Frees every value of the step after its last use.
void addFrees(plan::Plan &plan) {
  using namespace plan;
  std::map<ValueId, size_t> last;
  std::set<ValueId> kept = {plan.loss};
  for (const Instruction &instruction : plan.instructions)
    kept.insert(instruction.frees.begin(), instruction.frees.end());
  for (size_t i = 0; i < plan.instructions.size(); ++i) {
    auto use = [&](const std::vector<ValueId> &ids) {
      for (ValueId id : ids)
        last[id] = i;
    };
    const auto &kind = plan.instructions[i].kind;
    if (const auto *call = std::get_if<Call>(&kind)) {
      use(call->outs);
      for (const Arg &arg : call->args)
        if (const auto *tensor = std::get_if<TensorArg>(&arg.value))
          last[tensor->value] = i;
    } else if (const auto *gather = std::get_if<AllGather>(&kind)) {
      kept.insert(gather->outs.begin(), gather->outs.end());
    } else if (const auto *reduce = std::get_if<ReduceScatter>(&kind)) {
      use(reduce->ins);
    } else if (const auto *reduce = std::get_if<AllReduce>(&kind)) {
      use(reduce->ins);
    } else if (const auto *sums = std::get_if<Accumulate>(&kind)) {
      use(sums->ins);
    } else if (const auto *copy = std::get_if<CopyToHost>(&kind)) {
      use(copy->ins);
    } else if (const auto *step = std::get_if<OptimizerStep>(&kind)) {
      use(step->grads);
    }
  }
  for (auto [value, at] : last)
    if (!kept.contains(value))
      plan.instructions[at].frees.push_back(value);
}

class RunsInTheArena : public testing::Test {
protected:
  /// Losses and final weights; the metrics are in `metrics`.
  std::pair<std::vector<json>, std::string> run(const plan::Plan &plan) {
    writeSample(dir, plan, 60);
    std::vector<std::string> args = {dir / "plan.json",
                                     "--steps",
                                     "6",
                                     "--data",
                                     dir / "data.safetensors",
                                     "--metrics",
                                     dir / "m.jsonl",
                                     "--save-weights",
                                     dir / "out.safetensors"};
    if (!plan.evaluation.empty())
      args.insert(args.end(), {"--eval-every", "1", "--eval-data",
                               dir / "data.safetensors"});
    ToolResult result = runTool(args);
    EXPECT_EQ(result.status, 0) << result.err;
    std::istringstream lines(readText(dir / "m.jsonl"));
    metrics.clear();
    std::vector<json> losses;
    for (std::string line; std::getline(lines, line);) {
      metrics.push_back(json::parse(line));
      losses.push_back(metrics.back()["rank_losses"]);
    }
    return {losses, readText(dir / "out.safetensors")};
  }

  /// The plan runs to the same bits in its arena as on the heap, and from the
  /// third step on allocates nothing there.
  void expectSame(plan::Plan plan) {
    auto onHeap = run(plan);
    layOutArena(plan, plan::MemoryModel::SharedHost);
    ASSERT_GT(plan.arena->bytes, 0);
    auto inArena = run(plan);
    EXPECT_EQ(onHeap.first, inArena.first);
    EXPECT_EQ(onHeap.second, inArena.second);
    ASSERT_EQ(metrics.size(), 6u);
    EXPECT_EQ(metrics[0]["arena_bytes"], plan.arena->bytes);
    for (size_t step = 2; step < metrics.size(); ++step)
      EXPECT_EQ(metrics[step]["allocator_calls"], 0) << step;
  }

  ScratchDir dir;
  std::vector<json> metrics;
};

TEST_F(RunsInTheArena, OnAnyNumberOfRanks) {
  for (int64_t ranks : {1, 2, 3}) {
    plan::Plan plan = samplePlan(ranks, /*transposedGrad=*/ranks == 3);
    addFrees(plan);
    expectSame(plan);
  }
}

TEST_F(RunsInTheArena, WithAnEvaluation) {
  plan::Plan plan = samplePlan(2);
  addFrees(plan);
  addEvaluation(plan);
  expectSame(plan);
}

TEST_F(RunsInTheArena, OverMicrobatches) {
  plan::Plan whole = samplePlan(2);
  accumulateWhole(whole);
  addFrees(whole);
  expectSame(whole);
  plan::Plan partial = samplePlan(4, false, 2);
  accumulatePartial(partial);
  addFrees(partial);
  expectSame(partial);
}

TEST_F(RunsInTheArena, WithOffload) {
  plan::Plan plan = samplePlan(2);
  offload(plan);
  expectSame(plan);
}

TEST_F(RunsInTheArena, WithActivationsOnTheHost) {
  for (bool transposedGrad : {false, true}) {
    plan::Plan plan = samplePlan(2, transposedGrad);
    addFrees(plan);
    auto plain = run(plan);
    offloadActivations(plan);
    EXPECT_EQ(run(plan), plain);
    expectSame(plan);
    beginCollectives(plan);
    expectSame(plan);
  }
  plan::Plan plan = samplePlan(2);
  accumulateWhole(plan);
  addFrees(plan);
  auto plain = run(plan);
  offloadActivations(plan);
  EXPECT_EQ(run(plan), plain);
  expectSame(plan);
}

TEST_F(RunsInTheArena, AViewThatThePlanDoesNotKnow) {
  // The plan ends h with the call that returns a view of it, and gives its
  // place to others while the view is read.
  plan::Plan plan = samplePlan(2);
  addFrees(plan);
  plan::ValueId h =
      std::get<plan::Call>(plan.instructions[find<plan::Call>(plan)].kind)
          .outs[0];
  bool found = false;
  for (plan::Instruction &instruction : plan.instructions)
    if (auto *call = std::get_if<plan::Call>(&instruction.kind))
      if (plan::Value &view = plan.values[call->outs[0]]; view.storage == h) {
        view.storage = -1;
        found = true;
      }
  ASSERT_TRUE(found);
  expectSame(plan);
}

TEST_F(RunsInTheArena, WithoutPlacesInIt) {
  plan::Plan plan = samplePlan(2);
  addFrees(plan);
  run(plan);
  // What outlives its instruction has been given a place.
  EXPECT_EQ(metrics[0]["arena_bytes"], 0);
  EXPECT_GT(metrics[5]["scratch_bytes"], 0);
  for (size_t step = 2; step < metrics.size(); ++step)
    EXPECT_EQ(metrics[step]["allocator_calls"], 0) << step;
}

void expect(bool condition, const std::string &what) {
  if (!condition)
    throw std::runtime_error(what);
}

/// Runs `body` in a process of its own, for its allocator.
void inProcess(const std::function<void()> &body) {
  std::vector<std::string> errors = forkRanks(1, [&](int64_t) {
    installSteeredAllocator();
    body();
  });
  EXPECT_EQ(errors[0], "");
}

TEST(RankArena, ServesTheSameAddressesInEveryProgram) {
  inProcess([] {
    plan::Plan plan = samplePlan(1);
    layOutArena(plan, plan::MemoryModel::SharedHost);
    std::unique_ptr<Device> device = makeCpuDevice();
    RankArena arena(plan, 0, *device);
    std::vector<at::Tensor> values(plan.values.size());
    std::vector<const void *> before;
    for (int program = 0; program < 4; ++program) {
      int64_t heap = heapAllocations();
      std::vector<const void *> addresses;
      {
        RankArena::Scope scope(arena, 6);
        at::Tensor a = at::empty({1000}), b = at::empty({1000});
        expect(a.const_data_ptr() != b.const_data_ptr(), "one place for two");
        addresses = {a.const_data_ptr(), b.const_data_ptr()};
        b.reset();
        at::Tensor c = at::empty({500});
        addresses.push_back(c.const_data_ptr());
        arena.settle(values);
      }
      arena.endProgram();
      int64_t calls = heapAllocations() - heap;
      expect(calls == 0, std::to_string(calls) + " allocations");
      if (program > 1)
        expect(addresses == before, "other addresses");
      before = addresses;
    }
    // c is where b was.
    expect(arena.extraBytes() == 2 * 4032, std::to_string(arena.extraBytes()));
  });
}

TEST(RankArena, GivesNothingOutWhileItIsHeld) {
  inProcess([] {
    plan::Plan plan = samplePlan(1);
    std::unique_ptr<Device> device = makeCpuDevice();
    RankArena arena(plan, 0, *device);
    std::vector<at::Tensor> values(plan.values.size());
    at::Tensor held;
    for (int program = 0; program < 6; ++program) {
      int64_t heap = heapAllocations();
      {
        RankArena::Scope scope(arena, 3);
        at::Tensor filled = at::full({64}, float(program));
        if (program == 3)
          held = filled;
        arena.settle(values);
      }
      arena.endProgram();
      expect(heapAllocations() == heap, "not in the arena");
      if (program > 3)
        expect(held.sum().item<float>() == 3 * 64, "overwritten");
    }
  });
}

TEST(RankArena, LeavesOtherThreadsToTheHeap) {
  inProcess([] {
    plan::Plan plan = samplePlan(1);
    std::unique_ptr<Device> device = makeCpuDevice();
    RankArena arena(plan, 0, *device);
    std::vector<at::Tensor> values(plan.values.size());
    for (int program = 0; program < 4; ++program) {
      int64_t heap = heapAllocations();
      {
        RankArena::Scope scope(arena, 3);
        at::Tensor own = at::empty({256});
        // One is allocated there, the other only freed.
        std::thread([moved = std::move(own)]() mutable {
          at::Tensor other = at::full({256}, 1.0f);
          expect(other.sum().item<float>() == 256, "contents");
          moved.reset();
        }).join();
        arena.settle(values);
      }
      arena.endProgram();
      if (program > 1)
        expect(heapAllocations() - heap >= 1 && heapAllocations() - heap <= 2,
               "of the other thread");
    }
  });
}

TEST(RankArena, MayEndBeforeItsTensors) {
  inProcess([] {
    plan::Plan plan = samplePlan(1);
    std::vector<at::Tensor> values(plan.values.size());
    at::Tensor survivor;
    {
      std::unique_ptr<Device> device = makeCpuDevice();
      RankArena arena(plan, 0, *device);
      for (int program = 0; program < 3; ++program) {
        {
          RankArena::Scope scope(arena, 3);
          at::Tensor tensor = at::full({64}, 2.0f);
          if (program == 2)
            survivor = tensor;
        }
        arena.endProgram();
      }
    }
    expect(survivor.sum().item<float>() == 128, "contents");
  });
}

/// Has none.
class NoMemory : public AllocationSource {
public:
  c10::DataPtr allocate(size_t) override {
    throw std::runtime_error("no memory");
  }
};

TEST(UseHeapTest, ServesInsteadOfWhatIsAroundIt) {
  installSteeredAllocator();
  alignas(64) char place[400];
  NoMemory source;
  UseAllocationSource use(source);
  SteerAllocation steer(place, sizeof(place));
  {
    UseHeap heap;
    EXPECT_NE(at::empty({100}).data_ptr(), place);
    EXPECT_EQ(at::full({8}, 2.0).sum().item<float>(), 16);
  }
  EXPECT_EQ(at::empty({100}).data_ptr(), place);
  EXPECT_THROW(at::empty({8}), std::runtime_error);
}

} // namespace
} // namespace fsdp::test
