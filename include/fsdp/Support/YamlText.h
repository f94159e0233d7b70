//===- YamlText.h - what is refused before a YAML parser sees it ----------===//
#ifndef FSDP_SUPPORT_YAMLTEXT_H
#define FSDP_SUPPORT_YAMLTEXT_H

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace fsdp {

/// Bounds of a YAML file.
inline constexpr uint64_t kMaxYamlBytes = uint64_t(16) << 20;
inline constexpr unsigned kMaxYamlDepth = 64;

struct TextDefect {
  unsigned line = 1, column = 1; ///< from 1, in bytes
  std::string what;
};

/// The first byte of the text that is not allowed: one that is not UTF-8, a
/// control character other than tab and line break, a tab that indents, a
/// directive that YAML does not define, or the start of a flow collection that
/// is nested deeper than kMaxYamlDepth.
std::optional<TextDefect> findDefect(std::string_view yaml);

} // namespace fsdp

#endif // FSDP_SUPPORT_YAMLTEXT_H
