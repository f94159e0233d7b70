//===- Reporter.cpp - the progress of a run, as rank 0 tells it -----------===//
#include "fsdp/Runtime/Launch/Reporter.h"
#include "fsdp/Plan/OperatorWork.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Launch/Requests.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <string_view>

namespace fsdp::runtime {

namespace {

constexpr std::string_view kLineBegin = "{\"step\": ";

std::string digits9(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.9g", value);
  // JSON has no spelling for these.
  return std::isfinite(value) ? text : "null";
}

/// "1:02:03", with days before it where there are any.
std::string duration(double seconds) {
  auto whole = int64_t(std::min(seconds, 1e9));
  char text[64];
  if (int64_t days = whole / 86400)
    std::snprintf(text, sizeof(text), "%lldd %02lld:%02lld:%02lld",
                  static_cast<long long>(days),
                  static_cast<long long>(whole / 3600 % 24),
                  static_cast<long long>(whole / 60 % 60),
                  static_cast<long long>(whole % 60));
  else
    std::snprintf(text, sizeof(text), "%lld:%02lld:%02lld",
                  static_cast<long long>(whole / 3600),
                  static_cast<long long>(whole / 60 % 60),
                  static_cast<long long>(whole % 60));
  return text;
}

/// Whether it is the beginning of what Reporter::writeMetrics writes.
bool isBegunLine(const std::string &text) {
  size_t size = std::min(text.size(), kLineBegin.size());
  return text.substr(0, size) == kLineBegin.substr(0, size);
}

constexpr double kGiB = 1 << 30;
/// How much the last step counts in the time of a step.
constexpr double kNewest = 0.1;

} // namespace

int64_t tokensPerStep(const plan::Plan &plan) {
  for (const plan::Input &input : plan.inputs) {
    if (plan::isInteger(input.spec.dtype) && input.spec.shape.size() == 2)
      return input.spec.numElements();
  }
  return plan.inputs.empty() ? 0 : plan.inputs[0].spec.shape[0];
}

struct Reporter::Summary {
  double seconds = 0, loss = 0, evalLoss = 0, rate = 0;
  double flops = 0; ///< of a rank, a second
  std::optional<double> utilization;
  double secondsLeft = 0;
  int64_t peak = 0, peakRss = 0, scratch = 0, allocations = 0;
  std::string losses, evalLosses;
  bool evaluated = false;
};

size_t bytesOfSteps(const std::string &path, int64_t steps) {
  std::error_code error;
  if (steps == 0 || !std::filesystem::is_regular_file(path, error))
    return 0;
  std::ifstream file(path, std::ios::binary);
  size_t kept = 0, bytes = 0;
  bool isMetrics = true;
  for (std::string line; std::getline(file, line);) {
    auto tree = nlohmann::json::parse(line, nullptr, false);
    bool hasStep = tree.is_object() && tree.contains("step") &&
                   tree["step"].is_number_integer();
    // The first line may be the only one, and cut.
    if (bytes == 0)
      isMetrics = hasStep || (file.eof() && isBegunLine(line));
    isMetrics |= hasStep;
    bytes += line.size() + 1;
    // The last line may be cut.
    if (file.eof() || (hasStep && tree["step"] > steps))
      break;
    // A damaged line costs none of the others.
    if (hasStep)
      kept = bytes;
  }
  if (!isMetrics)
    throw InputError("--metrics: " + path +
                     ": expected the metrics of the steps before, one JSON "
                     "object with \"step\" a line, got another file");
  return kept;
}

std::optional<double> SaveSlowdown::take() {
  std::optional<double> ratio;
  while (told < saves.size() && times.size() >= saves[told] + kSteps) {
    size_t save = saves[told++];
    bool isAlone = save > kSteps &&
                   (told < 2 || saves[told - 2] + 2 * kSteps <= save) &&
                   (told == saves.size() || saves[told] >= save + kSteps);
    if (!isAlone)
      continue;
    auto mean = [&](size_t first) {
      auto from = times.begin() + int64_t(first);
      return std::accumulate(from, from + int64_t(kSteps), 0.0) / kSteps;
    };
    ratio = mean(save) / mean(save - kSteps);
  }
  return ratio;
}

Reporter::Reporter(const plan::Plan &plan, const ReportSettings &settings,
                   int64_t stepsDone)
    : plan(plan), settings(settings),
      tokens(tokensPerStep(plan) * plan.accumulationSteps * plan.worldSize),
      modelFlops(plan::modelWork(plan).flops), begin(stepsDone) {
  if (!settings.metricsPath.empty())
    file.emplace(settings.metricsPath,
                 bytesOfSteps(settings.metricsPath, stepsDone));
  if (!settings.tensorboardFolder.empty())
    events.emplace(settings.tensorboardFolder);
}

void Reporter::report(int64_t step, double seconds, const StepResult &result,
                      const std::vector<RankStats> &stats,
                      const RankArena &memory,
                      const std::optional<StepGraphs> &graphs, bool evaluated,
                      const std::optional<SaveReport> &saved) {
  Summary summary = summarise(step, seconds, result, stats);
  summary.evaluated = evaluated;
  // The report of a save may come too late if another one follows soon.
  bool isRare = settings.checkpointEvery == 0 ||
                settings.checkpointEvery >= int64_t(2 * SaveSlowdown::kSteps);
  if (saved && saved->step > begin && isRare)
    slowdown.saved(size_t(saved->step - begin));
  slowdown.step(seconds);
  printLine(step, summary, result);
  std::optional<NotFinite> bad;
  if (!warned)
    bad = findNotFinite(plan, result, stats);
  if (bad) {
    std::fprintf(stderr, "fsdp-run: warning: step %lld: %s\n",
                 static_cast<long long>(step + 1), bad->text.c_str());
    warned = true;
  }
  if (file)
    writeMetrics(step, summary, result, memory, graphs, saved);
  if (events)
    writeScalars(step, summary, result);
}

Reporter::Summary Reporter::summarise(int64_t step, double seconds,
                                      const StepResult &result,
                                      const std::vector<RankStats> &stats) {
  Summary sum;
  for (const RankStats &rank : stats) {
    sum.loss += rank.loss;
    sum.evalLoss += rank.evaluationLoss;
    sum.peak = std::max(sum.peak, rank.peakBytes);
    sum.peakRss = std::max(sum.peakRss, rank.peakRssBytes);
    sum.scratch = std::max(sum.scratch, rank.scratchBytes);
    sum.allocations = std::max(sum.allocations, rank.heapAllocations);
    sum.losses += (sum.losses.empty() ? "" : ", ") + digits9(rank.loss);
    sum.evalLosses +=
        (sum.evalLosses.empty() ? "" : ", ") + digits9(rank.evaluationLoss);
  }
  sum.loss /= double(stats.size());
  sum.evalLoss /= double(stats.size());
  sum.seconds = seconds;
  sum.rate = double(tokens) / seconds;
  sum.flops = modelFlops / seconds;
  if (settings.peakFlops)
    sum.utilization = sum.flops / *settings.peakFlops;
  auto now = std::chrono::steady_clock::now();
  double whole = seconds;
  if (secondsPerStep)
    whole = std::chrono::duration<double>(now - before).count();
  before = now;
  // The first one warms up.
  secondsPerStep = secondsPerStep && step > 1
                       ? (1 - kNewest) * *secondsPerStep + kNewest * whole
                       : whole;
  sum.secondsLeft =
      double(std::max<int64_t>(0, settings.steps - step - 1)) * *secondsPerStep;
  return sum;
}

void Reporter::printLine(int64_t step, const Summary &summary,
                         const StepResult &result) const {
  std::fprintf(stderr, "step: %2lld  loss: %8.5f",
               static_cast<long long>(step + 1), summary.loss);
  if (result.gradNorm)
    std::fprintf(stderr, "  grad_norm: %7.4f", *result.gradNorm);
  std::fprintf(stderr, "  memory: %.2fGiB  tps: %.0f",
               double(summary.peak) / kGiB, summary.rate);
  if (modelFlops > 0)
    std::fprintf(stderr, "  tflops: %.3g", summary.flops / 1e12);
  if (summary.utilization)
    std::fprintf(stderr, "  mfu: %.2f%%", *summary.utilization * 100);
  if (summary.secondsLeft > 0)
    std::fprintf(stderr, "  eta: %s", duration(summary.secondsLeft).c_str());
  if (summary.evaluated)
    std::fprintf(stderr, "  eval_loss: %8.5f", summary.evalLoss);
  if (result.skipped)
    std::fprintf(stderr, "  skipped: not finite at loss scale %g",
                 *result.lossScale);
  std::fputc('\n', stderr);
}

void Reporter::writeMetrics(int64_t step, const Summary &summary,
                            const StepResult &result, const RankArena &memory,
                            const std::optional<StepGraphs> &graphs,
                            const std::optional<SaveReport> &saved) {
  std::string norm;
  if (result.gradNorm)
    norm = "\"grad_norm\": " + digits9(*result.gradNorm) + ", ";
  std::string host;
  if (result.hostSeconds)
    host = "\"host_ms\": " + digits9(*result.hostSeconds * 1e3) + ", ";
  if (graphs)
    host +=
        "\"cuda_graphs\": " + nlohmann::json(graphs->describe()).dump() + ", ";
  std::string scaling;
  if (result.lossScale)
    scaling = "\"loss_scale\": " + digits9(*result.lossScale) +
              ", \"skipped\": " + (result.skipped ? "true" : "false") + ", ";
  std::string evaluation;
  if (summary.evaluated)
    evaluation = "\"eval_loss\": " + digits9(summary.evalLoss) +
                 ", \"rank_eval_losses\": [" + summary.evalLosses + "], ";
  std::string checkpoint;
  if (saved) {
    bool wrote = saved->error.empty() && saved->seconds > 0;
    checkpoint =
        "\"saved_step\": " + std::to_string(saved->step) +
        ", \"saved\": " + (saved->error.empty() ? "true" : "false") +
        ", \"save_stall_ms\": " + digits9(saved->stallSeconds * 1e3) +
        ", \"save_ms\": " + digits9(saved->seconds * 1e3) +
        ", \"save_bytes\": " + std::to_string(saved->bytes) +
        ", \"save_gb_per_s\": " +
        digits9(wrote ? double(saved->bytes) / saved->seconds * 1e-9 : 0) +
        ", ";
  }
  if (std::optional<double> ratio = slowdown.take())
    checkpoint += "\"save_slowdown\": " + digits9(*ratio) + ", ";
  std::string work;
  if (modelFlops > 0)
    work = "\"tflops\": " + digits9(summary.flops / 1e12) + ", ";
  if (summary.utilization)
    work += "\"mfu\": " + digits9(*summary.utilization) + ", ";
  std::string common(1024, '\0');
  common.resize(size_t(std::snprintf(
      common.data(), common.size(),
      "\"lr\": %.17g, \"step_ms\": %.3f, \"tokens_per_s\": %.1f, %s"
      "\"peak_bytes\": %lld, \"peak_rss_bytes\": %lld, "
      "\"arena_bytes\": %lld, \"scratch_bytes\": %lld, "
      "\"allocator_calls\": %lld}\n",
      result.learningRate, summary.seconds * 1e3, summary.rate, work.c_str(),
      static_cast<long long>(summary.peak),
      static_cast<long long>(summary.peakRss),
      static_cast<long long>(memory.bytes()),
      static_cast<long long>(summary.scratch),
      static_cast<long long>(summary.allocations))));
  file->append(std::string(kLineBegin) + std::to_string(step + 1) +
               ", \"loss\": " + digits9(summary.loss) + ", \"rank_losses\": [" +
               summary.losses + "], " + evaluation + checkpoint + norm +
               scaling + host + common);
}

// torchtitan's names, where it has one.
void Reporter::writeScalars(int64_t step, const Summary &summary,
                            const StepResult &result) {
  EventFile::Scalars scalars = {
      {"loss_metrics/global_avg_loss", summary.loss},
      {"lr", result.learningRate},
      {"throughput(tps)", summary.rate},
      {"time_metrics/end_to_end(s)", summary.seconds},
      {"memory/max_active(GiB)", double(summary.peak) / kGiB}};
  if (result.gradNorm)
    scalars.emplace_back("grad_norm", *result.gradNorm);
  if (result.lossScale)
    scalars.emplace_back("loss_scale", *result.lossScale);
  if (modelFlops > 0)
    scalars.emplace_back("tflops", summary.flops / 1e12);
  if (summary.utilization)
    scalars.emplace_back("mfu(%)", *summary.utilization * 100);
  if (summary.evaluated)
    scalars.emplace_back("validation_metrics/loss", summary.evalLoss);
  events->add(step + 1, scalars);
}

void Reporter::stopped(int64_t step, uint32_t requests, bool saved) const {
  std::fprintf(stderr, "fsdp-run: stopped by %s after step %lld; %s\n",
               nameStop(requests).c_str(), static_cast<long long>(step + 1),
               saved ? "--resume auto goes on from there"
                     : "nothing was saved");
}

void Reporter::cannotSave(int64_t step) const {
  std::fprintf(stderr,
               "fsdp-run: warning: USR1 after step %lld: nothing was "
               "saved\n",
               static_cast<long long>(step + 1));
}

std::optional<NotFinite> findNotFinite(const plan::Plan &plan,
                                       const StepResult &result,
                                       const std::vector<RankStats> &stats) {
  for (size_t r = 0; r < stats.size(); ++r) {
    std::string rank = "rank " + std::to_string(r) + ": ";
    if (!std::isfinite(stats[r].loss))
      return NotFinite{int64_t(r),
                       rank + "the loss is " + std::to_string(stats[r].loss)};
    if (stats[r].badGradient != -1)
      return NotFinite{int64_t(r),
                       rank + "the gradient of \"" +
                           plan.params[size_t(stats[r].badGradient)].name +
                           "\" is not finite"};
  }
  if (result.gradNorm && !std::isfinite(*result.gradNorm) && !result.skipped)
    return NotFinite{-1, "the norm of the gradients is " +
                             std::to_string(*result.gradNorm)};
  return std::nullopt;
}

} // namespace fsdp::runtime
