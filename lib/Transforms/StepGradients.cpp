//===- StepGradients.cpp - gradients on their way to the update -----------===//
#include "fsdp/Transforms/StepGradients.h"
#include "fsdp/Transforms/StepProgram.h"

#include "mlir/IR/Builders.h"

using namespace mlir;
using namespace mlir::fsdp;

StepGradients::StepGradients(ProgramOp program, ArrayRef<ParamOp> among,
                             llvm::function_ref<bool(ParamOp, Value)> selects) {
  op = getGradients(program);
  if (!op)
    return;
  llvm::DenseMap<StringAttr, unsigned> operandOf;
  for (auto [index, name] :
       llvm::enumerate(op.getParamNames().getAsRange<FlatSymbolRefAttr>()))
    operandOf[name.getAttr()] = index;
  for (ParamOp param : among) {
    auto found = operandOf.find(param.getSymNameAttr());
    if (found == operandOf.end() ||
        !selects(param, op.getGrads()[found->second]))
      continue;
    params.push_back(param);
    operands.push_back(found->second);
  }
}

StepGradients::StepGradients(ProgramOp program,
                             llvm::function_ref<bool(ParamOp, Value)> selects)
    : StepGradients(program,
                    llvm::to_vector(
                        program->getParentOfType<ModuleOp>().getOps<ParamOp>()),
                    selects) {}

ArrayAttr StepGradients::getNames() const {
  SmallVector<Attribute> names;
  for (ParamOp param : params)
    names.push_back(FlatSymbolRefAttr::get(param.getSymNameAttr()));
  return ArrayAttr::get(params.front()->getContext(), names);
}

SmallVector<Value> StepGradients::getValues() {
  SmallVector<Value> values;
  for (unsigned operand : operands)
    values.push_back(op.getGrads()[operand]);
  return values;
}

SmallVector<Type> StepGradients::getTypes() {
  return llvm::to_vector(ValueRange(getValues()).getTypes());
}

Value StepGradients::getLast() {
  auto isBefore = [](Value a, Value b) {
    Operation *first = a.getDefiningOp(), *second = b.getDefiningOp();
    return second && (!first || first->isBeforeInBlock(second));
  };
  SmallVector<Value> values = getValues();
  return *std::max_element(values.begin(), values.end(), isBefore);
}

OpBuilder StepGradients::getBuilder() {
  Operation *last = getLast().getDefiningOp();
  PhaseOp backward = getBackward(op->getParentOfType<ProgramOp>());
  if (backward && (!last || last->isBeforeInBlock(backward)))
    last = backward;
  OpBuilder builder(op);
  if (last)
    builder.setInsertionPointAfter(last);
  return builder;
}

void StepGradients::replaceWith(ValueRange values) {
  for (auto [operand, value] : llvm::zip_equal(operands, values))
    op->setOperand(operand, value);
}

bool mlir::fsdp::isShard(ParamOp, Value grad) {
  return isa<ShardedType>(grad.getType());
}
