//===- EmitKernels.cpp - kernels and what runs them -----------------------===//
#include "PlanEmitter.h"

#include "fsdp/Plan/Digest.h"
#include "llvm/ADT/StringExtras.h"

using namespace mlir;
using namespace mlir::fsdp;
namespace plan = ::fsdp::plan;

LogicalResult PlanEmitter::emitKernel(KernelOp kernel) {
  plan::Kernel entry;
  entry.name = kernel.getSymName().str();
  // Its values are its own.
  PlanEmitter body(module);
  body.program = program;
  std::vector<plan::Instruction> calls;
  body.instructions = &calls;
  Block &block = kernel.getBody().front();
  for (BlockArgument operand : block.getArguments()) {
    plan::ValueId id;
    if (failed(body.define(operand, id)))
      return failure();
    if (ArrayAttr strides = kernel.getOperandStridesAttr())
      body.result.values[id].strides =
          getStrides(cast<DenseI64ArrayAttr>(strides[operand.getArgNumber()]));
  }
  entry.operands = block.getNumArguments();
  for (Operation &op : block.without_terminator())
    if (failed(body.emit(&op)) || body.isIncomplete)
      return failure();
  body.current = kernel.getReturn();
  entry.results = body.use(kernel.getReturn().getResults());
  if (body.isIncomplete)
    return failure();
  entry.values = std::move(body.result.values);
  for (plan::Instruction &call : calls)
    entry.calls.push_back(std::get<plan::Call>(std::move(call.kind)));
  // What the calls make is all laid out as the results are.
  for (plan::Value &value : llvm::drop_begin(entry.values, entry.operands))
    value.strides = getStrides(kernel.getStridesAttr());
  entry.whole = kernel.getWhole();
  if (DictionaryAttr code = kernel.getCodeAttr()) {
    entry.trips = int64_t(kernel.getTrips().value_or(0));
    for (NamedAttribute target : code)
      if (failed(emitCode(kernel, target, entry)))
        return failure();
  }
  kernelIndex[kernel.getSymNameAttr()] = int32_t(result.kernels.size());
  result.kernels.push_back(std::move(entry));
  return success();
}

LogicalResult PlanEmitter::emitCode(KernelOp kernel, NamedAttribute target,
                                    plan::Kernel &entry) {
  auto parts = dyn_cast<DictionaryAttr>(target.getValue());
  auto image = parts ? parts.getAs<StringAttr>("image") : StringAttr();
  auto begin = parts ? parts.getAs<IntegerAttr>("entry") : IntegerAttr();
  plan::KernelCode code;
  auto imports = parts ? parts.getAs<ArrayAttr>("imports") : ArrayAttr();
  if (!image || !begin || !imports ||
      !llvm::all_of(imports, llvm::IsaPred<StringAttr>) ||
      !llvm::tryGetFromHex(image.getValue(), code.image))
    return kernel.emitOpError("expected for each target an entry, imports and "
                              "an image in hex digits, got: ")
           << target.getValue();
  code.target = target.getName().str();
  code.entry = begin.getInt();
  for (auto name : imports.getAsRange<StringAttr>())
    code.imports.push_back(name.str());
  code.hash = plan::hashOf(entry, code);
  entry.code.push_back(std::move(code));
  return success();
}
