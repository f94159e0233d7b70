//===- Files.h - what a run reads and writes ------------------------------===//
#ifndef FSDP_RUNTIME_FILES_FILES_H
#define FSDP_RUNTIME_FILES_FILES_H

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace fsdp::runtime {

/// The bytes of a file. Throws InputError.
std::string readFile(const std::string &path);

/// Creates a folder, and its parents, unless it exists and is empty. Throws
/// InputError.
void makeEmptyFolder(const std::string &path);

/// A file that is written whole or not at all. What is written goes to a new
/// file in the same folder, which replaces `path` at commit(); the old file
/// stays until then, and for good if there is no commit. A link at `path` is
/// replaced, and not followed.
///
/// Until the commit the new file has no name, if the file system supports that,
/// so that nothing is left behind however the process ends. Otherwise it has a
/// name that nobody can guess, which the destructor removes. Survives fork: one
/// process may own the file and another commit it.
class OutputFile {
public:
  /// Throws InputError that names `path` if nothing can be written there, or
  /// something other than a regular file or a link is there.
  explicit OutputFile(std::string path);
  OutputFile(const OutputFile &) = delete;
  OutputFile &operator=(const OutputFile &) = delete;
  ~OutputFile();

  const std::string &path() const { return target; }
  /// Throw RunError that names `path`, and say why.
  void write(std::string_view bytes);
  void commit();

private:
  [[noreturn]] void fail(const char *action) const;

  std::string target;
  std::string temporary; ///< empty: the new file has no name
  int fd = -1;
};

/// A file that grows by whole lines. A link is followed only if its target is
/// not a regular file (/dev/stdout); otherwise the link is replaced.
class LineFile {
public:
  /// Truncates the file to its first `kept` bytes, if it is a regular one, and
  /// continues after them. Throws InputError.
  explicit LineFile(std::string path, size_t kept = 0);
  LineFile(const LineFile &) = delete;
  LineFile &operator=(const LineFile &) = delete;
  ~LineFile();

  /// Appends `line`, which ends with a newline where the file is text, or
  /// leaves a regular file as it was and throws RunError.
  void append(std::string_view line);

private:
  std::string path;
  int fd = -1;
  int64_t bytes = 0;
  bool regular = false;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_FILES_FILES_H
