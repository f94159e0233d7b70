//===- Agreement.h - what ranks tell each other between steps -------------===//
//
// Before a step the ranks must know that all of them run the same plan, on
// every step and at little cost. So each gives a word, over memory that the
// ranks of one host share or over Gloo, and gets those of all.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_LAUNCH_AGREEMENT_H
#define FSDP_RUNTIME_LAUNCH_AGREEMENT_H

#include "fsdp/Runtime/Collectives/Backend.h"
#include "fsdp/Runtime/Launch/Rendezvous.h"

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

namespace fsdp::runtime {

class Agreement {
public:
  virtual ~Agreement() = default;

  /// The words of all ranks, once all have called as often as this one. Throws
  /// RunError that names the ranks that have not come after the deadline, or
  /// that ended before.
  virtual std::vector<uint64_t> exchange(uint64_t own) = 0;
};

/// A collective. Throws InputError for Shm if the ranks are on more than one
/// host.
std::unique_ptr<Agreement> makeAgreement(Backend backend,
                                         Rendezvous &rendezvous,
                                         std::chrono::milliseconds deadline);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_LAUNCH_AGREEMENT_H
