//===- OpAttributes.cpp - attributes that ops of all kinds have -----------===//
#include "fsdp/Dialect/Aten.h"
#include "fsdp/Dialect/FSDP.h"

using namespace mlir;
using namespace mlir::fsdp;

static StringRef getText(Operation *op, StringRef name) {
  auto text = dyn_cast_or_null<StringAttr>(op->getDiscardableAttr(name));
  return text ? text.getValue() : StringRef();
}

StringRef mlir::fsdp::getModuleName(Operation *op) {
  return getText(op, moduleAttrName);
}

StringRef mlir::fsdp::getSourceLine(Operation *op) {
  return getText(op, lineAttrName);
}

void mlir::fsdp::copyOrigin(Operation *origin, Operation *op) {
  auto copy = [&](StringRef name) {
    if (Attribute text = origin->getDiscardableAttr(name))
      op->setDiscardableAttr(name, text);
  };
  copy(moduleAttrName);
  if (isa<aten::CallOp>(op))
    copy(lineAttrName);
}

void mlir::fsdp::setReason(Operation *op, const llvm::Twine &why) {
  op->setDiscardableAttr(whyAttrName, StringAttr::get(op->getContext(), why));
}

StringRef mlir::fsdp::getReason(Operation *op) {
  return getText(op, whyAttrName);
}

static LogicalResult verifyText(Operation *op, NamedAttribute attribute,
                                StringRef label) {
  auto text = dyn_cast<StringAttr>(attribute.getValue());
  if (text && !text.empty())
    return success();
  return op->emitOpError(label)
         << ": expected a text as " << attribute.getName().getValue()
         << ", got: " << attribute.getValue();
}

LogicalResult FSDPDialect::verifyOperationAttribute(Operation *op,
                                                    NamedAttribute attribute) {
  StringAttr name = attribute.getName();
  if (name == levelAttrName) {
    if (isa<ModuleOp>(op) && isa<LevelAttr>(attribute.getValue()))
      return success();
    return op->emitOpError("Level-1: expected ")
           << levelAttrName
           << " on the module, an #fsdp.level, got: " << attribute.getValue();
  }
  if (name == capturedForAttrName) {
    auto texts = dyn_cast<DictionaryAttr>(attribute.getValue());
    if (isa<ModuleOp>(op) && texts && texts.getAs<StringAttr>("device") &&
        texts.getAs<StringAttr>("torch"))
      return success();
    return op->emitOpError("Captured-1: expected ")
           << capturedForAttrName
           << " on the module, with the texts device and torch, got: "
           << attribute.getValue();
  }
  if (name == moduleAttrName || name == lineAttrName)
    return verifyText(op, attribute, "Origin-1");
  if (name == whyAttrName)
    return verifyText(op, attribute, "Why-1");
  return success();
}
