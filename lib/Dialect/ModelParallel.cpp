//===- ModelParallel.cpp - axes that the model communicates over ----------===//
#include "fsdp/Dialect/ModelParallel.h"

#include "mlir/IR/Builders.h"

using namespace mlir;
using namespace mlir::fsdp;
namespace plan = ::fsdp::plan;

static std::optional<int64_t> getNumber(Attribute attr) {
  auto number = dyn_cast_or_null<IntegerAttr>(attr);
  if (!number || !number.getType().isSignlessInteger(64))
    return std::nullopt;
  return number.getInt();
}

std::optional<plan::ModelParallel>
mlir::fsdp::readModelParallel(DictionaryAttr parallel) {
  auto number = [](DictionaryAttr from, StringRef name, int64_t &value) {
    std::optional<int64_t> given = getNumber(from.get(name));
    value = given.value_or(value);
    return given.has_value();
  };
  plan::ModelParallel result;
  auto axes = parallel.getAs<ArrayAttr>("axes");
  if (!axes || !number(parallel, "ranks", result.ranks) ||
      !number(parallel, "data_stride", result.dataStride))
    return std::nullopt;
  for (Attribute attr : axes) {
    auto entry = dyn_cast<DictionaryAttr>(attr);
    auto name = entry ? entry.getAs<StringAttr>("name") : StringAttr();
    plan::ModelAxis axis;
    if (!name || !number(entry, "ranks", axis.ranks) ||
        !number(entry, "stride", axis.stride))
      return std::nullopt;
    axis.name = name.str();
    result.axes.push_back(std::move(axis));
  }
  return result;
}

std::optional<plan::ModelParallel>
mlir::fsdp::getModelParallel(ModuleOp module) {
  auto parallel =
      module ? module->getAttrOfType<DictionaryAttr>(modelParallelAttrName)
             : DictionaryAttr();
  return parallel ? readModelParallel(parallel) : std::nullopt;
}

DictionaryAttr mlir::fsdp::getAttr(const plan::ModelParallel &parallel,
                                   MLIRContext *context) {
  Builder builder(context);
  auto number = [&](StringRef name, int64_t value) {
    return builder.getNamedAttr(name, builder.getI64IntegerAttr(value));
  };
  SmallVector<Attribute> axes;
  for (const plan::ModelAxis &axis : parallel.axes)
    axes.push_back(builder.getDictionaryAttr(
        {builder.getNamedAttr("name", builder.getStringAttr(axis.name)),
         number("ranks", axis.ranks), number("stride", axis.stride)}));
  return builder.getDictionaryAttr(
      {builder.getNamedAttr("axes", builder.getArrayAttr(axes)),
       number("data_stride", parallel.dataStride),
       number("ranks", parallel.ranks)});
}

std::optional<plan::ModelCollective>
mlir::fsdp::getModelCollective(aten::CallOp call) {
  if (!plan::isModelCollective(call.getCallee()))
    return std::nullopt;
  plan::ModelCollective result;
  result.kind = plan::modelCollectiveKind(call.getCallee());
  for (Attribute arg : call.getArgs()) {
    if (auto text = dyn_cast<StringAttr>(arg))
      result.axis = text.str();
    else if (auto size = getNumber(arg);
             size && result.kind != plan::CollectiveKind::SendReceive)
      result.ranks = size;
  }
  if (!result.kind && result.axis.empty())
    return std::nullopt;
  for (Type type : call.getOperandTypes())
    result.ins.push_back(cast<RankedTensorType>(type).getShape().vec());
  for (Type type : call.getResultTypes())
    result.outs.emplace_back(cast<RankedTensorType>(type).getShape().vec());
  return result;
}
