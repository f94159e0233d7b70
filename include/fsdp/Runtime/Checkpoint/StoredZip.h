//===- StoredZip.h - the archives that torch.save writes ------------------===//
//
// torch.save writes a zip whose records are stored uncompressed, in one folder,
// each with its CRC-32, and with its data aligned by a padding of Zs. This
// reader accepts only that form, and checks every byte, so that none can change
// unnoticed; PyTorch's own reader checks no CRC-32.
// https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_CHECKPOINT_STOREDZIP_H
#define FSDP_RUNTIME_CHECKPOINT_STOREDZIP_H

#include <cstddef>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::runtime {

/// The records of an archive by their name in its folder, borrowed from
/// `bytes`, which must be the whole archive. Throws InputError that begins with
/// `place`.
std::map<std::string, std::span<const std::byte>>
readStoredZip(const std::string &place, std::span<const std::byte> bytes);

struct ZipRecord {
  std::string name; ///< in the folder
  std::string_view data;
};

/// Writes the archive that torch.save would write, with further records of its
/// own, by calls of `write`.
void writeStoredZip(const std::vector<ZipRecord> &records,
                    const std::function<void(std::string_view)> &write);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CHECKPOINT_STOREDZIP_H
