//===- Reporter.cpp - the progress of a run, as rank 0 tells it -----------===//
#include "fsdp/Runtime/Launch/Reporter.h"
#include "fsdp/Runtime/Launch/Requests.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>

namespace fsdp::runtime {

namespace {

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

} // namespace

/// Bytes of the lines, from the first on, that are of the first `steps` steps.
static size_t bytesOfSteps(const std::string &path, int64_t steps) {
  std::error_code error;
  size_t bytes = 0;
  if (steps == 0 || !std::filesystem::is_regular_file(path, error))
    return bytes;
  std::ifstream file(path, std::ios::binary);
  for (std::string line; std::getline(file, line);) {
    auto tree = nlohmann::json::parse(line, nullptr, false);
    // The last line may be cut.
    if (file.eof() || !tree.is_object() || !tree.contains("step") ||
        !tree["step"].is_number_integer() || tree["step"] > steps)
      break;
    bytes += line.size() + 1;
  }
  return bytes;
}

Reporter::Reporter(const plan::Plan &plan, const std::string &path,
                   int64_t steps)
    : plan(plan),
      tokens(tokensPerStep(plan) * plan.accumulationSteps * plan.worldSize) {
  if (!path.empty())
    file.emplace(path, bytesOfSteps(path, steps));
}

void Reporter::report(int64_t step, double seconds, const StepResult &result,
                      const std::vector<RankStats> &stats,
                      const RankArena &memory, bool evaluated,
                      const std::optional<SaveReport> &saved) {
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
  file->append("{\"step\": " + std::to_string(step + 1) + ", \"loss\": " +
               digits9(loss) + ", \"rank_losses\": [" + losses + "], " +
               evaluation + checkpoint + norm + scaling + host + common);
}

void Reporter::stopped(int64_t step, uint32_t requests, bool saved) const {
  std::fprintf(stderr, "fsdp-run: stopped by %s after step %lld; %s\n",
               nameStop(requests).c_str(), static_cast<long long>(step + 1),
               saved ? "--resume auto goes on from there"
                     : "nothing was saved");
}

void Reporter::warn(int64_t step, const StepResult &result,
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
          plan.params[size_t(stats[r].badGradient)].name + "\" is not finite");
  }
  if (!warned && result.gradNorm && !std::isfinite(*result.gradNorm) &&
      !result.skipped)
    say("the norm of the gradients is " + std::to_string(*result.gradNorm));
}

} // namespace fsdp::runtime
