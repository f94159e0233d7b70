//===- FuseCalls.cpp - chains of calls as one kernel ----------------------===//
#include "fsdp/Codegen/Elements.h"
#include "fsdp/Codegen/Kernels.h"
#include "fsdp/Dialect/Storages.h"
#include "fsdp/Plan/Tensors.h"
#include "fsdp/Simulate/Format.h"
#include "fsdp/Transforms/Passes.h"
#include "fsdp/Transforms/Schedule.h"
#include "fsdp/Transforms/StepProgram.h"

#include "mlir/Dialect/Utils/IndexingUtils.h"
#include "mlir/IR/IRMapping.h"
#include "mlir/IR/Remarks.h"
#include "llvm/ADT/SetVector.h"
#include "llvm/ADT/StringMap.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_FUSECALLS
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;
using aten::CallOp;
using ::fsdp::simulate::formatBytes;

namespace {

/// What a kernel computes at most, so that its values fit into registers.
constexpr size_t kMaxCalls = 32;

RankedTensorType getResultType(CallOp call) {
  return cast<RankedTensorType>(call.getResult(0).getType());
}

/// The strides of a value, as far as the program says; the runtime runs the
/// calls one by one where a tensor has others.
SmallVector<int64_t> getLayout(Value value) {
  auto type = cast<RankedTensorType>(value.getType());
  if (std::optional<SmallVector<int64_t>> strides = getStrides(value))
    return *strides;
  DenseI64ArrayAttr given;
  if (auto read = value.getDefiningOp<ReadBufferOp>()) {
    given = SymbolTable::lookupNearestSymbolFrom<BufferOp>(read,
                                                           read.getBufferAttr())
                .getStridesAttr();
  } else if (auto argument = dyn_cast<BlockArgument>(value)) {
    unsigned index = argument.getArgNumber();
    Operation *parent = argument.getOwner()->getParentOp();
    if (auto loop = dyn_cast<MicrobatchesOp>(parent);
        loop && index < loop.getInputs().size())
      return getLayout(loop.getInputs()[index]);
    if (auto program = dyn_cast<ProgramOp>(parent))
      given = program.getArgAttrOfType<DenseI64ArrayAttr>(index,
                                                          inputStridesAttrName);
  }
  if (given && !given.empty())
    return llvm::to_vector(given.asArrayRef());
  return computeStrides(type.getShape());
}

/// Whether the value must be the result of a call: a reduction takes it, and
/// the operator then writes where the reduction reads, or the host gets a copy.
bool isTakenFromCall(Value value) {
  return llvm::any_of(getWithViews(value), [](Value view) {
    return llvm::any_of(view.getUsers(),
                        llvm::IsaPred<ReduceScatterOp, OffloadActivationOp>);
  });
}

/// The chains of one block.
class Chains {
public:
  explicit Chains(Block &body) : storages(body) {
    int64_t segment = 0;
    for (Operation &op : body) {
      auto call = dyn_cast<CallOp>(op);
      if (!call) {
        ++segment;
        continue;
      }
      if (!canJoin(call))
        continue;
      segmentOf[call] = segment;
      chainOf[call] = chains.size();
      chains.push_back({call});
      for (Value operand : call.getOperands())
        if (auto maker = operand.getDefiningOp<CallOp>())
          if (auto found = segmentOf.find(maker);
              found != segmentOf.end() && found->second == segment)
            explain(join(chainOf[maker], call), maker, call);
    }
  }

  /// Those of more than one call, in the order of the program.
  SmallVector<SmallVector<CallOp>> take() {
    llvm::erase_if(chains, [](const auto &chain) { return chain.size() < 2; });
    return std::move(chains);
  }

private:
  static bool canJoin(CallOp call) {
    if (!findElementFunction(call) || call.getReduceInputOf() ||
        isTakenFromCall(call.getResult(0)))
      return false;
    RankedTensorType type = getResultType(call);
    if (!type.hasStaticShape() || type.getNumElements() < 2)
      return false;
    SmallVector<int64_t> layout = getLayout(call.getResult(0));
    if (!::fsdp::plan::areDense(type.getShape().vec(),
                                {layout.begin(), layout.end()}) ||
        llvm::is_contained(layout, 0))
      return false;
    SmallVector<size_t> walk = getWalk(type.getShape(), layout);
    return llvm::all_of(call.getOperands(), [&](Value operand) {
      auto own = cast<RankedTensorType>(operand.getType());
      if (!own.hasStaticShape() || own.getRank() > type.getRank())
        return false;
      SmallVector<int64_t> over =
          getStridesOver(type.getShape(), own, getLayout(operand));
      return int64_t(over.size()) == type.getRank() && areReadable(walk, over);
    });
  }

  /// Says what prevents a call from joining the chain of what it takes.
  static void explain(StringRef obstacle, CallOp maker, CallOp call) {
    if (obstacle.empty())
      return;
    if (auto message = remark::missed(
            call.getLoc(),
            remark::RemarkOpts::name("NotFused").category("fsdp-fuse")))
      message << (call.getCallee() + " does not join the chain of " +
                  maker.getCallee() + ": " + obstacle)
                     .str();
  }

  /// Adds chain `index` to that of `call`, the last call of all, if the calls
  /// can run where `call` stands. Returns what prevents it.
  StringRef join(size_t index, CallOp call) {
    size_t to = chainOf[call];
    if (index == to)
      return "";
    if (chains[index].size() + chains[to].size() > kMaxCalls)
      return "a kernel has at most 32 calls";
    CallOp first = chains[index].front();
    if (getResultType(first).getShape() != getResultType(call).getShape())
      return "its result has another shape";
    if (getLayout(first.getResult(0)) != getLayout(call.getResult(0)))
      return "its result is laid out in another way";
    llvm::SmallPtrSet<Operation *, 32> members;
    for (size_t chain : {index, to})
      members.insert(chains[chain].begin(), chains[chain].end());
    if (!canBeWhole(members))
      return "one of the calls needs tensors that are laid out alike";
    for (Operation *member : members) {
      StringRef obstacle = findObstacle(cast<CallOp>(member), call, members);
      if (!obstacle.empty())
        return obstacle;
    }
    for (CallOp member : chains[index])
      chainOf[member] = to;
    SmallVector<CallOp> all;
    std::merge(chains[index].begin(), chains[index].end(), chains[to].begin(),
               chains[to].end(), std::back_inserter(all),
               [](CallOp a, CallOp b) { return a->isBeforeInBlock(b); });
    chains[to] = std::move(all);
    chains[index].clear();
    return "";
  }

  /// Whether the calls are one row, if one of them needs full vectors.
  static bool canBeWhole(const llvm::SmallPtrSetImpl<Operation *> &members) {
    if (!llvm::any_of(members, [](Operation *member) {
          return needsFullVectors(cast<CallOp>(member));
        }))
      return true;
    return llvm::all_of(members, [](Operation *member) {
      auto call = cast<CallOp>(member);
      return llvm::all_of(call.getOperands(), [&](Value operand) {
        return cast<RankedTensorType>(operand.getType()).getShape() ==
                   getResultType(call).getShape() &&
               getLayout(operand) == getLayout(call.getResult(0));
      });
    });
  }

  /// What between a member and `end` uses what it makes, or writes what it
  /// reads.
  StringRef
  findObstacle(CallOp member, Operation *end,
               const llvm::SmallPtrSetImpl<Operation *> &members) const {
    if (member == end)
      return "";
    for (Operation *user : member.getResult(0).getUsers())
      if (!members.contains(user) &&
          (user->getBlock() != end->getBlock() || user->isBeforeInBlock(end)))
        return "something before it uses what the chain makes";
    for (Value operand : member.getOperands())
      for (CallOp writer : storages.get(storages.getOwner(operand)).writers)
        if (member->isBeforeInBlock(writer) && writer->isBeforeInBlock(end))
          return "something before it writes what the chain reads";
    return "";
  }

  Storages storages;
  SmallVector<SmallVector<CallOp>> chains;
  llvm::DenseMap<Operation *, size_t> chainOf;
  /// Which run of calls without another op between them.
  llvm::DenseMap<Operation *, int64_t> segmentOf;
};

/// Makes kernels, one for all equal chains.
class Outliner {
public:
  explicit Outliner(ModuleOp module) : module(module), symbols(module) {}

  void outline(ArrayRef<CallOp> chain) {
    llvm::SetVector<Value> operands, results;
    llvm::SmallPtrSet<Operation *, 32> members;
    members.insert(chain.begin(), chain.end());
    int64_t between = 0;
    for (CallOp call : chain) {
      for (Value operand : call.getOperands())
        if (!members.contains(operand.getDefiningOp()))
          operands.insert(operand);
      Value result = call.getResult(0);
      if (llvm::any_of(result.getUsers(), [&](Operation *user) {
            return !members.contains(user);
          }))
        results.insert(result);
      else
        between += getNumBytes(getResultType(call));
    }
    if (results.empty())
      return; // nothing uses the chain
    bytes += between;
    calls += int64_t(chain.size());
    ++uses;
    KernelOp kernel =
        getKernel(chain, operands.getArrayRef(), results.getArrayRef());
    OpBuilder builder(chain.back());
    auto fused =
        createFor<FusedOp>(CallOp(chain.back()), builder,
                           ValueRange(results.getArrayRef()).getTypes(),
                           FlatSymbolRefAttr::get(kernel.getSymNameAttr()),
                           operands.getArrayRef());
    if (auto message = remark::passed(
            fused.getLoc(),
            remark::RemarkOpts::name("Fused").category("fsdp-fuse")))
      message << (kernel.getSymName() + ": " + llvm::Twine(chain.size()) +
                  " calls as one, " + formatBytes(double(between)) +
                  " are not written")
                     .str();
    for (auto [index, result] : llvm::enumerate(results.getArrayRef()))
      Value(result).replaceAllUsesWith(fused.getResult(index));
    for (CallOp call : llvm::reverse(chain))
      call.erase();
  }

  int64_t bytes = 0; ///< per microbatch, that kernels do not write
  int64_t calls = 0, uses = 0;

private:
  KernelOp getKernel(ArrayRef<CallOp> chain, ArrayRef<Value> operands,
                     ArrayRef<Value> results) {
    OpBuilder builder(module.getContext());
    builder.setInsertionPointToEnd(module.getBody());
    SmallVector<Attribute> strides;
    bool areRowMajor = true;
    for (Value operand : operands) {
      SmallVector<int64_t> layout = getLayout(operand);
      auto type = cast<RankedTensorType>(operand.getType());
      bool isRowMajor = layout == computeStrides(type.getShape());
      areRowMajor &= isRowMajor;
      strides.push_back(builder.getDenseI64ArrayAttr(
          isRowMajor ? SmallVector<int64_t>() : layout));
    }
    SmallVector<int64_t> layout = getLayout(results.front());
    bool isRowMajor =
        layout ==
        computeStrides(cast<RankedTensorType>(results[0].getType()).getShape());
    auto kernel = KernelOp::create(
        builder, module.getLoc(), builder.getStringAttr("kernel"),
        areRowMajor ? ArrayAttr() : builder.getArrayAttr(strides),
        isRowMajor ? DenseI64ArrayAttr() : builder.getDenseI64ArrayAttr(layout),
        llvm::any_of(chain, needsFullVectors) ? builder.getUnitAttr()
                                              : UnitAttr(),
        IntegerAttr(), DictionaryAttr());
    Block &body = kernel.getBody().emplaceBlock();
    IRMapping copies;
    for (Value operand : operands)
      copies.map(operand, body.addArgument(operand.getType(), module.getLoc()));
    builder.setInsertionPointToStart(&body);
    for (CallOp call : chain) {
      auto copy = cast<CallOp>(builder.clone(*call, copies));
      copy->setLoc(module.getLoc());
      copy->setDiscardableAttrs(DictionaryAttr::get(module.getContext()));
      copy.removeStridesAttr();
      copy.setRecompute(false);
    }
    SmallVector<Value> returned;
    for (Value result : results)
      returned.push_back(copies.lookup(result));
    KernelReturnOp::create(builder, module.getLoc(), returned);

    std::string text;
    llvm::raw_string_ostream os(text);
    kernel->print(os, OpPrintingFlags().useLocalScope());
    auto [found, isNew] = kernels.try_emplace(text, kernel);
    if (!isNew) {
      kernel.erase();
      return found->second;
    }
    kernel.setSymName(getName(chain));
    symbols.insert(kernel);
    return kernel;
  }

  /// "mul_mul_add": the operators, for people.
  static std::string getName(ArrayRef<CallOp> chain) {
    constexpr size_t kShown = 4;
    std::string name;
    for (CallOp call : chain.take_front(kShown)) {
      StringRef op = call.getCallee().split('.').first;
      name +=
          (name.empty() ? "" : "_") + op.rsplit("::").second.ltrim('_').str();
    }
    return chain.size() > kShown ? name + "_etc" : name;
  }

  ModuleOp module;
  SymbolTable symbols;
  llvm::StringMap<KernelOp> kernels;
};

/// Why the kernels' bits are not known to be ATen's, or "" if they are. What
/// has been compared, and how, is in fusion.md. A program that was not captured
/// says nothing of where it runs.
std::string whyUnproven(ModuleOp module) {
  auto from = module->getAttrOfType<DictionaryAttr>(capturedForAttrName);
  if (!from)
    return "";
  auto find = [&](StringRef key) {
    auto value = from.getAs<StringAttr>(key);
    return value ? value.getValue() : StringRef();
  };
  StringRef torch = find("torch");
  auto isTorch = [&](StringRef release) {
    return torch == release || torch.starts_with((release + ".").str());
  };
  if (isForGpu(module)) {
    if (find("arch") == "sm_90" && isTorch("2.11"))
      return "";
    return ("kernels were compared with ATen's for sm_90 under torch 2.11 "
            "alone, not for " +
            find("arch") + " under torch " + torch)
        .str();
  }
  if (isTorch("2.15"))
    return "";
  return ("kernels were compared with ATen's for the CPU under torch 2.15 "
          "alone, not under torch " +
          torch)
      .str();
}

struct FuseCalls : mlir::fsdp::impl::FuseCallsBase<FuseCalls> {
  void runOnModule() override {
    ModuleOp module = getOperation();
    ProgramOp step = getProgram(module);
    if (!step)
      return signalPassFailure();
    StringRef fuse = getOrCreateSchedule(module).getFuse();
    if (fuse == "none" || getKernelTargets(module).empty())
      return;
    if (std::string why = whyUnproven(module); !why.empty()) {
      if (fuse == "exact") {
        if (auto message = remark::missed(
                step.getLoc(),
                remark::RemarkOpts::name("Unproven").category("fsdp-fuse")))
          message << (why + ": nothing is fused without `fuse: unproven`");
        return;
      }
      mlir::emitWarning(module.getLoc())
          << "fsdp-fuse-calls: " << why
          << ": compare them there (test/parity/kernel_bits.py)";
    }
    Outliner outliner(module);
    for (ProgramOp program : {step, getEvaluationProgram(module)})
      if (program)
        for (ArrayRef<CallOp> chain : Chains(getMicrobatchBody(program)).take())
          outliner.outline(chain);
    if (outliner.uses > 0)
      remark::passed(step.getLoc(),
                     remark::RemarkOpts::name("Fuse").category("fsdp-fuse"))
          << std::to_string(outliner.calls) + " calls run as " +
                 std::to_string(outliner.uses) +
                 " kernels, which do not write " +
                 formatBytes(double(outliner.bytes));
  }
};
} // namespace
