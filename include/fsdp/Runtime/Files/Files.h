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

/// Makes a folder, with those that it is in, unless it is there and empty.
/// Throws InputError.
void makeEmptyFolder(const std::string &path);

/// A file that is there whole or not at all. What is written goes to a new one
/// in the same folder, which takes the place of `path` at commit(); what was
/// there stays until then, and for good where there is no commit. A link at
/// `path` is replaced, and not followed.
///
/// Until the commit the new file has no name where the file system can do that,
/// so that nothing stays behind however the process ends. Else it has one that
/// nobody can guess, which the destructor removes. Survives fork: one process
/// commits, another may own.
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

/// A file that grows by whole lines. What a link leads to is written only if it
/// is no regular file (/dev/stdout); else the link is replaced.
class LineFile {
public:
  /// Begins the file anew, behind its first `kept` bytes if it is a regular
  /// one. Throws InputError.
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
