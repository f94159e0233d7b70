//===- Rendezvous.h - how ranks that others started find each other -------===//
#ifndef FSDP_RUNTIME_LAUNCH_RENDEZVOUS_H
#define FSDP_RUNTIME_LAUNCH_RENDEZVOUS_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/Collectives/ShmSegment.h"
#include "fsdp/Runtime/Launch/RankEnvironment.h"

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace fsdp::runtime {

/// How long starting ranks wait for each other, unless told otherwise.
inline constexpr std::chrono::milliseconds kMeeting = std::chrono::minutes(5);

/// What the ranks of a job have in common, but not with those of another job:
/// names, which messages give, and texts.
using JobParts = std::vector<std::pair<std::string, std::string>>;

/// Where the ranks of one job meet: torchrun's store, or one that rank 0
/// serves. Without an environment: a single rank, which needs no store.
///
/// Another job may be at the same port. So ranks belong together only if their
/// `job` is the same: rank 0 leaves hashes of its parts in the store, and keys
/// begin with another hash, which nobody learns from the store. Each rank's
/// place can be taken once; a second process that comes for it is refused. If
/// it comes before the ranks have met, or shortly after, all ranks are refused:
/// nobody can tell which processes belong together.
class Rendezvous {
public:
  /// Throws RunError if there is no store, or only that of another job, whose
  /// parts that differ it names, if this rank is already there, or if others
  /// have not come within `timeout`.
  explicit Rendezvous(std::optional<RankEnvironment> environment,
                      const JobParts &job = {},
                      std::chrono::milliseconds timeout = kMeeting);
  /// Of some of the ranks of `all`, in the order of `members`, which has this
  /// rank. These are numbered from 0 in that order. `all` must have met, and
  /// the ranks must agree on who is in which group.
  Rendezvous(const Rendezvous &all, const std::vector<int64_t> &members);
  ~Rendezvous();

  int64_t rank() const { return ownRank; }
  int64_t worldSize() const { return ranks; }
  /// The rank that serves the store; nullopt: none of these does.
  std::optional<int64_t> storeServer() const {
    return rankServes ? std::optional<int64_t>(0) : std::nullopt;
  }

  /// A message of these ranks, with "rank 1" and "ranks 0, 1" as the numbers
  /// that they have among all ranks of the job.
  std::string numberedInJob(const std::string &message) const;

  /// Every rank gives a text and gets the texts of all ranks; returns when all
  /// have called. Calls are matched by their order in the process, over all
  /// objects of the same ranks. Throws RunError after `timeout`, by default the
  /// object's, naming the ranks that have not called.
  std::vector<std::string>
  exchange(const std::string &own,
           std::optional<std::chrono::milliseconds> timeout = {});

  /// The first rank on a different host than rank 0, where processes cannot
  /// share memory with it. The first call is a collective.
  std::optional<int64_t> rankElsewhere();

  /// For one Transport: a store of all ranks, over a connection of its own,
  /// whose keys nobody else uses. Calls are matched as those of exchange are.
  /// Rank 0 may serve it from its process.
  c10::intrusive_ptr<c10d::Store> connectStore();

  /// To be called once all ranks have met; exchange calls it. Throws RunError
  /// if two processes have come for one place.
  void confirm();
  /// The message of confirm's error, if there is one.
  std::optional<std::string> takenTwice();
  /// Keeps checking for that on a thread of its own, for half a minute, and
  /// calls `onTwice` from it with the message, at most once.
  void watchPlaces(std::function<void(const std::string &)> onTwice);

private:
  void enter(JobParts job);
  /// Waits until `end` for the key, and returns whether it is there. Meanwhile
  /// throws as confirm does.
  bool waitFor(const std::string &key,
               std::chrono::steady_clock::time_point end);
  std::string nextKey();

  int64_t ownRank = 0;
  int64_t ranks = 1;
  std::vector<int64_t> members; ///< of a group; empty for all ranks
  bool rankServes = false;
  std::chrono::milliseconds timeout = kMeeting;
  std::atomic<bool> stop = false;
  std::thread watcher;
  std::string keys;  ///< what every key of this job begins with
  std::string place; ///< "127.0.0.1:29500", for messages
  c10::intrusive_ptr<c10d::Store> store; ///< null for a rank alone
  /// By rank: hostIdentity(); empty until asked for.
  std::vector<std::string> hosts;
};

/// Memory that all ranks map; a collective. Rank 0 calls `create`, which gives
/// the descriptor of a file, the others `open` with a path to it. An error of
/// one rank is thrown on all; InputError if they are on more than one host.
void shareMemory(Rendezvous &rendezvous, const std::function<int()> &create,
                 const std::function<void(const std::string &)> &open);

/// The segment of `plan` that all ranks map; a collective. An error of one rank
/// is thrown on all; InputError if they are on more than one host.
std::unique_ptr<ShmSegment> shareSegment(const plan::Plan &plan,
                                         Rendezvous &rendezvous);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_LAUNCH_RENDEZVOUS_H
