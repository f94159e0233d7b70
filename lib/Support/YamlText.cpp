//===- YamlText.cpp - what is refused before a YAML parser sees it --------===//
#include "fsdp/Support/YamlText.h"

#include "fsdp/Support/Message.h"

namespace fsdp {

/// LLVM's parser takes another one for the end of the file.
static bool isKnownDirective(std::string_view yaml, size_t at) {
  std::string_view line = yaml.substr(at);
  return line.starts_with("%YAML ") || line.starts_with("%TAG ");
}

std::optional<TextDefect> findDefect(std::string_view yaml) {
  TextDefect defect;
  // Brackets in scalars and comments count too, but are closed there or few.
  unsigned depth = 0;
  bool indents = true; // only blanks so far in this line
  for (size_t at = 0; at < yaml.size();) {
    size_t bytes = characterBytes(yaml.substr(at));
    unsigned char c = yaml[at];
    if (bytes == 0)
      defect.what = "expected utf-8, got other bytes";
    else if ((c < 0x20 && c != '\t' && c != '\n' && c != '\r') || c == 0x7f)
      defect.what = "expected no control characters";
    else if (c == '\t' && indents)
      defect.what = "expected spaces as indentation, got a tab";
    else if (c == '%' && defect.column == 1 && !isKnownDirective(yaml, at))
      defect.what = "expected no directive but %YAML and %TAG";
    else if ((c == '[' || c == '{') && ++depth > kMaxYamlDepth)
      defect.what = "nested deeper than " + std::to_string(kMaxYamlDepth);
    if (!defect.what.empty())
      return defect;
    if ((c == ']' || c == '}') && depth > 0)
      --depth;
    indents = indents && c == ' ';
    defect.column += unsigned(bytes);
    if (c == '\n') {
      ++defect.line;
      defect.column = 1;
      indents = true;
    }
    at += bytes;
  }
  return std::nullopt;
}

} // namespace fsdp
