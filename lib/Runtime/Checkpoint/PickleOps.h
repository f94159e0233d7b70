//===- PickleOps.h - the instructions of pickles --------------------------===//
#ifndef FSDP_RUNTIME_CHECKPOINT_PICKLEOPS_H
#define FSDP_RUNTIME_CHECKPOINT_PICKLEOPS_H

#include <cstdint>
#include <string_view>

namespace fsdp::runtime {

/// https://github.com/python/cpython/blob/main/Lib/pickletools.py
enum class PickleOp : uint8_t {
  Proto = 0x80,
  Frame = 0x95,
  Stop = '.',
  Mark = '(',
  None = 'N',
  NewTrue = 0x88,
  NewFalse = 0x89,
  BinInt = 'J',
  BinInt1 = 'K',
  BinInt2 = 'M',
  Long1 = 0x8a,
  BinFloat = 'G',
  BinUnicode = 'X',
  ShortBinUnicode = 0x8c,
  EmptyTuple = ')',
  Tuple = 't',
  Tuple1 = 0x85,
  Tuple2 = 0x86,
  Tuple3 = 0x87,
  EmptyList = ']',
  Append = 'a',
  Appends = 'e',
  EmptyDict = '}',
  SetItem = 's',
  SetItems = 'u',
  Global = 'c',
  StackGlobal = 0x93,
  Reduce = 'R',
  NewObj = 0x81,
  Build = 'b',
  BinPersId = 'Q',
  BinPut = 'q',
  LongBinPut = 'r',
  Memoize = 0x94,
  BinGet = 'h',
  LongBinGet = 'j',
};

// What bytes are in protocol 2, and what none are.
inline constexpr std::string_view kEncode = "_codecs encode",
                                  kBytes = "__builtin__ bytes";

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CHECKPOINT_PICKLEOPS_H
