//===- Agreement.cpp - what ranks tell each other between steps -----------===//
#include "fsdp/Runtime/Launch/Agreement.h"
#include "fsdp/Runtime/Collectives/GlooTransport.h"
#include "fsdp/Runtime/Error.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>

#include <cerrno>
#include <cstring>
#include <numeric>
#include <string>

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace fsdp::runtime {

using std::chrono::milliseconds;

namespace {

constexpr const char *kExpected = "; expected as many batches on every rank";

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

/// Over memory that the ranks share.
class SharedAgreement : public Agreement {
public:
  SharedAgreement(Rendezvous &rendezvous, milliseconds deadline);
  SharedAgreement(const SharedAgreement &) = delete;
  SharedAgreement &operator=(const SharedAgreement &) = delete;
  ~SharedAgreement() override;

  std::vector<uint64_t> exchange(uint64_t own) override;

private:
  /// One rank's line. A word of round n is written once all ranks have come to
  /// round n - 1, so everybody has read the word of round n - 2, which was in
  /// its place.
  struct Member {
    std::atomic<int32_t> pid{0};
    Counter rounds;
    uint64_t words[2] = {};
  };
  Member *member(int64_t rank) const {
    return static_cast<Member *>(memory) + rank;
  }

  const int64_t ownRank;
  const int64_t ranks;
  const milliseconds deadline;
  int memoryFd = -1;
  void *memory = nullptr;
  uint32_t rounds = 0;
};

SharedAgreement::SharedAgreement(Rendezvous &rendezvous, milliseconds deadline)
    : ownRank(rendezvous.rank()), ranks(rendezvous.worldSize()),
      deadline(deadline) {
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

SharedAgreement::~SharedAgreement() {
  if (memory)
    munmap(memory, size_t(ranks) * sizeof(Member));
  if (memoryFd >= 0)
    close(memoryFd);
}

std::vector<uint64_t> SharedAgreement::exchange(uint64_t own) {
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
      // What a rank did before it ended still counts.
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
                       std::to_string(deadline.count() / 1000) + " s" +
                       kExpected);
    }
  std::vector<uint64_t> words;
  for (int64_t rank = 0; rank < ranks; ++rank)
    words.push_back(member(rank)->words[round % 2]);
  return words;
}

/// Over the network.
class GlooAgreement : public Agreement {
public:
  GlooAgreement(Rendezvous &rendezvous, milliseconds deadline)
      : transport(makeGlooTransport(rendezvous.connectStore(),
                                    rendezvous.rank(), rendezvous.worldSize(),
                                    deadline)) {
    std::vector<int64_t> ranks(size_t(rendezvous.worldSize()));
    std::iota(ranks.begin(), ranks.end(), 0);
    try {
      everybody = transport->connect("agreement", ranks);
    } catch (const AbortedError &) {
      throw;
    } catch (const std::exception &error) {
      transport->fail(error.what());
      throw;
    }
  }

  std::vector<uint64_t> exchange(uint64_t own) override {
    int64_t ranks = everybody->size();
    at::Tensor mine = at::scalar_tensor(int64_t(own), at::kLong).view({1});
    at::Tensor all = at::empty({ranks}, at::kLong);
    all[everybody->rank()].copy_(mine[0]);
    std::vector<int64_t> begins(size_t(ranks + 1));
    std::iota(begins.begin(), begins.end(), 0);
    if (ranks > 1)
      try {
        everybody->allGather("call of the step", {{all, mine, begins}})();
      } catch (const RunError &error) {
        throw RunError(error.what() + std::string(kExpected));
      }
    const auto *words = all.const_data_ptr<int64_t>();
    return {words, words + ranks};
  }

private:
  /// Of its own, so that a deadline is that of calls and of nothing else.
  std::unique_ptr<Transport> transport;
  std::unique_ptr<Communicator> everybody;
};

} // namespace

std::unique_ptr<Agreement>
makeAgreement(Backend backend, Rendezvous &rendezvous, milliseconds deadline) {
  if (backend == Backend::Shm)
    return std::make_unique<SharedAgreement>(rendezvous, deadline);
  return std::make_unique<GlooAgreement>(rendezvous, deadline);
}

} // namespace fsdp::runtime
