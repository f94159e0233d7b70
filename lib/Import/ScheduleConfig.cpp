//===- ScheduleConfig.cpp - the config's key `schedule` -------------------===//
#include "ScheduleConfig.h"

#include "fsdp/Dialect/FSDP.h"
#include "llvm/Support/Path.h"

using namespace mlir;
using namespace mlir::fsdp;

LogicalResult ScheduleConfig::apply(OpBuilder &builder, const Node &node) {
  OperationState state(node.loc, ScheduleOp::getOperationName());
  auto set = [&](StringRef key, Attribute value) {
    state.addAttribute(key, value);
  };
  if (node.kind == Node::Kind::Scalar && node.scalar == "fsdp2") {
    set("prefetch", builder.getStringAttr("fsdp2"));
    set("reduce_scatters_in_flight", builder.getI64IntegerAttr(1));
  } else if (node.kind == Node::Kind::Scalar) {
    return emitError(node.loc) << "expected \"fsdp2\" or a mapping for "
                                  "\"schedule\", got: "
                               << describe(node);
  } else if (failed(forEachEntry(
                 node, "\"schedule\"",
                 {"prefetch", "reduce_scatters_in_flight", "bucket", "memory",
                  "memory_budget", "device"},
                 [&](StringRef key, const Node &value) -> LogicalResult {
                   int64_t number;
                   if (key == "memory_budget") {
                     if (failed(getBytes(key, value, number)))
                       return failure();
                     set(key, builder.getI64IntegerAttr(number));
                     return success();
                   }
                   if (key == "reduce_scatters_in_flight") {
                     if (failed(getInteger(key, value, number)))
                       return failure();
                     set(key, builder.getI64IntegerAttr(number));
                     return success();
                   }
                   if (value.kind != Node::Kind::Scalar)
                     return emitError(value.loc)
                            << "expected a name for \"" << key
                            << "\", got: " << describe(value);
                   SmallString<128> text(value.scalar);
                   if (key == "device" &&
                       llvm::sys::path::has_extension(text) &&
                       llvm::sys::path::is_relative(text)) {
                     text = llvm::sys::path::parent_path(path);
                     llvm::sys::path::append(text, value.scalar);
                   }
                   set(key, builder.getStringAttr(text));
                   return success();
                 }))) {
    return failure();
  }
  return cast<ScheduleOp>(builder.create(state)).verify();
}
