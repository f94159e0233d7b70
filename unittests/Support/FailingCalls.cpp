//===- FailingCalls.cpp - system calls that fail, for LD_PRELOAD ----------===//
//
// FAILING_CALL=call:error:time:path lets the time-th `call` on a path that has
// the text `path` fail, once in each process. `error` is a name of errno; or
// SHORT: pwrite writes a part; or VANISH: the folder of the file is removed
// first.
//
//===----------------------------------------------------------------------===//
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>

#include <dlfcn.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

namespace {

/// To be returned in place of the call's own result.
enum class Fate { Call, Fail, Short };

struct Plan {
  std::string call, error, path;
  int time = 0;

  Plan() {
    const char *text = std::getenv("FAILING_CALL");
    char fields[3][64] = {};
    if (text && std::sscanf(text, "%63[^:]:%63[^:]:%d:%63s", fields[0],
                            fields[1], &time, fields[2]) == 4) {
      call = fields[0];
      error = fields[1];
      path = fields[2];
    }
  }
};

int numberOf(const std::string &error) {
  static const std::map<std::string, int> numbers = {
      {"ENOSPC", ENOSPC}, {"EDQUOT", EDQUOT}, {"EIO", EIO},    {"EINTR", EINTR},
      {"EINVAL", EINVAL}, {"ENOSYS", ENOSYS}, {"EROFS", EROFS}};
  return numbers.at(error);
}

Fate fateOf(const char *call, const std::string &path) {
  static const Plan plan;
  static std::atomic<int> times = 0;
  if (plan.call != call || path.find(plan.path) == std::string::npos ||
      ++times != plan.time)
    return Fate::Call;
  if (plan.error == "SHORT")
    return Fate::Short;
  if (plan.error == "VANISH") {
    std::error_code ignored;
    std::filesystem::remove_all(std::filesystem::path(path).parent_path(),
                                ignored);
    return Fate::Call;
  }
  errno = numberOf(plan.error);
  return Fate::Fail;
}

std::string pathOf(int fd) {
  char path[4096];
  std::string link = "/proc/self/fd/" + std::to_string(fd);
  ssize_t length = readlink(link.c_str(), path, sizeof(path));
  return length < 0 ? "" : std::string(path, size_t(length));
}

template <typename FunctionT> FunctionT *next(const char *name) {
  return reinterpret_cast<FunctionT *>(dlsym(RTLD_NEXT, name));
}

ssize_t pwriteOnce(int fd, const void *data, size_t size, off64_t at) {
  static auto *real =
      next<ssize_t(int, const void *, size_t, off64_t)>("pwrite64");
  Fate fate = fateOf("pwrite", pathOf(fd));
  if (fate == Fate::Fail)
    return -1;
  return real(fd, data, fate == Fate::Short ? size / 2 : size, at);
}

} // namespace

extern "C" {

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
  return pwriteOnce(fd, data, size, at);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
  return pwriteOnce(fd, data, size, at);
}

int fsync(int fd) {
  static auto *real = next<int(int)>("fsync");
  return fateOf("fsync", pathOf(fd)) == Fate::Fail ? -1 : real(fd);
}

int close(int fd) {
  static auto *real = next<int(int)>("close");
  Fate fate = fateOf("close", pathOf(fd));
  int error = errno, result = real(fd);
  if (fate != Fate::Fail)
    return result;
  errno = error;
  return -1;
}

int mkdir(const char *path, mode_t mode) {
  static auto *real = next<int(const char *, mode_t)>("mkdir");
  return fateOf("mkdir", path) == Fate::Fail ? -1 : real(path, mode);
}

int renameat2(int fromFolder, const char *from, int toFolder, const char *to,
              unsigned flags) {
  static auto *real =
      next<int(int, const char *, int, const char *, unsigned)>("renameat2");
  return fateOf("renameat2", to) == Fate::Fail
             ? -1
             : real(fromFolder, from, toFolder, to, flags);
}

} // extern "C"
