//===- DataSource.h - the inputs of a run, by position --------------------===//
#ifndef FSDP_RUNTIME_FILES_DATASOURCE_H
#define FSDP_RUNTIME_FILES_DATASOURCE_H

#include "fsdp/Plan/Plan.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::runtime {

class FileData;

/// Samples in a rank's microbatch, b: dim 0 of the first input that has
/// dimensions.
int64_t batchSize(const plan::Plan &plan);
/// Samples in the microbatch of all ranks, W b.
int64_t samplesPerMicrobatch(const plan::Plan &plan);

/// Where a run's inputs come from. They are a pure function of a position in
/// one global order of samples: a microbatch of all ranks that begins at sample
/// `first` takes [first, first + W b), of which rank r has [first + r b, first
/// + (r + 1) b); the next one begins at first + W b. So the number of samples
/// taken, together with fingerprint(), is all that a run has to know about its
/// data to continue, on any number of ranks.
///
/// Several threads may call concurrently; forked processes may share the files.
class DataSource {
public:
  virtual ~DataSource() = default;

  /// The inputs of a rank in a microbatch, in the plan's order and of its
  /// shapes, row-major on the host. Throws InputError for data that the plan
  /// cannot take, and RunError if data cannot be read or has changed.
  virtual std::vector<at::Tensor> inputs(int64_t first, int64_t rank) const = 0;
  /// The number of samples after which each has been taken once; 0: there is no
  /// end.
  virtual int64_t epoch() const = 0;
  /// "xxh3:" and 32 hex digits, which are equal if the same positions have the
  /// same samples. The names of files are not part of it, so that data may be
  /// moved, nor is the number of ranks.
  virtual std::string fingerprint() const = 0;
  /// What the data are, in one line that a terminal shows as it is.
  virtual std::string describe() const = 0;
  /// This source, if its batches can be read ahead; null: they are made when
  /// they are asked for.
  virtual const FileData *asFiles() const { return nullptr; }
};

/// Random inputs: integers uniform in [low, high) and standard normal floats,
/// from a generator seeded by the seed, the microbatch's number first / (W b)
/// and the rank. They differ with the number of ranks.
std::unique_ptr<DataSource> makeSyntheticData(const plan::Plan &plan,
                                              uint64_t seed);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_FILES_DATASOURCE_H
