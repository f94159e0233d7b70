//===- LateRanks.h - who has not come to a collective ---------------------===//
#ifndef FSDP_RUNTIME_COLLECTIVES_LATERANKS_H
#define FSDP_RUNTIME_COLLECTIVES_LATERANKS_H

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace fsdp::runtime {

/// A collective of a communicator, as messages name it.
struct CollectiveName {
  std::string what;         ///< all_gather of unit "layers.3"
  std::string communicator; ///< as connected
  int64_t number = 0;       ///< the first of the communicator is 1

  /// what (collective 412 of communicator "gather")
  std::string text() const;
};

/// "… has not finished after 600 s".
std::string describeTimeout(const CollectiveName &collective,
                            std::chrono::milliseconds timeout);

/// How many collectives of a communicator each rank that answers has begun.
using CollectiveCounts = std::map<int64_t, int64_t>;

/// "rank 2", "ranks 2, 5"; empty for none.
std::string nameRanks(const std::vector<int64_t> &ranks);

/// Says which of `ranks` hold up the number-th collective: "ranks 2, 5 have not
/// come to it; rank 3 does not answer", or that all have come.
std::string describeLateRanks(int64_t number, const std::vector<int64_t> &ranks,
                              const CollectiveCounts &counts);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_COLLECTIVES_LATERANKS_H
