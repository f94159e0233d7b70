//===- Nesting.cpp - how deep a text goes ---------------------------------===//
#include "fsdp/Support/Nesting.h"

#include <algorithm>

namespace fsdp {

size_t nestingOf(std::string_view text) {
  size_t depth = 0, most = 0;
  bool quoted = false;
  char before = '\n';
  for (size_t i = 0; i < text.size(); ++i) {
    char c = text[i];
    if (c == '\n')
      quoted = false;
    else if (quoted && c == '\\')
      ++i;
    else if (c == '"')
      quoted = !quoted;
    else if (!quoted && c == '/' && before == '/')
      i = std::min(text.find('\n', i), text.size());
    else if (!quoted && (c == '(' || c == '[' || c == '{' || c == '<'))
      most = std::max(most, ++depth);
    else if (!quoted && depth > 0 &&
             (c == ')' || c == ']' || c == '}' || (c == '>' && before != '-')))
      --depth;
    before = c;
  }
  return most;
}

} // namespace fsdp
