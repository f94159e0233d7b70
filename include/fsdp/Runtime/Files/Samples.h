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

/// Parts of a million, of weights and fractions.
inline constexpr int64_t kMillion = 1'000'000;

/// Immutable; threads may read at a time.
class Samples {
public:
  virtual ~Samples() = default;
  virtual int64_t count() const = 0;
  /// Until all were taken once; where inputs have different numbers of samples,
  /// which then begin again each by itself, until one of them was.
  virtual int64_t epoch() const { return count(); }
  /// Writes sample `number` to row `row` of a rank's batch. `batch` has the
  /// beginning of each input's row-major tensor, in the plan's order. Throws
  /// InputError and RunError as DataSource::inputs.
  virtual void read(int64_t number, int64_t row,
                    std::span<std::byte *const> batch) const = 0;
  /// All but the last `millionths` of the samples, and these. Throws InputError
  /// where one part has none.
  virtual std::pair<std::shared_ptr<const Samples>,
                    std::shared_ptr<const Samples>>
  split(int64_t millionths) const = 0;
  /// Throws InputError, which names the option, if inputs have different
  /// numbers of samples, so that a sample is no unit that has one place.
  virtual void requireEven(const char *option) const {}
  /// What fingerprint() and describe() of a DataSource say of a source.
  virtual std::string fingerprint() const = 0;
  virtual std::string describe() const = 0;
  /// Of the file; throws InputError where the source has several.
  virtual std::string hash() const = 0;
  /// SafeTensors::checkHash.
  virtual void checkHash() const {}
};

/// A safetensors file with one tensor for each of the plan's inputs and its
/// samples in dim 0. Sample k is row k modulo the rows of the tensor. An input
/// whose batch has b' rows where others have b takes b' rows at a time: those
/// of the whole batch, at its first row. Throws InputError for other files.
/// Borrows the plan.
std::shared_ptr<const Samples> openTensorSamples(const plan::Plan &plan,
                                                 const std::string &path);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_FILES_SAMPLES_H
