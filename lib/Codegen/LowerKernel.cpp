//===- LowerKernel.cpp - a kernel as a loop over vectors ------------------===//
//
// Dimensions along which all tensors go on in one stride are one. What remains
// is a loop over rows, and in each row a loop over vectors and one over what is
// left; a kernel of a single row is cut within it.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Codegen/Elements.h"
#include "fsdp/Codegen/Kernels.h"
#include "fsdp/Plan/Tensors.h"

#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/Vector/IR/VectorOps.h"
#include "mlir/IR/IRMapping.h"

using namespace mlir;
using namespace mlir::fsdp;
using aten::CallOp;
namespace plan = ::fsdp::plan;

ArrayRef<KernelTarget> mlir::fsdp::getKernelTargets() {
  static const KernelTarget targets[] = {{"x86-64-v3", 8}, {"x86-64-v4", 16}};
  return targets;
}

SmallVector<int64_t> mlir::fsdp::getStridesOver(ArrayRef<int64_t> shape,
                                                RankedTensorType operand,
                                                ArrayRef<int64_t> strides) {
  ArrayRef<int64_t> own = operand.getShape();
  if (own.size() > shape.size())
    return {};
  plan::Strides full = plan::fullStrides({own.begin(), own.end()},
                                         {strides.begin(), strides.end()});
  SmallVector<int64_t> over(shape.size(), 0);
  size_t offset = shape.size() - own.size();
  for (size_t i = 0; i < own.size(); ++i)
    if (own[i] == shape[offset + i])
      over[offset + i] = own[i] == 1 ? 0 : full[i];
    else if (own[i] != 1)
      return {};
  return over;
}

SmallVector<size_t> mlir::fsdp::getWalk(ArrayRef<int64_t> shape,
                                        ArrayRef<int64_t> strides) {
  SmallVector<size_t> walk;
  for (size_t i = 0; i < shape.size(); ++i)
    if (shape[i] > 1)
      walk.push_back(i);
  llvm::sort(walk, [&](size_t a, size_t b) {
    return std::pair(-strides[a], a) < std::pair(-strides[b], b);
  });
  return walk;
}

bool mlir::fsdp::areReadable(ArrayRef<size_t> walk, ArrayRef<int64_t> strides) {
  return walk.empty() || strides[walk.back()] <= 1;
}

namespace {

/// The kernel's loop: dimensions, and for each operand and then each result its
/// strides over them.
struct LoopNest {
  SmallVector<int64_t> shape;
  SmallVector<SmallVector<int64_t>> strides;

  explicit LoopNest(KernelOp kernel) {
    auto results = kernel.getReturn().getResults();
    ArrayRef<int64_t> domain =
        cast<RankedTensorType>(results.front().getType()).getShape();
    SmallVector<SmallVector<int64_t>> all;
    ArrayAttr given = kernel.getOperandStridesAttr();
    for (BlockArgument operand : kernel.getBody().getArguments()) {
      ArrayRef<int64_t> own;
      if (given)
        own = cast<DenseI64ArrayAttr>(given[operand.getArgNumber()]);
      all.push_back(getStridesOver(
          domain, cast<RankedTensorType>(operand.getType()), own));
    }
    SmallVector<int64_t> layout =
        getStridesOver(domain, cast<RankedTensorType>(results[0].getType()),
                       kernel.getStrides().value_or(ArrayRef<int64_t>()));
    all.append(results.size(), layout);
    collapse(domain, getWalk(domain, layout), all);
  }

  int64_t getRowLength() const { return shape.back(); }
  bool isOneRow() const { return shape.size() == 1; }
  int64_t getTrips() const {
    int64_t rows = 1;
    for (int64_t extent : ArrayRef(shape).drop_back())
      rows *= extent;
    return isOneRow() ? shape.back() : rows;
  }

private:
  void collapse(ArrayRef<int64_t> domain, ArrayRef<size_t> walk,
                ArrayRef<SmallVector<int64_t>> all) {
    strides.resize(all.size());
    for (size_t i : walk) {
      bool joins = !shape.empty();
      for (size_t t = 0; joins && t < all.size(); ++t)
        joins = strides[t].back() == all[t][i] * domain[i];
      if (joins)
        shape.back() *= domain[i];
      else
        shape.push_back(domain[i]);
      for (size_t t = 0; t < all.size(); ++t)
        if (joins)
          strides[t].back() = all[t][i];
        else
          strides[t].push_back(all[t][i]);
    }
    if (!shape.empty())
      return;
    shape.push_back(1);
    for (SmallVector<int64_t> &tensor : strides)
      tensor.push_back(0);
  }
};

class KernelBuilder {
public:
  KernelBuilder(KernelOp kernel, int64_t width)
      : kernel(kernel), width(width), nest(kernel),
        b(kernel.getLoc(), kernel.getContext()),
        ptr(LLVM::LLVMPointerType::get(kernel.getContext())) {}

  LoweredKernel run() {
    OwningOpRef<ModuleOp> module = ModuleOp::create(kernel.getLoc());
    b.setInsertionPointToStart(module->getBody());
    Type i64 = b.getI64Type();
    auto function = func::FuncOp::create(
        b, kernel.getSymName(), b.getFunctionType({ptr, ptr, i64, i64}, {}));
    Block *entry = function.addEntryBlock();
    b.setInsertionPointToStart(entry);
    loadPointers(entry->getArgument(0));
    imports = entry->getArgument(1);
    Value begin = entry->getArgument(2), end = entry->getArgument(3);
    if (nest.isOneRow())
      buildRow(bases, begin, end);
    else
      buildLoop(begin, end, 1, [&](Value row) {
        buildRow(offsetBases(row), index(0), index(nest.getRowLength()));
      });
    func::ReturnOp::create(b);
    return {std::move(module), nest.getTrips(), std::move(names)};
  }

private:
  Value index(int64_t value) {
    return arith::ConstantOp::create(b, b.getI64IntegerAttr(value));
  }

  template <typename BodyT>
  void buildLoop(Value begin, Value end, int64_t step, BodyT body) {
    auto loop = scf::ForOp::create(b, begin, end, index(step));
    OpBuilder::InsertionGuard guard(b);
    b.setInsertionPointToStart(loop.getBody());
    body(loop.getInductionVar());
  }

  void loadPointers(Value tensors) {
    for (size_t i = 0; i < nest.strides.size(); ++i) {
      Value slot = LLVM::GEPOp::create(b, ptr, ptr, tensors,
                                       ArrayRef<LLVM::GEPArg>{int32_t(i)});
      bases.push_back(LLVM::LoadOp::create(b, ptr, slot));
    }
  }

  /// The tensor of operand or result `index`.
  Value getTensor(size_t index) {
    Block &body = kernel.getBody().front();
    return index < body.getNumArguments()
               ? Value(body.getArgument(index))
               : kernel.getReturn()
                     .getResults()[index - body.getNumArguments()];
  }
  /// What an element is in memory.
  Type getStoredType(size_t index) {
    Type type =
        cast<RankedTensorType>(getTensor(index).getType()).getElementType();
    if (type.isBF16())
      return b.getI16Type();
    return type.isInteger(1) ? b.getI8Type() : type;
  }
  Value address(size_t tensor, Value base, Value offset) {
    return LLVM::GEPOp::create(b, ptr, getStoredType(tensor), base,
                               ArrayRef<LLVM::GEPArg>{offset});
  }

  /// Where each tensor's part of a row begins.
  SmallVector<Value> offsetBases(Value row) {
    SmallVector<Value> indices;
    for (int64_t extent : llvm::reverse(ArrayRef(nest.shape).drop_back())) {
      indices.push_back(arith::RemUIOp::create(b, row, index(extent)));
      row = arith::DivUIOp::create(b, row, index(extent));
    }
    std::reverse(indices.begin(), indices.end());
    SmallVector<Value> moved;
    for (auto [tensor, strides] : llvm::enumerate(nest.strides)) {
      Value offset = index(0);
      for (auto [position, stride] : llvm::zip(indices, strides))
        if (stride != 0)
          offset = arith::AddIOp::create(
              b, offset, arith::MulIOp::create(b, position, index(stride)));
      moved.push_back(address(tensor, bases[tensor], offset));
    }
    return moved;
  }

  void buildRow(ArrayRef<Value> at, Value begin, Value end) {
    // What has one element in the row is read before it.
    Block &body = kernel.getBody().front();
    SmallVector<Value> numbers(body.getNumArguments());
    for (size_t i = 0; i < numbers.size(); ++i)
      if (nest.strides[i].back() == 0)
        numbers[i] = load(i, at[i], 1);
    Value length = arith::SubIOp::create(b, end, begin);
    Value left = arith::RemUIOp::create(b, length, index(width));
    Value middle = arith::SubIOp::create(b, end, left);
    buildLoop(begin, middle, width,
              [&](Value i) { buildElements(at, numbers, i, width); });
    if (!kernel.getWhole()) // of which nothing is left
      buildLoop(middle, end, 1,
                [&](Value i) { buildElements(at, numbers, i, 1); });
  }

  /// The functions do not change while the kernel runs.
  Value callImport(StringRef name, Value elements) {
    int32_t position = llvm::find(names, name) - names.begin();
    if (size_t(position) == names.size())
      names.push_back(name.str());
    Value slot = LLVM::GEPOp::create(b, ptr, ptr, imports,
                                     ArrayRef<LLVM::GEPArg>{position});
    auto function = LLVM::LoadOp::create(b, ptr, slot);
    function.setInvariant(true);
    Type type = elements.getType();
    return LLVM::CallOp::create(b, LLVM::LLVMFunctionType::get(type, {type}),
                                ValueRange{function, elements})
        .getResult();
  }

  void buildElements(ArrayRef<Value> at, ArrayRef<Value> numbers, Value i,
                     int64_t count) {
    auto call = [&](StringRef name, Value elements) {
      return callImport(name, elements);
    };
    ElementBuilder to(b, count, call);
    Block &body = kernel.getBody().front();
    IRMapping elements;
    for (BlockArgument operand : body.getArguments()) {
      size_t n = operand.getArgNumber();
      elements.map(operand, numbers[n] ? to.splat(numbers[n])
                                       : load(n, address(n, at[n], i), count));
    }
    for (Operation &op : body.without_terminator()) {
      auto call = cast<CallOp>(op);
      SmallVector<Value> taken;
      for (Value operand : call.getOperands())
        taken.push_back(elements.lookup(operand));
      elements.map(call.getResult(0), buildElement(to, call, taken));
    }
    for (auto [n, result] : llvm::enumerate(kernel.getReturn().getResults())) {
      size_t tensor = body.getNumArguments() + n;
      store(tensor, address(tensor, at[tensor], i), elements.lookup(result),
            to);
    }
  }

  static int64_t getAlignment(Type stored) {
    return int64_t(stored.getIntOrFloatBitWidth() / 8);
  }

  Value load(size_t tensor, Value from, int64_t count) {
    ElementBuilder to(b, count);
    Type stored = getStoredType(tensor);
    Value raw =
        LLVM::LoadOp::create(b, to.getType(stored), from, getAlignment(stored));
    Type element =
        cast<RankedTensorType>(getTensor(tensor).getType()).getElementType();
    if (element.isInteger(1))
      return arith::CmpIOp::create(b, arith::CmpIPredicate::ne, raw,
                                   to.constant(b.getI8Type(), 0));
    if (!element.isBF16())
      return raw;
    Type i32 = b.getI32Type();
    Value bits = arith::ShLIOp::create(
        b, arith::ExtUIOp::create(b, to.getType(i32), raw),
        to.constant(i32, 16));
    return arith::BitcastOp::create(b, to.getType(b.getF32Type()), bits);
  }

  void store(size_t tensor, Value address, Value element, ElementBuilder &to) {
    Type stored = getStoredType(tensor);
    if (stored.isInteger(16)) {
      Type i32 = b.getI32Type();
      Value bits = arith::BitcastOp::create(b, to.getType(i32), element);
      Value high = arith::ShRUIOp::create(b, bits, to.constant(i32, 16));
      element = arith::TruncIOp::create(b, to.getType(stored), high);
    }
    LLVM::StoreOp::create(b, element, address, getAlignment(stored));
  }

  KernelOp kernel;
  const int64_t width;
  LoopNest nest;
  ImplicitLocOpBuilder b;
  Type ptr;
  SmallVector<Value> bases;
  Value imports;
  SmallVector<std::string> names;
};

} // namespace

bool mlir::fsdp::canLower(KernelOp kernel) {
  Block &body = kernel.getBody().front();
  auto domain =
      cast<RankedTensorType>(kernel.getReturn().getResults().front().getType());
  if (!domain.hasStaticShape() || domain.getNumElements() == 0)
    return false;
  bool needsVectors = false;
  for (Operation &op : body.without_terminator()) {
    auto call = cast<CallOp>(op);
    if (!findElementFunction(call) ||
        cast<RankedTensorType>(call.getResult(0).getType()).getShape() !=
            domain.getShape())
      return false;
    needsVectors |= needsFullVectors(call);
  }
  ArrayRef<int64_t> layout = kernel.getStrides().value_or(ArrayRef<int64_t>());
  SmallVector<size_t> walk = getWalk(
      domain.getShape(), getStridesOver(domain.getShape(), domain, layout));
  ArrayAttr given = kernel.getOperandStridesAttr();
  for (BlockArgument operand : body.getArguments()) {
    auto type = cast<RankedTensorType>(operand.getType());
    ArrayRef<int64_t> own;
    if (given)
      own = cast<DenseI64ArrayAttr>(given[operand.getArgNumber()]);
    if (!type.hasStaticShape() || type.getRank() > domain.getRank())
      return false;
    SmallVector<int64_t> over = getStridesOver(domain.getShape(), type, own);
    if (int64_t(over.size()) != domain.getRank() || !areReadable(walk, over))
      return false;
  }
  if (!kernel.getWhole())
    return !needsVectors;
  LoopNest nest(kernel);
  bool areAlike = llvm::all_of(nest.strides, [](ArrayRef<int64_t> strides) {
    return strides.back() == 1;
  });
  return nest.isOneRow() && areAlike &&
         domain.getNumElements() % kElementsOfFullVectors == 0;
}

LoweredKernel mlir::fsdp::lowerKernel(KernelOp kernel, int64_t width) {
  return KernelBuilder(kernel, width).run();
}
