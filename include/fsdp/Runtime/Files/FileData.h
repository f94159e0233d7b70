//===- FileData.h - inputs read from files --------------------------------===//
#ifndef FSDP_RUNTIME_FILES_FILEDATA_H
#define FSDP_RUNTIME_FILES_FILEDATA_H

#include "fsdp/Runtime/Files/DataSource.h"
#include "fsdp/Runtime/Files/SampleOrder.h"
#include "fsdp/Runtime/Files/Samples.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace fsdp::runtime {

/// Samples of files in the order of a SampleOrder.
class FileData final : public DataSource {
public:
  using Sources = std::vector<std::shared_ptr<const Samples>>;

  /// Borrows the plan. `weights` and `seed` are as for SampleOrder.
  FileData(const plan::Plan &plan, Sources sources,
           std::vector<int64_t> weights, std::optional<uint64_t> seed);

  std::vector<at::Tensor> inputs(int64_t first, int64_t rank) const override;
  int64_t epoch() const override;
  std::string fingerprint() const override;
  std::string describe() const override;
  const FileData *asFiles() const override { return this; }

  /// Bytes of a rank's batch, each input at a multiple of 64 bytes.
  size_t batchBytes() const { return bytes; }
  /// The same as inputs(), to memory of batchBytes(); calls nothing of torch.
  void fill(int64_t first, int64_t rank, std::span<std::byte> to) const;
  /// The inputs in memory that fill() wrote: views of it, or copies.
  std::vector<at::Tensor> view(std::span<std::byte> from) const;
  std::vector<at::Tensor> copy(std::span<const std::byte> from) const;

  const Sources &sources() const { return all; }

private:
  void fillRows(int64_t first, int64_t rank,
                std::span<std::byte *const> to) const;

  const plan::Plan &plan;
  Sources all;
  std::vector<int64_t> weights;
  std::optional<uint64_t> seed;
  SampleOrder order;
  std::vector<size_t> offsets; ///< of the inputs in a batch
  size_t bytes = 0;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_FILES_FILEDATA_H
