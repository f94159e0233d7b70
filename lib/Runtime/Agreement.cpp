//===- Agreement.cpp - what ranks tell each other between steps -----------===//
#include "fsdp/Runtime/Agreement.h"
#include "fsdp/Runtime/Error.h"

#include <cerrno>
#include <cstring>
#include <string>

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace fsdp::runtime {

namespace {

bool hasEnded(int32_t pid) {
  int fd = int(syscall(SYS_pidfd_open, pid, 0));
  if (fd < 0)
    return errno == ESRCH;
  pollfd query{fd, POLLIN, 0};
  bool ended = poll(&query, 1, 0) > 0;
  close(fd);
  return ended;
}

std::string list(const std::vector<int64_t> &ranks) {
  std::string text = ranks.size() > 1 ? "ranks " : "rank ";
  for (size_t i = 0; i < ranks.size(); ++i)
    text += (i ? ", " : "") + std::to_string(ranks[i]);
  return text;
}

} // namespace

/// One rank's line. A word of round n is written once all have come to n - 1,
/// so that everybody has read that of n - 2, which lay there.
struct Agreement::Member {
  std::atomic<int32_t> pid{0};
  Counter rounds;
  uint64_t words[2] = {};
};

Agreement::Agreement(Rendezvous &rendezvous)
    : ownRank(rendezvous.rank()), ranks(rendezvous.worldSize()) {
  size_t bytes = size_t(ranks) * sizeof(Member);
  auto map = [&](int fd) {
    memoryFd = fd;
    if (fd >= 0)
      memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd < 0 || memory == MAP_FAILED) {
      memory = nullptr;
      throw RunError("cannot share " + std::to_string(bytes) +
                     " bytes of memory: " + std::strerror(errno));
    }
  };
  shareMemory(
      rendezvous,
      [&] {
        int fd = memfd_create("fsdp-agreement", MFD_CLOEXEC);
        if (fd >= 0 && ftruncate(fd, off_t(bytes)) != 0) {
          close(fd);
          fd = -1;
        }
        map(fd);
        for (int64_t rank = 0; rank < ranks; ++rank)
          new (member(rank)) Member();
        return memoryFd;
      },
      [&](const std::string &path) {
        map(open(path.c_str(), O_RDWR | O_CLOEXEC));
      });
  member(ownRank)->pid.store(getpid());
}

Agreement::~Agreement() {
  if (memory)
    munmap(memory, size_t(ranks) * sizeof(Member));
  if (memoryFd >= 0)
    close(memoryFd);
}

Agreement::Member *Agreement::member(int64_t rank) const {
  return static_cast<Member *>(memory) + rank;
}

std::vector<uint64_t> Agreement::exchange(uint64_t own,
                                          std::chrono::milliseconds deadline) {
  uint32_t round = ++rounds;
  member(ownRank)->words[round % 2] = own;
  member(ownRank)->rounds.publish(round);
  auto end = std::chrono::steady_clock::now() + deadline;
  for (int64_t rank = 0; rank < ranks; ++rank)
    while (!member(rank)->rounds.reached(round) &&
           !member(rank)->rounds.waitSlice(round)) {
      std::vector<int64_t> late;
      for (int64_t r = 0; r < ranks; ++r)
        if (!member(r)->rounds.reached(round))
          late.push_back(r);
      // It counts what a rank did before it ended.
      int32_t pid = member(rank)->pid.load();
      if (pid != 0 && hasEnded(pid) && !member(rank)->rounds.reached(round))
        throw RunError("rank " + std::to_string(rank) + " (pid " +
                       std::to_string(pid) + ") ended after " +
                       std::to_string(member(rank)->rounds.value.load()) +
                       " calls of the step, this rank makes call " +
                       std::to_string(round));
      if (!late.empty() && std::chrono::steady_clock::now() > end)
        throw RunError(list(late) + " did not come to call " +
                       std::to_string(round) + " of the step within " +
                       std::to_string(deadline.count() / 1000) +
                       " s; expected as many batches on every rank");
    }
  std::vector<uint64_t> words;
  for (int64_t rank = 0; rank < ranks; ++rank)
    words.push_back(member(rank)->words[round % 2]);
  return words;
}

} // namespace fsdp::runtime
