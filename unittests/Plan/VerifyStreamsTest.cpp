//===- VerifyStreamsTest.cpp - P26 to P30, each broken --------------------===//
#include "Support/PlanMutations.h"
#include "fsdp/Plan/DeviceBuffers.h"
#include "fsdp/Plan/Memory.h"

#include <algorithm>

namespace fsdp::test {
namespace {

using namespace plan;

Plan streamedPlan(int64_t replicas = 1) {
  Plan plan = samplePlan(4, false, replicas);
  beginCollectives(plan);
  return plan;
}

/// The instruction itself, after `skip` others of its kind.
template <typename Kind> Instruction &at(Plan &plan, int skip = 0) {
  return plan.instructions[find<Kind>(plan, skip)];
}

/// Moves an instruction in the list.
void move(Plan &plan, size_t from, size_t to) {
  Instruction instruction = take(plan, from);
  plan.instructions.insert(plan.instructions.begin() + long(to),
                           std::move(instruction));
}

/// An arena larger than what has a place in it.
void giveArena(Plan &plan) {
  addDeviceBuffers(plan);
  std::vector<int64_t> live = replayMemory(plan, arenaModel(plan)).liveBytes();
  plan.arena = {1 << 20, *std::max_element(live.begin(), live.end())};
}

/// The wait for a collective.
size_t waitFor(const Plan &plan, const Instruction &collective) {
  for (size_t i = 0; i < plan.instructions.size(); ++i)
    if (std::holds_alternative<Wait>(plan.instructions[i].kind) &&
        plan.instructions[i].waits.front() == collective.records)
      return i;
  throw std::logic_error("no wait");
}

/// The call that reads the first gathered parameter of unit "layer".
size_t firstUse(const Plan &plan) { return find<Call>(plan); }

const std::vector<Mutation> kMutations = {
    {"ComputeOnAnotherStream", "P26",
     [](Plan &p) { at<Call>(p).stream = Stream::AllGather; }},
    {"WrongStream", "P26",
     [](Plan &p) { at<AllGather>(p).stream = Stream::ReduceScatter; }},
    {"TwoStreamsForGathers", "P26",
     [](Plan &p) { at<AllGather>(p, 1).stream = Stream::Compute; }},
    {"WaitOnAnotherStream", "P26",
     [](Plan &p) { at<Wait>(p).stream = Stream::AllGather; }},
    {"UnknownEvent", "P27", [](Plan &p) { at<Wait>(p).waits = {999}; }},
    {"LaterEvent", "P27",
     [](Plan &p) { at<Wait>(p).waits = {at<ReduceScatter>(p).records}; }},
    {"RecordsNothing", "P27", [](Plan &p) { at<AllGather>(p).records = -1; }},
    {"RecordedTwice", "P27",
     [](Plan &p) { at<AllGather>(p, 1).records = at<AllGather>(p).records; }},
    {"NoWaitForAGather", "P28",
     [](Plan &p) { take(p, waitFor(p, at<AllGather>(p, 1))); }},
    {"WaitsForAnother", "P28",
     [](Plan &p) {
       p.instructions[waitFor(p, at<AllGather>(p, 1))].waits = {};
     }},
    {"WaitTooLate", "P28",
     [](Plan &p) { move(p, waitFor(p, at<AllGather>(p, 1)), firstUse(p)); }},
    {"ReducesBeforeTheGradient", "P28",
     [](Plan &p) { at<ReduceScatter>(p).waits.clear(); }},
    {"NoWaitForAReduction", "P28",
     [](Plan &p) { take(p, waitFor(p, at<ReduceScatter>(p, 1))); }},
    {"FreedWhileReduced", "P29",
     [](Plan &p) {
       size_t wait = waitFor(p, at<ReduceScatter>(p));
       ValueId grad = first<ReduceScatter>(p).ins[0];
       Instruction call{Call{{"aten::zeros", ""}, {}, {}}, Phase::Backward};
       call.frees = {grad};
       p.instructions.insert(p.instructions.begin() + long(wait), call);
     }},
    {"WrittenWhileReduced", "P29",
     [](Plan &p) {
       size_t wait = waitFor(p, at<ReduceScatter>(p));
       ValueId grad = first<ReduceScatter>(p).ins[0];
       Call call{"aten::zero_", "", {{TensorArg{grad}}}, {}};
       call.mutates = {grad};
       p.instructions.insert(p.instructions.begin() + long(wait),
                             {call, Phase::Backward});
     }},
    {"PlaceGivenAway", "P29",
     [](Plan &p) {
       // A gather lands where a value is that the compute stream frees later.
       ValueId gathered = first<AllGather>(p, 2).outs[0];
       p.values.push_back(p.values[size_t(gathered)]);
       auto value = ValueId(p.values.size()) - 1;
       p.values[size_t(value)].offset = p.values[size_t(gathered)].offset = 64;
       at<Reshard>(p).records = 900;
       at<AllGather>(p, 2).waits = {900};
       Instruction call{Call{{"aten::zeros", ""}, {}, {value}},
                        Phase::Backward};
       call.frees = {value};
       p.instructions.insert(
           p.instructions.begin() + long(find<AllGather>(p, 2)), call);
       giveArena(p);
     }},
    {"GatheredAgainTooEarly", "P30",
     [](Plan &p) { at<AllGather>(p, 2).waits.clear(); }},
    {"ReshardedWhileGathered", "P30",
     [](Plan &p) {
       auto &last = first<AllGather>(p, 2);
       last.outs.assign(last.outs.size(), -1);
       p.instructions[waitFor(p, at<AllGather>(p, 2))].waits.clear();
     }},
};

class StreamMutations : public testing::TestWithParam<Mutation> {};

TEST_P(StreamMutations, AreCaught) {
  Plan plan = streamedPlan();
  verifyPlan(plan, "p.json");
  GetParam().apply(plan);
  expectCaught(plan, GetParam().label);
}

INSTANTIATE_TEST_SUITE_P(All, StreamMutations, testing::ValuesIn(kMutations),
                         [](const auto &info) { return info.param.name; });

TEST(VerifyStreams, AcceptsReplicas) {
  Plan plan = streamedPlan(2);
  EXPECT_NO_THROW(verifyPlan(plan, "p.json"));
  // An all-reduce takes what its reduce-scatter gives.
  plan.instructions[waitFor(plan, at<ReduceScatter>(plan))].waits.clear();
  expectCaught(plan, "P28");
}

TEST(VerifyStreams, AcceptsAPlaceThatIsFree) {
  Plan plan = streamedPlan();
  ValueId grad = first<ReduceScatter>(plan).ins[0];
  plan.instructions[waitFor(plan, at<ReduceScatter>(plan))].frees = {grad};
  ValueId shard = first<ReduceScatter>(plan, 1).outs[0];
  plan.values[grad].offset = plan.values[shard].offset = 64;
  plan.values[first<AllGather>(plan).outs[0]].offset = 4096;
  giveArena(plan);
  EXPECT_NO_THROW(verifyPlan(plan, "p.json"));
}

TEST(VerifyStreams, RoundTrips) {
  Plan plan = streamedPlan(2);
  EXPECT_EQ(printPlan(parsePlan(printPlan(plan), "p.json")), printPlan(plan));
}

} // namespace
} // namespace fsdp::test
