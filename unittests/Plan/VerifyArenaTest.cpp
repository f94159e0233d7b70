//===- VerifyArenaTest.cpp - invariants of storages and their places ------===//
#include "Support/PlanMutations.h"
#include "fsdp/Plan/Memory.h"

namespace fsdp::test {
namespace {

using namespace plan;

Plan laidOutPlan(MemoryModel model = MemoryModel::SharedHost) {
  Plan plan = samplePlan(2);
  addEvaluation(plan);
  layOutArena(plan, model);
  return plan;
}

/// The first result of the `skip`-th call.
ValueId resultOf(Plan &plan, int skip) {
  return first<Call>(plan, skip).outs[0];
}

/// Most bytes that a rank takes.
int64_t peakOf(const Plan &plan) { return peakBytes(plan, arenaModel(plan)); }

/// The first view.
ValueId viewIn(const Plan &plan) {
  for (size_t v = 0; v < plan.values.size(); ++v)
    if (plan.values[v].storage != -1)
      return ValueId(v);
  throw std::logic_error("no view");
}

const std::vector<Mutation> kMutations = {
    {"ViewOfNothing", "P1", [](Plan &p) { p.values[viewIn(p)].storage = 999; }},
    {"ViewOfItself", "P23",
     [](Plan &p) { p.values[viewIn(p)].storage = viewIn(p); }},
    {"ViewOfALaterValue", "P23",
     [](Plan &p) { p.values[viewIn(p)].storage = p.loss + 20; }},
    {"ViewOfAView", "P23",
     [](Plan &p) {
       ValueId value = resultOf(p, 11);
       p.values[value].storage = viewIn(p);
       p.values[value].offset = -1;
     }},
    {"ViewOfWhatHasEnded", "P23",
     [](Plan &p) {
       // The third call frees the result of the second.
       Value &view = p.values[resultOf(p, 3)];
       view.storage = resultOf(p, 1);
       view.offset = -1;
     }},
    {"AViewAsInput", "P23",
     [](Plan &p) { p.values[p.inputs[1].value].storage = p.inputs[0].value; }},
    {"AViewAsGatheredParameter", "P23",
     [](Plan &p) {
       p.values[first<AllGather>(p).outs[0]].storage = p.inputs[0].value;
     }},
    {"AShardWithOtherBytes", "P23",
     [](Plan &p) {
       ReduceScatter &reduce = first<ReduceScatter>(p);
       p.values[reduce.outs[0]].storage = reduce.ins[0];
       p.values[reduce.outs[0]].offset = -1;
     }},
    {"NoArena", "P24", [](Plan &p) { p.arena.reset(); }},
    {"NotAligned", "P24", [](Plan &p) { p.values[p.loss].offset += 4; }},
    {"NotAlignedForAGpu", "P24",
     [](Plan &p) {
       p.capturedFor.emplace();
       p.capturedFor->device = "cuda";
       p.values[p.loss].offset = 64;
     }},
    {"BeyondTheArena", "P24",
     [](Plan &p) { p.values[p.loss].offset = p.arena->bytes; }},
    {"ArenaTooSmall", "P24",
     [](Plan &p) {
       p.arena->bytes -= kTensorAlign;
       p.arena->lowerBound = 0;
     }},
    {"LowerBoundAboveTheArena", "P24",
     [](Plan &p) { p.arena->lowerBound = p.arena->bytes + 1; }},
    {"OffsetOfAView", "P24", [](Plan &p) { p.values[viewIn(p)].offset = 0; }},
    {"OffsetOfABuffer", "P24",
     [](Plan &p) { p.values[first<ReadBuffer>(p).out].offset = 0; }},
    {"OffsetOfAReduceInput", "P24",
     [](Plan &p) { p.values[first<ReduceScatter>(p).ins[0]].offset = 0; }},
    {"BudgetWithoutArena", "P31",
     [](Plan &p) {
       for (Value &value : p.values)
         value.offset = -1;
       p.arena.reset();
       p.memoryBudget = 1 << 30;
     }},
    {"BudgetBelowThePeak", "P31",
     [](Plan &p) { p.memoryBudget = peakOf(p) - 1; }},
    {"BudgetOfTheArenaAlone", "P31",
     [](Plan &p) { p.memoryBudget = p.arena->bytes; }},
    {"MoreOptimizerState", "P31",
     [](Plan &p) {
       p.memoryBudget = peakOf(p);
       p.optimizer.name = "adam";
       p.optimizer.amsgrad = true;
     }},
    {"TwoAtOnePlace", "P25",
     [](Plan &p) {
       p.values[p.inputs[0].value].offset = p.values[p.inputs[1].value].offset;
     }},
    {"OneWithinAnother", "P25",
     [](Plan &p) {
       // x is 48 bytes, y 80: two places of 64.
       p.values[p.inputs[0].value].offset =
           p.values[p.inputs[1].value].offset + 64;
     }},
    {"ALongerLife", "P25",
     [](Plan &p) {
       p.values[resultOf(p, 3)].offset = p.values[resultOf(p, 1)].offset;
       p.instructions[find<Call>(p, 2)].frees.clear();
     }},
};

class VerifyArena : public testing::TestWithParam<Mutation> {};

TEST_P(VerifyArena, CatchesMutation) {
  Plan plan = laidOutPlan();
  ASSERT_NO_THROW(verifyPlan(plan, "p.json"));
  GetParam().apply(plan);
  expectCaught(plan, GetParam().label);
}

INSTANTIATE_TEST_SUITE_P(All, VerifyArena, testing::ValuesIn(kMutations),
                         [](const auto &info) { return info.param.name; });

/// Every pair of storages that are alive together, put on one another.
TEST(VerifyArena, CatchesEveryOverlap) {
  for (MemoryModel model : {MemoryModel::SharedHost, MemoryModel::Device}) {
    Plan plan = laidOutPlan(model);
    ASSERT_NO_THROW(verifyPlan(plan, "p.json"));
    Memory memory = replayMemory(plan, model);
    int mutants = 0;
    for (const Storage &a : memory.storages)
      for (const Storage &b : memory.storages) {
        bool together =
            std::any_of(a.lives.begin(), a.lives.end(), [&](const Life &life) {
              return std::any_of(
                  b.lives.begin(), b.lives.end(),
                  [&](const Life &other) { return life.overlaps(other); });
            });
        // In the order of offsets, so that the moved one is in the arena.
        if (&a == &b || !together || a.value == -1 || b.value == -1 ||
            plan.values[a.value].offset < plan.values[b.value].offset ||
            plan.values[b.value].offset + a.bytes > plan.arena->bytes)
          continue;
        Plan mutant = plan;
        mutant.values[a.value].offset = plan.values[b.value].offset;
        expectCaught(mutant, "P25");
        ++mutants;
      }
    EXPECT_GT(mutants, 50);
    std::printf("%d overlaps caught\n", mutants);
  }
}

TEST(VerifyArena, AcceptsABudgetOfThePeak) {
  for (MemoryModel model : {MemoryModel::SharedHost, MemoryModel::Device}) {
    Plan plan = laidOutPlan(model);
    plan.memoryBudget = peakOf(plan);
    EXPECT_NO_THROW(verifyPlan(plan, "p.json"));
    Plan read = parsePlan(printPlan(plan), "p.json");
    EXPECT_EQ(read.memoryBudget, plan.memoryBudget);
  }
}

TEST(VerifyArena, SaysWhatHoldsThePeak) {
  Plan plan = laidOutPlan();
  plan.memoryBudget = 100;
  auto uses = staticBytes(plan, MemoryModel::SharedHost);
  try {
    verifyPlan(plan, "p.json");
    FAIL() << "not caught";
  } catch (const PlanError &error) {
    EXPECT_THAT(error.what(),
                testing::HasSubstr("memory_budget of 100 bytes a rank, got " +
                                   std::to_string(peakOf(plan)) + ", " +
                                   std::to_string(plan.arena->bytes) +
                                   " of them the arena's; at the peak "));
    EXPECT_THAT(error.what(),
                testing::HasSubstr(
                    "parameter shards " +
                    std::to_string(uses[size_t(MemoryUse::ParamShard)])));
  }
}

TEST(VerifyArena, AcceptsPlansOfEachKind) {
  std::vector<Plan> plans = {samplePlan(1), samplePlan(2, true),
                             samplePlan(4, false, 2)};
  for (int kind = 0; kind < 3; ++kind) {
    Plan plan = kind == 0 ? samplePlan(2) : samplePlan(4, false, 2);
    if (kind == 0)
      accumulateWhole(plan);
    else if (kind == 1)
      accumulatePartial(plan);
    else
      offload(plan);
    plans.push_back(plan);
  }
  for (Plan plan : plans)
    for (MemoryModel model : {MemoryModel::SharedHost, MemoryModel::Device}) {
      addInit(plan);
      layOutArena(plan, model);
      EXPECT_NO_THROW(verifyPlan(plan, "p.json"));
      EXPECT_EQ(arenaModel(plan), model);
      EXPECT_GE(plan.arena->bytes, plan.arena->lowerBound);
      plan.init.clear();
    }
}

} // namespace
} // namespace fsdp::test
