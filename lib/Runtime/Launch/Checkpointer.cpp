//===- Checkpointer.cpp - a rank's part in the checkpoints of a run -------===//
#include "fsdp/Runtime/Launch/Checkpointer.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Support/Message.h"

#include <ATen/Version.h>
#include <nlohmann/json.hpp>
#include <torch/version.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <system_error>
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

/// What the bits of a step depend on beside plan, seed and data.
std::map<std::string, std::string> environmentOf(const RunOptions &options) {
  return {{"torch", TORCH_VERSION},
          {"device", isGpu(options.device) ? "cuda" : "cpu"},
          {"cpu_capability", at::get_cpu_capability()},
          {"threads", std::to_string(options.threads)}};
}

/// A thread that no signal of the process goes to.
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
  if (options.checkpointPath.empty() || options.resume == "auto")
    return;
  // Of a checkpoint elsewhere nothing in this folder is.
  std::error_code error;
  bool isOurs = chosen && std::filesystem::equivalent(
                              std::filesystem::path(chosen->path()) / "..",
                              options.checkpointPath, error);
  int64_t after = isOurs ? chosen->manifest().state.step : -1;
  for (int64_t step : folder.steps())
    if (step > after)
      throw InputError(
          folder.pathOf(step) + ": a checkpoint of another run" +
          (isOurs ? ", after step " + std::to_string(after) +
                        " from which "
                        "this one goes on"
                  : "") +
          "; expected --resume auto, or another folder with --checkpoint");
}

std::string compareRuns(const NativeCheckpoint &chosen, const RunFiles &files,
                        const RunOptions &options,
                        const std::string &dataFingerprint) {
  const RunState &state = chosen.manifest().state;
  if (state.seed != options.seed)
    throw InputError(chosen.path() + ": expected --seed " +
                     std::to_string(state.seed) + ", as it was, got " +
                     std::to_string(options.seed));
  std::string differences;
  auto compare = [&](const std::string &what, const std::string &then,
                     const std::string &now) {
    if (then != now)
      differences += (differences.empty() ? "" : "; ") + what + " was " + then +
                     ", is " + now;
  };
  compare("the world size", std::to_string(state.worldSize),
          std::to_string(files.plan.worldSize));
  if (state.worldSize == files.plan.worldSize)
    compare("the plan", state.plan, files.planHash);
  compare("the data", state.data, dataFingerprint);
  for (const auto &[what, now] : environmentOf(options)) {
    auto then = state.environment.find(what);
    if (then != state.environment.end())
      compare(what, then->second, now);
  }
  return differences;
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

std::string Checkpointer::tryOpen(const std::string &path, int64_t step) {
  json own = json::object();
  try {
    progress.begin(step);
    progress.reach(SavePoint::Choose);
    chosen = std::make_unique<NativeCheckpoint>(path);
    own["hash"] = chosen->hash();
    progress.begin(chosen->manifest().state.step);
    progress.reach(SavePoint::Verify);
    size_t count = chosen->manifest().files.size();
    for (auto file = size_t(channel->rank()); file < count;
         file += size_t(channel->worldSize()))
      chosen->verify(file, [&] {
        progress.beat();
        channel->check();
      });
  } catch (const InputError &error) {
    own["error"] = error.what();
  }
  std::vector<std::string> texts = channel->gather(print(own));
  json verdict = json::object();
  for (size_t rank = 0; rank < texts.size() && !verdict.contains("error");
       ++rank) {
    json other = json::parse(texts[rank]);
    if (other.contains("error"))
      verdict["error"] = other["error"];
    else if (other["hash"] != own["hash"])
      verdict["error"] = path + ": rank " + std::to_string(rank) +
                         " sees another checkpoint there than rank 0";
  }
  verdict = json::parse(channel->broadcast(print(verdict)));
  return verdict.value("error", "");
}

void Checkpointer::throwOnAll(const std::string &error) const {
  if (error.empty())
    return;
  if (channel->rank() == 0)
    throw InputError(error);
  throw AbortedError(error);
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
  throwOnAll(decision.value("error", ""));
  if (isAuto)
    chooseNewest(decision["steps"].get<std::vector<int64_t>>());
  else if (!options.resume.empty())
    throwOnAll(tryOpen(options.resume, 0));

  decision = json::object();
  if (channel->rank() == 0)
    try {
      if (!isAuto)
        openFolder();
      if (chosen)
        tellDifferences();
      if (!options.checkpointPath.empty())
        decision["steps"] = folder.steps();
    } catch (const InputError &error) {
      decision["error"] = error.what();
    }
  decision = json::parse(channel->broadcast(print(decision)));
  throwOnAll(decision.value("error", ""));
  if (!isAuto)
    there = decision.value("steps", there);
  progress.reach(chosen ? SavePoint::Read : SavePoint::None);
  if (chosen)
    resumedStep = chosen->manifest().state.step;
  return chosen.get();
}

void Checkpointer::chooseNewest(const std::vector<int64_t> &steps) {
  there = steps;
  if (steps.empty() == files.resumes)
    throw InputError(options.checkpointPath +
                     ": other checkpoints are there than rank 0 sees");
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    std::string error = tryOpen(folder.pathOf(*step), *step);
    if (error.empty())
      return;
    chosen.reset();
    folder.setDamaged(*step);
    if (channel->rank() == 0)
      warn(error + "; this checkpoint is skipped");
  }
  if (!steps.empty())
    throwOnAll(options.checkpointPath + ": none of its " +
               std::to_string(steps.size()) +
               " checkpoints is valid; expected one, or an empty folder to "
               "begin anew");
}

void Checkpointer::tellDifferences() const {
  std::string differences =
      compareRuns(*chosen, files, options, dataFingerprint);
  say("resumed: " + chosen->path() + ", after step " +
      std::to_string(chosen->manifest().state.step));
  if (!differences.empty())
    warn("losses may differ in bits from those of the run that was saved: " +
         differences);
}

std::optional<SaveReport> Checkpointer::endStep(Session &session, int64_t step,
                                                int64_t samples, bool asked,
                                                bool last) {
  writeStaged(session);
  bool isDue =
      options.checkpointEvery > 0 && step % options.checkpointEvery == 0;
  // That of the resumed step is there where this one makes no more.
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
  state.worldSize = files.plan.worldSize;
  state.environment = environmentOf(options);
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
    throw RunError("the plan has not staged all that a checkpoint saves");
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
