//===- Agreement.h - what ranks tell each other between steps -------------===//
//
// Before a step the ranks must know that all of them run the same plan, on
// every step and at little cost. So each gives a word, over memory that the
// ranks of one host share, and gets those of all.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_AGREEMENT_H
#define FSDP_RUNTIME_AGREEMENT_H

#include "fsdp/Runtime/Rendezvous.h"

#include <chrono>
#include <cstdint>
#include <vector>

namespace fsdp::runtime {

class Agreement {
public:
  /// A collective. Throws InputError if the ranks are on more than one host.
  explicit Agreement(Rendezvous &rendezvous);
  Agreement(const Agreement &) = delete;
  Agreement &operator=(const Agreement &) = delete;
  ~Agreement();

  /// The words of all ranks, once all have called as often as this one. Throws
  /// RunError that names the ranks that have not come after `deadline`, or one
  /// that ended before.
  std::vector<uint64_t> exchange(uint64_t own,
                                 std::chrono::milliseconds deadline);

private:
  struct Member;
  Member *member(int64_t rank) const;

  const int64_t ownRank;
  const int64_t ranks;
  int memoryFd = -1;
  void *memory = nullptr;
  uint32_t rounds = 0;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_AGREEMENT_H
