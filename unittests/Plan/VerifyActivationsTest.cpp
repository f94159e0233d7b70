//===- VerifyActivationsTest.cpp - invariants of offloaded activations ----===//
#include "Support/PlanMutations.h"
#include "fsdp/Plan/Memory.h"

namespace fsdp::test {
namespace {

using namespace plan;

/// Two activations on the host, with their copies beside the compute stream.
Plan offloadedPlan() {
  Plan plan = samplePlan(2);
  offloadActivations(plan);
  beginCollectives(plan);
  layOutArena(plan, MemoryModel::Device);
  return plan;
}

/// The wait for the event that the first instruction of a kind records.
template <typename Kind> Instruction &waitFor(Plan &plan) {
  EventId event = plan.instructions[find<Kind>(plan)].records;
  for (Instruction &instruction : plan.instructions)
    if (instruction.waits == std::vector<EventId>{event})
      return instruction;
  throw std::logic_error("no such wait");
}

Call &call(Plan &plan, const std::string &op) {
  for (Instruction &instruction : plan.instructions)
    if (auto *call = std::get_if<Call>(&instruction.kind);
        call && call->op == op)
      return *call;
  throw std::logic_error("no such call");
}

const std::vector<Mutation> kMutations = {
    {"UsedOnTheDevice", "P32",
     [](Plan &p) {
       // The difference from y, which backward multiplies.
       ValueId value = first<OffloadActivation>(p, 1).ins[0];
       for (Instruction &instruction : p.instructions)
         std::erase(instruction.frees, value);
       call(p, "aten::mean").args[0] = {TensorArg{value}};
     }},
    {"UsedOnTheHost", "P32",
     [](Plan &p) {
       call(p, "aten::mean").args[0] = {
           TensorArg{first<OffloadActivation>(p).out}};
     }},
    {"ReloadsWhatIsOnTheDevice", "P32",
     [](Plan &p) { first<ReloadActivation>(p).host = p.inputs[0].value; }},
    {"OffloadsNothing", "P32",
     [](Plan &p) { first<OffloadActivation>(p).ins.clear(); }},
    {"OffloadsAParameter", "P32",
     [](Plan &p) {
       first<OffloadActivation>(p).ins = {first<AllGather>(p).outs[0]};
     }},
    {"OffloadsTwoStorages", "P32",
     [](Plan &p) {
       first<OffloadActivation>(p).ins.push_back(p.inputs[0].value);
     }},
    {"ShapeOnTheHost", "P32",
     [](Plan &p) { p.values[first<OffloadActivation>(p).out].shape[0] = 1; }},
    {"ReloadedDtype", "P32",
     [](Plan &p) {
       p.values[first<ReloadActivation>(p).outs[0]].dtype = DType::BFloat16;
     }},
    {"ReloadedAsAView", "P32",
     [](Plan &p) {
       p.values[first<ReloadActivation>(p).outs[0]].storage = p.inputs[0].value;
     }},
    {"ResultCount", "P1",
     [](Plan &p) { first<ReloadActivation>(p).outs.clear(); }},
    {"CopyOutNotAwaited", "P29",
     [](Plan &p) { waitFor<OffloadActivation>(p).waits.clear(); }},
    {"CopyInNotAwaited", "P28",
     [](Plan &p) {
       Instruction &wait = waitFor<ReloadActivation>(p);
       wait.waits.clear();
       wait.frees.clear(); // of the host's copy, which is read
     }},
    {"CopiesOnTheWrongStream", "P26",
     [](Plan &p) {
       p.instructions[find<OffloadActivation>(p)].stream = Stream::CopyToDevice;
     }},
    {"BeyondTheHostArena", "P33",
     [](Plan &p) {
       p.values[first<OffloadActivation>(p).out].offset = p.hostArena->bytes;
     }},
    {"NoPlaceOnTheHost", "P33",
     [](Plan &p) { p.values[first<OffloadActivation>(p).out].offset = -1; }},
    {"NotAligned", "P33",
     [](Plan &p) { p.values[first<OffloadActivation>(p).out].offset += 4; }},
    {"SamePlaceOnTheHost", "P33",
     [](Plan &p) {
       p.values[first<OffloadActivation>(p).out].offset =
           p.values[first<OffloadActivation>(p, 1).out].offset;
     }},
    {"LowerBoundOfTheHost", "P33", [](Plan &p) { ++p.hostArena->lowerBound; }},
    {"NoHostArena", "P33", [](Plan &p) { p.hostArena.reset(); }},
    {"OffloadedInAnEvaluation", "P17",
     [](Plan &p) {
       p.evaluation = {p.instructions[find<OffloadActivation>(p)]};
       p.evaluationLoss = p.loss;
     }},
};

class VerifyActivations : public testing::TestWithParam<Mutation> {};

TEST_P(VerifyActivations, CatchesMutation) {
  Plan plan = offloadedPlan();
  ASSERT_NO_THROW(verifyPlan(plan, "p.json"));
  GetParam().apply(plan);
  expectCaught(plan, GetParam().label);
}

INSTANTIATE_TEST_SUITE_P(All, VerifyActivations, testing::ValuesIn(kMutations),
                         [](const auto &info) { return info.param.name; });

TEST(VerifyHostArena, IsOfOffloadedActivations) {
  Plan plan = samplePlan(2);
  plan.hostArena = {64, 64};
  expectCaught(plan, "P33");
}

TEST(HostMemory, IsAliveFromCopyToCopy) {
  Plan plan = offloadedPlan();
  Memory host = replayHostMemory(plan);
  ASSERT_EQ(host.storages.size(), 2u);
  // [4, 7] and [4, 5] of float32, at multiples of 64 bytes.
  EXPECT_EQ(host.storages[0].bytes, 128);
  EXPECT_EQ(host.storages[1].bytes, 128);
  EXPECT_EQ(plan.hostArena->bytes, 256);
  EXPECT_EQ(plan.hostArena->lowerBound, 256);
  for (int i : {0, 1}) {
    const Life &life = host.storages[size_t(i)].lives.at(0);
    EXPECT_EQ(size_t(life.first), find<OffloadActivation>(plan, i));
    // Of those under way: to the wait.
    int reload = 0;
    while (first<ReloadActivation>(plan, reload).host !=
           host.storages[size_t(i)].value)
      ++reload;
    EXPECT_EQ(size_t(life.last), find<ReloadActivation>(plan, reload) + 1);
  }
}

TEST(HostMemory, IsNotTheDevices) {
  Plan plain = samplePlan(2), plan = offloadedPlan();
  ValueId onHost = first<OffloadActivation>(plan).out;
  EXPECT_EQ(replayMemory(plan, MemoryModel::Device).storageOf[onHost], -1);
  EXPECT_EQ(replayHostMemory(plain).storages.size(), 0u);
}

TEST(HostMemory, SurvivesTheFile) {
  Plan plan = offloadedPlan();
  std::string text = printPlan(plan);
  EXPECT_EQ(printPlan(parsePlan(text, "p.json")), text);
  EXPECT_THAT(text, testing::HasSubstr("\"host_arena\": {\"bytes\": 256"));
  EXPECT_THAT(printPlan(samplePlan(2)),
              testing::Not(testing::HasSubstr("host_arena")));
}

} // namespace
} // namespace fsdp::test
