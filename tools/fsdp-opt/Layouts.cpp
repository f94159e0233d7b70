//===- Layouts.cpp - fsdp-opt --emit layouts ------------------------------===//
#include "Layouts.h"
#include "../Report.h"

#include "fsdp/Dialect/FSDP.h"
#include "fsdp/Dialect/ModelParallel.h"
#include "fsdp/Plan/Limits.h"
#include "fsdp/Simulate/CostModel.h"
#include "fsdp/Simulate/Format.h"
#include "fsdp/Transforms/CompileStep.h"
#include "fsdp/Transforms/Passes.h"
#include "fsdp/Transforms/Schedule.h"
#include "mlir/IR/Diagnostics.h"
#include "mlir/Pass/PassManager.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/Support/CommandLine.h"
#include "llvm/Support/FormatVariadic.h"

using namespace mlir;
using namespace mlir::fsdp;
namespace cl = llvm::cl;
namespace plan = ::fsdp::plan;
namespace simulate = ::fsdp::simulate;

namespace {
cl::OptionCategory category("layout options");
cl::opt<int64_t> gpus("gpus",
                      cl::desc("The devices of a mesh, for --emit layouts"),
                      cl::cat(category));
cl::list<std::string> otherPaths(
    "captures", cl::CommaSeparated,
    cl::desc("Further captures of the same model, parallelised over other "
             "axes, for --emit layouts"),
    cl::value_desc("model.pt,…"), cl::cat(category));

/// One mesh, and what a step takes on it.
struct Layout {
  std::string axes;
  /// Why it has no plan; empty if it has one.
  std::string defect;
  double seconds = 0, exposed = 0, tokensPerRank = 0, utilization = 0;
  int64_t bytes = 0;
  bool fits = true;
};

/// "replicate 4 x shard 32 x tensor 8".
std::string describeAxes(int64_t replicas, int64_t shards,
                         const std::optional<plan::ModelParallel> &parallel) {
  SmallVector<std::string> parts;
  if (replicas > 1)
    parts.push_back("replicate " + std::to_string(replicas));
  parts.push_back("shard " + std::to_string(shards));
  if (parallel)
    for (const plan::ModelAxis &axis : parallel->axes)
      parts.push_back(axis.name + " " + std::to_string(axis.ranks));
  return llvm::join(parts, " x ");
}

FailureOr<CompiledStep> compileOn(ModuleOp module, int64_t replicas,
                                  int64_t shards,
                                  const simulate::DeviceModel &device) {
  MLIRContext *context = module.getContext();
  OwningOpRef<ModuleOp> copy = module.clone();
  SmallVector<MeshAxisAttr> axes;
  if (replicas > 1)
    axes.push_back(MeshAxisAttr::get(context, replicateAxisName, replicas));
  axes.push_back(MeshAxisAttr::get(context, shardAxisName, shards));
  for (auto mesh : copy->getOps<MeshOp>())
    mesh.setMeshAttr(MeshAttr::get(context, axes));
  PassManager pm(context);
  pm.enableVerifier(false);
  pm.addPass(createDetectUnits());
  pm.addPass(createAssignUnits());
  pm.addPass(createChooseMemory());
  if (failed(pm.run(*copy)))
    return failure();
  return compileStep(*copy, device, [](ModuleOp) {});
}

Layout findLayout(ModuleOp module, int64_t replicas, int64_t shards,
                  const simulate::DeviceModel &device) {
  Layout layout;
  layout.axes = describeAxes(replicas, shards, getModelParallel(module));
  ScopedDiagnosticHandler note(module.getContext(), [&](Diagnostic &message) {
    if (message.getSeverity() == DiagnosticSeverity::Error &&
        layout.defect.empty())
      layout.defect = message.str();
    return success();
  });
  FailureOr<CompiledStep> step = compileOn(module, replicas, shards, device);
  if (failed(step)) {
    if (layout.defect.empty())
      layout.defect = "it cannot be compiled";
    return layout;
  }
  layout.defect.clear(); // what a pass said and mended
  layout.seconds = step->seconds;
  layout.exposed = step->exposed;
  layout.bytes = step->bytes;
  layout.fits =
      device.memoryCapacity <= 0 || step->bytes <= device.memoryCapacity;
  layout.utilization =
      simulate::modelFlopsUtilization(step->cost, device, step->seconds);
  if (step->seconds > 0)
    layout.tokensPerRank = double(simulate::tokensPerStep(step->plan)) /
                           step->seconds / double(step->plan.jobRanks());
  return layout;
}

void printRow(const Layout &layout, llvm::raw_ostream &os) {
  if (!layout.defect.empty()) {
    os << "no plan: " << layout.axes << ": " << layout.defect << '\n';
    return;
  }
  os << llvm::formatv("{0,14:F1} {1,14:F3} {2,12:F3} {3,8:F2} {4,12}  {5}{6}\n",
                      layout.tokensPerRank, layout.seconds * 1e3,
                      layout.exposed * 1e3, 100 * layout.utilization,
                      simulate::formatBytes(layout.bytes), layout.axes,
                      layout.fits ? "" : " (does not fit)");
}

/// Those of one capture, in which FSDP has `data` ranks.
LogicalResult findLayouts(ModuleOp module, StringRef path, int64_t data,
                          SmallVectorImpl<Layout> &layouts) {
  FailureOr<simulate::DeviceModel> device = loadDevice(module);
  if (failed(device))
    return failure();
  auto meshes = llvm::to_vector(module.getOps<MeshOp>());
  if (meshes.size() != 1 || meshes.front().getMesh().getAxes().size() != 1 ||
      meshes.front().getMesh().getNumRanks() != data)
    return reportError(path + ": expected a capture and a policy without a "
                              "mesh, which --emit layouts chooses");
  for (int64_t replicas = 1; replicas <= data; ++replicas)
    if (data % replicas == 0)
      layouts.push_back(findLayout(module, replicas, data / replicas, *device));
  return success();
}
} // namespace

LogicalResult mlir::fsdp::checkLayoutOptions(bool isAsked) {
  // A list's own & is that of its storage.
  for (const cl::Option *option : std::initializer_list<const cl::Option *>{
           &gpus, std::addressof(otherPaths)})
    if (!isAsked && option->getNumOccurrences())
      return reportError("--" + option->ArgStr + ": expected --emit layouts");
  if (isAsked && (gpus < 1 || gpus > plan::kMaxWorldSize))
    return reportError("--gpus: expected at least 1 and at most " +
                       llvm::Twine(plan::kMaxWorldSize) +
                       " with --emit layouts, got " + llvm::Twine(gpus));
  return success();
}

std::vector<::fsdp::NamedFile> mlir::fsdp::getLayoutFiles() {
  std::vector<::fsdp::NamedFile> files;
  for (const std::string &path : otherPaths)
    files.push_back({"--captures", path});
  return files;
}

LogicalResult mlir::fsdp::printLayouts(StringRef path, LoadCapture load,
                                       ApplyPolicy apply,
                                       llvm::raw_ostream &os) {
  SmallVector<std::string> paths{path.str()};
  llvm::append_range(paths, otherPaths);
  SmallVector<Layout> layouts;
  std::string tooMany;
  for (const std::string &each : paths) {
    OwningOpRef<ModuleOp> module = load(each);
    if (!module)
      return failure();
    auto parallel = getModelParallel(*module);
    int64_t sharing = parallel ? parallel->ranks : 1;
    if (gpus % sharing != 0) {
      tooMany += "no mesh of " + std::to_string(gpus) + ": " + each + ": " +
                 std::to_string(sharing) + " ranks share a copy of the model\n";
      continue;
    }
    if (failed(apply(*module, gpus / sharing)) ||
        failed(findLayouts(*module, each, gpus / sharing, layouts)))
      return failure();
  }
  llvm::sort(layouts, [](const Layout &a, const Layout &b) {
    return std::tuple(!a.defect.empty(), !a.fits, -a.tokensPerRank, a.bytes,
                      a.axes) < std::tuple(!b.defect.empty(), !b.fits,
                                           -b.tokensPerRank, b.bytes, b.axes);
  });
  os << "tokens/s a rank  step time, ms  exposed, ms   MFU, %  peak a rank  "
        "mesh\n";
  for (const Layout &layout : layouts)
    printRow(layout, os);
  os << tooMany;
  if (layouts.empty() || !layouts.front().defect.empty())
    return reportError("--emit layouts: expected a mesh of " +
                       llvm::Twine(gpus) + " devices with a plan, found none");
  return success();
}
