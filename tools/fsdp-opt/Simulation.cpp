//===- Simulation.cpp - fsdp-opt --simulate -------------------------------===//
#include "Simulation.h"
#include "../Report.h"
#include "Stats.h"

#include "fsdp/Simulate/CostModel.h"
#include "fsdp/Simulate/DeviceModel.h"
#include "fsdp/Simulate/DiffPlans.h"
#include "fsdp/Simulate/Format.h"
#include "fsdp/Simulate/LowerBound.h"
#include "fsdp/Simulate/Measured.h"
#include "fsdp/Simulate/Page.h"
#include "fsdp/Simulate/Simulator.h"
#include "fsdp/Simulate/Trace.h"
#include "fsdp/Support/Hash.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/Support/CommandLine.h"
#include "llvm/Support/Format.h"
#include "llvm/Support/FormatVariadic.h"

#include <optional>

using namespace mlir;
using llvm::SmallVector;
using llvm::StringRef;
using namespace ::fsdp::simulate;
namespace plan = ::fsdp::plan;
namespace cl = llvm::cl;

namespace {
cl::OptionCategory category("simulation options");
cl::opt<std::string>
    deviceName("device",
               cl::desc("Simulate on this device: a shipped one (cpu, "
                        "h100), or a YAML file; by default the schedule's"),
               cl::value_desc("name|file"), cl::init("cpu"), cl::cat(category));
cl::opt<std::string>
    clusterPath("simulate",
                cl::desc("Simulate on a cluster described by a YAML file"),
                cl::value_desc("file"), cl::cat(category));
cl::opt<std::string>
    profilePath("profile",
                cl::desc("Times of instructions, from fsdp-run --profile"),
                cl::value_desc("file"), cl::cat(category));
cl::opt<std::string>
    measuredPath("measured",
                 cl::desc("A step of this plan, from fsdp-run --trace: --emit "
                          "trace draws it beside the simulated one, --emit "
                          "stats compares them"),
                 cl::value_desc("file"), cl::cat(category));
cl::list<int64_t> traceRanks("ranks", cl::CommaSeparated,
                             cl::desc("Ranks in --emit trace (default 0)"),
                             cl::value_desc("rank,…"), cl::cat(category));

/// What the options name, read.
struct Setting {
  Cluster cluster;
  std::optional<plan::Profile> profile;

  StepCost cost(const plan::Plan &plan, int64_t rank = 0) const {
    return costOf(plan, cluster.device, profile ? &*profile : nullptr, rank);
  }
};

FailureOr<Setting> readSetting(const plan::Plan &plan) {
  if (deviceName.getNumOccurrences() && !clusterPath.empty())
    return mlir::fsdp::reportError(
        "expected one of --device and --simulate, got both");
  try {
    Setting setting;
    setting.cluster = clusterPath.empty()
                          ? clusterOf(loadDevice(deviceName), plan.jobRanks())
                          : loadCluster(clusterPath, plan.jobRanks());
    if (!profilePath.empty())
      setting.profile = plan::readProfile(profilePath);
    return setting;
  } catch (const SimulateError &error) {
    return mlir::fsdp::reportError(error.what());
  } catch (const plan::PlanError &error) {
    return mlir::fsdp::reportError(error.what());
  }
}

/// What --measured names.
FailureOr<plan::MeasuredStep> readMeasured(const plan::Plan &plan) {
  try {
    return plan::readMeasuredStep(measuredPath, plan,
                                  ::fsdp::hashBytes(plan::printPlan(plan)));
  } catch (const plan::PlanError &error) {
    return mlir::fsdp::reportError(error.what());
  }
}

FailureOr<const plan::MeasuredStep::Rank *>
findRank(const plan::MeasuredStep &step, int64_t rank) {
  for (const plan::MeasuredStep::Rank &entry : step.ranks)
    if (entry.rank == rank)
      return &entry;
  return mlir::fsdp::reportError(measuredPath +
                                 ": expected the events of rank " +
                                 llvm::Twine(rank) + ", got none");
}

std::string formatted(const char *format, double value) {
  std::string text;
  llvm::raw_string_ostream(text) << llvm::format(format, value);
  return text;
}

/// "all-gathers" and so on.
const char *transferName(size_t stream) {
  constexpr const char *names[plan::kNumStreams] = {"compute",
                                                    "all-gathers",
                                                    "reduce-scatters",
                                                    "all-reduces",
                                                    "copies to device",
                                                    "copies to host",
                                                    "collectives of the model"};
  return names[stream];
}

/// Planned beside measured.
LogicalResult printComparison(const plan::Plan &plan, const Timeline &timeline,
                              llvm::raw_ostream &os) {
  FailureOr<plan::MeasuredStep> step = readMeasured(plan);
  if (failed(step))
    return failure();
  auto rank = findRank(*step, 0);
  if (failed(rank))
    return failure();
  const std::vector<Span> &spans = (*rank)->spans;
  constexpr unsigned kLabel = 30;
  auto row = [&](const llvm::Twine &name, double planned, double measured) {
    if (planned == 0 && measured == 0)
      return;
    os << llvm::left_justify(name.str(), kLabel)
       << llvm::formatv("{0,12:F3} {1,12:F3} {2,12}", planned * 1e3,
                        measured * 1e3,
                        formatted("%+.3f", (measured - planned) * 1e3));
    if (measured > 0)
      os << llvm::formatv("{0,11} %",
                          formatted("%+.1f", 100 * (planned / measured - 1)));
    os << '\n';
  };
  std::string title = "step " + std::to_string(step->step) + " of rank 0, ms";
  os << '\n'
     << llvm::left_justify(title, kLabel)
     << "     planned     measured   difference  error of plan\n";
  row("step", timeline.seconds, (*rank)->seconds);
  Breakdown planned = breakDown(plan, timeline.spans, timeline.seconds);
  Breakdown measured = breakDown(plan, spans, (*rank)->seconds);
  for (size_t phase = 0; phase < planned.compute.size(); ++phase)
    row("compute, " + llvm::Twine(plan::phaseName(plan::Phase(phase))),
        planned.compute[phase], measured.compute[phase]);
  for (size_t s = 0; s < planned.exposed.size(); ++s)
    row("exposed " + llvm::Twine(transferName(s)), planned.exposed[s],
        measured.exposed[s]);
  row("outside of instructions", planned.outside, measured.outside);
  os << "\ncomputations that differ most, ms\n";
  for (const Difference &difference :
       largestDifferences(plan, timeline.spans, spans, /*most=*/5)) {
    row("  " + llvm::Twine(difference.runs) +
            (difference.runs == 1 ? " run" : " runs"),
        difference.planned, difference.measured);
    os << "    " << difference.what << '\n';
  }
  return success();
}

/// The streams whose time is not zero, with their times.
std::string listed(const StreamSeconds &seconds) {
  SmallVector<std::string> parts;
  for (size_t s = 0; s < seconds.size(); ++s)
    if (seconds[s] > 0)
      parts.push_back(std::string(transferName(s)) + " " +
                      formatMilliseconds(seconds[s]));
  return llvm::join(parts, ", ");
}
} // namespace

bool mlir::fsdp::isSimulationAsked() {
  return deviceName.getNumOccurrences() || !clusterPath.empty() ||
         !profilePath.empty() || isMeasuredAsked();
}

LogicalResult mlir::fsdp::checkSimulationOptions(StringRef emitted) {
  auto check = [&](const cl::Option &option, StringRef known) {
    SmallVector<StringRef> names;
    known.split(names, ", ");
    if (option.getNumOccurrences() == 0 || llvm::is_contained(names, emitted))
      return success();
    return reportError("--" + option.ArgStr + ": expected --emit with one of " +
                       known + ", got " + emitted);
  };
  for (size_t i = 0; i < traceRanks.size(); ++i)
    if (llvm::is_contained(llvm::ArrayRef(&traceRanks[0], i), traceRanks[i]))
      return reportError("--ranks: expected different ranks, got " +
                         llvm::Twine(traceRanks[i]) + " twice");
  return success(succeeded(check(clusterPath, "plan, stats, trace, html")) &&
                 succeeded(check(profilePath, "stats, trace, html")) &&
                 succeeded(check(measuredPath, "stats, trace")) &&
                 succeeded(check(traceRanks, "trace")));
}

std::vector<::fsdp::NamedFile> mlir::fsdp::getSimulationFiles() {
  std::vector<::fsdp::NamedFile> files;
  auto add = [&](const cl::opt<std::string> &option) {
    if (!option.empty())
      files.push_back({"--" + option.ArgStr.str(), option});
  };
  if (!llvm::is_contained(shippedDevices(), deviceName.getValue()))
    add(deviceName);
  for (const auto *option : {&clusterPath, &profilePath, &measuredPath})
    add(*option);
  return files;
}

bool mlir::fsdp::isMeasuredAsked() { return !measuredPath.empty(); }

FailureOr<std::string> mlir::fsdp::getDeviceOption() {
  if (!deviceName.getNumOccurrences())
    return std::string();
  try {
    loadDevice(deviceName);
  } catch (const SimulateError &error) {
    return mlir::fsdp::reportError(error.what());
  }
  return deviceName.getValue();
}

FailureOr<int64_t> mlir::fsdp::getMeasuredScratch() {
  if (profilePath.empty())
    return 0;
  try {
    return plan::readProfile(profilePath).scratchBytes.value_or(0);
  } catch (const plan::PlanError &error) {
    return mlir::fsdp::reportError(error.what());
  }
}

void mlir::fsdp::setDefaultDevice(const std::string &device) {
  if (!deviceName.getNumOccurrences())
    deviceName.setInitialValue(device);
}

LogicalResult mlir::fsdp::printSimulatedStats(const plan::Plan &plan,
                                              llvm::raw_ostream &os) {
  FailureOr<Setting> setting = readSetting(plan);
  if (failed(setting))
    return failure();
  const DeviceModel &device = setting->cluster.device;
  StepCost cost = setting->cost(plan);
  Timeline timeline = simulate(plan, cost, device);
  auto row = [&](StringRef name, const llvm::Twine &value) {
    os << llvm::left_justify(name, 28) << value << '\n';
  };
  os << '\n';
  int64_t hosts = setting->cluster.hosts;
  row("simulated on", device.name + ", " + llvm::Twine(hosts) +
                          (hosts == 1 ? " host" : " hosts"));
  if (setting->profile) {
    std::string note = cost.samePlan ? "profile of this plan"
                                     : "profile by operators and shapes";
    row("costs", note + ": " + llvm::Twine(cost.measured) +
                     " instructions measured, " + llvm::Twine(cost.modelled) +
                     " modelled");
  }
  row("step time", formatMilliseconds(timeline.seconds));
  row("gap to the bound",
      describeGap(lowerBound(plan, cost, device), timeline.seconds));
  row("busy", listed(timeline.busy));
  double exposed = timeline.exposedCommunication();
  row("exposed communication",
      formatMilliseconds(exposed) +
          (exposed > 0 ? " (" + listed(timeline.exposed) + ")" : ""));
  if (timeline.slowdown > 0)
    row("compute slowed by", formatMilliseconds(timeline.slowdown));
  double seconds = timeline.seconds;
  if (seconds > 0) {
    double tokens = double(tokensPerStep(plan)) / seconds;
    row("tokens/s", formatted("%.1f", tokens) + ", a rank " +
                        formatted("%.1f", tokens / double(plan.jobRanks())));
  }
  row("model FLOPs a rank", formatted("%.4g", cost.modelFlops));
  row("MFU",
      formatted("%.2f %%", 100 * modelFlopsUtilization(cost, device, seconds)) +
          " of " + formatted("%.4g FLOP/s", device.peak(cost.flopsDtype)) +
          " (" + std::string(plan::dtypeName(cost.flopsDtype)) + ")");
  int64_t peak = plan::peakBytes(plan, plan::arenaModel(plan));
  if (setting->profile)
    peak += setting->profile->scratchBytes.value_or(0);
  std::string fits;
  if (device.memoryCapacity > 0)
    fits = " of " + formatBytes(device.memoryCapacity) +
           (peak > device.memoryCapacity ? ": does not fit" : "");
  row("memory peak a rank", formatBytes(peak) + fits);
  return isMeasuredAsked() ? printComparison(plan, timeline, os) : success();
}

LogicalResult mlir::fsdp::printSimulatedTrace(const plan::Plan &plan,
                                              llvm::raw_ostream &os) {
  FailureOr<Setting> setting = readSetting(plan);
  if (failed(setting))
    return failure();
  SmallVector<int64_t> ranks(traceRanks.begin(), traceRanks.end());
  if (ranks.empty())
    ranks.push_back(0);
  FailureOr<plan::MeasuredStep> step = plan::MeasuredStep();
  if (isMeasuredAsked())
    step = readMeasured(plan);
  if (failed(step))
    return failure();
  std::vector<RankTimeline> timelines;
  for (int64_t rank : ranks) {
    if (rank < 0 || rank >= plan.worldSize)
      return mlir::fsdp::reportError(
          "--ranks: expected ranks below the plan's world size " +
          llvm::Twine(plan.worldSize) + ", got " + llvm::Twine(rank));
    Timeline timeline =
        simulate(plan, setting->cost(plan, rank), setting->cluster.device);
    auto memory = memoryOverTime(plan, timeline, plan::arenaModel(plan), rank);
    timelines.push_back({rank, std::move(timeline), std::move(memory)});
    if (!isMeasuredAsked())
      continue;
    auto measured = findRank(*step, rank);
    if (failed(measured))
      return failure();
    timelines.back().measured = *measured;
  }
  os << printTrace(plan, timelines);
  return success();
}

LogicalResult mlir::fsdp::printSimulatedPage(const plan::Plan &plan,
                                             llvm::raw_ostream &os) {
  FailureOr<Setting> setting = readSetting(plan);
  if (failed(setting))
    return failure();
  StepCost cost = setting->cost(plan);
  Timeline timeline = simulate(plan, cost, setting->cluster.device);
  os << printPage(plan, setting->cluster, cost, timeline,
                  plan::arenaModel(plan));
  return success();
}

LogicalResult mlir::fsdp::printPlanDifference(const plan::Plan &a,
                                              const plan::Plan &b,
                                              llvm::raw_ostream &os) {
  if (!clusterPath.empty() || !profilePath.empty() || isMeasuredAsked())
    return mlir::fsdp::reportError(
        "--diff: expected --device, got --simulate, --profile or "
        "--measured");
  if (!isSimulationAsked()) {
    os << printDifference(a, b, nullptr);
    return success();
  }
  FailureOr<Setting> setting = readSetting(a);
  if (failed(setting))
    return failure();
  os << printDifference(a, b, &setting->cluster.device);
  return success();
}
