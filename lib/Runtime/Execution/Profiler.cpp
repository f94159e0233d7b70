//===- Profiler.cpp - measured seconds of a plan's instructions -----------===//
#include "fsdp/Runtime/Execution/Profiler.h"
#include "fsdp/Runtime/Files/SafeTensors.h"

#include <algorithm>

namespace fsdp::runtime {

Profiler::Profiler(const plan::Plan &plan)
    : current(plan.instructions.size()), runs(plan.instructions.size()),
      samples(plan.instructions.size() + 1) {}

void Profiler::endStep(double seconds) {
  bool counts = steps++ >= kWarmup;
  for (size_t i = 0; i < current.size(); ++i) {
    if (counts)
      samples[i].push_back(float(current[i]));
    current[i] = 0;
  }
  if (counts)
    samples.back().push_back(float(seconds));
}

static double median(std::vector<float> values) {
  if (values.empty())
    return 0;
  std::sort(values.begin(), values.end());
  size_t middle = values.size() / 2;
  return values.size() % 2 ? values[middle]
                           : (double(values[middle - 1]) + values[middle]) / 2;
}

std::vector<double> Profiler::medians() const {
  std::vector<double> result;
  result.reserve(samples.size());
  double rest = median(samples.back());
  for (size_t i = 0; i < runs.size(); ++i) {
    double seconds = median(samples[i]);
    rest -= seconds;
    // All steps execute an instruction as often.
    result.push_back(runs[i] ? seconds * double(steps) / double(runs[i]) : 0);
  }
  result.push_back(std::max(rest, 0.0));
  return result;
}

void writeProfile(const Profiler &profiler, const plan::Plan &plan,
                  const std::string &planPath, Comm &comm, int64_t steps,
                  int64_t scratchBytes, OutputFile *file) {
  std::vector<double> own = profiler.medians();
  own.push_back(double(scratchBytes));
  std::vector<std::vector<double>> all = comm.gather(own);
  if (comm.rank() != 0)
    return;
  std::vector<double> mean(own.size());
  double mostScratch = 0;
  for (const std::vector<double> &values : all) {
    for (size_t i = 0; i < mean.size(); ++i)
      mean[i] += values[i] / double(comm.worldSize());
    mostScratch = std::max(mostScratch, values.back());
  }
  mean.pop_back();
  plan::Profile profile;
  profile.planHash = hashBytes(readFile(planPath));
  profile.worldSize = plan.worldSize;
  profile.steps = steps - Profiler::kWarmup;
  profile.outsideSeconds = mean.back();
  profile.scratchBytes = int64_t(mostScratch);
  for (size_t i = 0; i < plan.instructions.size(); ++i)
    profile.instructions.push_back(
        {plan::signature(plan, plan.instructions[i]), mean[i]});
  file->write(plan::printProfile(profile));
  file->commit();
}

} // namespace fsdp::runtime
