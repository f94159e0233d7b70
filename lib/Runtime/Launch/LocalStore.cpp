//===- LocalStore.cpp - a store for ranks that one process forks ----------===//
#include "fsdp/Runtime/Launch/LocalStore.h"
#include "fsdp/Runtime/Collectives/RankBoard.h"
#include "fsdp/Runtime/Error.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <future>
#include <memory>
#include <random>
#include <thread>
#include <utility>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

namespace fsdp::runtime {

namespace {

constexpr char kLoopback[] = "127.0.0.1";
constexpr char kLeft[] = "local store/left";

} // namespace

LocalStore::LocalStore(int64_t worldSize) : worldSize(worldSize) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto *generic = reinterpret_cast<sockaddr *>(&address);
  socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (socket < 0 || bind(socket, generic, length) != 0 ||
      listen(socket, int(std::max<int64_t>(worldSize, 16))) != 0 ||
      getsockname(socket, generic, &length) != 0) {
    std::string cause = std::strerror(errno);
    if (socket >= 0)
      close(socket);
    throw RunError("cannot listen on loopback for the ranks' store: " + cause);
  }
  listeningPort = ntohs(address.sin_port);
  std::random_device random;
  for (int word = 0; word < 4; ++word)
    secret += std::to_string(random()) + "/";
}

LocalStore::~LocalStore() {
  if (socket >= 0)
    close(socket);
}

const c10::intrusive_ptr<c10d::Store> &
LocalStore::connect(int64_t rank, std::chrono::milliseconds timeout) {
  ignoreBrokenPipes();
  ownRank = rank;
  c10d::TCPStoreOptions options;
  options.port = listeningPort;
  options.isServer = rank == 0;
  options.waitWorkers = false;
  options.timeout = timeout;
  // The server owns and closes it.
  int listening = std::exchange(socket, -1);
  if (rank == 0)
    options.masterListenFd = listening;
  else
    close(listening);
  try {
    store = c10::make_intrusive<c10d::PrefixStore>(
        secret, c10::make_intrusive<c10d::TCPStore>(kLoopback, options));
  } catch (const c10::Error &error) {
    throw RunError(
        "rank " + std::to_string(rank) +
        " cannot reach the store of rank 0: " + error.what_without_backtrace());
  }
  return store;
}

void LocalStore::leave(std::chrono::milliseconds patience) {
  auto end = std::chrono::steady_clock::now() + patience;
  auto left = std::make_shared<std::promise<void>>();
  std::future<void> waited = left->get_future();
  // On a thread of its own: where rank 0 is stopped, the store does not answer.
  std::thread([store = store, isFirst = ownRank == 0, ranks = worldSize, end,
               left] {
    try {
      store->add(kLeft, 1);
      while (isFirst && store->add(kLeft, 0) < ranks &&
             std::chrono::steady_clock::now() < end)
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    } catch (const std::exception &) {
      // Rank 0 is gone: there is nothing to leave.
    }
    left->set_value();
  }).detach();
  waited.wait_until(end + std::chrono::seconds(1));
}

} // namespace fsdp::runtime
