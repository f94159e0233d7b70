//===- AssignUnits.cpp - group parameters into FSDP units -----------------===//
//
// A module is a proper prefix of a parameter's dotted name. For each parameter
// the innermost module that a pattern matches is its unit; what no pattern
// claims belongs to the root unit. Units that share a tied parameter are one.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Dialect/UnitEntries.h"
#include "fsdp/Transforms/ModulePattern.h"
#include "fsdp/Transforms/Passes.h"

#include "llvm/ADT/IntEqClasses.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/ADT/StringMap.h"
#include "llvm/ADT/StringSet.h"

#include <map>
#include <set>

namespace mlir::fsdp {
#define GEN_PASS_DEF_ASSIGNUNITS
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;

namespace {
/// What one `fully_shard` call covers, before ties join some of them.
struct Claim {
  /// Index of the pattern; none for the root unit.
  std::optional<size_t> pattern;
  /// In the order of the parameters.
  SmallVector<StringRef> modules;
};

struct AssignUnits : mlir::fsdp::impl::AssignUnitsBase<AssignUnits> {
  void runOnModule() override {
    ModuleOp module = getOperation();
    rootPolicy = {module.getLoc(), false, {}};
    if (failed(readPatterns(module)) || failed(readClasses(module)) ||
        failed(ignore(module)))
      return signalPassFailure();

    SmallVector<ParamOp> params;
    SmallVector<SmallVector<size_t>> claimsOf; // of each name of a parameter
    for (auto param : module.getOps<ParamOp>())
      if (!param.getUnit() && !param.getIgnored()) {
        params.push_back(param);
        claimsOf.emplace_back();
        for (StringRef name : getNames(param))
          claimsOf.back().push_back(findClaim(name));
      }
    // After the claims, so that only modules without others are left.
    for (auto param : module.getOps<ParamOp>())
      if (param.getIgnored())
        for (StringRef name : getNames(param))
          findIgnoring(name);
    if (failed(eraseMatched(module)) || failed(checkPrecision(module)))
      return signalPassFailure();

    llvm::IntEqClasses joined(claims.size());
    for (auto [param, indices] : llvm::zip(params, claimsOf)) {
      SmallVector<StringRef> names = getNames(param);
      for (auto [index, name] : llvm::drop_begin(llvm::zip(indices, names))) {
        if (joined.findLeader(index) != joined.findLeader(indices.front()))
          param.emitWarning("tied parameter has names in different units: \"")
              << param.getSymName() << "\" in \""
              << getClaimName(indices.front()) << "\", \"" << name << "\" in \""
              << getClaimName(index)
              << "\"; the units are merged, where FSDP2 asks to group them";
        if (getPolicy(index).precision !=
            getPolicy(indices.front()).precision) {
          param.emitError("the mixed precision of its units differs");
          return signalPassFailure();
        }
        if (getPolicy(index).offload != getPolicy(indices.front()).offload) {
          param.emitError("one of its units is offloaded, another is not");
          return signalPassFailure();
        }
        if (getPolicy(index).division != getPolicy(indices.front()).division) {
          param.emitError("the gradient division of its units differs");
          return signalPassFailure();
        }
        joined.join(index, indices.front());
      }
    }
    llvm::DenseMap<unsigned, UnitOp> units;
    for (auto [param, indices] : llvm::zip(params, claimsOf)) {
      UnitOp &unit = units[joined.findLeader(indices.front())];
      if (!unit)
        unit = createUnit(param, joined, indices.front());
      param.setUnitAttr(FlatSymbolRefAttr::get(unit.getSymNameAttr()));
    }
    module->removeAttr(moduleClassesAttrName);
    if (failed(checkEntries(module, joined)))
      return signalPassFailure();
    module->removeAttr(capturedPrecisionAttrName);
    module->removeAttr(capturedUnitsAttrName);
    module->removeAttr(entriesAttrName);
  }

private:
  struct UnitPolicy {
    Location loc;
    bool reshard;
    MixedPrecisionAttr precision;
    std::optional<int64_t> postForwardSize = std::nullopt;
    bool offload = false;
    GradientDivisionAttr division = {};
  };

  /// Takes the pattern "", the others into `patterns`.
  LogicalResult readPatterns(ModuleOp module) {
    bool hasRoot = false;
    for (auto op : llvm::make_early_inc_range(module.getOps<UnitPatternOp>())) {
      if (!op.isRoot()) {
        patterns.push_back(op);
        matched.emplace_back(op.getPatterns().size(), false);
        continue;
      }
      if (hasRoot)
        return op.emitError("a second pattern \"\" for the root module");
      hasRoot = true;
      // FSDP2 keeps the root unit gathered.
      rootPolicy = {op.getLoc(),
                    op.getReshardAfterForward().value_or(
                        op.getPostForwardSize().has_value()),
                    op.getMixedPrecisionAttr(),
                    op.getPostForwardSize(),
                    op.getCpuOffload(),
                    op.getGradientDivisionAttr()};
      if (failed(normalizePostForwardSize(module, op, rootPolicy)))
        return failure();
      op.erase();
    }
    return success();
  }

  static SmallVector<StringRef> getNames(ParamOp param) {
    SmallVector<StringRef> names{param.getSymName()};
    if (auto aliases = param.getAliases())
      llvm::append_range(names, aliases->getAsValueRange<StringAttr>());
    return names;
  }

  LogicalResult readClasses(ModuleOp module) {
    classes = module->getAttrOfType<DictionaryAttr>(moduleClassesAttrName);
    for (UnitPatternOp pattern : patterns)
      if (pattern.getByClass() && !classes)
        return pattern.emitError("the capture has no classes of modules: "
                                 "capture the model again");
    return success();
  }

  /// Marks what fsdp.ignore ops match, and erases them.
  static LogicalResult ignore(ModuleOp module) {
    for (auto op : llvm::make_early_inc_range(module.getOps<IgnoreOp>())) {
      bool any = false;
      for (auto param : module.getOps<ParamOp>())
        if (llvm::any_of(getNames(param), [&](StringRef name) {
              return matchesPattern(op.getPattern(), name);
            })) {
          any = true;
          param.setIgnored(true);
        }
      if (!any)
        return op.emitError("pattern \"")
               << op.getPattern() << "\" matches no parameter";
      op.erase();
    }
    return success();
  }

  /// The pattern that claims the module `name` first.
  std::optional<size_t> findPattern(StringRef name) {
    StringRef className;
    if (classes)
      if (auto attr = classes.getAs<StringAttr>(name))
        className = attr;
    std::optional<size_t> first;
    for (auto [index, op] : llvm::enumerate(patterns))
      for (auto [position, pattern] :
           llvm::enumerate(op.getPatterns().getAsValueRange<StringAttr>()))
        if (matchesPattern(pattern, op.getByClass() ? className : name)) {
          matched[index][position] = true;
          if (!first)
            first = index;
        }
    return first;
  }

  /// The claim on the parameter `name`: by its innermost matching module, or
  /// the root's. Visits the outer modules too, so that their patterns match.
  size_t findClaim(StringRef name) {
    std::optional<size_t> claim;
    for (StringRef prefix = name.rsplit('.').first; prefix != name;
         name = prefix, prefix = name.rsplit('.').first) {
      auto [it, inserted] = claimOfModule.try_emplace(prefix, std::nullopt);
      if (inserted)
        if (std::optional<size_t> pattern = findPattern(prefix))
          it->second = addClaim(*pattern, it->getKey());
      if (!claim && it->second) {
        claim = it->second;
        StringRef module = it->getKey();
        if (!llvm::is_contained(claims[*claim].modules, module))
          claims[*claim].modules.push_back(module);
      }
    }
    if (claim)
      return *claim;
    if (!rootClaim) {
      rootClaim = claims.size();
      claims.push_back({std::nullopt, {rootUnitName}});
    }
    return *rootClaim;
  }

  /// The patterns of the modules that have the ignored parameter `name`. As a
  /// fully_shard call on a module all of whose parameters are ignored, they
  /// need not claim anything.
  void findIgnoring(StringRef name) {
    for (StringRef prefix = name.rsplit('.').first; prefix != name;
         name = prefix, prefix = name.rsplit('.').first)
      if (!claimOfModule.contains(prefix))
        if (std::optional<size_t> pattern = findPattern(prefix))
          idle.try_emplace(*pattern, prefix);
  }

  size_t addClaim(size_t pattern, StringRef module) {
    bool grouped = patterns[pattern].getPatterns().size() > 1;
    if (grouped)
      for (auto [index, claim] : llvm::enumerate(claims))
        if (claim.pattern == pattern)
          return index;
    claims.push_back({pattern, {}});
    return claims.size() - 1;
  }

  std::string getClaimName(size_t claim) {
    return llvm::join(claims[claim].modules, "+");
  }

  UnitOp createUnit(ParamOp param, const llvm::IntEqClasses &joined,
                    size_t claim) {
    SmallVector<std::string> names;
    for (size_t index = 0; index < claims.size(); ++index) {
      // One without parameters is no unit.
      if (joined.findLeader(index) != joined.findLeader(claim) ||
          claims[index].modules.empty())
        continue;
      names.push_back(getClaimName(index));
      if (index == rootClaim)
        claim = index;
    }
    std::string name =
        claim == rootClaim ? rootUnitName.str() : llvm::join(names, "+");
    OpBuilder builder(param);
    const UnitPolicy &policy = getPolicy(claim);
    IntegerAttr size;
    if (policy.postForwardSize)
      size = builder.getI64IntegerAttr(*policy.postForwardSize);
    return UnitOp::create(builder, policy.loc, name, policy.reshard, size,
                          policy.precision, policy.offload, policy.division);
  }

  const UnitPolicy &getPolicy(size_t claim) const {
    std::optional<size_t> pattern = claims[claim].pattern;
    return pattern ? policies[*pattern] : rootPolicy;
  }

  /// The casts of activations and gradients are in the captured program: they
  /// must be those that the units' policies ask for now.
  LogicalResult checkPrecision(ModuleOp module) {
    auto captured =
        module->getAttrOfType<DictionaryAttr>(capturedPrecisionAttrName);
    llvm::StringSet<> seen;
    auto check = [&](const UnitPolicy &policy,
                     StringRef unit) -> LogicalResult {
      seen.insert(unit);
      MixedPrecisionAttr wanted = policy.precision;
      auto found = captured ? captured.getAs<MixedPrecisionAttr>(unit)
                            : MixedPrecisionAttr();
      if (wanted == found)
        return success();
      auto describe = [](InFlightDiagnostic &diag, MixedPrecisionAttr policy) {
        if (policy)
          diag << policy;
        else
          diag << "no mixed precision";
      };
      InFlightDiagnostic diag = emitError(policy.loc)
                                << "unit \"" << unit << "\" was captured with ";
      describe(diag, found);
      diag << ", the policy asks for ";
      describe(diag, wanted);
      return diag << "; capture the model with this config";
    };
    for (size_t claim = 0; claim < claims.size(); ++claim)
      for (StringRef unit : claims[claim].modules)
        if (failed(check(getPolicy(claim), unit)))
          return failure();
    // A root unit without parameters casts its inputs and output all the same.
    if (!rootClaim && failed(check(rootPolicy, rootUnitName)))
      return failure();
    if (captured)
      for (NamedAttribute entry : captured)
        if (!seen.contains(entry.getName()) &&
            failed(check({module.getLoc(), false, {}}, entry.getName())))
          return failure();
    return success();
  }

  /// Gradients of a unit's inputs are summed inside it first, and the inputs
  /// are views, whose strides may be others. The captured program has these
  /// sums and views: a unit for which they make a difference must have been one
  /// at capture, and the other way round.
  LogicalResult checkEntries(ModuleOp module, llvm::IntEqClasses &joined) {
    auto entries = module->getAttrOfType<DictionaryAttr>(entriesAttrName);
    if (!entries)
      return success();
    using Modules = std::set<StringRef>;
    std::set<Modules> captured;
    std::map<Modules, Location> wanted;
    if (auto units = module->getAttrOfType<ArrayAttr>(capturedUnitsAttrName))
      for (auto unit : units.getAsRange<ArrayAttr>()) {
        auto names = unit.getAsValueRange<StringAttr>();
        captured.insert(Modules(names.begin(), names.end()));
      }
    for (size_t claim = 0; claim < claims.size(); ++claim) {
      unsigned leader = joined.findLeader(claim);
      if (leader != claim ||
          (rootClaim && leader == joined.findLeader(*rootClaim)))
        continue;
      Modules modules;
      for (size_t other = claim; other < claims.size(); ++other)
        if (joined.findLeader(other) == leader)
          modules.insert(claims[other].modules.begin(),
                         claims[other].modules.end());
      wanted.emplace(modules, getPolicy(claim).loc);
    }
    auto check = [&](Location loc, const Modules &modules,
                     StringRef fault) -> LogicalResult {
      for (StringRef name : modules)
        if (auto input = entries.getAs<StringAttr>(name))
          return emitError(loc)
                 << "unit \"" << llvm::join(modules, "+") << "\" " << fault
                 << ", and what a unit does with input " << input << " of \""
                 << name
                 << "\" changes bits; capture the model with a config that "
                    "has these units";
      return success();
    };
    for (const auto &[modules, loc] : wanted)
      if (!captured.count(modules) &&
          failed(check(loc, modules, "was not one at capture")))
        return failure();
    for (const Modules &modules : captured)
      if (!wanted.count(modules) &&
          failed(check(module.getLoc(), modules,
                       "was one at capture and is not one now")))
        return failure();
    return success();
  }

  /// Erases the patterns; one that matched nothing is an error.
  LogicalResult eraseMatched(ModuleOp module) {
    for (auto [index, op] : llvm::enumerate(patterns)) {
      for (auto [position, pattern] :
           llvm::enumerate(op.getPatterns().getAsValueRange<StringAttr>()))
        if (!matched[index][position])
          return op.emitError(op.getByClass() ? "class \"" : "pattern \"")
                 << pattern << "\" matches no module with parameters"
                 << nearestModules(module, op.getByClass());
      UnitPolicy policy{op.getLoc(),
                        op.getReshardAfterForward().value_or(true),
                        op.getMixedPrecisionAttr(),
                        op.getPostForwardSize(),
                        op.getCpuOffload(),
                        op.getGradientDivisionAttr()};
      if (failed(normalizePostForwardSize(module, op, policy)))
        return failure();
      // FSDP2 casts at such a module, too. The captured program has the casts,
      // but does not list them among those of units.
      bool claimsAny = llvm::any_of(
          claims, [&](const Claim &claim) { return claim.pattern == index; });
      if (auto it = idle.find(index); !claimsAny && it != idle.end() &&
                                      policy.precision != rootPolicy.precision)
        return op.emitError("the parameters of module \"")
               << it->second
               << "\" are all ignored; expected the mixed precision of the "
                  "root "
                  "unit for it";
      policies.push_back(policy);
      op.erase();
    }
    return success();
  }

  /// "; modules are: a, b, …" (or classes) for the error of a pattern without
  /// a match.
  std::string nearestModules(ModuleOp module, bool byClass) {
    llvm::StringSet<> seen;
    std::string list;
    for (auto param : module.getOps<ParamOp>()) {
      StringRef name = param.getSymName();
      for (StringRef prefix = name.rsplit('.').first; prefix != name;
           name = prefix, prefix = name.rsplit('.').first) {
        StringRef found = prefix;
        if (byClass) {
          auto attr = classes.getAs<StringAttr>(prefix);
          if (!attr)
            continue;
          found = attr;
        }
        if (!seen.insert(found).second)
          continue;
        if (seen.size() > 4)
          return list + ", …";
        list +=
            (list.empty() ? (byClass ? "; classes are: " : "; modules are: ")
                          : ", ") +
            found.str();
        if (!byClass)
          break;
      }
    }
    return list;
  }

  /// FSDP2's rules for an integer reshard_after_forward, its errors and its
  /// warning.
  static LogicalResult normalizePostForwardSize(ModuleOp module,
                                                UnitPatternOp op,
                                                UnitPolicy &policy) {
    if (!policy.postForwardSize)
      return success();
    int64_t size = *policy.postForwardSize, ranks = 1;
    for (auto mesh : module.getOps<MeshOp>())
      ranks = mesh.getMesh().getAxisSize(shardAxisName).value_or(1);
    if (size < 1 || size > ranks || ranks % size != 0)
      return op.emitError("expected an integer \"reshard_after_forward\" that "
                          "is a factor of the ")
             << ranks << " ranks of axis \"" << shardAxisName
             << "\", got: " << size;
    if (size == 1)
      op.emitWarning("an integer \"reshard_after_forward\" of 1 keeps the "
                     "parameters whole after forward, as false does; true "
                     "reshards them");
    if (size == 1 || size == ranks) {
      policy.reshard = size != 1;
      policy.postForwardSize.reset();
    }
    return success();
  }

  /// All but the root's.
  SmallVector<UnitPatternOp> patterns;
  /// What outlives the patterns.
  SmallVector<UnitPolicy> policies;
  UnitPolicy rootPolicy{UnknownLoc(), false, {}};
  /// Per pattern op, per pattern in it.
  SmallVector<SmallVector<bool>> matched;
  DictionaryAttr classes;
  llvm::StringMap<std::optional<size_t>> claimOfModule;
  SmallVector<Claim> claims;
  std::optional<size_t> rootClaim;
  /// Of a pattern, a module all of whose parameters are ignored.
  std::map<size_t, StringRef> idle;
};
} // namespace
