//===- SourceTables.h - modules and lines that a plan names ---------------===//
#ifndef FSDP_LIB_TRANSFORMS_LOWER_SOURCETABLES_H
#define FSDP_LIB_TRANSFORMS_LOWER_SOURCETABLES_H

#include "fsdp/Plan/Plan.h"
#include "llvm/ADT/StringMap.h"

namespace mlir::fsdp {

/// The tables of a plan in which each module and each source line stands once.
class SourceTables {
public:
  /// Fills those of `plan`, which outlives it.
  explicit SourceTables(::fsdp::plan::Plan &plan) : plan(plan) {}

  /// -1 where the line is not known.
  int32_t getLine(llvm::StringRef line) {
    return line.empty() ? -1 : getIndex(line, lines, plan.lines);
  }
  /// The index of "" where the module is not known.
  int32_t getModule(llvm::StringRef name) {
    return getIndex(name, modules, plan.modules);
  }

private:
  /// The index of `text` in `table`, where `indices` knows it; added if it is
  /// new.
  static int32_t getIndex(llvm::StringRef text,
                          llvm::StringMap<int32_t> &indices,
                          std::vector<std::string> &table) {
    auto [it, inserted] = indices.try_emplace(text, table.size());
    if (inserted)
      table.push_back(text.str());
    return it->second;
  }

  ::fsdp::plan::Plan &plan;
  llvm::StringMap<int32_t> modules, lines; ///< index by text
};

} // namespace mlir::fsdp

#endif // FSDP_LIB_TRANSFORMS_LOWER_SOURCETABLES_H
