//===- Nesting.h - how deep a text goes -----------------------------------===//
#ifndef FSDP_SUPPORT_NESTING_H
#define FSDP_SUPPORT_NESTING_H

#include <cstddef>
#include <string_view>

namespace fsdp {

/// The most brackets of a program's text that a parser, which calls itself for
/// each, is given.
inline constexpr size_t kMaxNesting = 256;

/// The most of ( [ { < that are open at once in a text, without those in
/// double quotes, which end on their line, and behind `//`. The > of an arrow
/// closes nothing.
size_t nestingOf(std::string_view text);

} // namespace fsdp

#endif // FSDP_SUPPORT_NESTING_H
