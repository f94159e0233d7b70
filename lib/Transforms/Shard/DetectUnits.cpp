//===- DetectUnits.cpp - units from the repeated modules of the graph -----===//
//
// Modules whose names are equal up to the numbers in them are a family. A
// family is repeated if two of its members make the same calls in forward, or
// one of them a few more in between (a downsampling branch, say). Its members
// are the units, outermost first; but a module that consists of alike members
// of a repeated family is a row of blocks and no block. Nor is one a unit for
// which that would change bits, as the capture does not know it
// (UnitEntries.h).
//
//===----------------------------------------------------------------------===//
#include "fsdp/Dialect/UnitEntries.h"
#include "fsdp/Transforms/Passes.h"

#include "llvm/ADT/MapVector.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/ADT/StringMap.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_DETECTUNITS
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;

namespace {
/// A module with parameters.
struct Module {
  /// Names of those of its children that have parameters, in their order.
  SmallVector<StringRef> children;
  bool ownsParams = false;
  /// Operators that it and what is in it call in forward.
  SmallVector<StringAttr> calls;

  /// Whether one's calls are the other's, up to some in between.
  bool isAlike(const Module &other) const {
    ArrayRef<StringAttr> few = calls, many = other.calls;
    if (few.size() > many.size())
      std::swap(few, many);
    if (few.empty() || 2 * few.size() < many.size())
      return false;
    for (StringAttr call : many)
      if (!few.empty() && few.front() == call)
        few = few.drop_front();
    return few.empty();
  }
};

/// Modules of one name up to numbers.
struct Family {
  SmallVector<StringRef> members;
  bool repeated = false;
};

struct DetectUnits : mlir::fsdp::impl::DetectUnitsBase<DetectUnits> {
  void runOnModule() override {
    ModuleOp module = getOperation();
    auto policies = llvm::to_vector(module.getOps<AutoUnitsOp>());
    if (policies.empty())
      return;
    ProgramOp program = getProgram(module);
    if (!program)
      return signalPassFailure();
    entries = module->getAttrOfType<DictionaryAttr>(entriesAttrName);
    collectModules(module, program);
    collectFamilies();
    for (StringRef top : tops)
      choose(top);

    AutoUnitsOp policy = policies.front();
    OpBuilder builder(policy);
    bool offload = false;
    GradientDivisionAttr division;
    for (auto op : module.getOps<UnitPatternOp>())
      if (op.isRoot()) {
        offload = op.getCpuOffload();
        division = op.getGradientDivisionAttr();
      }
    for (auto &[name, chosen] : units)
      for (StringRef unit : chosen)
        UnitPatternOp::create(builder, policy.getLoc(),
                              builder.getStrArrayAttr(unit), BoolAttr(),
                              /*by_class=*/false, IntegerAttr(),
                              MixedPrecisionAttr(), offload, division);
    report(policy);
    for (AutoUnitsOp op : policies)
      op.erase();
  }

private:
  void collectModules(ModuleOp module, ProgramOp program) {
    for (auto param : module.getOps<ParamOp>()) {
      StringRef name = param.getSymName().rsplit('.').first;
      if (name == param.getSymName())
        continue; // of the model itself
      modules[name].ownsParams = true;
      while (known.insert(name).second) {
        auto [parent, last] = name.rsplit('.');
        if (last.empty()) {
          tops.push_back(name);
          break;
        }
        modules[parent].children.push_back(name);
        name = parent;
      }
    }
    for (Operation &op : program.getBody().front()) {
      if (auto phase = dyn_cast<PhaseOp>(op);
          phase && phase.getPhase() == Phase::Backward)
        break;
      auto call = dyn_cast<aten::CallOp>(op);
      if (!call)
        continue;
      for (StringRef name = getModuleName(call); !name.empty();
           name = name.contains('.') ? name.rsplit('.').first : StringRef())
        if (auto it = modules.find(name); it != modules.end())
          it->second.calls.push_back(call.getCalleeAttr());
    }
  }

  /// The name with each number replaced: "layer1.0" is of family "layer*.*".
  static std::string getFamilyName(StringRef name) {
    std::string family;
    for (char c : name)
      if (!llvm::isDigit(c))
        family += c;
      else if (family.empty() || family.back() != '*')
        family += '*';
    return family;
  }

  static bool hasIndex(StringRef name) {
    return llvm::any_of(name.substr(name.rfind('.') + 1),
                        [](char c) { return llvm::isDigit(c); });
  }

  void collectFamilies() {
    for (auto &[name, module] : modules) {
      // A module without others in it is a layer, not a block.
      if (!hasIndex(name) || module.children.empty())
        continue;
      Family &family = families[getFamilyName(name)];
      for (StringRef member : family.members)
        family.repeated = family.repeated || modules[member].isAlike(module);
      family.members.push_back(name);
    }
  }

  bool isRepeated(StringRef name) const {
    auto it = families.find(getFamilyName(name));
    return it != families.end() && it->second.repeated &&
           llvm::is_contained(it->second.members, name);
  }

  /// Whether all its parameters are those of alike blocks.
  bool isRow(const Module &module) {
    if (module.ownsParams || module.children.empty())
      return false;
    return llvm::all_of(module.children, [&](StringRef child) {
      return isRepeated(child) &&
             modules[child].isAlike(modules[module.children.front()]);
    });
  }

  void choose(StringRef name) {
    const Module &module = modules[name];
    if (isRepeated(name) && !isRow(module) &&
        !(entries && entries.contains(name))) {
      units[getFamilyName(name)].push_back(name);
      return;
    }
    for (StringRef child : module.children)
      choose(child);
  }

  void report(AutoUnitsOp policy) {
    if (units.empty()) {
      policy.emitWarning("found no repeated modules: the root unit has all "
                         "parameters");
      return;
    }
    InFlightDiagnostic diag = policy.emitRemark("chose as units: ");
    llvm::interleave(
        units,
        [&](const auto &entry) {
          const auto &[family, chosen] = entry;
          diag << chosen.size() << " modules \"" << family << '"';
        },
        [&] { diag << ", "; });
  }

  DictionaryAttr entries; ///< may be null
  llvm::MapVector<StringRef, Module> modules;
  llvm::DenseSet<StringRef> known;
  /// Modules that are in no other.
  SmallVector<StringRef> tops;
  llvm::StringMap<Family> families;
  /// What is chosen, by family, in the order of parameters.
  llvm::MapVector<std::string, SmallVector<StringRef>,
                  llvm::StringMap<unsigned>>
      units;
};
} // namespace
