//===- ResultNames.cpp - names of results in text -------------------------===//
//
// Names come from the model: parameters, units, modules and operators. So a
// line of a dump changes where its meaning does, and not with every op that a
// pass puts before it.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Dialect/Aten.h"
#include "fsdp/Dialect/FSDP.h"

#include "llvm/ADT/TypeSwitch.h"

using namespace mlir;
using namespace mlir::fsdp;

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

/// The unit of an op that has one, with a dot.
static std::string getPrefix(Operation *op) {
  std::optional<Attribute> unit = op->getInherentAttr("unit");
  if (auto name = dyn_cast_or_null<FlatSymbolRefAttr>(unit.value_or(nullptr)))
    return getUnitName(name) + ".";
  return "";
}

/// What the results of an op are, those of its future included.
static std::string getName(Operation *op) {
  return getPrefix(op) +
         llvm::TypeSwitch<Operation *, std::string>(op)
             .Case<ReadOp>([](auto read) {
               bool isShard = isa<ShardedType>(read.getResult().getType());
               return (read.getParam() + (isShard ? ".shard" : "")).str();
             })
             .Case<ReadBufferOp>(
                 [](auto read) { return read.getBuffer().str(); })
             .Case<AllGatherOp>([](auto) { return "params"; })
             .Case<ReshardOp>([](auto) { return "kept"; })
             .Case<ReduceScatterOp, AllReduceOp>([](auto) { return "grads"; })
             .Case<CopyToDeviceOp>([](auto) { return "on_device"; })
             .Case<CopyToHostOp, OffloadActivationOp>(
                 [](auto) { return "on_host"; })
             .Case<ReloadActivationOp>([](auto) { return "reloaded"; })
             .Case<AccumulateOp>([](auto) { return "sums"; })
             .Case<AllocateOp>([](auto) { return "buffer"; })
             .Case<FusedOp>([](auto fused) { return fused.getKernel().str(); })
             .Case<LossScaleOp>([](auto) { return "loss_scale"; })
             .Case<UnscaleOp>([](auto) { return "unscaled"; })
             .Case<ClipGradNormOp>([](auto) { return "clipped"; })
             .Default([](Operation *) { return ""; });
}

/// Names the first result, which stands for all; a future after what begins.
static void nameResults(Operation *op, OpAsmSetValueNameFn setNameFn) {
  if (op->getNumResults() == 0)
    return;
  auto collective = dyn_cast<CollectiveOpInterface>(op);
  setNameFn(op->getResult(0),
            collective && collective.hasFuture()
                ? getPrefix(op) + op->getName().stripDialect().str()
                : getName(op));
}

void ReadOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  nameResults(*this, setNameFn);
}
void ReadBufferOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  nameResults(*this, setNameFn);
}
void AllGatherOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  nameResults(*this, setNameFn);
}
void ReshardOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  nameResults(*this, setNameFn);
}
void ReduceScatterOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  nameResults(*this, setNameFn);
}
void AllReduceOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  nameResults(*this, setNameFn);
}
void CopyToDeviceOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  nameResults(*this, setNameFn);
}
void CopyToHostOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  nameResults(*this, setNameFn);
}
void OffloadActivationOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  nameResults(*this, setNameFn);
}
void ReloadActivationOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  nameResults(*this, setNameFn);
}
void AccumulateOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  nameResults(*this, setNameFn);
}
void AllocateOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  nameResults(*this, setNameFn);
}
void FusedOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  nameResults(*this, setNameFn);
}
void LossScaleOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  nameResults(*this, setNameFn);
}
void UnscaleOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  nameResults(*this, setNameFn);
}
void ClipGradNormOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  nameResults(*this, setNameFn);
}

void StageStateOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  nameResults(*this, setNameFn);
}

void WaitOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  if (Operation *begun = getFuture().getDefiningOp(); begun && getNumResults())
    setNameFn(getResult(0), getName(begun));
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

void MicrobatchesOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  if (getNumResults())
    setNameFn(getResult(0), "loss");
  if (getNumResults() > 1)
    setNameFn(getResult(1), "grads");
}

void MicrobatchesOp::getAsmBlockArgumentNames(Region &region,
                                              OpAsmSetValueNameFn setNameFn) {
  auto program = dyn_cast<ProgramOp>((*this)->getParentOp());
  unsigned inputs = getInputs().size();
  if (region.empty() || region.getNumArguments() < inputs + 2)
    return;
  for (unsigned i = 0; program && i < inputs; ++i)
    if (auto argument = dyn_cast<BlockArgument>(getInputs()[i]))
      if (auto name = program.getArgAttrOfType<StringAttr>(
              argument.getArgNumber(), inputNameAttrName))
        setNameFn(region.getArgument(i), name);
  setNameFn(region.getArgument(inputs), "first");
  setNameFn(region.getArgument(inputs + 1), "last");
  for (BlockArgument carried : region.getArguments().drop_front(inputs + 2))
    setNameFn(carried, "before");
}

/// The module and the operator, without its namespace and overload.
void aten::CallOp::getAsmResultNames(OpAsmSetValueNameFn setNameFn) {
  if (getNumResults() == 0)
    return;
  StringRef name = getCallee();
  name = name.drop_front(name.rfind(':') + 1).split('.').first;
  std::string module = fsdp::getModuleName(*this).str();
  setNameFn(getResult(0), (module.empty() ? "" : module + ".") + name.str());
}
