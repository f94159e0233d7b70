//===- ShmSegment.cpp - layout and mapping of the shared segment ----------===//
#include "fsdp/Runtime/ShmSegment.h"
#include "fsdp/Runtime/Error.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <new>
#include <set>

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace fsdp::runtime {

static_assert(std::atomic<uint32_t>::is_always_lock_free);
static_assert(std::atomic<int64_t>::is_always_lock_free);

namespace {

/// ATen's own alignment of tensors.
constexpr size_t kTensorAlign = 64;
constexpr size_t kPage = 4096;

size_t alignTo(size_t value, size_t align) {
  return (value + align - 1) / align * align;
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

SegmentLayout::SegmentLayout(const plan::Plan &plan)
    : worldSize(plan.worldSize), params(plan.params.size()),
      masters(plan.params.size()), grads(plan.params.size()),
      shardGrads(plan.params.size()), reducedInPlace(plan.params.size()),
      reductionOf(plan.params.size(), -1), dedicated(plan.params.size()),
      kept(plan.params.size()) {
  paramsBegin = alignTo(alignTo(sizeof(SegmentHeader), kTensorAlign) +
                            size_t(worldSize) * sizeof(RankState),
                        kPage);
  size_t end = 0;
  for (const plan::Unit &unit : plan.units) {
    end = alignTo(end, kPage);
    for (int32_t param : unit.params) {
      end = alignTo(end, kTensorAlign);
      masters[param] = params[param] = end;
      end += size_t(plan.params[param].spec.numBytes());
      if (!plan.params[param].computeDtype && !unit.cpuOffload)
        continue;
      end = alignTo(end, kTensorAlign);
      params[param] = end;
      end += size_t(plan.params[param].computeSpec().numBytes());
    }
  }
  replicaBytes = alignTo(end, kPage);
  end = placeKept(plan, paramsBegin + size_t(plan.replicas) * replicaBytes);
  bool reducesVectors = std::any_of(
      plan.instructions.begin(), plan.instructions.end(), [](const auto &i) {
        return std::holds_alternative<plan::ClipGradNorm>(i.kind) ||
               std::holds_alternative<plan::Unscale>(i.kind);
      });
  if (reducesVectors && worldSize > 1) {
    vectorsBegin = alignTo(end, kTensorAlign);
    vectorBytes = alignTo(plan.params.size() * sizeof(double), kTensorAlign);
    end = vectorsBegin + 2 * size_t(worldSize) * vectorBytes;
  }
  areasBegin = alignTo(end, kPage);

  std::vector<const plan::ReduceScatter *> reductions;
  for (const plan::Instruction &instruction : plan.instructions)
    if (const auto *reduce =
            std::get_if<plan::ReduceScatter>(&instruction.kind)) {
      for (int32_t param : reduce->params)
        reductionOf[param] = int32_t(reductions.size());
      reductions.push_back(reduce);
    }
  reductionsPerStep = int32_t(reductions.size());
  if (plan.shards() > 1) {
    int32_t issued = 0;
    for (const plan::Instruction &instruction : plan.instructions) {
      if (std::holds_alternative<plan::ReduceScatter>(instruction.kind))
        ++issued;
      const auto *call = std::get_if<plan::Call>(&instruction.kind);
      if (call && call->reduceInputOf >= 0)
        dedicated[call->reduceInputOf] =
            reductionOf[call->reduceInputOf] > issued + 1;
    }

    std::vector<size_t> gradBytes(plan.params.size());
    for (const plan::ReduceScatter *reduce : reductions)
      for (size_t i = 0; i < reduce->params.size(); ++i)
        gradBytes[reduce->params[i]] =
            size_t(plan.values[reduce->ins[i]].numBytes());
    std::vector<size_t> sizes;
    for (const plan::ReduceScatter *reduce : reductions) {
      size_t size = 0;
      for (int32_t param : reduce->params) {
        if (dedicated[param])
          continue;
        grads[param] = size;
        size = alignTo(size + gradBytes[param], kTensorAlign);
      }
      sizes.push_back(size);
    }
    size_t shared = 0;
    for (size_t j = 0; j < sizes.size(); ++j)
      shared = std::max(shared, sizes[j] + (j ? sizes[j - 1] : 0));
    areaBytes = shared;
    for (size_t j = 0; j < sizes.size(); ++j)
      for (int32_t param : reductions[j]->params) {
        if (dedicated[param]) {
          grads[param] = areaBytes;
          areaBytes = alignTo(areaBytes + gradBytes[param], kTensorAlign);
        } else if (j % 2) {
          grads[param] += shared - sizes[j];
        }
      }
  }
  std::set<plan::ValueId> reduced;
  for (const plan::ReduceScatter *reduce : reductions)
    reduced.insert(reduce->outs.begin(), reduce->outs.end());
  for (const plan::Instruction &instruction : plan.instructions)
    if (const auto *reduce = std::get_if<plan::AllReduce>(&instruction.kind))
      for (size_t i = 0; i < reduce->params.size(); ++i) {
        int32_t param = reduce->params[i];
        reducedInPlace[param] = reduced.contains(reduce->ins[i]);
        shardGrads[param] = areaBytes;
        // Rank 0 has the largest shard.
        plan::TensorSpec spec = plan::shardSpec(plan, param, 0);
        spec.dtype = plan.values[reduce->ins[i]].dtype;
        areaBytes = alignTo(areaBytes + size_t(spec.numBytes()), kTensorAlign);
      }
  areaBytes = alignTo(areaBytes, kPage);
  totalBytes = areasBegin + size_t(worldSize) * areaBytes;
}

size_t SegmentLayout::placeKept(const plan::Plan &plan, size_t end) {
  for (const plan::Instruction &instruction : plan.instructions) {
    const auto *reshard = std::get_if<plan::Reshard>(&instruction.kind);
    if (!reshard || reshard->keep == 0)
      continue;
    for (int32_t param : plan.units[reshard->unit].params) {
      if (kept[param].group != 0)
        continue;
      end = alignTo(end, kTensorAlign);
      kept[param] = {
          reshard->keep, end,
          alignTo(size_t(plan.params[param].computeSpec().numBytes()),
                  kTensorAlign)};
      end += size_t(worldSize / reshard->keep) * kept[param].stride;
    }
  }
  return end;
}

ShmSegment::ShmSegment(const plan::Plan &plan) : offsets(plan) {
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
    : offsets(plan) {
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
      base + alignTo(sizeof(SegmentHeader), kTensorAlign))[rank];
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
