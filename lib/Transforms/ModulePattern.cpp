//===- ModulePattern.cpp - patterns of module names in a policy -----------===//
#include "fsdp/Transforms/ModulePattern.h"

using llvm::StringRef;

bool mlir::fsdp::matchesPattern(StringRef pattern, StringRef name) {
  if (pattern.empty())
    return name.empty();
  if (pattern.starts_with("**")) {
    StringRef rest = pattern.drop_front(2);
    for (size_t skip = 0; skip <= name.size(); ++skip)
      if (matchesPattern(rest, name.drop_front(skip)))
        return true;
    return false;
  }
  if (pattern.front() == '*') {
    StringRef rest = pattern.drop_front();
    for (size_t skip = 0; skip <= name.size(); ++skip) {
      if (matchesPattern(rest, name.drop_front(skip)))
        return true;
      if (skip < name.size() && name[skip] == '.')
        return false;
    }
    return false;
  }
  if (name.empty())
    return false;
  if (pattern.front() != name.front() &&
      (pattern.front() != '?' || name.front() == '.'))
    return false;
  return matchesPattern(pattern.drop_front(), name.drop_front());
}

bool mlir::fsdp::matchesContainingModule(StringRef pattern, StringRef name) {
  for (size_t end = name.find('.');; end = name.find('.', end + 1)) {
    if (matchesPattern(pattern, name.take_front(end)))
      return true;
    if (end == StringRef::npos)
      return false;
  }
}
