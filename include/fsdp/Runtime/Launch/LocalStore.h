//===- LocalStore.h - a store for ranks that one process forks ------------===//
#ifndef FSDP_RUNTIME_LAUNCH_LOCALSTORE_H
#define FSDP_RUNTIME_LAUNCH_LOCALSTORE_H

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <string>

namespace c10d {
class Store;
} // namespace c10d

namespace fsdp::runtime {

/// Created before the fork, which hands all ranks one listening socket on a
/// free loopback port, and a secret that all keys begin with. So no other
/// program can take the port in between, and whoever else connects cannot write
/// anything that a rank reads. Rank 0 serves a TCPStore on it. The parent
/// closes its end by destroying its copy after the last fork.
class LocalStore {
public:
  /// Throws RunError if there is no port.
  explicit LocalStore(int64_t worldSize);
  LocalStore(const LocalStore &) = delete;
  LocalStore &operator=(const LocalStore &) = delete;
  /// Closes the socket, and with it the store of rank 0.
  ~LocalStore();

  uint16_t port() const { return listeningPort; }

  /// The store, in the process of `rank`; once. Throws RunError if rank 0 does
  /// not serve it within `timeout`.
  const c10::intrusive_ptr<c10d::Store> &
  connect(int64_t rank,
          std::chrono::milliseconds timeout = std::chrono::seconds(300));

  /// To be called by every connected rank when it no longer needs the store,
  /// even if it has failed. Rank 0 stays, for at most `patience`, until all
  /// have called, so that they can read why it fails.
  void leave(std::chrono::milliseconds patience = std::chrono::seconds(2));

private:
  int64_t worldSize;
  int64_t ownRank = -1;
  int socket = -1;
  uint16_t listeningPort = 0;
  std::string secret;
  c10::intrusive_ptr<c10d::Store> store;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_LAUNCH_LOCALSTORE_H
