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

/// `store`: a store shared by all ranks, over its own connection, whose keys
/// nobody else uses; null for a single rank. `ended`: whether the run ends for
/// another reason; must be callable from any thread.
std::unique_ptr<Channel> makeStoreChannel(c10::intrusive_ptr<c10d::Store> store,
                                          int64_t rank, int64_t worldSize,
                                          std::chrono::milliseconds patience,
                                          std::function<bool()> ended);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_LAUNCH_STORECHANNEL_H
