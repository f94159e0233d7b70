//===- AssignUnits.cpp - group parameters into FSDP units -----------------===//
//
// A module is a proper prefix of a parameter's dotted name. For each parameter
// the innermost module that a pattern matches is its unit; what no pattern
// claims belongs to the root unit.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Transforms/ModulePattern.h"
#include "fsdp/Transforms/Passes.h"

#include "llvm/ADT/DenseMap.h"
#include "llvm/ADT/StringMap.h"
#include "llvm/ADT/StringSet.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_ASSIGNUNITS
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;

namespace {
struct AssignUnits : mlir::fsdp::impl::AssignUnitsBase<AssignUnits> {
  void runOnOperation() override {
    ModuleOp module = getOperation();
    patterns = llvm::to_vector(module.getOps<UnitPatternOp>());
    matched.assign(patterns.size(), false);
    OpBuilder builder(module.getContext());

    for (auto param : llvm::make_early_inc_range(module.getOps<ParamOp>())) {
      if (param.getUnit())
        continue;
      if (failed(assign(param, builder)))
        return signalPassFailure();
    }
    for (auto [index, pattern] : llvm::enumerate(patterns)) {
      if (!matched[index]) {
        pattern.emitError("pattern \"")
            << pattern.getPattern() << "\" matches no module with parameters"
            << nearestModules(module);
        return signalPassFailure();
      }
      pattern.erase();
    }
  }

private:
  /// The unit that claims `name`: its innermost matching module, or the root.
  StringRef findUnit(StringRef name, std::optional<size_t> &pattern) {
    StringRef unit = rootUnitName;
    pattern = std::nullopt;
    for (StringRef prefix = name.rsplit('.').first; prefix != name;
         name = prefix, prefix = name.rsplit('.').first) {
      auto [it, inserted] = patternOfModule.try_emplace(prefix, std::nullopt);
      if (inserted)
        for (auto [index, candidate] : llvm::enumerate(patterns))
          if (matchesPattern(candidate.getPattern(), prefix)) {
            matched[index] = true;
            if (!it->second)
              it->second = index;
          }
      if (it->second && !pattern) {
        pattern = it->second;
        unit = it->getKey();
      }
    }
    return unit;
  }

  LogicalResult assign(ParamOp param, OpBuilder &builder) {
    std::optional<size_t> pattern;
    StringRef unit = findUnit(param.getSymName(), pattern);
    if (auto aliases = param.getAliases())
      for (auto alias : aliases->getAsRange<StringAttr>()) {
        std::optional<size_t> other;
        StringRef otherUnit = findUnit(alias, other);
        if (otherUnit != unit)
          return param.emitError(
                     "tied parameter has names in different units: \"")
                 << param.getSymName() << "\" in \"" << unit << "\", \""
                 << alias.getValue() << "\" in \"" << otherUnit
                 << "\"; let one pattern cover both, or neither";
      }
    auto [it, inserted] = units.try_emplace(unit);
    if (inserted) {
      builder.setInsertionPoint(param);
      bool reshard = pattern.has_value();
      Location loc = param.getLoc();
      if (pattern) {
        loc = patterns[*pattern].getLoc();
        reshard = patterns[*pattern].getReshardAfterForward().value_or(true);
      }
      it->second = UnitOp::create(builder, loc, unit, reshard);
    }
    param.setUnitAttr(FlatSymbolRefAttr::get(it->second.getSymNameAttr()));
    return success();
  }

  /// "; modules are: a, b, …" for the error of a pattern without a match.
  static std::string nearestModules(ModuleOp module) {
    llvm::StringSet<> seen;
    std::string list;
    for (auto param : module.getOps<ParamOp>()) {
      StringRef owner = param.getSymName().rsplit('.').first;
      if (owner == param.getSymName() || !seen.insert(owner).second)
        continue;
      if (seen.size() > 4)
        return list + ", …";
      list += (list.empty() ? "; modules are: " : ", ") + owner.str();
    }
    return list;
  }

  SmallVector<UnitPatternOp> patterns;
  SmallVector<bool> matched;
  llvm::StringMap<std::optional<size_t>> patternOfModule;
  llvm::StringMap<UnitOp> units;
};
} // namespace
