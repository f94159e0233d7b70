//===- Checkpointer.cpp - a rank's part in the checkpoints of a run -------===//
#include "fsdp/Runtime/Launch/Checkpointer.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Launch/OpenTogether.h"
#include "fsdp/Support/Message.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <utility>
#include <variant>

namespace fsdp::runtime {

using nlohmann::json;
using std::chrono::duration;
using std::chrono::steady_clock;

namespace {

/// Paths may have any bytes.
std::string print(const json &message) {
  return message.dump(-1, ' ', false, json::error_handler_t::replace);
}

double secondsSince(steady_clock::time_point begin) {
  return duration<double>(steady_clock::now() - begin).count();
}

void say(const std::string &text) {
  std::fprintf(stderr, "%s\n", oneLine(text).c_str());
}

void warn(const std::string &text) { say("fsdp-run: warning: " + text); }

/// Starts a thread that receives no signals of the process.
template <typename BodyT> std::thread startQuietly(BodyT body) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread(std::move(body));
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

} // namespace

void checkOwn(const CheckpointFolder &folder, const RunOptions &options,
              const NativeCheckpoint *chosen) {
  if (!options.checkpointPath.empty() && options.resume != "auto")
    checkOwn(folder, options.checkpointPath, chosen,
             "--resume auto, or another folder with --checkpoint");
}

std::string compareRuns(const NativeCheckpoint &chosen, const RunFiles &files,
                        const RunOptions &options,
                        const std::string &dataFingerprint) {
  const RunState &then = chosen.manifest().state;
  if (then.seed != options.seed)
    throw InputError(chosen.path() + ": expected --seed " +
                     std::to_string(then.seed) + ", as it was, got " +
                     std::to_string(options.seed));
  RunState now;
  now.worldSize = files.plan.worldSize;
  now.plan = files.planHash;
  now.data = dataFingerprint;
  now.environment = environmentOfBits(isGpu(options.device), options.threads);
  return compareRuns(then, now);
}

Checkpointer::Checkpointer(const RunFiles &files, const RunOptions &options,
                           Device &device, Position &position,
                           std::unique_ptr<Channel> given)
    : files(files), options(options), device(device), channel(std::move(given)),
      progress(channel->rank(), position, options.saveFault),
      folder(options.checkpointPath),
      dataFingerprint(files.data->fingerprint()) {
  // A graph has no step of its own that copies.
  if (options.checkpointAsync && !options.graphs)
    for (const plan::Instruction &instruction : files.plan.instructions)
      if (const auto *stage = std::get_if<plan::StageState>(&instruction.kind))
        stagedByPlan.insert(stage->unit);
}

Checkpointer::~Checkpointer() {
  channel->stop();
  if (thread.joinable())
    thread.join();
}

void Checkpointer::openFolder() {
  if (options.checkpointPath.empty())
    return;
  folder.open();
  checkOwn(folder, options, chosen.get());
}

const NativeCheckpoint *Checkpointer::choose() {
  bool isAuto = options.resume == "auto";
  // Rank 0 decides; an error of its own ends the others, too.
  json decision = json::object();
  if (channel->rank() == 0 && isAuto)
    try {
      openFolder();
      decision["steps"] = folder.steps();
    } catch (const InputError &error) {
      decision["error"] = error.what();
    }
  decision = json::parse(channel->broadcast(print(decision)));
  throwOnAll(*channel, decision.value("error", ""));
  if (isAuto)
    chooseNewest(decision["steps"].get<std::vector<int64_t>>());
  else if (!options.resume.empty()) {
    std::string error;
    chosen = openTogether(options.resume, 0, *channel, progress, error);
    throwOnAll(*channel, error);
  }

  decision = json::object();
  if (channel->rank() == 0)
    try {
      if (!isAuto)
        openFolder();
      if (chosen)
        differences = compareRuns(*chosen, files, options, dataFingerprint);
      if (!options.checkpointPath.empty())
        decision["steps"] = folder.steps();
    } catch (const InputError &error) {
      decision["error"] = error.what();
    }
  decision = json::parse(channel->broadcast(print(decision)));
  throwOnAll(*channel, decision.value("error", ""));
  if (!isAuto)
    there = decision.value("steps", there);
  progress.reach(chosen ? SavePoint::Read : SavePoint::None);
  if (chosen)
    resumedStep = chosen->manifest().state.step;
  run = chosen ? chosen->manifest().state.run : "";
  if (run.empty())
    run = newAttempt();
  return chosen.get();
}

void Checkpointer::chooseNewest(const std::vector<int64_t> &steps) {
  there = steps;
  if (steps.empty() == files.resumes)
    throw InputError(options.checkpointPath +
                     ": this rank sees other checkpoints there than rank 0");
  chosen = openNewestTogether(folder, steps, *channel, progress,
                              [](const std::string &error) {
                                warn(error + "; this checkpoint is skipped");
                              });
}

void Checkpointer::begin() {
  if (channel->rank() == 0)
    say("resumed: " + chosen->path() + ", after step " +
        std::to_string(resumedStep));
  if (!differences.empty())
    warn("losses may differ in bits from those of the run that was saved: " +
         differences);
  chosen.reset();
  progress.end();
}

std::optional<SaveReport> Checkpointer::endStep(Session &session, int64_t step,
                                                int64_t samples, bool asked,
                                                bool last) {
  writeStaged(session);
  bool isDue =
      options.checkpointEvery > 0 && step % options.checkpointEvery == 0;
  // If this run makes no further steps, the checkpoint of the resumed step is
  // already there.
  bool isThere = step == resumedStep &&
                 std::find(there.begin(), there.end(), step) != there.end();
  if (!options.checkpointPath.empty() && !isThere && (isDue || asked || last))
    save(session, step, samples, last);
  if (last)
    finish();
  if (ended)
    collect();
  return std::exchange(report, std::nullopt);
}

RunState Checkpointer::stateOf(Session &session, int64_t step,
                               int64_t samples) const {
  RunState state;
  state.step = step;
  state.samples = samples;
  state.seed = options.seed;
  state.data = dataFingerprint;
  state.plan = files.planHash;
  state.run = run;
  state.worldSize = files.plan.worldSize;
  state.environment = environmentOfBits(isGpu(options.device), options.threads);
  Executor &executor = session.executor();
  ShardedOptimizer *optimizer = executor.shardedOptimizer();
  state.updates = optimizer ? optimizer->steps() : step;
  if (GradScaler *scaler = executor.gradScaler()) {
    GradScaler::State now = scaler->state();
    state.scaler = {now.scale, now.growthTracker};
  }
  return state;
}

void Checkpointer::save(Session &session, int64_t step, int64_t samples,
                        bool last) {
  auto begin = steady_clock::now();
  collect();
  if (!source)
    source = std::make_unique<SessionState>(files.plan, session, device);
  progress.begin(step);
  progress.reach(SavePoint::Stage);
  request = {};
  request.state = stateOf(session, step, samples);
  for (const plan::Param &param : files.plan.params)
    for (const std::string &alias : param.aliases)
      request.aliases[alias] = param.name;
  bool stagesLater = !last && !stagedByPlan.empty();
  source->stage(request, /*copies=*/options.checkpointAsync,
                stagesLater ? stagedByPlan : std::set<int32_t>());
  current = {};
  current.report.step = step;
  begun = begin;
  if (stagesLater) {
    isStaging = true;
    session.executor().setStage(
        [this](int32_t unit) { return source->copyUnit(unit); });
    progress.end();
    stallSeconds = secondsSince(begin);
    return;
  }
  startWriting();
  stallSeconds = secondsSince(begin);
  if (!options.checkpointAsync) {
    collect();
    throwFailure();
  }
}

void Checkpointer::writeStaged(Session &session) {
  if (!std::exchange(isStaging, false))
    return;
  session.executor().setStage({});
  // P39 of the plan.
  if (!source->isStaged())
    throw RunError(
        "the plan has not staged everything that a checkpoint saves");
  startWriting();
}

void Checkpointer::startWriting() {
  ended = false;
  isUnderWay = true;
  if (options.checkpointAsync)
    thread = startQuietly([this] { write(begun); });
  else
    write(begun);
}

void Checkpointer::write(steady_clock::time_point begin) {
  try {
    SaveResult result = saveCheckpoint(request, folder, options.keep, *channel,
                                       progress, options.checkpointPiece);
    current.report.bytes = result.bytes;
    current.warning = result.warning;
  } catch (const SaveError &error) {
    current.report.error = error.what();
    current.failedRank = error.rank;
  } catch (const AbortedError &error) {
    current.report.error = error.what();
  } catch (const std::exception &error) {
    current.report.error = error.what();
    current.failedRank = channel->rank();
  }
  current.report.seconds = secondsSince(begin);
  ended = true;
}

void Checkpointer::collect() {
  if (!std::exchange(isUnderWay, false))
    return;
  if (thread.joinable())
    thread.join();
  current.report.stallSeconds = stallSeconds;
  report = current.report;
  if (channel->rank() != 0)
    return;
  std::string path = folder.pathOf(report->step);
  if (!current.warning.empty())
    warn(current.warning);
  if (report->error.empty())
    say("saved: " + path + "  " + std::to_string(report->bytes) + " bytes in " +
        std::to_string(int64_t(report->seconds * 1e3)) + " ms, stall " +
        std::to_string(int64_t(report->stallSeconds * 1e3)) + " ms");
  else if (options.checkpointAsync && current.failedRank >= 0)
    warn(path + " was not saved: rank " + std::to_string(current.failedRank) +
         ": " + report->error);
}

void Checkpointer::throwFailure() const {
  if (current.report.error.empty())
    return;
  if (current.failedRank == channel->rank())
    throw RunError(folder.pathOf(current.report.step) +
                   " was not saved: " + current.report.error);
  throw AbortedError(current.report.error);
}

void Checkpointer::finish() {
  collect();
  throwFailure();
  // Rank 0, which may serve the store, stays until all have read its last word.
  channel->gather("");
}

} // namespace fsdp::runtime
