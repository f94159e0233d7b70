//===- ModulePattern.cpp - patterns of module names in a policy -----------===//
#include "fsdp/Transforms/ModulePattern.h"

#include "llvm/ADT/SmallVector.h"

using llvm::SmallVector, llvm::StringRef;

bool mlir::fsdp::matchesPattern(StringRef pattern, StringRef name) {
  // Whether what was taken of the pattern matches that many letters.
  SmallVector<bool> matched(name.size() + 1);
  matched[0] = true;
  while (!pattern.empty()) {
    bool crosses = pattern.consume_front("**");
    bool repeats = crosses || pattern.consume_front("*");
    if (repeats) {
      for (size_t end = 1; end <= name.size(); ++end)
        matched[end] |= matched[end - 1] && (crosses || name[end - 1] != '.');
      continue;
    }
    char letter = pattern.front();
    pattern = pattern.drop_front();
    for (size_t end = name.size(); end > 0; --end)
      matched[end] =
          matched[end - 1] &&
          (letter == name[end - 1] || (letter == '?' && name[end - 1] != '.'));
    matched[0] = false;
  }
  return matched.back();
}

bool mlir::fsdp::matchesContainingModule(StringRef pattern, StringRef name) {
  for (size_t end = name.find('.');; end = name.find('.', end + 1)) {
    if (matchesPattern(pattern, name.take_front(end)))
      return true;
    if (end == StringRef::npos)
      return false;
  }
}
