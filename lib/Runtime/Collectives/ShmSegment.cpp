//===- ShmSegment.cpp - layout and mapping of the shared segment ----------===//
#include "fsdp/Runtime/Collectives/ShmSegment.h"
#include "fsdp/Runtime/Error.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <new>

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace fsdp::runtime {

static_assert(std::atomic<uint32_t>::is_always_lock_free);
static_assert(std::atomic<int64_t>::is_always_lock_free);

namespace {

/// What precedes the parameters: the header and the ranks' states.
size_t headerBytes(const plan::Plan &plan) {
  return plan::alignTo(sizeof(SegmentHeader)) +
         size_t(plan.worldSize) * sizeof(RankState);
}

long futex(std::atomic<uint32_t> *word, int operation, uint32_t value,
           const timespec *timeout) {
  return syscall(SYS_futex, word, operation, value, timeout, nullptr, 0);
}

} // namespace

void Counter::publish(uint32_t to) {
  value.store(to);
  if (waiters.load() != 0)
    futex(&value, FUTEX_WAKE, INT_MAX, nullptr);
}

bool Counter::waitSlice(uint32_t target) {
  waiters.fetch_add(1);
  uint32_t seen = value.load();
  if (int32_t(seen - target) < 0) {
    timespec slice{0, 50'000'000};
    futex(&value, FUTEX_WAIT, seen, &slice);
  }
  waiters.fetch_sub(1);
  return reached(target);
}

ShmSegment::ShmSegment(const plan::Plan &plan)
    : offsets(plan, headerBytes(plan)) {
  memoryFd = memfd_create("fsdp-run", MFD_CLOEXEC);
  if (memoryFd < 0 || ftruncate(memoryFd, off_t(offsets.totalBytes)) != 0) {
    std::string reason = std::strerror(errno);
    if (memoryFd >= 0)
      close(memoryFd);
    throw RunError("cannot create " + std::to_string(offsets.totalBytes) +
                   " bytes of shared memory: " + reason);
  }
  map();
  new (base) SegmentHeader();
  for (int64_t rank = 0; rank < offsets.worldSize; ++rank)
    new (&state(rank)) RankState();
}

ShmSegment::ShmSegment(const plan::Plan &plan, const std::string &path)
    : offsets(plan, headerBytes(plan)) {
  memoryFd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (memoryFd < 0)
    throw RunError("cannot open the shared memory of rank 0 at \"" + path +
                   "\": " + std::strerror(errno));
  auto size = lseek(memoryFd, 0, SEEK_END);
  if (size != off_t(offsets.totalBytes)) {
    close(memoryFd);
    throw InputError("expected " + std::to_string(offsets.totalBytes) +
                     " bytes of shared memory, got " + std::to_string(size) +
                     "; do all ranks run the same plan?");
  }
  map();
}

void ShmSegment::map() {
  void *mapped = mmap(nullptr, offsets.totalBytes, PROT_READ | PROT_WRITE,
                      MAP_SHARED, memoryFd, 0);
  if (mapped == MAP_FAILED) {
    std::string reason = std::strerror(errno);
    close(memoryFd);
    throw RunError("cannot map " + std::to_string(offsets.totalBytes) +
                   " bytes of shared memory: " + reason);
  }
  base = static_cast<std::byte *>(mapped);
  parameters = base + offsets.paramsBegin;
}

void ShmSegment::useParametersOf(const ShmSegment &other) {
  if (other.offsets.params != offsets.params ||
      other.offsets.masters != offsets.masters ||
      other.offsets.replicaBytes != offsets.replicaBytes ||
      other.offsets.worldSize != offsets.worldSize)
    throw InputError("expected a plan with the same parameters in the same "
                     "units, got a different one");
  parameters = other.parameters;
}

ShmSegment::~ShmSegment() {
  munmap(base, offsets.totalBytes);
  close(memoryFd);
}

SegmentHeader &ShmSegment::header() const {
  return *std::launder(reinterpret_cast<SegmentHeader *>(base));
}

RankState &ShmSegment::state(int64_t rank) const {
  return reinterpret_cast<RankState *>(
      base + plan::alignTo(sizeof(SegmentHeader)))[rank];
}

void ShmSegment::fail(int64_t rank, const std::string &message) const {
  RankState &own = state(rank);
  size_t length = std::min(message.size(), sizeof(own.failure) - 1);
  std::memcpy(own.failure, message.data(), length);
  own.failure[length] = '\0';
  int32_t nobody = -1;
  header().failedRank.compare_exchange_strong(nobody, int32_t(rank));
  abort();
}

} // namespace fsdp::runtime
