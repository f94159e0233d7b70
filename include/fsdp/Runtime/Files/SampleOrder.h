//===- SampleOrder.h - which sample has which place -----------------------===//
//
// The order of a run's samples is a function of the sources' sizes, their
// weights and a seed, and of nothing else: not of the number of ranks, the
// batch size, or what was read before. It takes no memory that grows with the
// data. Runs rely on it to resume: a change of the order must change
// FileData::fingerprint.
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

/// A bijection on [0, size), chosen by `key`: a Feistel network on pairs (l, r)
/// with l < a and r < b, where a = ceil(sqrt(size)) and b = ceil(size / a). A
/// round adds a hash of one half to the other, modulo the size of the latter,
/// and so can be undone: the network is a bijection on [0, a b). Fewer than a
/// of these a b numbers lie outside [0, size); when the result is one of them,
/// the network is applied again (cycle walking), which gives a bijection on [0,
/// size).
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

  /// `counts` are the numbers of samples of the sources, each at least one.
  /// Without `weights` the sources follow one another, as one source, epoch
  /// after epoch. With as many weights as sources, positive, with a sum of at
  /// most kMaxPeriod after division by their greatest common divisor: each run
  /// of consecutive positions as long as that sum holds as many samples of each
  /// source as its weight says, spread evenly; a source that ends before others
  /// starts again. With a seed, the samples of an epoch (of a source, if there
  /// are weights) are permuted, differently in each epoch.
  SampleOrder(std::vector<int64_t> counts, const std::vector<int64_t> &weights,
              std::optional<uint64_t> seed);

  static constexpr int64_t kMaxPeriod = 1'000'000;

  /// `position` >= 0.
  Place at(int64_t position) const;
  /// Samples of all sources.
  int64_t epoch() const { return total; }

private:
  /// A place in the period: its source, and how many places of that source
  /// precede it.
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
