//===- Format.h - bytes and seconds for people ----------------------------===//
#ifndef FSDP_SIMULATE_FORMAT_H
#define FSDP_SIMULATE_FORMAT_H

#include <cstdint>
#include <string>

namespace fsdp::simulate {

/// "1.50 MiB".
std::string formatBytes(int64_t bytes);
/// "1.234 ms".
std::string formatMilliseconds(double seconds);

} // namespace fsdp::simulate

#endif // FSDP_SIMULATE_FORMAT_H
