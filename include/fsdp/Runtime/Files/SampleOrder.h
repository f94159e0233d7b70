//===- SampleOrder.h - which sample has which place -----------------------===//
//
// The order of a run's samples is a function of the sources' sizes, their
// weights and a seed, and of nothing else: not of the number of ranks, the
// batch size, or what was read before. It takes no memory that grows with the
// data. Runs are resumed by it: a change of the order changes what
// FileData::fingerprint says.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_FILES_SAMPLEORDER_H
#define FSDP_RUNTIME_FILES_SAMPLEORDER_H

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace fsdp::runtime {

/// One round of SplitMix64, to spread neighbouring numbers.
uint64_t mixBits(uint64_t x);

/// A bijection of [0, size) that `key` chooses: a Feistel network on pairs
/// (l, r) with l < a and r < b, where a = ceil(sqrt(size)) and b =
/// ceil(size / a). A round adds a hash of one half to the other, modulo that
/// one's size, and so can be undone: the network is a bijection of [0, a b).
/// Where it leads out of [0, size), which fewer than a of the a b numbers lie
/// out of, it is applied again (cycle walking), which is a bijection of
/// [0, size).
class Permutation {
public:
  /// `size` is from 1 to 2^63 - 1.
  Permutation(uint64_t size, uint64_t key);
  /// `i` < size.
  uint64_t operator()(uint64_t i) const;

private:
  uint64_t size, left, right, key;
};

/// Where the sample at a position of the global order lies.
class SampleOrder {
public:
  struct Place {
    size_t source;
    int64_t sample; ///< within the source
  };

  /// Sources of so many samples each, at least one. Without `weights` they are
  /// one after another, as one source; the epochs follow each other. With as
  /// many weights as sources, positive, with a sum of at most kMaxPeriod after
  /// division by their greatest common divisor: each sum of consecutive
  /// positions holds as many samples of each source as its weight says, spread
  /// evenly; a source that ends before others begins again. With a seed the
  /// samples of an epoch (of a source, if there are weights) are permuted, in
  /// each epoch anew.
  SampleOrder(std::vector<int64_t> counts, const std::vector<int64_t> &weights,
              std::optional<uint64_t> seed);

  static constexpr int64_t kMaxPeriod = 1'000'000;

  /// `position` >= 0.
  Place at(int64_t position) const;
  /// Samples of all sources.
  int64_t epoch() const { return total; }

private:
  /// A place of the period: its source, and how many places of that are before.
  struct Slot {
    uint32_t source;
    uint32_t before;
  };

  int64_t permuted(size_t stream, int64_t number, int64_t count) const;

  std::vector<int64_t> counts;
  /// Samples before each source, where there are no weights.
  std::vector<int64_t> begins;
  std::vector<int64_t> shares; ///< of a period; empty: no weights
  std::vector<Slot> period;
  std::optional<uint64_t> seed;
  int64_t total = 0;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_FILES_SAMPLEORDER_H
