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
#include "fsdp/Runtime/Operators/Numerics.h"

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

/// One rank's run, once it is connected.
class Training {
public:
  Training(const RunFiles &files, const RunOptions &options, Comm &comm,
           Device &device, const RankLink &link);

  RunEnd run();

private:
  using Clock = std::chrono::steady_clock;
  /// A step, and the evaluation after it.
  struct Step {
    int64_t number = 0; ///< counted from 0
    StepResult result;
    std::optional<double> evalLoss;
    int64_t allocations = 0; ///< from the heap
    Clock::time_point began, trained, ended;
  };

  void loadModel();
  void setUpMeasuring();
  void setUpData();
  /// Runs a step, and the evaluation that is due after it.
  Step runStep(int64_t number);
  /// What every rank tells of a step; also a barrier.
  std::vector<RankStats> exchangeStats(const Step &step);
  /// Reports, checks and saves the step. Returns whether the run stops.
  bool endStep(const Step &step);
  /// Ends the run, on all ranks, before a step that is not finite is saved.
  void haltIfNotFinite(const Step &step, const std::vector<RankStats> &stats);
  void writeMeasured();

  const RunFiles &files;
  const RunOptions &options;
  const RankLink &link;
  const plan::Plan &plan;
  const int64_t rank;
  Device &device;
  /// Outlives the session, whose streams may be copying to its memory.
  std::optional<Checkpointer> checkpoints;
  Session session;
  /// What the run goes on from; null: nothing, or it has been read.
  const NativeCheckpoint *resumed = nullptr;
  int64_t begin = 0; ///< steps done before
  /// Together with the data's fingerprint, this determines the order of the
  /// data.
  int64_t samplesDone = 0;
  std::optional<Reporter> reporter; ///< of rank 0
  std::optional<Profiler> profiler;
  std::optional<StepTrace> trace;
  std::optional<Prefetcher> prefetcher;
  std::optional<TimeLimit> limit;
  std::optional<SaveReport> saved; ///< what ended since the last report
};

Training::Training(const RunFiles &files, const RunOptions &options, Comm &comm,
                   Device &device, const RankLink &link)
    : files(files), options(options), link(link), plan(files.plan),
      rank(comm.rank()), device(device),
      session(plan, comm, device, link.position,
              {options.maxStreamDelay, options.seed, options.threads}) {
  if (options.hasCheckpoints()) {
    checkpoints.emplace(files, options, device, link.position, link.channel());
    resumed = checkpoints->choose();
  }
  if (resumed)
    begin = resumed->manifest().state.step;
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
  loadModel();
  session.start();
  setUpMeasuring();
  device.seed(options.seed);
  setUpData();
  limit.emplace(options.timeLimit, options.begun);
  if (resumed) {
    state.readTraining(*resumed);
    samplesDone = resumed->manifest().state.samples;
    checkpoints->begin();
    resumed = nullptr;
  }
}

void Training::loadModel() {
  if (files.initialises)
    session.initialise(options.initSeed.value_or(options.seed));
  for (const auto *weights : {&files.capturedWeights, &files.weights})
    if (*weights) {
      session.load(**weights);
      (*weights)->dropPages();
    }
}

void Training::setUpMeasuring() {
  if (options.graphs)
    session.executor().useGraphs();
  if (options.fault)
    session.executor().setFault(*options.fault);
  if (!options.profilePath.empty())
    session.executor().setProfiler(&profiler.emplace(plan));
  if (!options.tracePath.empty())
    trace.emplace(plan, device);
}

void Training::setUpData() {
  const FileData *data = files.data->asFiles();
  if (!data)
    return;
  prefetcher.emplace(plan, *data, rank, device);
  if (rank == 0)
    std::fprintf(stderr, "data: %s\n", files.data->describe().c_str());
}

RunEnd Training::run() {
  for (int64_t step = begin; step < options.steps; ++step)
    if (endStep(runStep(step)))
      return RunEnd::Stopped;
  if (checkpoints && begin >= options.steps)
    checkpoints->endStep(session, begin, samplesDone, false, /*last=*/true);
  writeMeasured();
  if (!options.outWeightsPath.empty()) {
    link.position.saving.store(true, std::memory_order_relaxed);
    saveWeights(plan, session, files.outWeights.get());
  }
  return RunEnd::Finished;
}

Training::Step Training::runStep(int64_t number) {
  if (trace && number == options.steps - 1)
    session.executor().setTrace(&*trace);
  Step step;
  step.number = number;
  int64_t allocations = heapAllocations();
  step.began = Clock::now();
  step.result = session.step([&](int64_t microbatch) {
    link.position.beat();
    int64_t first = samplesDone + microbatch * samplesPerMicrobatch(plan);
    return prefetcher ? prefetcher->next(first)
                      : files.data->inputs(first, rank);
  });
  samplesDone += plan.accumulationSteps * samplesPerMicrobatch(plan);
  step.trained = Clock::now();
  if (options.evalEvery > 0 && (number + 1) % options.evalEvery == 0)
    step.evalLoss = evaluate(files, session.executor(), rank);
  step.ended = Clock::now();
  limit->stepTook(step.ended - step.began);
  step.allocations = heapAllocations() - allocations;
  return step;
}

std::vector<RankStats> Training::exchangeStats(const Step &step) {
  // The save of this step, or one that is under way, comes before the last.
  bool saves = options.checkpointAsync ||
               (options.checkpointEvery > 0 &&
                (step.number + 1) % options.checkpointEvery == 0);
  return session.comm().exchangeStats(
      {step.result.loss, peakAllocatedBytes() + session.comm().ownBytes(),
       peakResidentBytes(), step.evalLoss.value_or(0),
       session.executor().memory().extraBytes(), step.allocations,
       step.result.badGradient,
       link.requests() |
           (limit->isNear(saves ? 2 : 1) ? kStopByTimeLimit : 0)});
}

bool Training::endStep(const Step &step) {
  std::vector<RankStats> stats = exchangeStats(step);
  uint32_t requests = requestsOf(stats);
  link.patience->stepTook(Clock::now() - step.began);
  std::chrono::duration<double> elapsed =
      step.trained - step.began + (Clock::now() - step.ended);
  // Before the checkpoint of the step, so that a run that resumes from it finds
  // the line.
  if (reporter)
    reporter->report(step.number, elapsed.count(), step.result, stats,
                     session.executor().memory(),
                     session.executor().stepGraphs(), step.evalLoss.has_value(),
                     saved);
  if (options.haltsOnNotFinite)
    haltIfNotFinite(step, stats);
  bool isLast = step.number + 1 == options.steps;
  bool stops = (requests & kStopRequest) && !isLast;
  if (checkpoints)
    saved = checkpoints->endStep(session, step.number + 1, samplesDone,
                                 requests & kSaveRequest, stops || isLast);
  if (saved)
    limit->saveTook(std::chrono::duration<double>(
        std::max(saved->stallSeconds, saved->seconds)));
  if (profiler)
    profiler->endStep(elapsed.count());
  if (!reporter)
    return stops;
  if (options.graphs && step.number == begin + StepGraphs::kWarmup)
    std::fprintf(stderr, "cuda graphs: %s\n",
                 session.executor().stepGraphs()->describe().c_str());
  if ((requests & kSaveRequest) && options.checkpointPath.empty())
    reporter->cannotSave(step.number);
  if (stops)
    reporter->stopped(step.number, requests, saved.has_value());
  return stops;
}

void Training::haltIfNotFinite(const Step &step,
                               const std::vector<RankStats> &stats) {
  std::optional<NotFinite> bad = findNotFinite(plan, step.result, stats);
  if (!bad)
    return;
  if (checkpoints)
    checkpoints->settle(session);
  std::string text =
      "step " + std::to_string(step.number + 1) + ": " + bad->text;
  // All ranks are here; one says so.
  if (rank == std::max<int64_t>(0, bad->rank))
    throw RunError(text);
  throw AbortedError(text);
}

void Training::writeMeasured() {
  if (profiler)
    writeProfile(*profiler, plan, options.planPath, session.comm(),
                 options.steps - begin,
                 session.executor().memory().extraBytes(), files.profile.get());
  if (trace)
    writeTrace(*trace, plan, options.planPath, session.comm(), options.steps,
               files.trace.get());
}

} // namespace

RunEnd runRank(const RunFiles &files, const RunOptions &options,
               const RankLink &link) {
  c10::InferenceMode guard;
  at::set_num_threads(options.threads);
  applyNumerics(files.plan);
  // On a GPU its memory alone is counted and placed.
  if (!isGpu(options.device))
    installSteeredAllocator();
  std::unique_ptr<Device> device = makeDevice(options.device, link.localRank);
  if (isGpu(options.device) && !options.anyDevice)
    checkArchitecture(files.plan, options.planPath, device->architecture());
  if (isGpu(options.device) && link.rank == 0)
    warnOfKernelCode(files.plan, options.planPath, device->architecture());
  std::unique_ptr<Comm> comm;
  try {
    comm = link.connect(*device);
    return Training(files, options, *comm, *device, link).run();
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
