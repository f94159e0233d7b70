//===- NcclTransport.cpp - collectives over NCCL --------------------------===//
#include "NcclTransport.h"
#include "../Collectives/SoloCommunicator.h"
#include "CudaError.h"
#include "NcclGroup.h"
#include "fsdp/Runtime/Collectives/RankBoard.h"

#include <ATen/ops/scalar_tensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <cstring>
#include <optional>

namespace fsdp::runtime {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

namespace {

constexpr milliseconds kAbortGrace(10000);
/// How often a rank that connects asks whether another has failed.
constexpr milliseconds kAsk(300);
/// How long the GPU may execute a collective before this rank counts as
/// waiting.
constexpr milliseconds kWait(1000);

ncclRedOp_t ncclOp(ReduceOp op) {
  switch (op) {
  case ReduceOp::Sum:
    return ncclSum;
  case ReduceOp::Average:
    return ncclAvg;
  case ReduceOp::Max:
    return ncclMax;
  }
  throw RunError("unknown reduction");
}

ncclDataType_t ncclType(at::ScalarType type) {
  switch (type) {
  case at::kFloat:
    return ncclFloat32;
  case at::kBFloat16:
    return ncclBfloat16;
  case at::kHalf:
    return ncclFloat16;
  case at::kDouble:
    return ncclFloat64;
  case at::kLong:
    return ncclInt64;
  case at::kInt:
    return ncclInt32;
  case at::kChar:
    return ncclInt8;
  case at::kByte:
    return ncclUint8;
  default:
    throw RunError("expected a dtype that NCCL reduces, got " +
                   std::string(c10::toString(type)));
  }
}

class NcclCommunicator : public Communicator {
public:
  NcclCommunicator(RankBoard &board, std::string key,
                   std::shared_ptr<NcclGroup> group, int64_t index)
      : board(board), key(std::move(key)), group(std::move(group)),
        index(index) {}

  ~NcclCommunicator() override {
    if (!group->destroy())
      abortGroup("its communicator was destroyed while it was in use");
  }

  int64_t rank() const override { return index; }
  int64_t size() const override { return int64_t(group->ranks.size()); }

  Wait allGather(const std::string &what,
                 const std::vector<Part> &parts) override {
    begin(what, [&](ncclComm_t comm, cudaStream_t stream) {
      for (const Part &part : parts)
        gather(what, part, comm, stream);
    });
    return {};
  }

  Wait reduceScatter(const std::string &what, const at::Tensor &out,
                     const at::Tensor &in, ReduceOp op,
                     double premultiply) override {
    // The host's, from which NCCL takes it at once.
    at::Tensor factor =
        at::scalar_tensor(premultiply, at::dtype(in.scalar_type()));
    begin(what, [&](ncclComm_t comm, cudaStream_t stream) {
      ncclDataType_t type = ncclType(in.scalar_type());
      ncclRedOp_t reduction = ncclOp(op);
      if (premultiply != 1)
        checkNccl(ncclRedOpCreatePreMulSum(&reduction,
                                           factor.mutable_data_ptr(), type,
                                           ncclScalarHostImmediate, comm),
                  what, comm);
      checkNccl(ncclReduceScatter(in.const_data_ptr(), out.mutable_data_ptr(),
                                  size_t(out.numel()), type, reduction, comm,
                                  stream),
                what, comm);
      if (premultiply != 1)
        checkNccl(ncclRedOpDestroy(reduction, comm), what, comm);
    });
    return {};
  }

  Wait allReduce(const std::string &what, const at::Tensor &tensor,
                 ReduceOp op) override {
    begin(what, [&](ncclComm_t comm, cudaStream_t stream) {
      void *data = tensor.mutable_data_ptr();
      checkNccl(ncclAllReduce(data, data, size_t(tensor.numel()),
                              ncclType(tensor.scalar_type()), ncclOp(op), comm,
                              stream),
                what, comm);
    });
    return {};
  }

  void abort() override { abortGroup("this rank was aborted"); }

private:
  void abortGroup(const std::string &why) {
    group->refuse({why, /*ofPeer=*/true});
    abortWithin({group}, "communicator \"" + group->name + "\": " + why,
                kAbortGrace);
  }

  template <typename Calls> void begin(const std::string &what, Calls calls) {
    CollectiveName collective{what, group->name, board.begin(key)};
    c10::cuda::CUDAGuard guard{c10::DeviceIndex(group->gpu)};
    cudaStream_t stream =
        c10::cuda::getCurrentCUDAStream(c10::DeviceIndex(group->gpu));
    try {
      if (!group->run(collective, stream,
                      [&](ncclComm_t comm) { calls(comm, stream); }))
        throw RunError(
            describeTimeout(collective, group->patience->deadline()) + "; " +
            board.describeLate(key, collective.number, group->ranks));
    } catch (const AbortedError &) {
      throw;
    } catch (const RunError &) {
      if (std::string failure = board.awaitFailure(); !failure.empty())
        throw AbortedError(collective.text() + ": " + failure);
      throw;
    }
  }

  /// As bytes: a gather moves those of any dtype.
  void gather(const std::string &what, const Part &part, ncclComm_t comm,
              cudaStream_t stream) {
    auto *whole = static_cast<std::byte *>(part.whole.mutable_data_ptr());
    const void *own = part.own.numel() ? part.own.const_data_ptr() : nullptr;
    auto begin = [&](int64_t rank) {
      return size_t(part.begins[size_t(rank)]) * part.whole.itemsize();
    };
    size_t first = begin(1) - begin(0);
    bool even = true;
    for (int64_t rank = 0; rank < size(); ++rank)
      even &= begin(rank + 1) - begin(rank) == first;
    if (even) {
      checkNccl(ncclAllGather(own, whole, first, ncclUint8, comm, stream), what,
                comm);
      return;
    }
    for (int64_t rank = 0; rank < size(); ++rank)
      if (size_t bytes = begin(rank + 1) - begin(rank))
        checkNccl(ncclBroadcast(rank == index ? own : whole + begin(rank),
                                whole + begin(rank), bytes, ncclUint8,
                                int(rank), comm, stream),
                  what, comm);
  }

  RankBoard &board;
  std::string key;
  std::shared_ptr<NcclGroup> group;
  int64_t index;
};

class NcclTransport final : public Transport {
public:
  NcclTransport(const c10::intrusive_ptr<c10d::Store> &store, int64_t rank,
                int64_t worldSize, int gpu, const NcclOptions &options)
      : store(store), gpu(gpu), options(options),
        board(std::make_unique<RankBoard>(store, rank, worldSize,
                                          options.waits.position,
                                          options.waits.storeServer)) {
    sights = options.waits.sights ? options.waits.sights.get() : board.get();
    store->setTimeout(options.waits.patience->deadline());
    board->watch(
        [this](const std::string &failure) {
          breakDown({failure, /*ofPeer=*/true});
        },
        [this] { watch(); });
  }

  int64_t rank() const override { return board->rank(); }
  int64_t worldSize() const override { return board->worldSize(); }
  void fail(const std::string &message) override { board->fail(message); }
  std::string failure() override {
    std::string told = board->failure();
    std::lock_guard lock(mutex);
    if (told.empty() && broken)
      return broken->ofPeer
                 ? broken->message
                 : "rank " + std::to_string(rank()) + ": " + broken->message;
    return told;
  }

  std::unique_ptr<Communicator>
  connect(const std::string &name, const std::vector<int64_t> &ranks) override {
    if (ranks.size() == 1)
      return makeSoloCommunicator();
    // Groups without a common rank may have the same name.
    std::string key = name + "/" + std::to_string(ranks.front());
    WaitCount counted(*sights);
    board->meet(key, name, ranks, options.waits.patience->deadline());
    auto group =
        std::make_shared<NcclGroup>(name, ranks, gpu, options.waits.patience);
    int64_t index =
        std::lower_bound(ranks.begin(), ranks.end(), rank()) - ranks.begin();
    c10::cuda::CUDAGuard guard{c10::DeviceIndex(gpu)};
    auto asked = steady_clock::now();
    auto tick = [&] {
      if (steady_clock::now() - asked < kAsk)
        return;
      asked = steady_clock::now();
      if (std::string failure = board->failure(); !failure.empty())
        throw AbortedError("communicator \"" + name + "\": " + failure);
    };
    try {
      group->connect(exchangeId(name, key, index == 0), int(index), tick);
      for (auto [base, bytes] : ranges)
        group->add(base, bytes, options.windows, tick);
    } catch (const std::exception &error) {
      group->refuse({error.what()});
      abortWithin({group}, error.what(), kAbortGrace);
      throw;
    }
    {
      std::lock_guard lock(mutex);
      groups.push_back(group);
      if (broken)
        group->refuse(*broken);
    }
    return std::make_unique<NcclCommunicator>(*board, key, group, index);
  }

  void registerMemory(void *base, size_t bytes) override {
    c10::cuda::CUDAGuard guard{c10::DeviceIndex(gpu)};
    ranges.emplace_back(base, bytes);
    for (const auto &group : living())
      group->add(base, bytes, options.windows, {});
  }

private:
  ncclUniqueId exchangeId(const std::string &name, const std::string &key,
                          bool first) {
    ncclUniqueId id{};
    if (first) {
      checkNccl(ncclGetUniqueId(&id), "communicator \"" + name + "\"", nullptr);
      auto *bytes = reinterpret_cast<const uint8_t *>(&id);
      store->set("nccl/" + key, std::vector<uint8_t>(bytes, bytes + sizeof id));
      return id;
    }
    try {
      std::vector<uint8_t> bytes = store->get("nccl/" + key);
      if (bytes.size() != sizeof id)
        throw RunError("communicator \"" + name + "\": expected an id of " +
                       std::to_string(sizeof id) + " bytes, got " +
                       std::to_string(bytes.size()));
      std::memcpy(&id, bytes.data(), sizeof id);
    } catch (const c10::Error &error) {
      throw RunError(
          "communicator \"" + name +
          "\": the ranks' store failed: " + error.what_without_backtrace());
    }
    return id;
  }

  std::vector<std::shared_ptr<NcclGroup>> living() {
    std::vector<std::shared_ptr<NcclGroup>> found;
    std::lock_guard lock(mutex);
    for (const auto &weak : groups)
      if (std::shared_ptr<NcclGroup> group = weak.lock())
        found.push_back(std::move(group));
    return found;
  }

  void breakDown(const NcclFailure &failure) {
    {
      std::lock_guard lock(mutex);
      if (broken)
        return;
      broken = failure;
    }
    std::vector<std::shared_ptr<NcclGroup>> refusing;
    for (const auto &group : living())
      if (group->refuse(failure))
        refusing.push_back(group);
    abortWithin(refusing, failure.message, kAbortGrace);
  }

  /// On the board's thread.
  void watch() {
    if (!watching) {
      watching = true;
      // What another thread captures does not forbid asking for events.
      cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
      (void)cudaThreadExchangeStreamCaptureMode(&mode);
      (void)cudaSetDevice(gpu);
    }
    for (const auto &group : living()) {
      if (std::optional<std::string> error = group->asyncError()) {
        reportError(*error);
        return;
      }
    }
    watchWaits();
  }

  /// Whether the GPU is executing a collective that nobody comes to.
  void watchWaits() {
    milliseconds deadline = options.waits.patience->deadline();
    std::shared_ptr<NcclGroup> group;
    std::optional<CollectiveName> late;
    for (const auto &each : living()) {
      late = each->pendingFor(std::min(kWait, deadline / 4));
      group = each;
      if (late)
        break;
    }
    if (late.has_value() != stall.has_value())
      sights->addWaits(late ? 1 : -1);
    if (!late) {
      stall.reset();
      return;
    }
    if (!stall)
      stall.emplace(*sights, *options.waits.patience);
    std::optional<Stall::Cause> cause = stall->overdue();
    if (!cause)
      return;
    std::string key = group->name + "/" + std::to_string(group->ranks.front());
    reportError(options.waits.position
                    ? cause->text + "; this rank was waiting in " +
                          late->text() + options.waits.step()
                    : describeTimeout(*late, deadline) + "; " +
                          board->describeLate(key, late->number, group->ranks));
  }

  /// Reports what this rank finds out by itself, unless it follows from a
  /// failure that another rank reports, perhaps a little later.
  void reportError(const std::string &message) {
    if (std::string failure = board->awaitFailure(); !failure.empty()) {
      breakDown({failure, /*ofPeer=*/true});
      return;
    }
    board->fail(message);
    breakDown({message});
  }

  c10::intrusive_ptr<c10d::Store> store;
  const int gpu;
  const NcclOptions options;
  std::vector<std::pair<void *, size_t>> ranges;
  bool watching = false; ///< of the board's thread
  std::mutex mutex;      ///< guards the next two
  std::optional<NcclFailure> broken;
  std::vector<std::weak_ptr<NcclGroup>> groups;
  std::optional<Stall> stall; ///< of the board's thread, while this rank waits
  RankSights *sights = nullptr;
  /// Its thread uses what is above.
  std::unique_ptr<RankBoard> board;
};

} // namespace

std::unique_ptr<Transport>
openNcclTransport(const c10::intrusive_ptr<c10d::Store> &store, int64_t rank,
                  int64_t worldSize, int gpu, const NcclOptions &options) {
  return std::make_unique<NcclTransport>(store, rank, worldSize, gpu, options);
}

} // namespace fsdp::runtime
