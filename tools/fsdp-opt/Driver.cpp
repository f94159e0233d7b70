//===- Driver.cpp - fsdp-opt as one command -------------------------------===//
#include "Driver.h"

#include "../Report.h"
#include "Layouts.h"
#include "Simulation.h"
#include "Stats.h"
#include "fsdp/Dialect/Aten.h"
#include "fsdp/Import/Import.h"
#include "fsdp/Plan/InstructionTable.h"
#include "fsdp/Plan/Limits.h"
#include "fsdp/Plan/Memory.h"
#include "fsdp/Support/Outputs.h"
#include "fsdp/Transforms/EmitPlan.h"
#include "fsdp/Transforms/ExploreBuckets.h"
#include "fsdp/Transforms/ExploreMemory.h"
#include "fsdp/Transforms/Passes.h"
#include "fsdp/Transforms/Schedule.h"
#include "mlir/Bytecode/BytecodeWriter.h"
#include "mlir/IR/Remarks.h"
#include "mlir/Parser/Parser.h"
#include "mlir/Pass/PassManager.h"
#include "mlir/Remark/RemarkStreamer.h"
#include "mlir/Support/Timing.h"
#include "mlir/Tools/mlir-opt/MlirOptMain.h"
#include "llvm/Support/CommandLine.h"
#include "llvm/Support/FileSystem.h"
#include "llvm/Support/FormatVariadic.h"
#include "llvm/Support/Path.h"
#include "llvm/Support/SourceMgr.h"

using namespace mlir;
using namespace mlir::fsdp;
namespace cl = llvm::cl;

namespace {
enum class Emit { MLIR, Plan, Stats, Trace, Html, Pareto, Layouts };

cl::OptionCategory category("fsdp-opt options");
cl::opt<Emit> emitKind(
    "emit", cl::desc("What to write"), cl::init(Emit::MLIR),
    cl::values(
        clEnumValN(Emit::MLIR, "mlir", "IR, at --level"),
        clEnumValN(Emit::Plan, "plan", "plan.json for fsdp-run"),
        clEnumValN(Emit::Stats, "stats",
                   "parameters, units, bytes and collectives of a "
                   "step; with --device or --simulate, also its time"),
        clEnumValN(Emit::Trace, "trace",
                   "a simulated step, for Perfetto; with --measured, "
                   "beside a measured one"),
        clEnumValN(Emit::Html, "html", "a simulated step, as a page"),
        clEnumValN(Emit::Pareto, "pareto",
                   "time against memory, for the choices of what is kept"),
        clEnumValN(Emit::Layouts, "layouts",
                   "time and memory on each mesh of --gpus devices")),
    cl::cat(category));
cl::opt<Level> level(
    "level", cl::desc("How far to lower for --emit mlir"),
    cl::init(Level::Planned),
    cl::values(clEnumValN(Level::Captured, "captured", "as captured"),
               clEnumValN(Level::Sharded, "sharded", "placements, collectives"),
               clEnumValN(Level::Scheduled, "scheduled",
                          "order of collectives and waits"),
               clEnumValN(Level::Planned, "planned", "ready to emit a plan")),
    cl::cat(category));
cl::opt<std::string> configPath("config", cl::desc("Policy, a YAML file"),
                                cl::value_desc("file"), cl::cat(category));
cl::opt<::fsdp::plan::MemoryModel> memoryModel(
    "memory", cl::desc("The memory that the plan is laid out for"),
    cl::init(::fsdp::plan::MemoryModel::SharedHost),
    cl::values(
        clEnumValN(::fsdp::plan::MemoryModel::SharedHost, "shared",
                   "one host's, in which the ranks share the parameters"),
        clEnumValN(::fsdp::plan::MemoryModel::Device, "device",
                   "one device per rank, which gathers into its own memory")),
    cl::cat(category));
cl::opt<std::string> diffPath(
    "diff",
    cl::desc("Print what changed from this plan to the input, another plan"),
    cl::value_desc("plan.json"), cl::cat(category));
cl::opt<int64_t> worldSize("world-size",
                           cl::desc("Number of ranks to compile for"),
                           cl::init(1), cl::cat(category));

// Here for --help alone: serveRequests takes the place of the whole command.
cl::opt<bool> servesRequests(
    "requests",
    cl::desc("As the only argument: run what standard input asks for, each "
             "request ended by a zero byte, with LibTorch loaded once"),
    cl::cat(category));

cl::opt<bool> showsInstructions(
    "show-instructions",
    cl::desc("Print the instructions that a plan consists of, in Markdown"),
    cl::cat(category));

bool isCapture(StringRef path) {
  return llvm::sys::path::extension(path) == ".pt";
}

OwningOpRef<ModuleOp> load(StringRef path, MLIRContext *context,
                           llvm::SourceMgr &sources) {
  if (isCapture(path)) {
    try {
      return importCapture(::fsdp::loadCapture(path.str()), context);
    } catch (const ::fsdp::CaptureError &error) {
      (void)reportError(error.what());
      return {};
    }
  }
  FailureOr<std::unique_ptr<llvm::MemoryBuffer>> buffer = readSource(path);
  if (failed(buffer))
    return {};
  sources.AddNewSourceBuffer(std::move(*buffer), llvm::SMLoc());
  return parseSourceFile<ModuleOp>(sources, context);
}

/// The storages of a planned module have their places already.
LogicalResult verifyPlacedFor(ModuleOp module, StringRef device) {
  auto placed = module->getAttrOfType<StringAttr>(memoryAttrName);
  bool isGiven = memoryModel.getNumOccurrences();
  if (!isGiven && (device.empty() || !placed))
    return success();
  if (!placed)
    return reportError("--memory: expected a module below level planned, or "
                       "one that says which memory its storages are placed in");
  auto model = isGiven
                   ? memoryModel.getValue()
                   : ::fsdp::simulate::loadDevice(device.str()).memoryModel();
  StringRef asked =
      model == ::fsdp::plan::MemoryModel::SharedHost ? "shared" : "device";
  if (asked == placed.getValue())
    return success();
  return reportError(Twine("--") + (isGiven ? "memory" : "device") +
                     ": expected the memory that the input's storages are "
                     "placed in, " +
                     placed.getValue() + ", got " + asked);
}

/// The policy for so many ranks.
LogicalResult applyPolicy(ModuleOp module, int64_t worldSize) {
  if (worldSize < 1 || worldSize > ::fsdp::plan::kMaxWorldSize)
    return reportError("--world-size: expected at least 1 and at most " +
                       Twine(::fsdp::plan::kMaxWorldSize) + ", got " +
                       Twine(worldSize));
  if (!configPath.empty()) {
    if (failed(verifyLevel(module, Level::Captured, "--config")) ||
        failed(applyConfig(module, configPath, worldSize)))
      return failure();
  } else if (module.getOps<MeshOp>().empty() &&
             failed(applyDefaultConfig(module, worldSize))) {
    return failure(); // a module that brings its policy keeps it
  } else if (::worldSize.getNumOccurrences()) {
    for (auto mesh : module.getOps<MeshOp>())
      if (int64_t ranks = mesh.getMesh().getNumRanks(); ranks != worldSize)
        return reportError("--world-size: expected " + Twine(ranks) +
                           " as the input's fsdp.mesh has, got " +
                           Twine(worldSize));
  }
  FailureOr<std::string> device = getDeviceOption();
  if (failed(device))
    return failure();
  if (!device->empty())
    getOrCreateSchedule(module).setDevice(*device);
  if (getLevel(module) == Level::Planned)
    return verifyPlacedFor(module, *device);
  if (memoryModel.getNumOccurrences()) {
    bool isShared = memoryModel == ::fsdp::plan::MemoryModel::SharedHost;
    module->setAttr(
        memoryAttrName,
        StringAttr::get(module.getContext(), isShared ? "shared" : "device"));
  }
  return success();
}

/// The passes that lower the module from its level to what --emit and --level
/// ask for. A module that states no level is a captured one.
LogicalResult addPasses(PassManager &pm, ModuleOp module) {
  Level first = getLevel(module).value_or(Level::Captured);
  if (emitKind == Emit::Pareto) {
    if (first != Level::Captured)
      return verifyLevel(module, Level::Captured, "--emit pareto");
    pm.addPass(createDetectUnits());
    pm.addPass(createAssignUnits());
    return success();
  }
  Level last = emitKind == Emit::MLIR ? level : Level::Planned;
  if (last < first)
    return verifyLevel(module, last, "--level");
  bool isWithin = (first > Level::Captured && first < Level::Sharded) ||
                  first == Level::Lowered;
  if (isWithin && first != last)
    return module.emitError("expected a module at level captured, sharded, "
                            "scheduled or planned, or passes that take it "
                            "there, got: ")
           << stringifyLevel(first);
  if (first < Level::Sharded && last >= Level::Sharded)
    buildShardPipeline(pm);
  if (first < Level::Scheduled && last >= Level::Scheduled)
    buildSchedulePipeline(pm);
  if (first < Level::Planned && last >= Level::Planned)
    buildLowerPipeline(pm);
  return success();
}

LogicalResult runPasses(ModuleOp module, TimingScope &timing) {
  auto config = MlirOptMainConfig::createFromCLOptions();
  PassManager pm(module.getContext());
  pm.enableVerifier(config.shouldVerifyPasses());
  if (failed(applyPassManagerCLOptions(pm)))
    return failure();
  pm.enableTiming(timing);
  if (failed(config.setupPassPipeline(pm)))
    return failure();
  if (pm.empty() && failed(addPasses(pm, module)))
    return failure();
  return pm.run(module);
}

/// A plan; verified, as every plan that is written.
FailureOr<::fsdp::plan::Plan> emitVerifiedPlan(ModuleOp module) {
  if (failed(verifyLevel(module, Level::Planned, "a plan")))
    return failure();
  setDefaultDevice(getOrCreateSchedule(module).getDevice().str());
  auto plan = emitPlan(module);
  if (failed(plan))
    return failure();
  try {
    ::fsdp::plan::verifyPlan(*plan, "plan");
  } catch (const ::fsdp::plan::PlanError &error) {
    return module.emitError("emits an invalid plan: ") << error.what();
  }
  return plan;
}

/// Candidates for what is gathered together, the fastest first.
LogicalResult printBuckets(ModuleOp module, llvm::raw_ostream &os) {
  auto device = loadDevice(module);
  if (failed(device))
    return failure();
  FailureOr<SmallVector<BucketOutcome>> outcomes =
      exploreBuckets(module, *device);
  if (failed(outcomes))
    return failure();
  llvm::sort(*outcomes, [](const auto &a, const auto &b) {
    return std::pair(a.seconds, a.bytes) < std::pair(b.seconds, b.bytes);
  });
  const ::fsdp::simulate::LowerBound &bound = outcomes->front().bound;
  os << "\npeak a rank    step time, ms    exposed, ms    above the bound\n";
  for (const BucketOutcome &outcome : *outcomes)
    os << llvm::formatv(
        "{0,11} {1,16:F3} {2,14:F3} {3,16:F1} %  bucket: {4}, {5} in all\n",
        formatBytes(outcome.bytes), outcome.seconds * 1e3,
        outcome.exposed * 1e3,
        bound.seconds > 0 ? 100 * (outcome.seconds / bound.seconds - 1) : 0,
        outcome.name, outcome.count);
  os << "the bound: " << ::fsdp::simulate::formatMilliseconds(bound.seconds)
     << " of " << bound.of << '\n';
  return success();
}

/// Choices of what is kept, those that nothing beats first.
LogicalResult printPareto(ModuleOp module, llvm::raw_ostream &os) {
  // The budget limits none of them.
  ScheduleOp schedule = getOrCreateSchedule(module);
  schedule.removeMemoryBudgetAttr();
  schedule.setMemory("policy");
  FailureOr<MemoryExplorer> explorer = MemoryExplorer::create(module);
  if (failed(explorer))
    return failure();
  FailureOr<SmallVector<MemoryOutcome>> outcomes = exploreMemory(*explorer);
  if (failed(outcomes))
    return failure();
  size_t front = sortByParetoFront(*outcomes);
  os << "peak a rank    step time, ms  above the bound, %\n";
  for (auto [index, outcome] : llvm::enumerate(*outcomes)) {
    if (index == front)
      os << "\nbeaten in both time and memory\n";
    os << llvm::formatv("{0,11} {1,16:F3} {2,19:F1}  {3}\n",
                        formatBytes(outcome.bytes), outcome.seconds * 1e3,
                        explorer->gapPercent(outcome),
                        explorer->describe(outcome.choice));
  }
  os << llvm::formatv("\nbound: {0:F3} ms of {1}, which no choice can beat\n",
                      explorer->bound().seconds * 1e3, explorer->bound().of);
  return getOrCreateSchedule(module).getBucket() == "optimal"
             ? printBuckets(module, os)
             : success();
}

/// Rejects an output in the place of the weights, which fsdp-run looks for
/// beside the plan.
LogicalResult checkWeights(ModuleOp module, StringRef input, StringRef output) {
  auto name = module->getAttrOfType<StringAttr>(weightsAttrName);
  if (output == "-" || !name || name.empty())
    return success();
  std::vector<::fsdp::NamedFile> files;
  for (StringRef beside : {input, output}) {
    SmallString<128> path = llvm::sys::path::parent_path(beside);
    llvm::sys::path::append(path, name.getValue());
    files.push_back({"the weights", path.str().str()});
  }
  std::string error = ::fsdp::checkOutputs({{"-o", output.str()}}, files);
  return error.empty() ? success() : reportError(error);
}

LogicalResult write(ModuleOp module, StringRef path) {
  std::string text;
  llvm::raw_string_ostream stream(text);
  if (emitKind == Emit::Plan) {
    auto plan = emitVerifiedPlan(module);
    if (failed(plan))
      return failure();
    try {
      stream << ::fsdp::plan::printPlan(*plan);
    } catch (const ::fsdp::plan::PlanError &error) {
      return reportError(error.what());
    }
  } else if (emitKind == Emit::Stats) {
    printStats(module, stream);
    auto plan = emitVerifiedPlan(module);
    if (failed(plan))
      return failure();
    FailureOr<int64_t> scratch = getMeasuredScratch();
    if (failed(scratch))
      return failure();
    printMemory(*plan, ::fsdp::plan::arenaModel(*plan), *scratch, stream);
    if (isSimulationAsked() && failed(printSimulatedStats(*plan, stream)))
      return failure();
  } else if (emitKind == Emit::Pareto) {
    if (failed(printPareto(module, stream)))
      return failure();
  } else if (emitKind == Emit::Trace) {
    auto plan = emitVerifiedPlan(module);
    if (failed(plan) || failed(printSimulatedTrace(*plan, stream)))
      return failure();
  } else if (emitKind == Emit::Html) {
    auto plan = emitVerifiedPlan(module);
    if (failed(plan) || failed(printSimulatedPage(*plan, stream)))
      return failure();
  } else if (MlirOptMainConfig::createFromCLOptions().shouldEmitBytecode()) {
    if (failed(writeBytecodeToFile(module, stream)))
      return failure();
  } else {
    module.print(stream);
    stream << '\n';
  }
  return writeOutput(path, text);
}

LogicalResult writeDifference(StringRef inputPath, StringRef outputPath) {
  if (inputPath == "-")
    return reportError("--diff: expected a second plan");
  std::string text;
  llvm::raw_string_ostream stream(text);
  try {
    if (failed(printPlanDifference(::fsdp::plan::readPlan(diffPath),
                                   ::fsdp::plan::readPlan(inputPath.str()),
                                   stream)))
      return failure();
  } catch (const ::fsdp::plan::PlanError &error) {
    return reportError(error.what());
  }
  return writeOutput(outputPath, text);
}
} // namespace

/// Emits the remarks that the options of mlir-opt select, as they say.
static LogicalResult enableRemarks(MLIRContext &context,
                                   const MlirOptMainConfig &config) {
  if (!config.shouldEmitRemarks())
    return success();
  remark::RemarkCategories categories{
      config.getRemarksAllFilter(), config.getRemarksPassedFilter(),
      config.getRemarksMissedFilter(), config.getRemarksAnalyseFilter(),
      config.getRemarksFailedFilter()};
  std::unique_ptr<remark::detail::RemarkEmittingPolicyBase> policy;
  if (config.getRemarkPolicy() == RemarkPolicy::REMARK_POLICY_FINAL)
    policy = std::make_unique<remark::RemarkEmittingPolicyFinal>();
  else
    policy = std::make_unique<remark::RemarkEmittingPolicyAll>();
  if (config.getRemarkFormat() == RemarkFormat::REMARK_FORMAT_STDOUT)
    return remark::enableOptimizationRemarks(context, nullptr,
                                             std::move(policy), categories,
                                             /*printAsEmitRemarks=*/true);
  bool isYaml = config.getRemarkFormat() == RemarkFormat::REMARK_FORMAT_YAML;
  std::string path = config.getRemarksOutputFile();
  if (path.empty())
    path = isYaml ? "mlir-remarks.yaml" : "mlir-remarks.bitstream";
  return remark::enableOptimizationRemarksWithLLVMStreamer(
      context, path,
      isYaml ? llvm::remarks::Format::YAML : llvm::remarks::Format::Bitstream,
      std::move(policy), categories);
}

/// Rejects options that are given twice, the first in vain.
static LogicalResult checkRepeats() {
  for (const auto &entry : cl::getRegisteredOptions())
    if (const cl::Option &option = *entry.second;
        option.getNumOccurrencesFlag() == cl::Optional &&
        option.getNumOccurrences() > 1)
      return reportError((option.ArgStr.size() > 1 ? "--" : "-") +
                         option.ArgStr + ": expected it once, got it " +
                         Twine(option.getNumOccurrences()) + " times");
  return success();
}

/// Options of mlir-opt that say how to run passes on a text, one by one.
constexpr StringRef kPassByPass[] = {"elide-resource-data-from-bytecode",
                                     "emit-bytecode-version",
                                     "irdl-file",
                                     "mlir-diagnostic-verbosity-level",
                                     "mlir-disable-diagnostic-notes",
                                     "mlir-generate-reproducer",
                                     "no-implicit-module",
                                     "output-split-marker",
                                     "run-reproducer",
                                     "split-input-file",
                                     "verify-diagnostics",
                                     "verify-roundtrip"};

/// Rejects options that have no effect on what is written.
static LogicalResult checkOptions() {
  for (StringRef name : kPassByPass)
    if (const cl::Option *option = cl::getRegisteredOptions().lookup(name);
        option && option->getNumOccurrences())
      return reportError("--" + name +
                         ": expected only a .mlir file and passes");
  if (emitKind != Emit::MLIR &&
      MlirOptMainConfig::createFromCLOptions().shouldEmitBytecode())
    return reportError("--emit-bytecode: expected --emit mlir");
  auto check = [](const cl::Option &option, bool matters, StringRef expected) {
    if (matters || option.getNumOccurrences() == 0)
      return success();
    return reportError("--" + option.ArgStr + ": expected " + expected);
  };
  if (!diffPath.empty()) {
    for (const cl::Option *option : std::initializer_list<const cl::Option *>{
             &configPath, &worldSize, &level, &emitKind, &memoryModel})
      if (failed(check(*option, false, "no --diff")))
        return failure();
    return success();
  }
  bool isPlanned = emitKind == Emit::MLIR
                       ? level == Level::Planned
                       : emitKind != Emit::Pareto && emitKind != Emit::Layouts;
  if (failed(check(level, emitKind == Emit::MLIR, "--emit mlir")) ||
      failed(check(memoryModel, isPlanned,
                   "--emit plan, stats, trace or html, or --level planned")))
    return failure();
  constexpr StringRef names[] = {"mlir", "plan",   "stats",  "trace",
                                 "html", "pareto", "layouts"};
  // Each capture reads it.
  if (emitKind == Emit::Layouts && !configPath.empty() &&
      llvm::sys::fs::exists(configPath) &&
      !llvm::sys::fs::is_regular_file(configPath))
    return reportError("--config: expected a file that can be read several "
                       "times with --emit layouts, got " +
                       configPath);
  if (failed(checkLayoutOptions(emitKind == Emit::Layouts)) ||
      failed(check(worldSize, emitKind != Emit::Layouts,
                   "--gpus with --emit layouts")))
    return failure();
  return checkSimulationOptions(names[size_t(emitKind.getValue())]);
}

void mlir::fsdp::hideLibraryOptions() {
  for (auto &entry : cl::getRegisteredOptions()) {
    cl::Option &option = *entry.second;
    if (llvm::is_contained(option.Categories, &cl::getGeneralCategory()) &&
        option.getOptionHiddenFlag() == cl::NotHidden)
      option.setHiddenFlag(cl::Hidden);
  }
}

bool mlir::fsdp::showInstructions(llvm::raw_ostream &os) {
  if (showsInstructions)
    os << ::fsdp::plan::printInstructionTable();
  return showsInstructions;
}

bool mlir::fsdp::isDriverInvocation(StringRef inputFilename) {
  auto given = [](const cl::Option &option) {
    return option.getNumOccurrences() > 0;
  };
  return isCapture(inputFilename) || !diffPath.empty() ||
         emitKind != Emit::MLIR || given(configPath) || given(worldSize) ||
         given(level) || given(memoryModel) || isSimulationAsked();
}

LogicalResult mlir::fsdp::checkFiles(StringRef inputFilename,
                                     StringRef outputFilename) {
  if (servesRequests)
    return reportError("--requests: expected no other argument");
  std::vector<::fsdp::NamedFile> inputs, outputs;
  auto add = [](std::vector<::fsdp::NamedFile> &files, StringRef name,
                StringRef path) {
    if (!path.empty() && path != "-")
      files.push_back({name.str(), path.str()});
  };
  add(inputs, "the input", inputFilename);
  add(inputs, "--config", configPath);
  add(inputs, "--diff", diffPath);
  llvm::append_range(inputs, getSimulationFiles());
  llvm::append_range(inputs, getLayoutFiles());
  add(outputs, "-o", outputFilename);
  add(outputs, "--remarks-output-file",
      MlirOptMainConfig::createFromCLOptions().getRemarksOutputFile());
  std::string error = ::fsdp::checkOutputs(outputs, inputs);
  return error.empty() ? checkRepeats() : reportError(error);
}

LogicalResult mlir::fsdp::runDriver(StringRef inputFilename,
                                    StringRef outputFilename,
                                    const DialectRegistry &registry) {
  if (failed(checkFiles(inputFilename, outputFilename)) ||
      failed(checkOptions()))
    return failure();
  if (!diffPath.empty())
    return writeDifference(inputFilename, outputFilename);
  DefaultTimingManager timingManager;
  applyDefaultTimingManagerCLOptions(timingManager);
  TimingScope timing = timingManager.getRootScope();
  // One core: threads would only add their start-up.
  MLIRContext context(registry, MLIRContext::Threading::DISABLED);
  // The policy is made of its ops, whatever the input has.
  context.loadDialect<FSDPDialect, aten::AtenDialect>();
  auto config = MlirOptMainConfig::createFromCLOptions();
  context.allowUnregisteredDialects(config.shouldAllowUnregisteredDialects());
  if (failed(enableRemarks(context, config)))
    return reportError("--remarks-output-file: cannot be written: " +
                       config.getRemarksOutputFile());
  llvm::SourceMgr sources;
  ReportStream errors;
  DiagnosticReport diagnostics(sources, &context, errors);

  if (emitKind == Emit::Layouts) {
    std::string text;
    llvm::raw_string_ostream stream(text);
    auto loadOne = [&](StringRef path) {
      llvm::SourceMgr source; // parsing reads the first of several
      return load(path, &context, source);
    };
    LogicalResult found =
        printLayouts(inputFilename, loadOne, applyPolicy, stream);
    // Where there is no plan, the reasons are written all the same.
    return !text.empty() && failed(writeOutput(outputFilename, text))
               ? failure()
               : found;
  }
  TimingScope importing = timing.nest("Import");
  OwningOpRef<ModuleOp> module = load(inputFilename, &context, sources);
  importing.stop();
  if (!module || failed(applyPolicy(*module, worldSize)) ||
      failed(runPasses(*module, timing)))
    return failure();
  // Remarks that are given at the end.
  if (remark::detail::RemarkEngine *remarks = context.getRemarkEngine())
    remarks->getRemarkEmittingPolicy()->finalize();
  if (failed(checkWeights(*module, inputFilename, outputFilename)))
    return failure();
  TimingScope writing = timing.nest("Write");
  return write(*module, outputFilename);
}
