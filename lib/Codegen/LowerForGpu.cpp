//===- LowerForGpu.cpp - a kernel as what each thread of a grid does ------===//
//
// A thread takes neighbours in a row, as many as 16 bytes hold of the widest
// tensor, if the row and all strides are multiples of them; otherwise one.
//
//===----------------------------------------------------------------------===//
#include "LoopNest.h"
#include "fsdp/Plan/KernelAbi.h"

#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/SCF/IR/SCF.h"

using namespace mlir;
using namespace mlir::fsdp;
namespace plan = ::fsdp::plan;

namespace {

/// Of what NVPTX calls global memory.
constexpr unsigned kGlobal = 1;

class GpuKernelBuilder : LoopBuilder {
public:
  explicit GpuKernelBuilder(KernelOp kernel)
      : LoopBuilder(kernel), count(findCount()) {}

  LoweredKernel run() {
    OwningOpRef<ModuleOp> module =
        ModuleOp::create(kernel.getLoc(), kernel.getSymName());
    b.setInsertionPointToStart(module->getBody());
    auto ptr = LLVM::LLVMPointerType::get(b.getContext(), kGlobal);
    SmallVector<Type> types(nest.strides.size(), ptr);
    auto function =
        func::FuncOp::create(b, plan::kGpuEntry, b.getFunctionType(types, {}));
    Block *entry = function.addEntryBlock();
    b.setInsertionPointToStart(entry);
    int64_t trips = nest.getNumRows() * (nest.getRowLength() / count);
    Value trip = getTrip();
    Value isInside =
        arith::CmpIOp::create(b, arith::CmpIPredicate::ult, trip, index(trips));
    auto guard = scf::IfOp::create(b, isInside, /*withElseRegion=*/false);
    b.setInsertionPointToStart(guard.thenBlock());
    buildTrip(trip, entry->getArguments());
    b.setInsertionPointToEnd(entry);
    func::ReturnOp::create(b);
    declareFunctions(*module);
    return {std::move(module), trips, {}};
  }

private:
  /// How many elements a thread takes.
  int64_t findCount() {
    int64_t most = 16;
    for (size_t tensor = 0; tensor < nest.strides.size(); ++tensor)
      if (nest.strides[tensor].back() != 0)
        most = std::min<int64_t>(most, 16 / getBytes(tensor));
    auto divides = [&](int64_t by) {
      return nest.getRowLength() % by == 0 &&
             llvm::all_of(nest.strides, [&](ArrayRef<int64_t> strides) {
               return strides.back() == 0 ||
                      llvm::all_of(strides.drop_back(), [&](int64_t stride) {
                        return stride % by == 0;
                      });
             });
    };
    while (!divides(most))
      most /= 2;
    return most;
  }

  int64_t getBytes(size_t tensor) {
    Type stored = ElementBuilder::getStoredType(getElement(tensor));
    return stored.getIntOrFloatBitWidth() / 8;
  }

  Value readRegister(StringRef name) {
    auto read = LLVM::CallIntrinsicOp::create(
        b, b.getI32Type(),
        b.getStringAttr(("llvm.nvvm.read.ptx.sreg." + name).str()),
        ValueRange());
    return arith::ExtUIOp::create(b, b.getI64Type(), read.getResults());
  }
  /// The number of this thread in the grid.
  Value getTrip() {
    Value block = arith::MulIOp::create(b, readRegister("ctaid.x"),
                                        index(plan::kGpuBlock));
    return arith::AddIOp::create(b, block, readRegister("tid.x"));
  }

  void buildTrip(Value trip, ValueRange bases) {
    Value perRow = index(nest.getRowLength() / count);
    Value row = trip, column = trip;
    SmallVector<Value> offsets(nest.strides.size(), index(0));
    if (!nest.isOneRow()) {
      // Division of 32 bits costs a fraction of that of 64.
      row = divide<arith::DivUIOp>(trip, perRow);
      column = divide<arith::RemUIOp>(trip, perRow);
      offsets = getRowOffsets(row);
    }
    column = arith::MulIOp::create(b, column, index(count));
    for (auto [tensor, offset] : llvm::enumerate(offsets))
      if (nest.strides[tensor].back() != 0)
        offset = arith::AddIOp::create(b, offset, column);
    SmallVector<SmallVector<Value>> operands;
    for (size_t n = 0; n < getNumOperands(); ++n)
      operands.push_back(load(n, address(n, bases[n], offsets[n])));
    SmallVector<SmallVector<Value>> results(nest.strides.size() -
                                            getNumOperands());
    auto call = [&](StringRef name, Value element) {
      functions.insert(b.getStringAttr(name));
      return func::CallOp::create(b, name, element.getType(), element)
          .getResult(0);
    };
    ElementBuilder to(b, 1, call, /*isForGpu=*/true);
    for (int64_t lane = 0; lane < count; ++lane) {
      SmallVector<Value> taken;
      for (ArrayRef<Value> operand : operands)
        taken.push_back(operand[operand.size() == 1 ? 0 : lane]);
      for (auto [n, result] : llvm::enumerate(buildCalls(to, taken)))
        results[n].push_back(
            to.toMemory(getElement(getNumOperands() + n), result));
    }
    for (auto [n, elements] : llvm::enumerate(results)) {
      size_t tensor = getNumOperands() + n;
      store(tensor, address(tensor, bases[tensor], offsets[tensor]), elements);
    }
  }

  template <typename OpT> Value divide(Value a, Value by) {
    Type i32 = b.getI32Type();
    bool isSmall = nest.getNumRows() * nest.getRowLength() <= INT32_MAX;
    if (!isSmall)
      return OpT::create(b, a, by);
    Value result = OpT::create(b, arith::TruncIOp::create(b, i32, a),
                               arith::TruncIOp::create(b, i32, by));
    return arith::ExtUIOp::create(b, b.getI64Type(), result);
  }

  /// The elements that a thread takes; one if it is the same for all.
  SmallVector<Value> load(size_t tensor, Value from) {
    ElementBuilder to(b, 1);
    Type element = getElement(tensor);
    Type stored = ElementBuilder::getStoredType(element);
    int64_t lanes = nest.strides[tensor].back() == 0 ? 1 : count;
    if (lanes == 1)
      return {to.fromMemory(
          element, LLVM::LoadOp::create(b, stored, from, getBytes(tensor)))};
    Value raw = LLVM::LoadOp::create(b, VectorType::get({lanes}, stored), from,
                                     lanes * getBytes(tensor));
    SmallVector<Value> elements;
    for (int64_t lane = 0; lane < lanes; ++lane)
      elements.push_back(to.fromMemory(
          element, LLVM::ExtractElementOp::create(b, raw, index(lane))));
    return elements;
  }

  void store(size_t tensor, Value place, ArrayRef<Value> elements) {
    Value raw = elements.front();
    if (elements.size() > 1) {
      raw = LLVM::PoisonOp::create(
          b, VectorType::get({int64_t(elements.size())}, raw.getType()));
      for (auto [lane, element] : llvm::enumerate(elements))
        raw = LLVM::InsertElementOp::create(b, raw, element,
                                            index(int64_t(lane)));
    }
    LLVM::StoreOp::create(b, raw, place,
                          int64_t(elements.size()) * getBytes(tensor));
  }

  void declareFunctions(ModuleOp module) {
    b.setInsertionPointToEnd(module.getBody());
    Type f32 = b.getF32Type();
    for (StringAttr name : functions)
      func::FuncOp::create(b, name, b.getFunctionType({f32}, {f32}))
          .setPrivate();
  }

  const int64_t count;
  llvm::SmallSetVector<StringAttr, 2> functions;
};

} // namespace

LoweredKernel mlir::fsdp::lowerForGpu(KernelOp kernel) {
  return GpuKernelBuilder(kernel).run();
}
