//===- Agreement.h - what ranks tell each other between steps -------------===//
//
// Before every step the ranks must make sure, at little cost, that all of them
// run the same plan. So each rank gives a word and gets the words of all ranks,
// over memory that the ranks of one host share or over Gloo.
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
  /// RunError, which names the ranks that have not come by the deadline, or
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
