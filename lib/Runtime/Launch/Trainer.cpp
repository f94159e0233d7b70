//===- Trainer.cpp - one rank's run ---------------------------------------===//
#include "fsdp/Runtime/Launch/Trainer.h"
#include "fsdp/Plan/DeviceBuffers.h"
#include "fsdp/Runtime/Devices/SteeredAllocator.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Execution/OpenPlan.h"
#include "fsdp/Runtime/Execution/Profiler.h"
#include "fsdp/Runtime/Execution/Session.h"
#include "fsdp/Runtime/Execution/StepTrace.h"
#include "fsdp/Runtime/Files/DataSource.h"
#include "fsdp/Runtime/Memory/Finite.h"
#include "fsdp/Runtime/Operators/OperatorLibraries.h"

#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>

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

/// Units of training throughput in one rank's step: tokens if an input is a
/// matrix of integers, else samples.
int64_t tokensPerStep(const plan::Plan &plan) {
  for (const plan::Input &input : plan.inputs) {
    if (plan::isInteger(input.spec.dtype) && input.spec.shape.size() == 2)
      return input.spec.numElements();
  }
  return plan.inputs.empty() ? 0 : plan.inputs[0].spec.shape[0];
}

std::string digits9(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.9g", value);
  // JSON has no spelling for these.
  return std::isfinite(value) ? text : "null";
}

/// Rank 0's reports: the progress line on stderr and the metrics file.
class Reporter {
public:
  Reporter(const plan::Plan &plan, const std::string &path)
      : plan(plan),
        tokens(tokensPerStep(plan) * plan.accumulationSteps * plan.worldSize) {
    if (path.empty())
      return;
    file.emplace(path);
  }

  /// `result` is rank 0's; of it the loss alone differs between ranks.
  void report(int64_t step, double seconds, const StepResult &result,
              const std::vector<RankStats> &stats, const RankArena &memory,
              bool evaluated) {
    double loss = 0, evalLoss = 0;
    int64_t peak = 0, peakRss = 0, scratch = 0, allocations = 0;
    std::string losses, evalLosses;
    for (const RankStats &rank : stats) {
      loss += rank.loss;
      evalLoss += rank.evaluationLoss;
      peak = std::max(peak, rank.peakBytes);
      peakRss = std::max(peakRss, rank.peakRssBytes);
      scratch = std::max(scratch, rank.scratchBytes);
      allocations = std::max(allocations, rank.heapAllocations);
      losses += (losses.empty() ? "" : ", ") + digits9(rank.loss);
      evalLosses +=
          (evalLosses.empty() ? "" : ", ") + digits9(rank.evaluationLoss);
    }
    loss /= double(stats.size());
    evalLoss /= double(stats.size());
    double rate = double(tokens) / seconds;
    std::fprintf(stderr, "step: %2lld  loss: %8.5f  memory: %.2fGiB  tps: %.0f",
                 static_cast<long long>(step + 1), loss,
                 double(peak) / double(1 << 30), rate);
    if (evaluated)
      std::fprintf(stderr, "  eval_loss: %8.5f", evalLoss);
    if (result.skipped)
      std::fprintf(stderr, "  skipped: not finite at loss scale %g",
                   *result.lossScale);
    std::fputc('\n', stderr);
    if (!warned)
      warn(step, result, stats);
    if (!file)
      return;
    std::string norm;
    if (result.gradNorm)
      norm = "\"grad_norm\": " + digits9(*result.gradNorm) + ", ";
    std::string host;
    if (result.hostSeconds)
      host = "\"host_ms\": " + digits9(*result.hostSeconds * 1e3) + ", ";
    std::string scaling;
    if (result.lossScale)
      scaling = "\"loss_scale\": " + digits9(*result.lossScale) +
                ", \"skipped\": " + (result.skipped ? "true" : "false") + ", ";
    std::string evaluation;
    if (evaluated)
      evaluation = "\"eval_loss\": " + digits9(evalLoss) +
                   ", \"rank_eval_losses\": [" + evalLosses + "], ";
    std::string common(1024, '\0');
    common.resize(size_t(std::snprintf(
        common.data(), common.size(),
        "\"lr\": %.17g, \"step_ms\": %.3f, \"tokens_per_s\": %.1f, "
        "\"peak_bytes\": %lld, \"peak_rss_bytes\": %lld, "
        "\"arena_bytes\": %lld, \"scratch_bytes\": %lld, "
        "\"allocator_calls\": %lld}\n",
        result.learningRate, seconds * 1e3, rate, static_cast<long long>(peak),
        static_cast<long long>(peakRss), static_cast<long long>(memory.bytes()),
        static_cast<long long>(scratch), static_cast<long long>(allocations))));
    file->append("{\"step\": " + std::to_string(step + 1) +
                 ", \"loss\": " + digits9(loss) + ", \"rank_losses\": [" +
                 losses + "], " + evaluation + norm + scaling + host + common);
  }

private:
  /// Once, where a rank's loss or gradient is no number any more.
  void warn(int64_t step, const StepResult &result,
            const std::vector<RankStats> &stats) {
    auto say = [&](const std::string &what) {
      std::fprintf(stderr, "fsdp-run: warning: step %lld: %s\n",
                   static_cast<long long>(step + 1), what.c_str());
      warned = true;
    };
    for (size_t r = 0; r < stats.size() && !warned; ++r) {
      std::string rank = "rank " + std::to_string(r) + ": ";
      if (!std::isfinite(stats[r].loss))
        say(rank + "the loss is " + std::to_string(stats[r].loss));
      else if (stats[r].badGradient != -1)
        say(rank + "the gradient of \"" +
            plan.params[size_t(stats[r].badGradient)].name +
            "\" is not finite");
    }
    if (!warned && result.gradNorm && !std::isfinite(*result.gradNorm) &&
        !result.skipped)
      say("the norm of the gradients is " + std::to_string(*result.gradNorm));
  }

  const plan::Plan &plan;
  int64_t tokens;
  bool warned = false;
  std::optional<LineFile> file;
};

/// Of weights that are about to be written.
void warnOfWeights(const std::string &path,
                   const std::vector<std::string> &notFinite) {
  if (notFinite.empty())
    return;
  std::string others =
      notFinite.size() == 1
          ? ""
          : " and " + std::to_string(notFinite.size() - 1) + " more";
  std::fprintf(stderr, "fsdp-run: warning: %s: not finite: \"%s\"%s\n",
               path.c_str(), notFinite[0].c_str(), others.c_str());
}

/// Gathers every parameter on every rank, as a collective must; rank 0, which
/// has the file, writes them under all their names, and the persistent buffers.
void saveWeights(const plan::Plan &plan, Session &session, OutputFile *file) {
  bool writes = session.comm().rank() == 0;
  std::vector<std::string> notFinite;
  std::vector<NamedTensor> tensors;
  auto add = [&](const std::string &name, const plan::TensorSpec &spec,
                 const at::Tensor &tensor) {
    tensors.push_back({name,
                       spec,
                       {static_cast<const std::byte *>(tensor.const_data_ptr()),
                        tensor.nbytes()}});
  };
  std::vector<at::Tensor> params;
  for (size_t p = 0; p < plan.params.size(); ++p) {
    params.push_back(session.fullParam(int32_t(p)).cpu());
    if (writes && !allFinite(params[p]))
      notFinite.push_back(plan.params[p].name);
    add(plan.params[p].name, plan.params[p].spec, params[p]);
    for (const std::string &alias : plan.params[p].aliases)
      add(alias, plan.params[p].spec, params[p]);
  }
  std::vector<at::Tensor> buffers;
  for (size_t b = 0; b < plan.buffers.size(); ++b) {
    buffers.push_back(session.buffers()[b].cpu().contiguous());
    if (plan.buffers[b].persistent)
      add(plan.buffers[b].name, plan.buffers[b].spec, buffers[b]);
  }
  // No rank has failed meanwhile.
  session.quiesce();
  if (!writes)
    return;
  warnOfWeights(file->path(), notFinite);
  writeSafeTensors(*file, tensors);
}

/// Of an option that names a file for what steps after a warm-up measure.
void checkMeasuring(const char *option, const std::string &path, int64_t warmup,
                    const RunOptions &options) {
  if (path.empty())
    return;
  if (options.steps <= warmup)
    throw InputError(std::string(option) + ": expected --steps of at least " +
                     std::to_string(warmup + 1) + ", got " +
                     std::to_string(options.steps));
}

} // namespace

static plan::Plan openPlan(const RunOptions &options) {
  loadOperators(options.operatorLibraries);
  return openPlan(options.planPath, options.allowedPlugin);
}

RunFiles::RunFiles(const RunOptions &options, bool first)
    : plan(openPlan(options)) {
  if (plan.optimizer.name == "external")
    throw InputError(options.planPath +
                     ": the optimizer is \"external\", which the program that "
                     "hosts the runtime updates with; fsdp-run has none");
  if (options.backend != Backend::Shm)
    plan::addDeviceBuffers(plan);
  checkMeasuring("--profile", options.profilePath, Profiler::kWarmup, options);
  checkMeasuring("--trace", options.tracePath, StepTrace::kWarmup, options);
  if (!options.profilePath.empty() && options.maxStreamDelay)
    throw InputError("--profile: expected --streams serial, got threads");
  openWeights(options, first);
  openData(options, first);
  openEvaluation(options);
  if (!first)
    return;
  for (const auto *file : {&data, &evalData})
    if (*file)
      (*file)->checkHash();
  openOutputs(options);
}

void RunFiles::openOutputs(const RunOptions &options) {
  auto open = [](std::unique_ptr<OutputFile> &file, const std::string &path) {
    if (!path.empty())
      file = std::make_unique<OutputFile>(path);
  };
  open(outWeights, options.outWeightsPath);
  open(profile, options.profilePath);
  open(trace, options.tracePath);
}

namespace {

/// Of a file that was given with the hash that it must have.
void checkGivenHash(const std::string &path, const std::string &want,
                    const std::string &got) {
  if (!want.empty() && got != want)
    throw InputError(path + ": expected a file with hash " + want + ", got " +
                     (got.empty() ? "an index, which has none" : got));
}

} // namespace

void RunFiles::openData(const RunOptions &options, bool first) {
  if (options.dataPath.empty())
    return;
  data.emplace(options.dataPath);
  checkData(plan, *data);
  if (first && !options.dataHash.empty())
    checkGivenHash(options.dataPath, options.dataHash, data->hash());
}

void RunFiles::openWeights(const RunOptions &options, bool first) {
  std::string captured;
  if (!plan.weights.path.empty())
    captured = (std::filesystem::path(options.planPath).parent_path() /
                plan.weights.path)
                   .string();
  if (!options.weightsPath.empty())
    weights.emplace(options.weightsPath);
  else if (!captured.empty())
    weights.emplace(captured);
  else if (plan.init.empty())
    throw InputError(options.planPath +
                     ": the plan names no weights (the model was captured "
                     "without any); give some with --weights");
  initialises = !weights;
  if (!weights)
    return;
  weights->check(plan);
  if (options.weightsPath.empty()) {
    if (!first || plan.weights.hash.empty())
      return;
    if (std::string got = weights->hash(); got != plan.weights.hash)
      throw InputError(captured + ": expected weights with hash " +
                       plan.weights.hash + ", got " + got +
                       "; the file changed since the model was captured "
                       "(--weights accepts another file)");
    return;
  }
  if (first && !options.weightsHash.empty())
    checkGivenHash(options.weightsPath, options.weightsHash, weights->hash());
  if (first)
    weights->checkHash();
  for (const plan::Buffer &buffer : plan.buffers) {
    if (weights->has(buffer) || initialises || capturedWeights)
      continue;
    if (!plan.init.empty()) {
      initialises = true;
    } else if (!captured.empty()) {
      capturedWeights.emplace(captured);
      capturedWeights->check(plan);
    } else {
      throw InputError(weights->path() + ": no tensor for buffer \"" +
                       buffer.name + "\"");
    }
  }
}

void RunFiles::openEvaluation(const RunOptions &options) {
  if (options.evalEvery == 0)
    return;
  if (plan.evaluation.empty())
    throw InputError(options.planPath +
                     ": --eval-every: the plan has no evaluation; capture the "
                     "model with --evaluation (capture(..., evaluation=True))");
  if (data && options.evalDataPath.empty())
    throw InputError(
        "--eval-every: expected --eval-data where --data is given");
  if (!options.evalDataPath.empty()) {
    evalData.emplace(options.evalDataPath);
    checkData(plan, *evalData);
  }
  evalBatches = std::max<int64_t>(1, options.evalBatches);
  if (evalData && options.evalBatches == 0) {
    int64_t samples = std::numeric_limits<int64_t>::max();
    for (const plan::Input &input : plan.inputs)
      samples =
          std::min(samples, evalData->entries().at(input.name).spec.shape[0] /
                                input.spec.shape[0]);
    evalBatches = std::max<int64_t>(1, samples / plan.worldSize);
  }
}

namespace {

/// The mean loss of this rank's batches of the evaluation data, which are the
/// same at every call.
double evaluate(const RunFiles &files, const RunOptions &options,
                Executor &executor, int64_t rank) {
  const SafeTensors *data = files.evalData ? &*files.evalData : nullptr;
  double sum = 0;
  for (int64_t batch = 0; batch < files.evalBatches; ++batch)
    // Another seed than that of the training data.
    sum += executor.evaluate([&](int64_t) {
      return stepInputs(files.plan, data, ~options.seed, batch, rank);
    });
  return sum / double(files.evalBatches);
}

} // namespace

namespace {

void train(const RunFiles &files, const RunOptions &options, Comm &comm,
           Device &device, Position &position) {
  const plan::Plan &plan = files.plan;
  int64_t rank = comm.rank();
  StreamSettings streams{options.maxStreamDelay, options.seed, options.threads};
  Session session(plan, comm, device, position, streams);
  std::optional<Reporter> reporter;
  if (rank == 0)
    reporter.emplace(plan, options.metricsPath);
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
  const SafeTensors *data = files.data ? &*files.data : nullptr;
  for (int64_t step = 0; step < options.steps; ++step) {
    if (trace && step == options.steps - 1)
      session.executor().setTrace(&*trace);
    int64_t allocations = heapAllocations();
    auto begin = std::chrono::steady_clock::now();
    StepResult result = session.step([&](int64_t microbatch) {
      return stepInputs(plan, data, options.seed,
                        step * plan.accumulationSteps + microbatch, rank);
    });
    auto trained = std::chrono::steady_clock::now();
    bool evaluates =
        options.evalEvery > 0 && (step + 1) % options.evalEvery == 0;
    double evalLoss =
        evaluates ? evaluate(files, options, session.executor(), rank) : 0;
    auto evaluated = std::chrono::steady_clock::now();
    std::vector<RankStats> stats = session.comm().exchangeStats(
        {result.loss, peakAllocatedBytes() + session.comm().ownBytes(),
         peakResidentBytes(), evalLoss,
         session.executor().memory().extraBytes(),
         heapAllocations() - allocations, result.badGradient});
    std::chrono::duration<double> elapsed =
        trained - begin + (std::chrono::steady_clock::now() - evaluated);
    if (reporter)
      reporter->report(step, elapsed.count(), result, stats,
                       session.executor().memory(), evaluates);
    if (reporter && options.graphs && step == StepGraphs::kWarmup)
      std::fprintf(stderr, "cuda graphs: %s\n",
                   session.executor().stepGraphs()->describe().c_str());
    if (profiler)
      profiler->endStep(elapsed.count());
  }
  if (profiler)
    writeProfile(*profiler, plan, options.planPath, session.comm(),
                 options.steps, session.executor().memory().extraBytes(),
                 files.profile.get());
  if (trace)
    writeTrace(*trace, plan, options.planPath, session.comm(), options.steps,
               files.trace.get());
  if (!options.outWeightsPath.empty()) {
    position.saving.store(true, std::memory_order_relaxed);
    saveWeights(plan, session, files.outWeights.get());
  }
}

} // namespace

void runRank(const RunFiles &files, const RunOptions &options,
             const RankLink &link) {
  c10::InferenceMode guard;
  at::set_num_threads(options.threads);
  // On a GPU its memory alone is counted and placed.
  if (!isGpu(options.device))
    installSteeredAllocator();
  std::unique_ptr<Device> device = makeDevice(options.device, link.localRank);
  std::unique_ptr<Comm> comm;
  try {
    comm = link.connect(*device);
    train(files, options, *comm, *device, link.position);
  } catch (const AbortedError &) {
    throw;
  } catch (const std::exception &error) {
    link.fail(error.what());
    throw;
  }
}

} // namespace fsdp::runtime
