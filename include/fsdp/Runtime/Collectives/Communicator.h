//===- Communicator.h - collectives among a group of ranks ----------------===//
//
// What DeviceComm is made of, and the one thing that differs between NCCL and
// Gloo. Tensors are contiguous, on the device of the rank, and not empty.
//
// A call begins the collective and returns the wait for it. Where the device
// has streams of its own (CUDA), it is begun on the caller's current stream and
// the wait is empty: what follows on that stream, or waits for an event of it,
// comes after it. Elsewhere the wait blocks, and the caller keeps the tensors
// until then. Every rank of the group makes the same calls in the same order,
// each communicator from one thread at a time.
//
// Errors: RunError where a peer died or is late; its message names `what`, the
// sequence number of the collective in its communicator, and the ranks that it
// knows of. AbortedError after abort().
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

/// How a reduction combines; Average as FSDP2 gets it from the backend: Gloo
/// sums and divides, NCCL multiplies each term by 1 / size and sums.
enum class ReduceOp : uint8_t { Sum, Average, Max };

class Communicator {
public:
  using Wait = std::function<void()>;

  virtual ~Communicator() = default;

  /// This rank's index in the group, and the number of its ranks.
  virtual int64_t rank() const = 0;
  virtual int64_t size() const = 0;

  /// A tensor to gather: rank r of the group gives the elements
  /// [begins[r], begins[r + 1]) of `whole`, row-major, possibly none; `own`
  /// holds this rank's, and may be that part of `whole` itself.
  struct Part {
    at::Tensor whole;
    at::Tensor own;
    std::vector<int64_t> begins; ///< size() + 1 of them, ascending
  };
  /// Gathers all parts as one collective. `what` is for messages.
  virtual Wait allGather(const std::string &what,
                         const std::vector<Part> &parts) = 0;

  /// `in` has size() equal chunks; `out` becomes the reduction of the rank()-th
  /// of all ranks. With `premultiply`, for Sum, each term is multiplied by it,
  /// rounded to the dtype (NCCL's PREMUL_SUM); `in` may be.
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
  /// That of a group, to which this rank belongs; `ranks` ascend. Called by
  /// all of the group with the same `name`, which no other group with this rank
  /// in it has. Throws RunError after a deadline, with the ranks that did not
  /// come.
  virtual std::unique_ptr<Communicator>
  connect(const std::string &name, const std::vector<int64_t> &ranks) = 0;
  /// Memory of the rank's device that collectives will read and write, for what
  /// the backend can make of it; it stays as long as the communicators. Called
  /// by all ranks alike.
  virtual void registerMemory(void *base, size_t bytes) {}
  /// Tells the other ranks why this one fails; the first of all ranks is kept.
  virtual void fail(const std::string &message) = 0;
  /// "rank 3: …" of a rank that told; empty if none did.
  virtual std::string failure() = 0;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_COLLECTIVES_COMMUNICATOR_H
