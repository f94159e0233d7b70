//===- SimplifyCalls.cpp - calls that autograd makes and no step needs ----===//
//
// A value is replaced by another that has the same elements, in the same memory
// or in memory that nothing writes, so that no result changes a bit. Nothing is
// kept longer than before: where a storage takes the place of another, it is
// still held when the other would have been made.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Dialect/Storages.h"
#include "fsdp/Simulate/Format.h"
#include "fsdp/Transforms/Passes.h"
#include "fsdp/Transforms/StepProgram.h"

#include "mlir/Dialect/Utils/IndexingUtils.h"
#include "mlir/IR/Remarks.h"
#include "llvm/ADT/DenseMap.h"
#include "llvm/ADT/DenseSet.h"
#include "llvm/ADT/StringSwitch.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_SIMPLIFYCALLS
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;
using aten::CallOp;
using ::fsdp::simulate::formatBytes;

namespace {
enum class CallKind {
  Other,
  Permutation, ///< a view of its operand with the dimensions in another order
  Reshape,     ///< a view of all elements in the same order
  Slice,       ///< a view of some elements in the same order
  Expand,      ///< a view that repeats elements
  Copy,        ///< the elements in new memory, in some dtype
};

CallKind getKind(CallOp call) {
  if (call.getNumOperands() != 1 || call.getNumResults() != 1 ||
      call.getMutates() || call.getRandom())
    return CallKind::Other;
  auto kind = llvm::StringSwitch<CallKind>(call.getCallee())
                  .Cases({"aten::t", "aten::transpose.int", "aten::permute"},
                         CallKind::Permutation)
                  .Cases({"aten::view", "aten::_unsafe_view", "aten::squeeze",
                          "aten::squeeze.dim", "aten::unsqueeze", "aten::alias",
                          "aten::detach"},
                         CallKind::Reshape)
                  .Cases({"aten::slice.Tensor"}, CallKind::Slice)
                  .Cases({"aten::expand"}, CallKind::Expand)
                  .Cases({"aten::clone", "aten::_to_copy"}, CallKind::Copy)
                  .Default(CallKind::Other);
  bool views = kind != CallKind::Copy;
  return views == bool(call.getViewedOperand(0)) ? kind : CallKind::Other;
}

/// An argument of a call; null if there are fewer.
Attribute getArg(CallOp call, size_t index) {
  ArrayAttr args = call.getArgs();
  return index < args.size() ? args[index] : Attribute();
}

/// For each dimension of a permutation's result, that of its operand; empty if
/// the call does not say it.
SmallVector<int64_t> getPermutation(CallOp call) {
  int64_t rank = cast<RankedTensorType>(call.getOperand(0).getType()).getRank();
  bool isValid = true;
  auto getDimension = [&](Attribute attr) -> int64_t {
    auto integer = dyn_cast_or_null<IntegerAttr>(attr);
    int64_t dimension = integer ? integer.getInt() : rank;
    dimension += dimension < 0 ? rank : 0;
    isValid &= dimension >= 0 && dimension < rank;
    return isValid ? dimension : 0;
  };
  auto order = llvm::to_vector(llvm::seq<int64_t>(rank));
  if (call.getCallee() == "aten::permute") {
    auto list = dyn_cast_or_null<ArrayAttr>(getArg(call, 1));
    if (!list || int64_t(list.size()) != rank)
      return {};
    llvm::transform(list, order.begin(), getDimension);
  } else if (call.getCallee() == "aten::transpose.int" && rank > 0) {
    std::swap(order[getDimension(getArg(call, 1))],
              order[getDimension(getArg(call, 2))]);
  } else if (call.getCallee() == "aten::t" && rank == 2) {
    std::swap(order[0], order[1]);
  }
  return isValid ? order : SmallVector<int64_t>();
}

/// Whether `call` is a power of 1, which ATen copies on every device.
bool isFirstPower(CallOp call) {
  if (call.getCallee() != "aten::pow.Tensor_Scalar")
    return false;
  Attribute exponent = getArg(call, 1);
  if (auto real = dyn_cast_or_null<FloatAttr>(exponent))
    return real.getValue().isExactlyValue(1.0);
  auto integer = dyn_cast_or_null<IntegerAttr>(exponent);
  return integer && integer.getValue().isOne();
}

/// An operator that computes each element from one tensor's element and
/// numbers.
bool isScaling(CallOp call) {
  return call.getNumOperands() == 1 && call.getNumResults() == 1 &&
         llvm::is_contained({"aten::mul.Tensor", "aten::mul.Scalar",
                             "aten::div.Tensor", "aten::div.Scalar",
                             "aten::neg"},
                            call.getCallee());
}

/// An operator that computes each element from those of two tensors in its
/// place, rounding once: sums have the factor 1.
bool isElementwise(CallOp call) {
  if (call.getNumOperands() != 2 || call.getNumResults() != 1)
    return false;
  if (llvm::is_contained({"aten::add.Tensor", "aten::sub.Tensor"},
                         call.getCallee())) {
    auto alpha = dyn_cast_or_null<IntegerAttr>(getArg(call, 2));
    return alpha && alpha.getValue().isOne();
  }
  return llvm::is_contained({"aten::mul.Tensor", "aten::div.Tensor"},
                            call.getCallee());
}

bool haveSameLayout(Value a, Value b) {
  if (a.getType() != b.getType())
    return false;
  std::optional<SmallVector<int64_t>> strides = getStrides(a);
  return strides && strides == getStrides(b);
}

bool isStatic(Type type) {
  return cast<RankedTensorType>(type).hasStaticShape();
}

int64_t getNumElements(Value value) {
  return cast<RankedTensorType>(value.getType()).getNumElements();
}

/// Simplifies the calls of one program.
class CallSimplifier {
public:
  explicit CallSimplifier(Block &body) : body(body), storages(body) {
    for (Operation &op : body)
      for (Value operand : op.getOperands())
        lastUses[storages.getOwner(operand)] = &op;
  }

  void simplify() {
    for (CallOp call : llvm::make_early_inc_range(body.getOps<CallOp>())) {
      if (call.getMutates() || call.getRandom() || call.getNumResults() != 1 ||
          !llvm::all_of(call->getOperandTypes(), isStatic) ||
          !isStatic(call.getResult(0).getType()))
        continue;
      if (Value same = findSame(call))
        replace(call, same);
      else if (isScaling(call))
        scaleBeforeExpanding(call);
    }
    eraseUnused();
  }

private:
  bool isWritten(Value value) const {
    return !storages.get(storages.getOwner(value)).writers.empty();
  }

  /// Whether calls alone use the storage and none writes it, so that nothing
  /// depends on which memory it is.
  bool isPlain(Value value) const {
    Value owner = storages.getOwner(value);
    return owner.getDefiningOp<CallOp>() && !isWritten(owner) &&
           llvm::all_of(storages.get(owner).values, [](Value value) {
             return llvm::all_of(value.getUsers(), llvm::IsaPred<CallOp>);
           });
  }

  /// Whether the memory has the elements themselves, and not those of which a
  /// view has only been marked as conjugated or negative: not every call takes
  /// such a view.
  static bool isResolved(Value value) {
    while (auto call = value.getDefiningOp<CallOp>()) {
      if (call.getCallee() == "aten::_conj" ||
          call.getCallee() == "aten::_neg_view")
        return false;
      value = call.getViewedOperand(cast<OpResult>(value).getResultNumber());
      if (!value)
        break;
    }
    return true;
  }

  /// Whether `operand` can stand for `result`, which has its elements in memory
  /// of its own. It is held longer then, for what the result would have taken.
  bool isNeedlessCopy(Value result, Value operand) const {
    return haveSameLayout(result, operand) && isPlain(result) &&
           isPlain(operand) && isResolved(operand) &&
           getNumElements(storages.getOwner(operand)) == getNumElements(result);
  }

  /// What the result of a view, directly or through a few views of its kind, is
  /// all of, in the same order; null if there is no such value.
  static Value findViewed(CallOp call, CallKind kind) {
    constexpr int longest = 4; // autograd's chains have two or three
    Value result = call.getResult(0), same;
    SmallVector<int64_t> order;
    for (int length = 0; length < longest; ++length) {
      if (kind == CallKind::Permutation) {
        SmallVector<int64_t> next = getPermutation(call);
        if (next.empty())
          break;
        if (length == 0)
          order = next;
        else
          for (int64_t &dimension : order)
            dimension = next[dimension];
      }
      Value viewed = call.getOperand(0);
      if (llvm::equal(order, llvm::seq<int64_t>(order.size())) &&
          haveSameLayout(result, viewed))
        same = viewed;
      call = viewed.getDefiningOp<CallOp>();
      bool chains = kind == CallKind::Permutation || kind == CallKind::Reshape;
      if (!chains || !call || getKind(call) != kind)
        break;
    }
    return same;
  }

  /// An earlier value that can stand for the result of `call`, or null.
  Value findSame(CallOp call) {
    if (call.getNumOperands() != 1)
      return {};
    Value result = call.getResult(0), operand = call.getOperand(0);
    CallKind kind = getKind(call);
    if (kind == CallKind::Other)
      return isFirstPower(call) && isNeedlessCopy(result, operand) ? operand
                                                                   : Value();
    if (kind == CallKind::Copy) {
      if (isNeedlessCopy(result, operand))
        return operand;
    } else if (Value same = findViewed(call, kind)) {
      return same;
    }
    CallOp &earlier = made[{call.getCalleeAttr(), call.getArgs(), operand}];
    if (earlier && earlier.getResult(0).getType() == result.getType() &&
        (kind != CallKind::Copy || isSameCopy(earlier, call)))
      return earlier.getResult(0);
    earlier = call;
    return {};
  }

  /// Whether `later` copies again what `earlier` copied, while the first copy
  /// is still needed.
  bool isSameCopy(CallOp earlier, CallOp later) const {
    Value first = earlier.getResult(0);
    for (CallOp writer :
         storages.get(storages.getOwner(later.getOperand(0))).writers)
      if (earlier->isBeforeInBlock(writer) && writer->isBeforeInBlock(later))
        return false;
    Operation *lastUse = lastUses.lookup(first);
    return lastUse && later->isBeforeInBlock(lastUse) && isPlain(first) &&
           isPlain(later.getResult(0));
  }

  void replace(CallOp call, Value same) {
    Value result = call.getResult(0);
    Operation *&lastUse = lastUses[storages.getOwner(same)];
    Operation *other = lastUses.lookup(storages.getOwner(result));
    if (other && (!lastUse || lastUse->isBeforeInBlock(other)))
      lastUse = other;
    result.replaceAllUsesWith(same);
    needless.insert(call);
    if (!call.getViewedOperand(0))
      bytes += getNumBytes(cast<RankedTensorType>(result.getType()));
  }

  /// A scaling of what was expanded becomes an expansion of what was scaled,
  /// where all users read it element by element beside a whole tensor: their
  /// results and the layouts of these stay the same.
  void scaleBeforeExpanding(CallOp call) {
    Value result = call.getResult(0);
    auto expand = call.getOperand(0).getDefiningOp<CallOp>();
    if (!expand || getKind(expand) != CallKind::Expand)
      return;
    Value narrow = expand.getOperand(0);
    auto narrowType = cast<RankedTensorType>(narrow.getType());
    auto type = cast<RankedTensorType>(result.getType());
    if (getNumElements(narrow) >= getNumElements(result) ||
        !isa<FloatType>(type.getElementType()) ||
        narrowType.getElementType() != type.getElementType() ||
        !isRowMajor(narrow) || !isRowMajor(result) ||
        !llvm::all_of(result.getUsers(), [&](Operation *user) {
          return readsByElement(user, result);
        }))
      return;

    OpBuilder builder(call);
    auto scaled = cast<CallOp>(builder.clone(*call));
    scaled.setOperand(0, narrow);
    scaled.getResult(0).setType(narrowType);
    scaled.removeStridesAttr();
    auto expanded = cast<CallOp>(builder.clone(*expand));
    expanded.setOperand(0, scaled.getResult(0));
    result.replaceAllUsesWith(expanded.getResult(0));
    needless.insert(call);
    numFewer -= 2;
    bytes += getNumBytes(type) - getNumBytes(narrowType);
  }

  /// Whether `user` computes a whole tensor, element by element, from `operand`
  /// and another whole tensor.
  static bool readsByElement(Operation *user, Value operand) {
    auto call = dyn_cast<CallOp>(user);
    if (!call || !isElementwise(call))
      return false;
    Value other = call.getOperand(call.getOperand(0) == operand ? 1 : 0);
    return other != operand && other.getType() == operand.getType() &&
           call.getResult(0).getType() == operand.getType() &&
           isRowMajor(other) && isRowMajor(call.getResult(0));
  }

  void eraseUnused() {
    SmallVector<CallOp> calls = llvm::to_vector(body.getOps<CallOp>());
    for (CallOp call : llvm::reverse(calls))
      if (call.use_empty() &&
          (needless.contains(call) || getKind(call) == CallKind::Permutation ||
           getKind(call) == CallKind::Reshape ||
           getKind(call) == CallKind::Slice ||
           getKind(call) == CallKind::Expand)) {
        ++numFewer;
        call.erase();
      }
  }

  Block &body;
  Storages storages;
  llvm::DenseMap<Value, Operation *> lastUses; ///< by owner of the storage
  llvm::DenseMap<std::tuple<Attribute, Attribute, Value>, CallOp> made;
  llvm::DenseSet<Operation *> needless;

public:
  int64_t numFewer = 0; ///< calls than before
  int64_t bytes = 0;    ///< that needless calls would have written
};

struct SimplifyCalls : mlir::fsdp::impl::SimplifyCallsBase<SimplifyCalls> {
  void runOnModule() override {
    ModuleOp module = getOperation();
    ProgramOp step = getProgram(module);
    if (!step)
      return signalPassFailure();
    for (ProgramOp program : {step, getEvaluationProgram(module)}) {
      if (!program)
        continue;
      CallSimplifier simplifier(program.getBody().front());
      simplifier.simplify();
      if (simplifier.bytes > 0 || simplifier.numFewer > 0)
        remark::passed(
            program.getLoc(),
            remark::RemarkOpts::name("SimplifyCalls").category("fsdp-simplify"))
            << std::to_string(simplifier.numFewer) +
                   (simplifier.numFewer == 1 ? " call" : " calls") +
                   " and writes of " + formatBytes(simplifier.bytes) +
                   " are not needed";
    }
  }
};
} // namespace
