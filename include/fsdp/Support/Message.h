//===- Message.h - what may stand in a line for people --------------------===//
#ifndef FSDP_SUPPORT_MESSAGE_H
#define FSDP_SUPPORT_MESSAGE_H

#include <string>
#include <string_view>

namespace fsdp {

/// The most bytes of a line that oneLine() gives.
inline constexpr size_t kMaxMessageBytes = 1000;

/// The message as one line that a terminal shows as it is written: control
/// characters, line breaks, marks that turn the direction of text, and bytes
/// that are not UTF-8 become `\xNN`, byte by byte. A line longer than
/// kMaxMessageBytes loses its middle, and says how much was left out.
std::string oneLine(std::string_view message);

/// The bytes of the first character of a text that is not empty; 0 if they are
/// not UTF-8 (RFC 3629).
size_t characterBytes(std::string_view text);
/// Whether all of the text is UTF-8.
bool isUtf8(std::string_view text);

} // namespace fsdp

#endif // FSDP_SUPPORT_MESSAGE_H
