//===- ScheduleConfig.cpp - the config's key `schedule` -------------------===//
#include "ScheduleConfig.h"

#include "fsdp/Dialect/FSDP.h"
#include "llvm/ADT/StringSwitch.h"
#include "llvm/Support/Path.h"

#include <cmath>

using namespace mlir;
using namespace mlir::fsdp;

LogicalResult ScheduleConfig::getBytes(StringRef key, const Node &node,
                                       int64_t &bytes) {
  StringRef text = node.scalar;
  StringRef digits = text.take_while(
      [](char c) { return llvm::isDigit(c) || c == '.' || c == '-'; });
  double unit =
      llvm::StringSwitch<double>(text.drop_front(digits.size()).trim())
          .Case("", 1)
          .Case("GiB", 1LL << 30)
          .Case("MiB", 1LL << 20)
          .Case("KiB", 1LL << 10)
          .Case("GB", 1e9)
          .Case("MB", 1e6)
          .Case("KB", 1e3)
          .Default(0);
  double number;
  if (node.kind != Node::Kind::Scalar || unit == 0 ||
      digits.getAsDouble(number) || std::abs(number * unit) > 1e18)
    return emitError(node.loc)
           << "expected bytes for \"" << key
           << "\", such as 1000000000, 40GB or 37.5GiB, got: "
           << describe(node);
  bytes = std::llround(number * unit);
  return success();
}

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
