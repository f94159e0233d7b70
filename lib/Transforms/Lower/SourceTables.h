//===- SourceTables.h - modules and lines that a plan names ---------------===//
#ifndef FSDP_LIB_TRANSFORMS_LOWER_SOURCETABLES_H
#define FSDP_LIB_TRANSFORMS_LOWER_SOURCETABLES_H

#include "fsdp/Plan/Plan.h"
#include "mlir/IR/Location.h"

#include <map>
#include <string>

namespace mlir::fsdp {

/// The tables of a plan in which each module and each source line stands once.
class SourceTables {
public:
  /// Fills those of `plan`, which outlives it.
  explicit SourceTables(::fsdp::plan::Plan &plan) : plan(plan) {}

  /// -1 where the line is not known. Of the file's path the last folder is
  /// enough for people, and the same on every machine.
  int32_t getLine(Location loc);
  /// The index of "" where the module is not known.
  int32_t getModule(Location loc);

private:
  ::fsdp::plan::Plan &plan;
  std::map<std::string, int32_t> modules, lines; ///< index by text
};

} // namespace mlir::fsdp

#endif // FSDP_LIB_TRANSFORMS_LOWER_SOURCETABLES_H
