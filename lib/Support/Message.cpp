//===- Message.cpp - what may stand in a line for people ------------------===//
#include "fsdp/Support/Message.h"

#include <cstdint>

namespace fsdp {

namespace {

struct Character {
  size_t bytes = 1;
  uint32_t code = 0;
  bool valid = false;
};

/// The first character of a text that is not empty; one byte if it is invalid.
Character firstCharacter(std::string_view text) {
  auto byte = [&](size_t i) { return uint8_t(text[i]); };
  uint8_t lead = byte(0);
  if (lead < 0x80)
    return {1, lead, true};
  size_t bytes = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < bytes)
    return {};
  uint32_t code = lead & (0x7f >> bytes);
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80)
      return {};
    code = code << 6 | (byte(i) & 0x3f);
  }
  constexpr uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
  if (code < least[bytes] || code > 0x10ffff ||
      (code >= 0xd800 && code <= 0xdfff))
    return {};
  return {bytes, code, true};
}

bool isShown(const Character &character) {
  uint32_t code = character.code;
  bool control = code < 0x20 || (code >= 0x7f && code < 0xa0);
  bool lineBreak = code == 0x2028 || code == 0x2029;
  bool direction = (code >= 0x202a && code <= 0x202e) ||
                   (code >= 0x2066 && code <= 0x2069) || code == 0x200e ||
                   code == 0x200f || code == 0x61c;
  return character.valid && !control && !lineBreak && !direction;
}

/// The first byte at or after `at` that begins a character of escaped text.
size_t boundary(std::string_view text, size_t at) {
  while (at < text.size() && (uint8_t(text[at]) & 0xc0) == 0x80)
    ++at;
  return at;
}

} // namespace

size_t characterBytes(std::string_view text) {
  Character character = firstCharacter(text);
  return character.valid ? character.bytes : 0;
}

bool isUtf8(std::string_view text) {
  while (!text.empty()) {
    Character character = firstCharacter(text);
    if (!character.valid)
      return false;
    text.remove_prefix(character.bytes);
  }
  return true;
}

std::string oneLine(std::string_view message) {
  constexpr std::string_view digits = "0123456789abcdef";
  std::string line;
  while (!message.empty()) {
    Character character = firstCharacter(message);
    std::string_view bytes = message.substr(0, character.bytes);
    if (isShown(character))
      line += bytes;
    else
      for (unsigned char byte : bytes)
        line.append("\\x")
            .append(1, digits[byte >> 4])
            .append(1, digits[byte & 15]);
    message.remove_prefix(character.bytes);
  }
  if (line.size() <= kMaxMessageBytes)
    return line;
  // The beginning says where, the end what was expected.
  size_t head = boundary(line, kMaxMessageBytes * 6 / 10);
  size_t tail = boundary(line, line.size() - kMaxMessageBytes * 3 / 10);
  return line.substr(0, head) + "... (" + std::to_string(tail - head) +
         " bytes) ..." + line.substr(tail);
}

} // namespace fsdp
