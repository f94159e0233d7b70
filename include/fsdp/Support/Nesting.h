//===- Nesting.h - how deep a text goes -----------------------------------===//
#ifndef FSDP_SUPPORT_NESTING_H
#define FSDP_SUPPORT_NESTING_H

#include <cstddef>
#include <string_view>

namespace fsdp {

/// The deepest nesting of brackets that a recursive parser is given.
inline constexpr size_t kMaxNesting = 256;

/// The largest number of ( [ { < that are open at once in a text. Brackets in
/// double quotes, which end on their line, and in `//` comments do not count.
/// The > of an arrow closes nothing.
size_t nestingOf(std::string_view text);

} // namespace fsdp

#endif // FSDP_SUPPORT_NESTING_H
