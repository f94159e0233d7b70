//===- Reduction.cpp - what a program can do without ----------------------===//
//
// Delta debugging (Zeller and Hildebrandt, 2002): a change is tried at all of
// its sites, then at half of them, and so on, down to single ones. From the
// last to the first, so that users go before what they use.
//
//===----------------------------------------------------------------------===//
#include "Reduction.h"

#include "fsdp/Transforms/StepProgram.h"
#include "mlir/IR/Diagnostics.h"
#include "mlir/IR/TypeUtilities.h"
#include "mlir/IR/Verifier.h"

using namespace mlir;
using namespace mlir::fsdp;

namespace {
/// One way to make programs smaller. Every op has so many sites for it; to
/// apply it at one of them leaves what is before, and the sites of the same op
/// with lower numbers, where they are.
struct Change {
  size_t (*countSites)(Operation *op);
  /// Whether there was something to change.
  bool (*apply)(Operation *op, size_t site);
};

using Site = std::pair<Operation *, size_t>;

SmallVector<Site> collectSites(ModuleOp program, const Change &change) {
  SmallVector<Site> sites;
  program->walk<WalkOrder::PreOrder>([&](Operation *op) {
    for (size_t site = 0, count = change.countSites(op); site < count; ++site)
      sites.emplace_back(op, site);
  });
  return sites;
}

/// PyTorch's number of an element type.
std::optional<int64_t> getScalarType(Type type) {
  auto integer = dyn_cast<IntegerType>(type);
  if (type.isF16())
    return 5;
  if (type.isF32())
    return 6;
  if (type.isF64())
    return 7;
  if (type.isBF16())
    return 15;
  if (!integer || !integer.isSignless())
    return std::nullopt;
  switch (integer.getWidth()) {
  case 1:
    return 11;
  case 32:
    return 3;
  case 64:
    return 4;
  default:
    return std::nullopt;
  }
}

/// What makes tensors becomes calls of aten::zeros, which need nothing of what
/// was before them.
bool replaceByZeros(Operation *op) {
  auto call = dyn_cast<aten::CallOp>(op);
  if ((call && call.getOperands().empty()) ||
      !llvm::all_of(op->getResults(), [](Value result) {
        return result.use_empty() ||
               (isa<RankedTensorType>(result.getType()) &&
                getScalarType(getElementTypeOrSelf(result)).has_value());
      }))
    return false;
  OpBuilder builder(op);
  for (Value result : op->getResults()) {
    if (result.use_empty())
      continue;
    auto type = cast<RankedTensorType>(result.getType());
    Attribute none = aten::NoneAttr::get(op->getContext());
    Attribute dtype =
        builder.getI64IntegerAttr(*getScalarType(type.getElementType()));
    Attribute shape = builder.getI64ArrayAttr(type.getShape());
    auto made = createFor<aten::CallOp>(
        op, builder, type, "aten::zeros", ValueRange(),
        builder.getArrayAttr({shape, dtype, none, none, none}),
        /*views=*/nullptr, /*mutates=*/nullptr, /*random=*/false,
        /*reduce_input_of=*/nullptr, /*recompute=*/false,
        /*strides=*/nullptr, /*schema=*/nullptr);
    result.replaceAllUsesWith(made.getResult(0));
  }
  op->erase();
  return true;
}

bool canGo(Operation *op) {
  return op->getBlock() && !op->hasTrait<OpTrait::IsTerminator>();
}

bool leaveOut(Operation *op, size_t) {
  if (!canGo(op))
    return false;
  if (op->use_empty()) {
    op->erase();
    return true;
  }
  return replaceByZeros(op);
}

/// The results of an op become operands of the same types.
bool passBy(Operation *op, size_t) {
  if (!canGo(op) || op->use_empty())
    return false;
  SmallVector<Value> operands;
  for (Value result : op->getResults()) {
    auto same = llvm::find_if(op->getOperands(), [&](Value operand) {
      return operand.getType() == result.getType();
    });
    if (same == op->operand_end())
      return false;
    operands.push_back(*same);
  }
  op->replaceAllUsesWith(operands);
  op->erase();
  return true;
}

size_t countAttributes(Operation *op) {
  return op->getDiscardableAttrDictionary().size();
}

bool dropAttribute(Operation *op, size_t site) {
  op->removeDiscardableAttr(
      op->getDiscardableAttrDictionary().getValue()[site].getName());
  return true;
}

constexpr Change kChanges[] = {
    {[](Operation *) -> size_t { return 1; }, leaveOut},
    {[](Operation *) -> size_t { return 1; }, passBy},
    {countAttributes, dropAttribute},
};

bool isValid(ModuleOp program) {
  ScopedDiagnosticHandler silence(program.getContext(),
                                  [](Diagnostic &) { return success(); });
  return succeeded(verify(program));
}

/// Whether a change has made the program smaller.
FailureOr<bool> tryEverywhere(OwningOpRef<ModuleOp> &program,
                              const Change &change, ShowsFault showsFault) {
  bool isSmaller = false;
  size_t size = collectSites(*program, change).size();
  for (; size > 0; size /= 2) {
    size_t begin = collectSites(*program, change).size();
    while (begin > 0) {
      size_t end = begin;
      begin = end > size ? end - size : 0;
      OwningOpRef<ModuleOp> variant = program->clone();
      SmallVector<Site> sites = collectSites(*variant, change);
      bool isChanged = false;
      for (auto [op, site] :
           llvm::reverse(ArrayRef(sites).slice(begin, end - begin)))
        isChanged |= change.apply(op, site);
      if (!isChanged || !isValid(*variant))
        continue;
      FailureOr<bool> shown = showsFault(*variant);
      if (failed(shown))
        return failure();
      if (!*shown)
        continue;
      program = std::move(variant);
      isSmaller = true;
    }
  }
  return isSmaller;
}
} // namespace

FailureOr<OwningOpRef<ModuleOp>>
mlir::fsdp::reduceProgram(ModuleOp program, ShowsFault showsFault) {
  OwningOpRef<ModuleOp> smallest = program.clone();
  for (bool isSmaller = true; isSmaller;) {
    isSmaller = false;
    for (const Change &change : kChanges) {
      FailureOr<bool> found = tryEverywhere(smallest, change, showsFault);
      if (failed(found))
        return failure();
      isSmaller |= *found;
    }
  }
  return smallest;
}
