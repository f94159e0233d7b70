//===- VerifyBuffersTest.cpp - memory of collectives beside their results -===//
#include "Support/PlanMutations.h"
#include "fsdp/Plan/DeviceBuffers.h"
#include "fsdp/Plan/Memory.h"

#include <algorithm>

namespace fsdp::test {
namespace {

using namespace plan;

/// Two replicas of two ranks, unit "layer" on the host.
Plan bufferedPlan() {
  Plan plan = samplePlan(4, false, 2);
  offload(plan);
  addDeviceBuffers(plan);
  return plan;
}

template <typename Kind>
Instruction &instruction(Plan &plan, const std::string &unit) {
  for (Instruction &candidate : plan.instructions)
    if (auto *kind = std::get_if<Kind>(&candidate.kind);
        kind && plan.units[size_t(kind->unit)].name == unit)
      return candidate;
  throw std::logic_error("no such instruction");
}

TEST(DeviceBuffers, AreOfFSDP2sSizes) {
  Plan plan = bufferedPlan();
  EXPECT_NO_THROW(verifyPlan(plan, "p.json"));
  auto spec = [&](const Instruction &i) {
    return static_cast<const TensorSpec &>(plan.values[size_t(i.buffer)]);
  };
  auto floats = [](int64_t n) { return TensorSpec{{n}, DType::Float32}; };
  // w1 [3, 7] over two ranks: rows of two rows; w2 [7, 5] and b [5]: of four
  // rows and of three elements.
  EXPECT_EQ(spec(instruction<ReduceScatter>(plan, "layer")), floats(2 * 2 * 7));
  EXPECT_EQ(spec(instruction<AllReduce>(plan, "layer")), floats(2 * 7));
  std::string root = plan.units[size_t(plan.params.back().unit)].name;
  EXPECT_EQ(spec(instruction<ReduceScatter>(plan, root)),
            floats(2 * (4 * 5 + 3)));
  EXPECT_EQ(spec(instruction<CopyToDevice>(plan, "layer")),
            (TensorSpec{{64}, DType::UInt8}));
}

TEST(DeviceBuffers, EndWithWhatUsesThem) {
  Plan plan = samplePlan(4, false, 2);
  offload(plan);
  beginCollectives(plan);
  addDeviceBuffers(plan);
  EXPECT_NO_THROW(verifyPlan(plan, "p.json"));
  Memory memory = replayMemory(plan, MemoryModel::Device);
  for (const Instruction &i : plan.instructions) {
    if (i.buffer == -1)
      continue;
    // Those of a copy are used by the gather behind it.
    const Instruction *user = &i;
    if (std::holds_alternative<CopyToDevice>(i.kind))
      user = &*std::find_if(
          plan.instructions.begin() + (&i - plan.instructions.data()),
          plan.instructions.end(), [](const Instruction &candidate) {
            return std::holds_alternative<AllGather>(candidate.kind);
          });
    ASSERT_NE(user->records, -1);
    const Storage &storage =
        memory.storages[size_t(memory.storageOf[size_t(i.buffer)])];
    const Instruction &last = instructionAt(plan, storage.lives.back().last);
    EXPECT_EQ(last.stream, Stream::Compute);
    EXPECT_NE(std::find(last.waits.begin(), last.waits.end(), user->records),
              last.waits.end());
    EXPECT_NE(std::find(last.frees.begin(), last.frees.end(), i.buffer),
              last.frees.end());
  }
}

TEST(DeviceBuffers, OfWhatAReshardKeeps) {
  // w1 [3, 7] over four ranks, rows 0, 1, 2 and none; in groups of two the
  // first keeps two rows.
  Plan plan = samplePlan(4);
  auto unit = int32_t(
      std::find_if(plan.units.begin(), plan.units.end(),
                   [](const Unit &unit) { return unit.name == "layer"; }) -
      plan.units.begin());
  int32_t w1 = plan.units[size_t(unit)].params[0];
  EXPECT_EQ(keptBegins(plan, w1, 2), (std::vector<int64_t>{0, 14, 21}));
  EXPECT_EQ(keptParts(plan, unit, 2), (std::vector<int64_t>{0, 64}));
  Instruction &reshard = instruction<Reshard>(plan, "layer");
  std::get<Reshard>(reshard.kind).keep = 2;
  auto again = find<AllGather>(plan, 2);
  std::get<AllGather>(plan.instructions[again].kind).group = 2;
  addDeviceBuffers(plan);
  EXPECT_NO_THROW(verifyPlan(plan, "p.json"));
  EXPECT_EQ(first<AllGather>(plan, 2).source,
            instruction<Reshard>(plan, "layer").buffer);
}

TEST(DeviceBuffers, AreAddedOnce) {
  Plan plan = bufferedPlan();
  std::string text = printPlan(plan);
  addDeviceBuffers(plan);
  EXPECT_EQ(printPlan(plan), text);
  EXPECT_EQ(printPlan(parsePlan(text, "p.json")), text);
}

TEST(DeviceBuffers, LieInADevicesArenaAlone) {
  Plan plan = samplePlan(2);
  layOutArena(plan, MemoryModel::SharedHost);
  EXPECT_FALSE(hasDeviceBuffers(plan));
  layOutArena(plan, MemoryModel::Device);
  ValueId flat = instruction<ReduceScatter>(plan, "layer").buffer;
  ASSERT_NE(flat, -1);
  EXPECT_NE(plan.values[size_t(flat)].offset, -1);
  EXPECT_NO_THROW(verifyPlan(plan, "p.json"));
}

const std::vector<Mutation> kMutations = {
    {"None", "P34",
     [](Plan &p) {
       Instruction &reduce = p.instructions[find<ReduceScatter>(p)];
       for (Instruction &i : p.instructions)
         std::erase(i.frees, reduce.buffer);
       reduce.buffer = -1;
     }},
    {"NoneInADevicesArena", "P34",
     [](Plan &p) {
       Plan plan = samplePlan(2);
       plan.values[size_t(first<AllGather>(plan).outs[0])].offset = 0;
       plan.arena = {1 << 20, 0};
       p = plan;
     }},
    {"WhereNoneIsNeeded", "P34",
     [](Plan &p) {
       p.values.push_back(p.values.back());
       p.instructions[find<Call>(p)].buffer = ValueId(p.values.size()) - 1;
     }},
    {"TooSmall", "P34",
     [](Plan &p) {
       --p.values[size_t(p.instructions[find<ReduceScatter>(p)].buffer)]
             .shape[0];
     }},
    {"OtherDtype", "P34",
     [](Plan &p) {
       p.values[size_t(p.instructions[find<AllReduce>(p)].buffer)].dtype =
           DType::BFloat16;
     }},
    {"NotGatheredFrom", "P34",
     [](Plan &p) {
       for (Instruction &i : p.instructions)
         if (auto *gather = std::get_if<AllGather>(&i.kind))
           gather->source = -1;
     }},
    {"GatheredFromAnother", "P34",
     [](Plan &p) {
       ValueId other = p.instructions[find<ReduceScatter>(p)].buffer;
       for (Instruction &i : p.instructions)
         if (auto *gather = std::get_if<AllGather>(&i.kind);
             gather && gather->source != -1)
           gather->source = other;
     }},
    {"UsedByACall", "P34",
     [](Plan &p) {
       Instruction &copy = p.instructions[find<CopyToDevice>(p)];
       auto use =
           std::find_if(p.instructions.begin() + long(find<CopyToDevice>(p)),
                        p.instructions.end(), [](const Instruction &i) {
                          return std::holds_alternative<Call>(i.kind);
                        });
       for (Instruction &i : p.instructions)
         std::erase(i.frees, copy.buffer);
       std::get<Call>(use->kind).args[0] = {TensorArg{copy.buffer}};
     }},
    {"FreedBeforeItsGather", "P4",
     [](Plan &p) {
       Instruction &copy = p.instructions[find<CopyToDevice>(p)];
       for (Instruction &i : p.instructions)
         std::erase(i.frees, copy.buffer);
       copy.frees = {copy.buffer};
     }},
    {"SharesStorage", "P23",
     [](Plan &p) {
       p.values[size_t(p.instructions[find<ReduceScatter>(p)].buffer)].storage =
           p.inputs[0].value;
     }},
    {"FreedWhileItIsReduced", "P29",
     [](Plan &p) {
       p = samplePlan(2);
       beginCollectives(p);
       addDeviceBuffers(p);
       size_t reduce = find<ReduceScatter>(p);
       ValueId flat = p.instructions[reduce].buffer;
       for (Instruction &i : p.instructions)
         std::erase(i.frees, flat);
       Instruction early{Wait{}, p.instructions[reduce].phase};
       early.frees = {flat};
       p.instructions.insert(p.instructions.begin() + long(reduce) + 1, early);
     }},
};

class BufferMutations : public testing::TestWithParam<Mutation> {};

TEST_P(BufferMutations, AreCaught) {
  Plan plan = bufferedPlan();
  GetParam().apply(plan);
  expectCaught(plan, GetParam().label);
}

INSTANTIATE_TEST_SUITE_P(All, BufferMutations, testing::ValuesIn(kMutations),
                         [](const auto &info) { return info.param.name; });

} // namespace
} // namespace fsdp::test
