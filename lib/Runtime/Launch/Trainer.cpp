//===- Trainer.cpp - one rank's run ---------------------------------------===//
#include "fsdp/Runtime/Launch/Trainer.h"
#include "fsdp/Runtime/Devices/SteeredAllocator.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Execution/OpenPlan.h"
#include "fsdp/Runtime/Execution/Profiler.h"
#include "fsdp/Runtime/Execution/Session.h"
#include "fsdp/Runtime/Execution/StepTrace.h"
#include "fsdp/Runtime/Files/Prefetcher.h"
#include "fsdp/Runtime/Launch/Checkpointer.h"
#include "fsdp/Runtime/Launch/Reporter.h"
#include "fsdp/Runtime/Launch/Requests.h"
#include "fsdp/Runtime/Launch/SaveWeights.h"
#include "fsdp/Runtime/Launch/TimeLimit.h"

#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>

namespace fsdp::runtime {

namespace {

/// VmHWM of this process in bytes, 0 where the kernel does not say.
int64_t peakResidentBytes() {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line))
    if (line.starts_with("VmHWM:"))
      return std::strtoll(line.c_str() + 6, nullptr, 10) * 1024;
  return 0;
}

/// The mean loss of this rank's batches of the evaluation data, which are the
/// same at every call.
double evaluate(const RunFiles &files, Executor &executor, int64_t rank) {
  int64_t stride = samplesPerMicrobatch(files.plan);
  double sum = 0;
  for (int64_t batch = 0; batch < files.evalBatches; ++batch)
    sum += executor.evaluate(
        [&](int64_t) { return files.evalData->inputs(batch * stride, rank); });
  return sum / double(files.evalBatches);
}

/// Ends the run, on all ranks, before the step is saved.
[[noreturn]] void halt(int64_t step, int64_t rank, const NotFinite &bad) {
  std::string text = "step " + std::to_string(step + 1) + ": " + bad.text;
  // All ranks are here; one says so.
  if (rank == std::max<int64_t>(0, bad.rank))
    throw RunError(text);
  throw AbortedError(text);
}

RunEnd train(const RunFiles &files, const RunOptions &options, Comm &comm,
             Device &device, const RankLink &link) {
  const plan::Plan &plan = files.plan;
  int64_t rank = comm.rank();
  Position &position = link.position;
  StreamSettings streams{options.maxStreamDelay, options.seed, options.threads};
  // Outlives the session, whose streams may be copying to its memory.
  std::optional<Checkpointer> checkpoints;
  Session session(plan, comm, device, position, streams);
  if (options.hasCheckpoints())
    checkpoints.emplace(files, options, device, position, link.channel());
  const NativeCheckpoint *resumed =
      checkpoints ? checkpoints->choose() : nullptr;
  int64_t begin = resumed ? resumed->manifest().state.step : 0;
  std::optional<Reporter> reporter;
  if (rank == 0)
    reporter.emplace(plan,
                     ReportSettings{options.metricsPath,
                                    options.tensorboardFolder, options.steps,
                                    options.checkpointEvery, options.peakFlops},
                     begin);
  checkMeasuring(options, begin);
  SessionState state(plan, session, device);
  if (resumed)
    state.readModel(*resumed);
  if (files.initialises)
    session.initialise(options.initSeed.value_or(options.seed));
  for (const auto *weights : {&files.capturedWeights, &files.weights})
    if (*weights) {
      session.load(**weights);
      (*weights)->dropPages();
    }
  session.start();
  if (options.graphs)
    session.executor().useGraphs();
  if (options.fault)
    session.executor().setFault(*options.fault);
  std::optional<Profiler> profiler;
  if (!options.profilePath.empty())
    session.executor().setProfiler(&profiler.emplace(plan));
  std::optional<StepTrace> trace;
  if (!options.tracePath.empty())
    trace.emplace(plan, device);

  device.seed(options.seed);
  std::optional<Prefetcher> prefetcher;
  if (const FileData *data = files.data->asFiles())
    prefetcher.emplace(plan, *data, rank, device);
  if (prefetcher && rank == 0)
    std::fprintf(stderr, "data: %s\n", files.data->describe().c_str());
  // With the data's fingerprint, all that the order of the data is known by.
  int64_t samplesDone = 0;
  TimeLimit limit(options.timeLimit, options.begun);
  if (resumed) {
    state.readTraining(*resumed);
    samplesDone = resumed->manifest().state.samples;
    checkpoints->begin();
  }
  std::optional<SaveReport> saved; // what ended since the last line
  for (int64_t step = begin; step < options.steps; ++step) {
    if (trace && step == options.steps - 1)
      session.executor().setTrace(&*trace);
    int64_t allocations = heapAllocations();
    auto started = std::chrono::steady_clock::now();
    StepResult result = session.step([&](int64_t microbatch) {
      position.beat();
      int64_t first = samplesDone + microbatch * samplesPerMicrobatch(plan);
      return prefetcher ? prefetcher->next(first)
                        : files.data->inputs(first, rank);
    });
    samplesDone += plan.accumulationSteps * samplesPerMicrobatch(plan);
    auto trained = std::chrono::steady_clock::now();
    bool evaluates =
        options.evalEvery > 0 && (step + 1) % options.evalEvery == 0;
    double evalLoss = evaluates ? evaluate(files, session.executor(), rank) : 0;
    auto evaluated = std::chrono::steady_clock::now();
    limit.stepTook(evaluated - started);
    // The save of this step, or one that is under way, comes before the last.
    bool saves =
        options.checkpointAsync || (options.checkpointEvery > 0 &&
                                    (step + 1) % options.checkpointEvery == 0);
    std::vector<RankStats> stats = session.comm().exchangeStats(
        {result.loss, peakAllocatedBytes() + session.comm().ownBytes(),
         peakResidentBytes(), evalLoss,
         session.executor().memory().extraBytes(),
         heapAllocations() - allocations, result.badGradient,
         link.requests() |
             (limit.isNear(saves ? 2 : 1) ? kStopByTimeLimit : 0)});
    uint32_t requests = requestsOf(stats);
    link.patience->stepTook(std::chrono::steady_clock::now() - started);
    std::chrono::duration<double> elapsed =
        trained - started + (std::chrono::steady_clock::now() - evaluated);
    // Before the checkpoint of the step: who goes on from that finds the line.
    if (reporter)
      reporter->report(step, elapsed.count(), result, stats,
                       session.executor().memory(), evaluates, saved);
    bool stops = (requests & kStopRequest) && step + 1 < options.steps;
    if (options.haltsOnNotFinite)
      if (std::optional<NotFinite> bad = findNotFinite(plan, result, stats)) {
        if (checkpoints)
          checkpoints->settle(session);
        halt(step, rank, *bad);
      }
    if (checkpoints)
      saved = checkpoints->endStep(session, step + 1, samplesDone,
                                   requests & kSaveRequest,
                                   stops || step + 1 == options.steps);
    if (saved)
      limit.saveTook(std::chrono::duration<double>(
          std::max(saved->stallSeconds, saved->seconds)));
    if (reporter && options.graphs && step == begin + StepGraphs::kWarmup)
      std::fprintf(stderr, "cuda graphs: %s\n",
                   session.executor().stepGraphs()->describe().c_str());
    if (profiler)
      profiler->endStep(elapsed.count());
    if (reporter && (requests & kSaveRequest) && options.checkpointPath.empty())
      reporter->cannotSave(step);
    if (stops) {
      if (reporter)
        reporter->stopped(step, requests, saved.has_value());
      return RunEnd::Stopped;
    }
  }
  if (checkpoints && begin >= options.steps)
    checkpoints->endStep(session, begin, samplesDone, false, /*last=*/true);
  if (profiler)
    writeProfile(*profiler, plan, options.planPath, session.comm(),
                 options.steps - begin,
                 session.executor().memory().extraBytes(), files.profile.get());
  if (trace)
    writeTrace(*trace, plan, options.planPath, session.comm(), options.steps,
               files.trace.get());
  if (!options.outWeightsPath.empty()) {
    position.saving.store(true, std::memory_order_relaxed);
    saveWeights(plan, session, files.outWeights.get());
  }
  return RunEnd::Finished;
}

} // namespace

RunEnd runRank(const RunFiles &files, const RunOptions &options,
               const RankLink &link) {
  c10::InferenceMode guard;
  at::set_num_threads(options.threads);
  // On a GPU its memory alone is counted and placed.
  if (!isGpu(options.device))
    installSteeredAllocator();
  std::unique_ptr<Device> device = makeDevice(options.device, link.localRank);
  if (isGpu(options.device) && !options.anyDevice)
    checkArchitecture(files.plan, options.planPath, device->architecture());
  std::unique_ptr<Comm> comm;
  try {
    comm = link.connect(*device);
    return train(files, options, *comm, *device, link);
  } catch (const AbortedError &) {
    throw;
  } catch (const PeerHungError &error) {
    link.hung(error);
    throw;
  } catch (const std::exception &error) {
    link.fail(error.what());
    throw;
  }
}

} // namespace fsdp::runtime
