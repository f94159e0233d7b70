//===- ChunkLoss.cpp - logits and loss of a part of the rows at a time ----===//
//
// The logits are a matrix of as many rows as there are targets. All that is
// computed from them row by row, up to the loss in forward and down to the last
// product in backward, is a section that can be made for some of the rows, and
// then for the next: its tensors of this size never exist whole.
//
//===----------------------------------------------------------------------===//
#include "LossSection.h"

#include "fsdp/Simulate/Format.h"
#include "fsdp/Transforms/Passes.h"

#include "mlir/Dialect/Utils/IndexingUtils.h"
#include "mlir/IR/Remarks.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_CHUNKLOSS
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;
using aten::CallOp;
using ::fsdp::simulate::formatBytes;

namespace {
using Role = LossSection::Role;

/// The reductions of ATen's losses.
enum Reduction : int64_t { None = 0, Mean = 1, Sum = 2 };

RankedTensorType getType(Value value) {
  return cast<RankedTensorType>(value.getType());
}

/// The number that ATen has for a dtype.
int64_t getScalarType(Type type) {
  return type.isF64() ? 7 : type.isF32() ? 6 : type.isF16() ? 5 : 15;
}

/// Computes a section a part of its rows at a time.
class Chunks {
public:
  explicit Chunks(const LossSection &section)
      : section(section), loss(section.getLoss()), seed(section.getSeed()),
        width(section.getWidth()), builder(loss.getContext()) {
    auto given = dyn_cast<IntegerAttr>(loss.getArgs()[3]);
    reduction = given ? Reduction(given.getInt()) : Mean;
  }

  void rewrite(ProgramOp program, int64_t numChunks) {
    prepare(getBackward(program));
    int64_t rows = section.getNumRows();
    int64_t size = llvm::divideCeil(rows, numChunks);
    for (int64_t begin = 0; begin < rows; begin += size) {
      copies.clear();
      slices.clear();
      first = begin;
      last = std::min(begin + size, rows);
      for (CallOp call : section.getCalls())
        emit(call);
    }
    for (CallOp call : section.getCalls())
      replaceResults(call);
    for (CallOp call : llvm::reverse(section.getCalls()))
      call.erase();
    seed.erase();
  }

private:
  /// Begins backward before the section, with the loss's gradient, which the
  /// loss itself is not needed for, and what else the section reads.
  void prepare(PhaseOp backward) {
    if (backward != section.getAnchor())
      backward->moveBefore(section.getAnchor());
    builder.setInsertionPointAfter(backward);
    RankedTensorType type = getType(seed.getResult(0));
    Value one = call(seed, type, "aten::full",
                     {builder.getArrayAttr({}), number(1),
                      number(getScalarType(type.getElementType())), number(0),
                      aten::DeviceAttr::get(type.getContext()),
                      builder.getBoolAttr(false)});
    seed.getResult(0).replaceAllUsesWith(one);
    for (Operation *op : section.getHoisted())
      op->moveBefore(&*builder.getInsertionPoint());
    if (reduction == Mean)
      countTargets();
  }

  /// The targets that are not ignored, as ATen counts them: in the loss's
  /// dtype for backward. The mean is made in float32 at least.
  void countTargets() {
    Value targets = loss.getOperand(1);
    auto flags =
        RankedTensorType::get(getType(targets).getShape(), builder.getI1Type());
    Value used =
        call(loss, flags, "aten::ne.Scalar", {targets, loss.getArgs()[4]});
    auto integer = RankedTensorType::get({}, builder.getIntegerType(64));
    Value sum = call(loss, integer, "aten::sum",
                     {used, aten::NoneAttr::get(loss.getContext())});
    count = convert(sum, getType(loss.getResult(0)).getElementType());
    wideCount = getType(count).getElementType() == getWideType()
                    ? count
                    : convert(sum, getWideType());
  }

  /// The dtype in which the chunks' losses are summed.
  Type getWideType() {
    Type type = getType(loss.getResult(0)).getElementType();
    return type.isF64() ? type : builder.getF32Type();
  }

  Value convert(Value value, Type type) {
    if (getType(value).getElementType() == type)
      return value;
    auto none = aten::NoneAttr::get(loss.getContext());
    return call(loss, getType(value).clone(type), "aten::_to_copy",
                {value, number(getScalarType(type)), number(0),
                 aten::DeviceAttr::get(loss.getContext()), none,
                 builder.getBoolAttr(false), none});
  }

  Attribute number(int64_t value) { return builder.getI64IntegerAttr(value); }

  CallOp create(CallOp origin, TypeRange types, StringRef callee,
                ArrayRef<OpFoldResult> arguments) {
    return createFor<CallOp>(origin, builder, types, callee, arguments);
  }
  Value call(CallOp origin, RankedTensorType type, StringRef callee,
             ArrayRef<OpFoldResult> arguments) {
    return create(origin, type, callee, arguments).getResult(0);
  }
  Value view(CallOp origin, RankedTensorType type, StringRef callee,
             ArrayRef<OpFoldResult> arguments, ArrayRef<int64_t> strides = {}) {
    CallOp made = create(origin, type, callee, arguments);
    made.setViews(ArrayRef<int64_t>{0});
    if (!strides.empty())
      made.setStridesAttr(
          builder.getArrayAttr(builder.getDenseI64ArrayAttr(strides)));
    return made.getResult(0);
  }
  Value viewAs(CallOp origin, Value value, ArrayRef<int64_t> shape) {
    if (getType(value).getShape() == shape)
      return value;
    return view(origin, getType(value).clone(shape), "aten::view",
                {value, builder.getI64ArrayAttr(shape)});
  }

  /// The chunk's part of a tensor from outside: its rows, or its columns.
  Value slice(CallOp user, Value value, int64_t dim) {
    Value &part = slices[{value, dim}];
    if (part)
      return part;
    Value &whole = flat[value];
    if (dim == 0 && !section.isFlat(value) && !whole)
      whole = viewAs(user, value,
                     {section.getNumRows(), getType(value).getShape().back()});
    Value from = whole ? whole : value;
    SmallVector<int64_t> shape(getType(from).getShape());
    shape[dim] = last - first;
    std::optional<SmallVector<int64_t>> strides = getStrides(from);
    if (strides && *strides == computeStrides(shape))
      strides.reset();
    return part =
               view(user, getType(from).clone(shape), "aten::slice.Tensor",
                    {from, number(dim), number(first), number(last), number(1)},
                    strides.value_or(SmallVector<int64_t>()));
  }

  Value getCopy(CallOp user, Value value) {
    if (reduction == Mean && value == loss.getResult(1))
      return count;
    if (section.isMade(value))
      return copies.lookup(value);
    if (section.isSliced(user, value))
      return slice(user, value, 0);
    // Of the left factor of a sum over rows, these are the columns.
    if (section.getRole(user) == Role::ColumnProduct)
      return slice(user, value, 1);
    return value;
  }

  /// The arguments of a call for the chunk.
  SmallVector<OpFoldResult> getArguments(CallOp call) {
    SmallVector<OpFoldResult> arguments;
    auto operand = call.getOperands().begin();
    for (Attribute arg : call.getArgs())
      arguments.push_back(isa<UnitAttr>(arg)
                              ? OpFoldResult(getCopy(call, *operand++))
                              : OpFoldResult(arg));
    return arguments;
  }

  void emit(CallOp original) {
    StringRef callee = original.getCallee();
    Value result = original.getResult(0);
    RankedTensorType type = getType(result);
    int64_t size = last - first;
    Role role = section.getRole(original);
    SmallVector<OpFoldResult> arguments;
    if (role != Role::View)
      arguments = getArguments(original);
    switch (role) {
    case Role::View:
      copies[result] = copies.lookup(original.getOperand(0));
      return;
    case Role::Transpose: {
      bool flips = section.isTransposed(result);
      copies[result] =
          view(original,
               type.clone(flips ? ArrayRef<int64_t>{width, size}
                                : ArrayRef<int64_t>{size, width}),
               callee, arguments,
               flips ? ArrayRef<int64_t>{1, width} : ArrayRef<int64_t>{});
      return;
    }
    case Role::RowByRow:
      if (callee == "aten::_log_softmax")
        arguments[1] = number(1);
      if (callee == "aten::_log_softmax_backward_data")
        arguments[2] = number(1);
      [[fallthrough]];
    case Role::LossBackward:
      copies[result] =
          call(original, type.clone({size, width}), callee, arguments);
      return;
    case Role::RowProduct: {
      Value part = call(original, type.clone({size, type.getShape().back()}),
                        callee, arguments);
      copies[result] = part;
      if (!section.isWide(result))
        parts[result].push_back(part);
      return;
    }
    case Role::ColumnProduct:
      accumulate(original, arguments);
      return;
    case Role::ColumnSum:
      emitColumnSum(original, arguments);
      return;
    case Role::Loss:
      emitLoss(arguments);
      return;
    }
  }

  /// The products of the chunks are added as the products are made.
  void accumulate(CallOp original, ArrayRef<OpFoldResult> arguments) {
    RankedTensorType type = getType(original.getResult(0));
    Value &sum = sums[original.getResult(0)];
    if (!sum) {
      sum = call(original, type, original.getCallee(), arguments);
      return;
    }
    CallOp added =
        create(original, type, "aten::addmm_",
               {sum, arguments[0], arguments[1], number(1), number(1)});
    added.setViews(ArrayRef<int64_t>{0});
    added.setMutates(ArrayRef<int64_t>{0});
    sum = added.getResult(0);
  }

  void emitColumnSum(CallOp original, MutableArrayRef<OpFoldResult> arguments) {
    RankedTensorType type = getType(original.getResult(0));
    arguments[1] = builder.getI64ArrayAttr(0);
    arguments[2] = builder.getBoolAttr(false);
    Value part =
        call(original, type.clone({width}), original.getCallee(), arguments);
    addTo(original, sums[original.getResult(0)], part);
  }

  void addTo(CallOp original, Value &sum, Value part) {
    sum = sum ? call(original, getType(sum), "aten::add.Tensor",
                     {sum, part, number(1)})
              : part;
  }

  void emitLoss(SmallVector<OpFoldResult> arguments) {
    SmallVector<Type> types(loss.getResultTypes());
    if (reduction == Mean)
      arguments[3] = number(Sum);
    if (reduction == None)
      types[0] = getType(loss.getResult(0)).clone({last - first});
    CallOp part = create(loss, types, loss.getCallee(), arguments);
    copies[loss.getResult(1)] = part.getResult(1);
    Value result = loss.getResult(0);
    if (reduction == None)
      parts[result].push_back(part.getResult(0));
    else
      addTo(loss, sums[result], convert(part.getResult(0), getWideType()));
  }

  //===--------------------------------------------------------------------===//
  // What the section gives
  //===--------------------------------------------------------------------===//

  void replaceResults(CallOp original) {
    Value result = original.getResult(0);
    Value whole;
    if (ArrayRef<Value> list = parts[result]; !list.empty()) {
      Attribute placeholders = builder.getArrayAttr(
          SmallVector<Attribute>(list.size(), builder.getUnitAttr()));
      whole =
          createFor<CallOp>(
              original, builder, TypeRange{result.getType()},
              builder.getStringAttr("aten::cat"), ValueRange(list),
              builder.getArrayAttr({placeholders, number(0)}),
              /*views=*/DenseI64ArrayAttr(), /*mutates=*/DenseI64ArrayAttr(),
              /*random=*/UnitAttr(), /*reduce_input_of=*/FlatSymbolRefAttr(),
              /*recompute=*/UnitAttr(), /*strides=*/ArrayAttr(),
              /*schema=*/StringAttr())
              .getResult(0);
    } else if (Value sum = sums.lookup(result)) {
      if (original == loss && reduction == Mean)
        sum = call(loss, getType(sum), "aten::div.Tensor", {sum, wideCount});
      whole = convert(sum, getType(result).getElementType());
      whole = viewAs(original, whole, getType(result).getShape());
    }
    if (whole)
      result.replaceAllUsesWith(whole);
    if (original == loss && reduction == Mean)
      loss.getResult(1).replaceAllUsesWith(count);
  }

  const LossSection &section;
  CallOp loss, seed;
  int64_t width;
  Reduction reduction = Mean;
  OpBuilder builder;

  int64_t first = 0, last = 0;         ///< rows of the chunk
  llvm::DenseMap<Value, Value> copies; ///< the chunk's
  llvm::DenseMap<std::pair<Value, int64_t>, Value> slices; ///< the chunk's
  llvm::DenseMap<Value, Value> flat;               ///< outside, all rows in one
  llvm::DenseMap<Value, Value> sums;               ///< of the chunks so far
  llvm::DenseMap<Value, SmallVector<Value>> parts; ///< of the chunks so far
  Value count, wideCount; ///< targets that are not ignored, in two dtypes
};

struct ChunkLoss : mlir::fsdp::impl::ChunkLossBase<ChunkLoss> {
  void runOnModule() override {
    ModuleOp module = getOperation();
    ProgramOp program = getProgram(module);
    if (!program)
      return signalPassFailure();
    for (auto policy :
         llvm::make_early_inc_range(module.getOps<ChunkedLossOp>())) {
      chunk(program, policy);
      policy.erase();
    }
  }

private:
  /// The loss with the largest logits.
  static CallOp findLoss(ProgramOp program) {
    CallOp found;
    for (auto call : getMicrobatchOps<CallOp>(program)) {
      if (call.getCallee() != "aten::nll_loss_forward" ||
          getType(call.getOperand(0)).getRank() != 2 ||
          !getType(call.getOperand(0)).hasStaticShape())
        continue;
      if (!found || getNumBytes(getType(found.getOperand(0))) <
                        getNumBytes(getType(call.getOperand(0))))
        found = call;
    }
    return found;
  }

  static void chunk(ProgramOp program, ChunkedLossOp policy) {
    CallOp loss = findLoss(program);
    if (!loss || !getBackward(program)) {
      policy.emitWarning("the loss stays whole: expected a cross-entropy of "
                         "logits, found none");
      return;
    }
    LossSection section(program, loss);
    if (LossSection::Checked obstacle = section.analyze()) {
      InFlightDiagnostic warning = policy.emitWarning("the loss stays whole: ");
      if (auto call = dyn_cast<CallOp>(obstacle->op))
        warning << call.getCallee() << " " << obstacle->reason;
      else
        warning << obstacle->op->getName() << " " << obstacle->reason;
      warning.attachNote(obstacle->op->getLoc()) << "here";
      return;
    }
    int64_t chunks =
        std::min<int64_t>(policy.getChunks(), section.getNumRows());
    remark::passed(loss.getLoc(),
                   remark::RemarkOpts::name("Chunked").category("fsdp-chunk"))
        << std::to_string(chunks) + " chunks of " +
               std::to_string(section.getNumRows()) + " rows of " +
               std::to_string(section.getWidth()) + ", of " +
               formatBytes(double(section.getNumBytes())) + " in all";
    Chunks(section).rewrite(program, chunks);
  }
};
} // namespace
