//===- Format.cpp - bytes and seconds for people --------------------------===//
#include "fsdp/Simulate/Format.h"

#include "llvm/Support/Format.h"
#include "llvm/Support/raw_ostream.h"

namespace fsdp::simulate {

std::string formatBytes(int64_t bytes) {
  std::string text;
  llvm::raw_string_ostream os(text);
  if (bytes >= int64_t{1} << 30)
    os << llvm::format("%.2f GiB", double(bytes) / double(1 << 30));
  else if (bytes >= 1 << 20)
    os << llvm::format("%.2f MiB", double(bytes) / double(1 << 20));
  else if (bytes >= 1 << 10)
    os << llvm::format("%.2f KiB", double(bytes) / double(1 << 10));
  else
    os << bytes << " B";
  return text;
}

std::string formatMilliseconds(double seconds) {
  std::string text;
  llvm::raw_string_ostream(text) << llvm::format("%.3f ms", seconds * 1e3);
  return text;
}

} // namespace fsdp::simulate
