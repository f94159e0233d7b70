//===- CheckpointFolder.cpp - the folder of a run's checkpoints -----------===//
#include "fsdp/Runtime/Checkpoint/CheckpointFolder.h"
#include "fsdp/Runtime/Checkpoint/DurableFile.h"
#include "fsdp/Runtime/Checkpoint/NativeCheckpoint.h"
#include "fsdp/Runtime/Error.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <random>
#include <thread>

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

namespace fsdp::runtime {

namespace {

constexpr std::string_view kInFlight = ".inflight.", kTrash = ".trash.";
constexpr size_t kAttemptDigits = 32;

std::string systemError() { return std::strerror(errno); }

/// Names in a folder but "." and ".."; errno says why there are none.
std::vector<std::string> namesIn(const std::string &path, bool &isThere) {
  std::vector<std::string> names;
  DIR *folder = opendir(path.c_str());
  isThere = folder != nullptr;
  if (!folder)
    return names;
  while (const dirent *entry = readdir(folder))
    if (std::string_view name = entry->d_name; name != "." && name != "..")
      names.emplace_back(name);
  closedir(folder);
  return names;
}

/// Of a save that was killed, or a removal.
bool isLeftover(std::string_view name) {
  for (std::string_view prefix : {kInFlight, kTrash})
    if (name.starts_with(prefix) &&
        name.size() == prefix.size() + kAttemptDigits &&
        name.find_first_not_of("0123456789abcdef", prefix.size()) ==
            std::string_view::npos)
      return true;
  return false;
}

/// Removes a folder of files; false, with errno, where that fails. What others
/// have removed meanwhile is no failure.
bool removeFolder(const std::string &path, Progress *progress) {
  bool isThere = false;
  for (const std::string &name : namesIn(path, isThere)) {
    if (progress)
      progress->reach(SavePoint::Remove);
    if (unlink((path + "/" + name).c_str()) != 0 && errno != ENOENT)
      return false;
  }
  return rmdir(path.c_str()) == 0 || errno == ENOENT;
}

} // namespace

std::unique_ptr<NativeCheckpoint>
openNewest(const CheckpointFolder &folder,
           const std::function<void(const std::string &)> &skipped,
           const std::function<void(const NativeCheckpoint &)> &check) {
  std::vector<int64_t> steps = folder.steps();
  for (auto step = steps.rbegin(); step != steps.rend(); ++step)
    try {
      auto checkpoint =
          std::make_unique<NativeCheckpoint>(folder.pathOf(*step));
      check(*checkpoint);
      return checkpoint;
    } catch (const InputError &error) {
      skipped(error.what());
    }
  return nullptr;
}

std::string newAttempt() {
  std::random_device random;
  char digits[kAttemptDigits + 1];
  std::snprintf(digits, sizeof(digits), "%08x%08x%08x%08x", random(), random(),
                random(), random());
  return digits;
}

CheckpointFolder::~CheckpointFolder() {
  if (fd >= 0)
    close(fd);
}

std::string CheckpointFolder::pathOf(int64_t step) const {
  return path + "/step-" + std::to_string(step);
}

std::vector<int64_t> CheckpointFolder::steps() const {
  constexpr std::string_view kPrefix = "step-";
  bool isThere = false;
  std::vector<std::string> names = namesIn(path, isThere);
  if (!isThere && errno != ENOENT)
    throw InputError(
        path + ": cannot read the folder of checkpoints: " + systemError());
  std::vector<int64_t> steps;
  for (const std::string &name : names) {
    if (!name.starts_with(kPrefix))
      continue;
    int64_t step = 0;
    const char *begin = name.data() + kPrefix.size(),
               *end = name.data() + name.size();
    auto [last, error] = std::from_chars(begin, end, step);
    // As pathOf writes it: no sign, no zeros before it.
    if (error == std::errc() && last == end &&
        name == "step-" + std::to_string(step) && step >= 0)
      steps.push_back(step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

void CheckpointFolder::open(std::chrono::milliseconds patience) {
  namespace fs = std::filesystem;
  if (fd >= 0)
    return;
  // Each folder that is made is durable by its parent.
  std::vector<fs::path> missing;
  std::error_code error;
  for (fs::path part = fs::absolute(path).lexically_normal();
       !fs::exists(part, error) && part.has_relative_path();
       part = part.parent_path())
    missing.push_back(part);
  for (auto part = missing.rbegin(); part != missing.rend(); ++part) {
    if (mkdir(part->c_str(), 0777) != 0 && errno != EEXIST)
      throw InputError(
          part->string() +
          ": cannot make the folder of checkpoints: " + systemError());
    syncFolder(part->parent_path().string());
  }
  int opened = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (opened < 0 || access(path.c_str(), W_OK | X_OK) != 0) {
    std::string why = systemError();
    close(opened);
    throw InputError(path + ": cannot write checkpoints there: " + why);
  }
  auto end = std::chrono::steady_clock::now() + patience;
  while (flock(opened, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR)
      break; // a file system without locks
    if (std::chrono::steady_clock::now() > end) {
      close(opened);
      throw InputError(path + ": another run writes its checkpoints there");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  fd = opened;
}

void CheckpointFolder::removeLeftovers() {
  bool isThere = false;
  for (const std::string &name : namesIn(path, isThere))
    if (isLeftover(name) && !removeFolder(path + "/" + name, nullptr))
      throw RunError(
          path + "/" + name +
          ": cannot remove what a killed save has left: " + systemError());
}

std::string CheckpointFolder::begin(const std::string &attempt,
                                    uint64_t bytes) {
  removeLeftovers();
  struct statvfs info{};
  if (statvfs(path.c_str(), &info) != 0)
    throw RunError(path + ": cannot write checkpoints there: " + systemError());
  // 0 blocks: of file systems that do not say.
  auto room = __uint128_t(info.f_bavail) * info.f_frsize;
  if (info.f_blocks > 0 && room < bytes)
    throw RunError(path + ": expected room for " + std::to_string(bytes) +
                   " bytes, got " + std::to_string(uint64_t(room)));
  std::string folder = inFlight(attempt);
  if (mkdir(folder.c_str(), 0777) != 0)
    throw RunError(folder + ": cannot make a folder: " + systemError());
  return folder;
}

std::string CheckpointFolder::discard(int64_t step) {
  std::string trash = path + "/" + std::string(kTrash) + newAttempt();
  if (rename(pathOf(step).c_str(), trash.c_str()) != 0)
    throw RunError(pathOf(step) + ": cannot remove: " + systemError());
  return trash;
}

void CheckpointFolder::commit(const std::string &attempt, int64_t step,
                              Progress &progress) {
  std::string from = inFlight(attempt), to = pathOf(step);
  std::string replaced;
  if (damaged.erase(step) > 0 && access(to.c_str(), F_OK) == 0)
    replaced = discard(step);
  progress.reach(SavePoint::Commit);
  int failed =
      renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE);
  // Where the file system has no such rename: one that replaces an empty folder
  // at most, and no checkpoint.
  if (failed && (errno == EINVAL || errno == ENOSYS))
    failed = rename(from.c_str(), to.c_str());
  if (failed)
    throw RunError(to + ": cannot make the checkpoint: " + systemError());
  progress.reach(SavePoint::SyncParent);
  try {
    syncFolder(path);
  } catch (const RunError &) {
    // A save that has failed is not there.
    rename(to.c_str(), from.c_str());
    throw;
  }
  if (!replaced.empty())
    removeFolder(replaced, nullptr);
}

void CheckpointFolder::abandon(const std::string &attempt) {
  removeFolder(inFlight(attempt), nullptr);
}

void CheckpointFolder::retire(int64_t keep, int64_t saved, Progress &progress) {
  std::vector<int64_t> all = steps();
  int64_t whole = 1; // `saved`
  std::vector<std::string> trash;
  for (auto step = all.rbegin(); step != all.rend(); ++step) {
    if (*step == saved)
      continue;
    if (whole < keep) {
      whole += !damaged.contains(*step) &&
               NativeCheckpoint::looksWhole(pathOf(*step));
      continue;
    }
    progress.reach(SavePoint::Retire);
    trash.push_back(discard(*step));
  }
  if (trash.empty())
    return;
  // Else a crash could bring back a name without all of its files.
  syncFolder(path);
  for (const std::string &folder : trash)
    if (!removeFolder(folder, &progress))
      throw RunError(folder + ": cannot remove: " + systemError());
}

} // namespace fsdp::runtime
