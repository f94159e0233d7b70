//===- Communicator.h - collectives among a group of ranks ----------------===//
//
// DeviceComm is built on these interfaces; they are the only thing that differs
// between NCCL and Gloo. Tensors are contiguous, on the device of the rank, and
// not empty.
//
// A call begins the collective and returns the wait for it. Where the device
// has streams of its own (CUDA), the collective is enqueued on the caller's
// current stream and the wait is empty: whatever follows on that stream, or
// waits for an event of it, comes after the collective. Elsewhere the wait
// blocks, and the caller keeps the tensors alive until it returns. Every rank
// of the group makes the same calls in the same order; each communicator is
// called from one thread at a time.
//
// Errors: RunError where a peer died or is late; its message names `what`, the
// sequence number of the collective in its communicator, and the ranks at
// fault, as far as they are known. AbortedError after abort().
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_COLLECTIVES_COMMUNICATOR_H
#define FSDP_RUNTIME_COLLECTIVES_COMMUNICATOR_H

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::runtime {

/// How a reduction combines. Average does what FSDP2 gets from the backend:
/// Gloo sums and divides; NCCL multiplies each term by 1 / size and sums.
enum class ReduceOp : uint8_t { Sum, Average, Max };

class Communicator {
public:
  using Wait = std::function<void()>;

  virtual ~Communicator() = default;

  /// This rank's index in the group, and the number of ranks in the group.
  virtual int64_t rank() const = 0;
  virtual int64_t size() const = 0;

  /// A tensor to gather: rank r of the group gives the elements [begins[r],
  /// begins[r + 1]) of `whole`, row-major, possibly none; `own` holds this
  /// rank's elements, and may be that part of `whole` itself.
  struct Part {
    at::Tensor whole;
    at::Tensor own;
    std::vector<int64_t> begins; ///< size() + 1 of them, ascending
  };
  /// Gathers all parts as one collective. `what` is for messages.
  virtual Wait allGather(const std::string &what,
                         const std::vector<Part> &parts) = 0;

  /// `in` has size() equal chunks; `out` becomes the reduction of the rank()-th
  /// chunk over all ranks. With `premultiply`, for Sum, each term is first
  /// multiplied by it and rounded to the dtype (NCCL's PREMUL_SUM); `in` may be
  /// overwritten with that.
  virtual Wait reduceScatter(const std::string &what, const at::Tensor &out,
                             const at::Tensor &in, ReduceOp op,
                             double premultiply = 1) = 0;

  /// In place.
  virtual Wait allReduce(const std::string &what, const at::Tensor &tensor,
                         ReduceOp op) = 0;

  /// Makes every wait of this rank fail, from any thread; returns in bounded
  /// time.
  virtual void abort() = 0;
};

/// Makes the communicators of one rank.
class Transport {
public:
  virtual ~Transport() = default;

  virtual int64_t rank() const = 0;
  virtual int64_t worldSize() const = 0;
  /// Makes the communicator of a group that this rank belongs to; `ranks`
  /// ascend. All ranks of the group call it with the same `name`, which no
  /// other group that contains this rank has. Throws RunError after a deadline,
  /// naming the ranks that did not connect.
  virtual std::unique_ptr<Communicator>
  connect(const std::string &name, const std::vector<int64_t> &ranks) = 0;
  /// Registers memory of the rank's device that collectives will read and
  /// write, in case the backend can make use of that. The memory outlives the
  /// communicators. Called by all ranks alike.
  virtual void registerMemory(void *base, size_t bytes) {}
  /// Tells the other ranks why this one fails; only the first message of all
  /// ranks is kept.
  virtual void fail(const std::string &message) = 0;
  /// "rank 3: …", from the rank that reported a failure; empty if none did.
  virtual std::string failure() = 0;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_COLLECTIVES_COMMUNICATOR_H
