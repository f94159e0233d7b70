//===- Files.h - whole files, read and written ----------------------------===//
#ifndef FSDP_SUPPORT_FILES_H
#define FSDP_SUPPORT_FILES_H

#include <cstdint>
#include <string>
#include <string_view>

namespace fsdp {

/// Seconds that readFile() waits for a first writer of a pipe.
inline constexpr int kPipeWaitSeconds = 5;

/// Reads all bytes of a file into `text`. Returns what went wrong, without the
/// path ("cannot be read: No such file or directory"), or nothing: a folder,
/// more than `maxBytes`, or a pipe that nobody has opened for writing after
/// `waitSeconds` are errors too.
[[nodiscard]] std::string readFile(const std::string &path, uint64_t maxBytes,
                                   std::string &text,
                                   int waitSeconds = kPipeWaitSeconds);

/// Writes a file whole or not at all: it writes to a temporary file beside it,
/// which then takes its name. So on an error the previous file is unchanged,
/// and no temporary file is left. A pipe or a device is written to directly.
/// Returns what went wrong, without the path, or nothing.
[[nodiscard]] std::string writeFile(const std::string &path,
                                    std::string_view text);

} // namespace fsdp

#endif // FSDP_SUPPORT_FILES_H
