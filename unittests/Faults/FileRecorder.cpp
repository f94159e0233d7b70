//===- FileRecorder.cpp - records file operations -------------------------===//
//
// A library for LD_PRELOAD. Of the operations that change what is below the
// folder FILE_RECORDER_ROOT, in the process and all that it forks, it appends a
// record to the file FILE_RECORDER_LOG once the operation is done.
// test/faults/crash_states.py reads them and documents the form.
//
// It knows the calls of libc that a plain POSIX program makes; io_uring, mmap
// and raw system calls pass it by.
//
//===----------------------------------------------------------------------===//
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include <climits>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

namespace {

template <typename FunctionT> FunctionT *real(const char *name) {
  return reinterpret_cast<FunctionT *>(dlsym(RTLD_NEXT, name));
}
// NOLINTBEGIN: one definition a name
#define REAL(NAME) static auto *const call = real<decltype(::NAME)>(#NAME)
// NOLINTEND

/// What the environment says, read when the library is loaded.
struct Settings {
  Settings() {
    if (const char *text = getenv("FILE_RECORDER_ROOT")) {
      char resolved[PATH_MAX];
      root = realpath(text, resolved) ? resolved : text;
    }
    if (const char *text = getenv("FILE_RECORDER_LOG")) {
      REAL(open);
      log = call(text, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
      if (log >= 0) {
        // Out of the way of programs that close or count theirs.
        int high = fcntl(log, F_DUPFD_CLOEXEC, 900);
        if (high >= 0) {
          close(log);
          log = high;
        }
      }
    }
  }

  std::string root; ///< empty: nothing is watched
  int log = -1;
};

Settings &settings() {
  // Never destroyed: files are closed until the very end.
  static auto &only = *new Settings;
  return only;
}

bool below(std::string_view path) {
  const std::string &root = settings().root;
  return !root.empty() && path.starts_with(root) &&
         (path.size() == root.size() || path[root.size()] == '/');
}

/// Where a descriptor leads, empty where that is not known.
std::string pathOf(int fd) {
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof(path));
  return length > 0 ? std::string(path, size_t(length)) : std::string();
}

/// A name in a folder, the folder resolved.
struct Place {
  std::string folder, name;
  std::string path() const { return folder + "/" + name; }
};

Place placeOf(int at, const char *path) {
  std::string text = path;
  if (text.empty() || text[0] != '/') {
    char cwd[PATH_MAX];
    std::string base =
        at == AT_FDCWD ? (getcwd(cwd, sizeof(cwd)) ? cwd : "") : pathOf(at);
    text = base + "/" + text;
  }
  while (text.size() > 1 && text.ends_with('/'))
    text.pop_back();
  size_t slash = text.rfind('/');
  std::string folder = slash == 0 ? "/" : text.substr(0, slash);
  char resolved[PATH_MAX];
  if (realpath(folder.c_str(), resolved))
    folder = resolved;
  return {folder, text.substr(slash + 1)};
}

uint64_t inodeOf(const std::string &path) {
  struct stat status{};
  return lstat(path.c_str(), &status) == 0 ? status.st_ino : 0;
}
uint64_t inodeOf(int fd) {
  struct stat status{};
  return fstat(fd, &status) == 0 ? status.st_ino : 0;
}

std::string quoted(const std::string &text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\')
      out += '\\';
    if (static_cast<unsigned char>(c) >= 0x20)
      out += c;
  }
  return out + "\"";
}

/// Appends a line of JSON and `bytes` behind it, in one call, so that records
/// of several processes do not mix.
void record(const std::string &fields, std::string_view bytes = {}) {
  int log = settings().log;
  if (log < 0)
    return;
  int saved = errno;
  std::string line = "{" + fields + ", \"pid\": " + std::to_string(getpid()) +
                     ", \"bytes\": " + std::to_string(bytes.size()) + "}\n";
  iovec parts[2] = {{line.data(), line.size()},
                    {const_cast<char *>(bytes.data()), bytes.size()}};
  REAL(writev);
  if (call(log, parts, 2) != ssize_t(line.size() + bytes.size()))
    abort();
  errno = saved;
}

std::string field(const char *name, uint64_t value) {
  return std::string("\"") + name + "\": " + std::to_string(value);
}
std::string place(const char *folder, const char *name, const Place &at) {
  return field(folder, inodeOf(at.folder)) + ", \"" + name +
         "\": " + quoted(at.name);
}

bool watched(int fd) {
  return !settings().root.empty() && fd != settings().log && below(pathOf(fd));
}

/// `run` opens; what it creates or cuts is recorded.
template <typename RunT>
int openAt(int at, const char *path, int flags, RunT run) {
  bool changes = (flags & (O_CREAT | O_TRUNC)) != 0;
  if (settings().root.empty() || !path || !changes)
    return run();
  Place file = placeOf(at, path);
  bool unnamed = (flags & O_TMPFILE) == O_TMPFILE;
  if (!below(unnamed ? file.path() : file.folder))
    return run();
  uint64_t before = unnamed ? 0 : inodeOf(file.path());
  int fd = run();
  if (fd < 0)
    return fd;
  if (unnamed)
    record("\"op\": \"unnamed\", " + field("inode", inodeOf(fd)));
  else if (!before)
    record("\"op\": \"create\", " + place("folder", "name", file) + ", " +
           field("inode", inodeOf(fd)));
  else if (flags & O_TRUNC)
    record("\"op\": \"truncate\", " + field("inode", before) + ", " +
           field("size", 0));
  return fd;
}

void recordWrite(int fd, off_t offset, const void *data, ssize_t count) {
  if (count > 0)
    record("\"op\": \"write\", " + field("inode", inodeOf(fd)) + ", " +
               field("offset", uint64_t(offset)),
           {static_cast<const char *>(data), size_t(count)});
}

template <typename RunT> int syncFile(int fd, RunT run) {
  if (!watched(fd))
    return run();
  int result = run();
  if (result == 0)
    record("\"op\": \"fsync\", " + field("inode", inodeOf(fd)));
  return result;
}

template <typename RunT>
int renameAt(int from, const char *old, int to, const char *path, RunT run) {
  Place source = placeOf(from, old), target = placeOf(to, path);
  if (!below(source.folder) && !below(target.folder))
    return run();
  uint64_t inode = inodeOf(source.path());
  int result = run();
  if (result == 0)
    record("\"op\": \"rename\", " + place("folder", "name", source) + ", " +
           place("to_folder", "to_name", target) + ", " +
           field("inode", inode));
  return result;
}

/// Of a call that makes or removes the name `path`.
template <typename RunT>
int nameAt(const char *op, int at, const char *path, RunT run) {
  if (settings().root.empty())
    return run();
  Place file = placeOf(at, path);
  if (!below(file.folder))
    return run();
  uint64_t before = inodeOf(file.path());
  int result = run();
  if (result == 0)
    record(std::string("\"op\": \"") + op + "\", " +
           place("folder", "name", file) + ", " +
           field("inode", before ? before : inodeOf(file.path())));
  return result;
}

template <typename RunT> int cut(int fd, off_t size, RunT run) {
  if (!watched(fd))
    return run();
  int result = run();
  if (result == 0)
    record("\"op\": \"truncate\", " + field("inode", inodeOf(fd)) + ", " +
           field("size", uint64_t(size)));
  return result;
}

mode_t modeOf(int flags, va_list arguments) {
  return flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, mode_t) : 0;
}

} // namespace

extern "C" {

int open(const char *path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  mode_t mode = modeOf(flags, arguments);
  va_end(arguments);
  REAL(open);
  return openAt(AT_FDCWD, path, flags, [&] { return call(path, flags, mode); });
}
int open64(const char *path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  mode_t mode = modeOf(flags, arguments);
  va_end(arguments);
  REAL(open64);
  return openAt(AT_FDCWD, path, flags, [&] { return call(path, flags, mode); });
}
int openat(int at, const char *path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  mode_t mode = modeOf(flags, arguments);
  va_end(arguments);
  REAL(openat);
  return openAt(at, path, flags, [&] { return call(at, path, flags, mode); });
}
int openat64(int at, const char *path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  mode_t mode = modeOf(flags, arguments);
  va_end(arguments);
  REAL(openat64);
  return openAt(at, path, flags, [&] { return call(at, path, flags, mode); });
}
ssize_t write(int fd, const void *data, size_t count) {
  REAL(write);
  if (!watched(fd))
    return call(fd, data, count);
  off_t offset =
      lseek(fd, 0, fcntl(fd, F_GETFL) & O_APPEND ? SEEK_END : SEEK_CUR);
  ssize_t done = call(fd, data, count);
  recordWrite(fd, offset, data, done);
  return done;
}
ssize_t pwrite(int fd, const void *data, size_t count, off_t offset) {
  REAL(pwrite);
  ssize_t done = call(fd, data, count, offset);
  if (watched(fd))
    recordWrite(fd, offset, data, done);
  return done;
}
ssize_t pwrite64(int fd, const void *data, size_t count, off64_t offset) {
  return pwrite(fd, data, count, offset);
}
ssize_t writev(int fd, const iovec *parts, int count) {
  REAL(writev);
  if (!watched(fd))
    return call(fd, parts, count);
  ssize_t total = 0;
  for (int i = 0; i < count; ++i) {
    ssize_t done = write(fd, parts[i].iov_base, parts[i].iov_len);
    if (done < 0)
      return total ? total : done;
    total += done;
    if (size_t(done) < parts[i].iov_len)
      break;
  }
  return total;
}
int ftruncate(int fd, off_t size) noexcept {
  REAL(ftruncate);
  return cut(fd, size, [&] { return call(fd, size); });
}
int ftruncate64(int fd, off64_t size) noexcept { return ftruncate(fd, size); }
int posix_fallocate(int fd, off_t offset, off_t size) {
  REAL(posix_fallocate);
  int error = 0;
  // What is behind the end counts as written: zeros.
  int result = cut(fd, offset + size, [&] {
    error = call(fd, offset, size);
    return error ? -1 : 0;
  });
  return result == 0 ? 0 : (error ? error : errno);
}
int fsync(int fd) {
  REAL(fsync);
  return syncFile(fd, [&] { return call(fd); });
}
int fdatasync(int fd) {
  REAL(fdatasync);
  return syncFile(fd, [&] { return call(fd); });
}
int rename(const char *old, const char *path) noexcept {
  REAL(rename);
  return renameAt(AT_FDCWD, old, AT_FDCWD, path,
                  [&] { return call(old, path); });
}
int renameat(int from, const char *old, int to, const char *path) noexcept {
  REAL(renameat);
  return renameAt(from, old, to, path,
                  [&] { return call(from, old, to, path); });
}
int renameat2(int from, const char *old, int to, const char *path,
              unsigned flags) noexcept {
  REAL(renameat2);
  return renameAt(from, old, to, path,
                  [&] { return call(from, old, to, path, flags); });
}
int mkdir(const char *path, mode_t mode) noexcept {
  REAL(mkdir);
  return nameAt("mkdir", AT_FDCWD, path, [&] { return call(path, mode); });
}
int mkdirat(int at, const char *path, mode_t mode) noexcept {
  REAL(mkdirat);
  return nameAt("mkdir", at, path, [&] { return call(at, path, mode); });
}
int unlink(const char *path) noexcept {
  REAL(unlink);
  return nameAt("unlink", AT_FDCWD, path, [&] { return call(path); });
}
int unlinkat(int at, const char *path, int flags) noexcept {
  REAL(unlinkat);
  return nameAt("unlink", at, path, [&] { return call(at, path, flags); });
}
int remove(const char *path) noexcept {
  REAL(remove);
  return nameAt("unlink", AT_FDCWD, path, [&] { return call(path); });
}
int rmdir(const char *path) noexcept {
  REAL(rmdir);
  return nameAt("unlink", AT_FDCWD, path, [&] { return call(path); });
}
int linkat(int from, const char *old, int to, const char *path,
           int flags) noexcept {
  REAL(linkat);
  return nameAt("link", to, path,
                [&] { return call(from, old, to, path, flags); });
}
int link(const char *old, const char *path) noexcept {
  return linkat(AT_FDCWD, old, AT_FDCWD, path, 0);
}
}
