//===- Samples.h - the samples of one source, by number -------------------===//
#ifndef FSDP_RUNTIME_FILES_SAMPLES_H
#define FSDP_RUNTIME_FILES_SAMPLES_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/Files/SafeTensors.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::runtime {

/// The unit of weights and fractions is a millionth.
inline constexpr int64_t kMillion = 1'000'000;

/// Immutable; several threads may read concurrently.
class Samples {
public:
  virtual ~Samples() = default;
  virtual int64_t count() const = 0;
  /// The number of samples after which each has been taken once. Where inputs
  /// have different numbers of samples, each starts again by itself, and this
  /// is the number after which one of them has been taken once.
  virtual int64_t epoch() const { return count(); }
  /// Writes sample `number` to row `row` of a rank's batch. `batch` has the
  /// beginning of each input's row-major tensor, in the plan's order. Throws
  /// InputError and RunError as DataSource::inputs.
  virtual void read(int64_t number, int64_t row,
                    std::span<std::byte *const> batch) const = 0;
  /// Splits off the last `millionths` of the samples: returns the others, and
  /// these. Throws InputError if either part is empty.
  virtual std::pair<std::shared_ptr<const Samples>,
                    std::shared_ptr<const Samples>>
  split(int64_t millionths) const = 0;
  /// Throws InputError, which names the option, if inputs have different
  /// numbers of samples, so that a sample has no single place.
  virtual void requireEven(const char *option) const {}
  /// What fingerprint() and describe() of a DataSource say about a source.
  virtual std::string fingerprint() const = 0;
  virtual std::string describe() const = 0;
  /// The files that are read.
  virtual std::vector<std::string> paths() const = 0;
  /// The hash of the file; throws InputError if the source has several.
  virtual std::string hash() const = 0;
  /// SafeTensors::checkHash.
  virtual void checkHash() const {}
};

/// A safetensors file with one tensor for each of the plan's inputs and its
/// samples in dim 0. Sample k is row k modulo the rows of the tensor. An input
/// whose batch has b' rows where others have b takes b' rows at a time: those
/// of the whole batch, read with the batch's first row. Throws InputError for
/// other files. Borrows the plan.
std::shared_ptr<const Samples> openTensorSamples(const plan::Plan &plan,
                                                 const std::string &path);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_FILES_SAMPLES_H
