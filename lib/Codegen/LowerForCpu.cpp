//===- LowerForCpu.cpp - a kernel as a loop over vectors ------------------===//
//
// A loop over rows, and in each row a loop over vectors and one over what is
// left; a kernel of a single row is cut within it.
//
//===----------------------------------------------------------------------===//
#include "LoopNest.h"

#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/SCF/IR/SCF.h"

using namespace mlir;
using namespace mlir::fsdp;

namespace {

class CpuKernelBuilder : LoopBuilder {
public:
  CpuKernelBuilder(KernelOp kernel, int64_t width)
      : LoopBuilder(kernel), width(width),
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
        SmallVector<Value> at = getRowOffsets(row);
        for (auto [tensor, place] : llvm::enumerate(at))
          place = address(tensor, bases[tensor], place);
        buildRow(at, index(0), index(nest.getRowLength()));
      });
    func::ReturnOp::create(b);
    int64_t trips = nest.isOneRow() ? nest.getRowLength() : nest.getNumRows();
    return {std::move(module), trips, std::move(names)};
  }

private:
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

  void buildRow(ArrayRef<Value> at, Value begin, Value end) {
    // What has one element in the row is read before it.
    SmallVector<Value> numbers(getNumOperands());
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
    SmallVector<Value> operands;
    for (size_t n = 0; n < getNumOperands(); ++n)
      operands.push_back(numbers[n] ? to.splat(numbers[n])
                                    : load(n, address(n, at[n], i), count));
    for (auto [n, result] : llvm::enumerate(buildCalls(to, operands))) {
      size_t tensor = getNumOperands() + n;
      Value stored = to.toMemory(getElement(tensor), result);
      LLVM::StoreOp::create(b, stored, address(tensor, at[tensor], i),
                            getAlignment(stored.getType()));
    }
  }

  static int64_t getAlignment(Type stored) {
    return int64_t(getElementTypeOrSelf(stored).getIntOrFloatBitWidth() / 8);
  }

  Value load(size_t tensor, Value from, int64_t count) {
    ElementBuilder to(b, count);
    Type stored = ElementBuilder::getStoredType(getElement(tensor));
    Value raw =
        LLVM::LoadOp::create(b, to.getType(stored), from, getAlignment(stored));
    return to.fromMemory(getElement(tensor), raw);
  }

  const int64_t width;
  Type ptr;
  SmallVector<Value> bases;
  Value imports;
  SmallVector<std::string> names;
};

} // namespace

LoweredKernel mlir::fsdp::lowerForCpu(KernelOp kernel, int64_t width) {
  return CpuKernelBuilder(kernel, width).run();
}
