//===- PickleWriter.cpp - pickles of protocol 2 ---------------------------===//
#include "fsdp/Runtime/Checkpoint/PickleWriter.h"
#include "PickleOps.h"

#include <bit>
#include <utility>

namespace fsdp::runtime {

using Op = PickleOp;

PickleWriter::PickleWriter() : text("\x80\x02") {}

namespace {
void appendLittle(std::string &text, uint64_t value, size_t width) {
  for (size_t i = 0; i < width; ++i)
    text += char(value >> (8 * i));
}
} // namespace

void PickleWriter::integer(int64_t value) {
  if (value >= 0 && value < 256) {
    text += char(Op::BinInt1);
    appendLittle(text, uint64_t(value), 1);
  } else if (value == int32_t(value)) {
    text += char(Op::BinInt);
    appendLittle(text, uint64_t(value), 4);
  } else {
    text += char(Op::Long1);
    text += char(8);
    appendLittle(text, uint64_t(value), 8);
  }
}

void PickleWriter::real(double value) {
  auto bits = std::bit_cast<uint64_t>(value);
  text += char(Op::BinFloat);
  for (int byte = 8; byte-- > 0;)
    text += char(bits >> (8 * byte));
}

bool PickleWriter::recall(std::string key) {
  auto [it, added] = memo.emplace(std::move(key), memo.size());
  if (added)
    return false;
  bool narrow = it->second < 256;
  text += char(narrow ? Op::BinGet : Op::LongBinGet);
  appendLittle(text, it->second, narrow ? 1 : 4);
  return true;
}

void PickleWriter::memoize() {
  size_t index = memo.size() - 1;
  bool narrow = index < 256;
  text += char(narrow ? Op::BinPut : Op::LongBinPut);
  appendLittle(text, index, narrow ? 1 : 4);
}

void PickleWriter::string(std::string_view utf8) {
  if (recall(std::string(utf8)))
    return;
  text += char(Op::BinUnicode);
  appendLittle(text, utf8.size(), 4);
  text += utf8;
  memoize();
}

void PickleWriter::global(std::string_view name) {
  // No text begins with a byte that is not UTF-8.
  if (recall("\xff" + std::string(name)))
    return;
  size_t space = name.find(' ');
  text += char(Op::Global);
  text += name.substr(0, space);
  text += '\n';
  text += name.substr(space + 1);
  text += '\n';
  memoize();
}

void PickleWriter::object(std::string_view name) {
  global(name);
  text += char(Op::EmptyTuple);
  text += char(Op::NewObj);
}

void PickleWriter::extents(std::span<const int64_t> values) {
  mark();
  for (int64_t value : values)
    integer(value);
  endTuple();
}

void PickleWriter::size(std::span<const int64_t> values) {
  global("torch Size");
  mark();
  extents(values);
  endTuple();
  call();
}

void PickleWriter::value(const nlohmann::json &value, bool tuples) {
  using Type = nlohmann::json::value_t;
  switch (value.type()) {
  case Type::null:
  case Type::discarded:
    return none();
  case Type::boolean:
    return boolean(value.get<bool>());
  case Type::number_integer:
    return integer(value.get<int64_t>());
  case Type::number_unsigned:
    if (value.get<uint64_t>() <= uint64_t(INT64_MAX))
      return integer(value.get<int64_t>());
    text += char(Op::Long1);
    text += char(9);
    appendLittle(text, value.get<uint64_t>(), 8);
    text += '\0';
    return;
  case Type::number_float:
    return real(value.get<double>());
  case Type::string:
    return string(value.get_ref<const std::string &>());
  case Type::array:
    if (!tuples)
      list();
    mark();
    for (const nlohmann::json &item : value)
      this->value(item, tuples);
    return tuples ? endTuple() : endAppends();
  case Type::object:
    dict();
    mark();
    for (const auto &[key, item] : value.items()) {
      string(key);
      this->value(item, tuples);
    }
    return endItems();
  case Type::binary: {
    std::string utf8;
    for (uint8_t byte : value.get_binary()) {
      if (byte >= 0x80)
        utf8 += char(0xc0 | byte >> 6);
      utf8 += char(byte >= 0x80 ? 0x80 | (byte & 0x3f) : byte);
    }
    global(kEncode);
    mark();
    string(utf8);
    string("latin1");
    endTuple();
    return call();
  }
  }
}

std::string PickleWriter::finish() && {
  text += char(Op::Stop);
  return std::move(text);
}

} // namespace fsdp::runtime
