//===- NativeFormTest.cpp - native checkpoints for other programs ---------===//
//
// That PyTorch goes on from them, and fsdp-run from PyTorch's, is tested in
// test/parity/test_interchange.py.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Runtime/Checkpoint/NativeForm.h"
#include "Support/Fixtures.h"
#include "Support/SamplePlan.h"
#include "fsdp/Runtime/Error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <filesystem>
#include <functional>

namespace fsdp::test {
namespace {

using nlohmann::json;
using runtime::SavedState;
using runtime::SavedTensor;
using testing::Contains;
using testing::HasSubstr;
using testing::Not;

class NativeForm : public testing::Test {
protected:
  /// The state of a run of the plan by another program, after 4 steps.
  NativeForm() {
    plan.optimizer.name = "adamw";
    for (const plan::Param &param : plan.params) {
      add(param.name, param.spec);
      if (!param.requiresGrad || param.unused)
        continue;
      for (std::string name : {"exp_avg", "exp_avg_sq"})
        add("optimizer.state." + param.name + "." + name, param.spec);
      add("optimizer.state." + param.name + ".step", {});
      const float updates = 4;
      std::memcpy(memory.back().data(), &updates, 4);
    }
    for (const plan::Buffer &buffer : plan.buffers)
      add(buffer.name, buffer.spec);
    state.values["lr_scheduler.last_epoch"] = 4;
    for (auto &[name, value] : runtime::torchOptions(plan, 4))
      state.values[name] = value;
  }

  /// In one chunk.
  void add(const std::string &name, const plan::TensorSpec &spec) {
    std::vector<std::byte> &data = memory.emplace_back(
        size_t(spec.numBytes()), std::byte(state.tensors.size()));
    state.tensors[name] = {
        spec,
        {{{std::vector<int64_t>(spec.shape.size(), 0), spec.shape},
          data,
          "file"}}};
  }

  std::string write() {
    return errorOf([&] {
      remarks = runtime::writeNative(dir / "run", "from", state, plan,
                                     dir / "plan.json", start);
    });
  }

  ScratchDir dir;
  plan::Plan plan = samplePlan(2);
  std::deque<std::vector<std::byte>> memory;
  SavedState state;
  runtime::NativeStart start{7, std::nullopt};
  std::vector<std::string> remarks;
};

TEST_F(NativeForm, KeepsTensorsAndState) {
  state.values["train_state.note"] = {1, "two", {{"x", nullptr}}};
  state.values["dataloader.dp_rank_0"] = json::binary({1});
  state.values["train_state.loss"] = std::nan("");
  add("train_state.extra", {{2}, plan::DType::Int8});
  ASSERT_EQ(write(), "no error");
  int64_t samples = 4 * plan.worldSize * plan.accumulationSteps *
                    plan.inputs[0].spec.shape[0];
  EXPECT_THAT(remarks,
              Contains(HasSubstr("assumed: " + std::to_string(samples) +
                                 " samples were taken, seed 7")));
  for (std::string name :
       {"dataloader.dp_rank_0", "train_state.loss", "train_state.extra"})
    EXPECT_THAT(remarks, Contains("left out: " + name));
  SavedState read = runtime::readNative(dir / "run/step-4", &plan);
  state.tensors.erase("train_state.extra");
  // Tied parameters are there under each name.
  size_t aliases = 0;
  for (const plan::Param &param : plan.params)
    aliases += param.aliases.size();
  ASSERT_EQ(read.tensors.size(), state.tensors.size() + aliases);
  for (const auto &[name, tensor] : state.tensors) {
    const SavedTensor &other = read.tensors.at(name);
    EXPECT_EQ(other.spec, tensor.spec);
    ASSERT_EQ(other.chunks.size(), 1u);
    EXPECT_TRUE(std::ranges::equal(other.chunks[0].data, tensor.chunks[0].data))
        << name;
  }
  EXPECT_EQ(read.values.at("train_state.step"), 4);
  EXPECT_EQ(read.values.at("train_state.note"),
            state.values.at("train_state.note"));
  const json &run = read.values.at("fsdp_mlir.run");
  EXPECT_EQ(run.at("updates"), 4);
  EXPECT_EQ(run.at("samples"), samples);
  // And so again, with what only a run of ours has.
  std::filesystem::remove_all(dir / "run");
  state = read;
  ASSERT_EQ(write(), "no error");
  EXPECT_THAT(remarks, testing::IsEmpty());
  EXPECT_EQ(runtime::readNative(dir / "run/step-4", &plan).values, read.values);
  EXPECT_THAT(write(), HasSubstr("step-4: cannot write: it already exists"));
}

TEST_F(NativeForm, SaysWhereOptionsDiffer) {
  std::string weight = plan.params[0].name;
  state.values["optimizer.param_groups." + weight + ".weight_decay"] = 0.5;
  state.values["optimizer.param_groups." + weight + ".foreach"] = true;
  ASSERT_EQ(write(), "no error");
  EXPECT_THAT(remarks, Contains(HasSubstr(weight + ".weight_decay was 0.5; "
                                                   "the plan has ")));
  EXPECT_THAT(remarks, Not(Contains(HasSubstr("foreach"))));
}

TEST_F(NativeForm, FollowsTheSchedule) {
  plan.lrSchedule = plan::LRSchedule{4, "linear", 10, 0.0};
  plan.optimizer.lr = 1;
  std::string key = "optimizer.param_groups." + plan.params[0].name + ".";
  EXPECT_EQ(runtime::torchOptions(plan, 1).at(key + "lr"), 0.5);
  EXPECT_EQ(runtime::torchOptions(plan, 1).at(key + "initial_lr"), 1.0);
}

TEST_F(NativeForm, RefusesWhatThePlanCannotGoOnFrom) {
  std::string name = plan.params[0].name;
  SavedState good = state;
  auto refused = [&](const std::function<void()> &change) {
    state = good;
    change();
    std::string error = write();
    EXPECT_FALSE(std::filesystem::exists(dir / "run/step-4"));
    return error;
  };
  EXPECT_THAT(refused([&] { state.tensors.erase(name); }),
              HasSubstr("from: no tensor \"" + name + "\""));
  EXPECT_THAT(refused([&] {
                state.tensors.erase("optimizer.state." + name + ".exp_avg");
              }),
              HasSubstr("no tensor \"optimizer.state." + name + ".exp_avg\""));
  EXPECT_THAT(
      refused([&] { state.tensors[name].spec.dtype = plan::DType::Float64; }),
      HasSubstr("as the plan has it, got float64"));
  EXPECT_THAT(refused([&] { state.values.erase("lr_scheduler.last_epoch"); }),
              HasSubstr("expected \"train_state.step\" or"));
  EXPECT_THAT(refused([&] { state.values["lr_scheduler.last_epoch"] = -1; }),
              HasSubstr("a whole number of steps"));
  EXPECT_THAT(refused([&] { state.values["fsdp_mlir.run"] = {{"step", "x"}}; }),
              HasSubstr("from: fsdp_mlir.run: "));
  EXPECT_THAT(refused([&] { state.values["fsdp_mlir.run"] = 3; }),
              HasSubstr("from: fsdp_mlir.run: "));
  plan.params[0].spec.shape[0] += 1;
  EXPECT_THAT(refused([] {}), HasSubstr("as the plan has it"));
}

TEST_F(NativeForm, IsVerifiedWhenRead) {
  ASSERT_EQ(write(), "no error");
  std::string folder = dir / "run/step-4";
  std::string file = folder + "/shard-00001-model-00001-of-00001.safetensors";
  std::string text = readText(file);
  text.back() ^= 1;
  writeText(file, text);
  EXPECT_THAT(errorOf([&] { runtime::readNative(folder, nullptr); }),
              HasSubstr(file + ": damaged"));
  plan.params[0].spec.shape[0] += 1;
  text.back() ^= 1;
  writeText(file, text);
  EXPECT_THAT(errorOf([&] { runtime::readNative(folder, &plan); }),
              HasSubstr("expected the plan's parameter"));
}

} // namespace
} // namespace fsdp::test
