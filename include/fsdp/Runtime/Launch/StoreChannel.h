//===- StoreChannel.h - a channel over a store of the ranks ---------------===//
#ifndef FSDP_RUNTIME_LAUNCH_STORECHANNEL_H
#define FSDP_RUNTIME_LAUNCH_STORECHANNEL_H

#include "fsdp/Runtime/Checkpoint/Channel.h"

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>

namespace c10d {
class Store;
} // namespace c10d

namespace fsdp::runtime {

/// How long rank 0 waits for the others.
inline constexpr std::chrono::seconds kChannelPatience{600};

/// `store`: of all ranks, over a connection of its own, whose keys nobody else
/// uses; null for a rank alone. `ended`: whether the run ends for another
/// reason; may be called from any thread.
std::unique_ptr<Channel> makeStoreChannel(c10::intrusive_ptr<c10d::Store> store,
                                          int64_t rank, int64_t worldSize,
                                          std::chrono::milliseconds patience,
                                          std::function<bool()> ended);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_LAUNCH_STORECHANNEL_H
