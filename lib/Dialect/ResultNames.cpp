//===- ResultNames.cpp - names of results in text -------------------------===//
//
// Names come from the model: parameters, units, modules and operators. So a
// line of a dump changes where its meaning does, and not with every op that a
// pass puts before it.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Dialect/Aten.h"
#include "fsdp/Dialect/FSDP.h"

using namespace mlir;
using namespace mlir::fsdp;

/// The first result stands for all.
static void setName(Operation *op, const Twine &name,
                    OpAsmSetValueNameFn setNameFn) {
  if (op->getNumResults() > 0)
    setNameFn(op->getResult(0), name.str());
}

/// A unit's name in the letters that a value's may have: `(root)[4]` is root_4.
static std::string getUnitName(FlatSymbolRefAttr unit) {
  std::string name;
  for (char c : unit.getValue())
    if (llvm::isAlnum(c) || StringRef("._-").contains(c))
      name += c;
    else if (!name.empty() && name.back() != '_' &&
             !StringRef(")]").contains(c))
      name += '_';
  return name;
}

/// Names what an op computes, with `future` its future.
static void setUnitName(Operation *op, FlatSymbolRefAttr unit, StringRef what,
                        StringRef future, OpAsmSetValueNameFn setNameFn) {
  auto collective = dyn_cast<CollectiveOpInterface>(op);
  bool begins = collective && collective.hasFuture();
  setName(op, getUnitName(unit) + "." + (begins ? future : what), setNameFn);
}

void ReadOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  bool isShard = isa<ShardedType>(getResult().getType());
  setName(*this, getParam() + (isShard ? ".shard" : ""), setNameFn);
}

void ReadBufferOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  setName(*this, getBuffer(), setNameFn);
}

void AllGatherOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  setUnitName(*this, getUnitAttr(), "params", "all_gather", setNameFn);
}

void ReshardOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  setUnitName(*this, getUnitAttr(), "kept", "", setNameFn);
}

void ReduceScatterOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  setUnitName(*this, getUnitAttr(), "grads", "reduce_scatter", setNameFn);
}

void AllReduceOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  setUnitName(*this, getUnitAttr(), "grads", "all_reduce", setNameFn);
}

void CopyToDeviceOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  setUnitName(*this, getUnitAttr(), "on_device", "", setNameFn);
}

void CopyToHostOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  setUnitName(*this, getUnitAttr(), "on_host", "copy_to_host", setNameFn);
}

void OffloadActivationOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  setName(*this, hasFuture() ? "offload" : "on_host", setNameFn);
}

void ReloadActivationOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  setName(*this, hasFuture() ? "reload" : "reloaded", setNameFn);
}

void AccumulateOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  setName(*this, "sums", setNameFn);
}

void LossScaleOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  setName(*this, "loss_scale", setNameFn);
}

void UnscaleOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  setName(*this, "unscaled", setNameFn);
}

void ClipGradNormOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  setName(*this, "clipped", setNameFn);
}

void WaitOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  Operation *begun = getFuture().getDefiningOp();
  if (auto gather = dyn_cast_or_null<AllGatherOp>(begun))
    setName(*this, getUnitName(gather.getUnitAttr()) + ".params", setNameFn);
  else if (auto reduce = dyn_cast_or_null<ReduceScatterOp>(begun))
    setName(*this, getUnitName(reduce.getUnitAttr()) + ".grads", setNameFn);
  else if (auto reduce = dyn_cast_or_null<AllReduceOp>(begun))
    setName(*this, getUnitName(reduce.getUnitAttr()) + ".grads", setNameFn);
  else if (auto copy = dyn_cast_or_null<CopyToHostOp>(begun))
    setName(*this, getUnitName(copy.getUnitAttr()) + ".on_host", setNameFn);
  else if (isa_and_nonnull<OffloadActivationOp>(begun))
    setName(*this, "on_host", setNameFn);
  else if (isa_and_nonnull<ReloadActivationOp>(begun))
    setName(*this, "reloaded", setNameFn);
}

void ProgramOp::getAsmBlockArgumentNames(Region &region,
                                         OpAsmSetValueNameFn setNameFn) {
  if (region.empty())
    return;
  for (BlockArgument argument : region.getArguments())
    if (argument.getArgNumber() < getNumArguments())
      if (auto name = getArgAttrOfType<StringAttr>(argument.getArgNumber(),
                                                   inputNameAttrName))
        setNameFn(argument, name);
}

/// The module and the operator, without its namespace and overload.
void aten::CallOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  StringRef name = getCallee();
  name = name.drop_front(name.rfind(':') + 1).split('.').first;
  auto location = dyn_cast<NameLoc>(getLoc());
  StringRef module = location ? location.getName().strref() : "";
  setName(*this, module.empty() ? Twine(name) : module + "." + name, setNameFn);
}
