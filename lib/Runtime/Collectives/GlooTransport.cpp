//===- GlooTransport.cpp - collectives over c10d's Gloo -------------------===//
//
// Gloo has no abort: an operation that waits for a peer ends when the peer
// comes, closes its sockets, or is late. So nobody waits for operations but for
// a condition that they, the board and abort() change. A communicator that
// fails closes its sockets, which ends the peers' operations, and its process
// group stays behind with operations that still wait: to destroy it would be
// to wait for them.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Runtime/Collectives/GlooTransport.h"
#include "SoloCommunicator.h"
#include "fsdp/Runtime/Collectives/RankBoard.h"
#include "fsdp/Runtime/Error.h"

// Declares c10d's class, whose definition libtorch_cpu has; see GlooStub.
#define USE_C10D_GLOO
#include <ATen/ops/from_blob.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>

namespace fsdp::runtime {

using std::chrono::milliseconds;

namespace {

/// How often a wait looks whether it is late.
constexpr milliseconds kSlice(50);
constexpr milliseconds kForever = std::chrono::hours(24 * 365);

/// Held while c10d queues an operation: torch 2.11's flight recorder, of which
/// a process has one, enters a new group in a map before it takes its lock.
std::mutex recording;

class ProcessGroup : public c10d::ProcessGroupGloo {
public:
  using ProcessGroupGloo::ProcessGroupGloo;

  void closeConnections() {
    for (const auto &context : contexts_)
      context->closeConnections();
  }
};

c10d::ReduceOp c10dOp(ReduceOp op) {
  switch (op) {
  case ReduceOp::Sum:
    return c10d::ReduceOp::SUM;
  case ReduceOp::Average:
    return c10d::ReduceOp::AVG;
  case ReduceOp::Max:
    return c10d::ReduceOp::MAX;
  }
  throw RunError("unknown reduction");
}

/// Gloo's message without the place in its source before it, the advice after
/// it and the backtrace.
std::string reason(const std::exception_ptr &exception) {
  std::string text;
  try {
    std::rethrow_exception(exception);
  } catch (const c10::Error &error) {
    text = error.what_without_backtrace();
  } catch (const std::exception &error) {
    text = error.what();
  }
  if (size_t place = text.find("] "); text.starts_with("[") && place < 200)
    text = text.substr(place + 2);
  return text.substr(0, std::min(text.find('\n'), text.find(". ")));
}

/// The elements as bytes: a gather moves those of any dtype.
at::Tensor bytes(const at::Tensor &tensor) {
  return tensor.view({-1}).view(at::kByte);
}

/// One call of a communicator: operations that are under way.
struct Operations {
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  /// What the operations read and write, until they have succeeded.
  std::vector<at::Tensor> lent;
  size_t left = 0;
  std::exception_ptr error;
};

/// A tensor for Gloo, whose threads release it some time after its operation;
/// the caller gets its memory back as soon as the operation has ended.
at::Tensor lend(const at::Tensor &tensor, Operations &operations) {
  operations.lent.push_back(tensor);
  return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(),
                       tensor.options());
}

/// What the waits of a communicator, Gloo's threads and the board share.
struct Progress {
  std::mutex mutex;
  std::condition_variable changed;
  std::string aborted;     ///< why every wait fails
  int64_t uncollected = 0; ///< calls whose waits have not ended well

  void abort(const std::string &message) {
    {
      std::lock_guard lock(mutex);
      if (aborted.empty())
        aborted = message;
    }
    changed.notify_all();
  }
};

class GlooCommunicator : public Communicator {
public:
  GlooCommunicator(RankBoard &board, std::string name, std::string key,
                   std::vector<int64_t> ranks,
                   c10::intrusive_ptr<ProcessGroup> group,
                   const WaitSettings &settings,
                   std::shared_ptr<Progress> progress)
      : board(board), name(std::move(name)), key(std::move(key)),
        ranks(std::move(ranks)), group(std::move(group)), settings(settings),
        progress(std::move(progress)) {}

  ~GlooCommunicator() override {
    {
      std::lock_guard lock(progress->mutex);
      if (progress->aborted.empty() && progress->uncollected == 0)
        return;
    }
    group->closeConnections();
    // Kept for ever on purpose; reachable, so that no leak checker complains.
    static std::mutex mutex;
    static auto *left = new std::vector<c10::intrusive_ptr<ProcessGroup>>;
    std::lock_guard lock(mutex);
    left->push_back(std::move(group));
  }

  int64_t rank() const override { return group->getRank(); }
  int64_t size() const override { return group->getSize(); }

  Wait allGather(const std::string &what,
                 const std::vector<Part> &parts) override {
    return begin(what, [&](Operations &operations) {
      for (const Part &part : parts)
        gather(part, operations);
      return std::function<void()>();
    });
  }

  /// What _reduce_scatter_base of ProcessGroupGloo does, but for its wait,
  /// which nothing could end.
  Wait reduceScatter(const std::string &what, const at::Tensor &out,
                     const at::Tensor &in, ReduceOp op,
                     double premultiply) override {
    return begin(what, [&](Operations &operations) {
      at::Tensor all = in.clone();
      if (premultiply != 1)
        all.mul_(at::scalar_tensor(premultiply, all.options()));
      reduce(all, op, operations);
      return [this, out, all] {
        int64_t elements = out.numel();
        out.view({-1}).copy_(
            all.view({-1}).narrow(0, rank() * elements, elements));
      };
    });
  }

  Wait allReduce(const std::string &what, const at::Tensor &tensor,
                 ReduceOp op) override {
    return begin(what, [&](Operations &operations) {
      reduce(tensor, op, operations);
      return std::function<void()>();
    });
  }

  void abort() override {
    progress->abort("this rank was aborted");
    group->closeConnections();
  }

private:
  void gather(const Part &part, Operations &operations) {
    int64_t itemBytes = int64_t(part.whole.itemsize());
    at::Tensor whole = lend(bytes(part.whole), operations);
    auto range = [&](int64_t index) {
      int64_t begin = part.begins[size_t(index)];
      return whole.narrow(0, begin * itemBytes,
                          (part.begins[size_t(index) + 1] - begin) * itemBytes);
    };
    bool even = true;
    for (int64_t index = 0; index < size(); ++index)
      even &= range(index).numel() * size() == whole.numel();
    if (even) {
      at::Tensor own = lend(bytes(part.own), operations);
      std::lock_guard lock(recording);
      operations.works.push_back(group->_allgather_base(whole, own));
      return;
    }
    at::Tensor own = range(rank());
    if (own.numel() > 0 && own.const_data_ptr() != part.own.const_data_ptr())
      own.copy_(bytes(part.own));
    for (int64_t index = 0; index < size(); ++index) {
      std::vector<at::Tensor> tensors = {range(index)};
      if (tensors[0].numel() == 0)
        continue;
      c10d::BroadcastOptions options;
      options.rootRank = index;
      std::lock_guard lock(recording);
      operations.works.push_back(group->broadcast(tensors, options));
    }
  }

  void reduce(const at::Tensor &tensor, ReduceOp op, Operations &operations) {
    std::vector<at::Tensor> tensors = {lend(tensor.view({-1}), operations)};
    c10d::AllreduceOptions options;
    options.reduceOp = c10dOp(op);
    std::lock_guard lock(recording);
    operations.works.push_back(group->allreduce(tensors, options));
  }

  /// Begins what `start` adds to the operations; the wait ends with what it
  /// returns.
  template <typename Start> Wait begin(const std::string &what, Start start) {
    CollectiveName collective{what, name, board.begin(key)};
    {
      std::lock_guard lock(progress->mutex);
      if (!progress->aborted.empty())
        throw AbortedError(collective.text() + ": " + progress->aborted);
      ++progress->uncollected;
    }
    auto operations = std::make_shared<Operations>();
    std::function<void()> finish;
    try {
      finish = start(*operations);
    } catch (const c10::Error &) {
      throw RunError(collective.text() + ": " +
                     reason(std::current_exception()));
    }
    operations->left = operations->works.size();
    for (const auto &work : operations->works)
      work->getFuture()->addCallback(
          [operations, progress = progress](c10::ivalue::Future &future) {
            {
              std::lock_guard lock(progress->mutex);
              --operations->left;
              if (future.hasError() && !operations->error)
                operations->error = future.exception_ptr();
            }
            progress->changed.notify_all();
          });
    return [this, collective, operations, finish] {
      wait(collective, *operations);
      if (finish)
        finish();
    };
  }

  void wait(const CollectiveName &collective, Operations &operations) {
    WaitCount counted(*settings.sights);
    Stall stall(*settings.sights, *settings.patience);
    std::optional<Stall::Cause> cause;
    {
      std::unique_lock lock(progress->mutex);
      while (!progress->changed.wait_for(lock, kSlice, [&] {
        return operations.left == 0 || operations.error ||
               !progress->aborted.empty();
      })) {
        lock.unlock();
        cause = stall.overdue();
        lock.lock();
        if (cause)
          break;
      }
      if (!progress->aborted.empty())
        throw AbortedError(collective.text() + ": " + progress->aborted);
      if (operations.left == 0 && !operations.error) {
        --progress->uncollected;
        lock.unlock();
        // The future is complete a moment before its work.
        for (const auto &work : operations.works)
          work->wait();
        operations.works.clear();
        operations.lent.clear();
        return;
      }
    }
    if (operations.error)
      fail(collective, operations.error);
    failLate(collective, *cause);
  }

  [[noreturn]] void fail(const CollectiveName &collective,
                         const std::exception_ptr &error) {
    throwIfTold(collective, board.awaitFailure());
    std::string late = board.describeLate(key, collective.number, ranks);
    throwIfTold(collective, board.failure());
    std::string text = collective.text() + ": " + reason(error) + "; " + late;
    progress->abort(text);
    throw RunError(text);
  }

  [[noreturn]] void failLate(const CollectiveName &collective,
                             const Stall::Cause &cause) {
    std::string text = cause.text + "; this rank was waiting in " +
                       collective.text() + settings.step();
    // If ranks do not report how far they are, those that have not come hold it
    // up.
    if (!settings.position && !settings.sights->blindness()) {
      throwIfTold(collective, board.awaitFailure());
      std::string late = board.describeLate(key, collective.number, ranks);
      throwIfTold(collective, board.failure());
      text = describeTimeout(collective, settings.patience->deadline()) + "; " +
             late;
    }
    progress->abort(text);
    throw PeerHungError(text, cause.processes);
  }

  void throwIfTold(const CollectiveName &collective,
                   const std::string &failure) {
    if (failure.empty())
      return;
    progress->abort(failure);
    throw AbortedError(collective.text() + ": " + failure);
  }

  RankBoard &board;
  std::string name, key;
  std::vector<int64_t> ranks;
  c10::intrusive_ptr<ProcessGroup> group;
  const WaitSettings &settings;
  std::shared_ptr<Progress> progress;
};

class GlooTransport : public Transport {
public:
  GlooTransport(const c10::intrusive_ptr<c10d::Store> &store, int64_t rank,
                int64_t worldSize, const WaitSettings &given)
      : store(store), settings(given),
        board(std::make_shared<RankBoard>(
            store, rank, worldSize, settings.position, settings.storeServer)) {
    store->setTimeout(settings.patience->deadline());
    if (!settings.sights)
      settings.sights = board;
    board->watch([this](const std::string &failure) {
      std::lock_guard lock(mutex);
      told = failure;
      for (const auto &weak : communicators)
        if (std::shared_ptr<Progress> progress = weak.lock())
          progress->abort(failure);
    });
  }

  int64_t rank() const override { return board->rank(); }
  int64_t worldSize() const override { return board->worldSize(); }

  std::unique_ptr<Communicator>
  connect(const std::string &name, const std::vector<int64_t> &ranks) override {
    if (ranks.size() == 1)
      return makeSoloCommunicator();
    // Groups without a common rank may have the same name.
    std::string key = name + "/" + std::to_string(ranks.front());
    // All of them, and not only those that would wait.
    if (std::string failure = board->failure(); !failure.empty())
      throw AbortedError(failure);
    milliseconds timeout = settings.patience->deadline();
    WaitCount counted(*settings.sights);
    board->meet(key, name, ranks, timeout);
    auto progress = std::make_shared<Progress>();
    {
      std::lock_guard lock(mutex);
      communicators.push_back(progress);
      if (!told.empty())
        progress->abort(told);
    }
    int64_t index =
        std::lower_bound(ranks.begin(), ranks.end(), rank()) - ranks.begin();
    try {
      auto group = c10::make_intrusive<ProcessGroup>(
          c10::make_intrusive<c10d::PrefixStore>("gloo/" + key, store),
          int(index), int(ranks.size()),
          c10d::ProcessGroupGloo::Options::create_default(timeout));
      // How long a collective takes is not Gloo's concern.
      group->setTimeout(kForever);
      return std::make_unique<GlooCommunicator>(*board, name, key, ranks, group,
                                                settings, progress);
    } catch (const std::exception &) {
      std::string failure = board->awaitFailure();
      if (!failure.empty())
        throw AbortedError("communicator \"" + name + "\": " + failure);
      throw RunError("communicator \"" + name + "\": cannot connect " +
                     nameRanks(ranks) + ": " +
                     reason(std::current_exception()));
    }
  }

  void fail(const std::string &message) override { board->fail(message); }
  std::string failure() override { return board->failure(); }

private:
  c10::intrusive_ptr<c10d::Store> store;
  std::mutex mutex; ///< guards the next two
  std::string told; ///< of a rank that has failed
  std::vector<std::weak_ptr<Progress>> communicators;
  /// The board's thread uses what is above.
  WaitSettings settings;
  std::shared_ptr<RankBoard> board;
};

} // namespace

std::unique_ptr<Transport>
makeGlooTransport(const c10::intrusive_ptr<c10d::Store> &store, int64_t rank,
                  int64_t worldSize, const WaitSettings &settings) {
  return std::make_unique<GlooTransport>(store, rank, worldSize, settings);
}

std::unique_ptr<Transport>
makeGlooTransport(const c10::intrusive_ptr<c10d::Store> &store, int64_t rank,
                  int64_t worldSize, milliseconds timeout) {
  return makeGlooTransport(
      store, rank, worldSize,
      {std::make_shared<Patience>(timeout), nullptr, nullptr});
}

} // namespace fsdp::runtime
