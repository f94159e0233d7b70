//===- SourceTables.cpp - modules and lines that a plan names -------------===//
#include "SourceTables.h"

#include "llvm/ADT/Twine.h"

using namespace mlir;
using namespace mlir::fsdp;

/// The index of `text` in `table`, where `indices` knows it; added if it is
/// new.
static int32_t getIndex(const std::string &text,
                        std::map<std::string, int32_t> &indices,
                        std::vector<std::string> &table) {
  auto [it, inserted] = indices.try_emplace(text, table.size());
  if (inserted)
    table.push_back(text);
  return it->second;
}

int32_t SourceTables::getLine(Location loc) {
  auto named = dyn_cast<NameLoc>(loc);
  auto source =
      dyn_cast<FileLineColLoc>(named ? named.getChildLoc() : Location(loc));
  if (!source)
    return -1;
  StringRef path = source.getFilename();
  size_t slash = path.rfind('/');
  if (slash != StringRef::npos)
    slash = path.rfind('/', slash);
  return getIndex(
      (path.substr(slash + 1) + ":" + Twine(source.getLine())).str(), lines,
      plan.lines);
}

int32_t SourceTables::getModule(Location loc) {
  auto named = dyn_cast<NameLoc>(loc);
  return getIndex(named ? named.getName().str() : "", modules, plan.modules);
}
