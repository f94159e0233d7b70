//===- Prefetcher.h - batches read beside the step ------------------------===//
#ifndef FSDP_RUNTIME_FILES_PREFETCHER_H
#define FSDP_RUNTIME_FILES_PREFETCHER_H

#include "fsdp/Runtime/Devices/Device.h"
#include "fsdp/Runtime/Files/FileData.h"

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

namespace fsdp::runtime {

/// A rank's next two batches, which a thread of its own reads while the rank
/// computes. The thread calls nothing of torch and allocates no tensor: it
/// fills host memory of the device's (pinned, if that is a GPU), from which
/// next() makes the tensors. It blocks all signals. Create the Prefetcher after
/// the process was forked.
///
/// Batches that were read but not taken have no effect; neither have their
/// errors.
class Prefetcher {
public:
  /// Borrows data and device. Batches are W b samples apart.
  Prefetcher(const plan::Plan &plan, const FileData &data, int64_t rank,
             Device &device);
  Prefetcher(const Prefetcher &) = delete;
  Prefetcher &operator=(const Prefetcher &) = delete;
  /// Waits for the end of a read.
  ~Prefetcher();

  /// FileData::inputs(first, rank); throws as that does. Waits for the batch if
  /// it is not there yet. A position other than the one after the last discards
  /// what was read ahead. On a GPU the tensors are views, valid until the next
  /// call. One thread may call at a time.
  std::vector<at::Tensor> next(int64_t first);

private:
  struct Slot {
    int64_t first = -1;
    std::exception_ptr error;
    std::span<std::byte> memory;
  };

  void work();

  const FileData &data;
  int64_t rank, stride;
  bool views; ///< next() gives views, which hold their slot
  std::unique_ptr<DeviceMemory> memory;

  std::mutex lock;
  std::condition_variable changed;
  // With the lock held:
  std::array<Slot, 2> slots;
  size_t writes = 0, reads = 0;    ///< slots so far; the next is that modulo 2
  std::optional<int64_t> position; ///< to read next
  uint64_t generation = 0;         ///< of positions that follow each other
  bool held = false;               ///< slot `reads` is given out
  bool stops = false;

  std::thread thread;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_FILES_PREFETCHER_H
