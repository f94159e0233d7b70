//===- PickleMutate.cpp - pickles from pickles ----------------------------===//
#include "PickleMutate.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

namespace fsdp::fuzz {

namespace {

/// Bytes of the instruction that the text begins with; 0 if it has none.
size_t instructionBytes(std::string_view text) {
  auto byte = [&](size_t at) {
    return at < text.size() ? size_t(uint8_t(text[at])) : 0;
  };
  size_t size = 1;
  switch (uint8_t(text[0])) {
  case 0x80: // PROTO, and others of a byte
  case 'K':
  case 'h':
  case 'q':
    size = 2;
    break;
  case 'M':
    size = 3;
    break;
  case 'J':
  case 'j':
  case 'r':
    size = 5;
    break;
  case 'G':
  case 0x95:
    size = 9;
    break;
  case 0x8a:
  case 0x8c:
    size = 2 + byte(1);
    break;
  case 'X':
    size = 5 + byte(1) + (byte(2) << 8);
    break;
  case 'c':
    size = text.find('\n');
    size = size == std::string_view::npos ? 0 : text.find('\n', size + 1);
    size = size == std::string_view::npos ? 0 : size + 1;
    break;
  default:
    break;
  }
  return size > text.size() ? 0 : size;
}

/// An instruction that pushes an extreme number, or an empty or shared object.
std::string extreme(Random &random) {
  using namespace std::string_literals;
  const std::array<std::string, 12> all = {
      "K\0"s,
      "K\xff",
      "M\xff\xff",
      "J\xff\xff\xff\xff",
      "J\xff\xff\xff\x7f",
      "\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f",
      "\x8a\x08\0\0\0\0\0\0\0\x80"s,
      "N",
      ")",
      "}",
      "h\0"s,
      "\x8c\x0b../x.distcp"};
  return all[random.below(all.size())];
}

} // namespace

std::string mutatePickle(std::string_view pickle, Random &random) {
  std::vector<std::string> code;
  for (std::string_view rest = pickle; !rest.empty();) {
    size_t size = instructionBytes(rest);
    if (size == 0)
      return mutateBytes(std::string(pickle), random);
    code.emplace_back(rest.substr(0, size));
    rest.remove_prefix(size);
  }
  if (code.empty())
    return mutateBytes(std::string(pickle), random);
  for (size_t count = 1 + random.below(3); count > 0 && !code.empty();
       --count) {
    size_t at = random.below(code.size()), other = random.below(code.size());
    switch (random.below(7)) {
    case 0:
      code.erase(code.begin() + long(at));
      break;
    case 1:
      code.insert(code.begin() + long(at), std::string(code[other]));
      break;
    case 2:
      std::swap(code[at], code[other]);
      break;
    case 3:
      code[at] = code[other];
      break;
    case 4:
      code[at] = extreme(random);
      break;
    case 5: {
      // Some instructions once more, or many times.
      size_t end = std::min(other + 1 + random.below(12), code.size());
      std::vector<std::string> part(code.begin() + long(other),
                                    code.begin() + long(end));
      size_t times = random.oneIn(10) ? 2000 : 1;
      for (size_t i = 0; i < times; ++i)
        code.insert(code.begin() + long(at), part.begin(), part.end());
      break;
    }
    default:
      code[at] = mutateBytes(code[at], random);
    }
  }
  std::string text;
  for (const std::string &instruction : code)
    text += instruction;
  return text;
}

} // namespace fsdp::fuzz
