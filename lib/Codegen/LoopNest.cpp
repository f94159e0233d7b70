//===- LoopNest.cpp - which kernels can be lowered, and their loops -------===//
#include "LoopNest.h"
#include "fsdp/Plan/Tensors.h"

#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/IR/IRMapping.h"

using namespace mlir;
using namespace mlir::fsdp;
using aten::CallOp;
namespace plan = ::fsdp::plan;

SmallVector<KernelTarget> mlir::fsdp::getKernelTargets(ModuleOp module) {
  if (!isForGpu(module))
    return {{"x86-64-v3", 8}, {"x86-64-v4", 16}};
  auto from = module->getAttrOfType<DictionaryAttr>(capturedForAttrName);
  auto arch = from.getAs<StringAttr>("arch");
  return arch ? SmallVector<KernelTarget>{{arch.getValue(), 0}}
              : SmallVector<KernelTarget>();
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

LoopNest::LoopNest(KernelOp kernel) {
  auto results = kernel.getReturn().getResults();
  ArrayRef<int64_t> domain =
      cast<RankedTensorType>(results.front().getType()).getShape();
  SmallVector<SmallVector<int64_t>> all;
  ArrayAttr given = kernel.getOperandStridesAttr();
  for (BlockArgument operand : kernel.getBody().getArguments()) {
    ArrayRef<int64_t> own;
    if (given)
      own = cast<DenseI64ArrayAttr>(given[operand.getArgNumber()]);
    all.push_back(
        getStridesOver(domain, cast<RankedTensorType>(operand.getType()), own));
  }
  SmallVector<int64_t> layout =
      getStridesOver(domain, cast<RankedTensorType>(results[0].getType()),
                     kernel.getStrides().value_or(ArrayRef<int64_t>()));
  all.append(results.size(), layout);
  collapse(domain, getWalk(domain, layout), all);
}

int64_t LoopNest::getNumRows() const {
  int64_t rows = 1;
  for (int64_t extent : ArrayRef(shape).drop_back())
    rows *= extent;
  return rows;
}

void LoopNest::collapse(ArrayRef<int64_t> domain, ArrayRef<size_t> walk,
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

Value LoopBuilder::index(int64_t value) {
  return arith::ConstantOp::create(b, b.getI64IntegerAttr(value));
}

Type LoopBuilder::getElement(size_t index) {
  Block &body = kernel.getBody().front();
  Value tensor =
      index < body.getNumArguments()
          ? Value(body.getArgument(index))
          : kernel.getReturn().getResults()[index - body.getNumArguments()];
  return cast<RankedTensorType>(tensor.getType()).getElementType();
}

Value LoopBuilder::address(size_t tensor, Value base, Value offset) {
  Type stored = ElementBuilder::getStoredType(getElement(tensor));
  return LLVM::GEPOp::create(b, base.getType(), stored, base,
                             ArrayRef<LLVM::GEPArg>{offset});
}

SmallVector<Value> LoopBuilder::getRowOffsets(Value row) {
  SmallVector<Value> indices;
  for (int64_t extent : llvm::reverse(ArrayRef(nest.shape).drop_back())) {
    indices.push_back(arith::RemUIOp::create(b, row, index(extent)));
    row = arith::DivUIOp::create(b, row, index(extent));
  }
  std::reverse(indices.begin(), indices.end());
  SmallVector<Value> offsets;
  for (ArrayRef<int64_t> strides : nest.strides) {
    Value offset = index(0);
    for (auto [position, stride] : llvm::zip(indices, strides))
      if (stride != 0)
        offset = arith::AddIOp::create(
            b, offset, arith::MulIOp::create(b, position, index(stride)));
    offsets.push_back(offset);
  }
  return offsets;
}

SmallVector<Value> LoopBuilder::buildCalls(ElementBuilder &to,
                                           ArrayRef<Value> operands) {
  Block &body = kernel.getBody().front();
  IRMapping elements;
  for (auto [argument, element] : llvm::zip(body.getArguments(), operands))
    elements.map(argument, element);
  for (Operation &op : body.without_terminator()) {
    auto call = cast<CallOp>(op);
    SmallVector<Value> taken;
    for (Value operand : call.getOperands())
      taken.push_back(elements.lookup(operand));
    elements.map(call.getResult(0), buildElement(to, call, taken));
  }
  SmallVector<Value> results;
  for (Value result : kernel.getReturn().getResults())
    results.push_back(elements.lookup(result));
  return results;
}

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

LoweredKernel mlir::fsdp::lowerKernel(KernelOp kernel,
                                      const KernelTarget &target) {
  return target.isGpu() ? lowerForGpu(kernel)
                        : lowerForCpu(kernel, target.width);
}
