//===- RankThreads.cpp - the ranks of a plan as threads of a test ---------===//
#include "Support/RankThreads.h"
#include "fsdp/Plan/DeviceBuffers.h"
#include "fsdp/Runtime/Collectives/DeviceComm.h"
#include "fsdp/Runtime/Collectives/GlooTransport.h"
#include "fsdp/Runtime/Collectives/ShmComm.h"
#include "fsdp/Runtime/Execution/Initialise.h"
#include "fsdp/Runtime/Execution/Session.h"
#include "fsdp/Runtime/Files/DataSource.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ops/randn.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <exception>
#include <functional>
#include <optional>
#include <thread>

namespace fsdp::test {

using namespace runtime;

namespace {

using Connect = std::function<std::unique_ptr<Comm>(Device &, int64_t rank)>;

Outcome runRank(const plan::Plan &plan, const Connect &connect, int64_t rank,
                const RunSettings &settings) {
  c10::InferenceMode guard;
  at::set_num_threads(1);
  std::unique_ptr<Device> device =
      settings.makeDevice ? settings.makeDevice() : makeCpuDevice();
  std::unique_ptr<Comm> comm = connect(*device, rank);
  Position position;
  Session session(plan, *comm, *device, position, settings.streams);
  for (size_t p = 0; p < plan.params.size(); ++p) {
    at::Generator generator = at::detail::createCPUGenerator(p + 1);
    at::Tensor whole =
        at::randn(plan.params[p].spec.shape, generator, at::kFloat);
    writeParam(plan, *comm, int32_t(p), whole.mul_(0.1));
  }
  for (at::Tensor buffer : session.buffers())
    buffer.fill_(0.5);
  session.start();
  if (settings.makeDevice)
    session.executor().useGraphs();
  if (settings.makeStage)
    session.executor().setStage(settings.makeStage(session.comm()));
  std::optional<StepTrace> trace;
  if (settings.takeTrace)
    session.executor().setTrace(&trace.emplace(plan, *device));
  Outcome outcome;
  std::unique_ptr<DataSource> data = makeSyntheticData(plan, 1);
  for (int64_t step = 0; step < settings.steps; ++step) {
    auto inputs = [&](int64_t microbatch) {
      int64_t number = step * plan.accumulationSteps + microbatch;
      return data->inputs(number * samplesPerMicrobatch(plan), rank);
    };
    outcome.losses.push_back(session.step(inputs).loss);
    if (settings.takeGraphs)
      settings.takeGraphs(session.executor().stepGraphs()->describe());
  }
  if (trace)
    settings.takeTrace(*trace);
  session.quiesce();
  for (size_t p = 0; p < plan.params.size(); ++p) {
    at::Tensor shard = session.comm().shard(int32_t(p)).contiguous();
    const float *data = shard.const_data_ptr<float>();
    outcome.shards.emplace_back(data, data + shard.numel());
  }
  session.quiesce();
  return outcome;
}

std::vector<Outcome> runRanks(const plan::Plan &plan, const Connect &connect,
                              const RunSettings &settings,
                              const std::function<void()> &abort) {
  std::vector<Outcome> outcomes(size_t(plan.worldSize));
  std::vector<std::exception_ptr> errors(outcomes.size());
  std::vector<std::thread> ranks;
  for (int64_t rank = 0; rank < plan.worldSize; ++rank)
    ranks.emplace_back([&, rank] {
      try {
        outcomes[size_t(rank)] = runRank(plan, connect, rank, settings);
      } catch (...) {
        errors[size_t(rank)] = std::current_exception();
        abort();
      }
    });
  for (std::thread &rank : ranks)
    rank.join();
  for (const std::exception_ptr &error : errors)
    if (error)
      std::rethrow_exception(error);
  return outcomes;
}

} // namespace

plan::Plan compiledPlan(const std::string &name) {
  return plan::readPlan(std::string(FSDP_TEST_INPUTS) + "/plans/" + name +
                        ".json");
}

std::vector<Outcome> runOverShm(const plan::Plan &plan,
                                const RunSettings &settings) {
  ShmSegment segment(plan);
  auto connect = [&](Device &, int64_t rank) {
    return std::make_unique<ShmComm>(
        plan, segment, rank, settings.streams.maxDelayMicroseconds.has_value());
  };
  return runRanks(plan, connect, settings, [&] { segment.abort(); });
}

std::vector<Outcome> runOverGloo(plan::Plan plan, const RunSettings &settings) {
  plan::addDeviceBuffers(plan);
  auto store = c10::make_intrusive<c10d::HashStore>();
  auto connect = [&](Device &device, int64_t rank) {
    return std::make_unique<DeviceComm>(
        plan, device,
        makeGlooTransport(store, rank, plan.worldSize,
                          std::chrono::seconds(60)));
  };
  // The others notice by themselves that a rank is gone.
  return runRanks(plan, connect, settings, [] {});
}

} // namespace fsdp::test
